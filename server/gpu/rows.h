// Rows of a layer to memory of the GPU that is not the tier's: a worker's, where Fetch brings them.
//
//   pages that are resident as they lie in memory  ─┐
//   other pages: their images cross, coded          ├─► kernel qkv_simt_decode_rows ─► `to`
//   rows that no kernel makes                       └─► decoded by the CPU, cross as rows
//
// A page's image is a quarter of its rows or less, so what crosses is little, and the CPU decodes nothing. The CPU's
// are the exact rows behind the pages, pages of other codecs or of more than 256 coordinates, and all pages where
// every call of the GPU is in use. Either way the rows have the bits of qkv_layer_rows in the dtype asked.
//
// Threads: any, at once; waits for the GPU.
#ifndef QKV_SERVER_GPU_ROWS_H
#define QKV_SERVER_GPU_ROWS_H

#include "engine/cache/layer.h"
#include "server/gpu/gpu.h"
#include "storage/gpu/driver.h"

// Where a part's rows go: the first token's row of head 0; bytes from a token, and from a head, to the next.
// Multiples of the dtype's size.
typedef struct qkvi_gpu_place {
  qkv_cuda_memory at;  // in the GPU's primary context; 0: the part is not wanted
  uint64_t token_stride, head_stride;
} qkvi_gpu_place;

typedef struct qkvi_gpu_rows {
  const qkv_layer *layer;  // locked for reading
  uint64_t begin, tokens;  // positions that are held, and in memory, as for qkv_layer_rows
  qkv_dtype dtype;
  bool before_rope;
  qkvi_gpu_place to[2];  // by qkv_part
} qkvi_gpu_rows;

// OK: all rows are there. UNAVAILABLE: the GPU fails, and `to` with it. While it runs the GPU stays open.
qkv_status qkvi_gpu_fetch(qkvi_gpu *gpu, const qkvi_gpu_rows *rows, qkv_error *error);
// The same to memory of other processes, for each part whose `lent` is not NULL: `at` is an offset in it, a multiple
// of the dtype's size (qkvi_gpu_lent_is_aligned). What the strides reach is inside. Both parts at once where they are
// on one GPU.
qkv_status qkvi_gpu_lent_fetch(qkvi_gpu_lent *const lent[2], const qkvi_gpu_rows *rows, qkv_error *error);

#endif
