// The scalar reference: it defines the bytes and the arithmetic. The innermost loops run over independent lanes,
// so that vectors do not change a sum.
#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/codec/codebook.h"
#include "engine/codec/pack.h"
#include "engine/codec/row.h"
#include "engine/kernel/encode_plain.h"
#include "engine/kernel/integer_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/mix_plain.h"
#include "engine/kernel/outliers_plain.h"
#include "engine/kernel/phases_plain.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/table.h"
#include "engine/kernel/walk_plain.h"

enum { GROUP = QKV_GROUP_TOKENS, QUADS = GROUP / 4 };

// Four slots. GCC keeps an array of these in registers, where it reloads an array of floats at every step: ten
// times the speed in score_group (64 coordinates x 16 slots: 87 against 867 ns).
typedef float quad __attribute__((vector_size(16)));

// Coordinates [deeper(reach, b), reach[b]) have exactly b bits.
static unsigned deeper(const uint16_t *reach, unsigned depth) {
  return depth < QKV_DEPTH_MAX ? reach[depth + 1] : 0;
}

// Coordinates that have any bits; the others are 0.
static unsigned coded(const qkv_page_codes *codes, size_t group) {
  return codes->schedule->reach[codes->tiers[group]][1];
}

// A group's values [coordinate][slot].
static void load_by_coordinate(qkv_part part, const qkv_page_codes *codes, size_t group, quad (*tile)[QUADS]) {
  qkvi_codes unpacked[QKV_DIM_MAX];
  const uint16_t *reach = codes->schedule->reach[codes->tiers[group]];
  qkvi_unpack(part, codes->schedule, codes->tiers[group], codes->groups[group], unpacked);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    const float *values = qkvi_tables.values[depth];
    for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) {
      const uint8_t *code = unpacked[c];
      for (size_t i = 0; i < QUADS; i++, code += 4) {
        tile[c][i] = (quad){values[code[0]], values[code[1]], values[code[2]], values[code[3]]};
      }
    }
  }
}

// The same as rows [slot][coordinate], `stride` floats apart.
static void load_by_slot(qkv_part part, const qkv_page_codes *codes, size_t group, float *tile, size_t stride) {
  qkvi_codes unpacked[QKV_DIM_MAX];
  const uint16_t *reach = codes->schedule->reach[codes->tiers[group]];
  qkvi_unpack(part, codes->schedule, codes->tiers[group], codes->groups[group], unpacked);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    const float *values = qkvi_tables.values[depth];
    for (size_t t = 0; t < GROUP; t++) {
      for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) tile[t * stride + c] = values[unpacked[c][t]];
    }
  }
}

static void score_group(const quad (*tile)[QUADS], unsigned coordinates, const float *query, const uint8_t *gains,
                        float *scores) {
  quad sums[QUADS] = {0};
  for (unsigned c = 0; c < coordinates; c++) {
    for (size_t i = 0; i < QUADS; i++) sums[i] += query[c] * tile[c][i];
  }
  for (size_t t = 0; t < GROUP; t++) scores[t] = qkv_gain_value(gains[t]) * sums[t / 4][t % 4];
}

static QKV_DECLARE_SCORES(scores_reference) {
  quad tile[QKV_DIM_MAX][QUADS];
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    load_by_coordinate(QKV_K, keys, g, tile);
    for (size_t i = 0; i < n; i++) {
      score_group(tile, coded(keys, g), queries + i * keys->schedule->dim, keys->gains + g * GROUP,
                  scores + i * QKV_PAGE_TOKENS + g * GROUP);
    }
  }
}

static void add_row(float *restrict sums, const float *restrict row, float weight, unsigned coordinates) {
  for (unsigned c = 0; c < coordinates; c++) sums[c] += weight * row[c];
}

