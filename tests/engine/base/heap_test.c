// The heap itself, in sanitized builds too, where arenas do without it.
#include "engine/base/heap.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB ((uint64_t)1 << 20)
#define TILE (2 * MIB)

static qkv_heap *make(uint64_t bytes_max) {
  return qkv_heap_create(bytes_max, &(qkv_heap_config){0});
}

static void assert_valid(qkv_heap *heap) {
  const char *reason = qkv_heap_validate(heap);
  if (reason != NULL) fail_msg("%s", reason);
}

static uint64_t random_below(uint64_t *seed, uint64_t bound) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (*seed >> 33) % bound;
}

static void blocks_are_aligned_and_apart(void **state) {
  (void)state;
  static const size_t sizes[] = {1, 64, 65, 4096, 69632, 1 << 20, 5 << 20, 100 << 20, 640};
  enum { COUNT = sizeof sizes / sizeof *sizes };
  uint8_t *blocks[COUNT];
  qkv_heap *heap = make(256 * MIB);
  for (size_t i = 0; i < COUNT; i++) {
    blocks[i] = qkv_heap_alloc(heap, sizes[i]);
    assert_int_equal((uintptr_t)blocks[i] % QKV_HEAP_ALIGN, 0);
    memset(blocks[i], (int)i + 1, sizes[i]);
    assert_valid(heap);
  }
  for (size_t i = 0; i < COUNT; i++) {
    for (size_t at = 0; at < sizes[i]; at += 61) assert_int_equal(blocks[i][at], i + 1);
  }
  for (size_t i = 0; i < COUNT; i++) qkv_heap_free(heap, blocks[i], sizes[i]);
  qkv_heap_free(heap, NULL, 1);
  assert_valid(heap);
  assert_int_equal(qkv_heap_read(heap).bytes_used, 0);
  qkv_heap_trim(heap, 0);
  assert_true(qkv_heap_read(heap).bytes_resident <= TILE);
  assert_valid(heap);
  qkv_heap_destroy(&heap);
  assert_null(heap);
}

// More than there is address space for: four times as much as was said.
static void what_does_not_fit_comes_from_elsewhere(void **state) {
  (void)state;
  enum { BLOCKS = 80 };
  const size_t bytes = 1 << 20;
  uint8_t *blocks[BLOCKS];
  qkv_heap *heap = make(MIB);
  for (size_t i = 0; i < BLOCKS; i++) {
    blocks[i] = qkv_heap_alloc(heap, bytes);
    memset(blocks[i], (int)i, 1000);
  }
  assert_valid(heap);
  assert_int_equal(qkv_heap_read(heap).bytes_used, BLOCKS * bytes);
  for (size_t i = 0; i < BLOCKS; i++) {
    assert_int_equal(blocks[i][999], i);
    qkv_heap_free(heap, blocks[i], bytes);
  }
  assert_int_equal(qkv_heap_read(heap).bytes_used, 0);
  qkv_heap_destroy(&heap);
}

#ifdef QKV_SANITIZED
static const bool limits_address_space = false;  // they need terabytes themselves
#else
static const bool limits_address_space = true;
#endif

// qemu's emulation of a processor for single programs keeps no limit of the address space, takes memory for every
// page of it, and refuses mincore where nothing may be read.
static bool system_is_emulated(void) {
  unsigned char in_core[1];
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  void *closed = mmap(NULL, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(closed != MAP_FAILED);
  const bool emulated = mincore(closed, page, in_core) != 0;
  assert_int_equal(munmap(closed, page), 0);
  return emulated;
}

// In a process of its own, which may have 1 GiB of addresses.
static void without_address_space(void **state) {
  (void)state;
  if (!limits_address_space || system_is_emulated()) skip();
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    const struct rlimit limit = {MIB << 10, MIB << 10};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(1);
    qkv_heap *heap = make(MIB << 20);
    void *block = qkv_heap_alloc(heap, 100000);
    memset(block, 1, 100000);
    qkv_heap_free(heap, block, 100000);
    _exit(qkv_heap_read(heap).bytes_used == 0 && qkv_heap_validate(heap) == NULL ? 0 : 2);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

static void free_twice(void) {
  qkv_heap *heap = make(MIB);
  void *block = qkv_heap_alloc(heap, 640);
  qkv_heap_free(heap, block, 640);
  qkv_heap_free(heap, block, 640);
}

static void free_more(void) {
  qkv_heap *heap = make(MIB);
  void *block = qkv_heap_alloc(heap, 640);
  qkv_heap_free(heap, block, 704);
}

static void test_misuse_aborts(void **state) {
  (void)state;
  void (*const misuses[])(void) = {free_twice, free_more};
  for (size_t i = 0; i < sizeof misuses / sizeof *misuses; i++) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
      (void)signal(SIGABRT, SIG_DFL);
      (void)close(STDERR_FILENO);
      misuses[i]();
      _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
  }
}

// ---- Resident memory ----

// Of the heap's address space, which begins with the tile of its first block, by what the kernel says.
static uint64_t resident_of(const void *first, uint64_t bytes_max) {
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), pages = 4 * bytes_max / page;
  void *begin = (void *)((uintptr_t)first / TILE * TILE);
  unsigned char *in_core = malloc(pages);
  uint64_t count = 0;
  assert_non_null(in_core);
  assert_int_equal(mincore(begin, 4 * bytes_max, in_core), 0);
  for (uint64_t i = 0; i < pages; i++) count += in_core[i] & 1;
  free(in_core);
  return count * page;
}

