#include "engine/cache/prefix_index.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "hashes are over little-endian ids, taken as they lie");

// 0 is no place: nodes, holders and chains end there.
typedef struct node {
  qkv_prefix_hash hash;
  uint32_t parent;          // 0: a root
  uint32_t child;           // the latest one
  uint32_t next, previous;  // children of the same parent
  uint32_t holder;          // attached here, the latest one
  uint32_t latest;          // a holder at or below, and never one that is elsewhere; not 0 while the node lives
  uint32_t depth;           // pages from the root, which has 0; FREE
  uint32_t chain;           // the next node of the bucket, or of the free list
  uint32_t root;            // of a page; of a root: itself
  uint32_t part;            // its tenant's
} node;
static_assert(sizeof(node) == 56, "56 bytes a page");

#define FREE UINT32_MAX

typedef struct holder {
  uint32_t owner;
  uint32_t node;  // 0: this place is free
  uint32_t next, previous;
} holder;

// What a tenant has of the index.
typedef struct part {
  const void *tenant;
  uint32_t nodes;  // roots and pages; 0: this place is free
} part;

struct qkv_prefix_index {
  pthread_mutex_t lock;
  node *nodes;        // places 1 to nodes_max
  uint32_t *buckets;  // bucket_count, a power of two
  holder *holders;    // places 1 to holders_max
  uint64_t bucket_count;
  uint32_t nodes_max, nodes_touched, nodes_free;
  uint32_t holders_max, holders_touched, holders_free;
  uint64_t pages, holder_count, refused;
  part *parts;
  uint32_t part_count, part_max;  // places; nodes that a tenant may have
  qkv_prefix_observer observer;   // zeros: none
};

// ---- Hashes ----

static qkv_prefix_hash from_xxh(XXH128_hash_t hash) {
  return (qkv_prefix_hash){.low = hash.low64, .high = hash.high64};
}

static size_t put(uint8_t *to, size_t at, const void *from, size_t bytes) {
  if (bytes > 0) memcpy(to + at, from, bytes);
  return at + bytes;
}

qkv_prefix_hash qkv_prefix_root(const char *tenant, const char *model, const void *salt, size_t bytes) {
  assert(bytes <= QKV_PREFIX_SALT_MAX);
  const size_t tenant_bytes = strlen(tenant) + 1, model_bytes = strlen(model) + 1;
  uint8_t *text = malloc(tenant_bytes + model_bytes + bytes);
  if (text == NULL) abort();
  size_t at = put(text, 0, tenant, tenant_bytes);
  at = put(text, at, model, model_bytes);
  at = put(text, at, salt, bytes);
  const qkv_prefix_hash root = from_xxh(XXH3_128bits(text, at));
  free(text);
  return root;
}

qkv_prefix_hash qkv_prefix_next(const qkv_prefix_hash *parent, const uint32_t *ids) {
  struct {
    qkv_prefix_hash parent;
    uint32_t ids[QKV_PREFIX_PAGE];
  } page;
  static_assert(sizeof page == 272, "no padding");
  page.parent = *parent;
  memcpy(page.ids, ids, sizeof page.ids);
  return from_xxh(XXH3_128bits(&page, sizeof page));
}

// ---- The index ----

static void lock(qkv_prefix_index *index) {
  int failed = pthread_mutex_lock(&index->lock);
  assert(failed == 0);
}

static void unlock(qkv_prefix_index *index) {
  int failed = pthread_mutex_unlock(&index->lock);
  assert(failed == 0);
}

void qkv_prefix_index_lock(qkv_prefix_index *index) {
  lock(index);
}

void qkv_prefix_index_unlock(qkv_prefix_index *index) {
  unlock(index);
}

// Zeros that are taken from the machine as they are written, and that lie apart from malloc's heap: a block of this
// size in its middle would keep the heap from shrinking.
static void *map_zeros(size_t bytes) {
  void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) abort();
  return mapped;
}

static size_t nodes_bytes(const qkv_prefix_index *index) {
  return ((size_t)index->nodes_max + 1) * sizeof *index->nodes;
}

static size_t buckets_bytes(const qkv_prefix_index *index) {
  return (size_t)index->bucket_count * sizeof *index->buckets;
}

