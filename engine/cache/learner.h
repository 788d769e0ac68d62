// Self-calibration: a model's calibration learnt from its own traffic, and the probation of every calibration, learnt
// or brought.
//
// Pages that are sealed and queries that are attended leave moments behind (codec/moments.h): sums, nothing of single
// rows, and of outliers nothing at all. Some pages and queries do not: they are held out (holdout.h). After enough
// tokens a calibration is made from the moments, off the request path, and tried on what was held out (probation.h).
// A calibration that is better than the data-free code is put into the model's slot; pages to come are coded with it.
// Another one follows when `growth` times as many tokens have been seen, up to QKV_LEARNER_RUNS.
//
// A calibration that is brought, by RegisterModel or a file, is tried in the same way as soon as enough traffic has
// been held out, about QKV_HOLDOUT_PAGES pages of every layer, and used from then on; until then pages are coded as
// before. Its owner may say that it is to be trusted: then it is used at once, and neither tried nor withdrawn. One
// that comes back from a data directory is used at once, as it has been before, and tried when there is traffic. What
// was brought is not replaced by what is learnt, unless it is refused.
//
// The calibration in force is watched (page_watch.h): one head of every QKV_LEARNER_WATCH_EVERY-th page is measured,
// and of every page with the first tokens of a sequence, where attention sinks are. A page that misses more of
// attention than QKV_LEARNER_WORSE times what the data-free code would raises an alarm: the next
// QKV_LEARNER_ALARM_PAGES pages are measured, too, or as many with first tokens as the model has layers. Where these
// are worse together, the calibration is withdrawn at once, and pages that later appends seal are data-free; where
// they are not, it is tried again on fresh pages, so that a head that has changed falls back alone. Where the error
// of pages has grown by QKV_LEARNER_DRIFT since it settled, everything is learnt anew from rows that come after; the
// calibration stays in force until then.
//
// All sessions of a model teach one learner, whatever their tenant, but for those whose policy keeps out. Layers that
// stay exact, that the model codes without a calibration, or that its own policy keeps out, are not waited for; their
// part is the data-free code.
//
// Moments and the sample take memory when the first page teaches them (qkv_moments_bytes: 50 MB for 32 layers with 8
// heads of 128; qkv_holdout_page_bytes: 50 MB), out of the budget for KV; where that is full, nothing is learnt or
// tried. They go when no calibration is to follow: after the last one, until a drift, and where one has been brought
// and tried. The queries that pages are watched with stay.
//
// Threads: any. A thread that finds a layer's moments in use skips them.
#ifndef QKV_ENGINE_CACHE_LEARNER_H
#define QKV_ENGINE_CACHE_LEARNER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/cache/calibration_slot.h"
#include "engine/cache/page_watch.h"
#include "engine/codec/codec.h"
#include "engine/codec/moments.h"

#define QKV_LEARNER_RUNS 3
#define QKV_LEARNER_GROWTH 4
#define QKV_LEARNER_DRIFT 1.5
#define QKV_LEARNER_KINDS 4  // of sessions that a calibration is tried with; the model's rungs are more (probation.h)
#define QKV_LEARNER_WATCH_EVERY 16
#define QKV_LEARNER_ALARM_PAGES 16
#define QKV_LEARNER_ALARM_FIRST 4        // at least, else as many as the model has layers,
#define QKV_LEARNER_ALARM_FIRST_MOST 32  // at most so many
#define QKV_LEARNER_WORSE 1.1
#define QKV_LEARNER_TEXT_MAX 256

typedef struct qkv_learner qkv_learner;
typedef struct qkv_model qkv_model;    // model.h
typedef struct qkv_policy qkv_policy;  // the same

typedef struct qkv_learner_config {
  const qkv_model *model;      // outlives the learner
  const bool *teaches;         // [layers], copied, at least one: whose rows are sampled
  bool samples;                // whether any are, by the model's policy; if not, nothing is tried
  uint64_t tokens;             // rows that every layer has been taught before the first calibration; 0: never
  qkv_calibration_slot *slot;  // calibrations go into it
  qkv_arena *arena;
} qkv_learner_config;

qkv_learner *qkv_learner_create(const qkv_learner_config *config);
void qkv_learner_destroy(qkv_learner **learner);
// No calibration is due any more, and one that runs ends before its next head: CANCELLED.
void qkv_learner_stop(qkv_learner *learner);

// ---- Traffic ----

