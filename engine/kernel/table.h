// Look-up tables of the kernels, filled once from the codebook.
//
// A *block* is 16 coordinates of a group. Its codes of up to four bits come out of one line of pair 0 and one
// of pair 1 (page.h): a mask and an OR bring a field of both into one nibble, in fields 1 and 3 with pair 0's
// bits above, in fields 0 and 2 with pair 1's above. So there are two tables a kind, and a table also knows
// which of the nibble's bits count: those of a narrow line's other block, or of no line, do not.
//
// Threads: filled before the first kernel runs, read-only afterwards.
#ifndef QKV_ENGINE_KERNEL_TABLE_H
#define QKV_ENGINE_KERNEL_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/codec/schedule.h"

// The depth of a block, and which half of a narrow line it is.
typedef enum qkvi_block_kind {
  QKVI_BLOCK_NONE,  // no bits
  QKVI_BLOCK_1_LOW,
  QKVI_BLOCK_1_HIGH,
  QKVI_BLOCK_2,
  QKVI_BLOCK_3_LOW,
  QKVI_BLOCK_3_HIGH,
  QKVI_BLOCK_4,
  QKVI_BLOCK_NIBBLE_KINDS,
  QKVI_BLOCK_5_LOW = QKVI_BLOCK_NIBBLE_KINDS,  // from here on two nibbles: of pairs 0 and 1, and of pairs 2 and 3
  QKVI_BLOCK_5_HIGH,
  QKVI_BLOCK_6,
  QKVI_BLOCK_7_LOW,
  QKVI_BLOCK_7_HIGH,
  QKVI_BLOCK_8,
  QKVI_BLOCK_SCATTERED,  // anything else
  QKVI_BLOCK_DEEP_KINDS = QKVI_BLOCK_SCATTERED - QKVI_BLOCK_NIBBLE_KINDS,
  QKVI_BLOCK_WIDE_KINDS = QKVI_BLOCK_SCATTERED - QKVI_BLOCK_7_LOW,  // whose centroids are two bytes
} qkvi_block_kind;

unsigned qkvi_block_depth(qkvi_block_kind kind);

#define QKVI_SCALES 3
#define QKVI_SHALLOW_MAX 6  // bits of a coordinate whose centroid is a single byte (integer.h)
#define QKVI_SHALLOW_CODES (1 << QKVI_SHALLOW_MAX)
#define QKVI_SHALLOW_PAIRS (QKVI_SHALLOW_MAX / 2)

// The largest centroids of up to two bits, of up to four and of up to six in steps.
#define QKVI_MOST_2 51
#define QKVI_MOST_4 88
#define QKVI_MOST_6 118

enum { QKVI_EVEN_FIELDS, QKVI_ODD_FIELDS };

typedef struct qkvi_kernel_tables {
  float values[QKV_DEPTH_MAX + 1][1 << QKV_DEPTH_MAX];  // centroids by depth and code
  float nibbles[QKVI_BLOCK_NIBBLE_KINDS][2][16];        // [kind][even or odd fields][nibble]
  float roots[16];                                      // 2^(i % 8 / 8)
  float bytes[QKVI_BLOCK_DEEP_KINDS][2][256];           // the same of the deep kinds, first nibble above
  // [depth][cell]: the boundary, as the bits of a float, that splits a positive cell of depth - 1 into two of
  // `depth`. (Positive floats are in the order of their bits.)
  uint32_t middles[QKV_DEPTH_MAX + 1][1 << (QKV_DEPTH_MAX - 2)];
  float inverse_step;               // 1 / qkvi_integers.step
  float gain_middles[8];            // between the gains of an octave and the next ones
  float scales[QKVI_SCALES];        // what encoding tries (encode_plain.h), times the middle one's inverse
  uint8_t cells[QKVI_SCALES][256];  // of t: codes of positive coordinates at the full depth
  bool dots_alone;                  // products of 16-bit numbers as they are, not one for two (x86/dense.c)
} qkvi_kernel_tables;

// Tables of the integers that integer.h describes, in the shapes that byte look-ups need: a table of 64 repeats its
// entries where fewer bits count, so that an index need not be masked. Those for K are 128 more, unsigned.
#define QKVI_FIELD_PLACES 3
typedef struct qkvi_integer_tables {
  // [scale][depth][cell]: the last t of the lower cell that `middles` splits a positive one into, less 128.
  _Alignas(16) int8_t below[QKVI_SCALES][5][16];
  // Of positive cells by depth: centroids in steps, and codes at full depth, of which the first bits count.
  _Alignas(16) uint8_t unit_of_cell[5][16], code_of_cell[5][16];
  float step;                                                // of the shallow ones
  float gains[256];                                          // qkv_gain_value
  int8_t shallow[QKVI_SHALLOW_MAX + 1][QKVI_SHALLOW_CODES];  // [depth][code]
  _Alignas(64) uint8_t units[QKVI_SCALES][5][256];           // [depth][t]: centroids of t in steps, for encoding
  _Alignas(64) uint8_t codes[5][128];                        // [depth][centroid]: codes, whose first bits count
  int8_t deep_high[QKV_DEPTH_MAX + 1][256], deep_low[QKV_DEPTH_MAX + 1][256];
  // Of kinds up to 2: bits 2 i and 2 i + 1 of an index count.
  _Alignas(64) uint8_t fields[2][QKVI_BLOCK_2 + 1][QKVI_FIELD_PLACES][64];  // [part][kind][i][index]
  // Of kinds up to 6: a nibble below, the bits of pair 2 above it, which do not count up to kind 4.
  _Alignas(64) uint8_t sixes[2][QKVI_BLOCK_6 + 1][2][64];  // [part][kind][even or odd fields][six]
  // Of kinds 7 and 8, in two planes.
  _Alignas(64) uint8_t bytes[2][QKVI_BLOCK_WIDE_KINDS][2][2][256];  // [part][kind][fields][high, low][byte]
} qkvi_integer_tables;

extern qkvi_kernel_tables qkvi_tables;
extern qkvi_integer_tables qkvi_integers;
void qkvi_tables_fill(void);

#endif