qkv_prefix_index *qkv_prefix_index_create(uint64_t pages_max, uint64_t part_max) {
  assert(pages_max <= QKV_PREFIX_PAGES_MAX && part_max <= pages_max);
  qkv_prefix_index *index = calloc(1, sizeof *index);
  if (index == NULL) abort();
  index->nodes_max = (uint32_t)pages_max;
  index->part_max = (uint32_t)part_max;
  index->bucket_count = 1;
  while (index->bucket_count < pages_max) index->bucket_count *= 2;
  index->nodes = map_zeros(nodes_bytes(index));
  index->buckets = map_zeros(buckets_bytes(index));
  int failed = pthread_mutex_init(&index->lock, NULL);
  assert(failed == 0);
  return index;
}

void qkv_prefix_index_destroy(qkv_prefix_index **index) {
  qkv_prefix_index *left = *index;
  if (left == NULL) return;
  *index = NULL;
  (void)pthread_mutex_destroy(&left->lock);
  (void)munmap(left->nodes, nodes_bytes(left));
  (void)munmap(left->buckets, buckets_bytes(left));
  free(left->holders);
  free(left->parts);
  free(left);
}

void qkv_prefix_index_observe(qkv_prefix_index *index, const qkv_prefix_observer *observer) {
  index->observer = *observer;
}

// ---- Nodes ----

static uint32_t *bucket_of(qkv_prefix_index *index, const qkv_prefix_hash *hash) {
  return &index->buckets[hash->low & (index->bucket_count - 1)];
}

static uint32_t find(qkv_prefix_index *index, const qkv_prefix_hash *hash) {
  uint32_t at = *bucket_of(index, hash);
  while (at != 0 && !qkv_prefix_hash_equal(&index->nodes[at].hash, hash)) at = index->nodes[at].chain;
  return at;
}

static uint32_t take_node(qkv_prefix_index *index) {
  const uint32_t at = index->nodes_free;
  if (at == 0) return index->nodes_touched < index->nodes_max ? ++index->nodes_touched : 0;
  index->nodes_free = index->nodes[at].chain;
  return at;
}

static void put_first_child(qkv_prefix_index *index, uint32_t parent, uint32_t at) {
  node *above = &index->nodes[parent];
  index->nodes[at].next = above->child;
  index->nodes[at].previous = 0;
  if (above->child != 0) index->nodes[above->child].previous = at;
  above->child = at;
}

static void take_child(qkv_prefix_index *index, uint32_t at) {
  const node *left = &index->nodes[at];
  if (left->next != 0) index->nodes[left->next].previous = left->previous;
  if (left->previous != 0) {
    index->nodes[left->previous].next = left->next;
  } else {
    index->nodes[left->parent].child = left->next;
  }
}

static void tell(const qkv_prefix_index *index, uint32_t at, bool added, const uint32_t *ids) {
  const node *here = &index->nodes[at];
  if (index->observer.changed == NULL) return;
  index->observer.changed(index->observer.context, &(qkv_prefix_change){.added = added,
                                                                        .root = here->root,
                                                                        .hash = here->hash,
                                                                        .parent = index->nodes[here->parent].hash,
                                                                        .page = here->depth - 1,
                                                                        .ids = ids});
}

// The tenant's part, or a free one that becomes its; where there is a root for the first time.
static uint32_t part_of(qkv_prefix_index *index, const void *tenant) {
  uint32_t free_at = index->part_count;
  for (uint32_t i = 0; i < index->part_count; i++) {
    if (index->parts[i].nodes == 0)
      free_at = i;
    else if (index->parts[i].tenant == tenant)
      return i;
  }
  if (free_at == index->part_count) {
    index->part_count = index->part_count == 0 ? 4 : index->part_count + index->part_count / 4;
    index->parts = realloc(index->parts, index->part_count * sizeof *index->parts);
    if (index->parts == NULL) abort();
    memset(index->parts + free_at, 0, (index->part_count - free_at) * sizeof *index->parts);
  }
  index->parts[free_at].tenant = tenant;
  return free_at;
}

// A new node; `parent` 0: a root, in a part. 0 where the index, or the part, is full.
static uint32_t add_node(qkv_prefix_index *index, uint32_t parent, const qkv_prefix_hash *hash, uint32_t in) {
  const uint32_t at = index->parts[in].nodes < index->part_max ? take_node(index) : 0;
  if (at == 0) {
    index->refused++;
    return 0;
  }
  uint32_t *bucket = bucket_of(index, hash);
  index->parts[in].nodes++;
  index->nodes[at] = (node){.hash = *hash, .parent = parent, .chain = *bucket, .root = at, .part = in};
  *bucket = at;
  if (parent == 0) return at;
  index->nodes[at].depth = index->nodes[parent].depth + 1;
  index->nodes[at].root = index->nodes[parent].root;
  put_first_child(index, parent, at);
  index->pages++;
  return at;
}

