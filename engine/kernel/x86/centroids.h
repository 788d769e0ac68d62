// The codes of a block (kernel/blocks.h) as four vectors of bytes, one for each field of its lines: for the integer
// kernels. Parts, shapes and the like are constants where these are called, and the branches on them vanish.
#ifndef QKV_ENGINE_KERNEL_X86_CENTROIDS_H
#define QKV_ENGINE_KERNEL_X86_CENTROIDS_H

#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
#include "engine/kernel/blocks.h"
#include "engine/kernel/integer.h"

enum { GROUP = QKV_GROUP_TOKENS, FIELDS = 4 };

// ---- Codes to centroids ----

// Fields 0 and 2 of two lines, of an even pair and the one after it, in the nibbles of `even`; 1 and 3 in `odd`.
typedef struct joined {
  bytes even, odd;
} joined;

INLINE joined join(bytes first, bytes second) {
#if LANES == 16
  return (joined){blend_bits(0x33, first, second), blend_bits(0xcc, first, second)};
#else
  const words other = ((words)first ^ (words)second) & EACH_BYTE(0x33);
  return (joined){(bytes)((words)second ^ other), (bytes)((words)first ^ other)};
#endif
}

// A line of 32 bytes as if it were the first half of a line of 64 (page.h).
INLINE bytes load_half(qkv_part part, unsigned pair, const uint8_t *line, size_t lane) {
  if (part == QKV_V) {
    // Lane i has coordinate i in the low bits, coordinate 8 + i in the high ones.
#if LANES == 16
    (void)lane;
    const bytes both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)line));
    return (bytes)_mm512_mask_srli_epi32(both, 0xff00, both, 1);
#else
    const bytes both = load_bytes(line);
    return lane == 0 ? both : down(both, 1);
#endif
  }
  // Two bytes a token, in which field f has coordinates 2 f and 2 f + 1 and, in its high bit, those 8 further.
#if LANES == 16
  const words two = (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(line + 2 * lane)));
#else
  const words two = (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(line + 2 * lane)));
#endif
  // Fields 0 and 2 to the bytes that have their coordinates, 1 and 3 to the next two; all at bits 0 and 4.
  const words all = pair % 2 == 0 ? (two | (two >> 2 & 0x3fff) << 16) : ((two >> 2 & 0x3fff) | two << 16);
  const words from_0 = all & EACH_BYTE(0x01), from_4 = all & EACH_BYTE(0x10);
  const words from_1 = all & EACH_BYTE(0x02), from_5 = all & EACH_BYTE(0x20);
  if (pair % 2 == 0) return (bytes)(from_0 | from_4 >> 2 | from_1 << 3 | from_5 << 1);
  return (bytes)(from_0 << 2 | from_4 >> 4 | from_1 << 5 | from_5 >> 1);
}

INLINE bool is_half(qkvi_block_shape shape) {
  return shape >= QKVI_BLOCK_FIELDS_HALF && shape <= QKVI_BLOCK_BYTES_HALF;
}

// The pairs of a shape, as that of whole lines.
INLINE qkvi_block_shape whole_of(qkvi_block_shape shape) {
  return is_half(shape) ? shape - QKVI_BLOCK_FIELDS_HALF : shape;
}

// The lanes from `lane` on of a block's line of `pair`.
INLINE bytes load_line(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, unsigned pair,
                       const uint8_t *group, size_t lane) {
  const uint8_t *line = group + block->lines[pair];
  if (is_half(shape) && pair == whole_of(shape)) return load_half(part, pair, line, lane);
  return load_bytes(line + 4 * lane);
}

// Signed centroids of V; also of K where the products are of 16 bits.
INLINE qkv_part table_part(qkv_part part) {
  return BYTE_DOTS ? part : QKV_V;
}

