// Self-calibration: a model's calibration learnt from its own traffic.
//
// Pages that are sealed and queries that are attended leave moments behind (codec/moments.h): sums, nothing of single
// rows. After enough tokens a calibration is made from them, off the request path, and put into the model's slot;
// pages to come are coded with it. Another one follows when `growth` times as many tokens have been seen, up to
// QKV_LEARNER_RUNS, and whenever the measured error of the pages has grown by QKV_LEARNER_DRIFT: then everything is
// learnt anew, from rows that come after.
//
// A calibration that was brought by a file or by RegisterModel is not replaced.
//
// All sessions of a model teach one learner, whatever their tenant, but for those whose policy keeps out. Layers that
// stay exact, or are kept out by the model's own policy, are not waited for; their part is the data-free code.
//
// Moments take memory when the first page teaches them (qkv_moments_bytes: 100 MB for 32 layers with 8 heads of 128),
// out of the budget for KV; where that is full, nothing is learnt. They go when no calibration is to follow: after
// the last one, until a drift, and where one has been brought.
//
// Threads: any. Whoever finds a layer's moments in use goes on without.
#ifndef QKV_ENGINE_CACHE_LEARNER_H
#define QKV_ENGINE_CACHE_LEARNER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/cache/calibration_slot.h"
#include "engine/codec/codec.h"
#include "engine/codec/moments.h"

#define QKV_LEARNER_RUNS 3
#define QKV_LEARNER_GROWTH 4
#define QKV_LEARNER_DRIFT 1.5

typedef struct qkv_learner qkv_learner;

// `tokens` >= 1: rows that every layer has been taught before the first calibration, of those that are to teach:
// `teaches` [shape->layers], copied, at least one (asserted). Calibrations go into `slot`.
qkv_learner *qkv_learner_create(const qkv_calibration_shape *shape, const bool *teaches, uint64_t tokens,
                                qkv_calibration_slot *slot, qkv_arena *arena);
void qkv_learner_destroy(qkv_learner **learner);
// None is due any more, and one that runs ends before its next head: CANCELLED.
void qkv_learner_stop(qkv_learner *learner);

// A page that has just been sealed: k [tokens][kv_heads][key_dim] after RoPE, v [tokens][kv_heads][value_dim], and
// what became of it. Looks at some of its rows.
void qkv_learner_page(qkv_learner *learner, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                      const float *v, const qkv_coder *coder, const void *page);
// How many of an attend's query tokens are wanted: up to 32 of every other attend of a layer until the first
// calibration, then one of every 64th.
size_t qkv_learner_wants_queries(qkv_learner *learner, uint32_t layer);
// q [q_heads][key_dim] of one token, after RoPE unless `before_rope`.
void qkv_learner_queries(qkv_learner *learner, uint32_t layer, uint64_t position, const float *q, bool before_rope);

// Whether a calibration is due; cheap.
bool qkv_learner_due(const qkv_learner *learner);
// Makes it and puts it into the slot; takes seconds for a large model. One at a time: false where one is running or
// there is nothing to learn from (*error is left alone), or where it failed (*error says why; it is due again after
// as many tokens more).
bool qkv_learner_run(qkv_learner *learner, qkv_error *error);

typedef struct qkv_learner_stats {
  uint64_t tokens;  // taught since the last drift, of the teaching layer that has the fewest
  uint64_t bytes;   // that moments take now
  uint32_t runs;    // calibrations made
  double error;     // relative squared error of pages' keys and values, lately; 0: not known
} qkv_learner_stats;
qkv_learner_stats qkv_learner_read(const qkv_learner *learner);

#endif
