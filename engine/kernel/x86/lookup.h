// Look-ups in tables of floats by codes of one to eight bits, a vector at a time, and their loads and fused
// multiply-add.
#ifndef QKV_ENGINE_KERNEL_X86_LOOKUP_H
#define QKV_ENGINE_KERNEL_X86_LOOKUP_H

#if defined(__AVX2__)
#include <stddef.h>

#include "engine/kernel/x86/lanes.h"

#if defined(__AVX512F__)
enum { TABLE_BITS = 6 };  // of tables that lie in registers
#else
enum { TABLE_BITS = 4 };
#endif
enum { TABLE_VECTORS = (1 << TABLE_BITS) / LANES };

typedef struct float_table {
  const float *values;
  lanes parts[TABLE_VECTORS];  // of up to TABLE_BITS bits
} float_table;

static inline lanes all_lanes(float x) {
  return x - (lanes){0};
}

// a * b + c, rounded once.
static inline lanes multiply_add(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
  return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

// Bytes to words: eight, and those `apart` from them where a vector has more lanes.
static inline words load_bytes(const uint8_t *from, size_t apart) {
  const __m128i bytes = _mm_loadl_epi64((const void *)from);
#if defined(__AVX512F__)
  const __m128 both = _mm_loadh_pi(_mm_castsi128_ps(bytes), (const void *)(from + apart));
  return (words)_mm512_cvtepu8_epi32(_mm_castps_si128(both));
#else
  (void)apart;
  return (words)_mm256_cvtepu8_epi32(bytes);
#endif
}

// values [1 << bits]; a table of fewer values than a vector has lanes is repeated, so that higher bits do not count.
static inline float_table make_table(const float *values, unsigned bits) {
  float_table table = {.values = values};
  if (bits > TABLE_BITS) return table;
  float repeated[TABLE_VECTORS * LANES];
  for (size_t i = 0; i < TABLE_VECTORS * LANES; i++) repeated[i] = values[i % ((size_t)1 << bits)];
  for (size_t v = 0; v < TABLE_VECTORS; v++) table.parts[v] = load_lanes(repeated + v * LANES);
  return table;
}

// The values of codes; bits of words above the codes' do not count.
static inline __attribute__((always_inline)) lanes find_floats(const float_table *table, words code, unsigned bits) {
#if defined(__AVX512F__)
  const __m512i at = (__m512i)code;
  if (bits > TABLE_BITS) return (lanes)_mm512_i32gather_ps((__m512i)(code & ((1u << bits) - 1)), table->values, 4);
  if (bits <= 4) return (lanes)_mm512_permutexvar_ps(at, (__m512)table->parts[0]);
  const __m512 low = _mm512_permutex2var_ps((__m512)table->parts[0], at, (__m512)table->parts[1]);
  if (bits < 6) return (lanes)low;
  const __m512 high = _mm512_permutex2var_ps((__m512)table->parts[2], at, (__m512)table->parts[3]);
  return (lanes)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)(code << 26)), low, high);
#else
  const __m256i at = (__m256i)code;
  if (bits > TABLE_BITS) return (lanes)_mm256_i32gather_ps(table->values, (__m256i)(code & ((1u << bits) - 1)), 4);
  const __m256 low = _mm256_permutevar8x32_ps((__m256)table->parts[0], at);
  if (bits < 4) return (lanes)low;
  const __m256 high = _mm256_permutevar8x32_ps((__m256)table->parts[1], at);
  return (lanes)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#endif
}

#endif  // AVX2

#endif
