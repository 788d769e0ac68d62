// Encoding coordinates of more than four bits, in 32-bit lanes: thresholds are searched among floats.
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_DEEP_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_DEEP_H

#include "engine/kernel/encode_plain.h"
#include "engine/kernel/x86/encode_pack.h"
#include "engine/kernel/x86/lane_sums.h"

#if defined(__AVX2__)
enum { EIGHT = 8, STEPS_MAX = 2 * QKV_DIM_MAX / EIGHT, SUMS = SUM_VECTORS };

// ---- Steps ----

// LANES coordinates of one depth: of a vector that holds two depths, two steps take a half each.
typedef struct step {
  uint16_t first;  // coordinate of the vector
  uint8_t eights;  // those that count: bit 0 the lower eight, bit 1 the upper
} step;

typedef struct steps {
  size_t count;
  size_t ends[QKV_DEPTH_MAX + 1];  // of the steps of `depth`; those of deeper coordinates come first
  step at[STEPS_MAX];
} steps;

// Lanes that a step does not have are 0.
static inline lanes load_step(const step *at, const float *row) {
#if LANES == 16
  const __mmask16 mask = (__mmask16)((at->eights & 1 ? 0x00ff : 0) | (at->eights & 2 ? 0xff00 : 0));
  return (lanes)_mm512_maskz_loadu_ps(mask, row + at->first);
#else
  return load_lanes(row + at->first);
#endif
}

static void find_steps(const uint16_t *reach, steps *out) {
  out->count = 0;
  unsigned from = 0;
  for (unsigned depth = QKV_DEPTH_MAX; depth >= 1; depth--) {
    for (; from < reach[depth]; from += EIGHT) {
      const unsigned first = from / LANES * LANES;
      const uint8_t bit = (uint8_t)(1u << (from - first) / EIGHT);
      step *last = out->at + out->count - 1;
      const bool begun = depth < QKV_DEPTH_MAX && out->count > out->ends[depth + 1];
      if ((begun || (depth == QKV_DEPTH_MAX && out->count > 0)) && last->first == first) {
        last->eights |= bit;
      } else {
        out->at[out->count++] = (step){(uint16_t)first, bit};
      }
    }
    out->ends[depth] = out->count;
  }
}

// Coordinates [c, c + LANES) of a row of `dim`; 0 behind its end.
static inline lanes load_coordinates(const float *row, size_t c, size_t dim) {
#if LANES == 16
  return (lanes)_mm512_maskz_loadu_ps(c + LANES <= dim ? 0xffff : 0x00ff, row + c);
#else
  (void)dim;
  return load_lanes(row + c);
#endif
}

// ---- Search ----

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
#endif

// table[index] of a table of 16, 32, 64 or 128 entries, a constant.
INLINE words look_up_among(const void *table, size_t entries, words index) {
  if (entries == 16) return look_up(load_lookup(table), index);
#if LANES == 16
  const uint32_t *from = table;
  if (entries == 32) return look_up_32(from, index);
  if (entries == 64) return look_up_64(from, index);
  return choose_half(index, 64, look_up_64(from, index), look_up_64(from + 64, index));
#else
  return (words)gather(table, index);
#endif
}

// Of a table of 2^bits entries; at least 16 may be read of any.
INLINE size_t entries_of(unsigned bits) {
  return bits <= 4 ? 16 : (size_t)1 << bits;
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

// ---- Sums ----

typedef struct deep_sums {
  lanes with_row[QKVI_SCALES][SUMS], with_itself[QKVI_SCALES][SUMS];
} deep_sums;

static inline __attribute__((always_inline)) void add_deep(unsigned depth, const steps *all, size_t begin,
                                                           const float *weights, const float *row, float inverse,
                                                           deep_sums *sums) {
  for (size_t i = begin; i < all->ends[depth]; i++) {
    const lanes y = load_step(&all->at[i], row) * inverse, t = (lanes)((words)y & 0x7fffffff);
    const lanes weight = load_step(&all->at[i], weights);
    const size_t sum = all->at[i].first / LANES % SUMS;
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      lanes units;
      (void)quantize_deep(depth, y * (1.0f / T_PER_UNIT) * qkvi_tables.scales[s], &units);
      const lanes weighted = weight * units;
      sums->with_row[s][sum] += weighted * t;
      sums->with_itself[s][sum] += weighted * units;
    }
  }
}

// In the order of the reference's sums: the deepest come first.
static void sum_deep_rows(const steps *all, const float *weights, const float *rows, size_t dim, const each inverse,
                          group_sums *out) {
  for (size_t r = 0; r < GROUP && all->ends[SHALLOW_MAX + 1] > 0; r++, rows += dim) {
    deep_sums sums;
    memset(&sums, 0, sizeof sums);
    add_deep(8, all, 0, weights, rows, inverse[r], &sums);
    add_deep(7, all, all->ends[8], weights, rows, inverse[r], &sums);
    add_deep(6, all, all->ends[7], weights, rows, inverse[r], &sums);
    add_deep(5, all, all->ends[6], weights, rows, inverse[r], &sums);
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      out->deep_with_row[s][r] = add_lanes(sums.with_row[s]);
      out->deep_with_itself[s][r] = add_lanes(sums.with_itself[s]);
    }
  }
}

// ---- Codes ----

// The low bytes of a step's lanes.
static inline void store_bytes(const step *at, words all, uint8_t *codes) {
#if LANES == 16
  const __m128i bytes_16 = _mm512_cvtepi32_epi8((__m512i)all);
  if (at->eights == 3) {
    _mm_storeu_si128((__m128i *)(codes + at->first), bytes_16);
  } else if (at->eights == 1) {
    _mm_storel_epi64((__m128i *)(codes + at->first), bytes_16);
  } else {
    _mm_storel_epi64((__m128i *)(codes + at->first + EIGHT), _mm_unpackhi_epi64(bytes_16, bytes_16));
  }
#else
  const __m256i low = _mm256_and_si256((__m256i)all, _mm256_set1_epi32(0xff));
  const __m128i both = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64((__m128i *)(codes + at->first), _mm_packus_epi16(both, both));
#endif
}

static inline __attribute__((always_inline)) void code_deep(unsigned depth, const steps *all, size_t begin,
                                                            const float *row, float inverse, size_t scale,
                                                            uint8_t *codes) {
  for (size_t i = begin; i < all->ends[depth]; i++) {
    const lanes y = load_step(&all->at[i], row) * inverse;
    const words cell = quantize_deep(depth, y * (1.0f / T_PER_UNIT) * qkvi_tables.scales[scale], NULL);
    store_bytes(&all->at[i], (cell + (1u << (depth - 1))) << (QKV_DEPTH_MAX - depth), codes);
  }
}

// Of rows that do not count as zero.
static void code_deep_rows(const steps *all, const float *rows, size_t dim, const each inverse,
                           const group_choice *choice, uint8_t *codes) {
  for (size_t r = 0; r < GROUP && all->ends[SHALLOW_MAX + 1] > 0; r++, rows += dim, codes += dim) {
    const size_t scale = choice->scales[r];
    if (choice->zero[r]) continue;
    // Constants, so that the search has no loop.
    code_deep(8, all, 0, rows, inverse[r], scale, codes);
    code_deep(7, all, all->ends[8], rows, inverse[r], scale, codes);
    code_deep(6, all, all->ends[7], rows, inverse[r], scale, codes);
    code_deep(5, all, all->ends[6], rows, inverse[r], scale, codes);
  }
}

#endif
#endif
