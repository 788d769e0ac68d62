// Which sessions hold which prefixes of token ids: for the longest prefix of a prompt that any session holds.
//
// A page is 64 token ids. A page has a chained hash: XXH3-128 over its parent's hash and its ids, so that the hash
// stands for all ids from the first one on. The first parent is the root, the hash of tenant, model and salt: pages
// of different tenants, models or salts never meet.
//
//   root      XXH3-128 of  tenant NUL model NUL salt
//   page      XXH3-128 of  | parent.low 8 | parent.high 8 | ids[0] 4 | ... | ids[63] 4 |   272 bytes, little-endian
//
// The index is a tree of nodes, one for each distinct page that is held, and a hash table over them. A holder (a
// session) is attached at its deepest node. A node lives while it has children or holders, so the ancestors of a node
// are always there, and the depth of a match is found by galloping: hash 1, 2, 4, 8 ... pages until one is absent,
// then a binary search over what was hashed.
//
//   root ── page ── page ── page  <- holder A          64 bytes a page: a node of 56, and two buckets of 4 at
//                      └─── page ── page  <- holder B  the most
//
// XXH3 is no cryptographic hash: ids that collide can be constructed. Users that may attack each other need a tenant
// or a secret salt each.
//
// Memory: arrays for `pages_max` nodes, made at once and touched as they are filled. They are outside the arena.
// Threads: any. One lock, held for look-ups and changes, and not while tokens are hashed.
#ifndef QKV_ENGINE_CACHE_PREFIX_INDEX_H
#define QKV_ENGINE_CACHE_PREFIX_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QKV_PREFIX_PAGE 64               // token ids
#define QKV_PREFIX_SALT_MAX 256          // bytes
#define QKV_PREFIX_PAGES_MAX (1u << 28)  // of an index

typedef struct qkv_prefix_hash {
  uint64_t low, high;
} qkv_prefix_hash;

static inline bool qkv_prefix_hash_equal(const qkv_prefix_hash *a, const qkv_prefix_hash *b) {
  return a->low == b->low && a->high == b->high;
}

// `tenant` and `model` are valid names, so they hold no NUL. `salt` may be NULL where `bytes` is 0.
qkv_prefix_hash qkv_prefix_root(const char *tenant, const char *model, const void *salt, size_t bytes);
// Of QKV_PREFIX_PAGE ids.
qkv_prefix_hash qkv_prefix_next(const qkv_prefix_hash *parent, const uint32_t *ids);

typedef struct qkv_prefix_index qkv_prefix_index;

// Told of each change as it happens, with the index locked: it calls no function of the index, and waits for no
// thread. A root is a number that is used again once the root has gone.
typedef struct qkv_prefix_change {
  bool added;  // by its first holder; else its last one has gone
  uint32_t root;
  qkv_prefix_hash hash, parent;
  uint64_t page;        // its number, from 0 on
  const uint32_t *ids;  // its ids where it is added and they are known; else NULL
} qkv_prefix_change;
typedef struct qkv_prefix_observer {
  void *context;
  void (*root_added)(void *context, uint32_t root, uint32_t owner);  // `owner`: of its first holder
  void (*root_removed)(void *context, uint32_t root);
  void (*changed)(void *context, const qkv_prefix_change *change);
} qkv_prefix_observer;
// Before anything is indexed; copied.
void qkv_prefix_index_observe(qkv_prefix_index *index, const qkv_prefix_observer *observer);

// A place in the index; 0: none. Functions that take a holder do nothing for none.
typedef uint32_t qkv_prefix_holder;

// `pages_max` up to QKV_PREFIX_PAGES_MAX (asserted); 0: nothing is indexed, nothing matches. `part_max`: of one
// tenant, its roots counted as a page each; for a tenant that has so many the index is full.
qkv_prefix_index *qkv_prefix_index_create(uint64_t pages_max, uint64_t part_max);
// Holders may be left.
void qkv_prefix_index_destroy(qkv_prefix_index **index);

// ---- Holders ----

// A new holder without pages, below a root. `owner`, any number, comes back from a match. `tenant` stands for the
// root's tenant, and for no other one while the root has holders; not dereferenced. None where the index is full.
qkv_prefix_holder qkv_prefix_index_attach(qkv_prefix_index *index, const qkv_prefix_hash *root, uint32_t owner,
                                          const void *tenant);
// A new holder of the first `pages` of `of`, or of as many as it has: O(pages that it has more). Nothing is copied.
// None where `of` is none.
qkv_prefix_holder qkv_prefix_index_fork(qkv_prefix_index *index, qkv_prefix_holder of, uint64_t pages,
                                        uint32_t owner);
