// The codes of a block (kernel/blocks.h) as four vectors of bytes, one for each field of its slabs: for the integer
// kernels. Parts, shapes and the like are constants where these are called, and the branches on them vanish.
#ifndef QKV_ENGINE_KERNEL_X86_CENTROIDS_H
#define QKV_ENGINE_KERNEL_X86_CENTROIDS_H

#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
#include "engine/codec/pack.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/integer.h"

enum { GROUP = QKV_GROUP_TOKENS, FIELDS = 4 };

// ---- Codes to centroids ----

// Fields 0 and 2 of two slabs, of an even pair and the one after it, in the nibbles of `even`; 1 and 3 in `odd`.
typedef struct joined {
  bytes even, odd;
} joined;

INLINE joined join(bytes first, bytes second) {
  return (joined){blend_bits(0x33, first, second), blend_bits(0xcc, first, second)};
}

INLINE bytes and_each(bytes all, uint8_t mask) {
  return (bytes)((words)all & EACH_BYTE(mask));
}

// A slab of 32 bytes as if it were the first half of a slab of 64 (page.h).
INLINE bytes load_half(qkv_part part, unsigned pair, const uint8_t *slab, size_t lane) {
  if (part == QKV_V) {
    // Lane i has coordinate i in the low bits, coordinate 8 + i in the high ones.
#if LANES == 16
    (void)lane;
    const bytes both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)slab));
    return (bytes)_mm512_mask_srli_epi32(both, 0xff00, both, 1);
#else
    const bytes both = load_bytes(slab);
    return lane == 0 ? both : down(both, 1);
#endif
  }
  // Two bytes a token, in which field f has coordinates 2 f and 2 f + 1 and, in its high bit, those 8 further.
#if LANES == 16
  const words two = (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(slab + 2 * lane)));
#else
  const words two = (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(slab + 2 * lane)));
#endif
  // Fields 0 and 2 to the bytes that have their coordinates, 1 and 3 to the next two; all at bits 0 and 4.
  const words all = pair % 2 == 0 ? (two | (two >> 2 & 0x3fff) << 16) : ((two >> 2 & 0x3fff) | two << 16);
  const words from_0 = all & EACH_BYTE(0x01), from_4 = all & EACH_BYTE(0x10);
  const words from_1 = all & EACH_BYTE(0x02), from_5 = all & EACH_BYTE(0x20);
  if (pair % 2 == 0) return (bytes)(from_0 | from_4 >> 2 | from_1 << 3 | from_5 << 1);
  return (bytes)(from_0 << 2 | from_4 >> 4 | from_1 << 5 | from_5 >> 1);
}

// The lanes from `lane` on of a block's slab of `pair`. `shape` is a constant.
INLINE bytes load_slab(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, unsigned pair, bool last,
                       const uint8_t *group, size_t lane) {
  const uint8_t *slab = group + block->slabs[pair];
  if (shape == QKVI_BLOCK_OTHER && last && block->half) return load_half(part, pair, slab, lane);
  return load_bytes(slab + 4 * lane);
}

// Signed centroids of V; also of K where the products are of 16 bits.
INLINE qkv_part table_part(qkv_part part) {
  return BYTE_DOTS ? part : QKV_V;
}

// What the centroids of a block of up to four bits are looked up with, so that each field is only when it is wanted.
typedef struct indices {
  bytes even, odd;  // of the shape QKVI_BLOCK_FIELDS all four fields in `even`
} indices;

typedef struct tables {
  bytes all[QKVI_FIELD_PLACES];
} tables;

INLINE bool is_of_nibbles(qkvi_block_shape shape, const qkvi_block *block) {
  if (shape == QKVI_BLOCK_NIBBLES) return true;
  return shape == QKVI_BLOCK_OTHER && block->kind > QKVI_BLOCK_2;
}

INLINE tables load_tables(qkv_part part, qkvi_block_shape shape, const qkvi_block *block) {
  tables t = {0};
  const qkv_part from = table_part(part);
  if (shape == QKVI_BLOCK_OTHER && block->kind >= QKVI_BLOCK_NIBBLE_KINDS) return t;  // scattered: not looked up
  if (!BYTE_DOTS || is_of_nibbles(shape, block)) {
    t.all[QKVI_EVEN_FIELDS] = load_table(qkvi_integers.nibbles[from][block->kind][QKVI_EVEN_FIELDS]);
    t.all[QKVI_ODD_FIELDS] = load_table(qkvi_integers.nibbles[from][block->kind][QKVI_ODD_FIELDS]);
  } else {
    for (size_t i = 0; i < QKVI_FIELD_PLACES; i++) t.all[i] = load_table(qkvi_integers.fields[from][block->kind][i]);
  }
  return t;
}

INLINE indices load_indices(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, const uint8_t *group,
                            size_t lane) {
  if (is_of_nibbles(shape, block)) {
    const bytes first = load_slab(part, shape, block, 0, false, group, lane);
    const joined j = join(first, load_slab(part, shape, block, 1, true, group, lane));
    return (indices){j.even, j.odd};
  }
  const bytes first = load_slab(part, shape, block, 0, true, group, lane);
  return (indices){first, first};
}

INLINE bytes look_field_up(qkvi_block_shape shape, const qkvi_block *block, const indices *from, const tables *t,
                           size_t field) {
  if (!BYTE_DOTS || is_of_nibbles(shape, block)) {
    const bytes index = field % 2 == 0 ? from->even : from->odd;
    return look_up_byte(t->all[field % 2], field < 2 ? index : down(index, 4));
  }
  if (field < QKVI_FIELD_PLACES) return look_up_byte(t->all[field], from->even);
  return look_up_byte(t->all[QKVI_FIELD_PLACES - 1], down(from->even, 2));
}

