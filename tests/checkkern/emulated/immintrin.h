// AVX-512 for processors that lack it, so that the bits of its kernel variants can be checked everywhere. SIMDe
// emulates its operations; those that SIMDe 0.7 lacks are below. It precedes the compiler's header of this name, in
// checkkern_emulated alone. Slow, and as exact as the real ones.
#ifndef QKV_TESTS_CHECKKERN_EMULATED_IMMINTRIN_H
#define QKV_TESTS_CHECKKERN_EMULATED_IMMINTRIN_H
#pragma GCC system_header

#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <stdint.h>
#include <string.h>

// The macros that the sources test, set after SIMDe has seen those of the real processor.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#if defined(QKV_EMULATED_VNNI)
#define __AVX512VNNI__ 1
#define __AVX512VBMI__ 1
#endif

#define EMULATED static inline __attribute__((always_inline))

typedef union emulated {
  __m512i whole;
  __m512 floats;
  __m256i halves[2];
  __m256 float_halves[2];
  __m128i quarters[4];
  uint32_t words[16];
  float lanes[16];
  uint8_t bytes[64];
} emulated;

// ---- Conversions ----

EMULATED __m128i emulated_cvtepi32_epi8(__m512i a) {
  const emulated from = {.whole = a};
  uint8_t to[16];
  for (int i = 0; i < 16; i++) to[i] = (uint8_t)from.words[i];
  return _mm_loadu_si128((const __m128i *)to);
}

EMULATED __m512i emulated_cvtepu8_epi32(__m128i a) {
  const emulated from = {.quarters = {a}};
  emulated to;
  for (int i = 0; i < 16; i++) to.words[i] = from.bytes[i];
  return to.whole;
}

EMULATED __m512i emulated_cvtepu16_epi32(__m256i a) {
  uint16_t from[16];
  memcpy(from, &a, sizeof from);
  emulated to;
  for (int i = 0; i < 16; i++) to.words[i] = from[i];
  return to.whole;
}

EMULATED __m512i emulated_cvtepi8_epi32(__m128i a) {
  const emulated from = {.quarters = {a}};
  emulated to;
  for (int i = 0; i < 16; i++) to.words[i] = (uint32_t)(int8_t)from.bytes[i];
  return to.whole;
}

EMULATED __m512i emulated_cvtepi16_epi32(__m256i a) {
  int16_t from[16];
  memcpy(from, &a, sizeof from);
  emulated to;
  for (int i = 0; i < 16; i++) to.words[i] = (uint32_t)from[i];
  return to.whole;
}

EMULATED __m512 emulated_cvtepi32_ps(__m512i a) {
  const emulated from = {.whole = a};
  emulated to;
  for (int i = 0; i < 2; i++) to.float_halves[i] = _mm256_cvtepi32_ps(from.halves[i]);
  return to.floats;
}

EMULATED __m512i emulated_cvtps_epi32(__m512 a) {
  const emulated from = {.floats = a};
  emulated to;
  for (int i = 0; i < 2; i++) to.halves[i] = _mm256_cvtps_epi32(from.float_halves[i]);
  return to.whole;
}

EMULATED __m512 emulated_cvtph_ps(__m256i a) {
  const emulated from = {.halves = {a}};
  emulated to;
  for (int i = 0; i < 2; i++) to.float_halves[i] = _mm256_cvtph_ps(from.quarters[i]);
  return to.floats;
}

// ---- Masks and memory ----

EMULATED __mmask16 emulated_cmpeq_epi8_mask(__m128i a, __m128i b) {
  return (__mmask16)_mm_movemask_epi8(_mm_cmpeq_epi8(a, b));
}

EMULATED __m256i emulated_maskz_set1_epi16(__mmask16 mask, short value) {
  short to[16];
  for (int i = 0; i < 16; i++) to[i] = (short)((mask >> i & 1) != 0 ? value : 0);
  return _mm256_loadu_si256((const __m256i *)to);
}

EMULATED __m256i emulated_maskz_loadu_epi16(__mmask16 mask, const void *from) {
  uint16_t to[16] = {0};
  for (int i = 0; i < 16; i++) {
    if ((mask >> i & 1) != 0) memcpy(&to[i], (const char *)from + 2 * i, 2);
  }
  return _mm256_loadu_si256((const __m256i *)to);
}

EMULATED __m512i emulated_maskz_loadu_epi16_wide(__mmask32 mask, const void *from) {
  uint16_t to[32] = {0};
  for (int i = 0; i < 32; i++) {
    if ((mask >> i & 1) != 0) memcpy(&to[i], (const char *)from + 2 * i, 2);
  }
  __m512i all;
  memcpy(&all, to, sizeof all);
  return all;
}

EMULATED __m512i emulated_maskz_loadu_epi32(__mmask16 mask, const void *from) {
  emulated to = {.words = {0}};
  for (int i = 0; i < 16; i++) {
    if ((mask >> i & 1) != 0) memcpy(&to.words[i], (const char *)from + 4 * i, 4);
  }
  return to.whole;
}

EMULATED __mmask32 emulated_cmpgt_epi16_mask(__m512i a, __m512i b) {
  int16_t first[32], second[32];
  memcpy(first, &a, sizeof first);
  memcpy(second, &b, sizeof second);
  __mmask32 mask = 0;
  for (int i = 0; i < 32; i++) mask |= (__mmask32)(first[i] > second[i]) << i;
  return mask;
}

EMULATED __m512 emulated_maskz_loadu_ps(__mmask16 mask, const void *from) {
  emulated to = {.words = {0}};
  for (int i = 0; i < 16; i++) {
    if ((mask >> i & 1) != 0) memcpy(&to.lanes[i], (const char *)from + 4 * i, 4);
  }
  return to.floats;
}

