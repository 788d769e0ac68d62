// Reading codes in vectors: scores, accumulate, decode. Compiled with and without dot product instructions.
//
// A group is turned into floats quarter by quarter (quarters.h): tiles [coordinate][token] of K and [token]
// [coordinate] of V, whose vectors the sums then run over in the reference's order.
#include <string.h>

#include "engine/kernel/encode_plain.h"
#include "engine/kernel/integer_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/mix_plain.h"
#include "engine/kernel/neon/quarters.h"
#include "engine/kernel/neon/variants.h"
#include "engine/kernel/outliers_plain.h"
#include "engine/kernel/phases_plain.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/walk_plain.h"

enum { QUERIES_AT_ONCE = 4 };

static void gain_values(const uint8_t *gains, size_t n, float *values) {
  for (size_t t = 0; t < n; t++) values[t] = qkvi_integers.gains[gains[t]];
}

// ---- Codes to floats ----

// Four items of a field of up to four bits, one after the other `stride` floats apart: a byte of each lane, which
// becomes the index of the four bytes of a float.
INLINE void put_shallow(qkvi_block_kind kind, const quarter *from, size_t field, float *tile, size_t stride) {
  static const uint8_t bytes_of_float[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  static const uint8_t item_of_lane[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
  const uint8x16x4_t table = vld1q_u8_x4((const uint8_t *)qkvi_tables.nibbles[kind][field % 2]);
  const uint8x16_t nibbles = vshlq_n_u8(nibble_of(&from->above, field), 2);
  UNROLL
  for (uint8_t i = 0; i < 4; i++, tile += stride) {
    const uint8x16_t repeated = vqtbl1q_u8(nibbles, vaddq_u8(vld1q_u8(item_of_lane), vdupq_n_u8(i)));
    const uint8x16_t found = vqtbl4q_u8(table, vorrq_u8(repeated, vld1q_u8(bytes_of_float)));
    vst1q_f32(tile, vreinterpretq_f32_u8(found));
  }
}

// put_shallow for codes of more than four bits.
static void put_deep(qkvi_block_kind kind, const quarter *from, size_t field, float *tile, size_t stride) {
  const float *table = qkvi_tables.bytes[kind - QKVI_BLOCK_NIBBLE_KINDS][field % 2];
  uint8_t index[QUARTER_BYTES];
  vst1q_u8(index, byte_of(from, field));
  for (size_t i = 0; i < 4; i++, tile += stride) {
    for (size_t lane = 0; lane < 4; lane++) tile[lane] = table[index[4 * lane + i]];
  }
}

static void put_field(qkvi_block_kind kind, const quarter *from, size_t field, float *tile, size_t stride) {
  if (kind < QKVI_BLOCK_NIBBLE_KINDS) {
    put_shallow(kind, from, field, tile, stride);
  } else if (kind != QKVI_BLOCK_SCATTERED) {
    put_deep(kind, from, field, tile, stride);
  }
}

// A quarter's floats, [item][lane]: 16 rows of four. What has no bits is left alone.
INLINE void put_quarter(qkv_part part, const qkvi_tier_blocks *layout, size_t b, const uint8_t *group, size_t at,
                        float *tile, size_t stride) {
  const qkvi_block_kind first = kind_of_half(layout, b, 0), second = kind_of_half(layout, b, 1);
  if (first < QKVI_BLOCK_NIBBLE_KINDS && qkvi_block_is_whole(&layout->blocks[b])) {
    const quarter from = load_whole(&layout->blocks[b], group, at, false);
    UNROLL
    for (size_t f = 0; f < FIELDS; f++) put_shallow(first, &from, f, tile + 4 * f * stride, stride);
    return;
  }
  const quarter from = load_any(part, layout, b, group, at);
  for (size_t f = 0; f < FIELDS; f++) {
    const size_t half = part == QKV_K ? f / 2 : at / 2;
    put_field(half == 0 ? first : second, &from, f, tile + 4 * f * stride, stride);
  }
}

// A group's floats: of K rows [coordinate], of V rows [token], `stride` floats apart. Those of coordinates that have
// no bits are left alone.
INLINE void load_group(qkv_part part, qkvi_reader *r, size_t group, float *tile, size_t stride) {
  qkvi_reader_turn_to(r, group);
  for (size_t b = 0; b < r->blocks.count; b++) {
    float *out = tile + b * QKVI_BLOCK_WIDTH * (part == QKV_K ? stride : 1);
    for (size_t at = 0; at < QUARTERS; at++) {
      put_quarter(part, &r->blocks, b, r->codes->groups[group], at, out + 4 * at, stride);
    }
  }
}

// ---- Scores ----

// For `count` queries, a constant, so that the sums stay in registers.
INLINE void score_queries(const float *tile, unsigned coordinates, const float *queries, size_t dim, size_t count,
                          const float *gains, float *scores) {
  float32x4_t sums[QUERIES_AT_ONCE][QUARTERS] = {0};
  for (unsigned c = 0; c < coordinates; c++) {
    UNROLL
    for (size_t q = 0; q < QUARTERS; q++) {
      const float32x4_t values = vld1q_f32(tile + c * GROUP + 4 * q);
      UNROLL
      for (size_t i = 0; i < count; i++) sums[i][q] += queries[i * dim + c] * values;
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t q = 0; q < QUARTERS; q++) {
      vst1q_f32(scores + i * QKV_PAGE_TOKENS + 4 * q, vld1q_f32(gains + 4 * q) * sums[i][q]);
    }
  }
}

static QKV_DECLARE_SCORES(scores_variant) {
  float tile[QKV_DIM_MAX * GROUP];  // [coordinate][token]
  const size_t dim = keys->schedule->dim;
  qkvi_reader r;
  qkvi_reader_init(&r, QKV_K, keys);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    float gains[GROUP], *out = scores + g * GROUP;
    gain_values(keys->gains + g * GROUP, GROUP, gains);
    load_group(QKV_K, &r, g, tile, GROUP);
    size_t i = 0;
    for (; i + QUERIES_AT_ONCE <= n; i += QUERIES_AT_ONCE) {
      score_queries(tile, r.blocks.coordinates, queries + i * dim, dim, QUERIES_AT_ONCE, gains,
                    out + i * QKV_PAGE_TOKENS);
    }
    for (; i < n; i++) {
      score_queries(tile, r.blocks.coordinates, queries + i * dim, dim, 1, gains, out + i * QKV_PAGE_TOKENS);
    }
  }
}

// ---- Weighted sums ----

// For `count` queries of `weights` [count][GROUP], a constant; eight coordinates.
INLINE void add_rows(const float *tile, size_t dim, const float *weights, size_t count, float *sums) {
  float32x4_t all[QUERIES_AT_ONCE][2];
  UNROLL
  for (size_t i = 0; i < count; i++) {
    all[i][0] = vld1q_f32(sums + i * dim);
    all[i][1] = vld1q_f32(sums + i * dim + 4);
  }
  for (size_t t = 0; t < GROUP; t++) {
    const float32x4_t low = vld1q_f32(tile + t * dim), high = vld1q_f32(tile + t * dim + 4);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      all[i][0] += weights[i * GROUP + t] * low;
      all[i][1] += weights[i * GROUP + t] * high;
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    vst1q_f32(sums + i * dim, all[i][0]);
    vst1q_f32(sums + i * dim + 4, all[i][1]);
  }
}

INLINE void add_tile(const float *tile, size_t dim, unsigned coordinates, const float *w, const float *gains,
                     size_t count, float *sums) {
  float weights[QUERIES_AT_ONCE * GROUP];
  for (size_t i = 0; i < count; i++) {
    for (size_t t = 0; t < GROUP; t++) weights[i * GROUP + t] = w[i * QKV_PAGE_TOKENS + t] * gains[t];
  }
  for (unsigned c = 0; c < coordinates; c += 8) add_rows(tile + c, dim, weights, count, sums + c);
}

static QKV_DECLARE_ACCUMULATE(accumulate_variant) {
  float tile[GROUP * QKV_DIM_MAX];  // [token][dim]
  const size_t dim = values->schedule->dim;
  qkvi_reader r;
  qkvi_reader_init(&r, QKV_V, values);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    float gains[GROUP];
    const float *w = weights + g * GROUP;
    gain_values(values->gains + g * GROUP, GROUP, gains);
    load_group(QKV_V, &r, g, tile, dim);
    size_t i = 0;
    for (; i + QUERIES_AT_ONCE <= n; i += QUERIES_AT_ONCE) {
      add_tile(tile, dim, r.blocks.coordinates, w + i * QKV_PAGE_TOKENS, gains, QUERIES_AT_ONCE, sums + i * dim);
    }
    for (; i < n; i++) {
      add_tile(tile, dim, r.blocks.coordinates, w + i * QKV_PAGE_TOKENS, gains, 1, sums + i * dim);
    }
  }
}

