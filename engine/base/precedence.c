#include "engine/base/precedence.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Atomic int first;  // what goes first
static _Atomic int aside;  // threads that wait for it
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t over;  // `first` has become 0
static pthread_once_t once = PTHREAD_ONCE_INIT;

static _Thread_local bool stands_back;
static _Thread_local int64_t goes_on_until;  // us: it has waited long enough

static void make_condition(void) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&over, &attributes);
  pthread_condattr_destroy(&attributes);
}

static int64_t now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

void qkv_precedence_begin(void) {
  atomic_fetch_add(&first, 1);
}

// Whoever comes to wait counts itself in `aside` before it looks at `first`, so one of the two sees the other.
void qkv_precedence_end(void) {
  if (atomic_fetch_sub(&first, 1) != 1 || atomic_load(&aside) == 0) return;
  pthread_mutex_lock(&lock);
  pthread_cond_broadcast(&over);
  pthread_mutex_unlock(&lock);
}

void qkv_precedence_stand_back(int nice) {
  if (stands_back) return;
  stands_back = true;
  pthread_once(&once, make_condition);
  if (nice == 0) return;
  const id_t self = (id_t)syscall(SYS_gettid);  // of this thread alone, as Linux has it
  (void)setpriority(PRIO_PROCESS, self, getpriority(PRIO_PROCESS, self) + nice);
}

// False where it has waited as long as it may.
static bool wait_until_over(void) {
  const int64_t until = now_us() + QKV_WAY_GIVEN_US;
  const struct timespec deadline = {.tv_sec = until / 1000000, .tv_nsec = until % 1000000 * 1000};
  int code = 0;
  pthread_mutex_lock(&lock);
  atomic_fetch_add(&aside, 1);
  while (atomic_load(&first) > 0 && code == 0) code = pthread_cond_timedwait(&over, &lock, &deadline);
  atomic_fetch_sub(&aside, 1);
  pthread_mutex_unlock(&lock);
  return code == 0;
}

void qkv_precedence_give_way(void) {
  if (!stands_back) return;
  if (atomic_load(&first) == 0) {
    (void)sched_yield();  // to those who have something to do with what comes first
  } else if (now_us() >= goes_on_until && !wait_until_over()) {
    goes_on_until = now_us() + QKV_WAY_TAKEN_US;
  }
}
