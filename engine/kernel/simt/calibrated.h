// Attention on pages of a calibrated code: what the kernels of attend.h get of them in addition. In C17 and CUDA C++.
//
// Coordinates of a calibrated code have 0 to 8 bits, in bands of 8 or 16. So a page is expanded as it is brought to
// the device (engine/cache/device_image.h): each 16 coordinates of a group become a *block*, whose codes lie in lines
// of 64 bytes in one of four forms. Header, outlier section and gains stay as they are.
//
//   image             header and directory as in engine/codec/page.h; of a directory entry
//                       0  u32 offset of the head's block     4  u32 bytes of its keys     8  u32 of its values
//                      12  u32 paths: which forms occur, four bits (QKV_SIMT_PATH) for each step of the kernel
//   keys of a head    gains of K [64], gains of V [64], places [4][dim / 16] of u32, lines
//   values            places, lines; those of group g begin 32 g bytes later, so that lanes find different banks
//   anchors           of a page that has them, data-free: f32 units of K, of V (0: none), 8 bytes of 0, i8 rows
//                     [5][dim]: of K's four groups, of V (engine/codec/anchor.h: mean; of keys also by group)
//
//   place of a block  bits 0..15 its first line, in 16 bytes from the first place on     16..19 form
//                     20..23, 24..27 kinds of its first and second 8 coordinates         28, 29 these have low bytes
//
//   form       coordinates' bits   lines
//   NARROW     up to 2             1   two bits each
//   NIBBLES    up to 4             2   as pairs 0 and 1 of a page
//   BYTES      up to 6             4   centroids
//   WIDE       up to 8             8   centroids, those of more than 6 bits in two bytes: 4 of high ones, 4 of low
//   ones
//
// Two bits of K: byte b of a line belongs to token b / 4, i = b % 4; fields 0, 2, 1, 3 are coordinates i, 4 + i, 8 +
// i, 12 + i. So each nibble has coordinates of one half of a block, which may have bits of their own. Of V: as in a
// page. A byte of a token or coordinate lies as products want it (attend.c); the four rows of 16 bytes that a lane
// has lie 64 bytes apart.
//
// Queries of the attend frame are other ones for each page. The kernel qkv_simt_turn turns them back, transforms them
// and rounds them to bytes, and computes what the rotating anchor adds to scores: it does what engine/codec/walk.c
// does, with the same bits. Its result for a page is a *turned* block; without RoPE it is the same for all pages.
#ifndef QKV_ENGINE_KERNEL_SIMT_CALIBRATED_H
#define QKV_ENGINE_KERNEL_SIMT_CALIBRATED_H

#include "engine/kernel/simt/attend.h"

enum {
  QKV_SIMT_FRAME_ROWS = 4,  // of a block of queries
  QKV_SIMT_WAVE_SLOTS = 32,
  QKV_SIMT_WAVE_TERMS = 4,
  QKV_SIMT_TURN_PAGES = 16,  // of a block of the turn kernels
  QKV_SIMT_FRAME_SLOTS = 2,  // of a warp's ring
};

enum { QKV_SIMT_FORM_NARROW, QKV_SIMT_FORM_NIBBLES, QKV_SIMT_FORM_BYTES, QKV_SIMT_FORM_WIDE };
// Paths of a step: K's is two groups by 64 coordinates, 2 * (group / 2) + coordinate / 64; V's 32 coordinates.
#define QKV_SIMT_PATH(form) (1u << (form))
#define QKV_SIMT_PATHS_OF_KEYS(paths, step) ((paths) >> (4 * (step)) & 15)
#define QKV_SIMT_PATHS_OF_VALUES(paths, step) ((paths) >> (16 + 4 * (step)) & 15)

// A slot of the ring: a head's keys with their turned block, or its values.
#define QKV_SIMT_FRAME_SLOT_BYTES(dim) (48 * (dim) + 3072)
#define QKV_SIMT_FRAME_WARP_BYTES(dim) \
  (QKV_SIMT_WARP_STATE_BYTES + QKV_SIMT_FRAME_SLOTS * QKV_SIMT_FRAME_SLOT_BYTES(dim))
#define QKV_SIMT_FRAME_SHARED_BYTES(dim) (QKV_SIMT_TABLE_BYTES + QKV_SIMT_WARPS * QKV_SIMT_FRAME_WARP_BYTES(dim))

