// Arithmetic on rows of floats, for what is added to a page's codes (anchor.h, low_rank.h).
//
// Plain loops over independent lanes: sums run over 16 lanes, i % 16, which are then added pairwise, so that vectors
// change no bit. `dim` is a multiple of 8 everywhere.
#ifndef QKV_ENGINE_CODEC_ROW_H
#define QKV_ENGINE_CODEC_ROW_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define QKVI_QUAD 4   // floats of the narrowest vector
#define QKVI_QUADS 4  // sums of so many side by side

typedef float qkvi_quad __attribute__((vector_size(4 * QKVI_QUAD)));

static inline void qkvi_quad_load(const float *from, qkvi_quad *quad) {
  memcpy(quad, from, sizeof *quad);
}

static inline float qkvi_quads_sum(const qkvi_quad sums[QKVI_QUADS]) {
  const qkvi_quad sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Sums of `quads` (a constant, so that they stay in registers) products.
static inline __attribute__((always_inline)) void qkvi_quads_dot(const float *a, const float *b, size_t quads,
                                                                 qkvi_quad sums[QKVI_QUADS]) {
  for (size_t j = 0; j < quads; j++) {
    qkvi_quad x, y;
    qkvi_quad_load(a + j * QKVI_QUAD, &x);
    qkvi_quad_load(b + j * QKVI_QUAD, &y);
    sums[j] += x * y;
  }
}

static inline float qkvi_row_dot(const float *a, const float *b, size_t dim) {
  enum { STEP = QKVI_QUADS * QKVI_QUAD };
  qkvi_quad sums[QKVI_QUADS] = {0};
  size_t i = 0;
  for (; i + STEP <= dim; i += STEP) qkvi_quads_dot(a + i, b + i, QKVI_QUADS, sums);
  if (i < dim) qkvi_quads_dot(a + i, b + i, QKVI_QUADS / 2, sums);
  return qkvi_quads_sum(sums);
}

// n is a multiple of 16.
static inline float qkvi_row_sum(const float *row, size_t n) {
  qkvi_quad sums[QKVI_QUADS] = {0};
  for (size_t i = 0; i < n; i += QKVI_QUADS * QKVI_QUAD) {
    for (size_t j = 0; j < QKVI_QUADS; j++) {
      qkvi_quad x;
      qkvi_quad_load(row + i + j * QKVI_QUAD, &x);
      sums[j] += x;
    }
  }
  return qkvi_quads_sum(sums);
}

// sums += weight * row
static inline void qkvi_row_add(float *restrict sums, const float *restrict row, float weight, size_t dim) {
  for (size_t c = 0; c < dim; c++) sums[c] += weight * row[c];
}

// The values of int8 that count units.
static inline void qkvi_row_widen(float *restrict row, const int8_t *restrict from, float unit, size_t dim) {
  for (size_t c = 0; c < dim; c++) row[c] = (float)from[c] * unit;
}

// The largest magnitude.
static inline float qkvi_row_largest(const float *row, size_t dim) {
  typedef int32_t words __attribute__((vector_size(sizeof(qkvi_quad))));
  words largest = {0};  // positive floats are in the order of their bits
  for (size_t c = 0; c < dim; c += QKVI_QUAD) {
    qkvi_quad x;
    qkvi_quad_load(row + c, &x);
    const words magnitude = (words)x & INT32_MAX, larger = magnitude > largest;
    largest = (magnitude & larger) | (largest & ~larger);
  }
  const qkvi_quad all = (qkvi_quad)largest;
  const float a = all[0] > all[1] ? all[0] : all[1], b = all[2] > all[3] ? all[2] : all[3];
  return a > b ? a : b;
}

// sum_c weights[c] * (a_c - b_c)^2; weights NULL: all 1; b NULL: all 0.
static inline double qkvi_row_error(const float *a, const float *b, const float *weights, size_t dim) {
  double lanes[8] = {0};
  for (size_t i = 0; i < dim; i += 8) {
    for (size_t j = 0; j < 8; j++) {
      const float miss = a[i + j] - (b ? b[i + j] : 0);
      lanes[j] += (double)(miss * miss * (weights ? weights[i + j] : 1));
    }
  }
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

#endif
