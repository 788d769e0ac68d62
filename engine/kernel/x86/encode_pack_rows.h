// Packing the codes of a group: bytes [token][coordinate] at full depth into lines (page.h).
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_PACK_ROWS_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_PACK_ROWS_H

#include "engine/kernel/x86/encode_pack.h"

#if defined(__AVX2__) && BYTE_DOTS
// out[j][i] = in[i][j] of 16 x 16 bytes.
static inline void transpose_bytes(const uint8_t *in, size_t in_stride, uint8_t *out, size_t out_stride) {
  __m128i r[GROUP], p[GROUP];
  for (size_t i = 0; i < GROUP; i++) r[i] = _mm_loadu_si128((const __m128i *)(in + i * in_stride));
  // Interleaving rows i and i + 8, four times, rotates the bits of (row, column) by four.
  for (int round = 0; round < 4; round++) {
    for (size_t i = 0; i < GROUP / 2; i++) {
      p[2 * i] = _mm_unpacklo_epi8(r[i], r[i + GROUP / 2]);
      p[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + GROUP / 2]);
    }
    memcpy(r, p, sizeof r);
  }
  for (size_t i = 0; i < GROUP; i++) _mm_storeu_si128((__m128i *)(out + i * out_stride), r[i]);
}

// codes [item][lane], `stride` apart.
INLINE block_fields fields_of_values(const uint8_t *codes, size_t stride) {
  const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i within = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  block_fields fields;
  UNROLL
  for (size_t f = 0; f < 4; f++, codes += 4 * stride) {
    __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)codes));
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(codes + stride)), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(codes + 2 * stride)), 2);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(codes + 3 * stride)), 3);
    fields.of[f] = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(dwords, four), within);
  }
  return fields;
}

// codes [lane][item], `stride` apart: a transpose of 32-bit words.
INLINE block_fields fields_of_keys(const uint8_t *codes, size_t stride) {
  const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i rows[4];
  UNROLL
  for (size_t i = 0; i < 4; i++, codes += 4 * stride) {
    __m512i four = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)codes));
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(codes + stride)), 1);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(codes + 2 * stride)), 2);
    four = _mm512_inserti32x4(four, _mm_loadu_si128((const __m128i *)(codes + 3 * stride)), 3);
    rows[i] = _mm512_permutexvar_epi32(dwords, four);  // quarter f: field f of four lanes
  }
  return fields_of_quarters(rows);
}

// Part `p` of a block's codes [token][coordinate].
INLINE block_fields fields_of(qkv_part part, const uint8_t *codes, size_t stride, size_t p) {
  return part == QKV_V ? fields_of_values(codes + p * LANES, stride)
                       : fields_of_keys(codes + p * LANES * stride, stride);
}

INLINE void pack_pairs(const qkvi_block *block, const block_fields *fields, uint8_t *group) {
  const unsigned depth = qkvi_block_depth(block->kind);
  const bool high = block->kind == QKVI_BLOCK_1_HIGH || block->kind == QKVI_BLOCK_3_HIGH ||
                    block->kind == QKVI_BLOCK_5_HIGH || block->kind == QKVI_BLOCK_7_HIGH;
  UNROLL
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    if (2 * pair + 2 <= depth) pack_line(fields, pair, true, 0, group + block->lines[pair]);
    if (2 * pair + 1 == depth) pack_line(fields, pair, false, high, group + block->lines[pair]);
  }
}

static void pack_block(qkv_part part, unsigned pair, bool wide, unsigned half, const uint8_t *codes, size_t stride,
                       uint8_t *line) {
  UNROLL
  for (size_t p = 0; p < PARTS; p++) {
    const block_fields fields = fields_of(part, codes, stride, p);
    pack_line(&fields, pair, wide, half, line + p * sizeof(bytes));
  }
}

static void transpose_block(const uint8_t *codes, size_t stride, size_t count, qkvi_codes *columns) {
  (void)count;  // there is space for a block behind the rows
  transpose_bytes(codes, stride, columns[0], GROUP);
}

// codes [GROUP][dim] at full depth, and space for a block behind them.
static void pack_group(qkv_part part, const qkv_schedule *schedule, unsigned tier, const qkvi_tier_blocks *blocks,
                       const uint8_t *codes, uint8_t *group) {
  const size_t stride = schedule->dim;
  if (blocks->scattered + blocks->halves > 0) {
    memset(group, 0, qkv_schedule_group_bytes(schedule, tier));
    qkvi_pack_sections(&(qkvi_packing){pack_block, transpose_block}, part, schedule->reach[tier], codes, stride,
                       group);
    return;
  }
  for (unsigned i = 0; i < blocks->count; i++) {
    UNROLL
    for (size_t p = 0; p < PARTS; p++) {
      const block_fields fields = fields_of(part, codes + (size_t)i * QKVI_BLOCK_WIDTH, stride, p);
      pack_pairs(&blocks->blocks[i], &fields, group + p * sizeof(bytes));
    }
  }
}

#endif
#endif
