// Pages into a session: what a client or another daemon has coded.
//
// Threads: any that may wait for a layer.
#ifndef QKV_ENGINE_CACHE_SESSION_CODED_H
#define QKV_ENGINE_CACHE_SESSION_CODED_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cache/layer_coded.h"
#include "engine/cache/session.h"

typedef struct qkv_incoming_page {
  const void *image;  // 64-byte aligned; private to the caller, so nothing changes it meanwhile; may be anything
  size_t bytes;
  uint32_t tokens;                     // valid ones, the first of the page
  const qkv_calibration *calibration;  // that it is coded with, borrowed; NULL: it is data-free
} qkv_incoming_page;

// As qkv_layer_append_pages, after each image has been validated with the coder that the session's model, policy and
// purpose and the page's calibration make; with the reservation, the ids and `at_once` of `use`. The first page
// begins at `position`, and `count` is at least 1 (asserted). Pages that are new are given to the backing.
// INVALID_ARGUMENT "pages[2].image is refused: page.frame is 2, expected 1"; FAILED_PRECONDITION where the layer
// keeps exact rows; and what qkv_layer_append_pages says. `*length` gets the layer's length afterwards, 0 where there
// is no such layer. The ids are of all tokens of the pages, to be kept afterwards (session_tokens.h), so that the
// backing has their hashes.
qkv_status qkv_session_append_pages(qkv_session *session, uint32_t layer, const qkv_append_use *use,
                                    uint64_t position, const qkv_incoming_page *pages, size_t count,
                                    uint64_t *appended, uint64_t *length, qkv_error *error);

// The most bytes of the arena that this takes. The layer is below the model's (asserted).
uint64_t qkv_session_pages_cost(qkv_session *session, uint32_t layer, const qkv_incoming_page *pages, size_t count);

#endif
