#include "engine/base/arena.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static void assert_stats(const qkv_arena *arena, uint64_t used, uint64_t reserved) {
  qkv_arena_stats stats = qkv_arena_read(arena);
  assert_int_equal(stats.bytes_used, used);
  assert_int_equal(stats.bytes_reserved, reserved);
}

static void test_cost(void **state) {
  (void)state;
  assert_int_equal(qkv_arena_cost(1), 64);
  assert_int_equal(qkv_arena_cost(64), 64);
  assert_int_equal(qkv_arena_cost(65), 128);
  assert_int_equal(qkv_arena_cost((size_t)5 << 32), (size_t)5 << 32);
}

static void test_reserve_alloc_free(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1024);
  assert_int_equal(qkv_arena_reserve(arena, 512, NULL), QKV_OK);
  assert_stats(arena, 0, 512);
  void *block = qkv_arena_alloc(arena, 100);
  assert_int_equal((uintptr_t)block % QKV_ARENA_ALIGN, 0);
  memset(block, 1, 100);
  assert_stats(arena, 128, 384);
  qkv_arena_unreserve(arena, 384);
  assert_stats(arena, 128, 0);
  qkv_arena_free(arena, block, 100);
  assert_stats(arena, 0, 0);
  assert_int_equal(qkv_arena_read(arena).bytes_max, 1024);
  qkv_arena_destroy(&arena);
  assert_null(arena);
}

static void test_refusal_changes_nothing(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1000);
  assert_int_equal(qkv_arena_reserve(arena, 640, NULL), QKV_OK);
  void *block = qkv_arena_alloc(arena, 600);
  qkv_error error = {0};
  assert_int_equal(qkv_arena_reserve(arena, 361, &error), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(error.text, "memory-budget is 1000 bytes, 640 in use, 361 more are needed");
  assert_int_equal(qkv_arena_reserve(arena, UINT64_MAX, NULL), QKV_RESOURCE_EXHAUSTED);
  assert_stats(arena, 640, 0);
  assert_int_equal(qkv_arena_reserve(arena, 360, NULL), QKV_OK);
  qkv_arena_unreserve(arena, 360);
  qkv_arena_free(arena, block, 600);
  qkv_arena_destroy(&arena);
}

static void test_headroom_is_used_up_first(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1000);
  uint64_t headroom = 500;
  assert_int_equal(qkv_arena_reserve(arena, headroom, NULL), QKV_OK);
  assert_int_equal(qkv_arena_reserve_in(arena, &headroom, 300, NULL), QKV_OK);
  assert_int_equal(headroom, 200);
  assert_stats(arena, 0, 500);
  assert_int_equal(qkv_arena_reserve_in(arena, &headroom, 701, NULL), QKV_RESOURCE_EXHAUSTED);
  assert_int_equal(headroom, 200);  // a refusal changes nothing
  assert_int_equal(qkv_arena_reserve_in(arena, &headroom, 700, NULL), QKV_OK);
  assert_int_equal(headroom, 0);
  assert_stats(arena, 0, 1000);
  qkv_arena_unreserve(arena, 1000);
  qkv_arena_destroy(&arena);
}

static void test_what_gets_free_is_kept_for_the_next(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1000);
  assert_int_equal(qkv_arena_reserve(arena, 900, NULL), QKV_OK);
  assert_int_equal(qkv_arena_reserve_next(arena, 300), QKV_RESOURCE_EXHAUSTED);
  qkv_arena_unreserve(arena, 150);
  qkv_error error = {0};
  assert_int_equal(qkv_arena_reserve(arena, 1, &error), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(error.text, "memory-budget is 1000 bytes, 1000 in use, 1 more are needed");
  qkv_arena_unreserve(arena, 150);
  assert_int_equal(qkv_arena_reserve(arena, 101, NULL), QKV_RESOURCE_EXHAUSTED);
  assert_int_equal(qkv_arena_reserve(arena, 100, NULL), QKV_OK);  // beyond what is kept
  assert_int_equal(qkv_arena_reserve_next(arena, 300), QKV_OK);
  assert_int_equal(qkv_arena_reserve_next(arena, 1), QKV_RESOURCE_EXHAUSTED);
  qkv_arena_unreserve(arena, 1000);
  assert_int_equal(qkv_arena_reserve(arena, 1000, NULL), QKV_RESOURCE_EXHAUSTED);
  qkv_arena_let_go(arena);
  assert_int_equal(qkv_arena_reserve(arena, 1000, NULL), QKV_OK);
  qkv_arena_unreserve(arena, 1000);
  qkv_arena_destroy(&arena);
}

