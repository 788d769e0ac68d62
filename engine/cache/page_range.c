#include "engine/cache/page_range.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { SEIZED = -1, FIRST_CAPACITY = 4 };

static void *checked(void *memory) {
  if (memory == NULL) abort();
  return memory;
}

uint64_t qkvi_serial_next(void) {
  static _Atomic uint64_t serials = 1;
  return atomic_fetch_add_explicit(&serials, 1, memory_order_relaxed);
}

// ---- Images ----

_Atomic uint32_t *qkvi_image_share(_Atomic uint32_t **holders) {
  if (*holders == NULL) {
    *holders = checked(malloc(sizeof **holders));
    atomic_init(*holders, 1);
  }
  atomic_fetch_add_explicit(*holders, 1, memory_order_relaxed);
  return *holders;
}

uint64_t qkvi_image_leave(qkv_arena *arena, const void *image, uint32_t bytes, _Atomic uint32_t *holders) {
  if (image == NULL) return 0;
  // What every holder did with the image happens before the last one frees it.
  if (holders != NULL && atomic_fetch_sub_explicit(holders, 1, memory_order_acq_rel) > 1) return 0;
  free(holders);
  qkv_arena_free(arena, (void *)image, bytes);
  return qkv_arena_cost(bytes);
}

// The account outlives its sessions' images, whose layers may be gone when the images are released.
qkv_page_hold qkv_page_hold_image(qkv_arena *arena, const void *image, uint32_t bytes, _Atomic uint32_t **holders) {
  if (qkv_account_of(arena) != NULL) (void)qkv_account_ref(qkv_account_of(arena));
  return (qkv_page_hold){.arena = arena, .image = image, .bytes = bytes, .holders = qkvi_image_share(holders)};
}

void qkv_page_let_go(qkv_page_hold *hold) {
  if (hold->image == NULL) return;
  qkv_account *account = qkv_account_of(hold->arena);
  (void)qkvi_image_leave(hold->arena, hold->image, hold->bytes, hold->holders);
  qkv_account_unref(&account);
  *hold = (qkv_page_hold){.image = NULL};
}

// ---- Life ----

qkv_page_range *qkvi_range_create(qkv_account *account) {
  qkv_page_range *range = checked(calloc(1, sizeof *range));
  range->account = account;
  atomic_init(&range->device, NULL);
  atomic_init(&range->layers, 1);
  atomic_init(&range->trunks, 0);
  atomic_init(&range->pins, 1);
  const int failed = pthread_mutex_init(&range->lock, NULL);
  assert(failed == 0);
  (void)failed;
  return range;
}

static void grow(qkv_page_range *range, uint32_t count) {
  if (count <= range->capacity) return;
  uint32_t capacity = range->capacity == 0 ? FIRST_CAPACITY : 2 * range->capacity;
  while (capacity < count) capacity *= 2;
  qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_relaxed);
  atomic_store_explicit(&range->pages, checked(realloc(pages, capacity * sizeof *pages)), memory_order_release);
  range->capacity = capacity;
}

// ---- Packed ----

typedef struct packed_page {
  uint32_t record;  // lower half
  uint32_t bytes;
  uint16_t tokens;
  bool record_lost, taken;
} packed_page;

_Static_assert(sizeof(packed_page) == 12, "no padding");

struct qkvi_packed_pages {
  uint32_t record_high;  // of all of them,
  bool mixed;            // or, behind `pages`, of each
  packed_page pages[];
};

static uint32_t *record_highs(const qkv_page_range *range) {
  return (uint32_t *)(range->packed->pages + range->count);
}

static qkv_page_entry unpacked(const qkv_page_range *range, uint32_t page, uint64_t position) {
  const packed_page *packed = &range->packed->pages[page];
  const uint64_t high = range->packed->mixed ? record_highs(range)[page] : range->packed->record_high;
  return (qkv_page_entry){.coder = range->coder,
                          .bytes = packed->bytes,
                          .tokens = packed->tokens,
                          .position = position,
                          .lost = packed->record_lost,
                          .record_lost = packed->record_lost,
                          .taken = packed->taken,
                          .record_bytes = packed->bytes,
                          .record = high << 32 | packed->record};
}

