// What learner.c (traffic) and learner_run.c (calibrations) share.
#ifndef QKV_ENGINE_CACHE_LEARNER_INTERNAL_H
#define QKV_ENGINE_CACHE_LEARNER_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/cache/holdout.h"
#include "engine/cache/learner.h"
#include "engine/cache/model.h"
#include "engine/cache/probation.h"

typedef struct qkvi_taught_layer {
  pthread_mutex_t lock;
  bool teaches;
  _Atomic uint64_t tokens;  // seen
  _Atomic uint64_t learnt;  // of these, in the moments
  _Atomic uint64_t attends;
  _Atomic bool ready;  // enough is held out
} qkvi_taught_layer;

// Classes of pages that are measured: those with first tokens, and others. Both lists are in this order.
enum { QKVI_FIRST_PAGES, QKVI_OTHER_PAGES, QKVI_PAGE_CLASSES };

typedef struct qkvi_alarm {
  _Atomic uint32_t left;  // pages that are still to be measured; read without the lock
  double coded, data_free;
  uint32_t worse;  // of the pages that were measured
} qkvi_alarm;

struct qkv_learner {
  const qkv_model *model;
  qkv_calibration_shape shape;
  uint64_t first;  // tokens before the first calibration; 0: none is learnt
  bool samples;
  qkv_calibration_slot *slot;
  qkv_arena *arena;
  _Atomic(qkv_moments *) moments;  // each layer's under its lock, the pointer under any of them; NULL: none
  qkv_moments *studied;            // those that a calibration is being made of; changes under all layers' locks
  qkv_holdout *holdout;            // each layer's under its lock
  qkvi_taught_layer *layers;
  _Atomic uint64_t pages;
  _Atomic uint64_t due_at;  // tokens; UINT64_MAX: not before a drift
  _Atomic bool fresh;       // nothing has been learnt yet, or not since the last drift
  _Atomic uint32_t runs;
  _Atomic bool running, stopped;
  _Atomic bool has_pages, has_queries;  // change under all layers' locks
  _Atomic bool cramped;                 // there was no memory for a sample
  // What `state` says, for threads that only read it.
  _Atomic bool brought;  // in force or on trial
  _Atomic bool pending;  // one is on trial
  _Atomic bool retry;    // the one in force is to be tried
  _Atomic bool trying;   // it is being tried: the sample is needed, though `retry` may be off
  _Atomic bool renew;    // the sample is to be begun anew
  _Atomic bool notice;   // a withdrawal is to be reported

  pthread_mutex_t error_lock;           // of the next
  uint32_t measured_as;                 // frame and budget of the pages that are measured: those of the first one
  double error, settled;                // running mean of rows' errors; its value once settled
  double attention, attention_settled;  // running mean and settled mean of squared attention errors
  uint64_t measures, attention_measures;
  qkv_page_watch watch;
  qkvi_alarm alarms[QKVI_PAGE_CLASSES];
  uint64_t retry_after;  // pages, before which an alarm does not lead to another trial

  pthread_mutex_t state_lock;  // of the next
  qkv_calibration_state state;
  const qkv_calibration *candidate;  // on trial
  uint32_t offered;                  // version that was brought last; 0: none
  qkv_calibration_source offered_from;
  uint32_t withdrawn;  // version
  uint32_t starts;     // times that learning started over; `due_at` and `fresh` change under the lock
  uint32_t failures;   // of trials, in a row; without the lock, of the thread that runs
  qkv_kind kinds[QKV_LEARNER_KINDS];
  size_t kinds_noted;
  qkv_section_wants wants;  // of sessions
  _Atomic uint64_t try_at;  // pages, before which nothing is tried
  bool rope_looked;         // by the thread that runs
};

// All layers, in their order.
void qkvi_learner_lock_layers(qkv_learner *learner);
void qkvi_learner_unlock_layers(qkv_learner *learner);
// Frees the moments, and resets what was counted. Moments that a calibration is being made of are freed after it.
void qkvi_learner_forget(qkv_learner *learner);
// Everything is learnt anew, from rows that come.
void qkvi_learner_start_over(qkv_learner *learner);
// Frees what was held out, unless it is still wanted.
void qkvi_learner_drop_sample(qkv_learner *learner);
// Whether rows that are taught now will ever be used; whether held-out ones will.
bool qkvi_learner_wants(const qkv_learner *learner);
bool qkvi_learner_samples(const qkv_learner *learner);
// Takes the calibration of a version, which has turned out worse than the data-free code, out of force. Not where it
// is trusted, or another one is in force by now.
void qkvi_learner_withdraw(qkv_learner *learner, uint32_t version, const char *text);
// The calibration in force is to be tried, unless there is none or it is trusted.
void qkvi_learner_retry(qkv_learner *learner);
// Errors settle anew.
void qkvi_learner_settle(qkv_learner *learner);

#endif