static QKV_DECLARE_ACCUMULATE(accumulate_reference) {
  float tile[GROUP * QKV_DIM_MAX];
  const size_t dim = values->schedule->dim;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    const uint8_t *gains = values->gains + g * GROUP;
    load_by_slot(QKV_V, values, g, tile, dim);
    for (size_t i = 0; i < n; i++) {
      const float *w = weights + i * QKV_PAGE_TOKENS + g * GROUP;
      for (size_t t = 0; t < GROUP; t++) {
        add_row(sums + i * dim, tile + t * dim, w[t] * qkv_gain_value(gains[t]), coded(values, g));
      }
    }
  }
}

static QKV_DECLARE_DECODE(decode_reference) {
  const size_t dim = codes->schedule->dim;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    float *out = rows + g * GROUP * dim;
    memset(out, 0, GROUP * dim * sizeof *out);
    load_by_slot(part, codes, g, out, dim);
    for (size_t t = 0; t < GROUP; t++) {
      const float gain = qkv_gain_value(codes->gains[g * GROUP + t]);
      for (size_t c = 0; c < dim; c++) out[t * dim + c] *= gain;
    }
  }
}

// ---- Encoding: encode_plain.h ----

// sum_i weights[i] * row[i] * row[i]
static float sum_squares(const float *weights, const float *row, unsigned n) {
  float lanes[SUM_LANES] = {0};
  for (unsigned i = 0; i < n; i++) lanes[i % SUM_LANES] += weights[i] * row[i] * row[i];
  return halves_sum(lanes);
}

// t of a coordinate of up to four bits.
static unsigned whole_t(float x, float inverse) {
  const float t = fabsf(x * inverse);
  return (unsigned)((t < T_MAX ? t : T_MAX) + 8388608.0f - 8388608.0f);  // 2^23: to the nearest
}

// The code, at full depth.
static uint8_t code_of(unsigned depth, size_t scale, float x, float inverse) {
  if (depth > SHALLOW_MAX) {
    return qkv_codebook_code(x * inverse * (1.0f / T_PER_UNIT) * qkvi_tables.scales[scale]);
  }
  const uint8_t code = qkvi_tables.cells[scale][whole_t(x, inverse)];
  return signbit(x) ? (uint8_t)~code : code;
}

// A and B of coordinates of up to four bits.
static void try_shallow(const uint16_t *reach, const float *fours, const float *row, float inverse, size_t scale,
                        float *with_row, float *with_itself) {
  float a[SUM_LANES] = {0}, b[SUM_LANES] = {0};
  unsigned depth = SHALLOW_MAX;
  for (unsigned c = reach[SHALLOW_MAX + 1]; c < reach[1]; c += FOURS) {
    while (reach[depth] <= c) depth--;
    int32_t tk = 0, kk = 0;
    for (unsigned i = c; i < c + FOURS; i++) {
      const int32_t t = (int32_t)whole_t(row[i], inverse), k = qkvi_integers.units[scale][depth][t];
      tk += t * k;
      kk += k * k;
    }
    a[c / FOURS % SUM_LANES] += fours[c / FOURS] * (float)tk;
    b[c / FOURS % SUM_LANES] += fours[c / FOURS] * (float)kk;
  }
  *with_row = halves_sum(a);
  *with_itself = halves_sum(b);
}

// A and B of coordinates of more than four bits.
static void try_deep(const uint16_t *reach, const float *weights, const float *row, float inverse, size_t scale,
                     float *with_row, float *with_itself) {
  float a[SUM_LANES] = {0}, b[SUM_LANES] = {0};
  unsigned depth = QKV_DEPTH_MAX;
  for (unsigned c = 0; c < reach[SHALLOW_MAX + 1]; c++) {
    while (reach[depth] <= c) depth--;
    const uint8_t code = code_of(depth, scale, row[c], inverse);
    const float value = fabsf(qkvi_tables.values[depth][code >> (QKV_DEPTH_MAX - depth)]);
    const float k = value * qkvi_tables.inverse_step, weighted = weights[c] * k;
    a[c % SUM_LANES] += weighted * fabsf(row[c] * inverse);
    b[c % SUM_LANES] += weighted * k;
  }
  *with_row = halves_sum(a);
  *with_itself = halves_sum(b);
}

