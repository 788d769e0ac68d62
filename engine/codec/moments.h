// Moments: what calibration learns from, running sums over the rows of one model.
//
// Per layer and KV head: of keys before RoPE and of values the mean and the covariance; of queries before RoPE the
// mean and the second moment over all query heads of the KV head, not centred. Nothing of single rows is kept, nor of
// positions: what RoPE makes of these moments follows from them (turned.h).
//
// Sums are in double, off a shift close to the mean, blocks of rows in float before they are added.
//
// Outliers are left out of keys' and values' moments, as pages keep them apart from their codes (outliers.h): a few
// of them would make most of a covariance, and the codes' bits would go where they are. A row is one whose squared
// distance from the mean so far is above a bound that usual rows set (distance_bound.h); the first tokens of a
// sequence, where attention sinks are, may be left out by their position. What is left out of one head's keys may be
// in its values and in other heads.
//
// Cost: per row of width d, d^2 / 2 multiply-adds; memory as qkv_moments_bytes says, about 4 d^2 bytes for each of
// the three per layer and KV head: 50 MB for 32 layers with 8 heads of 128.
//
// Threads: different layers may be added to at the same time; the caller serializes the rest.
#ifndef QKV_ENGINE_CODEC_MOMENTS_H
#define QKV_ENGINE_CODEC_MOMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/calibration.h"

typedef struct qkv_moments qkv_moments;

// The shape is resolved and within a calibration's limits (asserted).
size_t qkv_moments_bytes(const qkv_calibration_shape *shape);
qkv_moments *qkv_moments_create(const qkv_calibration_shape *shape);
void qkv_moments_destroy(qkv_moments **moments);
const qkv_calibration_shape *qkv_moments_shape(const qkv_moments *moments);

// Keys and values of tokens before `position` are left out from now on.
void qkv_moments_leave_out_before(qkv_moments *moments, uint64_t position);

// Rows of one layer at positions from `position` on, dense and finite: k [tokens][kv_heads][key_dim],
// v [tokens][kv_heads][value_dim], keys after RoPE unless `before_rope`.
void qkv_moments_add(qkv_moments *moments, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                     const float *v, bool before_rope);
// q [tokens][q_heads][key_dim].
void qkv_moments_add_queries(qkv_moments *moments, uint32_t layer, uint64_t position, size_t tokens, const float *q,
                             bool before_rope);

// Adds all that `from` has; both are of one shape.
void qkv_moments_merge(qkv_moments *into, const qkv_moments *from);
// What was added so far counts `factor` times, 0 <= factor <= 1.
void qkv_moments_fade(qkv_moments *moments, double factor);

// Tokens whose keys and values were added, or left out, of the layer that has the fewest of those that have any, as
// far as they still count. 0: nothing was added.
double qkv_moments_tokens(const qkv_moments *moments);

typedef enum qkv_moments_kind { QKV_MOMENTS_K, QKV_MOMENTS_V, QKV_MOMENTS_Q } qkv_moments_kind;

// Of one head: mean [dim], and second [dim][dim], the covariance of K and V, the second moment of Q, which is not
// centred. Returns the rows that they are of; 0: all zero.
double qkv_moments_read(const qkv_moments *moments, uint32_t layer, uint32_t kv_head, qkv_moments_kind kind,
                        double *mean, double *second);

#endif
