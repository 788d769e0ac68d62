// Memory of a GPU, in blocks.
//
// The driver gives large pieces; blocks are cut from them. The free lists are tables on the host, as it cannot keep
// them in free memory of the device. A block comes from the first piece that has a large enough free range, at its
// lowest address. Pieces stay until the heap is destroyed: memory of the device that was used once stays reserved.
//
//   piece  |block|block|   free   |block|free|     64 MiB, more for a larger block; blocks are multiples of 256 bytes
//
// Threads: any; one lock.
#ifndef QKV_STORAGE_GPU_HEAP_H
#define QKV_STORAGE_GPU_HEAP_H

#include <stdint.h>

#define QKV_GPU_BLOCK_ALIGN 256
#define QKV_GPU_PIECE_BYTES (UINT64_C(64) << 20)

// Where pieces come from. `take` returns an address that is a multiple of 256, or 0 where the device has none left.
typedef struct qkv_gpu_pieces {
  uint64_t (*take)(void *context, uint64_t bytes);
  void (*give)(void *context, uint64_t at, uint64_t bytes);
  void *context;
} qkv_gpu_pieces;

typedef struct qkv_gpu_heap_stats {
  uint64_t bytes_max;
  uint64_t bytes_held;  // in pieces
  uint64_t bytes_used;  // in blocks
  uint64_t blocks;
} qkv_gpu_heap_stats;

typedef struct qkv_gpu_heap qkv_gpu_heap;

// Pieces take `bytes_max` at most; the last one is smaller where that is no multiple of the piece size.
qkv_gpu_heap *qkv_gpu_heap_create(uint64_t bytes_max, qkv_gpu_pieces source);
// All pieces are given back, and blocks with them. Clears *heap.
void qkv_gpu_heap_destroy(qkv_gpu_heap **heap);

// The address of `bytes` (> 0), or 0 where neither the pieces nor the budget have so many contiguous bytes.
uint64_t qkv_gpu_heap_alloc(qkv_gpu_heap *heap, uint64_t bytes);
// `bytes` as they were asked for; `at` 0 is none.
void qkv_gpu_heap_free(qkv_gpu_heap *heap, uint64_t at, uint64_t bytes);

qkv_gpu_heap_stats qkv_gpu_heap_read(qkv_gpu_heap *heap);
// NULL, or the invariant that does not hold.
const char *qkv_gpu_heap_validate(qkv_gpu_heap *heap);

#endif