// The two planes of a block of a kind of more than four bits.
INLINE void load_planes(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, const uint8_t *group,
                        size_t lane, bytes high[FIELDS], bytes low[FIELDS]) {
  const uint8_t(*from)[2][256] = qkvi_integers.bytes[table_part(part)][block->kind - QKVI_BLOCK_NIBBLE_KINDS];
  const bool three = block->kind <= QKVI_BLOCK_6;
  const joined above = join(load_slab(part, shape, block, 0, false, group, lane),
                            load_slab(part, shape, block, 1, false, group, lane));
  const joined below = join(load_slab(part, shape, block, 2, three, group, lane),
                            load_slab(part, shape, block, 3, !three, group, lane));
  bytes index[FIELDS];
  index[0] = blend_bits(0xf0, up(above.even, 4), below.even);
  index[1] = blend_bits(0xf0, up(above.odd, 4), below.odd);
  index[2] = blend_bits(0xf0, above.even, down(below.even, 4));
  index[3] = blend_bits(0xf0, above.odd, down(below.odd, 4));
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    high[f] = look_up_256(from[f % 2][0], index[f]);
    low[f] = look_up_256(from[f % 2][1], index[f]);
  }
}

// ---- Scattered blocks ----

// The codes of a group, one byte each, where a layout has blocks that do not lie in slabs of their own.
typedef struct unpacked {
  bool there;
  qkvi_codes codes[QKV_DIM_MAX];
} unpacked;

static void unpack_scattered(qkv_part part, const qkv_page_codes *codes, size_t group, const qkvi_tier_blocks *layout,
                             unpacked *out) {
  out->there = layout->scattered > 0;
  if (out->there) qkvi_unpack(part, codes->schedule, codes->tiers[group], codes->groups[group], out->codes);
}

// The planes of block b as the loaders above give them; `low` NULL for one without deep coordinates.
static void gather_scattered(qkv_part part, const uint16_t *reach, const unpacked *from, size_t b, size_t lane,
                             bytes high[FIELDS], bytes *low) {
  int8_t planes[2][FIELDS][sizeof(bytes)] = {0};
  for (unsigned c = 0; c < QKVI_BLOCK_WIDTH; c++) {
    const unsigned coordinate = (unsigned)b * QKVI_BLOCK_WIDTH + c;
    unsigned depth = 0;
    while (depth < QKV_DEPTH_MAX && reach[depth + 1] > coordinate) depth++;
    if (depth == 0) break;
    for (unsigned t = 0; t < GROUP; t++) {
      const unsigned item = part == QKV_K ? c : t, in_lane = (part == QKV_K ? t : c) - (unsigned)lane;
      if (in_lane >= LANES) continue;
      const uint8_t code = from->codes[coordinate][t];
      int8_t *first = &planes[0][item / 4][4 * in_lane + item % 4];
      int8_t *second = &planes[1][item / 4][4 * in_lane + item % 4];
      if (depth > 4) {
        *first = qkvi_integers.deep_high[depth][code];
        *second = qkvi_integers.deep_low[depth][code];
      } else if (low == NULL) {
        *first = qkvi_integers.shallow[depth][code];
      } else {  // c = 2 h + l / 128
        const int32_t integer = (int32_t)qkvi_integers.shallow[depth][code], half = (integer + 1) >> 1;
        *first = (int8_t)half;
        *second = (int8_t)(128 * (integer - 2 * half));
      }
    }
  }
  const uint8_t flip = table_part(part) == QKV_K ? 0x80 : 0;
  for (size_t f = 0; f < FIELDS; f++) {
    high[f] = (bytes)((words)load_bytes(planes[0][f]) ^ EACH_BYTE(flip));
    if (low != NULL) low[f] = (bytes)((words)load_bytes(planes[1][f]) ^ EACH_BYTE(flip));
  }
}

// A block of up to four bits of a group on the way to its centroids. `shape` is a constant, and the look-ups and
// branches on it vanish.
typedef struct shallow_block {
  indices from;
  bytes scattered[FIELDS];
} shallow_block;

INLINE void load_shallow(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, const uint8_t *group,
                         const uint16_t *reach, const unpacked *from, size_t b, size_t lane, shallow_block *out) {
  if (shape == QKVI_BLOCK_OTHER && block->kind == QKVI_BLOCK_SCATTERED) {
    gather_scattered(part, reach, from, b, lane, out->scattered, NULL);
  } else {
    out->from = load_indices(part, shape, block, group, lane);
  }
}

INLINE bytes field_of(qkvi_block_shape shape, const qkvi_block *block, const shallow_block *from, const tables *t,
                      size_t field) {
  if (shape == QKVI_BLOCK_OTHER && block->kind == QKVI_BLOCK_SCATTERED) return from->scattered[field];
  return look_field_up(shape, block, &from->from, t, field);
}

// The planes of a block of more than four bits.
INLINE void load_deep(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, const uint8_t *group,
                      const uint16_t *reach, const unpacked *from, size_t b, size_t lane, bytes high[FIELDS],
                      bytes low[FIELDS]) {
  if (shape == QKVI_BLOCK_BYTES || block->kind != QKVI_BLOCK_SCATTERED) {
    load_planes(part, shape, block, group, lane, high, low);
  } else {
    gather_scattered(part, reach, from, b, lane, high, low);
  }
}

#endif
#endif
