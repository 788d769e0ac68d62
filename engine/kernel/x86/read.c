// Reading codes in vectors: scores, accumulate, decode. Compiled once for AVX2 and once for AVX-512.
//
// A group is turned into floats block by block (table.h). A line's 32-bit lane is a token of K or a coordinate of
// V, and its 16 two-bit places are coordinates of K or tokens of V; so the same code gives a tile [coordinate]
// [token] of K and [token][coordinate] of V, whose vectors the sums then run over in the reference's order.
#include <assert.h>

#include "engine/codec/pack.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/x86/bytes.h"
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/variants.h"

enum {
  GROUP = QKV_GROUP_TOKENS,
  TILE_GROUPS = 2,  // whose scores are taken at once
  TILE_TOKENS = TILE_GROUPS * GROUP,
  WIDE = 2 * LANES,  // floats that sums are taken of at once
  QUERIES_AT_ONCE = 4,
};

// ---- Codes to floats ----

#define EACH(byte) ((uint32_t)(byte)*0x01010101u)

// Brings the fields of a line of an even pair and of the one after it together: in `nibbles[QKVI_ODD_FIELDS]` field 1
// below and 3 above, in `nibbles[QKVI_EVEN_FIELDS]` 0 and 2.
static inline void join_fields(const uint8_t *first_line, const uint8_t *second_line, words nibbles[2]) {
  const words first = load_words(first_line), second = load_words(second_line);
  nibbles[QKVI_EVEN_FIELDS] = (first & EACH(0x33)) | (second & EACH(0xcc));
  nibbles[QKVI_ODD_FIELDS] = (first & EACH(0xcc)) | (second & EACH(0x33));
}

// What floats are multiplied with on the way, as rows are decoded: the gains of the tokens.
typedef struct scaling {
  const float *gains;  // [GROUP]; NULL: nothing
  bool by_item;        // a vector is a token's (V); else lanes are tokens (K)
} scaling;

// A vector of a block, its lanes from `lane` on.
INLINE void store_scaled(const scaling *by, unsigned item, size_t lane, lanes all, float *out) {
  if (by->gains != NULL) all *= by->by_item ? (lanes){0} + by->gains[item] : load_lanes(by->gains + lane);
  store_lanes(out + lane, all);
}

// The 16 vectors of 16 floats of a block, `stride` floats apart.
INLINE void load_block_4(const qkvi_block *block, const uint8_t *group, const scaling *by, float *tile,
                         size_t stride) {
  const lookup even = load_lookup(qkvi_tables.nibbles[block->kind][QKVI_EVEN_FIELDS]);
  const lookup odd = load_lookup(qkvi_tables.nibbles[block->kind][QKVI_ODD_FIELDS]);
  for (size_t lane = 0; lane < GROUP; lane += LANES) {
    words nibbles[2];
    join_fields(group + block->lines[0] + 4 * lane, group + block->lines[1] + 4 * lane, nibbles);
    for (unsigned i = 0; i < 4; i++) {
      float *out = tile + i * stride;
      const unsigned shift = 8 * i;
      const words low_even = look_up(even, nibbles[QKVI_EVEN_FIELDS] >> shift);
      const words low_odd = look_up(odd, nibbles[QKVI_ODD_FIELDS] >> shift);
      const words high_even = look_up(even, nibbles[QKVI_EVEN_FIELDS] >> (shift + 4));
      const words high_odd = look_up(odd, nibbles[QKVI_ODD_FIELDS] >> (shift + 4));
      store_scaled(by, i, lane, (lanes)low_even, out);
      store_scaled(by, i + 4, lane, (lanes)low_odd, out + 4 * stride);
      store_scaled(by, i + 8, lane, (lanes)high_even, out + 8 * stride);
      store_scaled(by, i + 12, lane, (lanes)high_odd, out + 12 * stride);
    }
  }
}

