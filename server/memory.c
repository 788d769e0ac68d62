#include "server/memory.h"

#include <malloc.h>
#include <stdio.h>
#include <unistd.h>

#include "engine/base/cpu.h"
#include "server/shared_memory/mapping.h"

enum {
  ARENAS_LEAST = 2,
  BUDGET_PARTS = 64,
  KEPT_MIN = 8 << 20,
  FORGET_PARTS = 32,
  FREED_PARTS = 20,
  HOLES_MIN = 4 << 20
};

// The process takes at most the budget and a tenth, less a spare for allocations between two checks. The pages' limit
// is not lowered below LIMIT_LEAST, or half of the budget. It is raised by a 256th of the budget each time: from half
// of it to all in half a minute.
enum { RULE_PARTS = 10, SPARE_PARTS = 64, SPARE_LEAST = 4 << 20, LIMIT_LEAST = 32 << 20, RAISE_PARTS = 256 };

// Limits of the free memory at an arena's end, which malloc_trim does not release except in the first arena. More
// than the 64 MiB that a heap of another arena has at most would never be released. 4 MiB are enough for messages of
// 1 MiB to go at full speed, 1.5 to 2 times that of glibc's own 128 KiB; docs/performance.md.
static const int64_t TOP_MIN = 4 << 20, TOP_MAX = 16 << 20;

void qkvi_memory_setup(int64_t budget) {
  int64_t top = budget / BUDGET_PARTS;
  if (top < TOP_MIN) top = TOP_MIN;
  if (top > TOP_MAX) top = TOP_MAX;
  mallopt(M_TRIM_THRESHOLD, (int)top);
  mallopt(M_TOP_PAD, (int)(top / 2));
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  // Each arena keeps some freed memory: by default there are eight arenas for each processor.
  const int cpus = qkv_cpu_count();
  mallopt(M_ARENA_MAX, cpus < ARENAS_LEAST ? ARENAS_LEAST : cpus);
}

int64_t qkvi_memory_resident(void) {
  long long total = 0, resident = 0;
  FILE *file = fopen("/proc/self/statm", "re");
  if (file == NULL) return 0;
  if (fscanf(file, "%lld %lld", &total, &resident) != 2) resident = 0;  // NOLINT(cert-err34-c): the kernel's text
  fclose(file);
  return (int64_t)resident * sysconf(_SC_PAGESIZE);
}

static uint64_t span_resident(qkv_heap *heap) {
  const qkv_heap_stats stats = qkv_heap_read(heap);
  return stats.bytes_resident - stats.bytes_outside;
}

// Bytes of clients' shared memory (server/shared_memory/mapping.h), which count as theirs.
static int64_t shared_resident(void) {
  char line[128];
  long long kib = 0;
  FILE *file = qkvi_mapping_total() > 0 ? fopen("/proc/self/status", "re") : NULL;
  if (file == NULL) return 0;
  while (fgets(line, sizeof line, file) != NULL) {
    if (sscanf(line, "RssShmem: %lld", &kib) == 1) break;  // NOLINT(cert-err34-c): the kernel's text
  }
  fclose(file);
  return (int64_t)kib * 1024;
}

int64_t qkvi_memory_overhead(qkv_store *store) {
  const int64_t span = (int64_t)span_resident(qkv_arena_heap(qkv_store_arena(store)));
  const int64_t all = qkvi_memory_resident() - shared_resident();
  return all > span ? all - span : 0;
}

// Resident bytes outside of the heap and of malloc's blocks: what malloc keeps, code and stacks.
static int64_t idle_bytes(qkv_store *store) {
  const struct mallinfo2 info = mallinfo2();
  const int64_t used = (int64_t)(info.uordblks + info.hblkhd), overhead = qkvi_memory_overhead(store);
  return overhead > used ? overhead - used : 0;
}

