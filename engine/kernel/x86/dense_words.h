// Rows on their way to whole numbers for dense transforms, as dense_words in dense_plain.h does it.
#ifndef QKV_ENGINE_KERNEL_X86_DENSE_WORDS_H
#define QKV_ENGINE_KERNEL_X86_DENSE_WORDS_H

#include <math.h>
#include <string.h>

#include "engine/kernel/dense.h"
#include "engine/kernel/x86/lane_sums.h"

#if defined(__AVX2__)
// Numbers [j, j + LANES) of a row, zeros behind its end.
INLINE lanes load_within(const float *row, size_t j, size_t dim) {
#if LANES == 16
  if (j + LANES > dim) return (lanes)_mm512_maskz_loadu_ps(j < dim ? 0x00ff : 0, row + j);
#else
  if (j >= dim) return (lanes){0};
#endif
  return load_lanes(row + j);
}

// The same less the mean.
INLINE lanes load_centred(const float *row, const float *mean, size_t j, size_t dim) {
  return load_within(row, j, dim) - load_within(mean, j, dim);
}

// The squares of a row less the mean.
static inline float squares_of_row(const float *row, const float *mean, size_t dim) {
  lanes sums[SUM_VECTORS];
  UNROLL
  for (size_t k = 0; k < SUM_VECTORS; k++) sums[k] = (lanes){0};
  for (size_t j = 0; j < dim; j += SUM_VECTORS * LANES) {
    UNROLL
    for (size_t k = 0; k < SUM_VECTORS; k++) {
      const lanes x = load_centred(row, mean, j + k * LANES, dim);
      sums[k] += x * x;
    }
  }
  return add_lanes(sums);
}

// What makes whole numbers of each of `count` rows less the mean, and floats of these again: 0 for a row of zeros.
static inline void find_scales(const float *rows, const float *mean, size_t dim, size_t count, float *factors,
                               float *scales) {
  for (size_t i = 0; i < count; i++) scales[i] = squares_of_row(rows + i * dim, mean, dim);
  for (size_t i = 0; i < count; i++) {
    const float length = sqrtf(scales[i]);
    const bool none = scales[i] < QKVI_DENSE_SQUARE_LEAST;
    factors[i] = none ? 0 : QKVI_DENSE_ROW_LENGTH / length;
    scales[i] = none ? 0 : length / QKVI_DENSE_ROW_LENGTH;
  }
}

// Numbers [j, j + LANES), to the nearest, ties to even.
INLINE bytes whole_numbers(const float *row, const float *mean, size_t j, size_t dim, float factor) {
  const lanes x = load_centred(row, mean, j, dim) * factor;
#if LANES == 16
  return _mm512_cvtps_epi32((__m512)x);
#else
  return _mm256_cvtps_epi32((__m256)x);
#endif
}

#endif
#endif
