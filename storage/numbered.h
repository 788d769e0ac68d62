// Items of one size that are found by a number, their first field: sessions, of which there may be very many.
//
//   table (32-bit places, open addressing, at most 4/5 full)      chunks of 64 items, whose addresses stay
//   [ . | 35 | . | 0 | 7 | ... ]  ────────────────────────────►  [ number ... | number ... | free | ... ]
//
// So an item takes its size and 5 to 7 bytes. A chunk of which all items are free is given back.
// Threads: guarded by the owner's lock; functions that take a const table may run together.
#ifndef QKV_STORAGE_NUMBERED_H
#define QKV_STORAGE_NUMBERED_H

#include <stddef.h>
#include <stdint.h>

enum { QKVI_NUMBERED_CHUNK = 64 };

typedef struct qkvi_numbered_chunk {
  uint8_t *items;  // NULL: none
  uint64_t used;   // bit of each item
} qkvi_numbered_chunk;

typedef struct qkvi_numbered {
  size_t size;  // of an item
  qkvi_numbered_chunk *chunks;
  uint32_t chunk_count, chunks_used;
  uint32_t free_from;  // no chunk before it has a free item
  uint32_t *table;
  uint32_t slots, count;
} qkvi_numbered;

// `size` is a multiple of 8.
void qkvi_numbered_init(qkvi_numbered *all, size_t size);
void qkvi_numbered_deinit(qkvi_numbered *all);
// NULL: there is none.
void *qkvi_numbered_find(const qkvi_numbered *all, uint64_t number);
// Zeros, but for its number, of which there is none yet (asserted). Aborts without memory.
void *qkvi_numbered_add(qkvi_numbered *all, uint64_t number);
void qkvi_numbered_remove(qkvi_numbered *all, const void *item);
// The next one at or behind `*place`, which begins at 0 and is moved on, in no order; NULL: there are no more. What
// was given may be removed.
void *qkvi_numbered_next(const qkvi_numbered *all, uint32_t *place);
// Bytes of memory that it takes.
uint64_t qkvi_numbered_bytes(const qkvi_numbered *all);

#endif
