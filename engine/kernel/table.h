// Look-up tables of the kernels, filled once from the codebook.
//
// A *block* is 16 coordinates of a group. Its codes of up to four bits come out of one slab of pair 0 and one
// of pair 1 (page.h): a mask and an OR bring a field of both into one nibble, in fields 1 and 3 with pair 0's
// bits above, in fields 0 and 2 with pair 1's above. So there are two tables a kind, and a table also knows
// which of the nibble's bits count: those of a narrow slab's other block, or of no slab, do not.
//
// Threads: filled before the first kernel runs, read-only afterwards.
#ifndef QKV_ENGINE_KERNEL_TABLE_H
#define QKV_ENGINE_KERNEL_TABLE_H

#include <stdint.h>

#include "engine/codec/schedule.h"

// The depth of a block, and which half of a narrow slab it is.
typedef enum qkvi_block_kind {
  QKVI_BLOCK_1_LOW,
  QKVI_BLOCK_1_HIGH,
  QKVI_BLOCK_2,
  QKVI_BLOCK_3_LOW,
  QKVI_BLOCK_3_HIGH,
  QKVI_BLOCK_4,
  QKVI_BLOCK_NIBBLE_KINDS,
  QKVI_BLOCK_8 = QKVI_BLOCK_NIBBLE_KINDS,  // two nibbles: of pairs 0 and 1, and of pairs 2 and 3
  QKVI_BLOCK_SCATTERED,                    // anything else
} qkvi_block_kind;

enum { QKVI_EVEN_FIELDS, QKVI_ODD_FIELDS };

typedef struct qkvi_kernel_tables {
  float values[QKV_DEPTH_MAX + 1][1 << QKV_DEPTH_MAX];  // centroids by depth and code
  float nibbles[QKVI_BLOCK_NIBBLE_KINDS][2][16];        // [kind][even or odd fields][nibble]
  float roots[16];                                      // 2^(i % 8 / 8)
  float bytes[2][256];                                  // the same of QKVI_BLOCK_8, first nibble above
  // [depth][cell]: the boundary, as the bits of a float, that splits a positive cell of depth - 1 into two of
  // `depth`. (Positive floats are in the order of their bits.)
  uint32_t middles[QKV_DEPTH_MAX + 1][1 << (QKV_DEPTH_MAX - 2)];
} qkvi_kernel_tables;

extern qkvi_kernel_tables qkvi_tables;
void qkvi_tables_fill(void);

#endif