static bool may_be_packed(const qkv_page_range *range, const qkv_page_entry *pages, bool *mixed) {
  *mixed = false;
  if (pages == NULL || range->count == 0 || !qkvi_range_is_cold(range)) return false;
  for (uint32_t i = 0; i < range->count; i++) {
    if (pages[i].page != NULL || pages[i].record == 0) return false;
    *mixed |= pages[i].record >> 32 != pages[0].record >> 32;
  }
  return true;
}

void qkvi_range_pack(qkv_page_range *range) {
  qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_relaxed);
  bool mixed;
  if (!may_be_packed(range, pages, &mixed)) return;
  struct qkvi_packed_pages *packed =
      checked(malloc(sizeof *packed + range->count * (sizeof *packed->pages + (mixed ? sizeof(uint32_t) : 0))));
  packed->record_high = (uint32_t)(pages[0].record >> 32);
  packed->mixed = mixed;
  range->packed = packed;
  for (uint32_t i = 0; i < range->count; i++) {
    assert(pages[i].bytes == pages[i].record_bytes && pages[i].full == NULL && pages[i].coder == range->coder);
    packed->pages[i] = (packed_page){.record = (uint32_t)pages[i].record,
                                     .bytes = pages[i].record_bytes,
                                     .tokens = (uint16_t)pages[i].tokens,
                                     .record_lost = pages[i].record_lost,
                                     .taken = pages[i].taken};
    if (mixed) record_highs(range)[i] = (uint32_t)(pages[i].record >> 32);
  }
  atomic_store_explicit(&range->pages, NULL, memory_order_relaxed);
  range->capacity = 0;
  free(pages);
}

// Under the lock, or by the layer that has the range alone.
static qkv_page_entry *unpack(qkv_page_range *range) {
  qkv_page_entry *there = atomic_load_explicit(&range->pages, memory_order_relaxed);
  if (range->packed == NULL) return there;
  qkv_page_entry *pages = checked(malloc(range->count * sizeof *pages));
  uint64_t position = range->begin;
  for (uint32_t i = 0; i < range->count; i++) {
    pages[i] = unpacked(range, i, position);
    position += pages[i].tokens;
  }
  free(range->packed);
  range->packed = NULL;
  range->capacity = range->count;
  atomic_store_explicit(&range->pages, pages, memory_order_release);
  return pages;
}

qkv_page_entry *qkvi_range_unpack(qkv_page_range *range) {
  qkvi_range_lock(range);
  qkv_page_entry *pages = unpack(range);
  qkvi_range_unlock(range);
  return pages;
}

static uint64_t packed_begin(const qkv_page_range *range, uint32_t page) {
  uint64_t position = range->begin;
  for (uint32_t i = 0; i < page; i++) position += range->packed->pages[i].tokens;
  return position;
}

qkv_page_entry qkvi_range_copy_entry(qkv_page_range *range, uint32_t page) {
  const qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_relaxed);
  assert(page < range->count);
  return pages != NULL ? pages[page] : unpacked(range, page, packed_begin(range, page));
}

qkv_page_entry qkvi_range_peek(qkv_page_range *range, uint32_t page) {
  qkvi_range_lock(range);
  const qkv_page_entry entry = qkvi_range_copy_entry(range, page);
  qkvi_range_unlock(range);
  return entry;
}

