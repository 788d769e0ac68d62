// Plain codes times factors, eight lanes at a time: mix.h says what. Two blocks of lanes and four rows of factors are
// worked on at once, so that a code is looked up once for four rows and a factor is loaded once for sixteen lanes.
// For AVX2, which the processors with AVX-512 run, too.
#ifndef __AVX512F__

#include "engine/kernel/mix.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { ROWS = 4, BLOCKS = 2, STEPS = 8 };

// A step's part of the codes of eight lanes.
INLINE __m256i part_of(const uint8_t *section, unsigned width, unsigned step) {
  const unsigned each = 8 / width;
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(section + step / each * 8)));
  return _mm256_and_si256(_mm256_srli_epi32(bytes, (int)(step % each * width)), _mm256_set1_epi32((1 << width) - 1));
}

INLINE __m256i code_of(const uint8_t *chunk, unsigned bits, unsigned step) {
  __m256i code = _mm256_setzero_si256();
  for (unsigned width = 8, left = bits, at = 0; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    left -= width;
    code = _mm256_or_si256(code, _mm256_slli_epi32(part_of(chunk + at, width, step), (int)left));
    at += width * 8;
  }
  return code;
}

typedef struct value_table {
  const float *values;
  __m256 low, high;  // of up to four bits
} value_table;

INLINE __m256 value_of(const value_table *table, __m256i code, unsigned bits, int plain) {
  if (plain) return _mm256_cvtepi32_ps(code);
  if (bits > 4) return _mm256_i32gather_ps(table->values, code, 4);
  const __m256 low = _mm256_permutevar8x32_ps(table->low, code);
  if (bits < 4) return low;
  const __m256 high = _mm256_permutevar8x32_ps(table->high, code);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
}

INLINE void mix_tile(const qkv_code_matrix *m, const value_table *table, unsigned bits, int plain, size_t blocks,
                     size_t rows, const uint8_t *codes, const float *factors, float *out, size_t stride) {
  const size_t block_bytes = m->steps * bits;
  __m256 sums[ROWS][BLOCKS];
  for (size_t i = 0; i < rows; i++) {
    for (size_t b = 0; b < blocks; b++) sums[i][b] = _mm256_loadu_ps(out + i * stride + b * 8);
  }
  for (size_t step = 0; step < m->steps; step += STEPS, codes += 8 * (size_t)bits) {
#pragma GCC unroll 8
    for (unsigned s = 0; s < STEPS; s++) {
      __m256 values[BLOCKS];
      for (size_t b = 0; b < blocks; b++)
        values[b] = value_of(table, code_of(codes + b * block_bytes, bits, s), bits, plain);
      for (size_t i = 0; i < rows; i++) {
        const __m256 factor = _mm256_broadcast_ss(factors + i * m->steps + step + s);
        for (size_t b = 0; b < blocks; b++) sums[i][b] = _mm256_add_ps(sums[i][b], _mm256_mul_ps(factor, values[b]));
      }
    }
  }
  for (size_t i = 0; i < rows; i++) {
    for (size_t b = 0; b < blocks; b++) _mm256_storeu_ps(out + i * stride + b * 8, sums[i][b]);
  }
}

INLINE void mix_bits(const qkv_code_matrix *m, const float *factors, size_t n, float *out, size_t stride,
                     unsigned bits, int plain) {
  value_table table = {.values = m->values};
  if (!plain && bits <= 4) {
    float padded[16] = {0};
    for (size_t i = 0; i < (size_t)1 << bits; i++) padded[i] = m->values[i];
    table.low = _mm256_loadu_ps(padded);
    table.high = _mm256_loadu_ps(padded + 8);
  }
  const size_t block_bytes = m->steps * bits;
  size_t lane = 0;
  for (; lane + 16 <= m->lanes; lane += 16) {
    const uint8_t *codes = m->codes + lane / 8 * block_bytes;
    size_t i = 0;
    for (; i + ROWS <= n; i += ROWS)
      mix_tile(m, &table, bits, plain, 2, ROWS, codes, factors + i * m->steps, out + i * stride + lane, stride);
    for (; i < n; i++)
      mix_tile(m, &table, bits, plain, 2, 1, codes, factors + i * m->steps, out + i * stride + lane, stride);
  }
  for (; lane < m->lanes; lane += 8) {
    for (size_t i = 0; i < n; i++)
      mix_tile(m, &table, bits, plain, 1, 1, m->codes + lane / 8 * block_bytes, factors + i * m->steps,
               out + i * stride + lane, stride);
  }
}

#define CASE(b)                                                                         \
  case b:                                                                               \
    if (matrix->values == NULL) return mix_bits(matrix, factors, n, out, stride, b, 1); \
    return mix_bits(matrix, factors, n, out, stride, b, 0);

QKV_DECLARE_MIX(qkvi_mix_avx2) {
  switch (matrix->bits) {
    CASE(1)
    CASE(2)
    CASE(3)
    CASE(4)
    CASE(5)
    CASE(6)
    CASE(7)
    default:
      if (matrix->values == NULL) return mix_bits(matrix, factors, n, out, stride, 8, 1);
      return mix_bits(matrix, factors, n, out, stride, 8, 0);
  }
}

#else
typedef int qkvi_mix_is_for_avx2;
#endif