// ---- Rows ----

// out[j][i] = in[i][j] of 4 x 4 floats.
INLINE void transpose_four(const float *in, size_t in_stride, float *out, size_t out_stride) {
  const float32x4_t first = vld1q_f32(in), second = vld1q_f32(in + in_stride);
  const float32x4_t third = vld1q_f32(in + 2 * in_stride), fourth = vld1q_f32(in + 3 * in_stride);
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(first, second));
  const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(first, second));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(third, fourth));
  const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(third, fourth));
  vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(a, c)));
  vst1q_f32(out + out_stride, vreinterpretq_f32_f64(vtrn1q_f64(b, d)));
  vst1q_f32(out + 2 * out_stride, vreinterpretq_f32_f64(vtrn2q_f64(a, c)));
  vst1q_f32(out + 3 * out_stride, vreinterpretq_f32_f64(vtrn2q_f64(b, d)));
}

static void decode_keys(qkvi_reader *r, size_t group, float *rows) {
  float tile[QKV_DIM_MAX * GROUP];
  const size_t dim = r->codes->schedule->dim;
  load_group(QKV_K, r, group, tile, GROUP);
  for (size_t c = 0; c < r->blocks.coordinates; c += 4) {
    for (size_t t = 0; t < GROUP; t += 4) transpose_four(tile + c * GROUP + t, GROUP, rows + t * dim + c, dim);
  }
}

