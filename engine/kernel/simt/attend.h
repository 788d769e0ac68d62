// Attention on coded pages on a GPU: what the host gives to the kernels of attend.c, and gets from them. In C17 and
// CUDA C++. All pointers in these structures are addresses on the device.
//
// A *range* is up to 64 pages of one layer (engine/cache/page_range.h), taken with the rows of one KV head. It is cut
// into *runs* of 8 pages by their index in the range. A warp takes a run and leaves its partial result: sums in code
// space, peaks and totals, as engine/cache/attend_internal.h has them. The merge kernel makes one partial result of
// some. The cut depends on nothing else, and each step of the arithmetic is that of the CPU's integer kernels
// (engine/kernel/integer.h, outliers_plain.h), so the results have the same bits. (A peak of zero may have another
// sign.)
//
// Data-free pages are taken as they lie in memory and on the SSD (engine/codec/page.h), those of a calibrated code
// expanded (calibrated.h). What they may be:
//   embedded codec, key_dim = value_dim = 64 or 128, no anchors, no factors; outlier rows as they come
//   data-free: plain frame, each group's tier 8, 16, 24 or 32 (1 to 4 bits); tiers may differ from group to group
//   calibrated: plain or attend frame, any tiers
#ifndef QKV_ENGINE_KERNEL_SIMT_ATTEND_H
#define QKV_ENGINE_KERNEL_SIMT_ATTEND_H

#include <stdint.h>

enum {
  QKV_SIMT_RUN_PAGES = 8,
  QKV_SIMT_RANGE_PAGES = 64,
  QKV_SIMT_RANGE_RUNS = QKV_SIMT_RANGE_PAGES / QKV_SIMT_RUN_PAGES,
  QKV_SIMT_COLUMNS = 8,  // bytes that a product multiplies a code with: (row, part)
  QKV_SIMT_WARPS = 4,    // of a block of the attend kernels
  QKV_SIMT_KINDS = 7,    // of 16 coordinates: none; 1 bit, low and high half of a line; 2; 3, low and high; 4
  QKV_SIMT_OUTLIERS = 16,
  QKV_SIMT_MERGE_THREADS = 128,
};

// A nibble's centroid is the sum of two entries (attend.c): [0..1] of the first, [2..3] of the second, a byte each.
// Of nibbles from even fields and from odd ones.
typedef struct qkv_simt_nibbles {
  uint32_t even[4], odd[4];
} qkv_simt_nibbles;

// Look-up tables: qkv_simt_tables_fill (operands.h). 16-byte aligned.
typedef struct qkv_simt_tables {
  qkv_simt_nibbles nibbles[QKV_SIMT_KINDS];
  uint32_t fields[4];  // of kinds up to 2 bits: a byte each of the four values of a field
  float gains[256];    // by gain byte
  float step;
  uint32_t unused[3];
} qkv_simt_tables;

// Queries of a block of `rows` rows (4 or 8, those that are missing are zeros), 16-byte aligned:
//   0        i8  [8 columns][dim]   part p of row r is column r * parts + p; other columns are zeros
//   8 dim    f32 [8][dim]           the rows as attended: what outlier keys are multiplied with
//   40 dim   f32 [8]                scales
#define QKV_SIMT_QUERY_BYTES(dim) (40 * (dim) + 32)

// A partial result, 16-byte aligned:
//   f32 sums [rows][dim]   f32 peaks [rows]   f64 totals [rows]
#define QKV_SIMT_PARTIAL_BYTES(dim, rows) ((rows) * (4 * (dim) + 12))

typedef struct qkv_simt_range {
  const uint8_t *const *pages;  // [end]: images by their index in the range, 64-byte aligned
  const uint8_t *queries;
  const uint16_t *seen;  // [rows][2]: the tokens [begin, end) of the range that a row sees; NULL: all rows see all
  uint8_t *partials;     // [8]: of the runs, by their number in the range; only of runs with pages of [first, end)
  uint32_t first, end;   // pages of the range that take part, at least one
  uint32_t kv_head;
  uint32_t turned_step;   // calibrated (calibrated.h): from a page's turned block to the next one's; 0: one for all
  const uint8_t *turned;  // by the index of pages in the range
  const float *steps;     // [dim] of outlier values
  float soft_cap;         // scores become soft_cap * tanh(score / soft_cap); 0: they stay
  uint32_t unused;
} qkv_simt_range;

// Of the attend kernels: blocks of QKV_SIMT_WARPS * 32 threads, count * 8 / QKV_SIMT_WARPS of them.
typedef struct qkv_simt_attend_args {
  const qkv_simt_range *ranges;  // [count]
  const qkv_simt_tables *tables;
  uint32_t count;
} qkv_simt_attend_args;

// Partial results [first, end) of an array, merged in order.
typedef struct qkv_simt_merge {
  const uint8_t *partials;
  uint8_t *out;
  uint32_t first, end;  // at least one
} qkv_simt_merge;

// Of the kernel qkv_simt_merge_partials: a block of QKV_SIMT_MERGE_THREADS threads for each merge, no shared memory.
typedef struct qkv_simt_merge_args {
  const qkv_simt_merge *merges;  // [count]
  uint32_t count, dim, rows;
} qkv_simt_merge_args;

// The attend kernels: X(dim, rows, bytes of a query's number, bytes of a weight). qkv_simt_attend_128x4_q2w1 has the
// first four 128, 4, 2, 1.
#define QKV_SIMT_SHAPES(X) \
  X(64, 4, 1, 1)           \
  X(64, 8, 1, 1)           \
  X(64, 4, 2, 1)           \
  X(64, 4, 2, 2)           \
  X(128, 4, 1, 1)          \
  X(128, 8, 1, 1)          \
  X(128, 4, 2, 1)          \
  X(128, 4, 2, 2)

// ---- Shared memory of the attend kernels ----
//
// A warp has a ring of *halves*, which are being copied or worked on: a page's keys with all its gains, or its
// values. And it has scratch memory through which its lanes exchange data. The four groups of values lie 32 bytes
// further apart than in the page, so that the lanes of a load find them in different banks.

#ifndef QKV_SIMT_SLOTS
#define QKV_SIMT_SLOTS 3  // of a ring
#endif
#define QKV_SIMT_APART 32
#define QKV_SIMT_SLOT_BYTES(dim) (128 + 32 * (dim))  // gains, or four times APART, and codes of up to four bits
#define QKV_SIMT_WARP_STATE_BYTES 5760               // sizeof(warp_shared), attend.c
#define QKV_SIMT_WARP_BYTES(dim) (QKV_SIMT_WARP_STATE_BYTES + QKV_SIMT_SLOTS * QKV_SIMT_SLOT_BYTES(dim))
#define QKV_SIMT_TABLE_BYTES 1280  // sizeof(qkv_simt_tables)
#define QKV_SIMT_SHARED_BYTES(dim) (QKV_SIMT_TABLE_BYTES + QKV_SIMT_WARPS * QKV_SIMT_WARP_BYTES(dim))

#endif
