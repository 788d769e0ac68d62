// Attention on coded pages: the kernels of attend.h.
//
// Codes are multiplied as they are. In the product m16n8k32 of bytes (simt.h) lane 4 g + t gives four consecutive k
// of row g at a time. A 32-bit word of codes has 16 numbers of one row: 16 coordinates of a token in K, 16 tokens of
// a coordinate in V. So a word makes four of the lane's operands, in an order of k that both factors have:
//
//   even nibbles hold fields 0 and 2 of the word's bytes, odd ones fields 1 and 3
//   field f of byte i is number 4 f + i
//   operand     0: 0 8 1 9     1: 2 10 3 11     2: 4 12 5 13     3: 6 14 7 15
//
// A nibble chooses one of eight bytes (simt_choose). Up to two bits four entries are enough. With three and four bits
// there are 16: a nibble of 8 and more makes simt_choose fill the byte with an entry's sign, 0 or -1. So one choice
// by the nibble and one by the nibble with its highest bit flipped each give an entry on their half of the nibbles
// and a sign on the other, and the product adds both up; the entries allow for the signs.
#include "engine/kernel/simt/attend.h"

#include "engine/kernel/simt/calibrated.h"
#include "engine/kernel/simt/simt.h"

// To count the instructions of a page (tests/gpu/count.py): 2 or 4 compiles only the path of so many bits, without
// what most pages skip.
#ifndef QKV_SIMT_COUNT
#define QKV_SIMT_COUNT 0
#endif

#define TOKENS 64u
#define GROUPS 4u
#define GROUP_TOKENS 16u
#define PRODUCT_STRIDE 72

// What a lane keeps, from page to page, of the row that its quad softmax-accumulates. Registers are for sums.
typedef struct row_state {
  double total;  // with four rows those of the last four quads count
  float peak, scale;
} row_state;

// Scratch memory of a warp: what its lanes exchange, and what they keep.
typedef struct warp_shared {
  simt_gate gates[QKV_SIMT_SLOTS + QKV_SIMT_SLOTS % 2];
  const uint8_t *pages[QKV_SIMT_RUN_PAGES];     // images
  uint32_t directories[QKV_SIMT_RUN_PAGES][4];  // entries of the head
  simt_quad queries[2]
                   [SIMT_LANES];  // operands of each lane: of column QUAD, of blocks of coordinates QUAD_LANE + 4 i
  row_state rows[SIMT_LANES];     // by lane
  int32_t products[QKV_SIMT_COLUMNS][PRODUCT_STRIDE];        // of keys with queries, by token
  float gains[2][TOKENS];                                    // of keys, of values
  uint32_t weights[QKV_SIMT_COLUMNS][GROUPS][4];             // by column: bytes in the order of operands
  float scales[QKV_SIMT_COLUMNS], decays[QKV_SIMT_COLUMNS];  // by row: of the page's weights, of the sums so far
  float outliers[QKV_SIMT_COLUMNS]
                [QKV_SIMT_OUTLIERS];  // by row and outlier row: scores of keys, then weights of values
  float weight_limit;                 // calibrated
  float totals[QKV_SIMT_COLUMNS];     // of a page's weights, by row
  uint32_t unused[23 - (QKV_SIMT_SLOTS + 1) / 2 * 4];
} warp_shared;

#ifdef __cplusplus
#define CHECK_SIZE(condition) static_assert(condition, "size")
#else
#define CHECK_SIZE(condition) _Static_assert(condition, "size")
#endif
CHECK_SIZE(sizeof(warp_shared) == QKV_SIMT_WARP_STATE_BYTES);
CHECK_SIZE(sizeof(qkv_simt_tables) == QKV_SIMT_TABLE_BYTES);

// Blocks that run at once on a multiprocessor, at least: so registers are 128 at most, and 168 where the compiler
// cannot do with 128. More than three blocks of width 128 do not find shared memory anyway.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BLOCKS 3
#else
#define BLOCKS 4
#endif

#define LANE (simt_thread() % SIMT_LANES)
#define QUAD (LANE / 4)       // g above
#define QUAD_LANE (LANE % 4)  // t

// ---- Where codes lie ----

