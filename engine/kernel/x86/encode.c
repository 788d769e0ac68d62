// Encoding rows in vectors (kernel/encode_plain.h). Compiled once for each family.
//
// Coordinates of up to four bits go the way of encode_columns.h; with weights or deeper ones beside them that of
// encode_bytes.h where the processor has it, else through 32-bit lanes here, where thresholds of t are searched.
// Those of more go the way of encode_deep.h. Codes of a group that has some are gathered as bytes [token][coordinate]
// and then packed block by block (encode_pack.h).
#include <assert.h>
#include <math.h>
#include <stdbool.h>

#include "engine/codec/pack.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/encode_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/x86/encode_bytes.h"
#include "engine/kernel/x86/encode_columns.h"
#include "engine/kernel/x86/encode_deep.h"
#include "engine/kernel/x86/encode_pack.h"
#include "engine/kernel/x86/lane_sums.h"
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/turn_columns.h"
#include "engine/kernel/x86/twins.h"

// ---- Search ----

// The tables of a depth up to four at one scale.
typedef struct searcher {
  words first;
  lookup firsts[SHALLOW_MAX + 1], units;
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

enum { FOURS_BYTES = 16 * FOURS, ROW_BYTES = QKV_DIM_MAX + FOURS_BYTES };

// One row's t, and its centroids at every scale; 0 where a coordinate has more than four bits or none.
typedef struct row_bytes {
  uint8_t t[ROW_BYTES], units[QKVI_SCALES][ROW_BYTES];
} row_bytes;

static inline words t_of(const step *at, const float *row, float inverse) {
  const lanes y = load_step(at, row) * inverse;
  return (words) __builtin_convertvector(round_t((lanes)((words)y & 0x7fffffff)), signed_words);
}

static inline __attribute__((always_inline)) void try_shallow(unsigned depth, const steps *all, const float *row,
                                                              float inverse, row_bytes *out) {
  if (all->ends[depth + 1] == all->ends[depth]) return;
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const searcher search = searcher_of(depth, s);
    for (size_t i = all->ends[depth + 1]; i < all->ends[depth]; i++) {
      const words t = t_of(&all->at[i], row, inverse), cell = find_cells(&search, depth, t);
      const lanes units = (lanes)look_up(search.units, cell);
      if (s == 0) store_bytes(&all->at[i], t, out->t);
      store_bytes(&all->at[i], (words) __builtin_convertvector(units, signed_words), out->units[s]);
    }
  }
}

// Products of 16 bytes, of fours together, in LANES sums.
INLINE lanes dot_fours(const uint8_t *a, const uint8_t *b) {
#define HALF(at)                                                                        \
  _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(a + (at)))), \
                    _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(b + (at)))))
  const __m256i low = _mm256_permute4x64_epi64(_mm256_hadd_epi32(HALF(0), HALF(16)), 0xd8);
#if LANES == 16
  const __m256i high = _mm256_permute4x64_epi64(_mm256_hadd_epi32(HALF(32), HALF(48)), 0xd8);
  return (lanes)_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
#else
  return (lanes)_mm256_cvtepi32_ps(low);
#endif
#undef HALF
}

static void sum_shallow(const row_bytes *row, const float *fours, size_t coordinates, size_t index, group_sums *out) {
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    lanes a[SUMS] = {0}, b[SUMS] = {0};
    for (size_t c = 0; c < coordinates; c += FOURS_BYTES) {
      UNROLL
      for (size_t i = 0; i < SUMS; i++) {
        const size_t at = c + i * LANES * FOURS;
        const lanes weights = load_lanes(fours + at / FOURS);
        a[i] += weights * dot_fours(row->t + at, row->units[s] + at);
        b[i] += weights * dot_fours(row->units[s] + at, row->units[s] + at);
      }
    }
    out->with_row[s][index] = add_lanes(a);
    out->with_itself[s][index] = add_lanes(b);
  }
}

