// Encoding coordinates of up to four bits with VBMI and VNNI where they have weights or the row has deeper ones, too:
// t in bytes, centroids and codes by look-ups in tables of 256, sums by integer dot products.
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_BYTES_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_BYTES_H

#include <stdbool.h>

#include "engine/kernel/encode_plain.h"
#include "engine/kernel/x86/encode_deep_rows.h"
#include "engine/kernel/x86/encode_pack_rows.h"
#include "engine/kernel/x86/lane_sums.h"

#if defined(__AVX2__) && BYTE_DOTS
enum { BYTES_DIM_MAX = 512, VECTOR = 64, VECTORS_MAX = BYTES_DIM_MAX / VECTOR, RUNS_MAX = 4 };

// A vector's coordinates of one depth.
typedef struct byte_run {
  unsigned depth;
  uint64_t mask;
} byte_run;

typedef struct byte_plan {
  size_t vectors;
  size_t counts[VECTORS_MAX];
  byte_run runs[VECTORS_MAX][RUNS_MAX];
} byte_plan;

static uint64_t first_ones(size_t n) {
  return n >= VECTOR ? UINT64_MAX : ((uint64_t)1 << n) - 1;
}

static void plan_bytes(const uint16_t *reach, byte_plan *plan) {
  *plan = (byte_plan){.vectors = (reach[1] + VECTOR - 1u) / VECTOR};
  for (unsigned depth = 4; depth >= 1; depth--) {
    const size_t begin = reach[depth + 1], end = reach[depth];
    for (size_t v = begin / VECTOR; v * VECTOR < end; v++) {
      const size_t low = begin > v * VECTOR ? begin - v * VECTOR : 0;
      const uint64_t mask = first_ones(end - v * VECTOR) & ~first_ones(low);
      if (mask == 0) continue;
      plan->runs[v][plan->counts[v]++] = (byte_run){depth, mask};
    }
  }
}

// A table of 256 bytes whose entries from 191 on are alike, as far as they count: centroids of up to four bits, and
// their codes.
typedef struct table_192 {
  bytes low[2], high;
} table_192;

INLINE table_192 load_192(const uint8_t *table) {
  return (table_192){{load_bytes(table), load_bytes(table + 64)}, load_bytes(table + 128)};
}

// `index` is 191 at most, `upper` those above 127.
INLINE bytes find_192(const table_192 *table, bytes index, __mmask64 upper) {
  const bytes low = _mm512_permutex2var_epi8(table->low[0], index, table->low[1]);
  return _mm512_mask_permutexvar_epi8(low, upper, index, table->high);
}

INLINE bytes index_192(bytes t) {
  return _mm512_min_epu8(t, _mm512_set1_epi8((char)191));
}

// t of 64 coordinates and which of them are negative; those that are not in the mask are 0. `whole`: all are.
INLINE bytes bring_to_bytes(const float *row, bool whole, uint64_t mask, __m512 inverse, __mmask64 *negative) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i x[4], t[4];
  UNROLL
  for (size_t i = 0; i < 4; i++) {
    const __m512 all =
        whole ? _mm512_loadu_ps(row + 16 * i) : _mm512_maskz_loadu_ps((__mmask16)(mask >> (16 * i)), row + 16 * i);
    x[i] = _mm512_castps_si512(all);
    t[i] = _mm512_cvtps_epi32(_mm512_mul_ps(all, inverse));
  }
  // What is too large becomes -32768, which has no opposite.
  const __m512i least = _mm512_set1_epi16(-32767);
  const __m512i low = _mm512_abs_epi16(_mm512_max_epi16(_mm512_packs_epi32(t[0], t[1]), least));
  const __m512i high = _mm512_abs_epi16(_mm512_max_epi16(_mm512_packs_epi32(t[2], t[3]), least));
  const __m512i signs = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
  *negative = _mm512_movepi8_mask(_mm512_permutexvar_epi32(order, signs));
  return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high));
}