EMULATED void emulated_mask_storeu_ps(void *to, __mmask16 mask, __m512 a) {
  const emulated from = {.floats = a};
  for (int i = 0; i < 16; i++) {
    if ((mask >> i & 1) != 0) memcpy((char *)to + 4 * i, &from.lanes[i], 4);
  }
}

EMULATED void emulated_mask_storeu_epi8(void *to, __mmask64 mask, __m512i a) {
  const emulated from = {.whole = a};
  for (int i = 0; i < 64; i++) {
    if ((mask >> i & 1) != 0) ((uint8_t *)to)[i] = from.bytes[i];
  }
}

EMULATED __m512 emulated_i32gather_ps(__m512i index, const void *from, int scale) {
  const emulated at = {.whole = index};
  emulated to;
  for (int i = 0; i < 16; i++) memcpy(&to.lanes[i], (const char *)from + (int64_t)(int32_t)at.words[i] * scale, 4);
  return to.floats;
}

// ---- Lanes ----

EMULATED __m512i emulated_mask_srli_epi32(__m512i other, __mmask16 mask, __m512i a, unsigned bits) {
  const emulated from = {.whole = a};
  emulated to = {.whole = other};
  for (int i = 0; i < 16; i++) {
    if ((mask >> i & 1) != 0) to.words[i] = bits < 32 ? from.words[i] >> bits : 0;
  }
  return to.whole;
}

EMULATED __m512i emulated_shuffle_epi32(__m512i a, int order) {
  const emulated from = {.whole = a};
  emulated to;
  for (int i = 0; i < 16; i++) to.words[i] = from.words[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  return to.whole;
}

EMULATED __m512 emulated_permute_ps(__m512 a, int order) {
  emulated all = {.floats = a};
  all.whole = emulated_shuffle_epi32(all.whole, order);
  return all.floats;
}

EMULATED __m512 emulated_shuffle_f32x4(__m512 a, __m512 b, int order) {
  const emulated first = {.floats = a}, second = {.floats = b};
  const emulated to = {.quarters = {first.quarters[order & 3], first.quarters[order >> 2 & 3],
                                    second.quarters[order >> 4 & 3], second.quarters[order >> 6 & 3]}};
  return to.floats;
}

EMULATED __m256 emulated_extractf32x8_ps(__m512 a, int half) {
  const emulated from = {.floats = a};
  return from.float_halves[half];
}

EMULATED __m256i emulated_extracti64x4_epi64(__m512i a, int half) {
  const emulated from = {.whole = a};
  return from.halves[half];
}

EMULATED float emulated_reduce_max_ps(__m512 a) {
  const emulated from = {.floats = a};
  float most = from.lanes[0];
  for (int i = 1; i < 16; i++) most = from.lanes[i] > most ? from.lanes[i] : most;
  return most;
}

EMULATED float emulated_reduce_min_ps(__m512 a) {
  const emulated from = {.floats = a};
  float least = from.lanes[0];
  for (int i = 1; i < 16; i++) least = from.lanes[i] < least ? from.lanes[i] : least;
  return least;
}

EMULATED uint32_t emulated_mask_reduce_min_epu32(__mmask16 mask, __m512i a) {
  const emulated from = {.whole = a};
  uint32_t least = UINT32_MAX;
  for (int i = 0; i < 16; i++) {
    if ((mask >> i & 1) != 0 && from.words[i] < least) least = from.words[i];
  }
  return least;
}

// SIMDe's macro of this name takes other arguments.
EMULATED __m512i emulated_madd_epi16(__m512i a, __m512i b) {
  const emulated first = {.whole = a}, second = {.whole = b};
  emulated to;
  for (int i = 0; i < 2; i++) to.halves[i] = _mm256_madd_epi16(first.halves[i], second.halves[i]);
  return to.whole;
}

#undef _mm256_maskz_set1_epi16
#undef _mm512_extractf32x8_ps
#undef _mm512_extracti64x4_epi64
#undef _mm512_i32gather_ps
#undef _mm512_madd_epi16
#undef _mm512_mask_srli_epi32
#undef _mm512_permute_ps
#undef _mm512_shuffle_epi32
#undef _mm512_shuffle_f32x4
#define _mm_cmpeq_epi8_mask emulated_cmpeq_epi8_mask
#define _mm256_maskz_loadu_epi16 emulated_maskz_loadu_epi16
#define _mm256_maskz_set1_epi16 emulated_maskz_set1_epi16
#define _mm512_cmpgt_epi16_mask emulated_cmpgt_epi16_mask
#define _mm512_cvtepi16_epi32 emulated_cvtepi16_epi32
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_extractf32x8_ps emulated_extractf32x8_ps
#define _mm512_extracti64x4_epi64 emulated_extracti64x4_epi64
#define _mm512_i32gather_ps emulated_i32gather_ps
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm512_mask_srli_epi32 emulated_mask_srli_epi32
#define _mm512_mask_storeu_epi8 emulated_mask_storeu_epi8
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_mask_reduce_min_epu32 emulated_mask_reduce_min_epu32
#define _mm512_maskz_loadu_epi16 emulated_maskz_loadu_epi16_wide
#define _mm512_maskz_loadu_epi32 emulated_maskz_loadu_epi32
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm512_permute_ps emulated_permute_ps
#define _mm512_reduce_max_ps emulated_reduce_max_ps
#define _mm512_reduce_min_ps emulated_reduce_min_ps
#define _mm512_shuffle_epi32 emulated_shuffle_epi32
#define _mm512_shuffle_f32x4 emulated_shuffle_f32x4

#endif
