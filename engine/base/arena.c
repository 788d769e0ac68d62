#include "engine/base/arena.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// `reserved` never exceeds `claimed`: it grows after and shrinks before. The counters order nothing else, so
// they are relaxed.
struct qkv_arena {
  qkv_arena *parent;  // of an account; else NULL
  char *own_name;     // of an account: `budget_name`
  void *owner;        // likewise
  const char *budget_name;
  uint64_t bytes_max;         // of an account UINT64_MAX
  _Atomic uint64_t limit;     // bytes that may be claimed; at most bytes_max
  _Atomic uint64_t claimed;   // bytes allocated or reserved
  _Atomic uint64_t reserved;  // bytes reserved
  _Atomic uint64_t kept;      // free bytes that are kept for the caller that waits for them
  qkv_heap *heap;
  pthread_mutex_t lock;  // guards `elsewhere`, and what the heap is told of it and of the limit
  uint64_t elsewhere;    // bytes reserved for what is not in it
};

// Sanitizers watch what malloc gives out.
#ifdef QKV_SANITIZED
static const bool from_heap = false;
#else
static const bool from_heap = true;
#endif

static void subtract(_Atomic uint64_t *counter, uint64_t bytes) {
  uint64_t before = atomic_fetch_sub_explicit(counter, bytes, memory_order_relaxed);
  assert(before >= bytes);
}

qkv_arena *qkv_arena_create_on(const qkv_heap_config *config, const char *budget_name, uint64_t bytes_max) {
  qkv_arena *arena = calloc(1, sizeof *arena);
  assert(arena != NULL);
  arena->budget_name = budget_name;
  arena->bytes_max = bytes_max;
  atomic_init(&arena->limit, bytes_max);
  (void)pthread_mutex_init(&arena->lock, NULL);
  arena->heap = qkv_heap_create(from_heap ? bytes_max : 0, config);
  return arena;
}

qkv_arena *qkv_arena_create(const char *budget_name, uint64_t bytes_max) {
  return qkv_arena_create_on(&(qkv_heap_config){0}, budget_name, bytes_max);
}

qkv_arena *qkv_arena_create_account(qkv_arena *arena, const char *budget_name, void *owner) {
  qkv_arena *account = calloc(1, sizeof *account);
  assert(account != NULL && arena->parent == NULL);
  account->parent = arena;
  account->owner = owner;
  account->budget_name = account->own_name = strdup(budget_name);
  assert(account->own_name != NULL);
  account->bytes_max = UINT64_MAX;
  atomic_init(&account->limit, UINT64_MAX);
  (void)pthread_mutex_init(&account->lock, NULL);
  return account;
}

qkv_arena *qkv_arena_whole(qkv_arena *arena) {
  return arena->parent != NULL ? arena->parent : arena;
}

void *qkv_arena_owner(const qkv_arena *arena) {
  return arena->owner;
}

void qkv_arena_set_ceiling(qkv_arena *account, uint64_t bytes) {
  assert(account->parent != NULL);
  atomic_store_explicit(&account->limit, bytes, memory_order_relaxed);
}

void qkv_arena_destroy(qkv_arena **arena) {
  if (*arena == NULL) return;
  assert(atomic_load(&(*arena)->claimed) == 0 && atomic_load(&(*arena)->reserved) == 0);
  if ((*arena)->heap != NULL) qkv_heap_destroy(&(*arena)->heap);
  free((*arena)->own_name);
  (void)pthread_mutex_destroy(&(*arena)->lock);
  free(*arena);
  *arena = NULL;
}

size_t qkv_arena_cost(size_t bytes) {
  assert(bytes <= SIZE_MAX - (QKV_ARENA_ALIGN - 1));
  return (bytes + QKV_ARENA_ALIGN - 1) / QKV_ARENA_ALIGN * QKV_ARENA_ALIGN;
}

static qkv_status refuse(const qkv_arena *arena, uint64_t limit, uint64_t used, uint64_t bytes, qkv_error *error) {
  if (limit == arena->bytes_max || arena->parent != NULL)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "%s is %" PRIu64 " bytes, %" PRIu64 " in use, %" PRIu64 " more are needed", arena->budget_name,
                    limit, used, bytes);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "%s is %" PRIu64 " bytes, %" PRIu64 " of them for memory outside pages, %" PRIu64
                  " in use, %" PRIu64 " more are needed",
                  arena->budget_name, arena->bytes_max, arena->bytes_max - limit, used, bytes);
}

