// Pages that appends take from other sessions. An append that brings token ids looks for a session that holds the
// same ids from position 0 on and is coded alike; where that session has a page at the positions of one that is to be
// sealed, the layer takes its image as one holder more (page_range.h) and codes nothing.
//
//   holder   [ page 0 ][ page 1 ][ page 2 ][ page 3 ]
//                           ▲         ▲
//   layer    [ page 0 ][ image 1 ][ image 2 ][ tail ]        its own range, its own records
//
// The rows that came with the ids are not compared with the page. A page is taken where it is in memory, at the bits
// that it was coded with, under the same calibration. Sessions with a quality contract and layers that keep exact
// rows take none.
//
// Threads: with the lock of the layer's rows. The other session's layer is read only where that needs no waiting, so
// two sessions may take from each other without a deadlock.
#ifndef QKV_ENGINE_CACHE_SESSION_SHARE_H
#define QKV_ENGINE_CACHE_SESSION_SHARE_H

#include "engine/cache/session.h"

typedef struct qkvi_page_offers qkvi_page_offers;

// For rows of `count` ids from `position` on, which have been checked. Each offer is one holder of its image, so it
// stays in memory until the offers are freed. NULL where there is none, and for fewer ids than a page. O(pages).
qkvi_page_offers *qkvi_session_offers(qkv_session *session, const qkv_layer *layer, uint64_t position,
                                      const uint32_t *ids, size_t count);
// Frees what was not taken, and returns how many pages were. NULL: 0.
uint64_t qkvi_page_offers_free(qkvi_page_offers **offers, qkv_arena *arena);

// The page at `position`, coded under `calibration`, for an entry: image, bytes and holders. False where it is not
// offered; `offers` may be NULL.
bool qkvi_page_take(qkvi_page_offers *offers, uint64_t position, uint32_t calibration, qkv_page_entry *entry);

#endif