// A session of this policy, resolved, and purpose (of coding.h) is opened: calibrations are to be tried so.
void qkv_learner_note_kind(qkv_learner *learner, const qkv_policy *policy, int purpose);
// A page that has just been sealed: k [tokens][kv_heads][key_dim] after RoPE, v [tokens][kv_heads][value_dim], and
// what became of it. Looks at some of its rows; what it measures is added to `watch`.
void qkv_learner_page(qkv_learner *learner, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                      const float *v, const qkv_coder *coder, const void *page, qkv_page_watch *watch);
// How many of an attend's query tokens are wanted: up to 32 of every other attend of a layer until the first
// calibration, then one of every 64th.
size_t qkv_learner_wants_queries(qkv_learner *learner, uint32_t layer);
// q [q_heads][key_dim] of one token, after RoPE unless `before_rope`.
void qkv_learner_queries(qkv_learner *learner, uint32_t layer, uint64_t position, const float *q, bool before_rope);

// ---- Calibrations ----

// Where a calibration comes from. The values are those of qkv.v1.CalibrationState.Source.
typedef enum qkv_calibration_source {
  QKV_CALIBRATION_NONE,
  QKV_CALIBRATION_LEARNT,
  QKV_CALIBRATION_REGISTERED,
  QKV_CALIBRATION_FILE,
  QKV_CALIBRATION_STORED  // in a data directory
} qkv_calibration_source;

// Brings a calibration, which fits the model. Bringing the last one again changes nothing, unless it is trusted now.
void qkv_learner_bring(qkv_learner *learner, const qkv_calibration *calibration, qkv_calibration_source source,
                       bool trusted);
// The version of the one that was brought last; 0: none was.
uint32_t qkv_learner_brought(qkv_learner *learner);
// The one that waits for its trial, with a reference; NULL: none does.
const qkv_calibration *qkv_learner_on_trial(qkv_learner *learner);

// The outcome of qkv_learner_run.
typedef enum qkv_learner_end {
  QKV_LEARNER_NOTHING,   // there was nothing to do, or a calibration was brought meanwhile
  QKV_LEARNER_FAILED,    // or was called off: `error`
  QKV_LEARNER_ACCEPTED,  // or is still as it was
  QKV_LEARNER_REFUSED,   // and data-free code, or the calibration before, stays
  QKV_LEARNER_WITHDRAWN  // was in force
} qkv_learner_end;

typedef struct qkv_learner_outcome {
  qkv_learner_end end;
  qkv_calibration_source source;
  bool made;                // from what was learnt, just now
  uint32_t version;         // in force; of the one that was refused or withdrawn
  uint64_t tokens;          // that it was learnt from
  uint32_t parts, dropped;  // probation.h
  double error, data_free;
  double archive_error, archive_data_free;  // the same
  bool archive_refused;                     // in this trial
  char text[QKV_LEARNER_TEXT_MAX];          // why not; of the part that did worst
  char rope[QKV_LEARNER_TEXT_MAX];  // evidence against the model's RoPE, the first time that it is seen; else ""
  qkv_error error_text;
} qkv_learner_outcome;

// Whether a calibration is due to be made or tried, or an outcome is to be reported; cheap.
bool qkv_learner_due(const qkv_learner *learner);
// The most memory that it takes until it is done.
uint64_t qkv_learner_cost(const qkv_learner *learner);
// Does what is due; takes seconds for a large model. One at a time. After a failure a calibration is due again after
// as many tokens more, a trial after some pages more.
void qkv_learner_run(qkv_learner *learner, qkv_learner_outcome *outcome);

// ---- What is known ----

typedef struct qkv_learner_stats {
  uint64_t tokens;  // taught or held out since the last drift, of the teaching layer that has the fewest
  uint64_t bytes;   // that moments and the sample take now
  uint32_t runs;    // calibrations made
  double error;     // relative squared error of recent pages' keys and values; 0: not known
} qkv_learner_stats;
qkv_learner_stats qkv_learner_read(const qkv_learner *learner);

typedef struct qkv_calibration_state {
  qkv_calibration_source source;  // of the one in force
  uint32_t version;               // 0: none, pages are data-free
  int64_t since_unix_ms;
  uint64_t tokens;  // that it was learnt from
  bool trusted;
  bool tried;                          // the next four are known
  uint32_t parts, dropped;             // of heads; of these, those that are data-free
  double error, data_free;             // of attention, on held-out traffic
  bool archive_refused;                // sessions to be fetched do not get the archive codec (probation.h)
  uint32_t on_trial;                   // version of the one that waits for its trial; 0: none
  uint64_t accepted;                   // times that one was put in force
  uint64_t refused;                    // refused or withdrawn
  char refusal[QKV_LEARNER_TEXT_MAX];  // the last one; "": none
  qkv_page_watch watch;                // of recently sealed pages
  char rope[QKV_LEARNER_TEXT_MAX];     // evidence against the model's RoPE; "": none, or not checked yet
} qkv_calibration_state;
void qkv_learner_read_state(const qkv_learner *learner, qkv_calibration_state *state);

#endif