// load_block_4 for codes of more than four bits.
INLINE void load_block_deep(const qkvi_block *block, const uint8_t *group, const scaling *by, float *tile,
                            size_t stride) {
  const float(*tables)[256] = qkvi_tables.bytes[block->kind - QKVI_BLOCK_NIBBLE_KINDS];
  for (size_t lane = 0; lane < GROUP; lane += LANES) {
    words high[2], low[2];
    join_fields(group + block->lines[0] + 4 * lane, group + block->lines[1] + 4 * lane, high);
    join_fields(group + block->lines[2] + 4 * lane, group + block->lines[3] + 4 * lane, low);
    for (unsigned item = 0; item < GROUP; item++) {
      const unsigned field = item / 4, shift = 8 * (item % 4) + 4 * (field / 2);
      const words index = (high[field % 2] >> shift & 15) << 4 | (low[field % 2] >> shift & 15);
      store_scaled(by, item, lane, gather(tables[field % 2], index), tile + item * stride);
    }
  }
}

// Blocks that do not lie in whole lines, by way of bytes.
static void load_scattered(const qkvi_reader *r, size_t group, const scaling *by, float *tile, size_t stride) {
  qkvi_codes unpacked[QKV_DIM_MAX];
  const uint16_t *reach = r->codes->schedule->reach[r->tier];
  const size_t by_coordinate = r->part == QKV_K ? stride : 1, by_token = r->part == QKV_K ? 1 : stride;
  qkvi_unpack(r->part, r->codes->schedule, r->tier, r->codes->groups[group], unpacked);
  for (unsigned c = 0; c < r->blocks.coordinates; c++) {
    if (qkvi_block_is_whole(&r->blocks.blocks[c / QKVI_BLOCK_WIDTH])) continue;
    unsigned depth = 1;
    while (depth < QKV_DEPTH_MAX && reach[depth + 1] > c) depth++;
    for (size_t t = 0; t < GROUP; t++) {
      const float value = qkvi_tables.values[depth][unpacked[c][t]];
      tile[c * by_coordinate + t * by_token] = by->gains != NULL ? value * by->gains[t] : value;
    }
  }
}

// A group's floats: of K rows [coordinate], of V rows [token], `stride` floats apart. Those of coordinates that have
// no bits are left alone.
INLINE void load_group_scaled(qkvi_reader *r, size_t group, const scaling *by, float *tile, size_t stride) {
  qkvi_reader_turn_to(r, group);
  const uint8_t *from = r->codes->groups[group];
  for (size_t i = 0; i < r->blocks.count; i++) {
    const qkvi_block *block = &r->blocks.blocks[i];
    float *out = tile + i * QKVI_BLOCK_WIDTH * (r->part == QKV_K ? stride : 1);
    if (!qkvi_block_is_whole(block)) continue;
    if (block->kind < QKVI_BLOCK_NIBBLE_KINDS) {
      load_block_4(block, from, by, out, stride);
    } else {
      load_block_deep(block, from, by, out, stride);
    }
  }
  if (r->blocks.scattered + r->blocks.halves > 0) load_scattered(r, group, by, tile, stride);
}

static void load_group(qkvi_reader *r, size_t group, float *tile, size_t stride) {
  load_group_scaled(r, group, &(scaling){0}, tile, stride);
}

// ---- Scores ----

// For `count` queries, a constant, so that the sums stay in registers.
static inline __attribute__((always_inline)) void score_queries(const float *tile, unsigned coordinates,
                                                                const float *queries, size_t dim, size_t count,
                                                                const float *gains, float *scores) {
  for (size_t t = 0; t < TILE_TOKENS; t += WIDE) {
    lanes sums[QUERIES_AT_ONCE][2] = {0};
    for (unsigned c = 0; c < coordinates; c++) {
      const lanes low = load_lanes(tile + c * TILE_TOKENS + t), high = load_lanes(tile + c * TILE_TOKENS + t + LANES);
      for (size_t i = 0; i < count; i++) {
        sums[i][0] += queries[i * dim + c] * low;
        sums[i][1] += queries[i * dim + c] * high;
      }
    }
    for (size_t i = 0; i < count; i++) {
      store_lanes(scores + i * QKV_PAGE_TOKENS + t, load_lanes(gains + t) * sums[i][0]);
      store_lanes(scores + i * QKV_PAGE_TOKENS + t + LANES, load_lanes(gains + t + LANES) * sums[i][1]);
    }
  }
}