// A lane's blocks of 16 coordinates of one group: pair p of its n-th one at `at[p]` + n * `step[p]` bytes behind the
// first group.
typedef struct code_places {
  uint32_t depth, kind;
  uint32_t at[2], step[2];
} code_places;

// The depths of four groups, a byte each, of their tiers, which are whole bits.
SIMT_INLINE uint32_t depths_of(uint32_t tiers) {
  return tiers >> 3 & 0x0f0f0f0f;
}

// Bytes of the groups before one of them, and of all.
SIMT_INLINE uint32_t bytes_before(uint32_t depths, unsigned group, unsigned dim) {
  return 2 * dim * (depths * 0x01010100u >> (8 * group) & 255);
}

SIMT_INLINE uint32_t bytes_of_all(uint32_t depths, unsigned dim) {
  return 2 * dim * (depths * 0x01010101u >> 24);
}

// Of the lane that has blocks `block`, `block` + `every`, ...; `every` is even. Two blocks share a narrow line.
SIMT_INLINE code_places places_of(uint32_t depths, unsigned group, unsigned dim, unsigned block, unsigned every) {
  code_places places;
  const uint32_t depth = depths >> (8 * group) & 255, begin = bytes_before(depths, group, dim);
  places.depth = depth;
  places.kind = depth + (depth > 1) + (depth > 3) + ((depth & 1) != 0 ? block & 1 : 0);
  places.at[0] = begin + (depth > 1 ? block : block / 2) * 64;
  places.step[0] = (depth > 1 ? 64 : 32) * every;
  places.at[1] = depth < 3 ? places.at[0] : begin + 4 * dim + (depth > 3 ? block : block / 2) * 64;
  places.step[1] = depth < 3 ? places.step[0] : (depth > 3 ? 64 : 32) * every;
  return places;
}

// ---- Codes to operands ----

typedef struct look_up {
  uint32_t even_fields, odd_fields;
  simt_quad even, odd;  // deep: entries of both choices
} look_up;

// Kinds of the numbers in even fields and in odd ones.
SIMT_INLINE look_up look_up_of(bool deep, const qkv_simt_tables *tables, unsigned even, unsigned odd) {
  look_up entries;
  if (deep) {
    entries.even = simt_load_quad(tables->nibbles[even].even);
    entries.odd = simt_load_quad(tables->nibbles[odd].odd);
  } else {
    entries.even_fields = tables->fields[even];
    entries.odd_fields = tables->fields[odd];
  }
  return entries;
}

// The four operands of 16 codes; deep: as two summands.
SIMT_INLINE void expand(bool deep, const look_up *entries, uint32_t first, uint32_t second, uint32_t out[2][4]) {
  if (!deep) {
    const uint32_t even = first & 0x33333333, odd = first >> 2 & 0x33333333;
    out[0][0] = simt_choose(entries->even_fields, entries->even_fields, even);
    out[0][1] = simt_choose(entries->even_fields, entries->even_fields, even >> 16);
    out[0][2] = simt_choose(entries->odd_fields, entries->odd_fields, odd);
    out[0][3] = simt_choose(entries->odd_fields, entries->odd_fields, odd >> 16);
    return;
  }
  const uint32_t even = (first & 0x33333333) | (second & 0xcccccccc),
                 odd = (first & 0xcccccccc) | (second & 0x33333333);
  SIMT_UNROLL
  for (unsigned i = 0; i < 2; i++) {
    const uint32_t flip = i == 0 ? 0 : 0x88888888;
    const uint32_t *evens = entries->even.words + 2 * i, *odds = entries->odd.words + 2 * i;
    out[i][0] = simt_choose(evens[0], evens[1], even ^ flip);
    out[i][1] = simt_choose(evens[0], evens[1], (even ^ flip) >> 16);
    out[i][2] = simt_choose(odds[0], odds[1], odd ^ flip);
    out[i][3] = simt_choose(odds[0], odds[1], (odd ^ flip) >> 16);
  }
}

// Sums start with the bits of 1.5 * 2^23. As floats they are that much more than the sum, which is below 2^22: at
// most 64 * 255 * 88 or 128 * 127 * 88.
#define SUM_BITS 0x4b400000
SIMT_INLINE float sum_value(int32_t sum) {
  return simt_float((uint32_t)sum) - 12582912.0f;
}

