// Rows of pages on a GPU: what the host gives to the kernels of decode.c and encode.c, and gets from them. In C17 and
// CUDA C++. All pointers in these structures are addresses on the device.
//
// A *job* is one head's keys or values of a page. A block of threads takes a job: its rows lie in shared memory, by
// coordinate. Pages are taken as they lie in memory and on the SSD (engine/codec/page.h): embedded codec, any tiers
// and schedules, any frame, outlier rows, anchors and factors of any kind, widths of up to QKV_SIMT_ROWS_DIM_MAX.
// Each step of the arithmetic is that of the CPU's reference (engine/codec/embedded.c), so rows have the same bits.
#ifndef QKV_ENGINE_KERNEL_SIMT_ROWS_H
#define QKV_ENGINE_KERNEL_SIMT_ROWS_H

#include <stdint.h>

enum {
  QKV_SIMT_ROWS_DIM_MAX = 576,  // shared memory of compute capability 8.0 has space for so many coordinates
  QKV_SIMT_TIERS = 65,
  QKV_SIMT_DEPTHS = 9,
};

// Look-up tables: qkv_simt_row_tables_fill (operands.h). 16-byte aligned.
typedef struct qkv_simt_row_tables {
  float values[512];  // centroids: those of depth d from 2^d - 2 on
  float gains[256];   // by gain byte
} qkv_simt_row_tables;

// The code of one head's keys or values; 16-byte aligned. Offsets count from its beginning.
typedef struct qkv_simt_code {
  uint16_t dim, key_dim, value_dim;
  uint16_t coded;        // coordinates that have bits at the highest tier
  uint16_t pairs;        // that turn, of keys; 0: there is no RoPE
  uint16_t step, apart;  // a pair's coordinates: pair * step, and `apart` behind it
  uint16_t unused;
  // Of rows that are decoded. Offset of the synthesis in whole numbers (kernel/dense.h), i16 [input][output], then
  // f32 scales [dim] and mean [dim]; 0: Hadamard.
  uint32_t synthesis;
  uint32_t outlier_steps;  // offset of f32 [dim], of values; 0: all are 1
  // Of rows that are encoded. Offset of the analysis likewise; 0: Hadamard. Offset of f32 [4], the sum of the weights
  // of coordinates that have bits, then weights [dim] and their means of fours [dim / 4]; 0: all are 1.
  uint32_t analysis, weights;
  uint32_t signs[32];  // of Hadamard: bit i of word w is coordinate 32 w + i, 1 for minus
  uint16_t reach[QKV_SIMT_TIERS][QKV_SIMT_DEPTHS];  // engine/codec/schedule.h
  uint16_t bytes[2][QKV_SIMT_TIERS];                // of a group of keys, of values, by tier
  uint16_t unused_too[13];
} qkv_simt_code;

// What keys of a page turn by, f32 [QKV_SIMT_ROW_TURNS][pairs]: cosines and sines of its frame and the rotating
// anchor there, x and y; cosines and sines of its centre.
enum { QKV_SIMT_ROW_TURNS = 6 };

enum {
  QKV_SIMT_ROWS_FRAME = 1,      // rows are turned from their frame to rows as attended
  QKV_SIMT_ROWS_TURN = 2,       // then by RoPE, forward or back
  QKV_SIMT_ROWS_TURN_KEPT = 4,  // outlier keys are turned by RoPE
  QKV_SIMT_ROWS_BACK = 8,       // RoPE back
};

typedef struct qkv_simt_decode {
  const uint8_t *page;        // 64-byte aligned
  const qkv_simt_code *code;  // of the part
  const float *turns;         // of keys that turn
  const float *slots;         // the same: f32 [2][pairs][64], cosines and sines of what turns a slot from the centre
  uint8_t *out;               // the row of token `first`
  uint64_t stride;            // bytes from a row to the next
  uint32_t kv_head, part;     // part: qkv_part
  uint32_t first, end;        // tokens
  uint32_t dtype;             // qkv_dtype
  uint32_t flags;
} qkv_simt_decode;