// Codes `count` rows, `dim` floats apart, into columns of `codes`. Relative squared error on Gaussian rows of 64, at
// a top tier of 4 and when planes are dropped afterwards, by the scales that are tried (with cells as fine as
// floats):
//   scales tried                            4 bits   3       2      1       8 bits
//   RMS                                     0.00922  0.0339  0.116  0.3588  0.0000410
//   RMS, then the fitted gain if it differs 0.00914  0.0338  0.116  0.3589  0.0000410
//   RMS and one step up and down            0.00787  0.0330  0.116  0.3626  0.0000332
//   RMS and two steps up and down           0.00745  0.0324  0.117  0.3680  0.0000316
static void encode_group(const uint16_t *reach, const row_weights *weights, const float *rows, size_t dim,
                         size_t count, group_choice *choice, qkvi_codes *codes) {
  group_scales scales = {0};
  group_sums sums = {0};
  for (size_t t = 0; t < count; t++) scales.squares[t] = sum_squares(weights->weights, rows + t * dim, reach[1]);
  choose_scales(weights->sum, &scales);
  for (size_t t = 0; t < count; t++) {
    const float *row = rows + t * dim, inverse = scales.inverse[t];
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      float a, b;
      try_shallow(reach, weights->fours, row, inverse, s, &a, &b);
      sums.with_row[s][t] = a;
      sums.with_itself[s][t] = b;
      try_deep(reach, weights->weights, row, inverse, s, &a, &b);
      sums.deep_with_row[s][t] = a;
      sums.deep_with_itself[s][t] = b;
    }
  }
  choose_attempts(&scales, &sums, choice);
  for (size_t t = 0; t < count; t++) {
    unsigned depth = QKV_DEPTH_MAX;
    for (unsigned c = 0; c < reach[1]; c++) {
      while (reach[depth] <= c) depth--;
      const uint8_t code = code_of(depth, choice->scales[t], rows[t * dim + c], scales.inverse[t]);
      codes[c][t] = choice->zero[t] ? 0 : code;
    }
  }
}

void qkvi_row_decode(const qkv_schedule *schedule, unsigned tier, const uint8_t *codes, uint8_t gain,
                     float *decoded) {
  const uint16_t *reach = schedule->reach[tier];
  const float value = qkv_gain_value(gain);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    const float *values = qkvi_tables.values[depth];
    for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) decoded[c] = values[codes[c]] * value;
  }
  memset(decoded + reach[1], 0, (schedule->dim - reach[1]) * sizeof *decoded);
}

void qkvi_row_round_trip(const qkv_schedule *schedule, unsigned tier, const float *weights, const float *row,
                         float *decoded) {
  if (weights == NULL) weights = qkvi_weights_alike;
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  (void)qkv_kernels_at(0);  // fills the tables
  const uint16_t *reach = schedule->reach[tier];
  qkvi_codes codes[QKV_DIM_MAX];
  group_choice choice;
  row_weights each_weight;
  weigh_coordinates(reach, weights, &each_weight);
  encode_group(reach, &each_weight, row, schedule->dim, 1, &choice, codes);
  const float gain = qkv_gain_value(choice.gains[0]);
  memset(decoded, 0, schedule->dim * sizeof *decoded);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) {
      decoded[c] = qkvi_tables.values[depth][codes[c][0] >> (QKV_DEPTH_MAX - depth)] * gain;
    }
  }
}

