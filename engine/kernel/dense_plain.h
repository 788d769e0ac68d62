// Rows to whole numbers for dense transforms (dense.h), in plain loops over independent lanes.
#ifndef QKV_ENGINE_KERNEL_DENSE_PLAIN_H
#define QKV_ENGINE_KERNEL_DENSE_PLAIN_H

#include <math.h>
#include <string.h>

#include "engine/kernel/dense.h"
#include "engine/kernel/integer.h"
#include "engine/kernel/plain.h"

// Adds the squares of PLAIN_WIDTH numbers less their means (NULL: none), which they become.
static inline void add_squares(float *restrict numbers, const float *restrict means, plain_floats *sum) {
  plain_floats x;
  memcpy(&x, numbers, sizeof x);
  if (means != NULL) {
    plain_floats y;
    memcpy(&y, means, sizeof y);
    x -= y;
    memcpy(numbers, &x, sizeof x);
  }
  *sum += x * x;
}

// The squares of a row less the mean (NULL: none), which it becomes: sums over 16 lanes, j % 16, which are then added
// by halves.
static inline float dense_squares(float *restrict row, const float *restrict mean, size_t dim) {
  plain_floats sums[PLAIN_VECTORS] = {0};
  size_t j = 0;
  for (; j + PLAIN_LANES <= dim; j += PLAIN_LANES) {
    for (size_t i = 0; i < PLAIN_LANES; i += PLAIN_WIDTH) {  // sums whose places are constants are in registers
      add_squares(row + j + i, mean != NULL ? mean + j + i : NULL, &sums[i / PLAIN_WIDTH]);
    }
  }
  if (j < dim) add_squares(row + j, mean != NULL ? mean + j : NULL, &sums[0]);
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
