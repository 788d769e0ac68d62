#include "engine/base/heap.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/base/heap_numa.h"
#include "engine/base/holes.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; EINVAL before
#endif

#define TILE ((uint64_t)2 << 20)
#define GROW (32 * TILE)              // by what the frontier moves
#define SPAN_MAX ((uint64_t)1 << 44)  // address space is cheap, but not endless
#define SPAN_FACTOR 4                 // of what is used at most: holes are address space
#define PAGES_MAX 512                 // of a tile
#define WORDS (PAGES_MAX / 64)
#define SPLIT_MAX 16384                 // tiles that are kept split: each may be a mapping of its own, of some 65000
#define NEARLY_FULL (TILE - TILE / 16)  // a tile that has more in use is one page again, and stays one
#define TEND_TILES 32                   // that become whole at once, at a third of a millisecond each

typedef struct heap_tile {
  uint64_t resident[WORDS];  // a bit for each of the system's pages that may be in memory
  uint32_t used;             // bytes in blocks
  bool split;                // part of it was returned: memory touched from now on is small pages
} heap_tile;

struct qkv_heap {
  pthread_mutex_t lock;
  uint8_t *span;           // address space, a multiple of TILE
  uint64_t span_bytes;     // 0: there is none
  uint64_t frontier;       // what of it can be used, a multiple of GROW
  qkvi_holes holes;        // below the frontier
  heap_tile *tiles;        // [span_bytes / TILE]
  uint64_t bytes_max;      // of blocks
  uint64_t used;           // in blocks of the span
  uint64_t outside;        // in those of malloc
  uint64_t resident;       // bytes of the pages that `tiles` has
  uint64_t overhead;       // of bytes_max, used outside of the heap
  uint64_t resident_next;  // above which holes are returned to the system
  uint64_t split;          // tiles that are
  uint64_t page;           // of the system
  bool huge;               // tiles are pages of 2 MiB
  const char *pages_text;
  void *mapping;
  uint64_t mapping_bytes;
};

// ---- Pages ----

static bool is_whole(const qkv_heap *heap, const heap_tile *tile) {
  return heap->huge && !tile->split;
}

// The resident pages among [first, end) of a tile, which become all or none where `now` is 1 or 0.
static uint64_t change_pages(heap_tile *tile, uint64_t first, uint64_t end, int now) {
  uint64_t count = 0;
  for (uint64_t word = first / 64; word * 64 < end; word++) {
    const uint64_t low = word * 64 < first ? first - word * 64 : 0;
    const uint64_t high = end - word * 64 < 64 ? end - word * 64 : 64;
    const uint64_t mask = (high == 64 ? UINT64_MAX : ((uint64_t)1 << high) - 1) & (UINT64_MAX << low);
    count += (uint64_t)__builtin_popcountll(tile->resident[word] & mask);
    if (now == 1) tile->resident[word] |= mask;
    if (now == 0) tile->resident[word] &= ~mask;
  }
  return count;
}

static void touch_pages(qkv_heap *heap, heap_tile *tile, uint64_t first, uint64_t end) {
  heap->resident += (end - first - change_pages(tile, first, end, 1)) * heap->page;
}

// Returns pages [first, end) of a tile to the system. What is locked in memory stays.
static void drop_pages(qkv_heap *heap, uint64_t index, uint64_t first, uint64_t end) {
  heap_tile *tile = &heap->tiles[index];
  if (change_pages(tile, first, end, -1) == 0) return;
  if (madvise(heap->span + index * TILE + first * heap->page, (end - first) * heap->page, MADV_DONTNEED) != 0) return;
  heap->resident -= change_pages(tile, first, end, 0) * heap->page;
}

// The kernel's own daemon (khugepaged) would make it one page again, with its holes.
static void split(qkv_heap *heap, uint64_t index) {
  if (!is_whole(heap, &heap->tiles[index])) return;
  heap->tiles[index].split = true;
  heap->split++;
  if (heap->split <= SPLIT_MAX) (void)madvise(heap->span + index * TILE, TILE, MADV_NOHUGEPAGE);
}

static void unite(qkv_heap *heap, uint64_t index) {
  if (!heap->tiles[index].split) return;
  heap->tiles[index].split = false;
  heap->split--;
  (void)madvise(heap->span + index * TILE, TILE, MADV_HUGEPAGE);
}

// ---- Blocks ----

