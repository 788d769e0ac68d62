// The codes of a quarter of a block (kernel/blocks.h): four lanes of four bytes, a vector. A lane is a token of K or
// a coordinate of V, and each of its 16 two-bit fields a coordinate of K or a token of V (page.h).
//
// Whole blocks are read as they lie. Of all others the two halves, 8 coordinates each, are brought to where a wide
// line of the block would have them: of K to fields 0 and 1 of every byte and to 2 and 3, of V to the lanes of two
// quarters each; a narrow line's bits to the lower one of a field. From then on there is no difference, but that each
// half has a kind of its own.
#ifndef QKV_ENGINE_KERNEL_NEON_QUARTERS_H
#define QKV_ENGINE_KERNEL_NEON_QUARTERS_H

#include "engine/kernel/blocks.h"
#include "engine/kernel/neon/vectors.h"
#include "engine/kernel/table.h"

#if defined(__aarch64__)

enum { FIELDS = 4, QUARTERS = 4, QUARTER_BYTES = 16, HALVES = 2 };

// ---- Halves of blocks ----

// Bits at 0 and 4 of every byte to fields 0 and 1, which odd pairs have the other way round.
INLINE uint8x16_t to_two_fields(uint8x16_t all, uint8_t mask, bool odd) {
  const uint8x16_t first = keep(all, mask), second = keep(down(all, 4), mask);
  return odd ? vorrq_u8(vshlq_n_u8(first, 2), second) : vorrq_u8(first, vshlq_n_u8(second, 2));
}

// Two bytes a token: coordinates 2 f and 2 f + 1 in field f, in odd pairs in field f ^ 1.
static uint8x16_t key_half(const uint8_t *line, size_t quarter, bool odd, uint8_t mask, int place) {
  static const uint8_t twice[16] = {0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7};
  static const int8_t shifts[2][16] = {{0, 0, -2, -2, 0, 0, -2, -2, 0, 0, -2, -2, 0, 0, -2, -2},
                                       {-2, -2, 0, 0, -2, -2, 0, 0, -2, -2, 0, 0, -2, -2, 0, 0}};
  const uint8x16_t two = vcombine_u8(vld1_u8(line + 8 * quarter), vdup_n_u8(0));
  const uint8x16_t all = vshlq_u8(vqtbl1q_u8(two, vld1q_u8(twice)), vld1q_s8(shifts[odd]));
  return to_two_fields(down(all, place), mask, odd);
}

