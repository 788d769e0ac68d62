// The executor: what each kind of work runs on.
#include "engine/base/executor.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/base/yield.h"

typedef struct seen {
  bool yields;
  int nice;
} seen;

static void look(void *context) {
  seen *into = context;
  *into = (seen){.yields = qkv_yield_enabled(), .nice = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid))};
}

// Bulk work yields and is nice, whether it computes or waits.
static void test_kinds_of_work(void **state) {
  (void)state;
  qkv_executor *executor = NULL;
  seen of[QKV_WORK_KINDS];
  const int own = getpriority(PRIO_PROCESS, 0), niced = own + 2 < 19 ? own + 2 : 19;
  const qkv_executor_config config = {.threads = 2, .blocking_max = 3, .queue_max = 4, .bulk_nice = 2};
  assert_int_equal(qkv_executor_create(&config, &executor, NULL), QKV_OK);
  assert_int_equal(qkv_executor_threads(executor), 2 + 2 + 1 + 1 + 1);
  for (qkv_work work = 0; work < QKV_WORK_KINDS; work++) {
    const bool bulk = work == QKV_WORK_BULK || work >= QKV_WORK_BULK_BLOCKING;
    of[work] = (seen){.yields = !bulk, .nice = -100};
    assert_int_equal(qkv_executor_submit(executor, work, look, &of[work]), QKV_OK);
  }
  assert_int_equal(qkv_pool_width(qkv_executor_pool(executor, QKV_WORK_INTERACTIVE)), 3);
  qkv_executor_destroy(&executor);
  assert_null(executor);
  for (qkv_work work = 0; work < QKV_WORK_KINDS; work++) {
    const bool bulk = work == QKV_WORK_BULK || work >= QKV_WORK_BULK_BLOCKING;
    assert_int_equal(of[work].yields, bulk);
    assert_int_equal(of[work].nice, bulk ? niced : own);
  }
}

static void wait_for_flag(void *context) {
  const _Atomic bool *flag = context;
  while (!atomic_load(flag)) (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void set_flag(void *context) {
  atomic_store((_Atomic bool *)context, true);
}

// One kind that is full does not fill another one.
static void test_queues_are_apart(void **state) {
  (void)state;
  qkv_executor *executor = NULL;
  _Atomic bool over = false;
  size_t taken = 0;
  seen other = {.nice = -100};
  const qkv_executor_config config = {.threads = 1, .blocking_max = 2, .queue_max = 3};
  assert_int_equal(qkv_executor_create(&config, &executor, NULL), QKV_OK);
  while (qkv_executor_submit(executor, QKV_WORK_BLOCKING, wait_for_flag, &over) == QKV_OK) {
    taken++;
    (void)nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  }
  assert_in_range(taken, 3, 2 + 3);
  assert_int_equal(qkv_executor_waiting(executor), 3);
  assert_int_equal(qkv_executor_submit(executor, QKV_WORK_INTERACTIVE, look, &other), QKV_OK);
  atomic_store(&over, true);
  qkv_executor_destroy(&executor);
  assert_int_not_equal(other.nice, -100);
}

// A flow whose jobs wait leaves threads of its kind to others, though not its two of upkeep.
static void test_a_flow_leaves_blocking_threads(void **state) {
  (void)state;
  qkv_executor *executor = NULL;
  _Atomic bool over = false;
  const qkv_executor_config config = {.threads = 1, .blocking_max = 4, .queue_max = 8};
  assert_int_equal(qkv_executor_create(&config, &executor, NULL), QKV_OK);
  static const qkv_work kinds[] = {QKV_WORK_BLOCKING, QKV_WORK_BULK_BLOCKING};
  for (size_t i = 0; i < 2; i++) {
    for (int job = 0; job < 5; job++)
      assert_int_equal(qkv_executor_submit(executor, kinds[i], wait_for_flag, &over), QKV_OK);
    _Atomic bool flag = false;
    assert_int_equal(qkv_executor_submit_as(executor, kinds[i], &(qkv_share){.flow = 1}, set_flag, &flag), QKV_OK);
    wait_for_flag(&flag);
  }
  while (qkv_executor_waiting(executor) > 2 * 3) (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  assert_int_equal(qkv_executor_waiting(executor), 2 * 3);
  for (int job = 0; job < 2; job++)
    assert_int_equal(qkv_executor_submit(executor, QKV_WORK_UPKEEP, wait_for_flag, &over), QKV_OK);
  while (qkv_executor_waiting(executor) != 2 * 3) (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  atomic_store(&over, true);
  qkv_executor_destroy(&executor);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_kinds_of_work),
      cmocka_unit_test(test_queues_are_apart),
      cmocka_unit_test(test_a_flow_leaves_blocking_threads),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
