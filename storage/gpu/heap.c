#include "storage/gpu/heap.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

#include "engine/base/holes.h"

typedef struct piece {
  uint64_t at, bytes;
  qkvi_holes holes;
} piece;

struct qkv_gpu_heap {
  pthread_mutex_t lock;
  qkv_gpu_pieces source;
  uint64_t bytes_max, bytes_held, bytes_used, blocks;
  piece *pieces;  // in order of their addresses
  size_t count;
};

static uint64_t rounded(uint64_t bytes) {
  return (bytes + QKV_GPU_BLOCK_ALIGN - 1) / QKV_GPU_BLOCK_ALIGN * QKV_GPU_BLOCK_ALIGN;
}

qkv_gpu_heap *qkv_gpu_heap_create(uint64_t bytes_max, qkv_gpu_pieces source) {
  qkv_gpu_heap *heap = calloc(1, sizeof *heap);
  if (heap == NULL) abort();
  heap->source = source;
  heap->bytes_max = bytes_max / QKV_GPU_BLOCK_ALIGN * QKV_GPU_BLOCK_ALIGN;
  pthread_mutex_init(&heap->lock, NULL);
  return heap;
}

void qkv_gpu_heap_destroy(qkv_gpu_heap **heap) {
  qkv_gpu_heap *old = *heap;
  if (old == NULL) return;
  *heap = NULL;
  for (size_t i = 0; i < old->count; i++) {
    qkvi_holes_deinit(&old->pieces[i].holes);
    old->source.give(old->source.context, old->pieces[i].at, old->pieces[i].bytes);
  }
  pthread_mutex_destroy(&old->lock);
  free(old->pieces);
  free(old);
}

// Inserts a new piece in order; false where the budget or the device has none for a block of `bytes`.
static bool add_piece(qkv_gpu_heap *heap, uint64_t bytes) {
  const uint64_t left = heap->bytes_max - heap->bytes_held;
  if (bytes > left) return false;
  const uint64_t most = left < QKV_GPU_PIECE_BYTES ? left : QKV_GPU_PIECE_BYTES;
  const uint64_t size = bytes > most ? bytes : most;
  const uint64_t at = heap->source.take(heap->source.context, size);
  if (at == 0) return false;
  assert(at % QKV_GPU_BLOCK_ALIGN == 0);
  piece *pieces = realloc(heap->pieces, (heap->count + 1) * sizeof *pieces);
  if (pieces == NULL) abort();
  heap->pieces = pieces;
  size_t place = heap->count++;
  for (; place > 0 && pieces[place - 1].at > at; place--) pieces[place] = pieces[place - 1];
  pieces[place] = (piece){.at = at, .bytes = size, .holes = QKVI_HOLES_NONE};
  qkvi_holes_give(&pieces[place].holes, at, size);
  heap->bytes_held += size;
  return true;
}

static uint64_t take_block(qkv_gpu_heap *heap, uint64_t bytes) {
  uint64_t at;
  for (size_t i = 0; i < heap->count; i++) {
    if (qkvi_holes_take(&heap->pieces[i].holes, bytes, &at)) return at;
  }
  return 0;
}

uint64_t qkv_gpu_heap_alloc(qkv_gpu_heap *heap, uint64_t bytes) {
  assert(bytes > 0);
  if (bytes > heap->bytes_max) return 0;
  bytes = rounded(bytes);
  pthread_mutex_lock(&heap->lock);
  uint64_t at = take_block(heap, bytes);
  if (at == 0 && add_piece(heap, bytes)) at = take_block(heap, bytes);
  if (at != 0) {
    heap->bytes_used += bytes;
    heap->blocks++;
  }
  pthread_mutex_unlock(&heap->lock);
  return at;
}

static piece *piece_of(qkv_gpu_heap *heap, uint64_t at) {
  size_t low = 0, high = heap->count;
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    if (heap->pieces[middle].at <= at)
      low = middle;
    else
      high = middle;
  }
  piece *found = &heap->pieces[low];
  assert(heap->count > 0 && at >= found->at && at - found->at < found->bytes);
  return found;
}

void qkv_gpu_heap_free(qkv_gpu_heap *heap, uint64_t at, uint64_t bytes) {
  if (at == 0) return;
  assert(bytes > 0 && at % QKV_GPU_BLOCK_ALIGN == 0);
  bytes = rounded(bytes);
  pthread_mutex_lock(&heap->lock);
  piece *of = piece_of(heap, at);
  assert(bytes <= of->bytes - (at - of->at) && heap->bytes_used >= bytes && heap->blocks > 0);
  qkvi_holes_give(&of->holes, at, bytes);
  heap->bytes_used -= bytes;
  heap->blocks--;
  pthread_mutex_unlock(&heap->lock);
}

qkv_gpu_heap_stats qkv_gpu_heap_read(qkv_gpu_heap *heap) {
  pthread_mutex_lock(&heap->lock);
  const qkv_gpu_heap_stats stats = {.bytes_max = heap->bytes_max,
                                    .bytes_held = heap->bytes_held,
                                    .bytes_used = heap->bytes_used,
                                    .blocks = heap->blocks};
  pthread_mutex_unlock(&heap->lock);
  return stats;
}

static const char *validate(const qkv_gpu_heap *heap) {
  uint64_t held = 0, available = 0;
  for (size_t i = 0; i < heap->count; i++) {
    const piece *of = &heap->pieces[i];
    const char *wrong = qkvi_holes_validate(&of->holes);
    if (wrong != NULL) return wrong;
    if (i > 0 && of[-1].at + of[-1].bytes > of->at) return "two pieces overlap";
    held += of->bytes;
    available += of->holes.bytes;
  }
  if (held != heap->bytes_held) return "the pieces' bytes are not those held";
  if (held > heap->bytes_max) return "more is held than the budget";
  return held - available == heap->bytes_used ? NULL : "blocks and free ranges do not fill the pieces";
}

const char *qkv_gpu_heap_validate(qkv_gpu_heap *heap) {
  pthread_mutex_lock(&heap->lock);
  const char *wrong = validate(heap);
  pthread_mutex_unlock(&heap->lock);
  return wrong;
}
