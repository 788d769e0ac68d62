// Encoding rows in vectors (kernel/encode_plain.h). Compiled once for each family.
//
// Coordinates of up to four bits with no weights, where sums are whole numbers, go the way of encode_bytes.h where
// the processor has it. All others go through 32-bit lanes here: thresholds are searched, of t for coordinates of up
// to four bits, of floats for those of more. Codes of a group are gathered as bytes [token][coordinate] and then
// packed block by block (encode_pack.h).
#include <assert.h>
#include <math.h>
#include <stdbool.h>

#include "engine/codec/pack.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/encode_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/encode_bytes.h"
#include "engine/kernel/x86/encode_pack.h"
#include "engine/kernel/x86/lane_sums.h"
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/twins.h"

enum { EIGHT = 8, SHALLOW = 4, STEPS_MAX = 2 * QKV_DIM_MAX / EIGHT, SUMS = SUM_VECTORS };

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
  lanes weights[STEPS_MAX];  // 0 where a lane does not count
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

static void find_steps(const uint16_t *reach, const float *weights, steps *out) {
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
  for (size_t i = 0; i < out->count; i++) out->weights[i] = load_step(&out->at[i], weights);
}

// ---- Quantization ----

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

// The cells of |x|, and of a negative x their complements, of more than four bits; `units` gets the centroids.
static inline __attribute__((always_inline)) words quantize_deep(unsigned depth, lanes x, lanes *units) {
  const words negative = (words)(x < 0);
  // |x|; for a negative x the next smaller number, because -x on a boundary belongs to the cell nearer to 0.
  const words magnitude = ((words)x & 0x7fffffff) + negative;
  words cell = one_up((words){0}, (words){0} + qkvi_tables.middles[2][0], magnitude);
  UNROLL
  for (unsigned d = 3; d <= depth; d++) {
    cell = one_up(cell + cell, look_up_among(qkvi_tables.middles[d], entries_of(d - 2), cell), magnitude);
  }
  const float *values = qkvi_tables.values[depth] + (1u << (depth - 1));
  *units = (lanes)look_up_among(values, entries_of(depth - 1), cell) * qkvi_tables.inverse_step;
  return cell ^ negative;
}

// The tables of a depth up to four at one scale.
typedef struct searcher {
  words first;
  lookup firsts[SHALLOW + 1], units;
} searcher;

static inline __attribute__((always_inline)) searcher searcher_of(unsigned depth, size_t scale) {
  searcher s = {.first = (words){0} + qkvi_tables.firsts[scale][2][0]};
  for (unsigned d = 3; d <= depth; d++) s.firsts[d] = load_lookup(qkvi_tables.firsts[scale][d]);
  s.units = load_lookup(qkvi_tables.units[depth]);
  return s;
}

static inline __attribute__((always_inline)) words find_cells(const searcher *s, unsigned depth, words t) {
  words cell = {0};
  if (depth >= 2) cell = one_up(cell, s->first, t);
  for (unsigned d = 3; d <= depth; d++) cell = one_up(cell + cell, look_up(s->firsts[d], cell), t);
  return cell;
}

static inline lanes round_t(lanes magnitude) {
#if LANES == 16
  const lanes bounded = (lanes)_mm512_min_ps((__m512)magnitude, _mm512_set1_ps(T_MAX));
#else
  const lanes bounded = (lanes)_mm256_min_ps((__m256)magnitude, _mm256_set1_ps(T_MAX));
#endif
  return (bounded + 8388608.0f) - 8388608.0f;
}

// ---- Rows ----

// One row in the vectors of its steps.
typedef struct row_steps {
  lanes y[STEPS_MAX];  // 64 / m times the row
  lanes t[STEPS_MAX];
} row_steps;

static void bring_row(const steps *all, const float *row, float inverse, row_steps *out) {
  const lanes factor = (lanes){0} + inverse;
  for (size_t i = 0; i < all->count; i++) {
    const lanes y = load_step(&all->at[i], row) * factor, magnitude = (lanes)((words)y & 0x7fffffff);
    out->y[i] = y;
    out->t[i] = i < all->ends[SHALLOW + 1] ? magnitude : round_t(magnitude);
  }
}

