// The lock, and waiting for progress under it.
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/base/yield.h"
#include "server/residency/internal.h"

void qkvi_residency_lock(qkvi_residency *residency) {
  const int failed = pthread_mutex_lock(&residency->lock);
  assert(failed == 0);
  (void)failed;
}

void qkvi_residency_unlock(qkvi_residency *residency) {
  (void)pthread_mutex_unlock(&residency->lock);
}

void qkvi_progress_signal(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  residency->steps++;
  (void)pthread_cond_broadcast(&residency->moved);
  qkvi_residency_unlock(residency);
}

uint64_t qkvi_progress_await(qkvi_residency *residency, uint64_t seen, int64_t ms) {
  struct timespec until;
  qkv_yield_rest();
  (void)clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += ms / 1000;
  until.tv_nsec += ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  qkvi_residency_lock(residency);
  while (residency->steps == seen && pthread_cond_timedwait(&residency->moved, &residency->lock, &until) != ETIMEDOUT)
    continue;
  seen = residency->steps;
  qkvi_residency_unlock(residency);
  return seen;
}

uint64_t qkvi_call_await(qkvi_residency *residency, const qkv_rpc_call *call, qkv_rpc_wait what, uint64_t seen) {
  const int64_t began = qkv_now_ms();
  seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  if (call != NULL) qkv_rpc_count_wait(call, what, qkv_now_ms() - began);
  return seen;
}

uint64_t qkvi_progress_count(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const uint64_t steps = residency->steps;
  qkvi_residency_unlock(residency);
  return steps;
}