// sums += two rows of 16 bytes each . the operands `by`, bytes of 16 numbers.
SIMT_INLINE void multiply_operands(bool is_signed, const uint32_t x[4], const uint32_t y[4], const uint32_t by[4],
                                   int32_t sums[4]) {
  SIMT_UNROLL
  for (unsigned o = 0; o < 4; o += 2) {
    const uint32_t a[SIMT_A_WORDS] = {x[o], y[o], x[o + 1], y[o + 1]};
    if (is_signed) {
      simt_multiply_s8(sums, a, by + o);
    } else {
      simt_multiply_u8(sums, a, by + o);
    }
  }
}

// sums += two rows of 16 codes each (word `at` of the quads and the next) . the operands `by`.
SIMT_INLINE void multiply_rows(bool deep, bool is_signed, const look_up *entries, const simt_quad *first,
                               const simt_quad *second, unsigned at, const uint32_t by[4], int32_t sums[4]) {
  uint32_t x[2][4], y[2][4];
  expand(deep, entries, first->words[at], second->words[at], x);
  expand(deep, entries, first->words[at + 1], second->words[at + 1], y);
  SIMT_UNROLL
  for (unsigned i = 0; i < (deep ? 2u : 1u); i++) multiply_operands(is_signed, x[i], y[i], by, sums);
}

// 16 bytes in the order of operands.
SIMT_INLINE void order_operands(const uint8_t *from, uint32_t out[4]) {
  const simt_quad natural = simt_load_quad(from);
  SIMT_UNROLL
  for (unsigned i = 0; i < 2; i++) {
    out[2 * i] = simt_choose(natural.words[i], natural.words[i + 2], 0x5140);
    out[2 * i + 1] = simt_choose(natural.words[i], natural.words[i + 2], 0x7362);
  }
}

// Four whole numbers, in the lowest bits of floats: their lowest bytes, and the bytes above.
SIMT_INLINE void pack_bytes(const float whole[4], uint32_t *low, uint32_t *high) {
  const uint32_t a = simt_choose(simt_bits(whole[0]), simt_bits(whole[1]), 0x5140);
  const uint32_t b = simt_choose(simt_bits(whole[2]), simt_bits(whole[3]), 0x5140);
  *low = simt_choose(a, b, 0x5410);
  *high = simt_choose(a, b, 0x7632);
}

// ---- Functions of the CPU's kernels ----

// 2^x: power_of_two of engine/kernel/integer_plain.h.
SIMT_INLINE float power_of_two(float x) {
  const float clamped = simt_larger(x, -100.0f), magic = clamped + 12582912.0f;
  const float r = clamped - (magic - 12582912.0f);
  float y = 0.00957010128f * r + 0.0559178591f;
  y = y * r + 0.240247443f;
  y = y * r + 0.693121791f;
  y = y * r + 0.999999285f;
  return simt_float(simt_bits(y) + (simt_bits(magic) << 23));
}

// exp(x) for x <= 0: exp_negative of engine/kernel/plain.h.
SIMT_INLINE float exp_negative(float x) {
  const float clamped = simt_larger(x, -87.0f);
  const float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
  float r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float y = 1.0f / 5040 * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  return x < -87.0f ? 0 : y * simt_float((uint32_t)((int32_t)n + 127) << 23);
}

// cap * tanh(score / cap): soft_cap of engine/kernel/kernel.c.
SIMT_INLINE float capped(float score, float cap, float inverse) {
  const float y = score * inverse, square = y * y;
  const uint32_t sign = simt_bits(y) & 0x80000000;
  const float size = simt_float(simt_bits(y) ^ sign);
  float small = square * -0.00694294181f + 0.0214706827f;
  small = small * square - 0.0539334677f;
  small = small * square + 0.133332253f;
  small = small * square - 0.333333313f;
  small = size + size * (square * small);
  const float power = exp_negative(size * -2.0f);
  const float large = (1.0f - power) / (1.0f + power);
  return simt_float(simt_bits(size < 0.5f ? small : large) | sign) * cap;
}

