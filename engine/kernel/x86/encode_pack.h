// Packing codes, in the shape that lines (page.h) have them in.
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_PACK_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_PACK_H

#include "engine/codec/pack.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
// How rows are coded.
typedef struct coded_as {
  qkv_part part;
  unsigned tier;
  const qkv_schedule *schedule;
} coded_as;

enum { GROUP = QKV_GROUP_TOKENS };

// Codes of a block as its lines have them: for every field, [lane][i] = the code of item 4 * field + i; a part of the
// lanes.
typedef struct block_fields {
  bytes of[4];
} block_fields;

enum { PARTS = GROUP / LANES };  // vectors that hold a line of 64 bytes, or a 32-bit number of each row of a group

#if LANES == 16
// Quarter f of four vectors, field f of four lanes each.
INLINE block_fields fields_of_quarters(const bytes v[4]) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
  return (block_fields){{_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
                         _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)}};
}
#endif

// What a pair takes of the codes into its line: two bits or, in a narrow line, one, in the low half and then the
// high.
INLINE void pack_line(const block_fields *fields, unsigned pair, bool wide, unsigned half, uint8_t *line) {
  const unsigned from = QKV_DEPTH_MAX - 2 * pair - (wide ? 2 : 1), mask = wide ? 3 : 1;
  bytes packed = half == 0 ? (bytes)(words){0} : load_bytes(line);
  UNROLL
  for (unsigned f = 0; f < 4; f++) {
    const unsigned to = 2 * (f ^ (pair & 1)) + half;
    const bytes moved = from >= to ? down(fields->of[f], (int)(from - to)) : up(fields->of[f], (int)(to - from));
    packed = blend_bits((uint8_t)(mask << to), moved, packed);
  }
  put_bytes(line, packed);
}

#endif
#endif