uint32_t qkvi_range_find(qkv_page_range *range, uint32_t count, uint64_t position) {
  uint32_t low = 0, high = count;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (qkvi_range_span(range, middle).end > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

static void copy_entries(qkv_page_range *range, uint32_t first, uint32_t end, qkv_page_range *copy) {
  qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_relaxed);
  for (uint32_t i = first; i < end; i++) {
    if (pages[i].page != NULL) (void)qkvi_image_share(&pages[i].page_holders);
    if (pages[i].full != NULL) (void)qkvi_image_share(&pages[i].full_holders);
    qkvi_range_add(copy, &pages[i]);
  }
}

// Both are packed afterwards: a range of which nothing is in memory is copied for a fork that writes elsewhere, and
// may never be read.
static void copy_packed(const qkv_page_range *range, uint32_t first, uint32_t end, qkv_page_range *copy) {
  uint64_t position = packed_begin(range, first);
  for (uint32_t i = first; i < end; i++) {
    const qkv_page_entry entry = unpacked(range, i, position);
    qkvi_range_add(copy, &entry);
    position += entry.tokens;
  }
  qkvi_range_pack(copy);
}

qkv_page_range *qkvi_range_copy(qkv_page_range *range, uint32_t first, uint32_t end) {
  qkv_page_range *copy = qkvi_range_create(range->account);
  assert(first <= end && end <= range->count);
  grow(copy, end - first);
  qkvi_range_lock(range);
  if (range->packed != NULL) {
    copy_packed(range, first, end, copy);
  } else {
    copy_entries(range, first, end, copy);
  }
  atomic_store(&range->was_shared, true);
  atomic_init(&copy->was_shared, true);
  atomic_init(&copy->used_ms, atomic_load(&range->used_ms));
  qkvi_range_unlock(range);
  return copy;
}

qkv_page_range *qkvi_range_share(qkv_page_range *range) {
  atomic_store(&range->was_shared, true);
  atomic_fetch_add_explicit(&range->layers, 1, memory_order_relaxed);
  return range;
}

// ---- Trunks ----

// The place of the reach of so many pages, or where it would be.
static qkvi_trunk_reach **find_reach(qkv_page_range *range, uint32_t pages) {
  qkvi_trunk_reach **at = &range->reaches;
  while (*at != NULL && (*at)->pages > pages) at = &(*at)->next;
  return at;
}

static void add_reach(qkv_page_range *range, uint32_t pages) {
  qkvi_trunk_reach **at = find_reach(range, pages);
  if (*at == NULL || (*at)->pages != pages) {
    qkvi_trunk_reach *made = checked(malloc(sizeof *made));
    *made = (qkvi_trunk_reach){.next = *at, .pages = pages};
    *at = made;
  }
  (*at)->trunks++;
}

static void drop_reach(qkv_page_range *range, uint32_t pages) {
  qkvi_trunk_reach **at = find_reach(range, pages), *left = *at;
  assert(left != NULL && left->pages == pages && left->trunks > 0);
  if (--left->trunks > 0) return;
  *at = left->next;
  free(left);
}

uint64_t qkvi_range_join_trunk(qkv_page_range *range, uint32_t pages) {
  uint64_t stored = 0;
  qkvi_range_lock(range);
  assert(pages > 0 && pages <= range->count);
  (void)qkvi_range_share(range);
  atomic_fetch_add(&range->trunks, 1);
  add_reach(range, pages);
  const qkv_page_entry *entries = atomic_load_explicit(&range->pages, memory_order_relaxed);
  for (uint32_t i = 0; i < pages; i++)
    stored += entries != NULL ? entries[i].record_bytes : range->packed->pages[i].bytes;
  qkvi_range_unlock(range);
  return stored;
}

// No layer that has it alone with trunks leaves meanwhile, as that would take it out of memory.
qkv_page_range *qkvi_range_share_of_trunk(qkv_page_range *range) {
  qkvi_range_lock(range);
  assert(atomic_load(&range->trunks) > 0);
  (void)qkvi_range_share(range);
  qkvi_range_unlock(range);
  return range;
}

void qkvi_range_leave_memory(qkv_page_range *range, uint32_t count, qkv_arena *arena) {
  const uint32_t trunk_pages = qkvi_range_trunk_pages(range);
  const uint32_t kept = count > trunk_pages ? count : trunk_pages;
  if (range->count > kept) qkvi_range_cut(range, kept, arena);
  qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_relaxed);
  for (uint32_t i = count; pages != NULL && i < range->count; i++) {
    qkvi_leaving_image images[2];
    if (pages[i].page == NULL) continue;
    qkvi_range_evict(range, &pages[i], images);
    for (int k = 0; k < 2; k++) (void)qkvi_image_leave(arena, images[k].image, images[k].bytes, images[k].holders);
  }
  qkvi_range_pack(range);
}

