// A range: up to QKV_RANGE_PAGES coded pages in order, all of one coder. It is the unit that layers share and that
// attention is split by.
//
//   layer of A   [ range 0 ][ range 1 ][ range 2 ]
//                    │          │          └── A's own
//   layer of B   [ range 0 ][ range 1 ][ 2 ][ range 3' ]   B was forked from A within range 2 and has appended since
//
// A layer may see fewer pages of a range than it has. What a layer appends behind a range that others have, too,
// begins a range of its own, so that the one before stays shared.
//
// A layer that has a range alone changes it under its own lock. A range that several layers have is changed in these
// ways only:
//
//   a page leaves memory        by one thread for all layers, once it has seized the range, under `lock`
//   a cold page comes back      by one thread for all layers, under `lock`, while others read the range
//   anything else               copy on write: qkvi_range_copy
//
// Trunks (trunk.h) count as layers that only keep the range as it is. The first two need a layer locked for reading;
// so neither waits for readers. A thread that reads a range has it pinned, and a range that two threads have pinned
// is not seized. A thread that is to keep the range's pages in memory becomes one of its `keepers` while it has it
// pinned, and an eviction reads their number once it has seized the range: so what the thread finds, or restores,
// afterwards stays.
//
// A copy shares the images of its pages with the original; each image has a count of the ranges that hold it.
//
// A range of which nothing is in memory is packed: 12 bytes a page instead of an entry.
//
//   packed     record_high | lower half of the record's number, bytes, tokens and flags, 12 bytes for each page |
//              upper halves, 4 bytes for each page, where they differ
//
// Threads: a layer pins its ranges while it is locked, for reading or for writing. Nothing that is pinned leaves
// memory or is packed. `lock` is a leaf: nothing is waited for while it is held.
#ifndef QKV_ENGINE_CACHE_PAGE_RANGE_H
#define QKV_ENGINE_CACHE_PAGE_RANGE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/cache/accounts.h"
#include "engine/cache/device.h"
#include "engine/codec/codec.h"

#define QKV_RANGE_PAGES 64  // 4096 tokens
// Bytes of memory of a page of a packed range, with its share of a full range: the test cold_pages_take_16_bytes.
#define QKV_COLD_PAGE_BYTES 16

typedef struct qkv_page_entry {
  _Atomic(const void *) page;      // image; NULL: cold, there is only the record
  _Atomic uint32_t *page_holders;  // ranges that hold the image; NULL: this one alone
  const qkv_coder *coder;          // what it is coded by
  uint32_t bytes;                  // of the image, or, where that is cold, of the record's
  uint32_t tokens;                 // valid ones
  uint64_t position;               // of its first token
  bool lost;                       // planes have been dropped and not kept in memory
  bool record_lost;                // nor has the record got them
  bool taken;                      // another session's (session_share.h): not compared with rows that come again
  uint32_t full_bytes;             // of the next
  const void *full;                // the page as it was coded; NULL: `page` is the most that is held
  _Atomic uint32_t *full_holders;
  uint32_t record_bytes;  // of the page as the backing has it
  uint64_t record;        // its number there; 0: it has none
  uint64_t serial;        // of the image: another one, another number, in the life of the process; 0: it is cold
} qkv_page_entry;

// Trunks that have equally many of a range's first pages.
typedef struct qkvi_trunk_reach {
  struct qkvi_trunk_reach *next;  // that have fewer
  uint32_t pages, trunks;
} qkvi_trunk_reach;