// A block's bits on the way to its centroids, which are looked up field by field when they are wanted.
typedef struct source {
  joined above;  // pairs 0 and 1; of QKVI_BLOCK_FIELDS pair 0 alone, in both
  joined below;  // pairs 2 and 3; of QKVI_BLOCK_SIXES pair 2 alone, in both
} source;

INLINE source load_source(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, const uint8_t *group,
                          size_t lane) {
  const qkvi_block_shape whole = whole_of(shape);
  bytes pairs[QKV_DEPTH_MAX / 2];
  UNROLL
  for (unsigned pair = 0; pair <= whole; pair++) pairs[pair] = load_line(part, shape, block, pair, group, lane);
  source s;
  s.above = whole == QKVI_BLOCK_FIELDS ? (joined){pairs[0], pairs[0]} : join(pairs[0], pairs[1]);
  s.below = s.above;
  if (whole == QKVI_BLOCK_SIXES) s.below = (joined){pairs[2], pairs[2]};
  if (whole == QKVI_BLOCK_BYTES) s.below = join(pairs[2], pairs[3]);
  return s;
}

// Lines of 32 bytes that are blocks' own, as lines of 64, by pair.
typedef uint8_t spread_lines[(QKVI_SHALLOW_MAX + 1) / 2][64];

INLINE void spread_halves(qkv_part part, const qkvi_tier_blocks *layout, const uint8_t *group, spread_lines out) {
  UNROLL
  for (unsigned pair = 0; pair < sizeof(spread_lines) / 64; pair++) {
    if ((layout->halves >> pair & 1) == 0) continue;
    for (size_t lane = 0; lane < QKVI_BLOCK_WIDTH; lane += LANES) {
      put_bytes(out[pair] + 4 * lane, load_half(part, pair, group + layout->half_lines[pair], lane));
    }
  }
}

// A block of up to QKVI_SHALLOW_MAX bits as QKVI_BLOCK_SIXES, its half from where it was spread.
INLINE source load_spread(const qkvi_block *block, const uint8_t *group, const spread_lines spread, size_t lane) {
  const unsigned half = qkvi_block_half(block);
  bytes pairs[sizeof(spread_lines) / 64];
  UNROLL
  for (unsigned pair = 0; pair < sizeof(spread_lines) / 64; pair++) {
    // Bytes behind a half are ignored, but must be readable.
    const uint8_t *line = pair >= half ? spread[half] : group + block->lines[pair];
    pairs[pair] = load_bytes(line + 4 * lane);
  }
  return (source){.above = join(pairs[0], pairs[1]), .below = {pairs[2], pairs[2]}};
}

INLINE bytes nibble_of(const joined *j, size_t field) {
  const bytes both = field % 2 == 0 ? j->even : j->odd;
  return field < 2 ? both : down(both, 4);
}

// Fields 0 to 3 of pairs 0 and 1 below, of pair 2 above them.
INLINE bytes six_of(const source *from, size_t field) {
  const bytes third = from->below.even;
  const bytes shifted = field == 0 ? up(third, 4) : field == 1 ? up(third, 2) : field == 2 ? third : down(third, 2);
  return blend_bits(0x0f, nibble_of(&from->above, field), shifted);
}

// Looks a field of six bits up.
INLINE bytes look_up_field(const uint8_t *table, const source *from, size_t field) {
#if LANES == 8
  // Pair 2 is not brought to the others: its bits choose among four look-ups from where they are.
  const bytes index = (bytes)((words)nibble_of(&from->above, field) & EACH_BYTE(15)), third = from->below.even;
  const int low = 2 * (int)field;
  const bytes a = look_up_cell(load_table(table), index), b = look_up_cell(load_table(table + 16), index);
  const bytes c = look_up_cell(load_table(table + 32), index), d = look_up_cell(load_table(table + 48), index);
  const bytes odd = up(third, 7 - low), upper = up(third, 6 - low);  // their highest bits
  return _mm256_blendv_epi8(_mm256_blendv_epi8(a, b, odd), _mm256_blendv_epi8(c, d, odd), upper);
#else
  return look_up_six(table, six_of(from, field));
#endif
}