static uint64_t rounded(size_t bytes) {
  assert(bytes > 0 && bytes <= SIZE_MAX - (QKV_HEAP_ALIGN - 1));
  return (bytes + QKV_HEAP_ALIGN - 1) / QKV_HEAP_ALIGN * QKV_HEAP_ALIGN;
}

// Counts [at, at + bytes) into its tiles, or out of them.
static void count_block(qkv_heap *heap, uint64_t at, uint64_t bytes, bool in) {
  for (uint64_t end = at + bytes, next; at < end; at = next) {
    heap_tile *tile = &heap->tiles[at / TILE];
    const uint64_t from = at % TILE;
    next = at - from + TILE < end ? at - from + TILE : end;
    if (!in) {
      assert(tile->used >= next - at);
      tile->used -= (uint32_t)(next - at);
      continue;
    }
    tile->used += (uint32_t)(next - at);
    if (is_whole(heap, tile)) {
      touch_pages(heap, tile, 0, TILE / heap->page);
    } else {
      touch_pages(heap, tile, from / heap->page, (from + (next - at) + heap->page - 1) / heap->page);
    }
  }
}

static void grow(qkv_heap *heap, uint64_t bytes) {
  const uint64_t more = (bytes + GROW - 1) / GROW * GROW;
  if (more > heap->span_bytes - heap->frontier) return;
  if (mprotect(heap->span + heap->frontier, more, PROT_READ | PROT_WRITE) != 0) return;
  qkvi_holes_give(&heap->holes, heap->frontier, more);
  heap->frontier += more;
}

// ---- Returning memory to the system ----

typedef struct giving {
  qkv_heap *heap;
  uint64_t resident_max;
  uint64_t used_max;  // of a tile of which parts may be returned
} giving;

static void give_tiles(qkv_heap *heap, uint64_t resident_max) {
  for (uint64_t i = heap->frontier / TILE; i-- > 0 && heap->resident > resident_max;) {
    if (heap->tiles[i].used > 0) continue;
    drop_pages(heap, i, 0, TILE / heap->page);
    unite(heap, i);
  }
}

static bool give_hole(void *context, uint64_t at, uint64_t bytes) {
  const giving *give = context;
  qkv_heap *heap = give->heap;
  const uint64_t begin = (at + heap->page - 1) / heap->page * heap->page,
                 end = (at + bytes) / heap->page * heap->page;
  for (uint64_t from = begin, next; from < end; from = next) {
    const uint64_t index = from / TILE;
    next = (index + 1) * TILE < end ? (index + 1) * TILE : end;
    if (heap->tiles[index].used > give->used_max) continue;
    const uint64_t before = heap->resident;
    drop_pages(heap, index, from % TILE / heap->page, (next - index * TILE) / heap->page);
    if (heap->resident < before) split(heap, index);
  }
  return heap->resident > give->resident_max;
}

// Whole tiles first, then parts of those of which least is used, and never of those that are nearly full.
static void give_back(qkv_heap *heap, uint64_t resident_max) {
  if (heap->resident <= resident_max) return;
  give_tiles(heap, resident_max);
  for (uint64_t part = 4; part <= 16 && heap->resident > resident_max; part *= 2) {
    giving give = {
        .heap = heap, .resident_max = resident_max, .used_max = part < 16 ? TILE / 16 * part : NEARLY_FULL};
    (void)qkvi_holes_each_back(&heap->holes, give_hole, &give);
  }
}

static uint64_t resident_limit(const qkv_heap *heap) {
  return heap->bytes_max - heap->overhead + heap->bytes_max / 16 + 2 * TILE;
}

// Returns memory where more is resident than may be, or than was left the last time and a 128th.
static void limit(qkv_heap *heap) {
  const uint64_t part = heap->bytes_max / 128;
  if (heap->resident <= heap->resident_next) return;
  give_back(heap, resident_limit(heap) - part);
  const uint64_t next = heap->resident + part;
  heap->resident_next = next > resident_limit(heap) ? next : resident_limit(heap);
}

// The first tile from `from` on that is split and full, or the frontier's.
static uint64_t next_full(const qkv_heap *heap, uint64_t from) {
  uint64_t i = heap->huge && heap->split > 0 ? from : heap->frontier / TILE;
  while (i < heap->frontier / TILE && !(heap->tiles[i].split && heap->tiles[i].used > NEARLY_FULL)) i++;
  return i;
}

// ---- The interface ----

