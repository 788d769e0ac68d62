// Where the codes of each 16 coordinates of a group lie, for kernels that read whole slabs.
#ifndef QKV_ENGINE_KERNEL_BLOCKS_H
#define QKV_ENGINE_KERNEL_BLOCKS_H

#include <stdint.h>

#include "engine/codec/page.h"
#include "engine/kernel/table.h"

#define QKVI_BLOCK_WIDTH 16
#define QKVI_BLOCKS_MAX (QKV_DIM_MAX / QKVI_BLOCK_WIDTH)

typedef struct qkvi_block {
  uint8_t kind;                       // qkvi_block_kind
  uint16_t slabs[QKV_DEPTH_MAX / 2];  // offsets in the group of the 64-byte slabs of each pair; any for the pairs
                                      // that the kind does not have
} qkvi_block;

// Of one tier. A scattered block's codes come through qkvi_unpack.
typedef struct qkvi_blocks {
  unsigned coordinates;  // that have any bits
  unsigned count;        // blocks that they make, the last one possibly of 8 coordinates
  unsigned scattered;
  qkvi_block blocks[QKVI_BLOCKS_MAX];
} qkvi_blocks;

void qkvi_blocks_find(const qkv_schedule *schedule, unsigned tier, qkvi_blocks *blocks);

#endif
