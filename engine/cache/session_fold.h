// Folding: a session of which nothing is in memory gives up its layers, and the tier keeps what they are made of.
//
// A session is folded while it is not in use: all of its rows are in durable pages on the tier, what of them is in
// memory is there for other sessions, too, and it has no quality contract. Its layers, with their tables of pages and
// averages of attention, its token ids and the rest of its working state (session_state.h) are freed; what is needed
// to make them again is one record of the tier (backing.h). The session itself stays in the store: its name and some
// 100 bytes, which have its place in the index of prefixes and in the order of use, and what its info is read from.
// What it shares with other sessions, leading pages of each layer and of token ids, is kept by a trunk (trunk.h) and
// is not in the record. The first use that needs a layer or a token id makes the rest again, with averages of
// attention that begin at 0, and drops the record. The record counts in this process alone: the next one finds the
// session by its pages.
//
//   record, little-endian; the tier has its checksum
//   header, 40 bytes   0  8  magic "QKVFOLD\0"
//                      8  4  version (1)
//                     12  4  layers
//                     16  8  length: the next position of every layer
//                     24  8  positions that have a token id or a hash, with those of the trunk
//                     32  8  bytes of the record
//   each layer, 40     0  8  positions below are another session's, too, by fork
//                      8 24  errors that were measured (page_watch.h), three doubles
//                     32  4  pages behind those of the trunk
//                     36  4  0
//   each page, 24,     0  8  number of its record
//   by layers,         8  4  bytes of its image
//   behind the trunk  12  4  version of its calibration; 0: data-free
//                     16  4  valid tokens
//                     20  4  bit 0: the record has lost planes; bit 1: taken from another session (session_share.h)
//   each full page     0 16  chained hash
//   of token ids      16  8  1: its ids follow; 0: they are not known
//   behind the trunk  24 256 ids
//   the open page      0  4  each id
//
// Threads: any. Reading the record waits for the tier, with the session's lock of making layers.
#ifndef QKV_ENGINE_CACHE_SESSION_FOLD_H
#define QKV_ENGINE_CACHE_SESSION_FOLD_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/cache/session.h"

// Whether the next use that needs its layers reads the tier.
bool qkv_session_is_folded(const qkv_session *session);
// Bytes of the arena that making its layers again takes at the most; 0: it is not folded.
uint64_t qkv_session_unfold_cost(const qkv_session *session);
// Makes them, within a reservation (arena.h) or NULL. Nothing where it is not folded. DATA_LOSS: the record is
// damaged (the next start finds the session by its pages); NOT_FOUND: the session has been closed; RESOURCE_EXHAUSTED
// (the arena's).
qkv_status qkv_session_unfold(qkv_session *session, uint64_t *headroom, qkv_error *error);
// Whether it may be tried to fold it: nothing is in memory for it alone as last published, and its backing takes such
// records.
bool qkv_session_may_fold(const qkv_session *session);

// The position up to which other sessions have the pages of all layers of a folded session in memory.
uint64_t qkv_session_folded_held(const qkv_session *session);
// The hashes of the first `max` pages of token ids that the session is matched by, without making its layers. Returns
// how many.
size_t qkv_session_indexed_hashes(qkv_session *session, qkv_prefix_hash *hashes, size_t max);
// Up to `max` of the session's full pages of token ids from number `first` on, as qkv_session_tokens_read_pages. Of a
// session that is folded they are read from the tier, without making its layers; 0 where they cannot be read.
size_t qkv_session_read_pages(qkv_session *session, uint64_t first, size_t max, qkv_prefix_hash *hashes,
                              uint32_t *ids);

// When it was last used, or tried to be folded in vain, on the monotonic clock; the latter is noted.
int64_t qkv_session_sunk_since_ms(const qkv_session *session);
void qkv_session_fold_later(qkv_session *session, int64_t now_ms);

// For the store, which has locked all that gives references to sessions. `begin` takes the working state out of the
// session where there are `references` to it and no other thread makes its layers; false: not now. `end`, after these
// locks, writes the record, waits until it can be read, and frees the working state; false, with the session as it
// was, where something of it cannot be folded, the tier does not take the record, or a thread needs the session
// meanwhile.
typedef struct session_working session_working;
bool qkvi_session_fold_begin(qkv_session *session, uint32_t references, session_working **working);
bool qkvi_session_fold_end(qkv_session *session, session_working *working);

#endif
