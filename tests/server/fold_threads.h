// Threads that use, fold and compact the sessions of a residency at the same time.
#ifndef QKV_TESTS_SERVER_FOLD_THREADS_H
#define QKV_TESTS_SERVER_FOLD_THREADS_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/residency/fold.h"
#include "tests/server/residency_fixture.h"

typedef struct user {
  const scene *s;
  const content *wanted, *wanted_cut;  // of all rows; of those of before CUT and others behind it
  uint64_t seed;
  _Atomic bool *stop;
  _Atomic bool wrong;
  pthread_t thread;
} user;

static inline uint64_t next_random(uint64_t *seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return *seed >> 33;
}

static inline void sink(const scene *s, qkv_session *session) {
  (void)qkv_session_seal(session, NULL);
  (void)qkvi_write_back_sync(s->residency, NULL, session, NULL);
  (void)qkv_session_evict(session, UINT64_MAX, true);
}

static inline void *fold(void *context) {
  user *on = context;
  while (!atomic_load(on->stop)) {
    (void)qkvi_fold_step(on->s->residency, 1);
    (void)usleep(200);
  }
  return NULL;
}

// Moves records of folded sessions, too.
static inline void *compact(void *context) {
  user *on = context;
  uint64_t freed;
  while (!atomic_load(on->stop)) {
    if (qkvi_upkeep_compact(on->s->residency, 1, &freed, NULL) != QKV_OK) atomic_store(&on->wrong, true);
    (void)usleep(5000);
  }
  return NULL;
}

static inline void begin(user *on, void *(*run)(void *context)) {
  assert_int_equal(pthread_create(&on->thread, NULL, run, on), 0);
}

static inline void end(user *on) {
  assert_int_equal(pthread_join(on->thread, NULL), 0);
  assert_false(atomic_load(&on->wrong));
}

#endif
