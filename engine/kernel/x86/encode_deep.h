// The search for codes of more than four bits, in 32-bit lanes: thresholds are floats.
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_DEEP_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_DEEP_H

#include "engine/kernel/encode_plain.h"
#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
#if LANES == 16
// Of tables of 32, 64 and 128 entries in registers.
INLINE words look_up_32(const uint32_t *table, words index) {
  return (words)_mm512_permutex2var_epi32(_mm512_loadu_si512(table), (__m512i)index, _mm512_loadu_si512(table + 16));
}

// The upper half's where the index has the bit.
INLINE words choose_half(words index, int bit, words low, words high) {
  const __mmask16 upper = _mm512_test_epi32_mask((__m512i)index, _mm512_set1_epi32(bit));
  return (words)_mm512_mask_blend_epi32(upper, (__m512i)low, (__m512i)high);
}

INLINE words look_up_64(const uint32_t *table, words index) {
  return choose_half(index, 32, look_up_32(table, index), look_up_32(table + 32, index));
}
#else
// An index counts with its three low bits.
INLINE words look_up_8(const uint32_t *table, words index) {
  return (words)_mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)table), (__m256i)index);
}

// The upper half's where the index has the bit of this number.
INLINE words choose_half(words index, int bit, words low, words high) {
  return (words)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(index << (31 - bit)));
}

INLINE words look_up_32(const uint32_t *table, words index) {
  return choose_half(index, 4, look_up(load_lookup(table), index), look_up(load_lookup(table + 16), index));
}
#endif

// table[index] of a table of 8 (where a vector has 8), 16, 32, 64 or 128 entries, a constant.
INLINE words look_up_among(const void *table, size_t entries, words index) {
  if (entries == 16) return look_up(load_lookup(table), index);
#if LANES == 16
  const uint32_t *from = table;
  if (entries == 32) return look_up_32(from, index);
  if (entries == 64) return look_up_64(from, index);
  return choose_half(index, 64, look_up_64(from, index), look_up_64(from + 64, index));
#else
  if (entries == 8) return look_up_8(table, index);
  if (entries == 32) return look_up_32(table, index);
  if (entries == 64)
    return choose_half(index, 5, look_up_32(table, index), look_up_32((const uint32_t *)table + 32, index));
  return (words)gather(table, index);
#endif
}

// Of a table of 2^bits entries; a vector may be read of any.
INLINE size_t entries_of(unsigned bits) {
  return (size_t)1 << bits < LANES ? LANES : (size_t)1 << bits;
}

// The cells of |x|, and of a negative x their complements, of more than four bits; `units`, if not NULL, gets the
// centroids.
static inline __attribute__((always_inline)) words quantize_deep(unsigned depth, lanes x, lanes *units) {
  const words negative = (words)(x < 0);
  // |x|; for a negative x the next smaller number, because -x on a boundary belongs to the cell nearer to 0.
  const words magnitude = ((words)x & 0x7fffffff) + negative;
  words cell = one_up((words){0}, (words){0} + qkvi_tables.middles[2][0], magnitude);
  UNROLL
  for (unsigned d = 3; d <= depth; d++) {
    cell = one_up(cell + cell, look_up_among(qkvi_tables.middles[d], entries_of(d - 2), cell), magnitude);
  }
  if (units != NULL) {
    const float *values = qkvi_tables.values[depth] + (1u << (depth - 1));
    *units = (lanes)look_up_among(values, entries_of(depth - 1), cell) * qkvi_tables.inverse_step;
  }
  return cell ^ negative;
}

#endif
#endif
