// Rows of an append that lie in clients' memory on the GPU: pages of them are coded there.
//
//   client's memory ─► area, the daemon's, on the GPU ─┬─► memory: checked, exact, learnt from
//                                                      └─► kernel qkv_simt_encode_rows ─► codes ─► pages
//
// The client may write to its memory meanwhile, so rows are copied once, on the GPU, and both the CPU and the kernel
// have that copy. All rows come to memory as well: the CPU checks them, keeps the last ones exact, and chooses
// outliers. What it is spared is coding.
//
// Whatever the kernels do not make, the CPU does, with the same bits: pages that begin with rows of an earlier
// append, rows to be rotated or of another dtype than the model's, other codecs, anchors, factors, more than 256
// coordinates; all pages of a request that finds no area, no call, or no GPU in use.
//
// Threads: any; one at a time for an area and the sources in it. All wait for the GPU.
#ifndef QKV_SERVER_GPU_APPEND_H
#define QKV_SERVER_GPU_APPEND_H

#include "engine/base/tensor.h"
#include "engine/cache/device.h"
#include "server/gpu/gpu.h"
#include "server/gpu/rows.h"

typedef struct qkvi_gpu_area qkvi_gpu_area;

// An area for the copies of one request, on the GPU that the memory is on. NULL: all are in use, or the GPU is not.
qkvi_gpu_area *qkvi_gpu_area_take(const qkvi_gpu_lent *lent);
// No source in it is used any more. Clears *area; NULL inside is none.
void qkvi_gpu_area_return(qkvi_gpu_area **area);

// As qkvi_gpu_lent_read, by way of the area, where `*at` is the copy; 0: there is none, as `area` is NULL, full, or
// of another GPU.
qkv_status qkvi_gpu_lent_take(qkvi_gpu_lent *lent, uint64_t offset, void *out, size_t bytes, qkvi_gpu_area *area,
                              qkv_cuda_memory *at, qkv_error *error);
qkvi_gpu *qkvi_gpu_lent_on(const qkvi_gpu_lent *lent);

// Rows in an area.
typedef struct qkvi_gpu_source {
  qkv_row_encoder encoder;  // first, so that one leads to the other
  qkvi_gpu *gpu;
  qkvi_gpu_area *area;  // NULL: all pages are the CPU's
  qkv_dtype dtype;
  uint64_t tokens;
  qkvi_gpu_place from[2];  // by qkv_part
} qkvi_gpu_source;

// Of k and v [tokens, kv_heads, dim], checked, whose copies begin `at` (by qkv_part; 0: not in the area). `area` may
// be NULL. Stays at its address while it is used.
void qkvi_gpu_source_init(qkvi_gpu_source *source, qkvi_gpu *gpu, qkvi_gpu_area *area, const qkv_tensor *k,
                          const qkv_tensor *v, const qkv_cuda_memory at[2]);

#endif
