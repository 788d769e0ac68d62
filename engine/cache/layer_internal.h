// What layer.c, layer_append.c and layer_retier.c share: the layout of the tail, the memory of pages outside of their
// images.
#ifndef QKV_ENGINE_CACHE_LAYER_INTERNAL_H
#define QKV_ENGINE_CACHE_LAYER_INTERNAL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/yield.h"
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

// Bytes of the arena for a page's averages: all that it has outside of its image.
static inline size_t qkvi_ema_cost(const qkv_layer *layer) {
  return layer->clock == NULL ? 0 : qkv_arena_cost(qkv_ema_bytes(layer->config.model->kv_heads));
}

// The range as the layer's own, as far as the layer sees it: copied where other layers have it, too. The layer is
// locked for writing.
qkv_page_range *qkvi_layer_own_range(qkv_layer *layer, size_t range);
// Whether the layer keeps the pages of a range, and of all that it has now, in memory (page_range.h). One thread at a
// time.
void qkvi_layer_keep_range(qkv_range_slot *slot, bool keep);
void qkvi_layer_keep(const qkv_layer *layer, bool keep);
// A range whose pages are not counted (asserted) becomes two, of which the first has so many pages, fewer than all;
// unless it is shared or the layer has too many.
void qkvi_layer_split_range(qkv_layer *layer, size_t range, size_t pages);
// The ranges from `range` on, whose pages are cold and not counted, are replaced by those of `other` from the same
// place on, of which so many pages are seen. The layer is locked for writing.
void qkvi_layer_replace_ranges(qkv_layer *layer, size_t range, const qkv_layer *other, size_t pages);
// Behind the pages of a layer that is pinned and has no exact rows: the first pages of a range that a trunk (trunk.h)
// has, which are durable.
void qkvi_layer_adopt_range(qkv_layer *layer, qkv_page_range *range, size_t pages);
// A page at the end, in the last range or in a new one.
void qkvi_layer_add_page(qkv_layer *layer, const qkv_page_entry *entry);
qkv_record_state qkvi_layer_record_state(const qkv_layer *layer, const qkv_page_entry *entry);

// A page's averages, in a block of qkv_ema_bytes from the arena. Returns them, or those that another thread has put
// there meanwhile, and then the block is freed.
qkv_ema *qkvi_layer_put_ema(const qkv_layer *layer, size_t index, void *block);
// The page's averages, which are allocated where there are none yet; NULL where attention is not counted or memory is
// full.
qkv_ema *qkvi_layer_need_ema(const qkv_layer *layer, size_t index);

// While a layer is pinned, nothing that it sees leaves memory. `used_ms`: page_range.h.
void qkvi_layer_pin(const qkv_layer *layer, int64_t used_ms);
void qkvi_layer_unpin(const qkv_layer *layer);

// Exact blocks that layers share (layer_tail.c). All of a layer's blocks in another one that has none.
void qkvi_layer_share_tail(qkv_layer *layer, const qkv_layer *parent);
bool qkvi_block_is_shared(const qkv_tail_block *block);
// Before rows are written: a block of the layer's own, with the same rows. A shared one is copied into the arena's
// memory, which has been reserved, and true is returned.
bool qkvi_block_own(qkv_layer *layer, qkv_tail_block *block);
// The layer releases the block; the last layer to do so frees it.
void qkvi_block_leave(qkv_layer *layer, qkv_tail_block *block);
// What a shared block's page depends on.
typedef struct qkvi_block_page {
  uint32_t calibration;
  uint32_t tokens;  // the first ones of the block
} qkvi_block_page;
// The image that a shared block was coded to in another layer, with one holder more. NULL: none that is wanted yet,
// and the caller codes the block and offers the image, which gets one holder more for later callers; it offers NULL
// where it could not. Between the two calls other threads that ask for it wait. A block of one layer alone: NULL, and
// the offer changes nothing.
const void *qkvi_block_sealed(qkv_tail_block *block, const qkvi_block_page *wanted, uint32_t *bytes,
                              _Atomic uint32_t **holders);
void qkvi_block_offer(qkv_tail_block *block, const qkvi_block_page *of, const void *page, uint32_t bytes,
                      _Atomic uint32_t **holders);

