// Sums over the 16 lanes of vectors, added by halves: lane i and i + 8, then 4, 2 and 1 apart.
#ifndef QKV_ENGINE_KERNEL_X86_LANE_SUMS_H
#define QKV_ENGINE_KERNEL_X86_LANE_SUMS_H

#include <stdbool.h>

#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
enum { SUM_VECTORS = 16 / LANES };  // that hold 16 lanes

static inline float add_lanes(const lanes sums[SUM_VECTORS]) {
#if LANES == 16
  const __m512 all = (__m512)sums[0];
  const __m256 by_eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
  const __m256 by_eight = _mm256_add_ps((__m256)sums[0], (__m256)sums[1]);
#endif
  const __m128 by_four = _mm_add_ps(_mm256_castps256_ps128(by_eight), _mm256_extractf128_ps(by_eight, 1));
  const __m128 by_two = _mm_add_ps(by_four, _mm_movehl_ps(by_four, by_four));
  return _mm_cvtss_f32(_mm_add_ss(by_two, _mm_shuffle_ps(by_two, by_two, 1)));
}

#if LANES == 16
INLINE __m512 add_numbers(__m512 a, __m512 b, bool integers) {
  if (!integers) return _mm512_add_ps(a, b);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

// The sums of 16 vectors, of floats or of integers; destroys them.
INLINE __m512 add_lanes_of_16(__m512 *v, bool integers) {
  UNROLL
  for (size_t i = 0; i < 8; i++) {  // v[i]: two vectors by eights
    v[i] = add_numbers(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                       _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee), integers);
  }
  UNROLL
  for (size_t i = 0; i < 4; i++) {  // four by fours
    v[i] = add_numbers(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                       _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd), integers);
  }
  UNROLL
  for (size_t i = 0; i < 2; i++) {  // in each quarter one of v[2 i] and one of v[2 i + 1] by twos
    v[i] = add_numbers(_mm512_shuffle_ps(v[2 * i], v[2 * i + 1], 0x44),
                       _mm512_shuffle_ps(v[2 * i], v[2 * i + 1], 0xee), integers);
  }
  const __m512 all = add_numbers(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd), integers);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_ps(order, all);
}
#endif

#endif
#endif