// Up to the limit and `beyond`.
static qkv_status claim(qkv_arena *arena, uint64_t beyond, uint64_t kept, uint64_t bytes, qkv_error *error) {
  const uint64_t limit = atomic_load_explicit(&arena->limit, memory_order_relaxed) + beyond;
  uint64_t claimed = atomic_load_explicit(&arena->claimed, memory_order_relaxed);
  do {
    const uint64_t left = limit > claimed ? limit - claimed : 0, mine = left > kept ? left - kept : 0;
    if (bytes > mine) return refuse(arena, limit - beyond, left > 0 ? limit - mine : claimed, bytes, error);
  } while (!atomic_compare_exchange_weak_explicit(&arena->claimed, &claimed, claimed + bytes, memory_order_relaxed,
                                                  memory_order_relaxed));
  return QKV_OK;
}

static qkv_status reserve(qkv_arena *arena, uint64_t beyond, uint64_t kept, uint64_t bytes, qkv_error *error) {
  QKV_TRY(claim(arena, beyond, kept, bytes, error));
  atomic_fetch_add_explicit(&arena->reserved, bytes, memory_order_relaxed);
  return QKV_OK;
}

// What an account has claimed becomes reserved there, unless its arena has refused as much.
static qkv_status reserve_claimed(qkv_arena *account, uint64_t bytes, qkv_status status) {
  if (status == QKV_OK) atomic_fetch_add_explicit(&account->reserved, bytes, memory_order_relaxed);
  if (status != QKV_OK) subtract(&account->claimed, bytes);
  return status;
}

qkv_status qkv_arena_reserve(qkv_arena *arena, uint64_t bytes, qkv_error *error) {
  if (arena->parent != NULL) return qkv_arena_reserve_in(arena, NULL, bytes, error);
  return reserve(arena, 0, atomic_load_explicit(&arena->kept, memory_order_relaxed), bytes, error);
}

qkv_status qkv_arena_reserve_in(qkv_arena *arena, uint64_t *headroom, uint64_t bytes, qkv_error *error) {
  if (arena->parent != NULL) {
    QKV_TRY(claim(arena, 0, 0, bytes, error));
    return reserve_claimed(arena, bytes, qkv_arena_reserve_in(arena->parent, headroom, bytes, error));
  }
  const uint64_t held = headroom == NULL ? 0 : *headroom, taken = held < bytes ? held : bytes;
  QKV_TRY(qkv_arena_reserve(arena, bytes - taken, error));
  if (headroom != NULL) *headroom -= taken;
  return QKV_OK;
}

qkv_status qkv_arena_reserve_next(qkv_arena *arena, uint64_t bytes) {
  const qkv_status status = reserve(arena, 0, 0, bytes, NULL);
  atomic_store_explicit(&arena->kept, status == QKV_OK ? 0 : bytes, memory_order_relaxed);
  return status;
}

void qkv_arena_let_go(qkv_arena *arena) {
  atomic_store_explicit(&arena->kept, 0, memory_order_relaxed);
}

void qkv_arena_unreserve(qkv_arena *arena, uint64_t bytes) {
  if (arena->parent != NULL) qkv_arena_unreserve(arena->parent, bytes);
  subtract(&arena->reserved, bytes);
  subtract(&arena->claimed, bytes);
}

// With the lock.
static void tell_heap(qkv_arena *arena) {
  const uint64_t limit = atomic_load_explicit(&arena->limit, memory_order_relaxed);
  qkv_heap_set_overhead(arena->heap, arena->bytes_max - limit + arena->elsewhere);
}

void qkv_arena_move_elsewhere(qkv_arena *arena, uint64_t bytes) {
  qkv_arena *whole = qkv_arena_whole(arena);
  (void)pthread_mutex_lock(&whole->lock);
  whole->elsewhere += bytes;
  tell_heap(whole);
  (void)pthread_mutex_unlock(&whole->lock);
}

qkv_status qkv_arena_reserve_elsewhere(qkv_arena *arena, uint64_t bytes, qkv_error *error) {
  QKV_TRY(qkv_arena_reserve(arena, bytes, error));
  qkv_arena_move_elsewhere(arena, bytes);
  return QKV_OK;
}

