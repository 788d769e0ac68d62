#include "engine/base/yield.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/cpu.h"

static _Atomic int urgent;        // threads that compute attention
static _Atomic int running;       // yielding threads that have a processor
static _Atomic int waiting;       // yielding threads that wait for one
static _Atomic uint32_t changes;  // times that `urgent` or `running` has become less while a thread waited
static int processors;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static _Thread_local bool yields, works;     // the latter: is one of `running`
static _Thread_local int64_t goes_on_until;  // us: until then it runs, as it has waited long enough

static void make(void) {
  processors = qkv_cpu_count();
}

static int64_t now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

// A thread that comes to wait counts itself in `waiting` before it looks at the others, so one of the two sees the
// other. There is no lock: a thread with a nice value that had it without a processor would keep attention waiting.
static void wake(void) {
  if (atomic_load(&waiting) == 0) return;
  atomic_fetch_add(&changes, 1);
  (void)syscall(SYS_futex, &changes, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

// Until there are more changes than `seen`, or a while; false: the time on the monotonic clock has come.
static bool await_change(uint32_t seen, const struct timespec *until) {
  return syscall(SYS_futex, &changes, FUTEX_WAIT_BITSET_PRIVATE, seen, until, NULL, FUTEX_BITSET_MATCH_ANY) == 0 ||
         errno != ETIMEDOUT;
}

void qkv_yield_urgent_begin(int threads) {
  atomic_fetch_add(&urgent, threads);
}

void qkv_yield_urgent_end(int threads) {
  atomic_fetch_sub(&urgent, threads);
  wake();
}

void qkv_yield_set_nice(int nice) {
  const id_t self = (id_t)syscall(SYS_gettid);  // of this thread alone, as Linux has it
  if (nice > 0) (void)setpriority(PRIO_PROCESS, self, getpriority(PRIO_PROCESS, self) + nice);
}

void qkv_yield_enable(int nice) {
  if (yields) return;
  yields = true;
  pthread_once(&once, make);
  qkv_yield_set_nice(nice);
}

bool qkv_yield_enabled(void) {
  return yields;
}

// One that neither attention nor other yielding threads have.
static bool take_processor(void) {
  int now = atomic_load(&running);
  do {
    const int before = atomic_load(&urgent);
    if (before > 0 && before + now >= processors) return false;
  } while (!atomic_compare_exchange_weak(&running, &now, now + 1));
  works = true;
  return true;
}

// False where it has waited as long as it may.
static bool wait_for_processor(void) {
  const int64_t until = now_us() + QKV_YIELD_US;
  const struct timespec deadline = {.tv_sec = until / 1000000, .tv_nsec = until % 1000000 * 1000};
  bool in_time = true;
  atomic_fetch_add(&waiting, 1);
  for (uint32_t seen = atomic_load(&changes); !take_processor() && in_time; seen = atomic_load(&changes))
    in_time = await_change(seen, &deadline);
  atomic_fetch_sub(&waiting, 1);
  return works;
}

void qkv_yield_rest(void) {
  if (!works) return;
  works = false;
  atomic_fetch_sub(&running, 1);
  wake();
}

void qkv_yield_now(void) {
  if (!yields) return;
  if (works) atomic_fetch_sub(&running, 1);
  works = false;
  if (take_processor()) {
    (void)sched_yield();  // to threads that serve attention
    return;
  }
  if (now_us() >= goes_on_until && !wait_for_processor()) goes_on_until = now_us() + QKV_YIELD_SLICE_US;
  if (!works) atomic_fetch_add(&running, 1);
  works = true;
}
