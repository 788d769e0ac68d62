// Vectors of 32-bit lanes: 16 where the file is compiled for AVX-512, 8 for AVX2. Arithmetic is C's on GCC's vector
// types; here is only what that has no words for.
#ifndef QKV_ENGINE_KERNEL_X86_LANES_H
#define QKV_ENGINE_KERNEL_X86_LANES_H

#if defined(__AVX2__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "engine/kernel/table.h"

// Before loops whose counts are constants once they are inlined. Sanitizers leave some of them alone, and the
// compiler says so, which is an error.
#ifdef QKV_SANITIZED
#define UNROLL
#define UNROLL_16
#define ROLLED
#else
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL_16 _Pragma("GCC unroll 16")
#define ROLLED _Pragma("GCC unroll 1")  // where copies of the body would only take the compiler's time
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t signed_words __attribute__((vector_size(4 * LANES)));
typedef float eight __attribute__((vector_size(32)));

static inline lanes load_lanes(const float *from) {
  lanes all;
  memcpy(&all, from, sizeof all);
  return all;
}

static inline void store_lanes(float *to, lanes all) {
  memcpy(to, &all, sizeof all);
}

static inline words load_words(const void *from) {
  words all;
  memcpy(&all, from, sizeof all);
  return all;
}

static inline eight load_eight(const float *from) {
  eight all;
  memcpy(&all, from, sizeof all);
  return all;
}

static inline void store_eight(float *to, eight all) {
  memcpy(to, &all, sizeof all);
}

// LANES bytes, zero-extended.
static inline words widen_bytes(const uint8_t *from) {
#if LANES == 16
  return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#else
  return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#endif
}

// A table of 16 entries in registers. An index counts with its four low bits.
typedef struct lookup {
#if LANES == 16
  __m512i all;
#else
  __m256i low, high;
#endif
} lookup;

static inline lookup load_lookup(const void *table) {
#if LANES == 16
  return (lookup){_mm512_loadu_si512(table)};
#else
  return (lookup){_mm256_loadu_si256(table), _mm256_loadu_si256((const __m256i *)table + 1)};
#endif
}

static inline words look_up(lookup table, words index) {
#if LANES == 16
  return (words)_mm512_permutexvar_epi32((__m512i)index, table.all);
#else
  const __m256 low = (__m256)_mm256_permutevar8x32_epi32(table.low, (__m256i)index);
  const __m256 high = (__m256)_mm256_permutevar8x32_epi32(table.high, (__m256i)index);
  return (words)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#endif
}

// qkv_gain_value of LANES gains.
static inline lanes gain_lanes(const uint8_t *gains) {
  const words g = widen_bytes(gains);
  const words value = look_up(load_lookup(qkvi_tables.roots), g) + (((g >> 3) - 16) << 23);
  return (lanes)(value & (words)(g != 0));
}

// table[index] of a table in memory.
static inline lanes gather(const float *table, words index) {
#if LANES == 16
  return (lanes)_mm512_i32gather_ps((__m512i)index, table, 4);
#else
  return (lanes)_mm256_i32gather_ps(table, (__m256i)index, 4);
#endif
}

// count + 1 in the lanes where boundary <= magnitude, all below 2^31.
static inline words one_up(words count, words boundary, words magnitude) {
#if LANES == 16
  const __mmask16 above = _mm512_cmple_epi32_mask((__m512i)boundary, (__m512i)magnitude);
  return (words)_mm512_mask_add_epi32((__m512i)count, above, (__m512i)count, _mm512_set1_epi32(1));
#else
  return count - (words)((signed_words)boundary <= (signed_words)magnitude);
#endif
}

// out[j][i] = in[i][j] of 8 x 8 floats.
static inline void transpose_eight(const float *in, size_t in_stride, float *out, size_t out_stride) {
  eight r[8], p[8];
  for (size_t i = 0; i < 8; i++) r[i] = load_eight(in + i * in_stride);
  for (size_t i = 0; i < 8; i += 2) {
    p[i] = (eight)_mm256_unpacklo_ps((__m256)r[i], (__m256)r[i + 1]);
    p[i + 1] = (eight)_mm256_unpackhi_ps((__m256)r[i], (__m256)r[i + 1]);
  }
  for (size_t i = 0; i < 8; i += 4) {
    r[i] = (eight)_mm256_shuffle_ps((__m256)p[i], (__m256)p[i + 2], 0x44);
    r[i + 1] = (eight)_mm256_shuffle_ps((__m256)p[i], (__m256)p[i + 2], 0xee);
    r[i + 2] = (eight)_mm256_shuffle_ps((__m256)p[i + 1], (__m256)p[i + 3], 0x44);
    r[i + 3] = (eight)_mm256_shuffle_ps((__m256)p[i + 1], (__m256)p[i + 3], 0xee);
  }
  for (size_t i = 0; i < 4; i++) {
    store_eight(out + i * out_stride, (eight)_mm256_permute2f128_ps((__m256)r[i], (__m256)r[i + 4], 0x20));
    store_eight(out + (i + 4) * out_stride, (eight)_mm256_permute2f128_ps((__m256)r[i], (__m256)r[i + 4], 0x31));
  }
}

#endif
#endif