static float sum_squares(const row_weights *weights, size_t coordinates, const float *row, size_t dim) {
  lanes sums[SUMS] = {0};
  for (size_t c = 0; c < coordinates; c += LANES) {
    const lanes x = load_coordinates(row, c, dim);
    sums[c / LANES % SUMS] += load_lanes(weights->weights + c) * x * x;
  }
  return add_lanes(sums);
}

static inline __attribute__((always_inline)) void code_shallow(unsigned depth, const steps *all, const float *row,
                                                               float inverse, size_t scale, uint8_t *codes) {
  if (all->ends[depth + 1] == all->ends[depth]) return;
  const searcher search = searcher_of(depth, scale);
  for (size_t i = all->ends[depth + 1]; i < all->ends[depth]; i++) {
    const words cell = find_cells(&search, depth, t_of(&all->at[i], row, inverse));
    const words negative = (words)((signed_words)load_step(&all->at[i], row) < 0);
    store_bytes(&all->at[i], ((cell + (1u << (depth - 1))) ^ negative) << (QKV_DEPTH_MAX - depth), codes);
  }
}

// rows [GROUP][dim] to codes [GROUP][dim] at full depth, but for coordinates of more than four bits.
static void encode_searching(const uint16_t *reach, const row_weights *weights, const steps *all, const float *rows,
                             size_t dim, group_scales *scales, group_choice *choice, uint8_t *codes) {
  group_sums sums = {0};
  row_bytes row;
  memset(&row, 0, sizeof row);
  for (size_t t = 0; t < GROUP; t++) scales->squares[t] = sum_squares(weights, reach[1], rows + t * dim, dim);
  choose_scales(weights->sum, scales);
  for (size_t t = 0; t < GROUP; t++) {
    try_shallow(4, all, rows + t * dim, scales->inverse[t], &row);
    try_shallow(3, all, rows + t * dim, scales->inverse[t], &row);
    try_shallow(2, all, rows + t * dim, scales->inverse[t], &row);
    try_shallow(1, all, rows + t * dim, scales->inverse[t], &row);
    sum_shallow(&row, weights->fours, reach[1], t, &sums);
  }
  sum_deep_rows(all, weights->weights, rows, dim, scales->inverse, &sums);
  choose_attempts(scales, &sums, choice);
  for (size_t t = 0; t < GROUP; t++, rows += dim, codes += dim) {
    const float inverse = scales->inverse[t];
    const size_t scale = choice->scales[t];
    if (choice->zero[t]) {
      memset(codes, 0, dim);
      continue;
    }
    code_shallow(4, all, rows, inverse, scale, codes);
    code_shallow(3, all, rows, inverse, scale, codes);
    code_shallow(2, all, rows, inverse, scale, codes);
    code_shallow(1, all, rows, inverse, scale, codes);
  }
}

// How rows are coded.
typedef struct coded_as {
  qkv_part part;
  unsigned tier;
  const qkv_schedule *schedule;
} coded_as;

// A group's columns, with their squares in `scales`, to gains and codes.
static void encode_columns(const coded_as *as, const columns *all, group_scales *scales, uint8_t *gains,
                           uint8_t *codes, float *errors) {
  const uint16_t *reach = as->schedule->reach[as->tier];
  group_sums sums = {0};
  group_choice choice;
  tried_group tried;
  choose_scales(reach[1], scales);
  try_columns(reach, all, scales->inverse, &tried, &sums);
  choose_attempts(scales, &sums, &choice);
  if (!all_fours(reach)) {
    pack_columns(as->part, reach, &tried, &choice, codes);
  } else if (as->part == QKV_K) {
    pack_fours(QKV_K, reach[1], &tried, &choice, codes);
  } else {
    pack_fours(QKV_V, reach[1], &tried, &choice, codes);
  }
  memcpy(gains, choice.gains, sizeof choice.gains);
  memcpy(errors, choice.errors, sizeof choice.errors);
}

static void encode_by_columns(const coded_as *as, const float *rows, uint8_t *gains, uint8_t *codes, float *errors) {
  const size_t dim = as->schedule->dim, coordinates = as->schedule->reach[as->tier][1];
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    columns all;
    group_scales scales;
    columns_of_rows(rows + g * GROUP * dim, dim, coordinates, &all, scales.squares);
    encode_columns(as, &all, &scales, gains + g * GROUP, codes, errors + g * GROUP);
    codes += qkv_schedule_group_bytes(as->schedule, as->tier);
  }
}