INLINE void sum_squares_of_16(const float *rows, size_t dim, size_t coordinates, const float *weights, each squares) {
  enum { AT_ONCE = 4 };  // rows, whose sums do not wait for each other
  __m512 sums[GROUP];
  for (size_t r = 0; r < GROUP; r += AT_ONCE) {
    const float *from = rows + r * dim;
    __m512 all[AT_ONCE];
    UNROLL
    for (size_t i = 0; i < AT_ONCE; i++) all[i] = _mm512_setzero_ps();
    for (size_t c = 0; c < coordinates; c += 16) {
      const __mmask16 mask = c + 16 <= coordinates ? 0xffff : 0x00ff;
      const __m512 weight = _mm512_loadu_ps(weights + c);
      UNROLL
      for (size_t i = 0; i < AT_ONCE; i++) {
        const __m512 x = _mm512_maskz_loadu_ps(mask, from + i * dim + c);
        all[i] = _mm512_add_ps(all[i], _mm512_mul_ps(_mm512_mul_ps(weight, x), x));
      }
    }
    UNROLL
    for (size_t i = 0; i < AT_ONCE; i++) sums[r + i] = all[i];
  }
  _mm512_storeu_ps(squares, add_lanes_of_16(sums, false));
}

// A group's t and signs.
typedef struct byte_rows {
  _Alignas(64) uint8_t t[GROUP][BYTES_DIM_MAX];
  uint64_t negative[GROUP][VECTORS_MAX];
} byte_rows;

INLINE void add_dots_of(const table_192 *units, bytes t, __mmask64 mask, __mmask64 upper, bytes *with_row,
                        bytes *with_itself) {
  const bytes index = index_192(t);
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const bytes k = _mm512_maskz_mov_epi8(mask, find_192(&units[s], index, upper));
    with_row[s] = _mm512_dpbusd_epi32(with_row[s], t, k);
    with_itself[s] = _mm512_dpbusd_epi32(with_itself[s], k, k);
  }
}

INLINE void load_units(const byte_run *run, table_192 units[QKVI_SCALES]) {
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) units[s] = load_192(qkvi_integers.units[s][run->depth]);
}

static void sum_weighted_rows(const byte_plan *plan, const float *fours, const byte_rows *rows, group_sums *sums) {
  __m512 with_row[QKVI_SCALES][GROUP], with_itself[QKVI_SCALES][GROUP];
  for (size_t r = 0; r < GROUP; r++) {
    __m512 a[QKVI_SCALES], b[QKVI_SCALES];
    for (size_t s = 0; s < QKVI_SCALES; s++) a[s] = b[s] = _mm512_setzero_ps();
    for (size_t v = 0; v < plan->vectors; v++) {
      const bytes t = load_bytes(rows->t[r] + v * VECTOR);
      const __mmask64 upper = _mm512_movepi8_mask(t);
      const __m512 weights = _mm512_loadu_ps(fours + v * VECTOR / FOURS);
      bytes tk[QKVI_SCALES], kk[QKVI_SCALES];
      UNROLL
      for (size_t s = 0; s < QKVI_SCALES; s++) tk[s] = kk[s] = _mm512_setzero_si512();
      for (size_t i = 0; i < plan->counts[v]; i++) {
        table_192 units[QKVI_SCALES];
        load_units(&plan->runs[v][i], units);
        add_dots_of(units, t, plan->runs[v][i].mask, upper, tk, kk);
      }
      UNROLL
      for (size_t s = 0; s < QKVI_SCALES; s++) {
        a[s] = _mm512_add_ps(a[s], _mm512_mul_ps(weights, _mm512_cvtepi32_ps(tk[s])));
        b[s] = _mm512_add_ps(b[s], _mm512_mul_ps(weights, _mm512_cvtepi32_ps(kk[s])));
      }
    }
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      with_row[s][r] = a[s];
      with_itself[s][r] = b[s];
    }
  }
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    _mm512_storeu_ps(sums->with_row[s], add_lanes_of_16(with_row[s], false));
    _mm512_storeu_ps(sums->with_itself[s], add_lanes_of_16(with_itself[s], false));
  }
}

