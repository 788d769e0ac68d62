// Packing the codes of a group: bytes [token][coordinate] at full depth into lines (page.h).
#ifndef QKV_ENGINE_KERNEL_NEON_ENCODE_PACK_H
#define QKV_ENGINE_KERNEL_NEON_ENCODE_PACK_H

#include <stdbool.h>
#include <string.h>

#include "engine/codec/pack.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/neon/vectors.h"

#if defined(__aarch64__)
enum { LINE = 64, LINE_VECTORS = LINE / 16, LINE_FIELDS = 4 };

// Codes of a block as its lines have them: for every field, [lane][i] = the code of item 4 * field + i.
typedef struct block_fields {
  uint8_t of[LINE_FIELDS][LINE];
} block_fields;

// codes [token][coordinate], `stride` apart. Of V lanes are coordinates: four tokens are interleaved. Of K lanes are
// tokens: their words of four coordinates are.
static block_fields fields_of(qkv_part part, const uint8_t *codes, size_t stride) {
  block_fields fields;
  for (size_t i = 0; i < LINE_FIELDS; i++, codes += 4 * stride) {
    const uint8x16x4_t four = {
        {vld1q_u8(codes), vld1q_u8(codes + stride), vld1q_u8(codes + 2 * stride), vld1q_u8(codes + 3 * stride)}};
    if (part == QKV_V) {
      vst4q_u8(fields.of[i], four);
      continue;
    }
    const uint32x4x4_t words_of = {{vreinterpretq_u32_u8(four.val[0]), vreinterpretq_u32_u8(four.val[1]),
                                    vreinterpretq_u32_u8(four.val[2]), vreinterpretq_u32_u8(four.val[3])}};
    uint32_t words[LINE_FIELDS][4];
    vst4q_u32(words[0], words_of);
    for (size_t f = 0; f < LINE_FIELDS; f++) memcpy(fields.of[f] + 16 * i, words[f], sizeof words[f]);
  }
  return fields;
}

// What a pair takes of the codes into its line: two bits or, in a narrow line, one, in the low or high half.
static void pack_line(const block_fields *fields, unsigned pair, bool wide, unsigned half, uint8_t *line) {
  const unsigned from = QKV_DEPTH_MAX - 2 * pair - (wide ? 2 : 1), mask = wide ? 3 : 1;
  for (size_t v = 0; v < LINE_VECTORS; v++) {
    uint8x16_t packed = vld1q_u8(line + 16 * v);
    UNROLL
    for (unsigned f = 0; f < LINE_FIELDS; f++) {
      const unsigned to = 2 * (f ^ (pair & 1)) + half;
      const uint8x16_t codes = vld1q_u8(fields->of[f] + 16 * v);
      packed = vorrq_u8(packed, keep(down(codes, (int)from - (int)to), (uint8_t)(mask << to)));
    }
    vst1q_u8(line + 16 * v, packed);
  }
}

static void pack_pairs(const qkvi_block *block, const block_fields *fields, uint8_t *group) {
  const unsigned depth = qkvi_block_depth(block->kind);
  const bool high = block->kind == QKVI_BLOCK_1_HIGH || block->kind == QKVI_BLOCK_3_HIGH ||
                    block->kind == QKVI_BLOCK_5_HIGH || block->kind == QKVI_BLOCK_7_HIGH;
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    if (2 * pair + 2 <= depth) pack_line(fields, pair, true, 0, group + block->lines[pair]);
    if (2 * pair + 1 == depth) pack_line(fields, pair, false, high, group + block->lines[pair]);
  }
}

static void pack_block(qkv_part part, unsigned pair, bool wide, unsigned half, const uint8_t *codes, size_t stride,
                       uint8_t *line) {
  const block_fields fields = fields_of(part, codes, stride);
  pack_line(&fields, pair, wide, half, line);
}

static void transpose_block(const uint8_t *codes, size_t stride, size_t count, qkvi_codes *columns) {
  for (size_t c = 0; c < count; c++) {
    for (size_t t = 0; t < GROUP; t++) columns[c][t] = codes[t * stride + c];
  }
}

// codes [GROUP][stride] at full depth.
static void pack_group(qkv_part part, const qkv_schedule *schedule, unsigned tier, const qkvi_tier_blocks *blocks,
                       const uint8_t *codes, size_t stride, uint8_t *group) {
  memset(group, 0, qkv_schedule_group_bytes(schedule, tier));
  if (blocks->scattered + blocks->halves > 0) {
    qkvi_pack_sections(&(qkvi_packing){pack_block, transpose_block}, part, schedule->reach[tier], codes, stride,
                       group);
    return;
  }
  for (unsigned i = 0; i < blocks->count; i++) {
    const block_fields fields = fields_of(part, codes + (size_t)i * QKVI_BLOCK_WIDTH, stride);
    pack_pairs(&blocks->blocks[i], &fields, group);
  }
}

#endif
#endif
