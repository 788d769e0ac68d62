// Where the codes of each 16 coordinates of a group lie, for kernels that read whole lines (page.h).
#ifndef QKV_ENGINE_KERNEL_BLOCKS_H
#define QKV_ENGINE_KERNEL_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/codec/pack.h"
#include "engine/codec/page.h"
#include "engine/kernel/table.h"

#define QKVI_BLOCK_WIDTH 16
#define QKVI_BLOCKS_MAX (QKV_DIM_MAX / QKVI_BLOCK_WIDTH)

// The layouts that kernels have code of their own for. The first four are whole lines of 64 bytes.
typedef enum qkvi_block_shape {
  QKVI_BLOCK_FIELDS,        // kinds 1 and 2: a line, whose fields are looked up one by one
  QKVI_BLOCK_NIBBLES,       // kinds 3 and 4: two lines
  QKVI_BLOCK_SIXES,         // kinds 5 and 6: three
  QKVI_BLOCK_BYTES,         // kinds 7 and 8: four
  QKVI_BLOCK_FIELDS_HALF,   // the same with a line of 32 bytes, all the block's own, for the last pair: kind 1
  QKVI_BLOCK_NIBBLES_HALF,  // 3
  QKVI_BLOCK_SIXES_HALF,    // 5
  QKVI_BLOCK_BYTES_HALF,    // 7
  QKVI_BLOCK_ANY,           // scattered
} qkvi_block_shape;

typedef struct qkvi_block {
  uint8_t kind;                       // qkvi_block_kind
  uint8_t shape;                      // qkvi_block_shape
  uint16_t lines[QKV_DEPTH_MAX / 2];  // offsets in the group of the 64-byte lines of each pair; any for the pairs
                                      // that the kind does not have
  // Offsets of the pairs of a block of up to QKVI_SHALLOW_MAX bits once lines of 32 bytes (halves) have been widened
  // to 64: a half lies at 64 times its pair among the halves.
  uint16_t places[QKVI_SHALLOW_PAIRS];
  uint8_t spread[QKVI_SHALLOW_PAIRS];  // 0: in the group, 1: among the halves
} qkvi_block;

// How the bits of one pair lie of half a block, 8 coordinates.
typedef enum qkvi_unit_how {
  QKVI_UNIT_NONE,
  QKVI_UNIT_WIDE,            // in half `place` of a wide line of 64 bytes
  QKVI_UNIT_WIDE_HALF,       // in one of 32
  QKVI_UNIT_NARROW,          // in a quarter of a narrow line of 64 bytes
  QKVI_UNIT_NARROW_HALF,     // in half of one of 32
  QKVI_UNIT_NARROW_QUARTER,  // in one of 16
} qkvi_unit_how;

typedef struct qkvi_unit {
  uint16_t line;  // offset in the group
  uint8_t how;    // qkvi_unit_how
  uint8_t place;  // in the line, in eights of coordinates
} qkvi_unit;

// Of one tier.
typedef struct qkvi_tier_blocks {
  unsigned coordinates;  // that have any bits
  unsigned count;        // blocks that they make, the last one possibly of 8 coordinates
  unsigned deep;         // how many, from the first on, have coordinates of more than QKVI_SHALLOW_MAX bits
  unsigned scattered;
  uint8_t shape;                           // the largest of its blocks
  uint8_t halves;                          // of which pairs a block has a line of 32 bytes for its own: bit by bit,
  uint16_t half_lines[QKV_DEPTH_MAX / 2];  // and where
  qkvi_block blocks[QKVI_BLOCKS_MAX];      // and, up to the row's end, those without bits
  // Of blocks that are not whole, by halves: bits of their coordinates, and where each pair's lie.
  uint8_t depths[QKVI_BLOCKS_MAX][2];
  qkvi_unit units[QKVI_BLOCKS_MAX][2][QKV_DEPTH_MAX / 2];
} qkvi_tier_blocks;

static inline bool qkvi_block_is_whole(const qkvi_block *block) {
  return block->shape <= QKVI_BLOCK_BYTES;
}

// The pair that lies in a line of 32 bytes, the block's last; QKV_DEPTH_MAX / 2 or more: none.
static inline unsigned qkvi_block_half(const qkvi_block *block) {
  return (unsigned)block->shape - QKVI_BLOCK_FIELDS_HALF;
}

// All blocks are whole and of up to QKVI_SHALLOW_MAX bits. A block of this kind can also be read as one of a larger
// shape: its tables ignore the bits that its kind does not have.
static inline bool qkvi_blocks_are_plain(const qkvi_tier_blocks *blocks) {
  return (blocks->deep | blocks->scattered | blocks->halves) == 0;
}

// All blocks have two bits, or all four: each is 64 bytes behind the one before it.
static inline bool qkvi_blocks_are_steady(const qkvi_tier_blocks *blocks) {
  if (!qkvi_blocks_are_plain(blocks) || blocks->count == 0) return false;
  const uint8_t kind = blocks->blocks[0].kind;
  return (kind == QKVI_BLOCK_2 || kind == QKVI_BLOCK_4) && blocks->blocks[blocks->count - 1].kind == kind;
}

void qkvi_blocks_find(const qkv_schedule *schedule, unsigned tier, qkvi_tier_blocks *blocks);

// Where the blocks of the groups of a page lie, whose tiers are few different ones.
typedef struct qkvi_reader {
  qkv_part part;
  const qkv_page_codes *codes;
  unsigned tier;  // of `blocks`
  qkvi_tier_blocks blocks;
} qkvi_reader;

// For the first group.
void qkvi_reader_init(qkvi_reader *reader, qkv_part part, const qkv_page_codes *codes);
void qkvi_reader_turn_to(qkvi_reader *reader, size_t group);

// How a kernel variant packs codes at full depth, [QKV_GROUP_TOKENS][stride].
typedef struct qkvi_packing {
  // Adds the bits of `pair` of a block to its line of 64 bytes, to a half of it where it is narrow.
  void (*block)(qkv_part part, unsigned pair, bool wide, unsigned half, const uint8_t *codes, size_t stride,
                uint8_t *line);
  // columns [c][t] = codes [t][c] of `count` coordinates, at most 16; more of the 16 may be written.
  void (*transpose)(const uint8_t *codes, size_t stride, size_t count, qkvi_codes *columns);
} qkvi_packing;

// A group line by line, where blocks do not lie in whole ones. `group` is zeros.
void qkvi_pack_sections(const qkvi_packing *packing, qkv_part part, const uint16_t *reach, const uint8_t *codes,
                        size_t stride, uint8_t *group);

#endif