// Of the kernel qkv_simt_decode_rows: a block for each job, of QKV_SIMT_ROWS_THREADS(the widest job's dim) threads.
typedef struct qkv_simt_decode_args {
  const qkv_simt_decode *jobs;  // [count]
  const qkv_simt_row_tables *tables;
  uint32_t count;
} qkv_simt_decode_args;

// ---- Rows to codes ----
//
// Gains, codes and errors of one head's keys or values, of any schedule: for data-free code in the plain frame those
// of the CPU's encode_rows (engine/kernel/kernel.h), otherwise those that it makes by way of the frame, the transform
// and encode. Which rows are outliers, anchors and the page's image are the host's.

enum {
  QKV_SIMT_ENCODE_DIM_MAX = 512,
  QKV_SIMT_ENCODE_SCALES = 3,
  QKV_SIMT_ENCODE_DEPTHS = 5,  // of coordinates of up to four bits
};

// qkv_simt_encode_tables_fill (operands.h). 16-byte aligned.
typedef struct qkv_simt_encode_tables {
  qkv_simt_row_tables rows;
  float scales[QKV_SIMT_ENCODE_SCALES], step, inverse_step;
  float gain_middles[8];
  uint32_t unused[3];
  uint32_t
      middles[128];  // boundaries that split positive cells, as bits of floats: cell c of depth d at 2^(d - 2) + c
  uint8_t cells[QKV_SIMT_ENCODE_SCALES][256];
  uint8_t units[QKV_SIMT_ENCODE_SCALES][QKV_SIMT_ENCODE_DEPTHS][256];
} qkv_simt_encode_tables;

// A result: this, then the codes of four groups, one after the other. 16-byte aligned.
// Squares: lengths of rows, as they were given, or, of data-free code in the plain frame, once they are transformed.
typedef struct qkv_simt_encoded {
  float errors[64], squares[64];
  uint8_t gains[64];
} qkv_simt_encoded;

typedef struct qkv_simt_encode {
  const uint8_t *rows;        // that of token 0
  uint64_t stride;            // bytes from a row to the next
  const qkv_simt_code *code;  // of the part
  const float *turns;         // of keys in a frame; those of rows before RoPE
  const float *slots;         // the same
  qkv_simt_encoded *out;
  uint32_t tokens, tier;  // tier: at least 1
  uint32_t part, dtype;   // qkv_part, qkv_dtype
  uint32_t flags;         // QKV_SIMT_ROWS_FRAME: to the attend frame; QKV_SIMT_ROWS_TURN: to before RoPE
} qkv_simt_encode;

// Of the kernel qkv_simt_encode_rows: a block for each job, of QKV_SIMT_ROWS_THREADS(the widest job's dim) threads.
typedef struct qkv_simt_encode_args {
  const qkv_simt_encode *jobs;  // [count]
  const qkv_simt_encode_tables *tables;
  uint32_t count;
} qkv_simt_encode_args;

// Shared memory: tables, sums [4][16 lanes][64 tokens], a state for each token, the tile.
#define QKV_SIMT_ENCODE_SUM_BYTES (4 * 16 * 64 * 4)
#define QKV_SIMT_ENCODE_STATE_BYTES 2304
#define QKV_SIMT_ENCODE_SHARED_BYTES(dim)                                                     \
  (sizeof(qkv_simt_encode_tables) + QKV_SIMT_ENCODE_SUM_BYTES + QKV_SIMT_ENCODE_STATE_BYTES + \
   4 * QKV_SIMT_ROWS_STRIDE * (dim))

#define QKV_SIMT_ROWS_THREADS(dim) (((dim) + 31) / 32 * 32)
// From a coordinate to the next, in floats: four tokens of eight coordinates lie in different banks.
#define QKV_SIMT_ROWS_STRIDE 68
// Tables, the tile; sums [16][64 tokens], and two numbers a token.
#define QKV_SIMT_ROWS_SHARED_BYTES(dim) \
  (sizeof(qkv_simt_row_tables) + 4 * QKV_SIMT_ROWS_STRIDE * (dim) + 4 * (16 + 2) * 64)

#endif
