// Rows to whole numbers for dense transforms (dense.h), in plain loops over independent lanes.
#ifndef QKV_ENGINE_KERNEL_DENSE_PLAIN_H
#define QKV_ENGINE_KERNEL_DENSE_PLAIN_H

#include <math.h>
#include <string.h>

#include "engine/kernel/dense.h"
#include "engine/kernel/integer.h"
#include "engine/kernel/plain.h"

// The squares of a row less the mean (NULL: none), which it becomes: sums over 16 lanes, j % 16, which are then added
// by halves.
static inline float dense_squares(float *restrict row, const float *restrict mean, size_t dim) {
  plain_floats sums[PLAIN_LANES / PLAIN_WIDTH] = {0};
  for (size_t j = 0; j < dim; j += PLAIN_WIDTH) {
    plain_floats x;
    memcpy(&x, row + j, sizeof x);
    if (mean != NULL) {
      plain_floats y;
      memcpy(&y, mean + j, sizeof y);
      x -= y;
      memcpy(row + j, &x, sizeof x);
    }
    sums[j / PLAIN_WIDTH % (PLAIN_LANES / PLAIN_WIDTH)] += x * x;
  }
  float lanes[PLAIN_LANES];
  memcpy(lanes, sums, sizeof lanes);
  for (size_t half = PLAIN_LANES / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// out [dim] of a row less the mean, which it becomes; returns the scale.
static inline float dense_words(float *restrict row, const float *restrict mean, size_t dim, int16_t *restrict out) {
  const float squares = dense_squares(row, mean, dim);
  if (squares < QKVI_DENSE_SQUARE_LEAST) {
    memset(out, 0, dim * sizeof *out);
    return 0;
  }
  const float length = sqrtf(squares), factor = QKVI_DENSE_ROW_LENGTH / length;
  for (size_t j = 0; j < dim; j++) {
    const float sum = row[j] * factor + QKVI_WHOLE_MAGIC;
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    out[j] = (int16_t)(uint16_t)bits;
  }
  return length / QKVI_DENSE_ROW_LENGTH;
}

#endif