enum { SLOTS = 16384 };

typedef struct slot {
  uint8_t *block;
  size_t bytes;
} slot;

typedef struct pile {
  qkv_heap *heap;
  slot *slots;
  size_t count;
  uint64_t used, seed;
} pile;

// What pages of 8 heads of 64 to 256 coordinates at 1 to 4 bits have, some of them mixed, exact rows in between, and
// averages.
static size_t page_like(uint64_t *seed) {
  const uint64_t dim = (uint64_t)64 << random_below(seed, 3), kind = random_below(seed, 16);
  if (kind == 0) return 64 * 8 * dim * 4;
  if (kind < 3) return 1088;
  const uint64_t tier = 1 + random_below(seed, 4), lowered = random_below(seed, 4);
  return 64 + 8 * (448 + 16 * dim * tier - 2 * dim * (tier > 1 ? lowered : 0));
}

static void put(pile *p, size_t bytes) {
  assert_true(p->count < SLOTS);
  slot *made = &p->slots[p->count++];
  *made = (slot){.block = qkv_heap_alloc(p->heap, bytes), .bytes = bytes};
  for (size_t at = 0; at < bytes; at += 4096) made->block[at] = (uint8_t)bytes;
  made->block[bytes - 1] = (uint8_t)(bytes >> 8);
  p->used += (bytes + 63) / 64 * 64;
}

static void drop(pile *p, size_t i) {
  slot *left = &p->slots[i];
  assert_int_equal(left->block[left->bytes - 1], (uint8_t)(left->bytes >> 8));
  if (left->bytes > 4096) assert_int_equal(left->block[left->bytes / 4096 * 4096 - 4096], (uint8_t)left->bytes);
  p->used -= (left->bytes + 63) / 64 * 64;
  qkv_heap_free(p->heap, left->block, left->bytes);
  *left = p->slots[--p->count];
}

static uint64_t within(pile *p, uint64_t bytes_max, const void *first) {
  assert_valid(p->heap);
  const qkv_heap_stats stats = qkv_heap_read(p->heap);
  assert_int_equal(stats.bytes_used, p->used);
  const uint64_t resident = resident_of(first, bytes_max);
  assert_true(resident <= stats.bytes_resident);
  assert_true(resident <= bytes_max + bytes_max / 10);
  return resident;
}

// Of the budget a quarter is elsewhere: of what is here so much less stays.
static void what_lies_elsewhere_counts(void **state) {
  (void)state;
  const uint64_t bytes_max = 160 * MIB, here = 120 * MIB;
  pile p = {.heap = make(bytes_max), .slots = calloc(SLOTS, sizeof(slot)), .seed = 5};
  assert_non_null(p.slots);
  qkv_heap_set_overhead(p.heap, bytes_max - here);
  for (size_t bytes = 64; p.used + bytes + 64 <= here; bytes = page_like(&p.seed)) put(&p, bytes);
  while (p.used > here / 2) drop(&p, random_below(&p.seed, p.count));
  while (p.used + MIB <= here) {  // few of the holes take one
    put(&p, MIB / 2);
    assert_true(qkv_heap_read(p.heap).bytes_resident <= here + bytes_max / 16 + 2 * TILE);
  }
  while (p.count > 0) drop(&p, p.count - 1);
  qkv_heap_destroy(&p.heap);
  free(p.slots);
}