// ---- Queries ----

// Of a block of four rows, 16-byte aligned: this, then
//   f32 [4][dim]         the rows as attended
//   f32 [4][2][stride]   products with the rotating anchor (walk.h); or, without RoPE, a turned block, and of a coder
//                        with anchors f32 [4][dim], the rows in code space
typedef struct qkv_simt_frame_queries {
  float factors[QKV_SIMT_FRAME_ROWS], scales[QKV_SIMT_FRAME_ROWS];  // to whole numbers and back
  float shares[QKV_SIMT_FRAME_ROWS];                                // of the mean
  float query_limit, weight_limit;                                  // the most of a query's numbers; 255 or 65535
  uint32_t unused[2];
} qkv_simt_frame_queries;
#define QKV_SIMT_FRAME_QUERY_BYTES(dim) (64 + 40 * (dim) + 1040)

// A turned block, 16-byte aligned:
//   f32 added [4][64]   to scores, by row and slot
//   i8 [8][dim]         columns as attend.h has them, two a row, the higher byte first; each 16 as products want them
//   f32 scales [4]
#define QKV_SIMT_TURNED_BYTES(dim) (1040 + 8 * (dim))

// ---- Tables of a coder, which lie with its pages ----

// Of all heads. Arrays follow: cosines, sines [fast][32], even, odd [4][stride] (qkv_page_waves, kernel.h).
typedef struct qkv_simt_frame {
  uint32_t width;         // coordinates that turn
  uint32_t step, apart;   // a pair's coordinates: pair * step, and `apart` behind it
  uint32_t stride, fast;  // as qkv_page_waves
  uint32_t ends[QKV_SIMT_WAVE_TERMS];
  float step_size;  // qkv_simt_tables.step
  uint32_t unused[6];
} qkv_simt_frame;
#define QKV_SIMT_FRAME_BYTES(stride, fast) \
  (sizeof(qkv_simt_frame) + (size_t)(fast)*2 * QKV_SIMT_WAVE_SLOTS * 4 + (size_t)(stride)*2 * QKV_SIMT_WAVE_TERMS * 4)

// Of a head: f32 steps [dim] of outlier values; in the attend frame also f32 scales [dim] and the matrix that
// transforms queries, [dim / 16][dim / 32][high, low][32 lanes] of 16 bytes: operands of a product.
#define QKV_SIMT_HEAD_BYTES(dim, turns) (4 * (dim) + ((turns) ? 4 * (dim) + 2 * (dim) * (dim) : 0))

// Of a head of a page with anchors, behind its values.
#define QKV_SIMT_ANCHORS_BYTES(dim) (16 + 5 * (dim))

// Of a page: f32 [4][dim / 2], cosines and sines that pairs of queries are turned back by, then those of its middle.
#define QKV_SIMT_TURN_BYTES(dim) (8 * (dim))

// ---- The turn kernels: qkv_simt_turn_64 and _128 ----

typedef struct qkv_simt_turn {
  const uint8_t *queries;
  const uint8_t
      *frame;  // NULL: the turned block is in `queries`, and is copied to `turned`, with anchors for each page
  const uint8_t *head;
  const uint8_t *const *pages;  // images by their index in the range: a page's turns lie before its image
  uint8_t *turned;              // by the index
  uint32_t first, end;          // pages
  uint32_t kv_head;
  uint32_t anchored;  // 1: pages may have anchors
} qkv_simt_turn;

// Blocks of QKV_SIMT_WARPS * 32 threads, four a job.
typedef struct qkv_simt_turn_args {
  const qkv_simt_turn *turns;  // [count]
  uint32_t count;
} qkv_simt_turn_args;
#define QKV_SIMT_TURN_BLOCKS (QKV_SIMT_RANGE_PAGES / QKV_SIMT_TURN_PAGES)

// Shared memory: a block of queries; for each warp turned products and bytes.
#define QKV_SIMT_TURN_SHARED_BYTES(dim) (64 + 32 * (dim) + QKV_SIMT_WARPS * (24 * (dim)))

// Of the kernels that attend to calibrated pages, qkv_simt_calibrated_64 and _128: four rows, two bytes each.
#define QKV_SIMT_CALIBRATED(X) \
  X(64)                        \
  X(128)

#endif
