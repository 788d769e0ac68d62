// A prefix in a session whose tokens are demoted by their attention: rows and queries go through a session in
// process, as a worker sends them, and rows come out of its pages.
//
// Threads: one at a time for each session.
#ifndef QKV_CLIENT_BENCH_TIERED_H
#define QKV_CLIENT_BENCH_TIERED_H

#include "client/bench/recode.h"
#include "engine/cache/session.h"

typedef struct qkvi_tiered qkvi_tiered;

// A session of the model, whose slot has the calibration; both are borrowed. `policy` is resolved, with a recent
// window of 0.
qkvi_tiered *qkvi_tiered_create(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose);
void qkvi_tiered_destroy(qkvi_tiered **tiered);

// Appends rows of a layer, dense, keys after RoPE, and then attends the queries of the same positions.
void qkvi_tiered_add(qkvi_tiered *tiered, uint32_t layer, uint64_t position, uint64_t tokens, const float *k,
                     const float *v, const float *q);
// Brings everything to an average of `bits` a coordinate, as Demote does.
void qkvi_tiered_demote(qkvi_tiered *tiered, double bits);
// What the pages of a layer now are for `tokens` tokens of it, as qkvi_recode.
void qkvi_tiered_read(qkvi_tiered *tiered, uint32_t layer, uint64_t tokens, const float *k, const float *v,
                      float *k_out, float *v_out, qkvi_recoded *sums);

#endif
