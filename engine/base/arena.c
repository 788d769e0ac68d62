#include "engine/base/arena.h"

#include <assert.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>

// `reserved` never exceeds `claimed`: it grows after and shrinks before. The counters order nothing else, so
// they are relaxed.
struct qkv_arena {
  const char *budget_name;
  uint64_t bytes_max;
  _Atomic uint64_t claimed;   // bytes allocated or reserved; at most bytes_max
  _Atomic uint64_t reserved;  // bytes reserved
};

static void subtract(_Atomic uint64_t *counter, uint64_t bytes) {
  uint64_t before = atomic_fetch_sub_explicit(counter, bytes, memory_order_relaxed);
  assert(before >= bytes);
}

qkv_arena *qkv_arena_create(const char *budget_name, uint64_t bytes_max) {
  qkv_arena *arena = calloc(1, sizeof *arena);
  assert(arena != NULL);
  arena->budget_name = budget_name;
  arena->bytes_max = bytes_max;
  return arena;
}

void qkv_arena_destroy(qkv_arena **arena) {
  if (*arena == NULL) return;
  assert(atomic_load(&(*arena)->claimed) == 0 && atomic_load(&(*arena)->reserved) == 0);
  free(*arena);
  *arena = NULL;
}

size_t qkv_arena_cost(size_t bytes) {
  assert(bytes <= SIZE_MAX - (QKV_ARENA_ALIGN - 1));
  return (bytes + QKV_ARENA_ALIGN - 1) / QKV_ARENA_ALIGN * QKV_ARENA_ALIGN;
}

qkv_status qkv_arena_reserve(qkv_arena *arena, uint64_t bytes, qkv_error *error) {
  uint64_t claimed = atomic_load_explicit(&arena->claimed, memory_order_relaxed);
  do {
    assert(claimed <= arena->bytes_max);
    if (bytes > arena->bytes_max - claimed) {
      return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                      "%s is %" PRIu64 " bytes, %" PRIu64 " in use, %" PRIu64 " more are needed", arena->budget_name,
                      arena->bytes_max, claimed, bytes);
    }
  } while (!atomic_compare_exchange_weak_explicit(&arena->claimed, &claimed, claimed + bytes, memory_order_relaxed,
                                                  memory_order_relaxed));
  atomic_fetch_add_explicit(&arena->reserved, bytes, memory_order_relaxed);
  return QKV_OK;
}

void qkv_arena_unreserve(qkv_arena *arena, uint64_t bytes) {
  subtract(&arena->reserved, bytes);
  subtract(&arena->claimed, bytes);
}

void *qkv_arena_alloc(qkv_arena *arena, size_t bytes) {
  assert(bytes > 0);
  size_t cost = qkv_arena_cost(bytes);
  subtract(&arena->reserved, cost);
  void *block = aligned_alloc(QKV_ARENA_ALIGN, cost);
  assert(block != NULL);
  return block;
}

void qkv_arena_free(qkv_arena *arena, void *block, size_t bytes) {
  if (block == NULL) return;
  free(block);
  subtract(&arena->claimed, qkv_arena_cost(bytes));
}

void *qkv_arena_alloc_beside(size_t bytes) {
  assert(bytes > 0);
  void *block = aligned_alloc(QKV_ARENA_ALIGN, qkv_arena_cost(bytes));
  assert(block != NULL);
  return block;
}

void qkv_arena_free_beside(void *block) {
  free(block);
}

qkv_status qkv_arena_recount(qkv_arena *arena, size_t left, size_t made, qkv_error *error) {
  const size_t less = qkv_arena_cost(left), more = qkv_arena_cost(made);
  if (more > less) {
    QKV_TRY(qkv_arena_reserve(arena, more - less, error));
    subtract(&arena->reserved, more - less);
  } else {
    subtract(&arena->claimed, less - more);
  }
  return QKV_OK;
}

void qkv_arena_trim(void) {
  (void)malloc_trim(0);
}

qkv_arena_stats qkv_arena_read(const qkv_arena *arena) {
  // Two loads are no snapshot: while others work, the difference is right up to what moved in between.
  uint64_t reserved = atomic_load_explicit(&arena->reserved, memory_order_relaxed);
  uint64_t claimed = atomic_load_explicit(&arena->claimed, memory_order_relaxed);
  return (qkv_arena_stats){.bytes_max = arena->bytes_max,
                           .bytes_used = claimed > reserved ? claimed - reserved : 0,
                           .bytes_reserved = reserved};
}