static void score_tile(const float *tile, unsigned coordinates, const float *queries, size_t dim, size_t n,
                       const float *gains, float *scores) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    score_queries(tile, coordinates, queries + i * dim, dim, 4, gains, scores + i * QKV_PAGE_TOKENS);
  }
  for (; i + 2 <= n; i += 2) {
    score_queries(tile, coordinates, queries + i * dim, dim, 2, gains, scores + i * QKV_PAGE_TOKENS);
  }
  if (i < n) score_queries(tile, coordinates, queries + i * dim, dim, 1, gains, scores + i * QKV_PAGE_TOKENS);
}

static QKV_DECLARE_SCORES(scores_variant) {
  _Alignas(64) float tile[QKV_DIM_MAX * TILE_TOKENS];  // [coordinate][TILE_TOKENS]
  float gains[TILE_TOKENS];
  const qkv_schedule *schedule = keys->schedule;
  qkvi_reader r;
  qkvi_reader_init(&r, QKV_K, keys);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g += TILE_GROUPS) {
    unsigned coordinates = 0;
    for (size_t j = 0; j < TILE_GROUPS; j++) {
      const unsigned coded = schedule->reach[keys->tiers[g + j]][1];
      if (coded > coordinates) coordinates = coded;
    }
    for (size_t j = 0; j < TILE_GROUPS; j++) {
      load_group(&r, g + j, tile + j * GROUP, TILE_TOKENS);
      for (unsigned c = r.blocks.coordinates; c < coordinates; c++) {
        memset(tile + c * TILE_TOKENS + j * GROUP, 0, GROUP * sizeof *tile);
      }
    }
    for (size_t t = 0; t < TILE_TOKENS; t += LANES) {
      store_lanes(gains + t, gain_lanes(keys->gains + g * GROUP + t));
    }
    score_tile(tile, coordinates, queries, schedule->dim, n, gains, scores + g * GROUP);
  }
}

// ---- Weighted sums ----

// For `count` queries of `weights` [count][GROUP], a constant.
static inline __attribute__((always_inline)) void add_rows(const float *tile, size_t dim, unsigned coordinates,
                                                           const float *weights, size_t count, float *sums) {
  unsigned c = 0;
  for (; c + WIDE <= coordinates; c += WIDE) {
    lanes all[QUERIES_AT_ONCE][2];
    for (size_t i = 0; i < count; i++) {
      all[i][0] = load_lanes(sums + i * dim + c);
      all[i][1] = load_lanes(sums + i * dim + c + LANES);
    }
    for (size_t t = 0; t < GROUP; t++) {
      const lanes low = load_lanes(tile + t * dim + c), high = load_lanes(tile + t * dim + c + LANES);
      for (size_t i = 0; i < count; i++) {
        all[i][0] += weights[i * GROUP + t] * low;
        all[i][1] += weights[i * GROUP + t] * high;
      }
    }
    for (size_t i = 0; i < count; i++) {
      store_lanes(sums + i * dim + c, all[i][0]);
      store_lanes(sums + i * dim + c + LANES, all[i][1]);
    }
  }
  for (; c < coordinates; c += 8) {
    for (size_t i = 0; i < count; i++) {
      eight all = load_eight(sums + i * dim + c);
      for (size_t t = 0; t < GROUP; t++) all += weights[i * GROUP + t] * load_eight(tile + t * dim + c);
      store_eight(sums + i * dim + c, all);
    }
  }
}

// weights [count][GROUP] = gain_t * w_t
static void scale_weights(const float *w, const uint8_t *gains, size_t count, float *weights) {
  for (size_t i = 0; i < count; i++) {
    for (size_t t = 0; t < GROUP; t += LANES) {
      store_lanes(weights + i * GROUP + t, load_lanes(w + i * QKV_PAGE_TOKENS + t) * gain_lanes(gains + t));
    }
  }
}

static void add_tile(const float *tile, size_t dim, unsigned coordinates, const float *w, const uint8_t *gains,
                     size_t n, float *sums) {
  float weights[QUERIES_AT_ONCE * GROUP];
  for (size_t i = 0; i < n;) {
    const size_t count = n - i >= 4 ? 4 : n - i >= 2 ? 2 : 1;
    scale_weights(w + i * QKV_PAGE_TOKENS, gains, count, weights);
    if (count == 4) {
      add_rows(tile, dim, coordinates, weights, 4, sums + i * dim);
    } else if (count == 2) {
      add_rows(tile, dim, coordinates, weights, 2, sums + i * dim);
    } else {
      add_rows(tile, dim, coordinates, weights, 1, sums + i * dim);
    }
    i += count;
  }
}