// ---- Outlier rows (engine/codec/outliers.h) ----

typedef struct outlier_rows {
  uint32_t count;
  const uint8_t *slots, *numbers;
  const float *scales;
} outlier_rows;

// What a head's keys (`part` 0) or values (1) have of them in a page; most pages have none.
SIMT_INLINE outlier_rows find_outliers(const uint8_t *page, unsigned head, unsigned part, unsigned dim) {
  enum { ROWS = 0xffff, WIDE = 16 };  // of an index entry
  outlier_rows found;
  const uint32_t offset = *(const uint32_t *)(const void *)(page + 40);
  found.count = 0;
  if (QKV_SIMT_COUNT > 0 || offset == 0) return found;
  head = simt_anew(head);
  const uint8_t *section = page + offset;
  const uint32_t heads = *(const uint16_t *)(const void *)(page + 26) + 1u;
  const uint32_t *index = (const uint32_t *)(const void *)section;
  const uint32_t begin = index[part * heads + head], keys = index[heads - 1], values = index[2 * heads - 1];
  const uint32_t all = (keys & ROWS) + (values & ROWS), entry = (part == 0 ? 0 : keys & ROWS) + (begin & ROWS);
  const uint32_t scales = (8 * heads + all + 3) / 4 * 4;
  const uint32_t before = (begin & ROWS) + (begin >> WIDE) + (part == 0 ? 0 : (keys & ROWS) + (keys >> WIDE));
  found.count = (index[part * heads + head + 1] & ROWS) - (begin & ROWS);
  found.slots = section + 8 * heads + entry;
  found.scales = (const float *)(const void *)(section + scales) + entry;
  found.numbers = section + (scales + 4 * all + 7) / 8 * 8 + before * dim;
  return found;
}

#define OUTLIER_WIDE 0x80
#define OUTLIER_SLOT 0x3f

// A coordinate of a row that begins at `numbers`.
SIMT_INLINE float outlier_value(const uint8_t *numbers, bool wide, unsigned c, float scale) {
  const int32_t number = wide ? (int32_t)((const int16_t *)(const void *)numbers)[c] : (int32_t)(int8_t)numbers[c];
  return (float)number * scale;
}

