// The forward pass: tokens in, logits out, keys and values through a qkvi_kv.
//
//   x = embedding[token]
//   per layer   x += Wo attention(rope(Wq n(x)), rope(Wk n(x)), Wv n(x))     n: RMSNorm with weight
//               x += Wd (silu(Wg n'(x)) * Wu n'(x))
//   logits = head n''(x)
//
// In fp32, matrices through OpenBLAS on one thread unless told otherwise: a daemon is busy on the others, and
// OpenBLAS's own spin between calls. RoPE turns coordinate i with i + head_dim / 2 ("rotate half").
//
// Threads: one at a time for each qkvi_forward.
#ifndef QKV_CLIENT_WORKER_FORWARD_H
#define QKV_CLIENT_WORKER_FORWARD_H

#include "client/worker/kv.h"
#include "client/worker/lm.h"

typedef struct qkvi_forward qkvi_forward;

// How many threads OpenBLAS has from now on, for all of the process; 0: one for each processor. It has one before.
void qkvi_forward_threads(int64_t threads);

// Scratch for batches of up to `tokens_max` tokens at positions below `positions_max`; `lm` is borrowed.
qkvi_forward *qkvi_forward_create(const qkvi_lm *lm, int64_t tokens_max, int64_t positions_max);
void qkvi_forward_destroy(qkvi_forward **forward);

// Runs tokens[0 .. count) at `position` on. `logits` is [wanted, vocabulary], of the last `wanted` of them, 0 to
// count; each row predicts the token after its own. Fails only where the cache fails.
qkv_status qkvi_forward_run(qkvi_forward *forward, const int32_t *tokens, int64_t count, int64_t position,
                            qkvi_kv *kv, int64_t wanted, float *logits, qkv_error *error);

#endif