static QKV_DECLARE_DECODE(decode_variant) {
  const size_t dim = codes->schedule->dim;
  qkvi_reader r;
  qkvi_reader_init(&r, part, codes);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, rows += GROUP * dim) {
    float gains[GROUP];
    gain_values(codes->gains + g * GROUP, GROUP, gains);
    if (part == QKV_K) {
      decode_keys(&r, g, rows);
    } else {
      load_group(QKV_V, &r, g, rows, dim);
    }
    const size_t coded = r.blocks.coordinates;
    for (size_t t = 0; t < GROUP; t++) {
      float *row = rows + t * dim;
      for (size_t c = 0; c < coded; c++) row[c] *= gains[t];
      memset(row + coded, 0, (dim - coded) * sizeof *row);
    }
  }
}

static QKV_DECLARE_ENCODE_ROWS(encode_rows_variant) {
  encode_rows_plain(hadamard_forward_plain, VARIANT(qkvi_encode), part, schedule, tier, rows, tokens, gains, codes,
                    errors, squares);
}

const qkv_kernels VARIANT(qkvi_kernels) = {
    .name = VARIANT_NAME,
    .needs = VARIANT_NEEDS,
    .scores = scores_variant,
    .accumulate = accumulate_variant,
    .encode = VARIANT(qkvi_encode),
    .encode_rows = encode_rows_variant,
    .load_rows = qkvi_load_rows_reference,
    .decode = decode_variant,
    .largest = largest_plain,
    .weigh = weigh_plain,
    .hadamard_forward = hadamard_forward_plain,
    .hadamard_inverse = hadamard_inverse_plain,
    .sums = sums_plain,
    .subtract = subtract_plain,
    .multiply = VARIANT(qkvi_multiply),
    .combine = VARIANT(qkvi_combine),
    .multiply_integer = VARIANT(qkvi_multiply_integer),
    .add_waves = add_waves_plain,
    .score_columns = score_columns_plain,
    .turn_rows = turn_rows_plain,
    .frame_rows = frame_rows_plain,
    .add_products = qkvi_add_products_reference,
    .sum_levels = qkvi_sum_levels_reference,
    .add_anchors = add_anchors_plain,
    .prepare = prepare_plain,
    .scores_integer = VARIANT(qkvi_scores_integer),
    .peaks = peaks_plain,
    .weigh_integer = weigh_integer_plain,
    .accumulate_integer = VARIANT(qkvi_accumulate_integer),
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
