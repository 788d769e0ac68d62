// *Mixed* groups: their blocks are not plain (blocks.h) and cannot be made so by spreading their halves
// (centroids.h). The centroids of all their blocks are looked up into vectors ahead of the sums; of other groups only
// those of deep blocks. So the sums need neither a copy for each shape nor a branch on it.
//
// Blocks whose two halves have different depths, or that do not lie in lines of their own, are put together first. A
// half is 8 coordinates. Whatever line it lies in, its bits of a pair are brought to where a wide line would have
// them: of K to fields 0 and 1 of every byte, of V to 8 lanes; a narrow line's to the lower bit. The two halves
// together are a wide line of their block, whose halves are looked up in tables of their own.
#ifndef QKV_ENGINE_KERNEL_X86_MIXED_H
#define QKV_ENGINE_KERNEL_X86_MIXED_H

#include "engine/kernel/x86/centroids.h"

#if defined(__AVX2__)
enum { LANE_SETS = QKVI_BLOCK_WIDTH / LANES, MIXED_HALF = QKVI_BLOCK_WIDTH / 2 };

typedef uint16_t shorts __attribute__((vector_size(4 * LANES)));

// Of a block and half of its lanes, or all: the centroids of each field; of deep blocks their high bytes, then the
// low.
typedef bytes mixed_planes[2][FIELDS];
// Of a group: [block][lanes].
typedef mixed_planes mixed_group[QKVI_BLOCKS_MAX][LANE_SETS];

INLINE bytes shift_down(bytes all, int bits) {
  return (bytes)((shorts)all >> bits);
}

INLINE bytes keep_bits(bytes all, uint8_t mask) {
  return (bytes)((words)all & EACH_BYTE(mask));
}

// ---- Bits to where they belong ----

// 16-bit and 8-bit numbers, one a lane.
INLINE words load_shorts(const uint8_t *from) {
#if LANES == 16
  return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#else
  return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#endif
}

// A token's two bytes: coordinates 2 f and 2 f + 1 in field f, in odd pairs in field f ^ 1.
INLINE words key_half(const uint8_t *line, size_t lane, bool odd, bool wide, int place) {
  const words two = load_shorts(line + 2 * lane), next = two >> 2 & 0x3fff;
  const words all = (odd ? next | two << 16 : two | next << 16) >> place;
  const uint8_t mask = wide ? 3 : 1;
  if (odd) return (all & EACH_BYTE(mask)) << 2 | (all >> 4 & EACH_BYTE(mask));
  return (all & EACH_BYTE(mask)) | (all >> 2 & EACH_BYTE(mask << 2));
}

// A token's byte: coordinate f below and 4 + f above in field f, in odd pairs in field f ^ 1.
INLINE words key_quarter(const uint8_t *line, size_t lane, bool odd) {
  const words w = widen_bytes(line + lane);
  if (odd) {
    const words all = (w & 0x0c) >> 2 | (w & 0x03) << 8 | (w & 0xc0) << 10 | (w & 0x30) << 20;
    return (all & EACH_BYTE(1)) << 2 | (all & EACH_BYTE(2)) >> 1;
  }
  const words all = (w & 0x03) | (w & 0x0c) << 6 | (w & 0x30) << 12 | (w & 0xc0) << 18;
  return (all & EACH_BYTE(1)) | (all & EACH_BYTE(2)) << 1;
}

// A half's bits of a pair in fields 0 and 1.
INLINE bytes key_unit(const qkvi_unit *unit, const uint8_t *group, size_t lane, bool odd) {
  const uint8_t *line = group + unit->line;
  const int place = unit->place;
  switch (unit->how) {
    case QKVI_UNIT_WIDE:
      return keep_bits(shift_down(load_bytes(line + 4 * lane), 4 * place), 0x0f);
    case QKVI_UNIT_WIDE_HALF:
      return (bytes)key_half(line, lane, odd, true, 0);
    case QKVI_UNIT_NARROW:
      return keep_bits(shift_down(load_bytes(line + 4 * lane), 4 * (place & 1) + (place >> 1)), 0x05);
    case QKVI_UNIT_NARROW_HALF:
      return (bytes)key_half(line, lane, odd, false, place);
    case QKVI_UNIT_NARROW_QUARTER:
      return (bytes)key_quarter(line, lane, odd);
    default:
      return (bytes)(words){0};
  }
}

