#include "server/rpc/delay.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "engine/base/histogram.h"

#define NS_PER_MS UINT64_C(1000000)
#define NS_PER_S UINT64_C(1000000000)

struct qkvi_rpc_delays {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  qkvi_rpc_delayed *first;  // in the order of time
  pthread_t thread;
  bool started, ending;
};

qkvi_rpc_delays *qkvi_rpc_delays_create(void) {
  qkvi_rpc_delays *delays = calloc(1, sizeof *delays);
  pthread_condattr_t clock;
  assert(delays != NULL);
  int failed = pthread_condattr_init(&clock);
  failed |= pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(&delays->changed, &clock);
  failed |= pthread_mutex_init(&delays->lock, NULL);
  assert(failed == 0);
  (void)failed;
  (void)pthread_condattr_destroy(&clock);
  return delays;
}

// With the lock; until the first is due, or there is another first one.
static void wait_for_first(qkvi_rpc_delays *delays) {
  if (delays->first == NULL) {
    (void)pthread_cond_wait(&delays->changed, &delays->lock);
    return;
  }
  const struct timespec until = {.tv_sec = (time_t)(delays->first->due_ns / NS_PER_S),
                                 .tv_nsec = (long)(delays->first->due_ns % NS_PER_S)};
  (void)pthread_cond_timedwait(&delays->changed, &delays->lock, &until);
}

static void *run(void *context) {
  qkvi_rpc_delays *delays = context;
  (void)pthread_mutex_lock(&delays->lock);
  while (!delays->ending) {
    qkvi_rpc_delayed *due = delays->first;
    if (due == NULL || due->due_ns > qkv_stage_now()) {
      wait_for_first(delays);
      continue;
    }
    delays->first = due->next;
    (void)pthread_mutex_unlock(&delays->lock);
    due->resume(due);
    (void)pthread_mutex_lock(&delays->lock);
  }
  (void)pthread_mutex_unlock(&delays->lock);
  return NULL;
}

static void start(qkvi_rpc_delays *delays) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that wait for them
  if (pthread_create(&delays->thread, NULL, run, delays) != 0) abort();
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_setname_np(delays->thread, "qkvd-delays");
  delays->started = true;
}

void qkvi_rpc_delays_add(qkvi_rpc_delays *delays, qkvi_rpc_delayed *delayed, uint64_t ms) {
  delayed->due_ns = qkv_stage_now() + ms * NS_PER_MS;
  (void)pthread_mutex_lock(&delays->lock);
  qkvi_rpc_delayed **link = &delays->first;
  while (*link != NULL && (*link)->due_ns <= delayed->due_ns) link = &(*link)->next;
  delayed->next = *link;
  *link = delayed;
  if (!delays->started) start(delays);
  (void)pthread_cond_signal(&delays->changed);
  (void)pthread_mutex_unlock(&delays->lock);
}

void qkvi_rpc_delays_destroy(qkvi_rpc_delays **delays) {
  qkvi_rpc_delays *old = *delays;
  if (old == NULL) return;
  *delays = NULL;
  (void)pthread_mutex_lock(&old->lock);
  old->ending = true;
  (void)pthread_cond_signal(&old->changed);
  (void)pthread_mutex_unlock(&old->lock);
  if (old->started) (void)pthread_join(old->thread, NULL);
  assert(old->first == NULL);
  (void)pthread_cond_destroy(&old->changed);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}
