// Attention in integers: what the integer kernels of kernel.h take and give.
//
// Centroids, queries and weights are bytes, and the sums over them 32-bit integers, which come out the same in any
// order; so all kernel variants agree to the bit. A query is one byte a coordinate, times a scale of its own, or two
// bytes (the first 256 times the second). Its largest number is as large as the codes need it (codec/precision.h):
// where coordinates are in order of variance most first bytes are 0 then, and need no products. The weights of a tile
// are one unsigned byte a token or two, relative to the tile's largest, with the gains of the values in them. The
// centroids of depths 1 to 6 are the codebook's rounded to multiples of one step for all depths, QKVI_STEP, those of
// depths 7 and 8 to multiples of QKVI_STEP / 128 and in two bytes. So no sum depends on depths or tiers: a page of
// mixed tiers or of a calibrated schedule takes the same few operations a coordinate as any other.
//
// In the following, depth_c > 6 is `deep`, c the integer of a shallow coordinate and (h, l) the bytes of a deep one
// (value = step * (2 h + l / 128)), and p counts the query's or weight's bytes:
//
//   X_p = sum shallow c q_p + 2 sum deep h q_p     L_p = sum deep l q_p      int32, exact
//   T_p = (float)X_p + (float)L_p / 128            T = T_0, or 256 T_0 + T_1  fp32 without contraction
//   scores[t] = T * scale * gain_t                 sums[c] += T * scale
//
// The scales hold the step. What rounding costs, against the same codes in floating point, as a share of the code's
// own error (tests/checkkern --error prints it): the centroids 0.7 / 3.9 / 4.0 / 0 / 0 / 0 % at depths 1 to 6.
#ifndef QKV_ENGINE_KERNEL_INTEGER_H
#define QKV_ENGINE_KERNEL_INTEGER_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/page.h"
#include "engine/kernel/blocks.h"

#define QKV_INTEGER_ROWS 32    // queries or rows of weights at most
#define QKV_INTEGER_COLUMNS 8  // bytes that one pass over the codes multiplies with
#define QKV_INTEGER_PARTS 2    // bytes of a number at most

#define QKVI_LIMIT_1 127.0f  // of the numbers in a byte, and in two
#define QKVI_LIMIT_2 32639.0f
#define QKVI_HIGH_BYTE 256.0f         // what the first of two bytes counts
#define QKVI_LOW_PLANE (1.0f / 128)   // what the low byte of a deep centroid counts
#define QKVI_NUMBER_LEAST 1e-30f      // largest numbers below this are taken for 0, so that 1 / them is finite
#define QKVI_WHOLE_MAGIC 12582912.0f  // 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits
#define QKVI_POWER_LEAST (-100.0f)    // powers of two are taken from here up

// Rows of bytes are cut into *chunks*: of 8, 4, 2 or 1 columns (a column is a row's part), and within a chunk the
// bytes lie [number / 4][column][number % 4], so that four bytes of all columns are neighbours. A chunk with fewer
// rows than its capacity ends with rows of zeros.
typedef struct qkvi_chunk {
  size_t first, rows;  // of the block
  size_t columns;      // rows * parts, or more
} qkvi_chunk;

// The chunk that begins with row `first` of `count`.
static inline qkvi_chunk qkvi_chunk_at(size_t first, size_t count, unsigned parts) {
  const size_t left = count - first, most = QKV_INTEGER_COLUMNS / parts;
  size_t width = most;
  while (width > 1 && left <= width / 2) width /= 2;
  if (left == 5 || left == 6) width = 4;  // two chunks, of which none is wasted
  return (qkvi_chunk){.first = first, .rows = left < width ? left : width, .columns = width * parts};
}

// Bytes of a column of a query: whole blocks.
static inline size_t qkvi_column_bytes(size_t dim) {
  return (dim + QKVI_BLOCK_WIDTH - 1) / QKVI_BLOCK_WIDTH * QKVI_BLOCK_WIDTH;
}

// The chunk that holds a row.
static inline qkvi_chunk qkvi_chunk_of(size_t row, size_t count, unsigned parts) {
  qkvi_chunk chunk = qkvi_chunk_at(0, count, parts);
  while (chunk.first + chunk.rows <= row) chunk = qkvi_chunk_at(chunk.first + chunk.rows, count, parts);
  return chunk;
}

// Queries as the kernels read them, in the caller's memory.
typedef struct qkv_integer_queries {
  size_t count;
  unsigned parts;  // 1 or 2
  uint16_t dim;
  size_t wide;    // blocks; in those from here on the first of two bytes are all 0
  float *scales;  // [count]
  // -128 times the sums of a column's bytes over the coordinates of blocks [0, b): [chunk][b][column].
  int32_t *offsets;
  int8_t *bytes;  // [chunk][dim up to 16s / 4][column][4], 64-byte aligned
} qkv_integer_queries;

// The bytes of numbers up to `limit`.
static inline unsigned qkvi_parts_of(float limit) {
  return limit > QKVI_LIMIT_1 ? 2 : 1;
}

// Memory for QKV_INTEGER_ROWS queries.
typedef struct qkv_integer_buffers {
  float scales[QKV_INTEGER_ROWS];
  int32_t offsets[(QKVI_BLOCKS_MAX + 1) * QKV_INTEGER_PARTS * QKV_INTEGER_ROWS];
  _Alignas(64) int8_t bytes[QKV_INTEGER_PARTS * QKV_INTEGER_ROWS * QKV_DIM_MAX];
} qkv_integer_buffers;

static inline qkv_integer_queries qkvi_integer_queries_in(qkv_integer_buffers *buffer) {
  return (qkv_integer_queries){.scales = buffer->scales, .offsets = buffer->offsets, .bytes = buffer->bytes};
}

// The weights of a tile.
typedef struct qkv_integer_weights {
  size_t count;
  unsigned parts;
  float scales[QKV_INTEGER_ROWS];
  _Alignas(64) uint8_t bytes[QKV_INTEGER_PARTS * QKV_INTEGER_ROWS * QKV_PAGE_TOKENS];  // [chunk][16][column][4]
} qkv_integer_weights;

// A cache of where the codes of the last tiers lie. Cleared by its owner before the first use; for one thread. The
// schedules must live as long.
#define QKV_LAYOUTS 8
typedef struct qkv_layouts {
  struct {
    const qkv_schedule *schedule;  // NULL: free
    unsigned tier;
    uint64_t used;  // number of the last find that returned it
    qkvi_tier_blocks blocks;
  } all[QKV_LAYOUTS];
  uint64_t finds;
} qkv_layouts;

// Clears without writing zeros to all of it.
static inline void qkvi_layouts_clear(qkv_layouts *layouts) {
  for (size_t i = 0; i < QKV_LAYOUTS; i++) {
    layouts->all[i].schedule = NULL;
    layouts->all[i].used = 0;
  }
  layouts->finds = 0;
}

// The result stays valid while fewer than QKV_LAYOUTS others are found: the least recently used one is replaced.
const qkvi_tier_blocks *qkvi_layouts_find(qkv_layouts *layouts, const qkv_schedule *schedule, unsigned tier);

// Bytes that will be read soon, to be prefetched along the way; none where `bytes` is 0.
typedef struct qkv_ahead {
  const void *from;
  size_t bytes;
} qkv_ahead;

#endif