// Full, then partly freed at random, one at a time or in runs, then full again with pages of other sizes.
static void resident_memory_stays_within_a_tenth(void **state) {
  (void)state;
  if (system_is_emulated()) skip();
  enum { ROUNDS = 12 };
  const uint64_t bytes_max = 160 * MIB;
  pile p = {.heap = make(bytes_max), .slots = calloc(SLOTS, sizeof(slot)), .seed = 3};
  assert_non_null(p.slots);
  put(&p, 64);
  const void *first = p.slots[0].block;
  for (int round = 0; round < ROUNDS; round++) {
    for (size_t bytes = 64; p.used + bytes + 64 <= bytes_max; bytes = page_like(&p.seed)) put(&p, bytes);
    const uint64_t full = p.used, resident = within(&p, bytes_max, first);
    qkv_heap_tend(p.heap);
    (void)within(&p, bytes_max, first);
    const uint64_t part = 20 + random_below(&p.seed, 70), run = round % 3 == 0 ? 1 : 1 + random_below(&p.seed, 40);
    while (p.used > full / 100 * part) {
      const size_t from = random_below(&p.seed, p.count);
      for (size_t i = 0; i < run && p.count > from + 1; i++)
        drop(&p, p.count - 1 - random_below(&p.seed, 1 + from / 2));
      if (p.count > from) drop(&p, from);
    }
    if (round % 2 == 0) qkv_heap_trim(p.heap, 0);
    const uint64_t left = within(&p, bytes_max, first);
    printf("in use %3llu MiB, resident %3llu; then %3llu and %3llu%s, %llu pages of 2 MiB split\n",
           (unsigned long long)(full / MIB), (unsigned long long)(resident / MIB), (unsigned long long)(p.used / MIB),
           (unsigned long long)(left / MIB), round % 2 == 0 ? " trimmed" : "",
           (unsigned long long)qkv_heap_read(p.heap).tiles_split);
    if (round % 2 == 0) assert_true(left <= p.used + p.used / 10 + 2 * TILE);
  }
  while (p.count > 0) drop(&p, p.count - 1);
  qkv_heap_trim(p.heap, 0);
  assert_valid(p.heap);
  assert_true(resident_of(first, bytes_max) <= TILE);
  assert_int_equal(qkv_heap_read(p.heap).tiles_split, 0);
  free(p.slots);
  qkv_heap_destroy(&p.heap);
}

// A tile that lost parts and was filled again is a page of 2 MiB again, and its blocks are what they were.
static void split_tiles_become_whole(void **state) {
  (void)state;
  enum { BLOCKS = 160 };
  const size_t bytes = 65536;
  uint8_t *blocks[BLOCKS];
  qkv_heap *heap = make(16 * MIB);
  if (!qkv_heap_is_huge(heap)) {
    print_message("%s\n", qkv_heap_pages_text(heap));
    qkv_heap_destroy(&heap);
    skip();
  }
  for (size_t i = 0; i < BLOCKS; i++) memset(blocks[i] = qkv_heap_alloc(heap, bytes), (int)i, bytes);
  for (size_t i = 0; i < BLOCKS; i++) {
    if (i % 4 != 0) qkv_heap_free(heap, blocks[i], bytes);
  }
  qkv_heap_trim(heap, 0);
  assert_true(qkv_heap_read(heap).tiles_split >= 3);
  assert_valid(heap);
  for (size_t i = 0; i < BLOCKS; i++) {
    if (i % 4 != 0) memset(blocks[i] = qkv_heap_alloc(heap, bytes), (int)i, bytes);
  }
  qkv_heap_tend(heap);
  assert_int_equal(qkv_heap_read(heap).tiles_split, 0);
  assert_valid(heap);
  for (size_t i = 0; i < BLOCKS; i++) {
    for (size_t at = 0; at < bytes; at += 4093) assert_int_equal(blocks[i][at], i);
  }
  qkv_heap_destroy(&heap);
}

// ---- Threads ----

enum { THREADS = 4, ROUNDS_EACH = 400, HELD = 24 };

typedef struct worker {
  qkv_heap *heap;
  uint64_t seed;
  uint64_t wrong;  // cmocka's asserts are for one thread
} worker;

