// server/memory.h: memory that a thread frees is returned to the system except a part of the budget, though its arena
// is not the first one and all of the free memory is at its end; memory of closed sessions is returned some seconds
// later.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/memory.h"

enum { MIB = 1 << 20, BLOCKS = 40 };

typedef struct figures {
  int64_t before, held, after;
} figures;

static void *use(void *context) {
  figures *seen = context;
  char *blocks[BLOCKS];
  seen->before = qkvi_memory_resident();
  for (size_t i = 0; i < BLOCKS; i++) {
    blocks[i] = malloc(MIB);
    assert_non_null(blocks[i]);
    memset(blocks[i], 1, MIB);
  }
  seen->held = qkvi_memory_resident();
  for (size_t i = BLOCKS; i > 0; i--) free(blocks[i - 1]);
  seen->after = qkvi_memory_resident();
  return NULL;
}

static figures in_thread(int64_t budget) {
  figures seen;
  pthread_t thread;
  qkvi_memory_setup(budget);
  assert_int_equal(pthread_create(&thread, NULL, use, &seen), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  return seen;
}

static void little_is_kept(void **state) {
  (void)state;
#ifdef QKV_SANITIZED
  skip();  // another malloc
#endif
  const figures seen = in_thread((int64_t)256 * MIB);
  assert_true(seen.held - seen.before >= (int64_t)(BLOCKS - 1) * MIB);
  assert_true(seen.after - seen.before <= (int64_t)5 * MIB);
}

// With a larger budget, messages are not faulted in again, and no whole arenas are kept.
static void a_part_of_much_is_kept(void **state) {
  (void)state;
#ifdef QKV_SANITIZED
  skip();  // another malloc
#endif
  const figures seen = in_thread((int64_t)8192 * MIB);
  assert_true(seen.after - seen.before >= (int64_t)3 * MIB);  // perhaps in memory that the other test has left
  assert_true(seen.after - seen.before <= (int64_t)17 * MIB);
}

static qkv_store *store_of(uint64_t budget) {
  const qkv_store_config config = {.memory_budget = budget,
                                   .models_max = 1,
                                   .sessions_max = 1,
                                   .policy = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED)}};
  return qkv_store_create(&config);
}

static uint64_t resident_of(qkv_store *store) {
  return qkv_heap_read(qkv_arena_heap(qkv_store_arena(store))).bytes_resident;
}

static void tend_seconds(qkvi_memory *memory, qkv_store *store, int seconds) {
  for (int i = 0; i < 4 * seconds; i++) qkvi_memory_tend(memory, store);
}

static void what_sessions_leave_goes_back_later(void **state) {
  (void)state;
#ifdef QKV_SANITIZED
  skip();  // a sanitizer has no heap of pages
#endif
  qkv_store *store = store_of(256 * MIB);
  qkv_arena *arena = qkv_store_arena(store);
  qkvi_memory memory = {0};
  void *blocks[BLOCKS];
  assert_int_equal(qkv_arena_reserve(arena, (uint64_t)BLOCKS * MIB, NULL), QKV_OK);
  for (size_t i = 0; i < BLOCKS; i++) memset(blocks[i] = qkv_arena_alloc(arena, MIB), 1, MIB);
  tend_seconds(&memory, store, 60);
  const uint64_t held = resident_of(store);
  assert_true(held >= (uint64_t)BLOCKS * MIB);
  for (size_t i = 0; i < BLOCKS; i++) qkv_arena_free(arena, blocks[i], MIB);
  tend_seconds(&memory, store, 1);
  assert_in_range(resident_of(store), held / 4 * 3, held);
  tend_seconds(&memory, store, 3);
  assert_in_range(resident_of(store), held / 4, held - 1);
  tend_seconds(&memory, store, 10);
  assert_true(resident_of(store) <= 8 * MIB);
  qkv_store_destroy(&store);
}

