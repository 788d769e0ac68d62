// Spilling a layer's pages: their records (backing.h), eviction from memory and restoring.
//
//   locked for reading   qkv_layer_holds, qkv_layer_missing, qkv_layer_restore, qkv_layer_evict,
//                        qkvi_layer_drop_unseen
//   locked for writing   everything else; none of it takes long
//
// A page whose image has left memory is *cold*: it has a record and no image. Attention and decoding need what they
// read to be in memory; the caller checks that first, under the same lock.
//
// Threads: as the layer's.
#ifndef QKV_ENGINE_CACHE_LAYER_SPILL_H
#define QKV_ENGINE_CACHE_LAYER_SPILL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/layer.h"

// Puts the pages that have no record yet, in order, and the exact rows where the backing takes them. False where the
// backing has no headroom for all of them now.
bool qkv_layer_save(qkv_layer *layer);
// The same by the thread that has just appended rows of these token ids, which the session does not hold yet; NULL:
// not known.
bool qkv_layer_save_with(qkv_layer *layer, const qkv_row_ids *coming);
// Updates the state of the records: `durable` advances; pages whose record is gone will be put again.
void qkv_layer_settle(qkv_layer *layer);

// Whether all pages, and exact rows where the backing takes them, are durable.
bool qkv_layer_is_settled(const qkv_layer *layer);

// Evicts images of pages whose records are durable, those with the least attention (ema.h) first, of equals the
// oldest, until `bytes` of the arena are free or there are no more. These ranges stay: those that other layers share
// and have used after `unused_since_ms`, those that a session keeps, and those that another thread is reading, even
// in this layer. `*in_use` says whether there were any of the last kind. Returns the bytes that were freed: an image
// that others hold frees none.
uint64_t qkv_layer_evict(const qkv_layer *layer, uint64_t bytes, int64_t unused_since_ms, bool *in_use);

// Drops from memory pages that this layer does not see, of ranges that no other layer has: layers that are gone had
// them. Those that no trunk (trunk.h) has either are dropped as a whole. A range that another thread reads stays.
void qkvi_layer_drop_unseen(const qkv_layer *layer);

// The most bytes of the arena that an append of rows up to `end` takes.
uint64_t qkv_layer_append_cost(const qkv_layer *layer, uint64_t end);

// Whether every page with positions of [begin, end) is in memory.
bool qkv_layer_holds(const qkv_layer *layer, uint64_t begin, uint64_t end);

// A page to be read back.
typedef struct qkv_missing_page {
  size_t index;
  uint64_t serial;  // of the image that it has; 0: it is cold
  uint64_t record;
  uint64_t position;
  uint32_t bytes;  // of the record's image
} qkv_missing_page;

static inline bool qkv_page_is_cold(const qkv_missing_page *page) {
  return page->serial == 0;
}

// The pages of [begin, end), end 0: to the end, that are cold, or with `full` have lost planes that their record has;
// in order, at most `max`. Returns how many.
size_t qkv_layer_missing(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full, qkv_missing_page *out,
                         size_t max);

// Of the same pages the ranges that other layers have, too, at most `max`: to be compared, not dereferenced. Returns
// how many.
size_t qkv_layer_missing_shared(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full, const void **out,
                                size_t max);

// Bytes that all of these would take of the arena.
uint64_t qkv_layer_missing_bytes(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full);

// Checks that `*image` [page->bytes], from qkv_arena_alloc_overhead, is that of a missing page, and where the page is
// cold puts it in its place, for all layers that have the range, and sets `*image` to NULL. Where the page is not
// missing any more the image stays the caller's. The memory is taken from a reservation (arena.h; NULL: there is
// none) of the calling thread alone. DATA_LOSS where the image is not that page's; RESOURCE_EXHAUSTED (the arena's).
qkv_status qkv_layer_restore(const qkv_layer *layer, uint64_t *reservation, const qkv_missing_page *page,
                             void **image, qkv_error *error);
// The second step for a page that is in memory and has lost planes: it gets them back for this layer alone. `*image`
// [*bytes] gets what the caller has to free: the image as it was before, if anything.
qkv_status qkv_layer_restore_full(qkv_layer *layer, uint64_t *reservation, const qkv_missing_page *page, void **image,
                                  uint32_t *bytes, qkv_error *error);

// Adds a cold page at the end of a layer that has no exact rows: a page of a session that outlived its process.
void qkv_layer_adopt(qkv_layer *layer, const qkv_coder *coder, uint32_t tokens, uint64_t record, uint32_t bytes);
// All pages have been adopted: they are packed.
void qkv_layer_adopted(qkv_layer *layer);
// Before rows of the record are appended to the layer again: they need not be put. Records come in ascending order,
// without gaps; rows of the first one may be in pages. `shared`: other sessions have the record, too.
void qkv_layer_adopt_rows(qkv_layer *layer, uint64_t record, uint64_t begin, uint64_t end, bool shared);
// Shares the leading pages that `other`, the same layer of another session, has of the same records. Both are locked
// for writing, and nothing of either has been restored yet.
void qkv_layer_adopt_shared(qkv_layer *layer, qkv_layer *other);

#endif