typedef struct qkv_page_range {
  _Atomic(qkv_device *) device;  // that has been asked for copies of its pages (device.h); NULL: none
  _Atomic uint32_t layers;       // that have it, trunks (trunk.h) among them
  _Atomic int32_t pins;          // of locked layers; below 0: seized
  _Atomic int64_t used_ms;       // last use by a session, where it is shared
  _Atomic uint32_t keepers;      // layers of pinned sessions: its pages stay in memory, whatever others do
  _Atomic uint32_t trunks;       // of `layers`; written under `lock`
  _Atomic bool was_shared;       // records may be needed by other sessions: the backing knows by which (backing.h)
  uint8_t count, capacity;       // pages, at most QKV_RANGE_PAGES
  _Atomic uint32_t tokens_cold;  // of all pages
  pthread_mutex_t lock;
  qkvi_trunk_reach *reaches;         // of its trunks, under `lock`, the farthest first; NULL: there is no trunk
  qkv_account *account;              // that the records' bytes are counted in; NULL: none
  uint64_t begin;                    // position of its first page
  const qkv_coder *coder;            // of all its pages; NULL before the first
  _Atomic(qkv_page_entry *) pages;   // NULL: there are none, or they are packed
  struct qkvi_packed_pages *packed;  // NULL: they are not; else under `lock`, as it is unpacked for all
  // Sums over all pages, images as the arena counts them.
  _Atomic uint64_t bytes_coded, bytes_full, bytes_stored;
} qkv_page_range;

// Empty, of one layer, and pinned once. The account outlives it.
qkv_page_range *qkvi_range_create(qkv_account *account);
// Pages [first, end) in a range of one layer, pinned once; the images are shared. The caller has pinned `range`.
qkv_page_range *qkvi_range_copy(qkv_page_range *range, uint32_t first, uint32_t end);
// One layer more has it, by who reads a layer that does.
qkv_page_range *qkvi_range_share(qkv_page_range *range);
// One layer less; the last one frees what it holds. Where only trunks are left, nothing stays in memory but records
// of pages that they have.
void qkvi_range_leave(qkv_page_range **range, qkv_arena *arena);

// A trunk has its first `pages`, which are durable, from here on, by who has it in a layer; returns the bytes of
// their records. And one trunk less, that had as many, as above.
uint64_t qkvi_range_join_trunk(qkv_page_range *range, uint32_t pages);
void qkvi_range_leave_trunk(qkv_page_range **range, uint32_t pages, qkv_arena *arena);
// The most that a trunk has of them, under the lock; 0: there is no trunk.
static inline uint32_t qkvi_range_trunk_pages(const qkv_page_range *range) {
  return range->reaches == NULL ? 0 : range->reaches->pages;
}
// One layer more, by who refers to a trunk that has the range.
qkv_page_range *qkvi_range_share_of_trunk(qkv_page_range *range);
// Pages from the `count`th on, which no layer has, leave memory; those that no trunk has are dropped. Under the lock,
// seized or where no layer has the range.
void qkvi_range_leave_memory(qkv_page_range *range, uint32_t count, qkv_arena *arena);
// Of its first pages, as many as a layer or a trunk has: their tokens, and of these what is in memory.
typedef struct qkvi_range_held {
  uint64_t tokens, tokens_held, bytes_held;
} qkvi_range_held;
qkvi_range_held qkvi_range_read_held(qkv_page_range *range, uint32_t pages);

static inline bool qkvi_range_is_shared(const qkv_page_range *range) {
  return atomic_load_explicit(&range->layers, memory_order_acquire) > 1;
}

// Whether another layer than one's own has it: then its pages may stay in memory without this one.
static inline bool qkvi_range_is_used_elsewhere(const qkv_page_range *range) {
  return atomic_load_explicit(&range->layers, memory_order_acquire) >
         atomic_load_explicit(&range->trunks, memory_order_acquire) + 1;
}

// Waits while it is seized, which takes a microsecond or so. `used_ms` other than 0 is stored.
void qkvi_range_pin(qkv_page_range *range, int64_t used_ms);
void qkvi_range_unpin(qkv_page_range *range);
// No other thread reads it until it is released. The caller has pinned it once. False where another thread has, too.
bool qkvi_range_seize(qkv_page_range *range);
void qkvi_range_release(qkv_page_range *range);