void qkv_arena_unreserve_elsewhere(qkv_arena *arena, uint64_t bytes) {
  qkv_arena *whole = qkv_arena_whole(arena);
  (void)pthread_mutex_lock(&whole->lock);
  assert(whole->elsewhere >= bytes);
  whole->elsewhere -= bytes;
  tell_heap(whole);
  (void)pthread_mutex_unlock(&whole->lock);
  qkv_arena_unreserve(arena, bytes);
}

void qkv_arena_set_limit(qkv_arena *arena, uint64_t bytes) {
  const uint64_t limit = bytes < arena->bytes_max ? bytes : arena->bytes_max;
  (void)pthread_mutex_lock(&arena->lock);
  atomic_store_explicit(&arena->limit, limit, memory_order_relaxed);
  tell_heap(arena);
  (void)pthread_mutex_unlock(&arena->lock);
}

void qkv_arena_spend(qkv_arena *arena, size_t bytes) {
  subtract(&arena->reserved, qkv_arena_cost(bytes));
  if (arena->parent != NULL) subtract(&arena->parent->reserved, qkv_arena_cost(bytes));
}

void qkv_arena_unspend(qkv_arena *arena, size_t bytes) {
  if (arena->parent != NULL) subtract(&arena->parent->claimed, qkv_arena_cost(bytes));
  subtract(&arena->claimed, qkv_arena_cost(bytes));
}

void *qkv_arena_alloc(qkv_arena *arena, size_t bytes) {
  qkv_arena_spend(arena, bytes);
  return qkv_arena_alloc_overhead(arena, bytes);
}

void qkv_arena_free(qkv_arena *arena, void *block, size_t bytes) {
  if (block == NULL) return;
  qkv_arena_free_overhead(arena, block, bytes);
  qkv_arena_unspend(arena, bytes);
}

void *qkv_arena_alloc_overhead(qkv_arena *arena, size_t bytes) {
  assert(bytes > 0);
  if (from_heap) return qkv_heap_alloc(qkv_arena_heap(arena), bytes);
  void *block = aligned_alloc(QKV_ARENA_ALIGN, qkv_arena_cost(bytes));
  assert(block != NULL);
  return block;
}

void qkv_arena_free_overhead(qkv_arena *arena, void *block, size_t bytes) {
  if (from_heap) {
    qkv_heap_free(qkv_arena_heap(arena), block, bytes);
  } else {
    free(block);
  }
}

qkv_status qkv_arena_recount(qkv_arena *arena, uint64_t *headroom, size_t left, size_t made, qkv_error *error) {
  const size_t less = qkv_arena_cost(left), more = qkv_arena_cost(made);
  if (more > less) {
    QKV_TRY(qkv_arena_reserve_in(arena, headroom, more - less, error));
    subtract(&arena->reserved, more - less);
    if (arena->parent != NULL) subtract(&arena->parent->reserved, more - less);
  } else {
    if (arena->parent != NULL) subtract(&arena->parent->claimed, less - more);
    subtract(&arena->claimed, less - more);
  }
  return QKV_OK;
}

enum { OVERDRAFT_PART = 256, OVERDRAFT_LEAST = 1 << 20 };

qkv_status qkv_arena_overdraw(qkv_arena *arena, uint64_t bytes, qkv_error *error) {
  if (arena->parent != NULL) {
    QKV_TRY(claim(arena, 0, 0, bytes, error));
    return reserve_claimed(arena, bytes, qkv_arena_overdraw(arena->parent, bytes, error));
  }
  const uint64_t part = arena->bytes_max / OVERDRAFT_PART, beyond = part > OVERDRAFT_LEAST ? part : OVERDRAFT_LEAST;
  return reserve(arena, beyond, 0, bytes, error);
}

qkv_heap *qkv_arena_heap(const qkv_arena *arena) {
  return arena->parent != NULL ? arena->parent->heap : arena->heap;
}

qkv_arena_stats qkv_arena_read(const qkv_arena *arena) {
  // Two loads are no snapshot: while others work, the difference is right up to what moved in between.
  uint64_t reserved = atomic_load_explicit(&arena->reserved, memory_order_relaxed);
  uint64_t claimed = atomic_load_explicit(&arena->claimed, memory_order_relaxed);
  return (qkv_arena_stats){.bytes_max = arena->bytes_max,
                           .bytes_limit = atomic_load_explicit(&arena->limit, memory_order_relaxed),
                           .bytes_used = claimed > reserved ? claimed - reserved : 0,
                           .bytes_reserved = reserved};
}