static void remove_node(qkv_prefix_index *index, uint32_t at) {
  node *left = &index->nodes[at];
  assert(left->child == 0 && left->holder == 0);
  uint32_t *link = bucket_of(index, &left->hash);
  while (*link != at) link = &index->nodes[*link].chain;
  *link = left->chain;
  if (left->parent != 0) {
    tell(index, at, false, NULL);
    take_child(index, at);
    index->pages--;
  } else if (index->observer.root_removed != NULL) {
    index->observer.root_removed(index->observer.context, at);
  }
  assert(index->parts[left->part].nodes > 0);
  index->parts[left->part].nodes--;
  *left = (node){.depth = FREE, .chain = index->nodes_free};
  index->nodes_free = at;
}

// ---- Holders ----

static uint32_t take_holder(qkv_prefix_index *index) {
  const uint32_t at = index->holders_free;
  if (at != 0) {
    index->holders_free = index->holders[at].next;
    return at;
  }
  if (index->holders_touched == index->holders_max) {
    assert(index->holders_max < UINT32_MAX / 2);
    index->holders_max = index->holders_max == 0 ? 64 : index->holders_max + index->holders_max / 4;
    index->holders = realloc(index->holders, ((size_t)index->holders_max + 1) * sizeof *index->holders);
    if (index->holders == NULL) abort();
  }
  return ++index->holders_touched;
}

static void seat(qkv_prefix_index *index, uint32_t at, uint32_t where) {
  holder *seated = &index->holders[at];
  node *here = &index->nodes[where];
  seated->node = where;
  seated->next = here->holder;
  seated->previous = 0;
  if (here->holder != 0) index->holders[here->holder].previous = at;
  here->holder = at;
  here->latest = at;
}

static void unseat(qkv_prefix_index *index, uint32_t at) {
  const holder *left = &index->holders[at];
  if (left->next != 0) index->holders[left->next].previous = left->previous;
  if (left->previous != 0) {
    index->holders[left->previous].next = left->next;
  } else {
    index->nodes[left->node].holder = left->next;
  }
}

static uint32_t new_holder(qkv_prefix_index *index, uint32_t where, uint32_t owner) {
  const uint32_t at = take_holder(index);
  index->holders[at] = (holder){.owner = owner};
  seat(index, at, where);
  index->holder_count++;
  return at;
}

// A holder has left `from` and is no longer below the nodes up to `to` (0: to the root, and with it), which is an
// ancestor: nodes without holders and children are freed, others forget it. From below, so that children are right
// before their parents.
static void forget(qkv_prefix_index *index, uint32_t gone, uint32_t from, uint32_t to) {
  for (uint32_t at = from, parent; at != to; at = parent) {
    node *here = &index->nodes[at];
    parent = here->parent;
    if (here->child == 0 && here->holder == 0) {
      remove_node(index, at);
    } else if (here->latest == gone) {
      here->latest = here->holder != 0 ? here->holder : index->nodes[here->child].latest;
    }
  }
}

static uint32_t ancestor(const qkv_prefix_index *index, uint32_t at, uint64_t depth) {
  while (index->nodes[at].depth > depth) at = index->nodes[at].parent;
  return at;
}

qkv_prefix_holder qkv_prefix_index_attach(qkv_prefix_index *index, const qkv_prefix_hash *root, uint32_t owner,
                                          const void *tenant) {
  lock(index);
  uint32_t at = find(index, root);
  const bool added = at == 0;
  if (added) at = add_node(index, 0, root, part_of(index, tenant));
  if (added && at != 0 && index->observer.root_added != NULL)
    index->observer.root_added(index->observer.context, at, owner);
  // A page that has a root's hash: whatever it is, it is not this root.
  const bool usable = at != 0 && index->nodes[at].depth == 0;
  const uint32_t made = usable ? new_holder(index, at, owner) : 0;
  unlock(index);
  return made;
}

qkv_prefix_holder qkv_prefix_index_fork(qkv_prefix_index *index, qkv_prefix_holder of, uint64_t pages,
                                        uint32_t owner) {
  if (of == 0) return 0;
  lock(index);
  const uint32_t made = new_holder(index, ancestor(index, index->holders[of].node, pages), owner);
  unlock(index);
  return made;
}