// Under the lock, so that no layer is added between the count and what follows from it: where only trunks are left,
// the range leaves memory. `trunk_pages` is what a trunk had of it; 0: a layer leaves.
static void leave(qkv_page_range *left, uint32_t trunk_pages, qkv_arena *arena) {
  const uint32_t trunks = trunk_pages > 0 ? 1 : 0;
  qkvi_range_lock(left);
  if (trunks > 0) drop_reach(left, trunk_pages);
  const uint32_t trunks_left = atomic_fetch_sub(&left->trunks, trunks) - trunks,
                 layers_left = atomic_fetch_sub_explicit(&left->layers, 1, memory_order_acq_rel) - 1;
  assert((trunks_left == 0) == (left->reaches == NULL));
  if (layers_left > 0 && layers_left == trunks_left) qkvi_range_leave_memory(left, 0, arena);
  qkvi_range_unlock(left);
  if (layers_left > 0) return;
  qkvi_range_forget(left);
  qkvi_range_cut(left, 0, arena);
  (void)pthread_mutex_destroy(&left->lock);
  free(atomic_load(&left->pages));
  free(left->packed);
  free(left);
}

void qkvi_range_leave(qkv_page_range **range, qkv_arena *arena) {
  leave(*range, 0, arena);
  *range = NULL;
}

void qkvi_range_leave_trunk(qkv_page_range **range, uint32_t pages, qkv_arena *arena) {
  assert(pages > 0);
  leave(*range, pages, arena);
  *range = NULL;
}

// What is packed is not in memory.
qkvi_range_held qkvi_range_read_held(qkv_page_range *range, uint32_t pages) {
  qkvi_range_held held = {0};
  qkvi_range_lock(range);
  const qkv_page_entry *entries = atomic_load_explicit(&range->pages, memory_order_relaxed);
  for (uint32_t i = 0; i < pages; i++) {
    held.tokens += entries != NULL ? entries[i].tokens : range->packed->pages[i].tokens;
    if (entries == NULL || entries[i].page == NULL) continue;
    held.tokens_held += entries[i].tokens;
    held.bytes_held += qkv_arena_cost(entries[i].bytes);
  }
  qkvi_range_unlock(range);
  return held;
}

// ---- Pins ----

void qkvi_range_pin(qkv_page_range *range, int64_t used_ms) {
  int32_t pins = atomic_load_explicit(&range->pins, memory_order_relaxed);
  do {
    while (pins < 0) {
      (void)sched_yield();
      pins = atomic_load_explicit(&range->pins, memory_order_relaxed);
    }
  } while (!atomic_compare_exchange_weak_explicit(&range->pins, &pins, pins + 1, memory_order_acquire,
                                                  memory_order_relaxed));
  if (used_ms == 0 || !qkvi_range_is_shared(range)) return;
  if (atomic_load_explicit(&range->used_ms, memory_order_relaxed) < used_ms)
    atomic_store_explicit(&range->used_ms, used_ms, memory_order_relaxed);
}

void qkvi_range_unpin(qkv_page_range *range) {
  const int32_t before = atomic_fetch_sub_explicit(&range->pins, 1, memory_order_release);
  assert(before > 0);
  (void)before;
}

bool qkvi_range_seize(qkv_page_range *range) {
  int32_t own = 1;
  return atomic_compare_exchange_strong_explicit(&range->pins, &own, SEIZED, memory_order_acquire,
                                                 memory_order_relaxed);
}

void qkvi_range_release(qkv_page_range *range) {
  assert(atomic_load(&range->pins) == SEIZED);
  atomic_store_explicit(&range->pins, 1, memory_order_release);
}

void qkvi_range_lock(qkv_page_range *range) {
  const int failed = pthread_mutex_lock(&range->lock);
  assert(failed == 0);
  (void)failed;
}