static QKV_DECLARE_ENCODE(encode_reference) {
  if (weights == NULL) weights = qkvi_weights_alike;
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  const size_t dim = schedule->dim;
  qkvi_codes unpacked[QKV_DIM_MAX];
  row_weights each_weight;
  weigh_coordinates(schedule->reach[tier], weights, &each_weight);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    group_choice choice;
    encode_group(schedule->reach[tier], &each_weight, rows + g * GROUP * dim, dim, GROUP, &choice, unpacked);
    memcpy(gains + g * GROUP, choice.gains, sizeof choice.gains);
    memcpy(errors + g * GROUP, choice.errors, sizeof choice.errors);
    qkvi_pack(part, schedule, tier, unpacked, codes);
    codes += qkv_schedule_group_bytes(schedule, tier);
  }
}

static QKV_DECLARE_ENCODE_ROWS(encode_rows_reference) {
  encode_rows_plain(hadamard_forward_plain, encode_reference, part, schedule, tier, rows, tokens, gains, codes,
                    errors, squares);
}

QKV_DECLARE_LOAD_ROWS(qkvi_load_rows_reference) {
  for (size_t t = 0; t < tokens; t++, out += dim) {
    if (rows->next != NULL) qkvi_fetch_row(rows->next, t);
    qkv_to_float(rows->dtype, rows->data + t * rows->stride, out, dim);
    squares[t] = qkvi_row_dot(out, out, dim);
  }
}

// ---- Dense transforms ----

static QKV_DECLARE_DENSE(multiply_reference) {
  float out[QKV_DIM_MAX];
  for (size_t i = 0; i < n; i++, rows += dim) {
    memset(out, 0, dim * sizeof *out);
    for (size_t c = 0; c < coordinates; c++) {
      float lanes[SUM_LANES] = {0};
      for (size_t j = 0; j < dim; j++) lanes[j % SUM_LANES] += matrix[c * dim + j] * rows[j];
      out[c] = halves_sum(lanes);
    }
    memcpy(rows, out, dim * sizeof *out);
  }
}

static QKV_DECLARE_DENSE(combine_reference) {
  float out[QKV_DIM_MAX];
  for (size_t i = 0; i < n; i++, rows += dim) {
    memset(out, 0, dim * sizeof *out);
    for (size_t c = 0; c < coordinates; c++) {
      for (size_t j = 0; j < dim; j++) out[j] += rows[c] * matrix[c * dim + j];
    }
    memcpy(rows, out, dim * sizeof *out);
  }
}

const qkv_kernels qkvi_kernels_reference = {
    .name = "reference",
    .scores = scores_reference,
    .accumulate = accumulate_reference,
    .encode = encode_reference,
    .encode_rows = encode_rows_reference,
    .load_rows = qkvi_load_rows_reference,
    .decode = decode_reference,
    .largest = largest_plain,
    .weigh = weigh_plain,
    .hadamard_forward = hadamard_forward_plain,
    .hadamard_inverse = hadamard_inverse_plain,
    .sums = sums_plain,
    .subtract = subtract_plain,
    .multiply = multiply_reference,
    .combine = combine_reference,
    .multiply_integer = qkvi_multiply_integer_reference,
    .add_waves = add_waves_plain,
    .score_columns = score_columns_plain,
    .turn_rows = turn_rows_plain,
    .frame_rows = frame_rows_plain,
    .add_products = qkvi_add_products_reference,
    .sum_levels = qkvi_sum_levels_reference,
    .add_anchors = add_anchors_plain,
    .prepare = prepare_plain,
    .scores_integer = qkvi_scores_integer_reference,
    .peaks = peaks_plain,
    .weigh_integer = weigh_integer_plain,
    .accumulate_integer = qkvi_accumulate_integer_reference,
    .score_outliers = score_outliers_plain,
    .weigh_outliers = weigh_outliers_plain,
    .mix = qkvi_mix_reference,
    .mix_integer = qkvi_mix_integer_reference,
    .scale_factors = scale_factors_plain,
    .sum_entries = qkvi_sum_entries_reference,
    .nearest_points = qkvi_nearest_points_reference,
    .sum_look_ups = qkvi_sum_look_ups_reference,
    .weigh_points = qkvi_weigh_points_reference,
};