// A byte a token: coordinate f below and 4 + f above in field f, in odd pairs in field f ^ 1.
static uint8x16_t key_quarter(const uint8_t *line, size_t quarter, bool odd) {
  static const uint8_t four_times[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  static const int8_t shifts[2][16] = {{0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6},
                                       {-2, 0, -6, -4, -2, 0, -6, -4, -2, 0, -6, -4, -2, 0, -6, -4}};
  const uint8x16_t four = vreinterpretq_u8_u32(vld1q_dup_u32((const uint32_t *)(const void *)(line + 4 * quarter)));
  const uint8x16_t all = vshlq_u8(vqtbl1q_u8(four, vld1q_u8(four_times)), vld1q_s8(shifts[odd]));
  const uint8x16_t low = keep(all, 1), high = keep(all, 2);
  return odd ? vorrq_u8(vshlq_n_u8(low, 2), vshrq_n_u8(high, 1)) : vorrq_u8(low, vshlq_n_u8(high, 1));
}

// A half's bits of a pair in fields 0 and 1.
static uint8x16_t key_unit(const qkvi_unit *unit, const uint8_t *group, size_t quarter, bool odd) {
  const uint8_t *line = group + unit->line;
  const int place = unit->place;
  switch (unit->how) {
    case QKVI_UNIT_WIDE:
      return keep(down(vld1q_u8(line + QUARTER_BYTES * quarter), 4 * place), 0x0f);
    case QKVI_UNIT_WIDE_HALF:
      return key_half(line, quarter, odd, 3, 0);
    case QKVI_UNIT_NARROW:
      return keep(down(vld1q_u8(line + QUARTER_BYTES * quarter), 4 * (place & 1) + (place >> 1)), 0x05);
    case QKVI_UNIT_NARROW_HALF:
      return key_half(line, quarter, odd, 1, place);
    case QKVI_UNIT_NARROW_QUARTER:
      return key_quarter(line, quarter, odd);
    default:
      return vdupq_n_u8(0);
  }
}

// A half's bits of a pair: one of its two quarters.
static uint8x16_t value_unit(const qkvi_unit *unit, const uint8_t *group, size_t quarter) {
  const uint8_t *line = group + unit->line;
  const size_t place = unit->place, at = QUARTER_BYTES * (quarter % 2);
  enum { HALF_BYTES = 2 * QUARTER_BYTES };
  switch (unit->how) {
    case QKVI_UNIT_WIDE:
      return vld1q_u8(line + HALF_BYTES * place + at);
    case QKVI_UNIT_WIDE_HALF:
      return vld1q_u8(line + at);
    case QKVI_UNIT_NARROW:
      return keep(down(vld1q_u8(line + HALF_BYTES * (place & 1) + at), (int)(place >> 1)), 0x55);
    case QKVI_UNIT_NARROW_HALF:
      return keep(down(vld1q_u8(line + at), (int)place), 0x55);
    case QKVI_UNIT_NARROW_QUARTER:
      return keep(down(vld1q_u8(line), (int)(quarter % 2)), 0x55);
    default:
      return vdupq_n_u8(0);
  }
}

INLINE uint8x16_t load_halves(qkv_part part, const qkvi_unit units[HALVES][QKV_DEPTH_MAX / 2], unsigned pair,
                              const uint8_t *group, size_t quarter) {
  if (part == QKV_V) return value_unit(&units[quarter / 2][pair], group, quarter);
  const uint8x16_t second = key_unit(&units[1][pair], group, quarter, pair % 2 != 0);
  return vorrq_u8(key_unit(&units[0][pair], group, quarter, pair % 2 != 0), vshlq_n_u8(second, 4));
}

// ---- Quarters ----

// Fields 0 and 2 of two lines, of an even pair and the one after it, in the nibbles of `even`; 1 and 3 in `odd`.
typedef struct joined {
  uint8x16_t even, odd;
} joined;

typedef struct quarter {
  joined above;      // pairs 0 and 1
  joined below;      // pairs 2 and 3
  uint8x16_t third;  // pair 2
} quarter;

INLINE joined join(uint8x16_t first, uint8x16_t second) {
  const uint8x16_t even = vdupq_n_u8(0x33);
  return (joined){vbslq_u8(even, first, second), vbslq_u8(even, second, first)};
}

// Of a whole block; without `deep` of up to QKVI_SHALLOW_MAX bits.
INLINE quarter load_whole(const qkvi_block *block, const uint8_t *group, size_t at, bool deep) {
  const uint8_t *from = group + QUARTER_BYTES * at;
  quarter all = {.above = join(vld1q_u8(from + block->lines[0]), vld1q_u8(from + block->lines[1]))};
  all.third = vld1q_u8(from + block->lines[2]);
  if (!deep) return all;
  all.below = join(all.third, vld1q_u8(from + block->lines[3]));
  return all;
}

// Of any block. `part` is a constant.
INLINE quarter load_any(qkv_part part, const qkvi_tier_blocks *layout, size_t b, const uint8_t *group, size_t at) {
  if (qkvi_block_is_whole(&layout->blocks[b])) return load_whole(&layout->blocks[b], group, at, true);
  uint8x16_t pairs[QKV_DEPTH_MAX / 2];
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    pairs[pair] = load_halves(part, layout->units[b], pair, group, at);
  }
  return (quarter){join(pairs[0], pairs[1]), join(pairs[2], pairs[3]), pairs[2]};
}

// The kind of a block's half; QKVI_BLOCK_SCATTERED where it has no bits.
INLINE qkvi_block_kind kind_of_half(const qkvi_tier_blocks *layout, size_t b, size_t half) {
  static const uint8_t kinds[QKV_DEPTH_MAX + 1] = {QKVI_BLOCK_SCATTERED, QKVI_BLOCK_1_LOW, QKVI_BLOCK_2,
                                                   QKVI_BLOCK_3_LOW,     QKVI_BLOCK_4,     QKVI_BLOCK_5_LOW,
                                                   QKVI_BLOCK_6,         QKVI_BLOCK_7_LOW, QKVI_BLOCK_8};
  return qkvi_block_is_whole(&layout->blocks[b]) ? layout->blocks[b].kind : kinds[layout->depths[b][half]];
}

// The four bits of a field's codes, in the low nibbles.
INLINE uint8x16_t nibble_of(const joined *all, size_t field) {
  const uint8x16_t both = field % 2 == 0 ? all->even : all->odd;
  return field < 2 ? keep(both, 15) : vshrq_n_u8(both, 4);
}

// All bits of a field's codes of more than four, as tables of bytes are indexed.
INLINE uint8x16_t byte_of(const quarter *from, size_t field) {
  return vorrq_u8(vshlq_n_u8(nibble_of(&from->above, field), 4), nibble_of(&from->below, field));
}

#endif
#endif
