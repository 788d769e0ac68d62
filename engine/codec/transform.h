// The linear transform of one head's keys or values: rows to code space and back.
//
//   z = analysis (x - mean)          what is quantized: ordered coordinates of about unit variance
//   x = mean + sum_c z_c synthesis_c
//
// The two matrices are each other's dual, analysis . synthesis^T = 1, so the rest of the work stays in code space:
//
//   q . x         = q . mean + (synthesis q) . z             queries are transformed once
//   sum_t w_t x_t = (sum_t w_t) mean + synthesis^T sum_t w_t z_t
//
// Data-free transforms are the randomized Hadamard (hadamard.h), without a mean and its own dual. Calibrated ones
// are dense: the KLT of values, the query-aware KLT of keys (calibration.h), with the scale of each coordinate
// folded in; rows go through both matrices in whole numbers of 16 bits (kernel/dense.h). `weights` says how much a
// coordinate's squared error counts; the data-free code counts all alike.
//
// Keys in the attend frame also have a rotating anchor: the calibrated mean before RoPE, of all pairs or of those
// that carry most of it, rotated to each position and taken off before everything else; and a plan of which pairs are
// turned back to where (turn_plan.h).
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_TRANSFORM_H
#define QKV_ENGINE_CODEC_TRANSFORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/schedule.h"
#include "engine/codec/turn_plan.h"
#include "engine/kernel/dense.h"

#define QKV_QUERY_BLOCK 32       // queries that meet a page at once, at most: bounds the scratch memory
#define QKV_ANCHOR_PAIRS_MAX 64  // of a rotating anchor under QKV_TURN_PAGE

// All pointers are borrowed: from a calibration, or NULL.
typedef struct qkv_transform {
  const qkv_schedule *schedule;  // its dim is the rows'
  const float *analysis;         // [dim][dim]; NULL: Hadamard, and the three below are NULL too
  const float *synthesis;        // [dim][dim]
  const float *mean;             // [dim]
  const qkv_dense *forward;      // the analysis in whole numbers, which rows are coded with
  const qkv_dense *backward;     // the synthesis by its columns, likewise, which rows come back by
  // The synthesis in whole numbers, for queries that are transformed page by page; NULL: none. With QKV_TURN_BLOCKS
  // its inputs are in the order of qkv_turn_input.
  const qkv_dense *turning;
  const float *weights;          // [dim], > 0
  const qkv_turn_plan *plan;     // NULL: QKV_TURN_PAGE
  uint16_t anchor_pairs;         // of the rotating anchor; 0: none
  const uint16_t *pair_indices;  // [anchor_pairs], ascending, below rope.width / 2; NULL: 0, 1, 2, ...
  const float *anchor;           // [anchor_pairs][2], before RoPE: first and second coordinate of each pair
} qkv_transform;

// The pair of RoPE that the i-th of a rotating anchor is.
static inline uint32_t qkv_transform_anchored(const qkv_transform *transform, size_t i) {
  return transform->pair_indices == NULL ? (uint32_t)i : transform->pair_indices[i];
}

// Whether keys are turned back to blocks of pages.
static inline bool qkv_transform_by_blocks(const qkv_transform *transform) {
  return transform->plan != NULL && transform->plan->rule == QKV_TURN_BLOCKS;
}

// rows [n][dim] in place, to code space. Only the first `coordinates` of a row are computed, the others become 0.
void qkv_transform_forward(const qkv_transform *transform, float *rows, size_t n, size_t coordinates);
// rows [n][dim] in place, back; coordinates from `coordinates` on are taken for 0.
void qkv_transform_inverse(const qkv_transform *transform, float *rows, size_t n, size_t coordinates);

// queries [n][dim] in place, to code space; shares[n], what the mean adds to every score of a query.
void qkv_transform_query(const qkv_transform *transform, float *queries, size_t n, size_t coordinates, float *shares);
// The same in whole numbers where the transform has them: it errs as kernel/dense.h says.
void qkv_transform_turned(const qkv_transform *transform, float *queries, size_t n, size_t coordinates,
                          float *shares);
// sums [n][dim] of weighted rows in place, from code space; totals[n], the sums of those weights.
void qkv_transform_output(const qkv_transform *transform, float *sums, const double *totals, size_t n,
                          size_t coordinates);

#endif
