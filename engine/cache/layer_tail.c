// Exact blocks that forks share. A block has 64 tokens' rows; what a layer has of its last one may be less. Its rows
// are written by the only layer that has it; others copy it first.
//
// Forks seal the same rows by the same coder, so the first one's page serves all.
#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_internal.h"

struct qkv_block_share {
  _Atomic uint32_t holders;  // layers
  pthread_mutex_t lock;      // of what follows
  const void *page;          // NULL: none has sealed it
  uint32_t bytes;
  qkvi_block_page of;
  _Atomic uint32_t *page_holders;
};

bool qkvi_block_is_shared(const qkv_tail_block *block) {
  return block->share != NULL && atomic_load_explicit(&block->share->holders, memory_order_acquire) > 1;
}

static void destroy_share(qkv_layer *layer, qkv_block_share *share) {
  (void)qkvi_image_leave(layer->config.arena, share->page, share->bytes, share->page_holders);
  (void)pthread_mutex_destroy(&share->lock);
  free(share);
}

void qkvi_block_leave(qkv_layer *layer, qkv_tail_block *block) {
  const qkv_tail_block left = *block;
  *block = (qkv_tail_block){0};
  if (left.share != NULL && atomic_fetch_sub_explicit(&left.share->holders, 1, memory_order_acq_rel) > 1) return;
  if (left.share != NULL) destroy_share(layer, left.share);
  qkv_arena_free(layer->config.arena, left.rows, qkvi_block_bytes(layer->config.model));
}

bool qkvi_block_own(qkv_layer *layer, qkv_tail_block *block) {
  if (block->share == NULL) return false;
  if (!qkvi_block_is_shared(block)) {
    destroy_share(layer, block->share);
    block->share = NULL;
    return false;
  }
  const size_t bytes = qkvi_block_bytes(layer->config.model);
  void *rows = qkv_arena_alloc(layer->config.arena, bytes);
  memcpy(rows, block->rows, bytes);
  qkvi_block_leave(layer, block);
  block->rows = rows;
  return true;
}

static void share_block(qkv_tail_block *block) {
  if (block->share == NULL) {
    block->share = calloc(1, sizeof *block->share);
    if (block->share == NULL) abort();
    atomic_init(&block->share->holders, 1);
    const int failed = pthread_mutex_init(&block->share->lock, NULL);
    assert(failed == 0);
    (void)failed;
  }
  atomic_fetch_add_explicit(&block->share->holders, 1, memory_order_relaxed);
}

void qkvi_layer_share_tail(qkv_layer *layer, const qkv_layer *parent) {
  assert(layer->tail_count == 0);
  free(layer->tail);
  layer->tail = calloc(parent->tail_count + 1, sizeof *layer->tail);
  if (layer->tail == NULL) abort();
  layer->tail_capacity = parent->tail_count + 1;
  for (size_t i = 0; i < parent->tail_count; i++) {
    share_block(&parent->tail[i]);
    layer->tail[layer->tail_count++] = parent->tail[i];
  }
}

const void *qkvi_block_sealed(qkv_tail_block *block, const qkvi_block_page *wanted, uint32_t *bytes,
                              _Atomic uint32_t **holders) {
  qkv_block_share *share = block->share;
  if (share == NULL) return NULL;
  const int failed = pthread_mutex_lock(&share->lock);
  assert(failed == 0);
  (void)failed;
  if (share->page == NULL || share->of.calibration != wanted->calibration || share->of.tokens != wanted->tokens)
    return NULL;
  qkvi_image_share(&share->page_holders);
  *bytes = share->bytes;
  *holders = share->page_holders;
  const void *page = share->page;
  (void)pthread_mutex_unlock(&share->lock);
  return page;
}

void qkvi_block_offer(qkv_tail_block *block, const qkvi_block_page *of, const void *page, uint32_t bytes,
                      _Atomic uint32_t **holders) {
  qkv_block_share *share = block->share;
  if (share == NULL) return;
  if (page != NULL && share->page == NULL && qkvi_block_is_shared(block)) {
    qkvi_image_share(holders);
    share->page = page;
    share->bytes = bytes;
    share->of = *of;
    share->page_holders = *holders;
  }
  (void)pthread_mutex_unlock(&share->lock);
}
