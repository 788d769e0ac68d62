// The fields of a session.
#ifndef QKV_ENGINE_CACHE_SESSION_STATE_H
#define QKV_ENGINE_CACHE_SESSION_STATE_H

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "engine/cache/session.h"
#include "engine/cache/session_kind.h"
#include "engine/cache/trunk.h"

// Its length (qkvi_length_of) and `usage` are what the last append or truncation left, under a lock of their own that
// is held to copy them: a thread that asks for a session's info never waits for one that runs.
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
  uint64_t durable;
  bool unsettled;
  qkv_layer_usage usage;
} locked_layer;

// What a session gets with its first use.
typedef struct session_layers {
  uint32_t open[QKV_PREFIX_PAGE];  // of its token ids
  locked_layer at[];               // model->layers, and behind them as many lengths
} session_layers;

// As they were published, next to each other, because lookups read those of many sessions; and a layer's own, which
// is written with `info_lock`.
static inline _Atomic uint64_t *qkvi_session_lengths(session_layers *layers, uint32_t count) {
  return (_Atomic uint64_t *)(layers->at + count);
}

static inline _Atomic uint64_t *qkvi_length_of(locked_layer *layer) {
  const qkv_layer_config *config = &layer->layer.config;
  return (_Atomic uint64_t *)(layer + (config->model->layers - config->layer)) + config->layer;
}

// What background work knows of a session's tiers (session_retier.h).
typedef struct session_tiers {
  _Atomic int64_t looked_ms;  // on the monotonic clock; 0: not yet
  bool aimed, demotable;      // fixed: pages may be brought to other tiers, and to lower ones where memory is short
  _Atomic bool settled, lowest;  // since its last use: nothing is to be done; the tiers are as low as they get
} session_tiers;

// What a session has unless it is folded (session_fold.h). A thread that has a reference to the session never sees it
// go: folding takes it away while no other thread has one.
typedef struct session_working {
  pthread_mutex_t codings_lock;  // of the list
  qkv_coding **codings;          // all that pages are written with, and those of pages to come
  size_t coding_count;
  pthread_rwlock_t codings_use;   // read by who has a coder without having its layer; written to drop some. Never
                                  // waited for to be written, nor is a layer by who writes it
  _Atomic uint64_t next_layer;    // that a step of re-tiering begins with
  _Atomic uint32_t last_layer;    // that was appended to or read
  _Atomic uint32_t turns;         // times that the first layer came after the last one
  _Atomic uint64_t tokens_cold;   // of all layers
  _Atomic uint64_t bytes_coded;   // in memory, of all layers, as they were last published
  _Atomic uint64_t bytes_shared;  // of these, with other sessions in memory
  _Atomic uint64_t bytes_exact;
  _Atomic uint64_t bytes_kept;    // both, with averages and full pages, without what others share
  _Atomic uint64_t bytes_stored;  // on the SSD
  _Atomic uint32_t unsettled;     // layers, likewise
  _Atomic bool shares;            // pages with other sessions, or has
  _Atomic int64_t fold_tried_ms;  // when it was last tried in vain to fold it, on the monotonic clock
  qkv_recency_places places;      // in the lists of what is in memory
  session_tiers tiers;
  qkv_session_tokens tokens;
  uint64_t serial;               // of a session without a backing
  _Atomic uint32_t truncations;  // since it was folded, while threads have references
  _Atomic(session_layers *) made;
  _Atomic uint16_t pins[];  // [model->layers]
} session_working;

// All that a folded session takes of memory, but for its places in tables and, behind its name, its root: fields are
// ordered by size. What is `folded_...` is of a session that is folded, and written while no other thread has the
// session; `holder`, with the lock of session_working.c, likewise. One whose numbers are too large for the fields is
// not folded.
struct qkv_session {
  // Its working state; or, with the lowest bit set, it is folded: QKVI_FOLDING, the record is being written; else its
  // pages' coding, or, with QKVI_FOLD_KEPT, what sessions that keep the same have in common (session_codings.c).
  _Atomic uintptr_t state;
  const qkvi_session_kind *kind;
  uint64_t id;
  _Atomic int64_t last_used_ms;
  _Atomic uint64_t ttl_ms;
  _Atomic uint64_t whole;
  uint32_t folded_length;           // the next position of every layer
  uint32_t folded_pages;            // of all layers, without those of its trunk
  uint32_t folded_stored;           // bytes of all pages on the tier, the lower bits
  qkv_prefix_holder folded_holder;  // its place in the index of prefixes
  _Atomic uint32_t references;
  qkv_recency_standing standing;
  uint32_t created_low;  // unix, ms
  uint16_t created_high;
  uint8_t folded_stored_high;
  bool folded_ids;      // it has token ids, or hashes of them
  uint8_t slot;         // session_slots.h
  bool salted;          // its root is not its kind's
  _Atomic bool pinned;  // by the owner
  _Atomic bool staged;
  _Atomic bool fold_wanted;  // a thread waits for the layers while they are being folded
  bool detached;             // from the backing, while there were no layers
  bool closed;               // it has no place in the index of prefixes any more; with the lock of session_working.c
  bool making;               // qkvi_session_lock_making
  bool joined;               // the store has it; with the lock of recency.c
  char name[];
};
enum { QKVI_FOLDED = 1, QKVI_FOLDING = 1, QKVI_FOLD_KEPT = 2 };

