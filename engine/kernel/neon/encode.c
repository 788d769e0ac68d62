// Encoding rows in vectors (kernel/encode_plain.h). Compiled with and without dot product instructions.
//
// Coordinates of up to four bits are bytes: t, the centroid in steps, the code, by look-ups in tables of 256, which
// stay in registers for all the rows of a group. Deeper ones go one by one, as in the reference.
#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/codec/codebook.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/encode_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/neon/encode_pack.h"
#include "engine/kernel/neon/variants.h"
#include "engine/kernel/neon/vectors.h"

enum { BYTES_MAX = 512 };  // coordinates whose sums are exact in any order: 512 * 255 * 88 is less than 2^24

// How rows are coded at a tier.
typedef struct way {
  const uint16_t *reach;
  row_weights weights;
  size_t stride;  // of rows of bytes: coordinates that have bits, up to 16s
  bool in_bytes;  // all up to four bits and alike: sums are whole numbers
  uint8_t depths[QKV_DIM_MAX];
} way;

// A group's rows, `stride` bytes apart.
typedef struct byte_rows {
  uint8_t t[GROUP * QKV_DIM_MAX], negative[GROUP * QKV_DIM_MAX];
  uint8_t units[QKVI_SCALES][GROUP * QKV_DIM_MAX];  // centroids; 0 where there are no bits
} byte_rows;

static unsigned deep_of(const way *by) {
  return by->reach[SHALLOW_MAX + 1];
}

// sum_i weights[i] * row[i] * row[i]
INLINE float sum_squares(const float *weights, const float *row, size_t n) {
  float32x4_t sums[SUM_QUADS] = {0};
  for (size_t i = 0; i < n; i += SUM_STEP) {
    UNROLL
    for (size_t q = 0; q < SUM_QUADS; q++) {
      if (i + 4 * q >= n) break;
      const float32x4_t x = vld1q_f32(row + i + 4 * q);
      sums[q] += vld1q_f32(weights + i + 4 * q) * x * x;
    }
  }
  return add_lanes(sums);
}

static void way_init(way *by, const uint16_t *reach, const float *weights) {
  by->reach = reach;
  by->in_bytes = weights == NULL && reach[1] <= BYTES_MAX && reach[SHALLOW_MAX + 1] == 0;
  weigh_coordinates(reach, weights != NULL ? weights : qkvi_weights_alike, &by->weights);
  by->stride = (reach[1] + 15u) / 16 * 16;
  memset(by->depths, 0, sizeof by->depths);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) memset(by->depths, (int)depth, reach[depth]);
}

// ---- Rows to bytes ----

INLINE uint8x8_t narrow(uint32x4_t low, uint32x4_t high) {
  return vmovn_u16(vcombine_u16(vmovn_u32(low), vmovn_u32(high)));
}

INLINE uint32x4_t whole_t(float32x4_t x, float inverse) {
  return vcvtnq_u32_f32(vminnmq_f32(vabsq_f32(x * inverse), vdupq_n_f32(T_MAX)));
}

INLINE uint32x4_t signs_of(float32x4_t x) {
  return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_f32(x), 31));
}

static void bring_row(const way *by, const float *row, float inverse, uint8_t *t, uint8_t *negative) {
  for (size_t c = 0; c < by->reach[1]; c += 8) {
    const float32x4_t low = vld1q_f32(row + c), high = vld1q_f32(row + c + 4);
    vst1_u8(t + c, narrow(whole_t(low, inverse), whole_t(high, inverse)));
    vst1_u8(negative + c, narrow(signs_of(low), signs_of(high)));
  }
  memset(t + by->reach[1], 0, by->stride - by->reach[1]);
  memset(negative + by->reach[1], 0, by->stride - by->reach[1]);
}