// Removes the holder, and the pages that only it had: O(pages).
void qkv_prefix_index_drop(qkv_prefix_index *index, qkv_prefix_holder at);

// The holder gets its page number `page`, from 0 on. False, with nothing changed, where it does not have exactly the
// pages before, so that a page that was not indexed ends what is indexed of a holder; and where the index is full,
// which stats count. `ids` of the page are for the observer; NULL: not known.
bool qkv_prefix_index_extend(qkv_prefix_index *index, qkv_prefix_holder holder, uint64_t page,
                             const qkv_prefix_hash *hash, const uint32_t *ids);
// Only its first `pages` stay; one that has no more than these is left as it is.
void qkv_prefix_index_shorten(qkv_prefix_index *index, qkv_prefix_holder at, uint64_t pages);
// Pages that are indexed of a holder.
uint64_t qkv_prefix_index_pages(qkv_prefix_index *index, qkv_prefix_holder at);
// The hashes of these, of the first `max`. Returns how many. O(pages).
size_t qkv_prefix_index_hashes(qkv_prefix_index *index, qkv_prefix_holder at, qkv_prefix_hash *hashes, size_t max);

// ---- Matching ----

typedef struct qkv_prefix_found {
  uint32_t owner;
  uint64_t pages;  // that it shares with the ids asked for
} qkv_prefix_found;

// Up to `max` holders that share the longest prefixes with `count` ids, the longest first; at least one page is
// shared. Returns how many.
//
// Order: at the deepest node that matches the holders attached there, the latest first, then one for each child, the
// latest child first: the one that came through that child last; then the others below these children, in any order,
// as far as QKV_PREFIX_STEPS nodes reach in all. Then the same for the node's parent and so on, up to
// QKV_PREFIX_CLIMB parents, without what was below. A node whose latest holder went away has any that is left.
//
// `take`, where not NULL, is called for each owner while the index is locked: an owner whose holder is dropped before
// it is freed can be referenced there. It calls no function of the index.
size_t qkv_prefix_index_match(qkv_prefix_index *index, const qkv_prefix_hash *root, const uint32_t *ids, size_t count,
                              void (*take)(uint32_t owner), qkv_prefix_found *found, size_t max);
enum { QKV_PREFIX_CLIMB = 64, QKV_PREFIX_STEPS = 256, QKV_PREFIX_FOUND_MAX = 16 };  // of `max` (asserted)

// The same by the chained hashes of pages: hashes[i] is that of page number first + i. Only holders of page number
// `first` at least are found; `found[].pages` counts from page 0.
size_t qkv_prefix_index_match_pages(qkv_prefix_index *index, uint64_t first, const qkv_prefix_hash *hashes,
                                    size_t count, void (*take)(uint32_t owner), qkv_prefix_found *found, size_t max);

// All pages, parents before their children or not; fn returns false to stop, and calls no function of the index.
// `holders` are those attached at the page, `depth` counts from 1.
typedef struct qkv_prefix_page {
  qkv_prefix_hash hash, parent;
  uint64_t depth;
  uint32_t root;
  size_t holders;
} qkv_prefix_page;
void qkv_prefix_index_each(qkv_prefix_index *index, bool (*fn)(void *context, const qkv_prefix_page *page),
                           void *context);
// qkv_prefix_index_each in pieces: up to `places` places from `from` on (at first 1). Returns where the next piece
// begins; 0: that was the last one. A page that exists throughout is visited once; others once or not at all.
uint32_t qkv_prefix_index_scan(qkv_prefix_index *index, uint32_t from, uint32_t places,
                               bool (*fn)(void *context, const qkv_prefix_page *page), void *context);

// Between the two no match gives an owner, and no other function of the index is called by this thread.
void qkv_prefix_index_lock(qkv_prefix_index *index);
void qkv_prefix_index_unlock(qkv_prefix_index *index);

typedef struct qkv_prefix_stats {
  uint64_t pages, holders;
  uint64_t pages_max;
  uint64_t refused;  // pages and roots that found no node, those that would have followed them not counted
  uint64_t bytes;    // of memory that nodes, buckets and holders have taken at the most until now
} qkv_prefix_stats;
qkv_prefix_stats qkv_prefix_index_read(qkv_prefix_index *index);

// False, and what is wrong, where the tree is not as it must be. O(pages).
bool qkv_prefix_index_validate(qkv_prefix_index *index, const char **reason);

#endif