static inline size_t qkvi_session_bytes(size_t name, bool salted) {
  const size_t bytes = offsetof(qkv_session, name) + name + 1, aligned = (bytes + 7) / 8 * 8;
  return salted ? aligned + sizeof(qkv_prefix_hash) : bytes;
}

static inline size_t qkvi_session_bytes_of(const qkv_session *session) {
  return qkvi_session_bytes(strlen(session->name), session->salted);
}

static inline uint64_t qkvi_session_stored(const qkv_session *session) {
  return (uint64_t)session->folded_stored_high << 32 | session->folded_stored;
}

static inline size_t qkvi_working_bytes(const qkv_model *model) {
  return sizeof(session_working) + model->layers * sizeof(_Atomic uint16_t);
}

// NULL: it is folded.
static inline session_working *qkvi_working(const qkv_session *session) {
  const uintptr_t state = atomic_load_explicit(&session->state, memory_order_acquire);
  return (session_working *)(state & ((state & QKVI_FOLDED) - 1));  // all bits, or none
}

// A layer of a session that has them.
static inline locked_layer *layer_at(const qkv_session *session, uint32_t layer) {
  const session_working *working = qkvi_working(session);
  session_layers *made = working == NULL ? NULL : atomic_load_explicit(&working->made, memory_order_acquire);
  assert(made != NULL && layer < session->kind->model->layers);
  return &made->at[layer];
}

// Of what is published: the length where it goes with the others, `durable`, `unsettled` and `usage`.
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

// Of memory of the arena that has been reserved, and that no other thread has yet: a working state without codings
// and layers; its layers, empty, each of which is ended once it has its pages. And frees both.
session_working *qkvi_session_new_working(qkv_session *session);
session_layers *qkvi_session_new_layers(qkv_session *session, session_working *working);
void qkvi_session_end_new_layer(locked_layer *layer);
void qkvi_session_free_working(qkv_session *session, session_working *working);
// Bytes of the arena that a working state takes, without layers.
uint64_t qkvi_session_working_cost(const qkvi_session_kind *kind);
// Makes it the session's, whose place in the index of prefixes it takes over.
void qkvi_session_set_working(qkv_session *session, session_working *working);
// Counts what a folded session takes, by 1 or -1: its bytes on the tier in its account, its pages for all sessions; a
// trunk's ranges count theirs.
void qkvi_session_count_folded(const qkv_session *session, int sign);
// What a folded session's trunk has in memory, of a layer or of QKVI_TRUNK_LAYERS.
qkvi_trunk_held qkvi_session_read_held(const qkv_session *session, uint32_t layer);
// Of a folded session: usage, and lengths where that is not NULL.
void qkvi_session_read_folded(const qkv_session *session, qkv_session_info *info, uint64_t *lengths);
// Publishes what a layer has become, which is locked, or which no other thread has yet. The working state is the
// session's, or is to be.
void qkvi_session_publish(qkv_session *session, session_working *working, locked_layer *layer);
// Makes the working state of a folded session, with its lock of making.
qkv_status qkvi_session_unfold_locked(qkv_session *session, uint64_t *headroom, qkv_error *error);

// The lock of making layers, and of forks and truncations of the session: one at a time. `try`: false where another
// thread has it.
void qkvi_session_lock_making(qkv_session *session);
bool qkvi_session_try_making(qkv_session *session);
void qkvi_session_unlock_making(qkv_session *session);

qkv_status qkvi_session_check_layer(const qkv_session *session, uint32_t layer, qkv_error *error);
// A use of the session.
void qkvi_session_touch_layer(qkv_session *session, uint32_t layer);

// The lock of a layer's rows (session_append.c).
void qkvi_session_lock_rows(locked_layer *layer);
void qkvi_session_unlock_rows(locked_layer *layer);

// Codings (session_codings.c): how pages of this calibration (NULL: data-free) are coded, and pages to come, which
// differs where the model's calibration has changed; another coder for a layer that is locked to be written, and
// whether it is due, by the thread that has the lock of its rows; dropping those that nothing is coded by any more,
// now or another time; and all.
const qkv_coding *qkvi_working_coding(const qkvi_session_kind *kind, session_working *working,
                                      const qkv_calibration *calibration);
const qkv_coding *qkvi_working_current_coding(const qkvi_session_kind *kind, session_working *working);
bool qkvi_session_coder_is_old(const qkv_session *session, uint32_t layer);
void qkvi_session_renew_coder(qkv_session *session, uint32_t layer);
void qkvi_session_drop_unused(qkv_session *session);
void qkvi_working_drop_codings(session_working *working);
// Of a session that is folded: the codings of its pages and its trunk, whose reference passes over, are kept, in the
// `state` that is returned; the codings are the working state's, too; and all are given up.
uintptr_t qkvi_session_keep_folded(const qkv_session *session, const session_working *working, qkvi_trunk *trunk);
void qkvi_session_take_codings(uintptr_t state, session_working *working);
void qkvi_session_drop_kept(uintptr_t state);
// The trunk in it; NULL: none. Where other threads have the session: between the two calls it stays as it is, with a
// lock that is held only where the trunk is not NULL.
qkvi_trunk *qkvi_session_trunk(uintptr_t state);
const qkvi_trunk *qkvi_session_hold_trunk(const qkv_session *session);
void qkvi_session_release_trunk(const qkv_session *session);

#endif