static void test_a_limit_below_the_budget(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1000);
  qkv_error error = {0};
  assert_int_equal(qkv_arena_read(arena).bytes_limit, 1000);
  assert_int_equal(qkv_arena_reserve(arena, 600, NULL), QKV_OK);
  qkv_arena_set_limit(arena, 700);
  assert_int_equal(qkv_arena_read(arena).bytes_limit, 700);
  assert_int_equal(qkv_arena_read(arena).bytes_max, 1000);
  assert_int_equal(qkv_arena_reserve(arena, 101, &error), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(error.text,
                      "memory-budget is 1000 bytes, 300 of them for memory outside pages, 600 in use, 101 more "
                      "are needed");
  assert_int_equal(qkv_arena_reserve(arena, 100, NULL), QKV_OK);
  qkv_arena_set_limit(arena, 500);  // less than is taken, which stays
  error = (qkv_error){0};
  assert_int_equal(qkv_arena_reserve(arena, 1, &error), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(error.text,
                      "memory-budget is 1000 bytes, 500 of them for memory outside pages, 700 in use, 1 more "
                      "are needed");
  assert_int_equal(qkv_arena_reserve_next(arena, 300), QKV_RESOURCE_EXHAUSTED);
  qkv_arena_unreserve(arena, 450);
  assert_int_equal(qkv_arena_reserve(arena, 1, NULL), QKV_RESOURCE_EXHAUSTED);  // kept for the thread that waits
  qkv_arena_unreserve(arena, 50);
  assert_int_equal(qkv_arena_reserve_next(arena, 300), QKV_OK);
  qkv_arena_set_limit(arena, UINT64_MAX);
  assert_int_equal(qkv_arena_read(arena).bytes_limit, 1000);
  assert_int_equal(qkv_arena_reserve(arena, 500, NULL), QKV_OK);
  qkv_arena_unreserve(arena, 1000);
  qkv_arena_destroy(&arena);
}

// What lies elsewhere, and what is beyond the limit, the heap may not have resident.
static void test_the_heap_has_what_is_left(void **state) {
  (void)state;
  enum { BUDGET = 64 << 20 };
  qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
  qkv_heap *heap = qkv_arena_heap(arena);
  const uint64_t most = qkv_heap_read(heap).bytes_most;
  assert_int_equal(qkv_arena_reserve_elsewhere(arena, BUDGET + 1, NULL), QKV_RESOURCE_EXHAUSTED);
  assert_int_equal(qkv_arena_reserve_elsewhere(arena, 3000, NULL), QKV_OK);
  assert_stats(arena, 0, 3000);
#ifndef QKV_SANITIZED
  assert_int_equal(qkv_heap_read(heap).bytes_most, most - 3000);
  qkv_arena_set_limit(arena, BUDGET / 2);
  assert_int_equal(qkv_heap_read(heap).bytes_most, most - 3000 - BUDGET / 2);
#endif
  qkv_arena_unreserve_elsewhere(arena, 3000);
  qkv_arena_set_limit(arena, BUDGET);
  assert_stats(arena, 0, 0);
  assert_int_equal(qkv_heap_read(heap).bytes_most, most);
  qkv_arena_destroy(&arena);
}

static void alloc_without_reservation(void) {
  qkv_arena *arena = qkv_arena_create("memory-budget", 1000);
  (void)qkv_arena_reserve(arena, 64, NULL);
  (void)qkv_arena_alloc(arena, 65);
}

static void unreserve_too_much(void) {
  qkv_arena *arena = qkv_arena_create("memory-budget", 1000);
  (void)qkv_arena_reserve(arena, 64, NULL);
  qkv_arena_unreserve(arena, 65);
}

static void destroy_with_a_block(void) {
  qkv_arena *arena = qkv_arena_create("memory-budget", 1000);
  (void)qkv_arena_reserve(arena, 64, NULL);
  (void)qkv_arena_alloc(arena, 64);
  qkv_arena_destroy(&arena);
}

static void test_misuse_aborts(void **state) {
  (void)state;
  void (*const misuses[])(void) = {alloc_without_reservation, unreserve_too_much, destroy_with_a_block};
  for (size_t i = 0; i < sizeof misuses / sizeof misuses[0]; i++) {
    pid_t child = fork();
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

typedef struct contest {
  qkv_arena *arena;
  pthread_barrier_t *all;
  int refused, over;  // cmocka's asserts are for one thread
} contest;

// Four threads want up to 4 * 4 blocks where 6 fit. At first each wants two and keeps them until all have asked.
static void *contend(void *context) {
  contest *own = context;
  own->refused = qkv_arena_reserve(own->arena, UINT64_C(2) * 128, NULL) != QKV_OK;
  (void)pthread_barrier_wait(own->all);
  if (!own->refused) qkv_arena_unreserve(own->arena, UINT64_C(2) * 128);
  for (int round = 0; round < 3000; round++) {
    size_t blocks = (size_t)round % 4 + 1;
    if (qkv_arena_reserve(own->arena, blocks * 128, NULL) != QKV_OK) {
      own->refused++;
      continue;
    }
    own->over += qkv_arena_read(own->arena).bytes_reserved > 6 * 128;
    uint8_t *block = qkv_arena_alloc(own->arena, 128);
    block[127] = (uint8_t)round;
    qkv_arena_unreserve(own->arena, (blocks - 1) * 128);
    qkv_arena_free(own->arena, block, 128);
  }
  return NULL;
}

static void test_threads_stay_within_the_budget(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", UINT64_C(6) * 128);
  pthread_t threads[4];
  pthread_barrier_t all;
  contest contests[4];
  assert_int_equal(pthread_barrier_init(&all, NULL, 4), 0);
  for (int i = 0; i < 4; i++) {
    contests[i] = (contest){.arena = arena, .all = &all};
    assert_int_equal(pthread_create(&threads[i], NULL, contend, &contests[i]), 0);
  }
  int refused = 0;
  for (int i = 0; i < 4; i++) {
    assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(contests[i].over, 0);
    refused += contests[i].refused;
  }
  assert_true(refused > 0);
  (void)pthread_barrier_destroy(&all);
  assert_stats(arena, 0, 0);
  assert_int_equal(qkv_arena_reserve(arena, UINT64_C(6) * 128, NULL), QKV_OK);
  qkv_arena_unreserve(arena, UINT64_C(6) * 128);
  qkv_arena_destroy(&arena);
}

// ---- Accounts ----

static void test_an_account_counts_in_both(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1024);
  qkv_arena *account = qkv_arena_create_account(arena, "quota host_bytes of tenant x", NULL);
  qkv_error error = {0};
  qkv_arena_set_ceiling(account, 512);
  assert_int_equal(qkv_arena_reserve(account, 256, &error), QKV_OK);
  void *block = qkv_arena_alloc(account, 128);
  assert_stats(account, 128, 128);
  assert_stats(arena, 128, 128);
  assert_int_equal(qkv_arena_reserve(account, 257, &error), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(error.text, "quota host_bytes of tenant x is 512 bytes, 256 in use, 257 more are needed");
  assert_stats(account, 128, 128);
  assert_stats(arena, 128, 128);
  // A reservation of the arena's, which the account counts when it is used.
  uint64_t headroom = 192;
  assert_int_equal(qkv_arena_reserve(arena, headroom, &error), QKV_OK);
  assert_int_equal(qkv_arena_reserve_in(account, &headroom, 256, &error), QKV_OK);
  assert_int_equal(headroom, 0);
  assert_stats(account, 128, 384);
  assert_stats(arena, 128, 384);
  error = (qkv_error){0};
  assert_int_equal(qkv_arena_overdraw(account, 1, &error), QKV_RESOURCE_EXHAUSTED);
  qkv_arena_unreserve(account, 256);
  // The arena refuses where the account would not.
  qkv_arena_set_ceiling(account, UINT64_MAX);
  error = (qkv_error){0};
  assert_int_equal(qkv_arena_reserve(account, 1024, &error), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(error.text, "memory-budget is 1024 bytes, 256 in use, 1024 more are needed");
  assert_stats(account, 128, 128);
  // A block that takes another's place.
  void *less = qkv_arena_alloc_overhead(account, 64);
  assert_int_equal(qkv_arena_recount(account, NULL, 128, 64, NULL), QKV_OK);
  qkv_arena_free_overhead(account, block, 128);
  assert_stats(account, 64, 128);
  assert_stats(arena, 64, 128);
  qkv_arena_free(account, less, 64);
  qkv_arena_unreserve(account, 128);
  assert_stats(account, 0, 0);
  assert_stats(arena, 0, 0);
  qkv_arena_destroy(&account);
  qkv_arena_destroy(&arena);
}

static void test_threads_stay_below_a_ceiling(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", UINT64_C(64) * 128);
  qkv_arena *account = qkv_arena_create_account(arena, "quota host_bytes of tenant x", NULL);
  pthread_t threads[4];
  pthread_barrier_t all;
  contest contests[4];
  int refused = 0;
  qkv_arena_set_ceiling(account, UINT64_C(6) * 128);
  assert_int_equal(pthread_barrier_init(&all, NULL, 4), 0);
  for (int i = 0; i < 4; i++) {
    contests[i] = (contest){.arena = account, .all = &all};
    assert_int_equal(pthread_create(&threads[i], NULL, contend, &contests[i]), 0);
  }
  for (int i = 0; i < 4; i++) {
    assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(contests[i].over, 0);
    refused += contests[i].refused;
  }
  assert_true(refused > 0);
  (void)pthread_barrier_destroy(&all);
  assert_stats(account, 0, 0);
  assert_stats(arena, 0, 0);
  qkv_arena_destroy(&account);
  qkv_arena_destroy(&arena);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_cost),
                                     cmocka_unit_test(test_reserve_alloc_free),
                                     cmocka_unit_test(test_refusal_changes_nothing),
                                     cmocka_unit_test(test_headroom_is_used_up_first),
                                     cmocka_unit_test(test_what_gets_free_is_kept_for_the_next),
                                     cmocka_unit_test(test_a_limit_below_the_budget),
                                     cmocka_unit_test(test_the_heap_has_what_is_left),
                                     cmocka_unit_test(test_misuse_aborts),
                                     cmocka_unit_test(test_threads_stay_within_the_budget),
                                     cmocka_unit_test(test_an_account_counts_in_both),
                                     cmocka_unit_test(test_threads_stay_below_a_ceiling)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