void *qkv_heap_alloc(qkv_heap *heap, size_t bytes) {
  const uint64_t size = rounded(bytes);
  uint64_t at;
  (void)pthread_mutex_lock(&heap->lock);
  bool found = qkvi_holes_take(&heap->holes, size, &at);
  if (!found) {
    grow(heap, size);
    found = qkvi_holes_take(&heap->holes, size, &at);
  }
  if (found) {
    heap->used += size;
    count_block(heap, at, size, true);
    limit(heap);
  } else {
    heap->outside += size;
  }
  (void)pthread_mutex_unlock(&heap->lock);
  void *block = found ? heap->span + at : aligned_alloc(QKV_HEAP_ALIGN, size);
  assert(block != NULL);
  return block;
}

void qkv_heap_free(qkv_heap *heap, void *block, size_t bytes) {
  if (block == NULL) return;
  const uint64_t size = rounded(bytes), at = (uint64_t)((uintptr_t)block - (uintptr_t)heap->span);
  const bool inside = at < heap->span_bytes;
  (void)pthread_mutex_lock(&heap->lock);
  if (inside) {
    assert(at + size <= heap->frontier && heap->used >= size);
    qkvi_holes_give(&heap->holes, at, size);
    count_block(heap, at, size, false);
    heap->used -= size;
  } else {
    assert(heap->outside >= size);
    heap->outside -= size;
  }
  (void)pthread_mutex_unlock(&heap->lock);
  if (!inside) free(block);
}

void qkv_heap_set_overhead(qkv_heap *heap, uint64_t bytes) {
  (void)pthread_mutex_lock(&heap->lock);
  heap->overhead = bytes < heap->bytes_max ? bytes : heap->bytes_max;
  heap->resident_next = resident_limit(heap);
  limit(heap);
  (void)pthread_mutex_unlock(&heap->lock);
}

void qkv_heap_trim(qkv_heap *heap, uint64_t used) {
  (void)pthread_mutex_lock(&heap->lock);
  const uint64_t left = used > heap->used ? used : heap->used;
  give_back(heap, left + left / 32 + TILE);
  if (heap->resident <= resident_limit(heap)) heap->resident_next = resident_limit(heap);
  (void)pthread_mutex_unlock(&heap->lock);
}

void qkv_heap_tend(qkv_heap *heap) {
  uint64_t i = 0;
  for (size_t made = 0; made < TEND_TILES; made++, i++) {
    (void)pthread_mutex_lock(&heap->lock);  // for one tile at a time
    i = next_full(heap, i);
    const bool found = i < heap->frontier / TILE;
    if (found) {
      unite(heap, i);
      (void)madvise(heap->span + i * TILE, TILE, MADV_COLLAPSE);
      touch_pages(heap, &heap->tiles[i], 0, TILE / heap->page);
    }
    (void)pthread_mutex_unlock(&heap->lock);
    if (!found) return;
  }
}

qkv_heap_stats qkv_heap_read(qkv_heap *heap) {
  (void)pthread_mutex_lock(&heap->lock);
  const qkv_heap_stats stats = {.bytes_used = heap->used + heap->outside,
                                .bytes_resident = heap->resident + heap->outside,
                                .bytes_most = resident_limit(heap),
                                .bytes_outside = heap->outside,
                                .tiles_split = heap->split};
  (void)pthread_mutex_unlock(&heap->lock);
  return stats;
}

bool qkv_heap_is_huge(const qkv_heap *heap) {
  return heap->huge;
}

const char *qkv_heap_pages_text(const qkv_heap *heap) {
  return heap->pages_text;
}

static const char *check_tiles(const qkv_heap *heap) {
  uint64_t used = 0, resident = 0, split_tiles = 0;
  for (uint64_t i = 0; i < heap->frontier / TILE; i++) {
    const heap_tile *tile = &heap->tiles[i];
    if (tile->used > TILE) return "a tile has more in use than it has";
    for (size_t word = 0; word < WORDS; word++) resident += (uint64_t)__builtin_popcountll(tile->resident[word]);
    used += tile->used;
    split_tiles += tile->split;
  }
  if (used != heap->used) return "the tiles' bytes in use are not the heap's";
  if (resident * heap->page != heap->resident) return "the tiles' resident pages are not the heap's";
  return split_tiles == heap->split ? NULL : "the tiles that are split are not as many as the heap says";
}