// A half's bits of a pair: 8 lanes.
INLINE __m256i value_unit(const qkvi_unit *unit, const uint8_t *group) {
  const __m256i low = _mm256_set1_epi8(0x55);
  const uint8_t *line = group + unit->line;
  const int place = unit->place;
  __m256i all;
  switch (unit->how) {
    case QKVI_UNIT_WIDE:
      return _mm256_loadu_si256((const __m256i *)(line + (size_t)32 * (size_t)place));
    case QKVI_UNIT_WIDE_HALF:
      return _mm256_loadu_si256((const __m256i *)line);
    case QKVI_UNIT_NARROW:
      all = _mm256_loadu_si256((const __m256i *)(line + (size_t)32 * (size_t)(place & 1)));
      return _mm256_and_si256(_mm256_srl_epi16(all, _mm_cvtsi32_si128(place >> 1)), low);
    case QKVI_UNIT_NARROW_HALF:
      all = _mm256_loadu_si256((const __m256i *)line);
      return _mm256_and_si256(_mm256_srl_epi16(all, _mm_cvtsi32_si128(place)), low);
    case QKVI_UNIT_NARROW_QUARTER:
      all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)line));
      return _mm256_and_si256(_mm256_blend_epi32(all, _mm256_srli_epi16(all, 1), 0xf0), low);
    default:
      return _mm256_setzero_si256();
  }
}

// A pair of a block as a wide line would have it, of the lanes from `lane` on.
INLINE bytes pair_of(qkv_part part, const qkvi_unit units[2][QKV_DEPTH_MAX / 2], unsigned pair, const uint8_t *group,
                     size_t lane) {
  // Both halves of one line.
  if (units[1][pair].how == QKVI_UNIT_WIDE) return load_bytes(group + units[0][pair].line + 4 * lane);
  if (part == QKV_K) {
    const words first = (words)key_unit(&units[0][pair], group, lane, pair % 2 != 0);
    return (bytes)(first | (words)key_unit(&units[1][pair], group, lane, pair % 2 != 0) << 4);
  }
#if LANES == 16
  const __m512i first = _mm512_castsi256_si512(value_unit(&units[0][pair], group));
  return _mm512_inserti64x4(first, value_unit(&units[1][pair], group), 1);
#else
  return value_unit(&units[lane / MIXED_HALF][pair], group);
#endif
}

// ---- Centroids ----

INLINE unsigned unit_kind(unsigned depth) {
  static const uint8_t kinds[QKV_DEPTH_MAX + 1] = {QKVI_BLOCK_NONE,  QKVI_BLOCK_1_LOW, QKVI_BLOCK_2,
                                                   QKVI_BLOCK_3_LOW, QKVI_BLOCK_4,     QKVI_BLOCK_5_LOW,
                                                   QKVI_BLOCK_6,     QKVI_BLOCK_7_LOW, QKVI_BLOCK_8};
  return kinds[depth];
}

INLINE bytes each_byte(uint8_t byte) {
  return (bytes)((words){0} + EACH_BYTE(byte));
}

// The field's look-up table of a half of up to QKVI_SHALLOW_MAX bits.
INLINE const uint8_t *half_table(qkv_part table, unsigned depth, size_t field) {
  return qkvi_integers.sixes[table][unit_kind(depth)][field % 2];
}

// Of K the first half's in fields 0 and 1, of V in the lower lanes.
INLINE bytes of_halves(qkv_part part, size_t field, size_t lane, bytes first, bytes second) {
  if (part == QKV_K) return field < FIELDS / 2 ? first : second;
#if LANES == 16
  (void)lane;
  return _mm512_mask_blend_epi32(0xff00, first, second);
#else
  return lane == 0 ? first : second;
#endif
}

// The centroids of a field of a block whose halves are shallow.
INLINE bytes shallow_field(qkv_part part, const uint8_t depths[2], const source *from, size_t field, size_t lane) {
  const qkv_part table = table_part(part);
  const bytes index = depths[0] > QKV_DEPTH_MAX / 2 ? six_of(from, field) : nibble_of(&from->above, field);
  const bool second = part == QKV_K ? field >= FIELDS / 2 : lane > 0;
  const bytes all = look_up_six(half_table(table, depths[second], field), index);
  if (part == QKV_K || LANES < 16) return all;
  return of_halves(part, field, lane, all, look_up_six(half_table(table, depths[1], field), index));
}

INLINE bytes average(bytes a, bytes b) {
#if LANES == 16
  return _mm512_avg_epu8(a, b);
#else
  return _mm256_avg_epu8(a, b);
#endif
}

// The field's centroids as two bytes, whatever their depth. A shallow c is 2 h + l / 128 with h = (c + 1) / 2 rounded
// down and l = 0 or -128.
INLINE void deep_field(qkv_part part, unsigned depth, const source *from, size_t field, bytes out[2]) {
  if (depth > QKVI_SHALLOW_MAX) {
    const qkvi_block block = {.kind = (uint8_t)unit_kind(depth)};
    planes_of(part, &block, from, field, &out[0], &out[1]);
    return;
  }
  const qkv_part table = table_part(part);
  const words flip = (words)each_byte(table == QKV_K ? 0 : 0x80);
  const words shallow = (words)look_up_six(half_table(table, depth, field), six_of(from, field)) ^ flip;  // 128 more
  out[0] = (bytes)((words)average((bytes)shallow, each_byte(0x80)) ^ flip);
  out[1] = (bytes)(((shallow & EACH_BYTE(1)) << 7 ^ EACH_BYTE(0x80)) ^ flip);
}

