// The forward pass: bytes in, logits out, keys and values through a qkvi_kv.
//
//   x = embedding[byte]
//   per layer   x += Wo attention(rope(Wq n(x)), rope(Wk n(x)), Wv n(x))     n: RMSNorm with weight
//               x += Wd (silu(Wg n'(x)) * Wu n'(x))
//   logits = head n''(x)
//
// In fp32, matrices through OpenBLAS on one thread: the daemon is busy on the others, and OpenBLAS's own spin
// between calls. RoPE turns coordinate i with i + head_dim / 2 ("rotate half").
//
// Threads: one at a time for each qkvi_forward.
#ifndef QKV_CLIENT_WORKER_FORWARD_H
#define QKV_CLIENT_WORKER_FORWARD_H

#include "client/worker/kv.h"
#include "client/worker/lm.h"

typedef struct qkvi_forward qkvi_forward;

// Scratch for batches of up to `tokens_max` tokens at positions below `positions_max`; `lm` is borrowed.
qkvi_forward *qkvi_forward_create(const qkvi_lm *lm, int64_t tokens_max, int64_t positions_max);
void qkvi_forward_destroy(qkvi_forward **forward);

// Runs bytes[0 .. tokens) at `position` on. `logits` is [tokens, 256]; row i predicts the byte after bytes[i].
// Fails only where the cache fails.
qkv_status qkvi_forward_run(qkvi_forward *forward, const uint8_t *bytes, int64_t tokens, int64_t position,
                            qkvi_kv *kv, float *logits, qkv_error *error);

#endif