const char *qkv_heap_validate(qkv_heap *heap) {
  (void)pthread_mutex_lock(&heap->lock);
  const char *reason = qkvi_holes_validate(&heap->holes);
  if (reason == NULL) reason = check_tiles(heap);
  if (reason == NULL && heap->used + heap->holes.bytes != heap->frontier) reason = "blocks and holes are not all";
  (void)pthread_mutex_unlock(&heap->lock);
  return reason;
}

// ---- The span ----

static bool read_line(const char *path, char *line, int size) {
  FILE *file = fopen(path, "re");
  if (file == NULL) return false;
  const bool any = fgets(line, size, file) != NULL;
  (void)fclose(file);
  return any;
}

// Sets `huge` and the sentence about it.
static void look_for_pages(qkv_heap *heap, qkv_heap_pages wanted) {
  char line[128];
  heap->page = (uint64_t)sysconf(_SC_PAGESIZE);
  assert(heap->page > 0 && TILE % heap->page == 0 && TILE / heap->page <= PAGES_MAX);
  if (wanted == QKV_HEAP_PAGES_SMALL) {
    heap->pages_text = "small pages, as asked";
  } else if (!read_line("/sys/kernel/mm/transparent_hugepage/enabled", line, sizeof line)) {
    heap->pages_text = "small pages: this kernel has no transparent huge pages";
  } else if (strstr(line, "[never]") != NULL) {
    heap->pages_text = "small pages: /sys/kernel/mm/transparent_hugepage/enabled is never";
  } else if (prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1) {
    heap->pages_text = "small pages: transparent huge pages are disabled for this process";
  } else if (read_line("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", line, sizeof line) &&
             strtoull(line, NULL, 10) != TILE) {
    heap->pages_text = "small pages: huge ones are not of 2 MiB";
  } else {
    heap->pages_text = "pages of 2 MiB where the kernel has some free";
    heap->huge = true;
  }
}

// Where address space is limited (ulimit -v), threads and messages need some, too.
static uint64_t span_max(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SPAN_MAX;
  return limit.rlim_cur / 4 < SPAN_MAX ? limit.rlim_cur / 4 : SPAN_MAX;
}

// As much address space as can be had, at least what one step of growing takes.
static void map_span(qkv_heap *heap) {
  const uint64_t most = span_max();
  uint64_t bytes = heap->bytes_max < most / SPAN_FACTOR ? heap->bytes_max * SPAN_FACTOR : most;
  for (bytes = (bytes + GROW - 1) / GROW * GROW; bytes >= GROW; bytes = bytes / 2 / GROW * GROW) {
    void *mapping = mmap(NULL, bytes + TILE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) continue;
    heap->tiles = calloc(bytes / TILE, sizeof *heap->tiles);
    if (heap->tiles == NULL) {
      (void)munmap(mapping, bytes + TILE);
      return;
    }
    heap->mapping = mapping;
    heap->mapping_bytes = bytes + TILE;
    heap->span = (uint8_t *)mapping + (TILE - (uintptr_t)mapping % TILE) % TILE;
    heap->span_bytes = bytes;
    (void)madvise(heap->span, bytes, heap->huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return;
  }
}

qkv_heap *qkv_heap_create(uint64_t bytes_max, const qkv_heap_config *config) {
  qkv_heap *made = calloc(1, sizeof *made);
  assert(made != NULL);
  (void)pthread_mutex_init(&made->lock, NULL);
  made->holes = QKVI_HOLES_NONE;
  made->bytes_max = bytes_max;
  made->resident_next = resident_limit(made);
  look_for_pages(made, config->pages);
  map_span(made);
  if (made->span != NULL) (void)qkvi_heap_place(made->span, made->span_bytes, config->numa, NULL);
  return made;
}

qkv_status qkv_heap_check(const qkv_heap_config *config, qkv_error *error) {
  void *memory = mmap(NULL, TILE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return QKV_OK;
  const qkv_status status = qkvi_heap_place(memory, TILE, config->numa, error);
  (void)munmap(memory, TILE);
  return status;
}

void qkv_heap_destroy(qkv_heap **heap) {
  qkv_heap *left = *heap;
  if (left == NULL) return;
  if (left->mapping != NULL) (void)munmap(left->mapping, left->mapping_bytes);
  qkvi_holes_deinit(&left->holes);
  free(left->tiles);
  (void)pthread_mutex_destroy(&left->lock);
  free(left);
  *heap = NULL;
}