// In MiB, of a budget of 256: 281.6 are the rule, 8 of which are spare.
static uint64_t limit_of(uint64_t limit, uint64_t overhead, uint64_t most) {
  return qkvi_memory_limit((uint64_t)256 * MIB, limit * MIB, overhead * MIB, most * MIB) / MIB;
}

static void overhead_is_taken_from_pages(void **state) {
  (void)state;
  assert_int_equal(limit_of(256, 10, 260), 256);  // everything fits
  assert_int_equal(limit_of(256, 40, 260), 229);  // down at once
  assert_int_equal(limit_of(229, 40, 233), 229);
  assert_int_equal(limit_of(229, 10, 233), 230);  // up slowly
  assert_int_equal(limit_of(256, 10, 100), 256);
  assert_int_equal(limit_of(256, 300, 260), 128);  // half stays
  assert_int_equal(limit_of(128, 300, 132), 128);
  assert_int_equal(qkvi_memory_limit(100 * MIB, 100 * MIB, 200 * MIB, 100 * MIB), 50 * MIB);
  assert_int_equal(qkvi_memory_limit(50 * MIB, 50 * MIB, 200 * MIB, 50 * MIB), 32 * MIB);  // of little more
  assert_int_equal(qkvi_memory_limit(8 * MIB, 8 * MIB, 200 * MIB, 12 * MIB), 8 * MIB);
}

static void pages_leave_for_overhead(void **state) {
  (void)state;
#ifdef QKV_SANITIZED
  skip();  // a sanitizer has resident tables of its own
#endif
  enum { BUDGET = 512, OVERHEAD = 128 };
  qkv_store *store = store_of((uint64_t)BUDGET * MIB);
  qkv_arena *arena = qkv_store_arena(store);
  qkvi_memory memory = {0};
  tend_seconds(&memory, store, 1);
  assert_in_range(qkv_arena_read(arena).bytes_limit, (uint64_t)(BUDGET - 16) * MIB, (uint64_t)BUDGET * MIB);
  assert_true(qkvi_memory_has_headroom(store, (uint64_t)OVERHEAD * MIB));
  assert_false(qkvi_memory_has_headroom(store, (uint64_t)BUDGET / 2 * MIB + 64 * MIB));
  const int64_t before = qkvi_memory_overhead(store);
  char *large = malloc((size_t)OVERHEAD * MIB);
  assert_non_null(large);
  memset(large, 1, (size_t)OVERHEAD * MIB);
  assert_in_range(qkvi_memory_overhead(store) - before, (OVERHEAD - 1) * MIB, (OVERHEAD + 1) * MIB);
  qkvi_memory_tend(&memory, store);
  const uint64_t limit = qkv_arena_read(arena).bytes_limit;
  assert_in_range(limit, (uint64_t)(BUDGET - OVERHEAD - 16) * MIB, (uint64_t)(BUDGET - OVERHEAD / 2) * MIB);
  // All that can be resident then keeps to the rule.
  const uint64_t all = (uint64_t)qkvi_memory_overhead(store) + qkv_heap_read(qkv_arena_heap(arena)).bytes_most;
  assert_true(all <= (uint64_t)BUDGET * MIB / 10 * 11);
  free(large);
  tend_seconds(&memory, store, 1);
  assert_in_range(qkv_arena_read(arena).bytes_limit, limit + 1, limit + (uint64_t)BUDGET * MIB / 32);
  tend_seconds(&memory, store, 40);
  assert_in_range(qkv_arena_read(arena).bytes_limit, (uint64_t)(BUDGET - 16) * MIB, (uint64_t)BUDGET * MIB);
  qkv_store_destroy(&store);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(little_is_kept),
      cmocka_unit_test(a_part_of_much_is_kept),
      cmocka_unit_test(what_sessions_leave_goes_back_later),
      cmocka_unit_test(overhead_is_taken_from_pages),
      cmocka_unit_test(pages_leave_for_overhead),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