void qkvi_range_lock(qkv_page_range *range);
void qkvi_range_unlock(qkv_page_range *range);

// Packs it where nothing of it is in memory and each page has a record. Seized, or by the layer that has it alone.
void qkvi_range_pack(qkv_page_range *range);
// The range's entries, which are unpacked where they are packed.
qkv_page_entry *qkvi_range_unpack(qkv_page_range *range);
static inline qkv_page_entry *qkvi_range_entries(qkv_page_range *range) {
  qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_acquire);
  return pages != NULL ? pages : qkvi_range_unpack(range);
}
// These leave it as it is. A copy of a page's entry as of now; with the lock held, and without.
qkv_page_entry qkvi_range_copy_entry(qkv_page_range *range, uint32_t page);
qkv_page_entry qkvi_range_peek(qkv_page_range *range, uint32_t page);
// The fields of a page that do not change while other threads read the range: where it begins, and where it ends.
typedef struct qkvi_page_span {
  uint64_t begin, end;  // positions
} qkvi_page_span;
static inline qkvi_page_span qkvi_range_span(qkv_page_range *range, uint32_t page) {
  const qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_acquire);
  if (pages != NULL) return (qkvi_page_span){pages[page].position, pages[page].position + pages[page].tokens};
  const qkv_page_entry entry = qkvi_range_peek(range, page);
  return (qkvi_page_span){entry.position, entry.position + entry.tokens};
}
// The first of its leading `count` pages that ends beyond `position`; count: none.
uint32_t qkvi_range_find(qkv_page_range *range, uint32_t count, uint64_t position);
static inline bool qkvi_range_is_cold(const qkv_page_range *range) {
  return atomic_load_explicit(&range->bytes_coded, memory_order_relaxed) == 0;
}

// By the layer that has the range alone: adds a page behind the others, which is the range's from here on; drops all
// from the `count`th on.
void qkvi_range_add(qkv_page_range *range, const qkv_page_entry *entry);
void qkvi_range_cut(qkv_page_range *range, uint32_t count, qkv_arena *arena);

// After an image of it has been exchanged or has left memory: copies on a device are of no more use.
void qkvi_range_forget(qkv_page_range *range);

// Counts in the sums what an entry is (`sign` 1), or is no more (-1).
void qkvi_range_count(qkv_page_range *range, const qkv_page_entry *entry, int sign);

// Images. `holders` NULL stands for one holder.
static inline bool qkvi_image_is_sole(const _Atomic uint32_t *holders) {
  return holders == NULL || atomic_load_explicit(holders, memory_order_acquire) == 1;
}
// One holder more. Returns *holders.
_Atomic uint32_t *qkvi_image_share(_Atomic uint32_t **holders);
// One holder less; the last one frees it. Returns the bytes of the arena that this has freed.
uint64_t qkvi_image_leave(qkv_arena *arena, const void *image, uint32_t bytes, _Atomic uint32_t *holders);

// An image that has left its page.
typedef struct qkvi_leaving_image {
  const void *image;  // NULL: none
  uint32_t bytes;
  _Atomic uint32_t *holders;
} qkvi_leaving_image;
// The page becomes cold. Under the range's lock; the caller leaves both images.
void qkvi_range_evict(qkv_page_range *range, qkv_page_entry *entry, qkvi_leaving_image images[2]);

// One holder more of an image, for a user without a range: it stays as it is, and counts in the arena and its
// account, until it is released, by any thread while the store's arena exists. NULL: none.
typedef struct qkv_page_hold {
  qkv_arena *arena;
  const void *image;
  uint32_t bytes;
  _Atomic uint32_t *holders;
} qkv_page_hold;
qkv_page_hold qkv_page_hold_image(qkv_arena *arena, const void *image, uint32_t bytes, _Atomic uint32_t **holders);
void qkv_page_let_go(qkv_page_hold *hold);

// Never given before.
uint64_t qkvi_serial_next(void);

#endif