void qkv_prefix_index_drop(qkv_prefix_index *index, qkv_prefix_holder at) {
  if (at == 0) return;
  lock(index);
  const uint32_t from = index->holders[at].node;
  assert(from != 0);
  unseat(index, at);
  forget(index, at, from, 0);
  index->holders[at] = (holder){.next = index->holders_free};
  index->holders_free = at;
  index->holder_count--;
  unlock(index);
}

static bool extend_locked(qkv_prefix_index *index, uint32_t at, uint64_t page, const qkv_prefix_hash *hash,
                          const uint32_t *ids) {
  const uint32_t from = index->holders[at].node;
  assert(from != 0);
  if (index->nodes[from].depth != page) return false;
  uint32_t to = find(index, hash);
  const bool added = to == 0;
  if (added) to = add_node(index, from, hash, index->nodes[from].part);
  if (added && to != 0) tell(index, to, true, ids);
  if (to == 0 || index->nodes[to].parent != from) return false;  // full, or another page's hash is the same
  unseat(index, at);
  seat(index, at, to);
  index->nodes[from].latest = at;
  return true;
}

bool qkv_prefix_index_extend(qkv_prefix_index *index, qkv_prefix_holder at, uint64_t page,
                             const qkv_prefix_hash *hash, const uint32_t *ids) {
  if (at == 0) return false;
  lock(index);
  const bool extended = extend_locked(index, at, page, hash, ids);
  unlock(index);
  return extended;
}

void qkv_prefix_index_shorten(qkv_prefix_index *index, qkv_prefix_holder at, uint64_t pages) {
  if (at == 0) return;
  lock(index);
  const uint32_t from = index->holders[at].node, to = ancestor(index, from, pages);
  if (to != from) {
    unseat(index, at);
    seat(index, at, to);
    forget(index, at, from, to);
  }
  unlock(index);
}

uint64_t qkv_prefix_index_pages(qkv_prefix_index *index, qkv_prefix_holder at) {
  if (at == 0) return 0;
  lock(index);
  const uint64_t pages = index->nodes[index->holders[at].node].depth;
  unlock(index);
  return pages;
}

size_t qkv_prefix_index_hashes(qkv_prefix_index *index, qkv_prefix_holder at, qkv_prefix_hash *hashes, size_t max) {
  if (at == 0) return 0;
  lock(index);
  uint32_t place = index->holders[at].node;
  const size_t pages = index->nodes[place].depth, count = pages < max ? pages : max;
  for (size_t page = pages; page > 0; page--, place = index->nodes[place].parent) {
    if (page <= count) hashes[page - 1] = index->nodes[place].hash;
  }
  unlock(index);
  return count;
}

// ---- Matching ----

// The node of the first `depth` of these pages, or 0. hashes[0] is the root's.
static uint32_t page_at(qkv_prefix_index *index, const qkv_prefix_hash *hashes, uint64_t depth) {
  const uint32_t at = find(index, &hashes[depth]);
  return at != 0 && index->nodes[at].depth == depth ? at : 0;
}

static bool is_there(qkv_prefix_index *index, const qkv_prefix_hash *hashes, uint64_t depth) {
  lock(index);
  const bool there = page_at(index, hashes, depth) != 0;
  unlock(index);
  return there;
}

// Hashes pages up to the first of 1, 2, 4, 8 ... that is absent, or all. Returns how many.
static uint64_t hash_ahead(qkv_prefix_index *index, const uint32_t *ids, uint64_t pages, qkv_prefix_hash *hashes) {
  uint64_t hashed = 0;
  for (uint64_t goal = 1; hashed < pages; goal *= 2) {
    for (; hashed < goal && hashed < pages; hashed++) {
      hashes[hashed + 1] = qkv_prefix_next(&hashes[hashed], ids + hashed * QKV_PREFIX_PAGE);
    }
    if (!is_there(index, hashes, hashed)) break;
  }
  return hashed;
}

// The deepest node of the first `pages`, or 0: where a page is, the pages before are.
static uint32_t deepest(qkv_prefix_index *index, const qkv_prefix_hash *hashes, uint64_t pages) {
  uint64_t there = 0, absent = pages + 1;
  while (absent - there > 1) {
    const uint64_t middle = there + (absent - there) / 2;
    if (page_at(index, hashes, middle) != 0) {
      there = middle;
    } else {
      absent = middle;
    }
  }
  return there == 0 ? 0 : page_at(index, hashes, there);
}

