// A session's token ids: the ids that its rows were computed from, and its place in the index of prefixes.
//
// Ids come with appends, with whichever layer; they belong to positions, not to layers. They are held without a gap
// from position 0 on. Ids that would leave a gap are not kept, and no later ones are held or indexed, until a
// truncation lets an append continue where the ids end. So sessions whose first_position is not 0 hold none.
//
// Full pages of 64 ids are chunks, each with its chained hash (prefix_index.h) and a reference to the chunk before. A
// session refers to its last one, and forks share them: a fork copies the open page, 252 bytes at the most, whatever
// the length.
//
//   chunk 0 <── chunk 1 <── chunk 2 <── session A, open page of A
//                  └────── chunk 2' <── session B, open page of B
//
// Pages that come from the SSD have a hash and no ids: ids that are appended over them are not compared.
//
// Memory: a chunk is the arena's, 320 bytes (5 a token), 64 without ids; the open page lies in the session.
// Threads: any. Each object has a lock, which is taken before the index's and before no other.
#ifndef QKV_ENGINE_CACHE_SESSION_TOKENS_H
#define QKV_ENGINE_CACHE_SESSION_TOKENS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/status.h"
#include "engine/cache/prefix_index.h"

typedef struct qkvi_token_chunk qkvi_token_chunk;

typedef struct qkv_session_tokens_config {
  qkv_arena *arena;
  qkv_prefix_index *index;  // NULL: nothing is indexed
  qkv_prefix_hash root;
  uint32_t owner;  // of matches
} qkv_session_tokens_config;

typedef struct qkv_session_tokens {
  qkv_session_tokens_config config;
  pthread_mutex_t lock;
  qkv_prefix_holder holder;  // 0 until the first page is full
  bool closed;               // it gets no holder any more
  qkvi_token_chunk *last;    // of the full pages, one reference; NULL: there is none
  uint64_t length;           // positions that have ids, or a hash
  uint64_t cuts;             // truncations
  uint32_t *open;            // [QKV_PREFIX_PAGE] ids behind the full pages, length % 64 of them; NULL at first
} qkv_session_tokens;

void qkv_session_tokens_init(qkv_session_tokens *tokens, const qkv_session_tokens_config *config);
// Memory for the open page, [QKV_PREFIX_PAGE], which outlives the object: before anything is kept.
void qkv_session_tokens_give_open(qkv_session_tokens *tokens, uint32_t *open);
// Every thread but this one is done with it.
void qkv_session_tokens_deinit(qkv_session_tokens *tokens);
// Removes it from the index for good. From here on no match returns its owner.
void qkv_session_tokens_close(qkv_session_tokens *tokens);

// ---- Appends ----

// Whether `ids` from `position` on equal those held, as far as ids are held. ALREADY_EXISTS "position 70 has token id
// 5, token_ids[6] is 9".
qkv_status qkv_session_tokens_check(qkv_session_tokens *tokens, uint64_t position, const uint32_t *ids, size_t count,
                                    qkv_error *error);
// Bytes of the arena that keeping `count` ids from `position` on takes.
uint64_t qkv_session_tokens_cost(qkv_session_tokens *tokens, uint64_t position, size_t count);
// How many truncations there were: an append asks before it adds rows.
uint64_t qkv_session_tokens_cuts(qkv_session_tokens *tokens);
// Keeps those that continue what is held, and indexes the pages that become full. They were checked; where another
// thread has appended other ids meanwhile, none of them is kept, nor where there were more truncations than `cuts`,
// which may have taken the rows. `*reserved` bytes of the arena are reserved; it gets less by what is taken. Ids that
// it does not suffice for are not kept.
void qkv_session_tokens_keep(qkv_session_tokens *tokens, uint64_t cuts, uint64_t position, const uint32_t *ids,
                             size_t count, uint64_t *reserved);
// Positions from `position` on are dropped. Where that cuts a page whose ids are not known, its beginning, too.
// Called before rows are cut, so that no ids are without rows, and again afterwards, for those of appends in between.
void qkv_session_tokens_truncate(qkv_session_tokens *tokens, uint64_t position);

// ---- Forks, and sessions found again ----

// `fork`, which is empty, gets what `of` has below `position`; O(pages that `of` has above), and where `of` has been
// closed, so that the index does not have it any more, O(pages). Their arena, index and
// root are the same (asserted). From here on a match may give the fork's owner, until the fork is closed: its owner
// is closed before its last reference goes.
void qkv_session_tokens_fork(qkv_session_tokens *of, uint64_t position, qkv_session_tokens *fork);
// Adds the next page, of which only the hash is known. FAILED_PRECONDITION where the open page is not empty;
// RESOURCE_EXHAUSTED (the arena's).
qkv_status qkv_session_tokens_recover(qkv_session_tokens *tokens, const qkv_prefix_hash *hash, qkv_error *error);

