#include "storage/numbered.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = QKVI_NUMBERED_CHUNK, SLOTS_FIRST = 16 };
#define NONE UINT32_MAX

static void *checked(void *memory) {
  if (memory == NULL) abort();
  return memory;
}

void qkvi_numbered_init(qkvi_numbered *all, size_t size) {
  assert(size >= sizeof(uint64_t) && size % sizeof(uint64_t) == 0);
  *all = (qkvi_numbered){.size = size};
}

void qkvi_numbered_deinit(qkvi_numbered *all) {
  for (uint32_t i = 0; i < all->chunk_count; i++) free(all->chunks[i].items);
  free(all->chunks);
  free(all->table);
  *all = (qkvi_numbered){.size = all->size};
}

static void *item_at(const qkvi_numbered *all, uint32_t place) {
  return all->chunks[place / CHUNK].items + all->size * (place % CHUNK);
}

static uint64_t number_of(const void *item) {
  return *(const uint64_t *)item;
}

// ---- The table ----

static uint32_t home_of(const qkvi_numbered *all, uint64_t number) {
  const uint64_t hash = number * UINT64_C(0x9e3779b97f4a7c15) >> 32;
  return (uint32_t)(hash * all->slots >> 32);
}

static uint32_t behind(const qkvi_numbered *all, uint32_t slot) {
  return slot + 1 == all->slots ? 0 : slot + 1;
}

// The slot of the number, or the free one at which its chain ends.
static uint32_t slot_of(const qkvi_numbered *all, uint64_t number) {
  uint32_t slot = home_of(all, number);
  while (all->table[slot] != NONE && number_of(item_at(all, all->table[slot])) != number) slot = behind(all, slot);
  return slot;
}

static void resize(qkvi_numbered *all, uint32_t slots) {
  uint32_t *old = all->table;
  const uint32_t old_slots = all->slots;
  all->table = checked(malloc((size_t)slots * sizeof *all->table));
  memset(all->table, 0xff, (size_t)slots * sizeof *all->table);
  all->slots = slots;
  for (uint32_t i = 0; i < old_slots; i++) {
    if (old[i] != NONE) all->table[slot_of(all, number_of(item_at(all, old[i])))] = old[i];
  }
  free(old);
}

// Empties a slot and moves back what its chain had behind it.
static void clear_slot(qkvi_numbered *all, uint32_t hole) {
  for (uint32_t at = behind(all, hole); all->table[at] != NONE; at = behind(all, at)) {
    const uint32_t home = home_of(all, number_of(item_at(all, all->table[at])));
    const uint32_t from_home = at >= home ? at - home : at + (all->slots - home);
    const uint32_t from_hole = at >= hole ? at - hole : at + (all->slots - hole);
    if (from_home < from_hole) continue;  // its home lies behind the hole
    all->table[hole] = all->table[at];
    hole = at;
  }
  all->table[hole] = NONE;
}

// ---- Items ----

static uint32_t take_place(qkvi_numbered *all) {
  uint32_t at = all->free_from;
  while (at < all->chunk_count && all->chunks[at].used == UINT64_MAX) at++;
  all->free_from = at;
  if (at == all->chunk_count) {
    assert(all->chunk_count < NONE / CHUNK);
    const uint32_t more = all->chunk_count / 4 + 1;
    all->chunks = checked(realloc(all->chunks, (all->chunk_count + more) * sizeof *all->chunks));
    memset(all->chunks + at, 0, more * sizeof *all->chunks);
    all->chunk_count += more;
  }
  qkvi_numbered_chunk *chunk = &all->chunks[at];
  if (chunk->items == NULL) {
    chunk->items = checked(malloc(CHUNK * all->size));
    all->chunks_used++;
  }
  const uint32_t item = (uint32_t)__builtin_ctzll(~chunk->used);
  chunk->used |= UINT64_C(1) << item;
  return at * CHUNK + item;
}

static void give_place(qkvi_numbered *all, uint32_t place) {
  qkvi_numbered_chunk *chunk = &all->chunks[place / CHUNK];
  chunk->used &= ~(UINT64_C(1) << place % CHUNK);
  if (place / CHUNK < all->free_from) all->free_from = place / CHUNK;
  if (chunk->used > 0) return;
  free(chunk->items);
  chunk->items = NULL;
  all->chunks_used--;
}

void *qkvi_numbered_find(const qkvi_numbered *all, uint64_t number) {
  if (all->count == 0) return NULL;
  const uint32_t place = all->table[slot_of(all, number)];
  return place == NONE ? NULL : item_at(all, place);
}

void *qkvi_numbered_add(qkvi_numbered *all, uint64_t number) {
  if ((all->count + UINT64_C(1)) * 5 > (uint64_t)all->slots * 4)
    resize(all, all->slots < SLOTS_FIRST ? SLOTS_FIRST : all->slots + all->slots / 4);
  const uint32_t slot = slot_of(all, number), place = take_place(all);
  assert(all->table[slot] == NONE);
  void *item = memset(item_at(all, place), 0, all->size);
  *(uint64_t *)item = number;
  all->table[slot] = place;
  all->count++;
  return item;
}

void qkvi_numbered_remove(qkvi_numbered *all, const void *item) {
  const uint32_t slot = slot_of(all, number_of(item)), place = all->table[slot];
  assert(place != NONE && item_at(all, place) == item);
  clear_slot(all, slot);
  give_place(all, place);
  all->count--;
  const uint32_t half = all->slots / 2;
  if (half >= SLOTS_FIRST && all->count < half / 2) resize(all, half);
}

void *qkvi_numbered_next(const qkvi_numbered *all, uint32_t *place) {
  for (; *place / CHUNK < all->chunk_count; ++*place) {
    const uint64_t used = all->chunks[*place / CHUNK].used >> *place % CHUNK;
    if (used & 1) return item_at(all, (*place)++);
    if (used == 0) *place |= CHUNK - 1;
  }
  return NULL;
}

uint64_t qkvi_numbered_bytes(const qkvi_numbered *all) {
  return all->chunk_count * sizeof *all->chunks + (uint64_t)all->chunks_used * CHUNK * all->size +
         (uint64_t)all->slots * sizeof *all->table;
}
