#include "engine/base/yield.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/base/cpu.h"

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

// A thread that yields once it is told to.
typedef struct worker {
  bool yields, seen_yielding;
  int nice;
  _Atomic int yielded;
  _Atomic bool enough;
  double first_us;  // that yielding took the first time
  int nice_seen;
} worker;

static void *work(void *context) {
  worker *self = context;
  if (self->yields) {
    qkv_yield_enable(self->nice);
    qkv_yield_enable(self->nice);
  }
  self->seen_yielding = qkv_yield_enabled();
  self->nice_seen = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
  while (!self->enough) {
    const double begin = now_us();
    qkv_yield_now();
    const double us = now_us() - begin;
    if (self->yielded == 0) self->first_us = us;
    self->yielded++;
  }
  qkv_yield_rest();
  return NULL;
}

static pthread_t start(worker *self) {
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, work, self), 0);
  return thread;
}

static void await(const worker *self, int ways) {
  while (self->yielded < ways) (void)usleep(100);
}

static void end(worker *self, pthread_t thread) {
  self->enough = true;
  pthread_join(thread, NULL);
}

// Once, however often it is told, and for no other thread.
static void test_nice(void **state) {
  (void)state;
  const int own = getpriority(PRIO_PROCESS, 0);
  worker all[] = {{.yields = true, .nice = 3}, {.yields = true}, {.nice = 3}};
  for (size_t i = 0; i < 3; i++) {
    const pthread_t thread = start(&all[i]);
    await(&all[i], 1);
    end(&all[i], thread);
    assert_true(all[i].seen_yielding == all[i].yields);
  }
  assert_int_equal(all[0].nice_seen, own + 3 < 19 ? own + 3 : 19);
  assert_int_equal(all[1].nice_seen, own);
  assert_int_equal(all[2].nice_seen, own);
  assert_int_equal(getpriority(PRIO_PROCESS, 0), own);
}

// It waits as long as it has to, and then goes on all the same.
static void test_nobody_starves(void **state) {
  (void)state;
  worker self = {.yields = true};
  qkv_yield_urgent_begin(1000);
  const pthread_t thread = start(&self);
  await(&self, 100);
  end(&self, thread);
  qkv_yield_urgent_end(1000);
  assert_true(self.first_us >= QKV_YIELD_US);
}

// More than once in what it is given, for a thread that calls all the time.
static void test_time_of_its_own(void **state) {
  (void)state;
  worker self = {.yields = true};
  qkv_yield_urgent_begin(1000);
  const double begin = now_us();
  const pthread_t thread = start(&self);
  await(&self, 1000);
  end(&self, thread);
  const double took = now_us() - begin;
  qkv_yield_urgent_end(1000);
  assert_true(took < 1000.0 * QKV_YIELD_US);
}

// Without end where they wait; a thread may lose the processor for as long, but not always.
static void test_others_go_on(void **state) {
  (void)state;
  bool at_once = false;
  qkv_yield_urgent_begin(1000);
  qkv_yield_urgent_begin(1000);
  while (!at_once) {
    worker self = {0};
    const pthread_t thread = start(&self);
    await(&self, 1);
    end(&self, thread);
    at_once = self.first_us < QKV_YIELD_US;
  }
  qkv_yield_urgent_end(1000);
  qkv_yield_urgent_end(1000);
}

// A waiting thread is woken, sooner than it would go on by itself. Loops without end where it is not.
static void test_the_end_wakes(void **state) {
  (void)state;
  bool woken = false;
  while (!woken) {
    worker self = {.yields = true};
    qkv_yield_urgent_begin(1000);
    const pthread_t thread = start(&self);
    (void)usleep(QKV_YIELD_US / 2);
    const bool waits = self.yielded == 0;
    qkv_yield_urgent_end(1000);
    await(&self, 1);
    end(&self, thread);
    woken = waits && self.first_us > 0 && self.first_us < QKV_YIELD_US;
  }
}

// Yielding threads have what processors attention leaves, one thread each.
static void test_processors_that_are_left(void **state) {
  (void)state;
  const int most = qkv_cpu_count() - 1;
  if (most == 0) skip();  // with one processor attention leaves none
  qkv_yield_urgent_begin(most);
  qkv_yield_enable(0);
  qkv_yield_now();  // the last one is this thread's
  worker late = {.yields = true};
  pthread_t thread = start(&late);
  await(&late, 1);
  end(&late, thread);
  assert_true(late.first_us >= QKV_YIELD_US);
  qkv_yield_rest();
  bool at_once = false;
  while (!at_once) {
    worker next = {.yields = true};
    thread = start(&next);
    await(&next, 1);
    end(&next, thread);
    at_once = next.first_us < QKV_YIELD_US;
  }
  qkv_yield_urgent_end(most);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_nice),
                                     cmocka_unit_test(test_nobody_starves),
                                     cmocka_unit_test(test_time_of_its_own),
                                     cmocka_unit_test(test_others_go_on),
                                     cmocka_unit_test(test_the_end_wakes),
                                     cmocka_unit_test(test_processors_that_are_left)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