static QKV_DECLARE_ACCUMULATE(accumulate_variant) {
  _Alignas(64) float tile[GROUP * QKV_DIM_MAX];  // [token][dim]
  const size_t dim = values->schedule->dim;
  qkvi_reader r;
  qkvi_reader_init(&r, QKV_V, values);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    load_group(&r, g, tile, dim);
    add_tile(tile, dim, r.blocks.coordinates, weights + g * GROUP, values->gains + g * GROUP, n, sums);
  }
}

// ---- Rows ----

static void decode_group(qkvi_reader *r, size_t group, float *rows) {
  const size_t dim = r->codes->schedule->dim;
  float gains[GROUP];
  for (size_t t = 0; t < GROUP; t += LANES) {
    store_lanes(gains + t, gain_lanes(r->codes->gains + group * GROUP + t));
  }
  if (r->part == QKV_V) {
    load_group_scaled(r, group, &(scaling){gains, true}, rows, dim);
  } else {
    _Alignas(64) float tile[QKV_DIM_MAX * GROUP];
    load_group_scaled(r, group, &(scaling){gains, false}, tile, GROUP);
    for (size_t c = 0; c < r->blocks.coordinates; c += 8) {
      for (size_t t = 0; t < GROUP; t += 8) transpose_eight(tile + c * GROUP + t, GROUP, rows + t * dim + c, dim);
    }
  }
  const size_t coded = r->blocks.coordinates;
  for (size_t t = 0; coded < dim && t < GROUP; t++) memset(rows + t * dim + coded, 0, (dim - coded) * sizeof *rows);
}

static QKV_DECLARE_DECODE(decode_variant) {
  qkvi_reader r;
  qkvi_reader_init(&r, part, codes);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) decode_group(&r, g, rows + g * GROUP * codes->schedule->dim);
}

const qkv_kernels VARIANT(qkvi_kernels) = {
    .name = VARIANT_NAME,
    .needs = VARIANT_NEEDS,
    .scores = scores_variant,
    .accumulate = accumulate_variant,
    .encode = VARIANT(qkvi_encode),
    .encode_rows = VARIANT(qkvi_encode_rows),
    .load_rows = VARIANT(qkvi_load_rows),
    .decode = decode_variant,
    .largest = largest_plain,
    .weigh = weigh_plain,
    .hadamard_forward = VARIANT(qkvi_hadamard_forward),
    .hadamard_inverse = VARIANT(qkvi_hadamard_inverse),
    .sums = sums_plain,
    .subtract = subtract_plain,
    .multiply = VARIANT(qkvi_multiply),
    .combine = VARIANT(qkvi_combine),
    .multiply_integer = VARIANT(qkvi_multiply_integer),
    .add_waves = VARIANT(qkvi_add_waves),
    .score_columns = VARIANT(qkvi_score_columns),
    .turn_rows = VARIANT(qkvi_turn_rows),
    .frame_rows = VARIANT(qkvi_frame_rows),
    .add_products = VARIANT(qkvi_add_products),
    .sum_levels = VARIANT(qkvi_sum_levels),
    .add_anchors = VARIANT(qkvi_add_anchors),
    .prepare = VARIANT(qkvi_prepare),
    .scores_integer = VARIANT(qkvi_scores_integer),
    .peaks = VARIANT(qkvi_peaks),
    .weigh_integer = VARIANT(qkvi_weigh_integer),
    .accumulate_integer = VARIANT(qkvi_accumulate_integer),
    .score_outliers = VARIANT(qkvi_score_outliers),
    .weigh_outliers = VARIANT(qkvi_weigh_outliers),
    .mix = VARIANT(qkvi_mix),
    .mix_integer = VARIANT(qkvi_mix_integer),
    .scale_factors = VARIANT(qkvi_scale_factors),
    .sum_entries = VARIANT(qkvi_sum_entries),
    .nearest_points = VARIANT(qkvi_nearest_points),
    .sum_look_ups = VARIANT(qkvi_sum_look_ups),
    .weigh_points = VARIANT(qkvi_weigh_points),
};