// A row . a query: 16 sums side by side, of which the lane has those of coordinates QUAD_LANE + 4 i, then halves.
SIMT_INLINE float outlier_score(const uint8_t *numbers, bool wide, float scale, const float *query, unsigned dim) {
  float sums[4] = {0, 0, 0, 0};
  SIMT_LOOP
  for (unsigned c = QUAD_LANE; c < dim; c += 16) {
    SIMT_UNROLL
    for (unsigned i = 0; i < 4; i++) sums[i] += query[c + 4 * i] * outlier_value(numbers, wide, c + 4 * i, scale);
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  sum += simt_exchange_float(sum, 1);
  return sum + simt_exchange_float(sum, 2);
}

// ---- Anchors (engine/codec/anchor.h) ----

SIMT_INLINE bool has_anchors(const uint8_t *page) {
  enum { FEATURES = 36, ANCHOR = 2 };
  return (*(const uint16_t *)(const void *)(page + FEATURES) & ANCHOR) != 0;
}

// Those of a head of an expanded page that has any.
SIMT_INLINE const uint8_t *find_anchors(const uint8_t *page, unsigned head) {
  const uint32_t *entry = (const uint32_t *)(const void *)(page + 64 + 16 * head);
  return page + entry[0] + entry[1] + entry[2];
}

// ---- The kernels ----

#define SHAPE_NAME qkv_simt_attend_64x4_q1w1
#define SHAPE_DIM 64
#define SHAPE_ROWS 4
#define SHAPE_QUERY_PARTS 1
#define SHAPE_WEIGHT_PARTS 1
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_NAME qkv_simt_attend_64x8_q1w1
#define SHAPE_DIM 64
#define SHAPE_ROWS 8
#define SHAPE_QUERY_PARTS 1
#define SHAPE_WEIGHT_PARTS 1
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_NAME qkv_simt_attend_64x4_q2w1
#define SHAPE_DIM 64
#define SHAPE_ROWS 4
#define SHAPE_QUERY_PARTS 2
#define SHAPE_WEIGHT_PARTS 1
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_NAME qkv_simt_attend_64x4_q2w2
#define SHAPE_DIM 64
#define SHAPE_ROWS 4
#define SHAPE_QUERY_PARTS 2
#define SHAPE_WEIGHT_PARTS 2
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_NAME qkv_simt_attend_128x4_q1w1
#define SHAPE_DIM 128
#define SHAPE_ROWS 4
#define SHAPE_QUERY_PARTS 1
#define SHAPE_WEIGHT_PARTS 1
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_NAME qkv_simt_attend_128x8_q1w1
#define SHAPE_DIM 128
#define SHAPE_ROWS 8
#define SHAPE_QUERY_PARTS 1
#define SHAPE_WEIGHT_PARTS 1
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_NAME qkv_simt_attend_128x4_q2w1
#define SHAPE_DIM 128
#define SHAPE_ROWS 4
#define SHAPE_QUERY_PARTS 2
#define SHAPE_WEIGHT_PARTS 1
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_NAME qkv_simt_attend_128x4_q2w2
#define SHAPE_DIM 128
#define SHAPE_ROWS 4
#define SHAPE_QUERY_PARTS 2
#define SHAPE_WEIGHT_PARTS 2
#include "engine/kernel/simt/attend_shape.inc"

// ---- Calibrated codes ----

#define SHAPE_CALIBRATED 1
#define SHAPE_NAME qkv_simt_calibrated_64
#define SHAPE_DIM 64
#define SHAPE_ROWS QKV_SIMT_FRAME_ROWS
#define SHAPE_QUERY_PARTS 2
#define SHAPE_WEIGHT_PARTS 2
#include "engine/kernel/simt/attend_shape.inc"

#define SHAPE_CALIBRATED 1
#define SHAPE_NAME qkv_simt_calibrated_128
#define SHAPE_DIM 128
#define SHAPE_ROWS QKV_SIMT_FRAME_ROWS
#define SHAPE_QUERY_PARTS 2
#define SHAPE_WEIGHT_PARTS 2
#include "engine/kernel/simt/attend_shape.inc"

#define TURN_DIM 64
#include "engine/kernel/simt/turn.inc"

#define TURN_DIM 128
#include "engine/kernel/simt/turn.inc"

// ---- Merging ----

// qkvi_attend_merge of engine/cache/attend_fold.c. A thread has some coordinates of each row.
SIMT_KERNEL(qkv_simt_merge_partials, qkv_simt_merge_args, QKV_SIMT_MERGE_THREADS, 1) {
  const qkv_simt_merge *merge = &args->merges[simt_block()];
  const uint32_t dim = args->dim, rows = args->rows, bytes = QKV_SIMT_PARTIAL_BYTES(dim, rows);
  for (uint32_t row = 0; row < rows; row++) {
    const uint8_t *from = merge->partials + (size_t)merge->first * bytes;
    for (uint32_t c = simt_thread(); c < dim; c += simt_threads()) {
      float peak = ((const float *)(const void *)from)[rows * dim + row];
      double total = ((const double *)(const void *)(from + 4 * rows * (dim + 1)))[row];
      float sum = ((const float *)(const void *)from)[row * dim + c];
      for (uint32_t i = 1; i < merge->end - merge->first; i++) {
        const uint8_t *next = from + (size_t)i * bytes;
        const float other_peak = ((const float *)(const void *)next)[rows * dim + row];
        if (other_peak < -3e38f) continue;  // -inf: nothing was seen
        const float most = simt_larger(peak, other_peak);
        const float share = exp_negative(peak - most), other_share = exp_negative(other_peak - most);
        sum = sum * share + ((const float *)(const void *)next)[row * dim + c] * other_share;
        total = (double)share * total +
                (double)other_share * ((const double *)(const void *)(next + 4 * rows * (dim + 1)))[row];
        peak = most;
      }
      ((float *)(void *)merge->out)[row * dim + c] = sum;
      if (c != 0) continue;
      ((float *)(void *)merge->out)[rows * dim + row] = peak;
      ((double *)(void *)(merge->out + 4 * rows * (dim + 1)))[row] = total;
    }
  }
}