void qkvi_range_unlock(qkv_page_range *range) {
  (void)pthread_mutex_unlock(&range->lock);
}

// ---- Pages ----

void qkvi_range_forget(qkv_page_range *range) {
  qkv_device *device = atomic_exchange_explicit(&range->device, NULL, memory_order_relaxed);
  if (device != NULL) qkv_device_forget(device, range);
}

void qkv_device_forget(qkv_device *device, const qkv_page_range *range) {
  qkv_device *each = device;
  do {
    each->forget(each, range);
    each = each->next == NULL ? device : each->next;
  } while (each != device);
}

// Serials change, so that a cut made from the image (layer_retier.h) is recognised as outdated.
void qkvi_range_evict(qkv_page_range *range, qkv_page_entry *entry, qkvi_leaving_image images[2]) {
  assert(entry->record != 0);
  qkvi_range_count(range, entry, -1);
  images[0] = (qkvi_leaving_image){entry->page, entry->bytes, entry->page_holders};
  images[1] = (qkvi_leaving_image){entry->full, entry->full_bytes, entry->full_holders};
  entry->page = entry->full = NULL;
  entry->page_holders = entry->full_holders = NULL;
  entry->full_bytes = 0;
  entry->bytes = entry->record_bytes;
  entry->lost = entry->record_lost;
  entry->serial = 0;
  qkvi_range_count(range, entry, 1);
  qkvi_range_forget(range);
}

void qkvi_range_count(qkv_page_range *range, const qkv_page_entry *entry, int sign) {
  const uint64_t by = sign > 0 ? 1 : UINT64_MAX;
  if (entry->page != NULL) {
    atomic_fetch_add_explicit(&range->bytes_coded, by * qkv_arena_cost(entry->bytes), memory_order_relaxed);
  } else {
    atomic_fetch_add_explicit(&range->tokens_cold, (uint32_t)by * entry->tokens, memory_order_release);
  }
  if (entry->full != NULL)
    atomic_fetch_add_explicit(&range->bytes_full, by * qkv_arena_cost(entry->full_bytes), memory_order_relaxed);
  atomic_fetch_add_explicit(&range->bytes_stored, by * entry->record_bytes, memory_order_relaxed);
}

void qkvi_range_add(qkv_page_range *range, const qkv_page_entry *entry) {
  assert(range->count < QKV_RANGE_PAGES && (range->count == 0 || range->coder == entry->coder));
  if (range->count == 0) {
    range->begin = entry->position;
    range->coder = entry->coder;
  }
  (void)unpack(range);
  grow(range, range->count + 1);
  atomic_load_explicit(&range->pages, memory_order_relaxed)[range->count++] = *entry;
  qkvi_range_count(range, entry, 1);
  qkv_account_add_ssd(range->account, entry->record_bytes);
}

// It stays packed.
static void cut_packed(qkv_page_range *range, uint32_t count) {
  struct qkvi_packed_pages *packed = range->packed;
  for (uint32_t i = count; i < range->count; i++) {
    const qkv_page_entry entry = unpacked(range, i, 0);
    qkvi_range_count(range, &entry, -1);
    qkv_account_drop_ssd(range->account, entry.record_bytes);
  }
  if (packed->mixed) memmove(packed->pages + count, record_highs(range), count * sizeof(uint32_t));
  range->count = count;
  if (count > 0) return;
  free(packed);
  range->packed = NULL;
}

void qkvi_range_cut(qkv_page_range *range, uint32_t count, qkv_arena *arena) {
  if (range->count > count && range->packed != NULL) return cut_packed(range, count);
  const qkv_page_entry *pages = atomic_load_explicit(&range->pages, memory_order_relaxed);
  while (range->count > count) {
    const qkv_page_entry *last = &pages[--range->count];
    qkvi_range_count(range, last, -1);
    qkv_account_drop_ssd(range->account, last->record_bytes);
    (void)qkvi_image_leave(arena, last->page, last->bytes, last->page_holders);
    (void)qkvi_image_leave(arena, last->full, last->full_bytes, last->full_holders);
  }
}
