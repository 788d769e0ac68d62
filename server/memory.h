// Keeps the memory of the whole process within memory-budget and a tenth.
//
// Outside of the pages there are code, stacks, messages, calibrations, and what malloc keeps. By default glibc
// returns freed pages to the system and faults them in again for the next message. Told to keep them, it keeps what
// many threads have freed until malloc_trim is called. So that is called whenever more than a part of memory-budget
// lies idle. What remains is taken from the pages: the arena's limit (engine/base/arena.h) follows it, down soon, so
// that pages are evicted, and up slowly, so that they do not oscillate with each burst of messages. It stays above
// half of the budget, and above 32 MiB of it.
//
// Threads: setup before any other; tend by one thread at a time.
#ifndef QKV_SERVER_MEMORY_H
#define QKV_SERVER_MEMORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/cache/store.h"

typedef struct qkvi_memory {
  uint64_t used;  // bytes of the heap that are in use, or were: it follows what is freed some seconds behind
  int64_t left;   // bytes beyond what is in use that malloc did not give back the last time
  // Memory that is reserved elsewhere is not resident yet, but will be: the arena's limit is not raised meanwhile.
  _Atomic bool expects;
} qkvi_memory;

// What malloc keeps at the end of each arena: up to a 64th of memory-budget, 4 to 16 MiB.
void qkvi_memory_setup(int64_t budget);
// Returns to the system what malloc keeps beyond a 64th of memory-budget and, within some ten seconds, the memory of
// closed sessions; makes the heap's pages whole, and raises the arena's limit. Takes milliseconds; meant for four
// times a second.
void qkvi_memory_tend(qkvi_memory *memory, qkv_store *store);
// Resident bytes of this process, 0 where the system does not say.
int64_t qkvi_memory_resident(void);
// Of these, what is not in the heap of pages.
int64_t qkvi_memory_overhead(qkv_store *store);
// Whether `bytes` more may be allocated outside of the pages without lowering their limit below its minimum.
bool qkvi_memory_has_headroom(qkv_store *store, uint64_t bytes);
// Lowers the arena's limit where that has to be. Takes microseconds; meant for twenty times a second, and for when
// something large has come. Any thread.
void qkvi_memory_lower(qkv_store *store);
// The new limit of the pages in a budget, where it is `limit` now: `overhead` bytes are resident outside of the
// pages, and `most` bytes of the pages will be. Pure, for tests.
uint64_t qkvi_memory_limit(uint64_t budget, uint64_t limit, uint64_t overhead, uint64_t most);

#endif
