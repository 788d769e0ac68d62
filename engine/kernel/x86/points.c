// The nearest of 256 points: points.h says what. Compiled once for each family.
#include "engine/kernel/points.h"

#include <math.h>

#include "engine/kernel/x86/lookup.h"
#include "engine/kernel/x86/variants.h"

#define INLINE static inline __attribute__((always_inline))

enum { BLOCKS = QKV_POINTS / LANES };

// Of each lane's points the first of those that are least far, and how far that is.
typedef struct found {
  lanes least;
  words at;
} found;

INLINE void take_nearer(found *so_far, lanes far, words at) {
#if LANES == 16
  const __mmask16 nearer = _mm512_cmp_ps_mask((__m512)far, (__m512)so_far->least, _CMP_LT_OQ);
  so_far->least = (lanes)_mm512_mask_mov_ps((__m512)so_far->least, nearer, (__m512)far);
  so_far->at = (words)_mm512_mask_mov_epi32((__m512i)so_far->at, nearer, (__m512i)at);
#else
  const words nearer = (words)(far < so_far->least);
  so_far->least = (lanes)_mm256_blendv_ps((__m256)so_far->least, (__m256)far, (__m256)nearer);
  so_far->at = (words)_mm256_blendv_ps((__m256)so_far->at, (__m256)at, (__m256)nearer);
#endif
}

// The first point of all lanes.
INLINE uint8_t first_of(const found *all) {
#if LANES == 16
  const float least = _mm512_reduce_min_ps((__m512)all->least);
  const __mmask16 equal = _mm512_cmp_ps_mask((__m512)all->least, _mm512_set1_ps(least), _CMP_EQ_OQ);
  return (uint8_t)_mm512_mask_reduce_min_epu32(equal, (__m512i)all->at);
#else
  const __m256 far = (__m256)all->least;
  __m128 four = _mm_min_ps(_mm256_castps256_ps128(far), _mm256_extractf128_ps(far, 1));
  four = _mm_min_ps(four, _mm_movehl_ps(four, four));
  four = _mm_min_ps(four, _mm_movehdup_ps(four));
  const __m256 equal = _mm256_cmp_ps(far, _mm256_broadcastss_ps(four), _CMP_EQ_OQ);
  const __m256i at = _mm256_or_si256((__m256i)all->at, _mm256_xor_si256((__m256i)equal, _mm256_set1_epi32(-1)));
  __m128i first = _mm_min_epu32(_mm256_castsi256_si128(at), _mm256_extracti128_si256(at, 1));
  first = _mm_min_epu32(first, _mm_shuffle_epi32(first, 0x4e));
  first = _mm_min_epu32(first, _mm_shuffle_epi32(first, 0xb1));
  return (uint8_t)_mm_cvtsi128_si32(first);
#endif
}

INLINE void find(const float *columns, const float *squares, size_t width, const float *x, size_t n, uint8_t *codes) {
  words own;
  for (uint32_t i = 0; i < LANES; i++) own[i] = i;
  for (size_t i = 0; i < n; i++, x += width) {
    found all = {.least = all_lanes(INFINITY), .at = own};
    words at = own;
    for (size_t block = 0; block < BLOCKS; block++, at += LANES) {
      lanes far = load_lanes(squares + block * LANES);
      UNROLL
      for (size_t j = 0; j < width; j++) far -= x[j] * load_lanes(columns + j * QKV_POINTS + block * LANES);
      take_nearer(&all, far, at);
    }
    codes[i] = first_of(&all);
  }
}

QKV_DECLARE_NEAREST_POINTS(VARIANT(qkvi_nearest_points)) {
  if (width == 2) return find(columns, squares, 2, x, n, codes);
  if (width == 4) return find(columns, squares, 4, x, n, codes);
  if (width == 8) return find(columns, squares, 8, x, n, codes);
  qkvi_nearest_points_reference(columns, squares, width, x, n, codes);
}
