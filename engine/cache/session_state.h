// The fields of a session, for session.c and session_codings.c.
#ifndef QKV_ENGINE_CACHE_SESSION_STATE_H
#define QKV_ENGINE_CACHE_SESSION_STATE_H

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>

#include "engine/cache/session.h"

// `length` and `usage` are what the last append or truncation left, under a lock of their own that is held to copy
// them: a thread that asks for a session's info never waits for one that runs.
//
// `rows` is held by the thread that changes what rows the layer has, its coder or its tail (qkv_layer_access), or
// that needs them unchanged for longer than it reads the layer: appends while they code pages, truncations, forks. It
// is taken before `lock`, which excludes readers only while pages and rows become the layer's.
typedef struct locked_layer {
  pthread_mutex_t rows;
  pthread_rwlock_t lock;
  _Atomic unsigned waiting;  // threads, for one of the two
  qkv_layer layer;
  pthread_mutex_t info_lock;
  uint64_t length, durable;
  bool unsettled;
  qkv_layer_usage usage;
} locked_layer;

// What a session gets with its first use: an open session without rows takes less than 1 KiB.
typedef struct session_layers {
  uint32_t open[QKV_PREFIX_PAGE];  // of its token ids
  locked_layer at[];               // model->layers
} session_layers;

// What background work knows of a session's tiers (session_retier.h).
typedef struct session_tiers {
  _Atomic int64_t looked_ms;  // on the monotonic clock; 0: not yet
  bool aimed, demotable;      // fixed: pages may be brought to other tiers, and to lower ones where memory is short
  _Atomic bool settled, lowest;  // since its last use: nothing is to be done; the tiers are as low as they get
} session_tiers;

// What is known of the layers of a session that is folded (session_fold.h). `length` is written while no other thread
// has the session, the others with its lock `making`.
typedef struct folded_layers {
  uint64_t length;
  _Atomic uint64_t cost;  // bytes of the arena that unfolding takes
  uint64_t bytes;         // of the record
  uint64_t stored;        // bytes of all pages on the tier
  uint64_t pages;
} folded_layers;

#define QKVI_FOLDING UINT64_MAX
typedef struct session_fold {
  folded_layers *layers;     // of the last time; NULL: it never was folded. Freed with the session
  _Atomic uint64_t record;   // 0: it is not folded; QKVI_FOLDING: the record is being written
  _Atomic int64_t tried_ms;  // when it was last tried in vain, on the monotonic clock
  _Atomic bool wanted;       // a thread waits for the layers while they are being folded
} session_fold;

struct qkv_session {
  qkv_session_config config;
  const qkv_model *model;
  pthread_mutex_t codings_lock;  // of the list
  qkv_coding **codings;          // all that pages are written with, and those of pages to come
  size_t coding_count;
  pthread_rwlock_t codings_use;  // read by who has a coder without having its layer; written to drop some. Never
                                 // waited for to be written, nor is a layer by who writes it
  qkv_arena *arena;              // this block is its, too
  uint64_t serial;
  _Atomic uint64_t references;
  int64_t created_unix_ms;
  _Atomic int64_t last_used_ms;
  _Atomic uint64_t next_layer;   // that a step of re-tiering begins with
  _Atomic uint32_t last_layer;   // that was appended to or read
  _Atomic uint32_t turns;        // times that the first layer came after the last one
  _Atomic uint64_t tokens_cold;  // of all layers
  _Atomic uint64_t bytes_coded;  // in memory, of all layers, as they were last published
  _Atomic uint64_t bytes_exact;
  _Atomic uint64_t bytes_kept;    // both, with averages and full pages, without what others share
  _Atomic uint64_t bytes_stored;  // on the SSD
  _Atomic uint32_t unsettled;     // layers, likewise
  _Atomic uint64_t ttl_ms;
  _Atomic bool pinned;  // by the owner
  _Atomic bool staged;
  _Atomic uint64_t whole;
  _Atomic bool shares;  // pages with other sessions, or has
  bool detached;        // from the backing, before there were any layers
  qkv_recency_places places;
  session_tiers tiers;
  session_fold fold;
  _Atomic uint32_t truncations;
  qkv_session_tokens tokens;
  pthread_mutex_t making;  // of the layers, and of forks of the session: one at a time
  _Atomic(session_layers *) made;
  _Atomic uint16_t pins[];  // [model->layers]
};

// A layer of a session that has them.
static inline locked_layer *layer_at(const qkv_session *session, uint32_t layer) {
  session_layers *made = atomic_load_explicit(&session->made, memory_order_acquire);
  assert(made != NULL && layer < session->model->layers);
  return &made->at[layer];
}

// Of what is published: `length`, `durable`, `unsettled` and `usage`.
static inline void qkvi_session_lock_info(locked_layer *layer) {
  const int failed = pthread_mutex_lock(&layer->info_lock);
  assert(failed == 0);
  (void)failed;
}

static inline void qkvi_session_unlock_info(locked_layer *layer) {
  const int failed = pthread_mutex_unlock(&layer->info_lock);
  assert(failed == 0);
  (void)failed;
}

// With the layer locked: tells its ranges whether their pages stay in memory, as the session wants it now.
void qkvi_session_keep_ranges(qkv_session *session, uint32_t layer);

// Layers that no other thread has yet: empty, of memory of the arena that has been reserved; once they have their
// pages each is ended. And frees them.
session_layers *qkvi_session_new_layers(qkv_session *session);
void qkvi_session_end_new_layer(locked_layer *layer);
void qkvi_session_free_layers(qkv_session *session, session_layers *made);
// Counts what a folded session takes, by 1 or -1: its bytes on the tier in its account, its pages for all sessions.
void qkvi_session_count_folded(const qkv_session *session, int sign);
// Makes the layers of a folded session, with its lock `making`.
qkv_status qkvi_session_unfold_locked(qkv_session *session, uint64_t *headroom, qkv_error *error);

qkv_status qkvi_session_check_layer(const qkv_session *session, uint32_t layer, qkv_error *error);
// A use of the session.
void qkvi_session_touch_layer(qkv_session *session, uint32_t layer);

// The lock of a layer's rows (session_append.c).
void qkvi_session_lock_rows(locked_layer *layer);
void qkvi_session_unlock_rows(locked_layer *layer);

// Codings (session_codings.c): the one for pages to come, which differs where the model's calibration has changed;
// another coder for a layer that is locked to be written, and whether it is due, by the thread that has the lock of
// its rows; dropping those that nothing is coded by any more, now or another time; and all.
const qkv_coding *qkvi_session_current_coding(qkv_session *session);
bool qkvi_session_coder_is_old(const qkv_session *session, uint32_t layer);
void qkvi_session_renew_coder(qkv_session *session, uint32_t layer);
void qkvi_session_drop_unused(qkv_session *session);
void qkvi_session_drop_codings(qkv_session *session);

#endif