static void code_rows_of_bytes(const byte_plan *plan, const byte_rows *rows, const group_choice *choice, size_t dim,
                               uint8_t *codes) {
  for (size_t r = 0; r < GROUP; r++) {
    const table_192 cells = load_192(qkvi_tables.cells[choice->scales[r]]);
    if (choice->zero[r]) {
      memset(codes + r * dim, 0, dim);
      continue;
    }
    for (size_t v = 0; v < plan->vectors; v++) {
      const bytes t = load_bytes(rows->t[r] + v * VECTOR);
      const bytes cell = find_192(&cells, index_192(t), _mm512_movepi8_mask(t));
      const bytes code = _mm512_xor_si512(cell, _mm512_movm_epi8(rows->negative[r][v]));
      if (v * VECTOR + VECTOR <= dim) {
        _mm512_storeu_si512(codes + r * dim + v * VECTOR, code);
      } else {
        _mm512_mask_storeu_epi8(codes + r * dim + v * VECTOR, first_ones(dim - v * VECTOR), code);
      }
    }
  }
}

// rows [GROUP][dim] to codes [GROUP][dim] at full depth. `whole`: vectors are full.
INLINE void encode_in_bytes(const uint16_t *reach, const row_weights *weights, const byte_plan *plan,
                            const steps *deep, bool whole, const float *rows, size_t dim, group_scales *scales,
                            group_choice *choice, uint8_t *codes) {
  byte_rows in_bytes;
  deep_codes in_words;
  group_sums sums = {0};
  sum_squares_of_16(rows, dim, reach[1], weights->weights, scales->squares);
  choose_scales(weights->sum, scales);
  for (size_t r = 0; r < GROUP; r++) {
    const __m512 inverse = _mm512_set1_ps(scales->inverse[r]);
    for (size_t v = 0; v < plan->vectors; v++) {
      __mmask64 negative;
      const bytes t =
          bring_to_bytes(rows + r * dim + v * VECTOR, whole, first_ones(reach[1] - v * VECTOR), inverse, &negative);
      _mm512_store_si512(in_bytes.t[r] + v * VECTOR, t);
      in_bytes.negative[r][v] = negative;
    }
  }
  sum_weighted_rows(plan, weights->fours, &in_bytes, &sums);
  sum_deep_rows(deep, weights->weights, rows, dim, scales->inverse, &sums, &in_words);
  choose_attempts(scales, &sums, choice);
  code_rows_of_bytes(plan, &in_bytes, choice, dim, codes);
  code_deep_rows(deep, &in_words, choice, dim, codes);
}

static bool encode_bytes_can(const uint16_t *reach) {
  return reach[1] > 0 && reach[1] <= BYTES_DIM_MAX;
}

static void encode_by_bytes(const coded_as *as, const row_weights *weights, const float *rows, uint8_t *gains,
                            uint8_t *codes, float *errors) {
  const uint16_t *reach = as->schedule->reach[as->tier];
  const size_t dim = as->schedule->dim;
  uint8_t group_codes[GROUP * QKV_DIM_MAX + QKVI_BLOCK_WIDTH];  // [token][dim]
  qkvi_tier_blocks blocks;
  byte_plan plan;
  steps deep;
  qkvi_blocks_find(as->schedule, as->tier, &blocks);
  find_steps(reach, &deep);
  plan_bytes(reach, &plan);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, rows += GROUP * dim) {
    group_choice choice;
    group_scales scales;
    if (reach[1] % VECTOR == 0) {
      encode_in_bytes(reach, weights, &plan, &deep, true, rows, dim, &scales, &choice, group_codes);
    } else {
      encode_in_bytes(reach, weights, &plan, &deep, false, rows, dim, &scales, &choice, group_codes);
    }
    memcpy(gains + g * GROUP, choice.gains, sizeof choice.gains);
    memcpy(errors + g * GROUP, choice.errors, sizeof choice.errors);
    pack_group(as->part, as->schedule, as->tier, &blocks, group_codes, codes);
    codes += qkv_schedule_group_bytes(as->schedule, as->tier);
  }
}

#endif
#endif
