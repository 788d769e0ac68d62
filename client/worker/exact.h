// The worker's own cache: every row in fp32, attention in fp32. What the daemon's answers are compared with.
//
// Threads: one at a time for each cache.
#ifndef QKV_CLIENT_WORKER_EXACT_H
#define QKV_CLIENT_WORKER_EXACT_H

#include "client/worker/kv.h"
#include "client/worker/lm.h"

typedef struct qkvi_exact qkvi_exact;

// A cache for positions below `positions_max`; `lm` is borrowed.
qkvi_exact *qkvi_exact_create(const qkvi_lm *lm, int64_t positions_max);
void qkvi_exact_destroy(qkvi_exact **exact);

// The cache for a forward pass: step() appends, then attends to everything from position 0 on. Never fails.
qkvi_kv *qkvi_exact_kv(qkvi_exact *exact);

void qkvi_exact_append(qkvi_exact *exact, const qkvi_kv_rows *rows);

// Rows of a layer from `position` on, [.., kv_heads, head_dim].
const float *qkvi_exact_k(const qkvi_exact *exact, int64_t layer, int64_t position);
const float *qkvi_exact_v(const qkvi_exact *exact, int64_t layer, int64_t position);

// A partial attention of rows->q over the positions from `begin` on, causally: out [tokens, q_heads, head_dim],
// lse [tokens, q_heads] (natural log). Each query sees at least itself.
void qkvi_exact_attend(qkvi_exact *exact, const qkvi_kv_rows *rows, int64_t begin, float *out, float *lse);

// Merges partial attentions over disjoint positions, `heads` vectors of `dim`, into the first. A partial over
// nothing has the lse -inf.
void qkvi_merge(float *out, float *lse, const float *other_out, const float *other_lse, int64_t heads, int64_t dim);

#endif
