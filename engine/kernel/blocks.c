#include "engine/kernel/blocks.h"

#include <assert.h>

enum { NARROW_WIDTH = 2 * QKVI_BLOCK_WIDTH };  // coordinates of a narrow slab

// How a pair holds a block: 0 not in a slab of 64 bytes that begins with the block, else 2 bits or 1.
typedef struct holding {
  unsigned bits;
  unsigned half;  // of a narrow slab
  unsigned slab;  // offset
} holding;

static holding find_in_pair(const uint16_t *reach, unsigned pair, unsigned section, unsigned first) {
  const unsigned both = reach[2 * pair + 2], any = reach[2 * pair + 1];
  // 16 tokens x 2 bits are 4 bytes a coordinate.
  if (first + QKVI_BLOCK_WIDTH <= both) return (holding){.bits = 2, .slab = section + 4 * first};
  if (first < both) return (holding){0};
  const unsigned at = first - both, slab = at / NARROW_WIDTH * NARROW_WIDTH;
  if (at % QKVI_BLOCK_WIDTH != 0 || slab + NARROW_WIDTH > any - both) return (holding){0};
  return (holding){.bits = 1, .half = (at - slab) / QKVI_BLOCK_WIDTH, .slab = section + 4 * both + 2 * slab};
}

static qkvi_block_kind kind_of(unsigned depth, unsigned half) {
  switch (depth) {
    case 1:
      return half ? QKVI_BLOCK_1_HIGH : QKVI_BLOCK_1_LOW;
    case 2:
      return QKVI_BLOCK_2;
    case 3:
      return half ? QKVI_BLOCK_3_HIGH : QKVI_BLOCK_3_LOW;
    case 4:
      return QKVI_BLOCK_4;
    case 8:
      return QKVI_BLOCK_8;
    default:
      return QKVI_BLOCK_SCATTERED;
  }
}

static qkvi_block find_block(const uint16_t *reach, const unsigned sections[QKV_DEPTH_MAX / 2], unsigned first) {
  const qkvi_block scattered = {.kind = QKVI_BLOCK_SCATTERED};
  unsigned depth = 1;
  while (depth < QKV_DEPTH_MAX && reach[depth + 1] > first) depth++;
  if (reach[depth] < first + QKVI_BLOCK_WIDTH) return scattered;
  qkvi_block block = {0};
  unsigned half = 0;
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    if (2 * pair >= depth) {
      block.slabs[pair] = block.slabs[0];
      continue;
    }
    const holding held = find_in_pair(reach, pair, sections[pair], first);
    if (held.bits == 0) return scattered;
    block.slabs[pair] = (uint16_t)held.slab;
    half = held.half;
  }
  block.kind = (uint8_t)kind_of(depth, half);
  return block;
}

void qkvi_blocks_find(const qkv_schedule *schedule, unsigned tier, qkvi_blocks *blocks) {
  assert(tier <= QKV_TIER_MAX);
  const uint16_t *reach = schedule->reach[tier];
  unsigned sections[QKV_DEPTH_MAX / 2];  // where each pair begins
  unsigned at = 0;
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    sections[pair] = at;
    at += 2u * (reach[2 * pair + 1] + reach[2 * pair + 2]);
  }
  blocks->coordinates = reach[1];
  blocks->count = (reach[1] + QKVI_BLOCK_WIDTH - 1) / QKVI_BLOCK_WIDTH;
  blocks->scattered = 0;
  for (unsigned i = 0; i < blocks->count; i++) {
    blocks->blocks[i] = find_block(reach, sections, i * QKVI_BLOCK_WIDTH);
    blocks->scattered += blocks->blocks[i].kind == QKVI_BLOCK_SCATTERED;
  }
}
