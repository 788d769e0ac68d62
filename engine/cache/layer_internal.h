// What layer.c, layer_append.c and layer_retier.c share: where things lie in the tail, what pages take beside them.
#ifndef QKV_ENGINE_CACHE_LAYER_INTERNAL_H
#define QKV_ENGINE_CACHE_LAYER_INTERNAL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/precedence.h"
#include "engine/cache/layer.h"

// Bytes of the exact rows of one token, all KV heads, K and V.
static inline size_t qkvi_token_bytes(const qkv_model *model) {
  return (size_t)model->kv_heads * (model->key_dim + model->value_dim) * qkv_dtype_size(model->dtype);
}

// Bytes of an exact block.
static inline size_t qkvi_block_bytes(const qkv_model *model) {
  return QKV_PAGE_TOKENS * qkvi_token_bytes(model);
}

// Blocks that hold so many tokens.
static inline uint64_t qkvi_blocks(uint64_t tokens) {
  return (tokens + QKV_PAGE_TOKENS - 1) / QKV_PAGE_TOKENS;
}

static inline uint32_t qkvi_part_dim(const qkv_model *model, qkv_part part) {
  return part == QKV_K ? model->key_dim : model->value_dim;
}

// What the arena counts for a page's averages, and for all that it has beside its image.
static inline size_t qkvi_ema_cost(const qkv_layer *layer) {
  return layer->clock == NULL ? 0 : qkv_arena_cost(qkv_ema_bytes(layer->config.model->kv_heads));
}

static inline size_t qkvi_beside_bytes(const qkv_layer *layer, const qkv_page_entry *entry) {
  return qkvi_ema_cost(layer) + (entry->full == NULL ? 0 : qkv_arena_cost(entry->full_bytes));
}

// For pages that are added: room for so many, the range of the next one by layer->coder, its averages.
void qkvi_layer_grow_pages(qkv_layer *layer, size_t count);
uint32_t qkvi_layer_next_range(const qkv_layer *layer);
qkv_ema *qkvi_layer_new_ema(const qkv_layer *layer);
qkv_record_state qkvi_layer_record_state(const qkv_layer *layer, const qkv_page_entry *entry);

// Sealing (layer_seal.c): room for the rows and the image of one page at a time, and what a page may take of the
// arena.
typedef struct qkvi_seal_room {
  float *k, *v;        // one page's rows
  void *image;         // a page of any size
  void *narrow;        // the same, where pages are judged
  size_t image_bytes;  // of that room: what is reserved for each page
} qkvi_seal_room;

uint64_t qkvi_seal_cost(const qkv_layer *layer);
void qkvi_seal_begin(const qkv_layer *layer, qkvi_seal_room *room);
void qkvi_seal_end(qkvi_seal_room *room);  // of one that was zeroed, too
// The tail's first block becomes a page; qkvi_seal_cost was reserved, the array has room. The block stays, for the
// caller to take off the tail.
void qkvi_seal_page(qkv_layer *layer, qkvi_seal_room *room);

// As qkv_precedence_give_way, by whoever has the layer; not while someone waits for it, perhaps attention itself.
static inline void qkvi_layer_give_way(const qkv_layer *layer) {
  if (layer->waiting == NULL || atomic_load_explicit(layer->waiting, memory_order_relaxed) == 0)
    qkv_precedence_give_way();
}

// Where a token's row of a head lies in an exact block.
static inline uint8_t *qkvi_block_row(const qkv_model *model, void *block, qkv_part part, uint64_t token,
                                      uint32_t kv_head) {
  size_t element = qkv_dtype_size(model->dtype);
  size_t values = part == QKV_K ? 0 : QKV_PAGE_TOKENS * (size_t)model->kv_heads * model->key_dim;
  size_t row = (size_t)token * model->kv_heads + kv_head;
  return (uint8_t *)block + (values + row * qkvi_part_dim(model, part)) * element;
}

#endif