// `pairs`, of the deeper half, is a constant.
INLINE void mix_block(qkv_part part, const qkvi_tier_blocks *layout, size_t b, const uint8_t *group, size_t lane,
                      unsigned pairs, mixed_planes out) {
  const uint8_t *depths = layout->depths[b];
  bytes all[QKV_DEPTH_MAX / 2];
  UNROLL
  for (unsigned pair = 0; pair < pairs; pair++) all[pair] = pair_of(part, layout->units[b], pair, group, lane);
  source from = {.above = join(all[0], all[1])};
  if (pairs == 3) from.below = (joined){all[2], all[2]};
  if (pairs < 4) {
    UNROLL
    for (size_t f = 0; f < FIELDS; f++) out[0][f] = shallow_field(part, depths, &from, f, lane);
    return;
  }
  // Pair 2 alone is what shallow halves look up.
  const source shallow = {.above = from.above, .below = {all[2], all[2]}};
  from.below = join(all[2], all[3]);
  for (size_t f = 0; f < FIELDS; f++) {
    bytes first[2], second[2];
    deep_field(part, depths[0], &from, f, first);
    deep_field(part, depths[1], depths[1] > QKVI_SHALLOW_MAX ? &from : &shallow, f, second);
    for (size_t i = 0; i < 2; i++) out[i][f] = of_halves(part, f, lane, first[i], second[i]);
  }
}

INLINE void mix_any_block(qkv_part part, const qkvi_tier_blocks *layout, size_t b, const uint8_t *group, size_t lane,
                          mixed_planes out) {
  if (layout->depths[b][0] <= QKV_DEPTH_MAX / 2) {
    mix_block(part, layout, b, group, lane, 2, out);
  } else if (layout->depths[b][0] <= QKVI_SHALLOW_MAX) {
    mix_block(part, layout, b, group, lane, 3, out);
  } else {
    mix_block(part, layout, b, group, lane, 4, out);
  }
}

// Block b, which lies in lines of its own, of all the groups: their tables are loaded once.
INLINE void read_block(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, size_t b,
                       const uint8_t *const *groups, size_t count, mixed_group *out) {
  for (size_t lane = 0; lane < QKVI_BLOCK_WIDTH; lane += LANES) {
    for (size_t g = 0; g < count; g++) {
      bytes(*planes)[FIELDS] = out[g][b][lane / LANES];
      const source from = load_source(part, shape, block, groups[g], lane);
      UNROLL
      for (size_t f = 0; f < FIELDS; f++) {
        if (whole_of(shape) == QKVI_BLOCK_BYTES) {
          planes_of(part, block, &from, f, &planes[0][f], &planes[1][f]);
        } else {
          planes[0][f] = centroids_of(part, shape, block, &from, f);
        }
      }
    }
  }
}

INLINE void mix_blocks(qkv_part part, const qkvi_tier_blocks *layout, size_t blocks, const uint8_t *const *groups,
                       size_t count, mixed_group *out) {
#define READ(SHAPE)                                        \
  case SHAPE:                                              \
    read_block(part, SHAPE, block, b, groups, count, out); \
    break
  for (size_t b = 0; b < blocks; b++) {
    const qkvi_block *block = &layout->blocks[b];
    switch (block->shape) {
      READ(QKVI_BLOCK_FIELDS);
      READ(QKVI_BLOCK_NIBBLES);
      READ(QKVI_BLOCK_SIXES);
      READ(QKVI_BLOCK_BYTES);
      READ(QKVI_BLOCK_FIELDS_HALF);
      READ(QKVI_BLOCK_NIBBLES_HALF);
      READ(QKVI_BLOCK_SIXES_HALF);
      READ(QKVI_BLOCK_BYTES_HALF);
      default:
        for (size_t i = 0; i < count * LANE_SETS; i++) {
          const size_t g = i / LANE_SETS, lanes_at = i % LANE_SETS;
          mix_any_block(part, layout, b, groups[g], lanes_at * LANES, out[g][b][lanes_at]);
        }
    }
  }
#undef READ
}

// The first blocks of groups of one tier.
static void mix_groups(qkv_part part, const qkvi_tier_blocks *layout, size_t blocks, const uint8_t *const *groups,
                       size_t count, mixed_group *out) {
  if (part == QKV_K) {
    mix_blocks(QKV_K, layout, blocks, groups, count, out);
  } else {
    mix_blocks(QKV_V, layout, blocks, groups, count, out);
  }
}

#endif
#endif
