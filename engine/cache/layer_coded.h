// A layer's pages as images: read whole, and appended whole.
//
// Pages that are read were validated when they were made or read from the backing. Pages that are appended come from
// outside; the caller has validated them with the page's coder. Their place in the layer is checked here.
//
// Threads: as the layer's.
#ifndef QKV_ENGINE_CACHE_LAYER_CODED_H
#define QKV_ENGINE_CACHE_LAYER_CODED_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cache/layer.h"

typedef struct qkv_coded_page {
  const void *image;  // 64-byte aligned, borrowed
  uint32_t bytes;     // of the image
  uint32_t tokens;    // valid ones, the first of the page
  uint64_t position;  // of its first token
  const qkv_coder *coder;
} qkv_coded_page;

// The pages of [begin, end) that are in memory, from that of `begin` on and without gaps, as many as have `bytes_max`
// together, but at least one; at most `max`. Returns how many; 0 where `begin` is in no page or in a cold one. The
// images are the layer's and stay as long as it is read.
size_t qkv_layer_coded_pages(const qkv_layer *layer, uint64_t begin, uint64_t end, uint64_t bytes_max,
                             qkv_coded_page *out, size_t max);

// Appends copies of the pages, which follow each other. `position` of the first is at most the layer's length, whose
// rows are all sealed (a page never follows exact rows). Each image has passed its coder's validate, and its coder is
// of this layer (asserted). Pages that are held already are compared with the image that is held, or that is kept in
// full. `*appended` gets the tokens that are new.
// Errors, all without any change: INVALID_ARGUMENT ("pages[1].position is 128, expected 100"), FAILED_PRECONDITION
// (a gap, exact rows, the session's first position), ALREADY_EXISTS, RESOURCE_EXHAUSTED (the arena's), UNAVAILABLE (a
// page to compare with is cold).
qkv_status qkv_layer_append_pages(qkv_layer *layer, const qkv_coded_page *pages, size_t count, uint64_t *appended,
                                  qkv_error *error);

#endif