typedef struct matching {
  const qkv_prefix_index *index;
  void (*take)(uint32_t owner);
  qkv_prefix_found *found;
  size_t count, max;
  int steps;                               // nodes that may still be looked at below children
  uint32_t holders[QKV_PREFIX_FOUND_MAX];  // of found[i]
  uint32_t tops[QKV_PREFIX_FOUND_MAX];     // found[i] is the latest at or below this child; 0: no child's
} matching;

static void find_holder(matching *all, uint32_t at, uint64_t pages, uint32_t top) {
  uint32_t owner = all->index->holders[at].owner;
  all->holders[all->count] = at;
  all->tops[all->count] = top;
  all->found[all->count++] = (qkv_prefix_found){.owner = owner, .pages = pages};
  if (all->take != NULL) all->take(owner);
}

// Those at the node but `told`, and the latest below each child but `seen`.
static void find_here(matching *all, uint32_t at, uint32_t told, uint32_t seen, uint64_t pages) {
  const node *nodes = all->index->nodes, *here = &nodes[at];
  for (uint32_t h = here->holder; h != 0 && all->count < all->max; h = all->index->holders[h].next) {
    if (h != told) find_holder(all, h, pages, 0);
  }
  for (uint32_t c = here->child; c != 0 && all->count < all->max; c = nodes[c].next) {
    if (c != seen) find_holder(all, nodes[c].latest, pages, c);
  }
}

// The others at or below the child that found[i] is the latest of, from that one's node upwards.
static void find_below(matching *all, size_t i) {
  const uint32_t told = all->holders[i], top = all->tops[i];
  uint32_t at = all->index->holders[told].node, seen = 0;
  while (all->count < all->max && all->steps-- > 0) {
    find_here(all, at, told, seen, all->found[i].pages);
    if (at == top) break;
    seen = at;
    at = all->index->nodes[at].parent;
  }
}

// All at or below the node, but not below `seen`.
static void find_at(matching *all, uint32_t at, uint32_t seen) {
  const size_t first = all->count;
  find_here(all, at, 0, seen, all->index->nodes[at].depth);
  for (size_t i = first; i < all->count; i++) {
    if (all->tops[i] != 0) find_below(all, i);
  }
}

// Holders at a node and at those above it that are deeper than `above`.
static void climb(matching *all, uint32_t at, uint64_t above) {
  const node *nodes = all->index->nodes;
  uint32_t seen = 0;
  for (int i = 0; i <= QKV_PREFIX_CLIMB && at != 0 && nodes[at].depth > above && all->count < all->max; i++) {
    find_at(all, at, seen);
    seen = at;
    at = nodes[at].parent;
  }
}

size_t qkv_prefix_index_match(qkv_prefix_index *index, const qkv_prefix_hash *root, const uint32_t *ids, size_t count,
                              void (*take)(uint32_t owner), qkv_prefix_found *found, size_t max) {
  const uint64_t pages = count / QKV_PREFIX_PAGE;
  qkv_prefix_hash *hashes = malloc((pages + 1) * sizeof *hashes);
  if (hashes == NULL) abort();
  hashes[0] = *root;
  matching all = {.index = index, .take = take, .found = found, .max = max, .steps = QKV_PREFIX_STEPS};
  assert(max <= QKV_PREFIX_FOUND_MAX);
  const uint64_t hashed = hash_ahead(index, ids, pages, hashes);
  lock(index);
  climb(&all, deepest(index, hashes, hashed), 0);
  unlock(index);
  free(hashes);
  return all.count;
}

// The deepest node of these pages, or 0.
static uint32_t deepest_page(qkv_prefix_index *index, uint64_t first, const qkv_prefix_hash *hashes, size_t count) {
  size_t there = 0, absent = count + 1;
  uint32_t found = 0;
  while (absent - there > 1) {
    const size_t middle = there + (absent - there) / 2;
    const uint32_t at = find(index, &hashes[middle - 1]);
    if (at != 0 && index->nodes[at].depth == first + middle) {
      there = middle;
      found = at;
    } else {
      absent = middle;
    }
  }
  return found;
}

size_t qkv_prefix_index_match_pages(qkv_prefix_index *index, uint64_t first, const qkv_prefix_hash *hashes,
                                    size_t count, void (*take)(uint32_t owner), qkv_prefix_found *found, size_t max) {
  matching all = {.index = index, .take = take, .found = found, .max = max, .steps = QKV_PREFIX_STEPS};
  assert(max <= QKV_PREFIX_FOUND_MAX);
  lock(index);
  climb(&all, deepest_page(index, first, hashes, count), first);
  unlock(index);
  return all.count;
}