typedef struct row_sums {
  lanes with_row[QKVI_SCALES][SUMS], with_itself[QKVI_SCALES][SUMS];
} row_sums;

static float sum_squares(const steps *all, const float *row) {
  lanes sums[SUMS] = {0};
  for (size_t i = 0; i < all->count; i++) {
    const lanes x = load_step(&all->at[i], row);
    sums[all->at[i].first / LANES % SUMS] += all->weights[i] * x * x;
  }
  return add_lanes(sums);
}

// Which of the sums a step goes to: 0 where they are one vector.
static inline size_t sum_of(const step *at) {
  return at->first / LANES % SUMS;
}

static inline __attribute__((always_inline)) void add_shallow(unsigned depth, const steps *all, const row_steps *row,
                                                              row_sums *sums) {
  if (all->ends[depth + 1] == all->ends[depth]) return;
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const searcher search = searcher_of(depth, s);
    lanes a[SUMS], b[SUMS];
    memcpy(a, sums->with_row[s], sizeof a);
    memcpy(b, sums->with_itself[s], sizeof b);
    for (size_t i = all->ends[depth + 1]; i < all->ends[depth]; i++) {
      const words cell = find_cells(&search, depth, (words) __builtin_convertvector(row->t[i], signed_words));
      const lanes units = (lanes)look_up(search.units, cell), weighted = all->weights[i] * units;
      a[sum_of(&all->at[i])] += weighted * row->t[i];
      b[sum_of(&all->at[i])] += weighted * units;
    }
    memcpy(sums->with_row[s], a, sizeof a);
    memcpy(sums->with_itself[s], b, sizeof b);
  }
}

static inline __attribute__((always_inline)) void add_deep(unsigned depth, const steps *all, size_t begin,
                                                           const row_steps *row, row_sums *sums) {
  for (size_t i = begin; i < all->ends[depth]; i++) {
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      lanes units;
      (void)quantize_deep(depth, row->y[i] * (1.0f / T_PER_UNIT) * qkvi_tables.scales[s], &units);
      const lanes weighted = all->weights[i] * units;
      sums->with_row[s][sum_of(&all->at[i])] += weighted * row->t[i];
      sums->with_itself[s][sum_of(&all->at[i])] += weighted * units;
    }
  }
}