// Records of exact rows (layer_rows.c), for a backing that takes them. `save` puts rows that have no record, up to
// the layer's end; false where the backing has no headroom for all of them now. `settle` updates the state of the
// records: those that are gone are forgotten, so that their rows are put again, and those whose rows are in durable
// pages are dropped. With the layer locked for writing.
bool qkvi_layer_takes_rows(const qkv_layer *layer);
bool qkvi_layer_rows_save(qkv_layer *layer, const qkv_row_ids *coming);
void qkvi_layer_rows_settle(qkv_layer *layer);
// Whether all exact rows have durable records, or the backing takes none. With the layer locked for reading.
bool qkvi_layer_rows_are_settled(const qkv_layer *layer);
// The position that durable pages reach.
uint64_t qkvi_layer_pages_durable(const qkv_layer *layer);
// The position that durable records of rows reach from `begin` on; `begin` where none covers it.
uint64_t qkvi_layer_rows_durable(const qkv_layer *layer, uint64_t begin);
// The layer gives up its records at and beyond `position`.
void qkvi_layer_rows_cut(qkv_layer *layer, uint64_t position);
// The records of the parent for a fork of it, before that is cut.
void qkvi_layer_rows_fork(qkv_layer *layer, const qkv_layer *parent);

// Sealing (layer_seal.c): scratch memory for the rows and the image of one page at a time, and the most bytes of the
// arena that a page takes.
typedef struct qkvi_seal_scratch {
  void *rows;                      // a block that is not the layer's; NULL until it is needed
  float *k, *v;                    // one page's rows
  void *image;                     // a page of any size
  void *narrow;                    // the same with planes dropped, where tiers are selected (quality.h)
  size_t image_bytes;              // of the images: what is reserved for each page
  qkv_page_watch watch;            // the layer's, with these pages
  const qkv_row_encoder *encoder;  // of the next page's rows; NULL: the CPU alone has them
  uint64_t token, following;       // qkv_row_page, for it
} qkvi_seal_scratch;

uint64_t qkvi_seal_cost(const qkv_layer *layer);
void qkvi_seal_begin(const qkv_layer *layer, qkvi_seal_scratch *scratch);
void qkvi_seal_end(qkvi_seal_scratch *scratch);  // of one that was zeroed, too
// Codes 64 rows as the page at `position`; qkvi_seal_cost was reserved. The layer may be read meanwhile. With a
// contract `position` is where its pages end, and it holds the rows.
void qkvi_seal_page(const qkv_layer *layer, qkvi_seal_scratch *scratch, uint64_t position, qkv_tail_block *block,
                    qkv_page_entry *entry);
// Whether an append of these rows, which need not be valid, seals pages. With the lock of the layer's rows.
bool qkvi_layer_would_seal(const qkv_layer *layer, uint64_t position, const qkv_tensor *k);
// The page becomes the layer's, which is locked for writing. Its rows stay in the tail, for the caller to remove.
void qkvi_seal_put(qkv_layer *layer, const qkvi_seal_scratch *scratch, const qkv_page_entry *entry);

// Between the two calls the thread that changes the layer's rows has it locked for writing, or reading
// (qkv_layer_access). `last`: nothing follows.
static inline void qkvi_layer_enter(const qkv_layer *layer) {
  if (layer->access != NULL) layer->access->enter(layer->access);
}
static inline void qkvi_layer_leave(const qkv_layer *layer, bool last) {
  if (layer->access != NULL) layer->access->leave(layer->access, last);
}
static inline void qkvi_layer_look(const qkv_layer *layer) {
  if (layer->access != NULL) layer->access->look(layer->access);
}
static inline void qkvi_layer_looked(const qkv_layer *layer) {
  if (layer->access != NULL) layer->access->looked(layer->access);
}

// As qkv_yield_now, by the thread that has the layer locked; not while another thread, perhaps attention itself,
// waits for it.
static inline void qkvi_layer_yield(const qkv_layer *layer) {
  if (layer->waiting == NULL || atomic_load_explicit(layer->waiting, memory_order_relaxed) == 0) qkv_yield_now();
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
