#include "engine/cache/session_slots.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#ifdef QKV_SANITIZED
enum { ITEMS = 1 };
#else
enum { ITEMS = 64 };
#endif

enum {
  ITEM_BITS = 6,
  CHUNKS_MAX = 1 << (QKV_SESSION_NUMBER_BITS - ITEM_BITS),
  SIZES = QKVI_SLOT_BYTES_MAX / QKVI_SLOT_ALIGN + 1
};

typedef struct chunk {
  uint64_t used;  // bit of each item
  qkv_arena *arena;
  struct chunk *next, *before;  // of this size, with free items
  uint32_t number, bytes;       // of an item
  uint8_t items[];
} chunk;

static const uint64_t full = ITEMS == 64 ? UINT64_MAX : (UINT64_C(1) << ITEMS % 64) - 1;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static chunk *free_chunks[SIZES];  // by size
// By number, from 1 on. Pages of both tables that are not written take no memory.
static _Atomic(chunk *) chunks[CHUNKS_MAX];
static uint32_t free_numbers[CHUNKS_MAX];
static uint32_t numbers_used, numbers_free;

static size_t rounded(size_t bytes) {
  return (bytes + QKVI_SLOT_ALIGN - 1) / QKVI_SLOT_ALIGN * QKVI_SLOT_ALIGN;
}

static chunk *chunk_of(const void *slot, size_t bytes, uint8_t item) {
  return (chunk *)((uintptr_t)slot - item * rounded(bytes) - offsetof(chunk, items));
}

static size_t chunk_bytes(size_t bytes) {
  return sizeof(chunk) + ITEMS * bytes;
}

static void link_chunk(chunk *made) {
  chunk **first = &free_chunks[made->bytes / QKVI_SLOT_ALIGN];
  made->next = *first;
  made->before = NULL;
  if (*first != NULL) (*first)->before = made;
  *first = made;
}

static void unlink_chunk(const chunk *left) {
  if (left->next != NULL) left->next->before = left->before;
  if (left->before != NULL) {
    left->before->next = left->next;
  } else {
    free_chunks[left->bytes / QKVI_SLOT_ALIGN] = left->next;
  }
}

static chunk *add_chunk(qkv_arena *arena, size_t bytes) {
  chunk *made = qkv_arena_alloc_overhead(arena, chunk_bytes(bytes));
  if (numbers_free == 0 && numbers_used == CHUNKS_MAX - 1) abort();
  const uint32_t number = numbers_free > 0 ? free_numbers[--numbers_free] : ++numbers_used;
  *made = (chunk){.arena = arena, .number = number, .bytes = (uint32_t)bytes};
  atomic_store_explicit(&chunks[number], made, memory_order_release);
  link_chunk(made);
  return made;
}

void *qkvi_session_slot_take(qkv_arena *arena, size_t bytes, uint8_t *item) {
  const size_t size = rounded(bytes);
  qkv_arena *whole = qkv_arena_whole(arena);  // which outlives its accounts
  assert(size <= QKVI_SLOT_BYTES_MAX);
  (void)pthread_mutex_lock(&lock);
  chunk *from = free_chunks[size / QKVI_SLOT_ALIGN];
  while (from != NULL && from->arena != whole) from = from->next;
  if (from == NULL) from = add_chunk(whole, size);
  *item = (uint8_t)__builtin_ctzll(~from->used);
  from->used |= UINT64_C(1) << *item;
  if (from->used == full) unlink_chunk(from);
  (void)pthread_mutex_unlock(&lock);
  return from->items + *item * size;
}

void qkvi_session_slot_give(void *slot, size_t bytes, uint8_t item) {
  chunk *from = chunk_of(slot, bytes, item);
  (void)pthread_mutex_lock(&lock);
  const bool was_full = from->used == full;
  from->used &= ~(UINT64_C(1) << item);
  if (was_full) link_chunk(from);
  if (from->used == 0) {
    unlink_chunk(from);
    free_numbers[numbers_free++] = from->number;
    atomic_store_explicit(&chunks[from->number], NULL, memory_order_relaxed);
    qkv_arena_free_overhead(from->arena, from, chunk_bytes(from->bytes));
  }
  (void)pthread_mutex_unlock(&lock);
}

uint32_t qkvi_session_slot_number(const void *slot, size_t bytes, uint8_t item) {
  return chunk_of(slot, bytes, item)->number << ITEM_BITS | item;
}

qkv_session *qkv_session_of(uint32_t number) {
  chunk *from = atomic_load_explicit(&chunks[number >> ITEM_BITS], memory_order_acquire);
  return (qkv_session *)(from->items + (size_t)(number & ((1u << ITEM_BITS) - 1)) * from->bytes);
}
