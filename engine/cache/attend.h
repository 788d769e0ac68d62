// Attention over what a layer holds: coded pages in the code domain, the exact tail in floating point.
//
// Per KV head, pages are walked in order with running softmax statistics (maximum, denominator), all query
// heads of the KV head together, in blocks of queries; K and V are never rebuilt. The result is partial: out
// and LSE (proto/qkv/v1/kv_cache.proto, AttendResult). A task is one KV head of one request; a batch of
// requests runs on the pool as one loop over all of their tasks. Where these are too few for the pool, a task is a
// range of 64 pages of one, and the partial results (64 MiB at most) are merged in order. Ranges that several layers
// of a batch share (page_range.h) are attended once for all requests that see them whole, have the same precision and
// soft cap, and at most QKV_QUERY_BLOCK / 2 rows a KV head. Numbers depend neither on how many threads there are, nor
// on what else is in the batch, nor on what is shared.
//
// Threads: pure on its inputs; the layer must not change meanwhile (session.h locks).
#ifndef QKV_ENGINE_CACHE_ATTEND_H
#define QKV_ENGINE_CACHE_ATTEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/pool.h"
#include "engine/base/tensor.h"
#include "engine/cache/layer.h"

typedef struct qkv_attend_options {
  double scale;             // 0: the model's
  uint64_t sliding_window;  // 0: the model's; else > 0
  double soft_cap;          // 0: the model's
  uint64_t begin, end;      // token range; end 0: to the end
  int64_t causal_offset;
  bool not_causal;
  qkv_precision precision;
} qkv_attend_options;

typedef struct qkv_attend {
  const qkv_layer *layer;
  uint64_t position;  // of query 0
  qkv_tensor q;       // [queries, q_heads, key_dim], checked with qkv_attend_check
  bool q_before_rope;
  bool shown;        // qkv_attend_show has observed its queries
  bool host_only;    // no device is asked (device.h), for which a thread would wait
  uint64_t earlier;  // queries of the turns before (qkv_attend_slice), which are counted with the last turn's
  bool continues;    // it is not the last turn
  qkv_attend_options options;
  float *out;  // [queries][q_heads][value_dim], dense
  float *lse;  // [queries][q_heads]
  // Where not NULL: called before each block of work, from any thread. Once it has said true, out and lse are left
  // unfinished.
  bool (*stopped)(const void *context);
  const void *stopped_context;
} qkv_attend;

// Observes the request's queries, by which the tiers of pages are selected (quality.h). For rows that are appended
// together with their queries: before the append. In all other cases attending does it. The layer need not be locked.
void qkv_attend_show(qkv_attend *request);

// Checks a request's limits; `out` and `lse` are not read. INVALID_ARGUMENT: "q.dims[1] is 3, the model tinylm
// has 8 q_heads", "options.scale is nan", "options.not_causal excludes a sliding window", "q[0, 3, 5] is inf".
qkv_status qkv_attend_check(const qkv_attend *request, qkv_error *error);

// The positions that a checked request reads, [*begin, *end) as far as the layer goes: what must be in memory
// (layer_spill.h) when it runs.
void qkv_attend_span(const qkv_attend *request, uint64_t *begin, uint64_t *end);

// Runs `count` checked requests. `pool` may be NULL: all on the caller.
void qkv_attend_run(qkv_pool *pool, const qkv_attend *requests, size_t count);

// Coded and exact bytes that the request reads: they decide which device it runs on, and how long it takes.
uint64_t qkv_attend_cost(const qkv_attend *request);

// Turns: a batch of many queries takes minutes, and its layers should not be locked for so long. Of `count` > 0
// requests, how many are worth about `cost` bytes, the first one at least; of the last of them *queries alone, a
// block of rows at least. Ranges that a request shares with the one before count once where one pass serves both.
size_t qkv_attend_take(const qkv_attend *requests, size_t count, uint64_t cost, uint64_t *queries);
// The cost for the next turn, after one of `cost` that took `ns`: turns become some 0.1 s long on any processor.
uint64_t qkv_attend_next_cost(uint64_t cost, uint64_t ns);
// A turn of the request: queries [first, first + count) alone, with their place in out and lse. And the request
// without positions from `end` on, for later turns to see what the first one saw.
qkv_attend qkv_attend_slice(const qkv_attend *request, uint64_t first, uint64_t count);
void qkv_attend_end_at(qkv_attend *request, uint64_t end);

#endif
