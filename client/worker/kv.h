// Where a forward pass keeps its keys and values: the one thing it asks of a cache.
//
// Implementations embed a qkvi_kv as their first member: exact.h (the worker's own, fp32), remote.h (the daemon's)
// and score.c's (the daemon's for a prefix, the worker's for the rest).
#ifndef QKV_CLIENT_WORKER_KV_H
#define QKV_CLIENT_WORKER_KV_H

#include <stdint.h>

#include "engine/base/status.h"

typedef struct qkvi_kv qkvi_kv;

// One layer of `tokens` tokens from `position` on, dense fp32 after RoPE: q [tokens, q_heads, head_dim], k and v
// [tokens, kv_heads, head_dim].
typedef struct qkvi_kv_rows {
  int64_t layer, position, tokens;
  const float *q, *k, *v;
} qkvi_kv_rows;

struct qkvi_kv {
  // Takes the keys and values in, then attends the queries causally: out is [tokens, q_heads, head_dim].
  qkv_status (*step)(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error);
};

#endif