// ---- Looking at all of it ----

static size_t count_holders(const qkv_prefix_index *index, uint32_t at) {
  size_t count = 0;
  for (uint32_t h = index->nodes[at].holder; h != 0; h = index->holders[h].next) count++;
  return count;
}

uint32_t qkv_prefix_index_scan(qkv_prefix_index *index, uint32_t from, uint32_t places,
                               bool (*fn)(void *context, const qkv_prefix_page *page), void *context) {
  bool more = true;
  lock(index);
  if (from > index->nodes_touched) {
    unlock(index);
    return 0;
  }
  const uint32_t last = places > index->nodes_touched - from ? index->nodes_touched : from + places - 1;
  for (uint32_t at = from; at <= last && more; at++) {
    const node *here = &index->nodes[at];
    if (here->depth == FREE || here->depth == 0) continue;
    const qkv_prefix_page page = {.hash = here->hash,
                                  .parent = index->nodes[here->parent].hash,
                                  .depth = here->depth,
                                  .root = here->root,
                                  .holders = count_holders(index, at)};
    more = fn(context, &page);
  }
  const uint32_t next = more && last < index->nodes_touched ? last + 1 : 0;
  unlock(index);
  return next;
}

void qkv_prefix_index_each(qkv_prefix_index *index, bool (*fn)(void *context, const qkv_prefix_page *page),
                           void *context) {
  (void)qkv_prefix_index_scan(index, 1, UINT32_MAX, fn, context);
}

qkv_prefix_stats qkv_prefix_index_read(qkv_prefix_index *index) {
  lock(index);
  const qkv_prefix_stats stats = {
      .pages = index->pages,
      .holders = index->holder_count,
      .pages_max = index->nodes_max,
      .refused = index->refused,
      .bytes = (uint64_t)index->nodes_touched * sizeof(node) +
               (index->nodes_touched > 0 ? index->bucket_count * sizeof *index->buckets : 0) +
               (uint64_t)index->holders_max * sizeof(holder),
  };
  unlock(index);
  return stats;
}

// Whether holder `at` is at or below a node.
static bool is_below(const qkv_prefix_index *index, uint32_t at, uint32_t where) {
  return at != 0 && at <= index->holders_touched && index->holders[at].node != 0 &&
         ancestor(index, index->holders[at].node, index->nodes[where].depth) == where;
}

static const char *fault_of_links(const qkv_prefix_index *index, uint32_t at) {
  const node *here = &index->nodes[at];
  for (uint32_t c = here->child, before = 0; c != 0; before = c, c = index->nodes[c].next) {
    if (index->nodes[c].parent != at || index->nodes[c].previous != before) return "a child is not linked";
    if (index->nodes[c].depth != here->depth + 1) return "a child is not one page deeper";
  }
  for (uint32_t h = here->holder, before = 0; h != 0; before = h, h = index->holders[h].next) {
    if (index->holders[h].node != at || index->holders[h].previous != before) return "a holder is not linked";
  }
  return NULL;
}

static const char *fault_of(qkv_prefix_index *index, uint32_t at) {
  const node *here = &index->nodes[at];
  if (here->child == 0 && here->holder == 0) return "nobody needs a node";
  if (find(index, &here->hash) != at) return "a node is not found by its hash";
  if ((here->parent == 0) != (here->depth == 0)) return "a node that is no root has no parent";
  if (!is_below(index, here->latest, at)) return "a node's latest holder is not below it";
  return fault_of_links(index, at);
}

bool qkv_prefix_index_validate(qkv_prefix_index *index, const char **reason) {
  uint64_t pages = 0, holders = 0, nodes = 0;
  *reason = NULL;
  lock(index);
  for (uint32_t at = 1; at <= index->nodes_touched && *reason == NULL; at++) {
    if (index->nodes[at].depth == FREE) continue;
    *reason = fault_of(index, at);
    nodes++;
    pages += index->nodes[at].depth > 0;
    holders += count_holders(index, at);
  }
  if (*reason == NULL && pages != index->pages) *reason = "pages are miscounted";
  for (uint32_t i = 0; i < index->part_count; i++) nodes -= index->parts[i].nodes;
  if (*reason == NULL && nodes != 0) *reason = "the parts of tenants are miscounted";
  if (*reason == NULL && holders != index->holder_count) *reason = "holders are miscounted";
  unlock(index);
  return *reason == NULL;
}