// Coordinates in the order of the reference's sums: from 0 on, so the deepest first.
static void sum_row(const steps *all, const row_steps *row, size_t index, group_sums *out) {
  row_sums sums;
  memset(&sums, 0, sizeof sums);
  // Constants, so that the search has no loop.
  add_deep(8, all, 0, row, &sums);
  add_deep(7, all, all->ends[8], row, &sums);
  add_deep(6, all, all->ends[7], row, &sums);
  add_deep(5, all, all->ends[6], row, &sums);
  add_shallow(4, all, row, &sums);
  add_shallow(3, all, row, &sums);
  add_shallow(2, all, row, &sums);
  add_shallow(1, all, row, &sums);
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    out->with_row[s][index] = add_lanes(sums.with_row[s]);
    out->with_itself[s][index] = add_lanes(sums.with_itself[s]);
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

static inline __attribute__((always_inline)) void code_shallow(unsigned depth, const steps *all, const row_steps *row,
                                                               size_t scale, uint8_t *codes) {
  if (all->ends[depth + 1] == all->ends[depth]) return;
  const searcher search = searcher_of(depth, scale);
  for (size_t i = all->ends[depth + 1]; i < all->ends[depth]; i++) {
    const words cell = find_cells(&search, depth, (words) __builtin_convertvector(row->t[i], signed_words));
    const words negative = (words)((signed_words)row->y[i] < 0);
    store_bytes(&all->at[i], ((cell + (1u << (depth - 1))) ^ negative) << (QKV_DEPTH_MAX - depth), codes);
  }
}

static inline __attribute__((always_inline)) void code_deep(unsigned depth, const steps *all, size_t begin,
                                                            const row_steps *row, size_t scale, uint8_t *codes) {
  for (size_t i = begin; i < all->ends[depth]; i++) {
    lanes units;
    const words cell = quantize_deep(depth, row->y[i] * (1.0f / T_PER_UNIT) * qkvi_tables.scales[scale], &units);
    store_bytes(&all->at[i], (cell + (1u << (depth - 1))) << (QKV_DEPTH_MAX - depth), codes);
  }
}

static void code_row(const steps *all, const row_steps *row, size_t scale, uint8_t *codes) {
  code_deep(8, all, 0, row, scale, codes);
  code_deep(7, all, all->ends[8], row, scale, codes);
  code_deep(6, all, all->ends[7], row, scale, codes);
  code_deep(5, all, all->ends[6], row, scale, codes);
  code_shallow(4, all, row, scale, codes);
  code_shallow(3, all, row, scale, codes);
  code_shallow(2, all, row, scale, codes);
  code_shallow(1, all, row, scale, codes);
}

// rows [GROUP][dim] to codes [GROUP][dim] at full depth.
static void encode_group(const steps *all, float weight, const float *rows, size_t dim, group_choice *choice,
                         uint8_t *codes) {
  group_scales scales;
  group_sums sums;
  row_steps row;
  for (size_t t = 0; t < GROUP; t++) scales.squares[t] = sum_squares(all, rows + t * dim);
  choose_scales(weight, &scales);
  for (size_t t = 0; t < GROUP; t++) {
    bring_row(all, rows + t * dim, scales.inverse[t], &row);
    sum_row(all, &row, t, &sums);
  }
  choose_attempts(&scales, &sums, choice);
  for (size_t t = 0; t < GROUP; t++) {
    if (choice->zero[t]) {
      memset(codes + t * dim, 0, dim);
      continue;
    }
    bring_row(all, rows + t * dim, scales.inverse[t], &row);
    code_row(all, &row, choice->scales[t], codes + t * dim);
  }
}

static float sum_weights(const steps *all) {
  lanes sums[SUMS] = {0};
  for (size_t i = 0; i < all->count; i++) sums[all->at[i].first / LANES % SUMS] += all->weights[i];
  return add_lanes(sums);
}

// Codes groups of rows [GROUP][dim] one after the other; the way is that of `all` or, where that is NULL, of `plan`.
typedef struct way {
  const steps *all;
  float weight;  // of all coordinates
  const byte_plan *plan;
} way;

static void encode_page(const way *by, qkv_part part, const qkv_schedule *schedule, unsigned tier, const float *rows,
                        uint8_t *gains, uint8_t *codes, float *errors) {
  const size_t dim = schedule->dim;
  uint8_t group_codes[GROUP * QKV_DIM_MAX + QKVI_BLOCK_WIDTH];  // [token][dim]
  qkvi_tier_blocks blocks;
  qkvi_blocks_find(schedule, tier, &blocks);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, rows += GROUP * dim) {
    group_choice choice;
    if (by->all != NULL) {
      encode_group(by->all, by->weight, rows, dim, &choice, group_codes);
    } else {
      encode_bytes(schedule->reach[tier], by->plan, rows, dim, &choice, group_codes);
    }
    memcpy(gains + g * GROUP, choice.gains, sizeof choice.gains);
    memcpy(errors + g * GROUP, choice.errors, sizeof choice.errors);
    pack_group(part, schedule, tier, &blocks, group_codes, codes);
    codes += qkv_schedule_group_bytes(schedule, tier);
  }
}

QKV_DECLARE_ENCODE(TWIN(qkvi_encode)) {
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  const uint16_t *reach = schedule->reach[tier];
  if (encode_bytes_can(reach, weights)) {
    byte_plan plan;
    plan_bytes(reach, &plan);
    encode_page(&(way){.plan = &plan}, part, schedule, tier, rows, gains, codes, errors);
  } else {
    steps all;
    find_steps(reach, weights != NULL ? weights : qkvi_weights_alike, &all);
    encode_page(&(way){.all = &all, .weight = sum_weights(&all)}, part, schedule, tier, rows, gains, codes, errors);
  }
}