QKV_DECLARE_ENCODE(TWIN(qkvi_encode)) {
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  const uint16_t *reach = schedule->reach[tier];
  const size_t dim = schedule->dim;
  const bool in_bytes = encode_bytes_can(reach);
  uint8_t group_codes[GROUP * QKV_DIM_MAX + QKVI_BLOCK_WIDTH];  // [token][dim]
  qkvi_tier_blocks blocks;
  row_weights each_weight;
  byte_plan plan;
  steps all;
  if (columns_can(reach, weights)) {
    return encode_by_columns(&(coded_as){part, tier, schedule}, rows, gains, codes, errors);
  }
  qkvi_blocks_find(schedule, tier, &blocks);
  weigh_coordinates(reach, weights != NULL ? weights : qkvi_weights_alike, &each_weight);
  find_steps(reach, &all);
  if (in_bytes) plan_bytes(reach, &plan);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, rows += GROUP * dim) {
    group_choice choice;
    group_scales scales;
    if (in_bytes) {
      encode_bytes(reach, &each_weight, &plan, &all, rows, dim, &scales, &choice, group_codes);
    } else {
      encode_searching(reach, &each_weight, &all, rows, dim, &scales, &choice, group_codes);
    }
    code_deep_rows(&all, rows, dim, scales.inverse, &choice, group_codes);
    memcpy(gains + g * GROUP, choice.gains, sizeof choice.gains);
    memcpy(errors + g * GROUP, choice.errors, sizeof choice.errors);
    pack_group(part, schedule, tier, &blocks, group_codes, codes);
    codes += qkv_schedule_group_bytes(schedule, tier);
  }
}

// The rows of a group, the first of which is row `first` of the page; zeros from `tokens` on.
static void find_rows(const qkv_rows *rows, size_t first, size_t tokens, const uint8_t *found[GROUP]) {
  static const uint16_t zeros[2 * TURN_SIZE_MAX];
  for (size_t t = 0; t < GROUP; t++) {
    found[t] = first + t < tokens ? rows->data + (first + t) * rows->stride : (const uint8_t *)zeros;
  }
}

INLINE void encode_turning(qkv_dtype dtype, const coded_as *as, const qkv_rows *rows, size_t tokens, uint8_t *gains,
                           uint8_t *codes) {
  const size_t dim = as->schedule->dim, stride = qkv_schedule_group_bytes(as->schedule, as->tier);
  turn_signs signs;
  fill_turn_signs(dim, &signs);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, gains += GROUP, codes += stride) {
    const uint8_t *found[GROUP];
    columns all;
    group_scales scales;
    float errors[GROUP];
    if (g * GROUP >= tokens) {
      memset(gains, 0, GROUP);
      memset(codes, 0, stride);
      continue;
    }
    find_rows(rows, g * GROUP, tokens, found);
    turn_group(dtype, found, rows->next, g * GROUP, dim, &signs, &all, scales.squares);
    encode_columns(as, &all, &scales, gains, codes, errors);
  }
}

static bool encodes_turning(const qkv_schedule *schedule, unsigned tier, qkv_dtype dtype) {
  const uint16_t *reach = schedule->reach[tier];
  return columns_can(reach, NULL) && reach[1] == schedule->dim && turns_columns(dtype, schedule->dim);
}

QKV_DECLARE_ENCODE_ROWS(TWIN(qkvi_encode_rows)) {
  if (encodes_turning(schedule, tier, rows->dtype)) {
    const coded_as as = {part, tier, schedule};
    if (rows->dtype == QKV_FP16) return encode_turning(QKV_FP16, &as, rows, tokens, gains, codes);
    return encode_turning(QKV_BF16, &as, rows, tokens, gains, codes);
  }
  encode_rows_plain(TWIN(qkvi_hadamard_forward), TWIN(qkvi_encode), part, schedule, tier, rows, tokens, gains, codes);
}
