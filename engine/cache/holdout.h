// Held-out traffic: what a calibration is tried on (probation.h) and is not learnt from.
//
// Per layer that teaches, exact rows of QKV_HOLDOUT_PAGES whole pages in the model's dtype, and the queries of
// QKV_HOLDOUT_QUERIES tokens in fp32. One of the pages has the first tokens of a sequence, where one has come by:
// attention sinks are there. The others are a reservoir over every QKV_HOLDOUT_PAGE_EVERY-th page since the sample
// was begun. Of every QKV_HOLDOUT_QUERY_EVERY queries that are offered one takes a random one's place, so that many
// sequences are sampled, and old queries are replaced.
//
// Pages and queries are begun and dropped separately: pages are needed until a calibration has been tried, queries as
// long as pages are watched (page_watch.h).
//
// Memory is the caller's to account for (qkv_holdout_page_bytes, qkv_holdout_query_bytes): with 32 layers of 8 KV and
// 32 query heads of 128 in fp16, 50 MB and 8 MB.
//
// Threads: the caller's locks. What begins and drops is done with all layers held, the rest with one.
#ifndef QKV_ENGINE_CACHE_HOLDOUT_H
#define QKV_ENGINE_CACHE_HOLDOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/tensor.h"
#include "engine/codec/page.h"
#include "engine/codec/rope.h"

#define QKV_HOLDOUT_PAGES 6
#define QKV_HOLDOUT_PAGES_LEAST 2  // of each layer, before anything is tried
#define QKV_HOLDOUT_PAGE_EVERY 4   // pages, of which one is for the reservoir: the others teach
#define QKV_HOLDOUT_PATIENCE 64    // time-out in pages of a layer: waits no longer for one with first tokens
#define QKV_HOLDOUT_QUERIES 16
#define QKV_HOLDOUT_QUERY_EVERY 4

typedef struct qkv_holdout qkv_holdout;

typedef struct qkv_holdout_shape {
  uint32_t layers, kv_heads, q_heads, key_dim, value_dim;
  qkv_dtype dtype;
  qkv_rope rope;  // resolved; theta 0: none
} qkv_holdout_shape;

// `teaches` [layers] is copied. Nothing is held at first.
qkv_holdout *qkv_holdout_create(const qkv_holdout_shape *shape, const bool *teaches);
void qkv_holdout_destroy(qkv_holdout **holdout);

uint64_t qkv_holdout_page_bytes(const qkv_holdout *holdout);
uint64_t qkv_holdout_query_bytes(const qkv_holdout *holdout);
void qkv_holdout_begin_pages(qkv_holdout *holdout);  // anew where there are some
void qkv_holdout_begin_queries(qkv_holdout *holdout);
void qkv_holdout_drop_pages(qkv_holdout *holdout);

// Takes a full page's rows, k [64][kv_heads][key_dim] after RoPE and v [64][kv_heads][value_dim], or leaves them:
// false. The layer teaches, and pages are held (asserted).
bool qkv_holdout_page(qkv_holdout *holdout, uint32_t layer, uint64_t position, const float *k, const float *v);
// The same for one token's queries q [q_heads][key_dim]; queries are held (asserted).
bool qkv_holdout_query(qkv_holdout *holdout, uint32_t layer, uint64_t position, const float *q, bool before_rope);

// Whether a layer's sample is enough for a trial: QKV_HOLDOUT_PAGES_LEAST pages, one with first tokens among them,
// and queries. Time-outs in pages of the layer: QKV_HOLDOUT_PATIENCE for first tokens, `patience` for queries.
bool qkv_holdout_ready(const qkv_holdout *holdout, uint32_t layer, uint64_t patience);

// A copy of one layer's, for the caller to clear. k and v are [pages][64][kv_heads][dim], queries [tokens][q_heads]
// [key_dim] after RoPE. What is not held is left out.
typedef struct qkv_held {
  bool teaches;
  size_t pages, tokens;
  uint64_t positions[QKV_HOLDOUT_PAGES], stands[QKV_HOLDOUT_QUERIES];
  float *k, *v, *queries;
} qkv_held;
void qkv_holdout_copy(const qkv_holdout *holdout, uint32_t layer, qkv_held *held);
void qkv_held_clear(qkv_held *held);

// The queries of one KV head alone, as [tokens][q_heads / kv_heads][key_dim], and where they stand; returns the
// tokens. `queries` holds QKV_HOLDOUT_QUERIES.
size_t qkv_holdout_head_queries(const qkv_holdout *holdout, uint32_t layer, uint32_t kv_head, float *queries,
                                uint64_t stands[QKV_HOLDOUT_QUERIES]);

#endif
