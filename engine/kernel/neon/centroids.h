// From the codes of a quarter of a block to centroids in bytes and their products with columns (kernel/integer.h).
//
// Products are of bytes of one sign: centroids of K are signed, as queries are; those of V are 128 more, unsigned, as
// weights are, and 128 times the weights are taken away in the end. With the dot product instructions four products
// are added to a 32-bit lane at once. Without them they are added in pairs, which stay apart until the end.
#ifndef QKV_ENGINE_KERNEL_NEON_CENTROIDS_H
#define QKV_ENGINE_KERNEL_NEON_CENTROIDS_H

#include "engine/kernel/integer.h"
#include "engine/kernel/neon/quarters.h"

#if defined(__aarch64__)

// ---- Look-ups ----

// The tables for a part have what the other part's have on x86 (table.h).
INLINE qkv_part table_of(qkv_part part) {
  return part == QKV_K ? QKV_V : QKV_K;
}

// The centroids of up to four bits, and of five or six.
INLINE uint8x16_t nibble_centroids(qkv_part part, qkvi_block_kind kind, const quarter *from, size_t field) {
  const uint8_t *table = qkvi_integers.sixes[table_of(part)][kind][field % 2];
  return vqtbl1q_u8(vld1q_u8(table), nibble_of(&from->above, field));
}

INLINE uint8x16_t six_centroids(qkv_part part, qkvi_block_kind kind, const quarter *from, size_t field) {
  const uint8x16_t third = keep(down(from->third, (int)(2 * field)), 3);
  const uint8x16_t index = vorrq_u8(vshlq_n_u8(third, 4), nibble_of(&from->above, field));
  return look_up_64(load_64(qkvi_integers.sixes[table_of(part)][kind][field % 2]), index);
}

// The high and low bytes of the centroids of more.
INLINE void deep_centroids(qkv_part part, qkvi_block_kind kind, const quarter *from, size_t field, uint8x16_t *high,
                           uint8x16_t *low) {
  const uint8_t(*planes)[256] = qkvi_integers.bytes[table_of(part)][kind - QKVI_BLOCK_7_LOW][field % 2];
  const table_256 above = load_256(planes[0]), below = load_256(planes[1]);
  *high = look_up_256(&above, byte_of(from, field));
  *low = look_up_256(&below, byte_of(from, field));
}

// ---- Products ----

#if defined(__ARM_FEATURE_DOTPROD)
typedef int32x4_t dots;

INLINE dots no_dots(void) {
  return vdupq_n_s32(0);
}

INLINE int32x4_t sum_of(dots all) {
  return all;
}

INLINE dots add_keys(dots sum, uint8x16_t keys, uint8x16_t columns, size_t lane) {
  const int8x16_t a = vreinterpretq_s8_u8(keys), b = vreinterpretq_s8_u8(columns);
  switch (lane) {
    case 0:
      return vdotq_laneq_s32(sum, a, b, 0);
    case 1:
      return vdotq_laneq_s32(sum, a, b, 1);
    case 2:
      return vdotq_laneq_s32(sum, a, b, 2);
    default:
      return vdotq_laneq_s32(sum, a, b, 3);
  }
}

INLINE dots add_values(dots sum, uint8x16_t values, uint8x16_t columns, size_t lane) {
  const uint32x4_t all = vreinterpretq_u32_s32(sum);
  switch (lane) {
    case 0:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(all, values, columns, 0));
    case 1:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(all, values, columns, 1));
    case 2:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(all, values, columns, 2));
    default:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(all, values, columns, 3));
  }
}
#else
// Two numbers for each of lanes 0 and 1, and of lanes 2 and 3.
typedef struct dots {
  int32x4_t low, high;
} dots;

INLINE dots no_dots(void) {
  return (dots){vdupq_n_s32(0), vdupq_n_s32(0)};
}

INLINE int32x4_t sum_of(dots all) {
  return vpaddq_s32(all.low, all.high);
}

// Four bytes, in all lanes.
INLINE uint8x16_t repeat_lane(uint8x16_t columns, size_t lane) {
  const uint32x4_t all = vreinterpretq_u32_u8(columns);
  switch (lane) {
    case 0:
      return vreinterpretq_u8_u32(vdupq_laneq_u32(all, 0));
    case 1:
      return vreinterpretq_u8_u32(vdupq_laneq_u32(all, 1));
    case 2:
      return vreinterpretq_u8_u32(vdupq_laneq_u32(all, 2));
    default:
      return vreinterpretq_u8_u32(vdupq_laneq_u32(all, 3));
  }
}

