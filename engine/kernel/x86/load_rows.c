// Rows as they came to floats, with their squared lengths. Compiled once for each family.
#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/lane_sums.h"
#include "engine/kernel/x86/variants.h"

#if defined(__AVX2__)
// LANES numbers; of AVX-512 those in the mask, and zeros.
#if LANES == 16
INLINE lanes load_numbers(qkv_dtype dtype, const uint8_t *from, __mmask16 mask) {
  if (dtype == QKV_FP32) return (lanes)_mm512_maskz_loadu_ps(mask, from);
  const __m256i halves = _mm256_maskz_loadu_epi16(mask, from);
  if (dtype == QKV_FP16) return (lanes)_mm512_cvtph_ps(halves);
  return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}
#else
INLINE lanes load_numbers(qkv_dtype dtype, const uint8_t *from) {
  if (dtype == QKV_FP32) return load_lanes((const float *)from);
  const __m128i halves = _mm_loadu_si128((const __m128i *)from);
  if (dtype == QKV_FP16) return (lanes)_mm256_cvtph_ps(halves);
  return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}
#endif

// The sum of 16 lanes, as qkvi_row_dot (engine/codec/row.h) adds them: fours 0 and 1, 2 and 3, both, then neighbours.
INLINE float add_fours(const lanes sums[SUM_VECTORS]) {
#if LANES == 16
  const __m256 low = _mm512_castps512_ps256((__m512)sums[0]), high = _mm512_extractf32x8_ps((__m512)sums[0], 1);
#else
  const __m256 low = (__m256)sums[0], high = (__m256)sums[1];
#endif
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(high), _mm256_extractf128_ps(high, 1));
  const __m128 all = _mm_add_ps(a, b), twos = _mm_add_ps(all, _mm_movehdup_ps(all));
  return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehl_ps(twos, twos)));
}

// `dtype` is a constant. Returns the squared length.
INLINE float load_row(qkv_dtype dtype, const uint8_t *from, size_t dim, float *out) {
  const size_t size = dtype == QKV_FP32 ? sizeof(float) : sizeof(uint16_t);
  lanes sums[SUM_VECTORS];
  UNROLL
  for (size_t k = 0; k < SUM_VECTORS; k++) sums[k] = (lanes){0};
#if LANES == 16
  for (size_t j = 0; j < dim; j += LANES) {
    const __mmask16 mask = j + LANES <= dim ? 0xffff : 0x00ff;
    const lanes x = load_numbers(dtype, from + j * size, mask);
    _mm512_mask_storeu_ps(out + j, mask, (__m512)x);
    sums[0] += x * x;
  }
#else
  for (size_t j = 0; j < dim; j += 2 * LANES) {
    UNROLL
    for (size_t k = 0; k < SUM_VECTORS; k++) {
      if (j + k * LANES >= dim) break;
      const lanes x = load_numbers(dtype, from + (j + k * LANES) * size);
      store_lanes(out + j + k * LANES, x);
      sums[k] += x * x;
    }
  }
#endif
  return add_fours(sums);
}

INLINE void load_rows_of(qkv_dtype dtype, const qkv_rows *rows, size_t tokens, size_t dim, float *out,
                         float *squares) {
  for (size_t t = 0; t < tokens; t++) {
    if (rows->next != NULL) qkvi_fetch_row(rows->next, t);
    squares[t] = load_row(dtype, rows->data + t * rows->stride, dim, out + t * dim);
  }
}

QKV_DECLARE_LOAD_ROWS(VARIANT(qkvi_load_rows)) {
  assert(dim % QKV_BAND == 0);
  if (rows->dtype == QKV_FP16) return load_rows_of(QKV_FP16, rows, tokens, dim, out, squares);
  if (rows->dtype == QKV_BF16) return load_rows_of(QKV_BF16, rows, tokens, dim, out, squares);
  load_rows_of(QKV_FP32, rows, tokens, dim, out, squares);
}
#endif