static void *work(void *context) {
  worker *own = context;
  slot held[HELD] = {{0}};
  for (size_t round = 0; round < ROUNDS_EACH; round++) {
    slot *at = &held[random_below(&own->seed, HELD)];
    if (at->block != NULL) {
      own->wrong += at->block[0] != (uint8_t)(uintptr_t)own || at->block[at->bytes - 1] != (uint8_t)at->bytes;
      qkv_heap_free(own->heap, at->block, at->bytes);
    }
    at->bytes = page_like(&own->seed);
    at->block = qkv_heap_alloc(own->heap, at->bytes);
    at->block[0] = (uint8_t)(uintptr_t)own;
    at->block[at->bytes - 1] = (uint8_t)at->bytes;
    if (round % 64 == 0) qkv_heap_trim(own->heap, 0);
    if (round % 64 == 32) qkv_heap_tend(own->heap);
  }
  for (size_t i = 0; i < HELD; i++) qkv_heap_free(own->heap, held[i].block, held[i].bytes);
  return NULL;
}

static void threads_have_blocks_of_their_own(void **state) {
  (void)state;
  pthread_t threads[THREADS];
  worker workers[THREADS];
  qkv_heap *heap = make(24 * MIB);
  for (size_t i = 0; i < THREADS; i++) {
    workers[i] = (worker){.heap = heap, .seed = i + 1};
    assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  }
  for (size_t i = 0; i < THREADS; i++) {
    assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(workers[i].wrong, 0);
  }
  assert_valid(heap);
  assert_int_equal(qkv_heap_read(heap).bytes_used, 0);
  qkv_heap_destroy(&heap);
}

// ---- Settings ----

static void small_pages_stay_small(void **state) {
  (void)state;
  qkv_heap *heap = qkv_heap_create(8 * MIB, &(qkv_heap_config){.pages = QKV_HEAP_PAGES_SMALL});
  assert_false(qkv_heap_is_huge(heap));
  assert_string_equal(qkv_heap_pages_text(heap), "small pages, as asked");
  void *block = qkv_heap_alloc(heap, 5000);
  memset(block, 1, 5000);
  assert_in_range(qkv_heap_read(heap).bytes_resident, 5000, 65536 * 2);
  assert_int_equal(resident_of(block, 8 * MIB), qkv_heap_read(heap).bytes_resident);
  qkv_heap_free(heap, block, 5000);
  qkv_heap_destroy(&heap);
}

// Accepted, or refused with a sentence: on a machine of one node no more can be seen.
static void numa_is_what_the_kernel_says(void **state) {
  (void)state;
  qkv_heap_numa numa = QKV_HEAP_NUMA_OFF;
  assert_false(qkv_heap_numa_parse("both", &numa));
  for (size_t i = 0; i < 3; i++) {
    static const char *const names[] = {"off", "interleave", "local"};
    qkv_error error = {0};
    assert_true(qkv_heap_numa_parse(names[i], &numa));
    assert_string_equal(qkv_heap_numa_name(numa), names[i]);
    const qkv_heap_config config = {.numa = numa};
    const qkv_status status = qkv_heap_check(&config, &error);
    print_message("numa %s on %zu nodes: %s\n", names[i], qkv_heap_numa_nodes(),
                  status == QKV_OK ? "accepted" : error.text);
    assert_true(status == QKV_OK || (status == QKV_UNIMPLEMENTED && i > 0));
    assert_true(status == QKV_OK || strncmp(error.text, "numa is ", 8) == 0);
    qkv_heap *heap = qkv_heap_create(8 * MIB, &config);
    void *block = qkv_heap_alloc(heap, 3 * MIB);
    memset(block, 1, 3 * MIB);
    qkv_heap_free(heap, block, 3 * MIB);
    qkv_heap_destroy(&heap);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(blocks_are_aligned_and_apart),
                                     cmocka_unit_test(what_does_not_fit_comes_from_elsewhere),
                                     cmocka_unit_test(without_address_space),
                                     cmocka_unit_test(test_misuse_aborts),
                                     cmocka_unit_test(resident_memory_stays_within_a_tenth),
                                     cmocka_unit_test(what_lies_elsewhere_counts),
                                     cmocka_unit_test(split_tiles_become_whole),
                                     cmocka_unit_test(threads_have_blocks_of_their_own),
                                     cmocka_unit_test(small_pages_stay_small),
                                     cmocka_unit_test(numa_is_what_the_kernel_says)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