// ---- Folding (session_fold.h has the layout) ----

// The last full page that others have, too, borrowed; `*pages` gets its number and 1. NULL, 0: there is none. Pages
// up to it can be kept by a reference, and become those of an object that has none.
qkvi_token_chunk *qkv_session_tokens_shared(qkv_session_tokens *tokens, uint64_t *pages);
qkvi_token_chunk *qkvi_token_chunk_ref(qkvi_token_chunk *chunk);         // NULL: nothing
void qkvi_token_chunk_unref(qkv_arena *arena, qkvi_token_chunk *chunk);  // likewise
void qkv_session_tokens_adopt(qkv_session_tokens *tokens, qkvi_token_chunk *chunk, uint64_t pages);
// Of the pages from number `first` on: bytes that `pack` writes; bytes of the arena that chunks take. The latter of
// so many positions with ids.
uint64_t qkv_session_tokens_packed_bytes(qkv_session_tokens *tokens, uint64_t first);
uint64_t qkv_session_tokens_held_cost(qkv_session_tokens *tokens, uint64_t first);
uint64_t qkv_session_tokens_cost_most(uint64_t length);
// Writes these pages and the ids behind them; returns the end.
uint8_t *qkv_session_tokens_pack(qkv_session_tokens *tokens, uint64_t first, uint8_t *out);
// A place in the index for an object that has none; closed: it gets none any more.
void qkv_session_tokens_attach(qkv_session_tokens *tokens, qkv_prefix_holder holder, bool closed);
// The hashes of the first `max` pages that are indexed. Returns how many.
size_t qkv_session_tokens_indexed(qkv_session_tokens *tokens, qkv_prefix_hash *hashes, size_t max);
// Whether these bytes are those of so many positions.
bool qkv_session_tokens_are_packed(const uint8_t *bytes, uint64_t count, uint64_t length);
// Takes them back behind the full pages of an object that has no other ids, and has an open page's memory. What they
// cost has been reserved.
void qkv_session_tokens_unpack(qkv_session_tokens *tokens, const uint8_t *bytes, uint64_t length);

// ---- Looking ----

// Positions from 0 on that have ids or a hash.
uint64_t qkv_session_tokens_length(qkv_session_tokens *tokens);
// Ids from `position` on, as far as they are known, `max` at most, to `out`. Returns how many. O(pages behind them).
size_t qkv_session_tokens_read(qkv_session_tokens *tokens, uint64_t position, uint32_t *out, size_t max);
// The chained hash of page number `page`, from 0 on. False where that is not full. O(pages behind it).
bool qkv_session_tokens_hash(qkv_session_tokens *tokens, uint64_t page, qkv_prefix_hash *hash);
// The chained hashes of the first `max` full pages. Returns how many there are. O(pages).
size_t qkv_session_tokens_hashes(qkv_session_tokens *tokens, qkv_prefix_hash *hashes, size_t max);
// Up to `max` full pages from number `first` on, as far as their ids are known: `ids` gets 64 each, `hashes` [max +
// 1] the hash before them and theirs. Returns how many; 0: `hashes` may be left as it is. O(pages behind them).
size_t qkv_session_tokens_read_pages(qkv_session_tokens *tokens, uint64_t first, size_t max, qkv_prefix_hash *hashes,
                                     uint32_t *ids);
// As qkv_session_tokens_read_pages, from packed bytes that qkv_session_tokens_are_packed has accepted, of `length`
// positions; their first page has the number `from`.
size_t qkv_session_tokens_read_packed(const uint8_t *bytes, uint64_t length, uint64_t from, uint64_t first,
                                      size_t max, qkv_prefix_hash *hashes, uint32_t *ids);
// The chained hashes of the full pages from the one that `position` lies in on, as they are once `count` ids from
// `position` on are kept, to `hashes` of qkv_session_tokens_pages(position, count). Returns how many; 0 where the ids
// do not continue what is held. The ids were checked.
size_t qkv_session_tokens_chain(qkv_session_tokens *tokens, uint64_t position, const uint32_t *ids, size_t count,
                                qkv_prefix_hash *hashes);
static inline size_t qkv_session_tokens_pages(uint64_t position, size_t count) {
  return (size_t)((position + count) / QKV_PREFIX_PAGE - position / QKV_PREFIX_PAGE);
}

#endif
