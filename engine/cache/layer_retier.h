// Changing the tiers of a layer's pages: the snapshot that the policy (retier.h) decides on, and the exchange of
// images.
//
//   locked for reading   qkv_layer_snapshot; qkv_layer_cut builds images next to those in use
//   locked for writing   qkv_layer_exchange swaps pointers, which takes no time
//   not locked           qkv_retier_decide; qkv_cut_deinit frees the replaced image
//
// Down: planes are dropped, the bits that stay are unchanged, the bytes of the dropped ones are free at once. Without
// keep_full dropped planes are lost. With it the page as it was first coded is kept, too, so nothing is freed; up
// goes to it, or to anything below it, bit for bit.
//
// A cut names the image it was made from, and is void once that has been exchanged or truncated away.
//
// Threads: as the layer's.
#ifndef QKV_ENGINE_CACHE_LAYER_RETIER_H
#define QKV_ENGINE_CACHE_LAYER_RETIER_H

#include "engine/cache/layer.h"
#include "engine/cache/retier.h"

// All pages that hold positions of [begin, end); end 0: to the end.
void qkv_layer_snapshot(const qkv_layer *layer, uint64_t begin, uint64_t end, bool leave_shared,
                        qkv_retier_snapshot *snapshot);

// The tiers that a page has, and the most that is held of it: heads [kv_heads].
void qkv_layer_tiers(const qkv_layer *layer, const qkv_page_entry *entry, qkv_head_tiers *now, qkv_head_tiers *most);

// Whether any page in memory that holds positions of [begin, end) has fewer planes than it was coded with.
bool qkv_layer_lowered(const qkv_layer *layer, uint64_t begin, uint64_t end);

// An image that is to take a page's place.
typedef struct qkv_cut {
  size_t index;  // of the page
  uint64_t serial;
  qkv_arena *arena;  // the layer's
  void *image;       // outside of the budget; NULL: the full page comes back. After the exchange: the replaced one
  uint32_t bytes;    // of the image
  bool exchanged;    // by qkv_layer_exchange
} qkv_cut;

// True where the page `index` still has the image `serial` and its tiers differ from `tiers` [kv_heads], as far as
// those are held; then fills `cut`.
bool qkv_layer_cut(const qkv_layer *layer, size_t index, uint64_t serial, const qkv_head_tiers *tiers, qkv_cut *cut);
// Whether the page `index` has planes whose record is still on its way to the backing: dropped now, they would be
// lost.
bool qkv_layer_cut_early(const qkv_layer *layer, size_t index, uint64_t serial);
// Does nothing where the layer does not have the page any more. RESOURCE_EXHAUSTED where the page would grow (up, or
// down with keep_full) and does not fit in the arena.
qkv_status qkv_layer_exchange(qkv_layer *layer, qkv_cut *cut, qkv_error *error);
void qkv_cut_deinit(qkv_cut *cut);

#endif