// The centroids of a field of a block of up to QKVI_SHALLOW_MAX bits.
INLINE bytes centroids_of(qkv_part part, qkvi_block_shape shape, const qkvi_block *block, const source *from,
                          size_t field) {
  const qkv_part table = table_part(part);
  if (whole_of(shape) == QKVI_BLOCK_SIXES) {
    return look_up_field(qkvi_integers.sixes[table][block->kind][field % 2], from, field);
  }
  if (!BYTE_DOTS || whole_of(shape) == QKVI_BLOCK_NIBBLES) {
    return look_up_byte(load_table(qkvi_integers.sixes[table][block->kind][field % 2]),
                        nibble_of(&from->above, field));
  }
  const size_t place = field < QKVI_FIELD_PLACES ? field : QKVI_FIELD_PLACES - 1;
  const bytes index = field < QKVI_FIELD_PLACES ? from->above.even : down(from->above.even, 2);
  return look_up_byte(load_table(qkvi_integers.fields[table][block->kind][place]), index);
}

#if LANES == 8
// Of seven bits: a code's complement has the opposite centroid, so half of the table is enough. `fields` is a
// constant.
INLINE void look_up_seven(const uint8_t planes[2][256], size_t fields, bytes above, bytes below, bytes out[2]) {
  // Bits of the first nibble: the code's sign, and what chooses among 8 tables of 16 where it is 0.
  const int sign = fields == QKVI_EVEN_FIELDS ? 1 : 3;
  const int choose[3] = {0, fields == QKVI_EVEN_FIELDS ? 2 : 1, fields == QKVI_EVEN_FIELDS ? 3 : 2};
  const bytes other = _mm256_cmpgt_epi8(_mm256_setzero_si256(), up(above, 7 - sign));
  const bytes index = (bytes)(((words)below ^ (words)other) & EACH_BYTE(15)), first = above ^ other;
  const bytes signs = (bytes)((words)other | EACH_BYTE(1));
  UNROLL
  for (size_t i = 0; i < 2; i++) {
    bytes found[8];
    UNROLL
    for (unsigned n = 0; n < 8; n++) {
      const unsigned nibble = (n & 1) << choose[0] | (n >> 1 & 1) << choose[1] | n >> 2 << choose[2];
      found[n] = look_up_cell(load_table(planes[i] + 16 * nibble), index);
    }
    UNROLL
    for (unsigned bit = 0; bit < 3; bit++) {
      UNROLL
      for (unsigned n = 0; n < 4u >> bit; n++) {
        found[n] = _mm256_blendv_epi8(found[2 * n], found[2 * n + 1], up(first, 7 - choose[bit]));
      }
    }
    out[i] = _mm256_sign_epi8(found[0], signs);
  }
}
#endif

// The high and low bytes of the centroids of a field of a block of more, which has four pairs.
INLINE void planes_of(qkv_part part, const qkvi_block *block, const source *from, size_t field, bytes *high,
                      bytes *low) {
  const size_t fields = field % 2;
  const bytes above = fields == 0 ? from->above.even : from->above.odd;
  const bytes below = fields == 0 ? from->below.even : from->below.odd;
  const bytes index = field < 2 ? blend_bits(0xf0, up(above, 4), below) : blend_bits(0xf0, above, down(below, 4));
  const uint8_t(*planes)[256] = qkvi_integers.bytes[table_part(part)][block->kind - QKVI_BLOCK_7_LOW][fields];
#if LANES == 8
  if (block->kind != QKVI_BLOCK_8) {
    bytes out[2];
    const int shift = field < 2 ? 0 : 4;
    look_up_seven(planes, fields, down(above, shift), down(below, shift), out);
    *high = out[0];
    *low = out[1];
    return;
  }
#endif
  *high = look_up_256(planes[0], index);
  *low = look_up_256(planes[1], index);
}

#endif
#endif