// The vectors that have coordinates of a depth.
INLINE void find_units_of(const way *by, unsigned depth, const uint8_t *t, const table_256 *table, uint8_t *units) {
  const size_t begin = by->reach[depth + 1] / 16 * 16, end = by->reach[depth];
  for (size_t r = 0; r < GROUP; r++, t += by->stride, units += by->stride) {
    for (size_t c = begin; c < end; c += 16) {
      const uint8x16_t mine = vceqq_u8(vld1q_u8(by->depths + c), vdupq_n_u8((uint8_t)depth));
      const uint8x16_t found = look_up_256(table, vld1q_u8(t + c));
      vst1q_u8(units + c, vbslq_u8(mine, found, vld1q_u8(units + c)));
    }
  }
}

static void find_units(const way *by, byte_rows *rows) {
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    memset(rows->units[s], 0, GROUP * by->stride);
    for (unsigned depth = 1; depth <= SHALLOW_MAX; depth++) {
      if (by->reach[depth] == by->reach[depth + 1]) continue;
      const table_256 table = load_256(qkvi_integers.units[s][depth]);
      find_units_of(by, depth, rows->t, &table, rows->units[s]);
    }
  }
}

// ---- Sums ----

INLINE uint32x4_t add_products(uint32x4_t sum, uint8x16_t a, uint8x16_t b) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_u32(sum, a, b);
#else
  return vpadalq_u16(vpadalq_u16(sum, vmull_u8(vget_low_u8(a), vget_low_u8(b))), vmull_high_u8(a, b));
#endif
}

static void sum_bytes(const way *by, const byte_rows *rows, group_sums *sums) {
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const uint8_t *t = rows->t, *units = rows->units[s];
    for (size_t r = 0; r < GROUP; r++) {
      uint32x4_t a = vdupq_n_u32(0), b = vdupq_n_u32(0);
      for (size_t c = 0; c < by->stride; c += 16, t += 16, units += 16) {
        const uint8x16_t unit = vld1q_u8(units);
        a = add_products(a, unit, vld1q_u8(t));
        b = add_products(b, unit, unit);
      }
      sums->with_row[s][r] = (float)vaddvq_u32(a);
      sums->with_itself[s][r] = (float)vaddvq_u32(b);
    }
  }
}

// The code at full depth of a coordinate of more than four bits.
INLINE uint8_t deep_code(float y, size_t scale) {
  return qkv_codebook_code(y * (1.0f / T_PER_UNIT) * qkvi_tables.scales[scale]);
}

// Products of fours together.
INLINE float32x4_t dot_fours(uint8x16_t a, uint8x16_t b) {
  const uint32x4_t low = vpaddlq_u16(vmull_u8(vget_low_u8(a), vget_low_u8(b)));
  const uint32x4_t high = vpaddlq_u16(vmull_high_u8(a, b));
  return vcvtq_f32_u32(vpaddq_u32(low, high));
}

static void sum_fours(const way *by, const byte_rows *rows, size_t r, group_sums *sums) {
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const uint8_t *t = rows->t + r * by->stride, *units = rows->units[s] + r * by->stride;
    float32x4_t a[SUM_QUADS] = {0}, b[SUM_QUADS] = {0};
    for (size_t c = 0; c < by->stride; c += 16) {
      const float32x4_t weights = vld1q_f32(by->weights.fours + c / FOURS);
      const uint8x16_t unit = vld1q_u8(units + c);
      a[c / 16 % SUM_QUADS] += weights * dot_fours(vld1q_u8(t + c), unit);
      b[c / 16 % SUM_QUADS] += weights * dot_fours(unit, unit);
    }
    sums->with_row[s][r] = add_lanes(a);
    sums->with_itself[s][r] = add_lanes(b);
  }
}

