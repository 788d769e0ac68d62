// Coordinates of more than four bits row by row, beside shallow ones in bytes (encode_bytes.h).
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

// ---- Sums ----

typedef struct deep_sums {
  lanes with_row[QKVI_SCALES], with_itself[QKVI_SCALES];
} deep_sums;

static inline __attribute__((always_inline)) void add_deep(unsigned depth, const steps *all, size_t begin,
                                                           const float *weights, const float *row, float inverse,
                                                           deep_sums *sums) {
  for (size_t i = begin; i < all->ends[depth]; i++) {
    const lanes y = load_step(&all->at[i], row) * inverse, t = (lanes)((words)y & 0x7fffffff);
    const lanes weight = load_step(&all->at[i], weights);
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      lanes units;
      (void)quantize_deep(depth, y * (1.0f / T_PER_UNIT) * qkvi_tables.scales[s], &units);
      const lanes weighted = weight * units;
      sums->with_row[s] += weighted * t;
      sums->with_itself[s] += weighted * units;
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
      out->deep_with_row[s][r] = add_lanes(&sums.with_row[s]);
      out->deep_with_itself[s][r] = add_lanes(&sums.with_itself[s]);
    }
  }
}

// ---- Codes ----

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
