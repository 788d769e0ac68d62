#include "client/c/health.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

struct qkvi_health {
  qkv_client *client;  // of the thread, while there is one
  bool threaded;       // there is one, to be joined
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool done, stop;     // under the lock, as is
  qkv_call_error why;  // of the last check
};

qkv_code qkvi_health_create(const char *target, const qkv_client_options *options, qkvi_health **out,
                            qkv_call_error *error) {
  qkv_client *client = NULL;
  const qkv_code code = qkvi_client_create(target, options, &client, error);
  *out = NULL;
  if (code != QKV_OK) return code;
  qkvi_health *health = calloc(1, sizeof *health);
  pthread_condattr_t clock;
  assert(health != NULL);
  health->client = client;
  int failed = pthread_mutex_init(&health->lock, NULL);
  failed |= pthread_condattr_init(&clock);
  failed |= pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(&health->changed, &clock);
  failed |= pthread_condattr_destroy(&clock);
  if (failed != 0) abort();
  *out = health;
  return QKV_OK;
}

static void lock(qkvi_health *health) {
  if (pthread_mutex_lock(&health->lock) != 0) abort();
}

static void unlock(qkvi_health *health) {
  if (pthread_mutex_unlock(&health->lock) != 0) abort();
}

// Under the lock. False: it is to stop.
static bool pause_for(qkvi_health *health, int64_t ms) {
  struct timespec until;
  (void)clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += ms / 1000;
  until.tv_nsec += ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  int waited = 0;
  while (!health->stop && waited != ETIMEDOUT)
    waited = pthread_cond_timedwait(&health->changed, &health->lock, &until);
  return !health->stop;
}

static void *watch(void *context) {
  qkvi_health *health = context;
  int64_t pause_ms = QKVI_HEALTH_PAUSE_MS;
  lock(health);
  while (!health->done && pause_for(health, pause_ms)) {
    qkv_call_error why = {0};
    unlock(health);
    const bool serves = qkvi_check_health(health->client, QKVI_HEALTH_MS, &why) == QKV_OK;
    // A check that was not answered says nothing of the connection: the next one has another.
    if (!serves) qkvi_cut(health->client);
    lock(health);
    health->why = why;
    health->done = serves;
    pause_ms = 2 * pause_ms < QKVI_HEALTH_PAUSE_MAX_MS ? 2 * pause_ms : QKVI_HEALTH_PAUSE_MAX_MS;
  }
  unlock(health);
  return NULL;
}

static void join(qkvi_health *health) {
  if (pthread_join(health->thread, NULL) != 0) abort();
  health->threaded = false;
}

void qkvi_health_watch(qkvi_health *health) {
  if (health->threaded) return;
  health->done = health->stop = false;
  health->why = (qkv_call_error){0};
  health->threaded = pthread_create(&health->thread, NULL, watch, health) == 0;
}

bool qkvi_health_watching(qkvi_health *health, qkv_call_error *why) {
  if (!health->threaded) return false;
  lock(health);
  const bool done = health->done;
  if (!done && health->why.code != QKV_OK) *why = health->why;
  unlock(health);
  if (done) join(health);
  return !done;
}

void qkvi_health_destroy(qkvi_health **health_in) {
  qkvi_health *health = *health_in;
  if (health == NULL) return;
  *health_in = NULL;
  if (health->threaded) {
    lock(health);
    health->stop = true;
    (void)pthread_cond_signal(&health->changed);
    unlock(health);
    join(health);
  }
  (void)pthread_cond_destroy(&health->changed);
  (void)pthread_mutex_destroy(&health->lock);
  qkv_client_close(&health->client);
  free(health);
}
