// Where the codes of each 16 coordinates of a group lie, for kernels that read whole slabs.
#ifndef QKV_ENGINE_KERNEL_BLOCKS_H
#define QKV_ENGINE_KERNEL_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/codec/page.h"
#include "engine/kernel/table.h"

#define QKVI_BLOCK_WIDTH 16
#define QKVI_BLOCKS_MAX (QKV_DIM_MAX / QKVI_BLOCK_WIDTH)

// What kernels have a way of its own for. The first four are whole slabs of 64 bytes.
typedef enum qkvi_block_shape {
  QKVI_BLOCK_FIELDS,        // kinds 1 and 2: a slab, whose fields are looked up one by one
  QKVI_BLOCK_NIBBLES,       // kinds 3 and 4: two slabs
  QKVI_BLOCK_SIXES,         // kinds 5 and 6: three
  QKVI_BLOCK_BYTES,         // kinds 7 and 8: four
  QKVI_BLOCK_FIELDS_HALF,   // the same with a slab of 32 bytes, all the block's own, for the last pair: kind 1
  QKVI_BLOCK_NIBBLES_HALF,  // 3
  QKVI_BLOCK_SIXES_HALF,    // 5
  QKVI_BLOCK_BYTES_HALF,    // 7
  QKVI_BLOCK_ANY,           // scattered
} qkvi_block_shape;

typedef struct qkvi_block {
  uint8_t kind;                       // qkvi_block_kind
  uint8_t shape;                      // qkvi_block_shape
  uint16_t slabs[QKV_DEPTH_MAX / 2];  // offsets in the group of the 64-byte slabs of each pair; any for the pairs
                                      // that the kind does not have
} qkvi_block;

// Of one tier. A scattered block's codes come through qkvi_unpack.
typedef struct qkvi_tier_blocks {
  unsigned coordinates;  // that have any bits
  unsigned count;        // blocks that they make, the last one possibly of 8 coordinates
  unsigned deep;         // how many, from the first on, have coordinates of more than 4 bits
  unsigned scattered, halves;
  qkvi_block blocks[QKVI_BLOCKS_MAX];
} qkvi_tier_blocks;

static inline bool qkvi_block_is_whole(const qkvi_block *block) {
  return block->shape <= QKVI_BLOCK_BYTES;
}

void qkvi_blocks_find(const qkv_schedule *schedule, unsigned tier, qkvi_tier_blocks *blocks);

#endif