INLINE dots add_keys(dots sum, uint8x16_t keys, uint8x16_t columns, size_t lane) {
  const int8x16_t a = vreinterpretq_s8_u8(keys), b = vreinterpretq_s8_u8(repeat_lane(columns, lane));
  return (dots){vpadalq_s16(sum.low, vmull_s8(vget_low_s8(a), vget_low_s8(b))),
                vpadalq_s16(sum.high, vmull_high_s8(a, b))};
}

INLINE dots add_values(dots sum, uint8x16_t values, uint8x16_t columns, size_t lane) {
  const uint8x16_t b = repeat_lane(columns, lane);
  const uint16x8_t low = vmull_u8(vget_low_u8(values), vget_low_u8(b)), high = vmull_high_u8(values, b);
  return (dots){vreinterpretq_s32_u32(vpadalq_u16(vreinterpretq_u32_s32(sum.low), low)),
                vreinterpretq_s32_u32(vpadalq_u16(vreinterpretq_u32_s32(sum.high), high))};
}
#endif

// sums[column] += centroids . column, of the fields' columns of a block of K or a group of V. `width` is a constant,
// as is `field`, so that the sums stay in registers.
INLINE void add_dots(qkv_part part, uint8x16_t centroids, const uint8_t *columns, size_t field, size_t width,
                     dots *sums) {
  UNROLL
  for (size_t column = 0; column < width; column++) {
    const size_t word = field * width + column;
    const uint8x16_t four = vld1q_u8(columns + word / 4 * 16);
    sums[column] = part == QKV_K ? add_keys(sums[column], centroids, four, word % 4)
                                 : add_values(sums[column], centroids, four, word % 4);
  }
}

// ---- Sums ----

// Of up to QKVI_SHALLOW_MAX bits, and of more.
typedef struct quarter_sums {
  dots shallow[QKV_INTEGER_COLUMNS], high[QKV_INTEGER_COLUMNS], low[QKV_INTEGER_COLUMNS];
} quarter_sums;

INLINE void clear_dots(dots *sums, size_t width) {
  UNROLL
  for (size_t column = 0; column < width; column++) sums[column] = no_dots();
}

INLINE void add_shallow(qkv_part part, qkvi_block_kind kind, const quarter *from, size_t first, size_t end,
                        const uint8_t *columns, size_t width, dots *sums) {
  if (kind >= QKVI_BLOCK_NIBBLE_KINDS) {
    UNROLL
    for (size_t f = first; f < end; f++) {
      add_dots(part, six_centroids(part, kind, from, f), columns, f, width, sums);
    }
  } else {
    UNROLL
    for (size_t f = first; f < end; f++) {
      add_dots(part, nibble_centroids(part, kind, from, f), columns, f, width, sums);
    }
  }
}

INLINE void add_deep(qkv_part part, qkvi_block_kind kind, const quarter *from, size_t first, size_t end,
                     const uint8_t *columns, size_t width, quarter_sums *sums) {
  UNROLL
  for (size_t f = first; f < end; f++) {
    uint8x16_t high, low;
    deep_centroids(part, kind, from, f, &high, &low);
    add_dots(part, high, columns, f, width, sums->high);
    add_dots(part, low, columns, f, width, sums->low);
  }
}

// A row's total from the sums of its one or two columns; `low` NULL: 0.
INLINE float32x4_t total_of(const int32x4_t *x, const int32x4_t *low, unsigned parts) {
  float32x4_t totals[QKV_INTEGER_PARTS];
  for (unsigned p = 0; p < parts; p++) {
    totals[p] = vcvtq_f32_s32(x[p]);
    if (low != NULL) totals[p] = totals[p] + vcvtq_f32_s32(low[p]) * QKVI_LOW_PLANE;
  }
  return parts == 1 ? totals[0] : totals[0] * QKVI_HIGH_BYTE + totals[1];
}

// ---- Prefetch ----

enum { LINE = 64 };

typedef struct prefetching {
  const uint8_t *at, *end;
  size_t step;  // bytes
} prefetching;

// In so many steps.
static prefetching prefetching_of(qkv_ahead ahead, size_t steps) {
  if (ahead.bytes == 0 || steps == 0) return (prefetching){0};
  const size_t lines = (ahead.bytes + LINE - 1) / LINE;
  const uint8_t *from = ahead.from;
  return (prefetching){.at = from, .end = from + ahead.bytes, .step = (lines + steps - 1) / steps * LINE};
}

static void prefetch_some(prefetching *ahead) {
  for (size_t i = 0; i < ahead->step && ahead->at < ahead->end; i += LINE, ahead->at += LINE) {
    __builtin_prefetch(ahead->at);
  }
}

#endif
#endif
