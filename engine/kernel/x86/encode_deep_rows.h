// Coordinates of more than four bits row by row, while the row's shallow ones are coded in bytes (encode_bytes.h).
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_DEEP_ROWS_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_DEEP_ROWS_H

#include "engine/kernel/x86/encode_deep.h"
#include "engine/kernel/x86/encode_pack_rows.h"
#include "engine/kernel/x86/lane_sums.h"

#if defined(__AVX2__) && BYTE_DOTS
enum { EIGHT = 8, STEPS_MAX = 2 * QKV_DIM_MAX / EIGHT };

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
  const __mmask16 mask = (__mmask16)((at->eights & 1 ? 0x00ff : 0) | (at->eights & 2 ? 0xff00 : 0));
  return (lanes)_mm512_maskz_loadu_ps(mask, row + at->first);
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

// ---- Sums and codes ----

enum { DEEP_STEPS_MAX = 512 / LANES + QKV_DEPTH_MAX - SHALLOW_MAX };  // of rows that are coded in bytes

// Codes at full depth at each scale, of one step: scale s in bits 8 s to 8 s + 7 of a lane.
typedef struct deep_codes {
  words at[GROUP][DEEP_STEPS_MAX];
} deep_codes;

// A row's sums, lane by lane.
typedef struct deep_sums {
  lanes with_row[QKVI_SCALES], with_itself[QKVI_SCALES];
} deep_sums;

INLINE void add_deep(unsigned depth, const steps *all, size_t begin, const float *weights, const float *row,
                     float inverse, deep_sums *sums, words *codes) {
  for (size_t i = begin; i < all->ends[depth]; i++) {
    const lanes y = load_step(&all->at[i], row) * inverse, t = (lanes)((words)y & 0x7fffffff);
    const lanes weight = load_step(&all->at[i], weights), x = y * (1.0f / T_PER_UNIT);
    words found = {0};
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      lanes units;
      const words cell = quantize_deep(depth, x * qkvi_tables.scales[s], &units);
      const lanes weighted = weight * units;
      sums->with_row[s] += weighted * t;
      sums->with_itself[s] += weighted * units;
      found |= (cell + (1u << (depth - 1))) << (QKV_DEPTH_MAX - depth + 8 * s);
    }
    codes[i] = found;
  }
}

// In the order of the reference's sums: the deepest come first.
INLINE deep_sums sum_deep_row(const steps *all, const float *weights, const float *row, float inverse, words *codes) {
  deep_sums sums;
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) sums.with_row[s] = sums.with_itself[s] = (lanes){0};
  // Constants, so that the search has no loop.
  add_deep(8, all, 0, weights, row, inverse, &sums, codes);
  add_deep(7, all, all->ends[8], weights, row, inverse, &sums, codes);
  add_deep(6, all, all->ends[7], weights, row, inverse, &sums, codes);
  add_deep(5, all, all->ends[6], weights, row, inverse, &sums, codes);
  return sums;
}

static void sum_deep_rows(const steps *all, const float *weights, const float *rows, size_t dim, const each inverse,
                          group_sums *out, deep_codes *codes) {
  __m512 with_row[QKVI_SCALES][GROUP], with_itself[QKVI_SCALES][GROUP];
  if (all->ends[SHALLOW_MAX + 1] == 0) return;
  for (size_t r = 0; r < GROUP; r++) {
    const deep_sums sums = sum_deep_row(all, weights, rows + r * dim, inverse[r], codes->at[r]);
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      with_row[s][r] = (__m512)sums.with_row[s];
      with_itself[s][r] = (__m512)sums.with_itself[s];
    }
  }
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    _mm512_storeu_ps(out->deep_with_row[s], add_lanes_of_16(with_row[s], false));
    _mm512_storeu_ps(out->deep_with_itself[s], add_lanes_of_16(with_itself[s], false));
  }
}

// The low bytes of a step's lanes.
static inline void store_bytes(const step *at, words all, uint8_t *codes) {
  const __m128i bytes_16 = _mm512_cvtepi32_epi8((__m512i)all);
  if (at->eights == 3) {
    _mm_storeu_si128((__m128i *)(codes + at->first), bytes_16);
  } else if (at->eights == 1) {
    _mm_storel_epi64((__m128i *)(codes + at->first), bytes_16);
  } else {
    _mm_storel_epi64((__m128i *)(codes + at->first + EIGHT), _mm_unpackhi_epi64(bytes_16, bytes_16));
  }
}

// codes [GROUP][dim] of rows that do not count as zero: those at the scales that were chosen.
static void code_deep_rows(const steps *all, const deep_codes *found, const group_choice *choice, size_t dim,
                           uint8_t *codes) {
  for (size_t r = 0; r < GROUP; r++, codes += dim) {
    const unsigned shift = 8u * choice->scales[r];
    if (choice->zero[r]) continue;
    for (size_t i = 0; i < all->ends[SHALLOW_MAX + 1]; i++) store_bytes(&all->at[i], found->at[r][i] >> shift, codes);
  }
}

#endif
#endif