static void sum_deep(const way *by, size_t r, const float *row, float inverse, group_sums *sums) {
  float t[QKV_DIM_MAX], units[QKV_DIM_MAX];
  const unsigned deep = deep_of(by), end = (deep + SUM_STEP - 1) / SUM_STEP * SUM_STEP;
  memset(t, 0, end * sizeof *t);
  memset(units, 0, end * sizeof *units);
  for (unsigned c = 0; c < deep; c++) t[c] = fabsf(row[c] * inverse);
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    float32x4_t a[SUM_QUADS] = {0}, b[SUM_QUADS] = {0};
    for (unsigned c = 0; c < deep; c++) {
      const unsigned depth = by->depths[c], code = deep_code(row[c] * inverse, s) >> (QKV_DEPTH_MAX - depth);
      units[c] = fabsf(qkvi_tables.values[depth][code]) * qkvi_tables.inverse_step;
    }
    for (size_t c = 0; c < end; c += SUM_STEP) {
      UNROLL
      for (size_t q = 0; q < SUM_QUADS; q++) {
        const float32x4_t unit = vld1q_f32(units + c + 4 * q);
        const float32x4_t weighted = vld1q_f32(by->weights.weights + c + 4 * q) * unit;
        a[q] += weighted * vld1q_f32(t + c + 4 * q);
        b[q] += weighted * unit;
      }
    }
    sums->deep_with_row[s][r] = add_lanes(a);
    sums->deep_with_itself[s][r] = add_lanes(b);
  }
}

// ---- Codes ----

static void code_shallow(const way *by, const byte_rows *rows, const group_choice *choice, uint8_t *codes) {
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const table_256 cells = load_256(qkvi_tables.cells[s]);
    for (size_t r = 0; r < GROUP; r++) {
      if (choice->scales[r] != s) continue;
      for (size_t i = r * by->stride; i < (r + 1) * by->stride; i += 16) {
        const uint8x16_t cell = look_up_256(&cells, vld1q_u8(rows->t + i));
        vst1q_u8(codes + i, veorq_u8(cell, vld1q_u8(rows->negative + i)));
      }
    }
  }
}

// rows [GROUP][dim] to codes [GROUP][stride] at full depth.
static void encode_group(const way *by, const float *rows, size_t dim, group_choice *choice, uint8_t *codes) {
  byte_rows in_bytes;
  group_scales scales;
  group_sums sums = {0};
  for (size_t r = 0; r < GROUP; r++) {
    scales.squares[r] = sum_squares(by->weights.weights, rows + r * dim, by->reach[1]);
  }
  choose_scales(by->weights.sum, &scales);
  for (size_t r = 0; r < GROUP; r++) {
    const size_t at = r * by->stride;
    bring_row(by, rows + r * dim, scales.inverse[r], in_bytes.t + at, in_bytes.negative + at);
  }
  find_units(by, &in_bytes);
  if (by->in_bytes) {
    sum_bytes(by, &in_bytes, &sums);
  } else {
    for (size_t r = 0; r < GROUP; r++) {
      sum_fours(by, &in_bytes, r, &sums);
      sum_deep(by, r, rows + r * dim, scales.inverse[r], &sums);
    }
  }
  choose_attempts(&scales, &sums, choice);
  code_shallow(by, &in_bytes, choice, codes);
  for (size_t r = 0; r < GROUP; r++) {
    for (unsigned c = 0; c < deep_of(by); c++) {
      codes[r * by->stride + c] = deep_code(rows[r * dim + c] * scales.inverse[r], choice->scales[r]);
    }
    if (choice->zero[r]) memset(codes + r * by->stride, 0, by->stride);
  }
}

QKV_DECLARE_ENCODE(VARIANT(qkvi_encode)) {
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  uint8_t group_codes[GROUP * QKV_DIM_MAX];
  qkvi_tier_blocks blocks;
  way by;
  way_init(&by, schedule->reach[tier], weights);
  qkvi_blocks_find(schedule, tier, &blocks);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, rows += (size_t)GROUP * schedule->dim) {
    group_choice choice;
    encode_group(&by, rows, schedule->dim, &choice, group_codes);
    memcpy(gains + g * GROUP, choice.gains, sizeof choice.gains);
    memcpy(errors + g * GROUP, choice.errors, sizeof choice.errors);
    pack_group(part, schedule, tier, &blocks, group_codes, by.stride, codes);
    codes += qkv_schedule_group_bytes(schedule, tier);
  }
}