// Freed memory is returned a 20th at a time: half of it after 3.5 seconds, all but an eighth after ten. Allocations
// until then find pages that need not be cleared, for which the host of a virtual machine may first have to find
// memory: at 0.5 GB/s on one, docs/storage.md.
static void trim_heap(qkvi_memory *memory, qkv_heap *heap) {
  const qkv_heap_stats stats = qkv_heap_read(heap);
  if (memory->used > stats.bytes_used) memory->used -= (memory->used - stats.bytes_used) / FREED_PARTS;
  if (memory->used < stats.bytes_used) memory->used = stats.bytes_used;
  if (stats.bytes_resident > memory->used + memory->used / 8 + HOLES_MIN) qkv_heap_trim(heap, memory->used);
}

static uint64_t limit_least(uint64_t budget) {
  const uint64_t half = budget / 2, little = budget < LIMIT_LEAST ? budget : LIMIT_LEAST;
  return half > little ? half : little;
}

static uint64_t limit_after(uint64_t limit, uint64_t lowered, uint64_t least) {
  return limit > least + lowered ? limit - lowered : least;
}

uint64_t qkvi_memory_limit(uint64_t budget, uint64_t limit, uint64_t overhead, uint64_t most) {
  const uint64_t whole = budget + budget / RULE_PARTS, spare = SPARE_LEAST + budget / SPARE_PARTS;
  const uint64_t all = overhead + most + spare;
  if (all > whole) return limit_after(limit, all - whole, limit_least(budget));
  const uint64_t step = budget / RAISE_PARTS, left = whole - all, more = left < step ? left : step;
  return limit + more < budget ? limit + more : budget;
}

// The limit with `more` bytes outside of the pages in addition to the present ones.
static uint64_t limit_with(qkv_store *store, uint64_t more) {
  qkv_arena *arena = qkv_store_arena(store);
  const qkv_arena_stats memory = qkv_arena_read(arena);
  const uint64_t most = qkv_heap_read(qkv_arena_heap(arena)).bytes_most,
                 overhead = (uint64_t)qkvi_memory_overhead(store);
  return qkvi_memory_limit(memory.bytes_max, memory.bytes_limit, overhead + more, most);
}

// Sanitizers keep resident tables, too, and no page lies in the heap.
#ifdef QKV_SANITIZED
static const bool follows = false;
#else
static const bool follows = true;
#endif

bool qkvi_memory_has_headroom(qkv_store *store, uint64_t bytes) {
  const uint64_t budget = qkv_arena_read(qkv_store_arena(store)).bytes_max;
  return !follows || limit_with(store, bytes) > limit_least(budget);
}

static uint64_t limit_of(qkv_store *store) {
  return qkv_arena_read(qkv_store_arena(store)).bytes_limit;
}

void qkvi_memory_lower(qkv_store *store) {
  const uint64_t before = limit_of(store), now = follows ? limit_with(store, 0) : before;
  qkv_arena_set_limit(qkv_store_arena(store), now < before ? now : before);
}

static void raise_limit(const qkvi_memory *memory, qkv_store *store) {
  const uint64_t before = limit_of(store), now = follows ? limit_with(store, 0) : before;
  if (now > before && !atomic_load(&memory->expects)) qkv_arena_set_limit(qkv_store_arena(store), now);
}

void qkvi_memory_tend(qkvi_memory *memory, qkv_store *store) {
  qkv_heap *heap = qkv_arena_heap(qkv_store_arena(store));
  int64_t kept_max = (int64_t)(qkv_arena_read(qkv_store_arena(store)).bytes_max / BUDGET_PARTS);
  if (kept_max < KEPT_MIN) kept_max = KEPT_MIN;
  qkv_heap_tend(heap);
  trim_heap(memory, heap);
  // Memory that lay between blocks in use then may be released now.
  memory->left -= memory->left / FORGET_PARTS;
  int64_t idle = idle_bytes(store);
  if (idle > memory->left + kept_max) {
    (void)malloc_trim(0);
    idle = memory->left = idle_bytes(store);
  }
  if (idle < memory->left) memory->left = idle;
  qkvi_memory_lower(store);
  raise_limit(memory, store);
}
