#include "engine/base/pool.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/cpu.h"
#include "engine/base/histogram.h"
#include "engine/base/yield.h"

// A loop lives on its caller's stack. Idle threads find it in the pool's list, count themselves in as helpers
// and draw indexes. The caller draws indexes too; when none is left it takes the loop off the list and waits
// for the helpers that are in it, never for one that has not come yet.
typedef struct pool_loop {
  struct pool_loop *next;  // in the list; guarded by the pool's lock
  qkv_loop_fn *run;
  void *context;
  size_t count;
  _Atomic size_t index;     // the next index to draw; the loop is used up at `count`
  size_t helpers;           // threads inside, without the caller; guarded by the pool's lock
  pthread_cond_t finished;  // helpers became 0
} pool_loop;

typedef struct pool_member {
  qkv_pool *pool;
  size_t worker;  // 1 .. threads; 0 is the caller of a loop
  pthread_t thread;
  bool started;  // and not joined yet
  bool ended;    // its thread needs nothing any more
} pool_member;

struct qkv_pool {
  pthread_mutex_t lock;
  pthread_cond_t work;  // a job or a loop came, or the end
  bool ending;
  pool_loop *loops;  // the active ones, newest first: inner loops before the outer ones that wait for them
  qkv_fair *queue;
  qkv_pool_config config;
  size_t running, idle;  // threads that there are; of these, those that wait
  pool_member *members;  // [config.threads]
};

static void draw(pool_loop *loop, size_t worker) {
  size_t index;
  while ((index = atomic_fetch_add_explicit(&loop->index, 1, memory_order_relaxed)) < loop->count) {
    loop->run(loop->context, index, worker);
  }
}

static pool_loop *find_loop(const qkv_pool *pool) {
  for (pool_loop *loop = pool->loops; loop != NULL; loop = loop->next) {
    if (atomic_load_explicit(&loop->index, memory_order_relaxed) < loop->count) return loop;
  }
  return NULL;
}

static void call_thread(qkv_pool *pool);

// Before a thread turns to a job or a loop. Threads on demand are called one at a time, and each calls the next one,
// as the end of one job may let jobs of several flows start (fair.h). The lock is held.
static void pass_call(qkv_pool *pool) {
  if (pool->config.on_demand) call_thread(pool);
}

// The lock is held on entry and on return.
static void help(qkv_pool *pool, pool_loop *loop, size_t worker) {
  loop->helpers++;
  pass_call(pool);
  pthread_mutex_unlock(&pool->lock);
  draw(loop, worker);
  qkv_yield_rest();
  pthread_mutex_lock(&pool->lock);
  if (--loop->helpers == 0) pthread_cond_signal(&loop->finished);
}

// Called before a loop is joined, as a thread in it would keep the loop's caller waiting. Afterwards there may be no
// loop any more. The lock is held on entry and on return.
static void yield(qkv_pool *pool) {
  pthread_mutex_unlock(&pool->lock);
  qkv_yield_now();
  pthread_mutex_lock(&pool->lock);
}

// The lock is held on entry and on return.
static void run_job(qkv_pool *pool) {
  const qkv_fair_job job = qkv_fair_pop(pool->queue);
  pass_call(pool);
  pthread_mutex_unlock(&pool->lock);
  if (job.queued_ns != 0) qkv_stage_add(QKV_STAGE_QUEUE, job.queued_ns);
  qkv_yield_now();
  const uint64_t began_ns = qkv_stage_now();
  job.run(job.context);
  const uint64_t took_ns = qkv_stage_now() - began_ns;
  qkv_yield_rest();
  pthread_mutex_lock(&pool->lock);
  qkv_fair_done(pool->queue, &job, took_ns);
}

// False where the thread is to end: it has had nothing to do, and is not the last one.
static bool wait_for_work(qkv_pool *pool) {
  int code = 0;
  pool->idle++;
  if (pool->config.on_demand) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += QKV_POOL_LINGER_MS / 1000;
    code = pthread_cond_timedwait(&pool->work, &pool->lock, &until);
  } else {
    pthread_cond_wait(&pool->work, &pool->lock);
  }
  pool->idle--;
  return code != ETIMEDOUT || qkv_fair_ready(pool->queue) || find_loop(pool) != NULL || pool->running == 1;
}

static void *thread_main(void *context) {
  pool_member *self = context;
  qkv_pool *pool = self->pool;
  (pool->config.yields ? qkv_yield_enable : qkv_yield_set_nice)(pool->config.nice);
  if (pool->config.pinned) (void)qkv_cpu_pin(self->worker - 1);
  bool helped = false;  // since its last job
  pthread_mutex_lock(&pool->lock);
  pool->idle--;
  for (;;) {
    // Threads that are not the pool's may start loop after loop: jobs go on between them.
    pool_loop *loop = helped && qkv_fair_ready(pool->queue) ? NULL : find_loop(pool);
    if (loop != NULL && pool->config.yields) {
      yield(pool);
      loop = find_loop(pool);
      if (loop == NULL) qkv_yield_rest();
    }
    if (loop != NULL) {
      help(pool, loop, self->worker);
      helped = true;
    } else if (qkv_fair_ready(pool->queue)) {
      run_job(pool);
      helped = false;
    } else if (pool->ending || !wait_for_work(pool)) {
      break;
    }
  }
  self->ended = true;
  pool->running--;
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

// In a place that no thread has; the lock is held. 0, or why the system refuses.
static int start_thread(qkv_pool *pool) {
  pool_member *member = pool->members;
  while (member->started && !member->ended) member++;
  if (member->started) pthread_join(member->thread, NULL);  // holds no lock any more
  *member = (pool_member){.pool = pool, .worker = (size_t)(member - pool->members) + 1};
  sigset_t all, before;
  static const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP};
  sigfillset(&all);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
  // Signals are for the threads that wait for them; those of what a thread does itself come to it, and end the
  // process whatever handler there is where they are blocked.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int code = pthread_create(&member->thread, NULL, thread_main, member);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (code != 0) return code;
  (void)pthread_setname_np(member->thread, "qkv-pool");
  member->started = true;
  pool->running++;
  pool->idle++;  // until it looks for work
  return 0;
}

// Where there is more work than idle threads. Where the system refuses a thread, the others do its work.
static void start_on_demand(qkv_pool *pool, size_t wanted) {
  if (!pool->config.on_demand || pool->ending) return;
  while (wanted > pool->idle && pool->running < pool->config.threads) {
    if (start_thread(pool) != 0) return;
  }
}

// One thread, idle or new, for a job that may start. The lock is held.
static void call_thread(qkv_pool *pool) {
  if (!qkv_fair_ready(pool->queue)) return;
  start_on_demand(pool, 1);
  pthread_cond_signal(&pool->work);
}

static qkv_pool *create(const qkv_pool_config *config) {
  qkv_pool *made = calloc(1, sizeof *made);
  pthread_condattr_t attributes;
  assert(made != NULL && (config->on_demand || !config->waits));
  pthread_mutex_init(&made->lock, NULL);
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&made->work, &attributes);
  pthread_condattr_destroy(&attributes);
  made->config = *config;
  made->queue = qkv_fair_create(config->queue_max, config->waits ? config->threads : 0);
  made->members = calloc(config->threads + 1, sizeof *made->members);
  assert(made->members != NULL);
  return made;
}

qkv_status qkv_pool_create_with(const qkv_pool_config *config, qkv_pool **pool, qkv_error *error) {
  qkv_pool *made = create(config);
  const size_t first = config->on_demand && config->threads > 1 ? 1 : config->threads;
  int code = 0;
  pthread_mutex_lock(&made->lock);
  while (made->running < first && code == 0) code = start_thread(made);
  const size_t number = made->running + 1;
  pthread_mutex_unlock(&made->lock);
  if (code == 0) {
    *pool = made;
    return QKV_OK;
  }
  qkv_pool_destroy(&made);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "thread %zu of %zu cannot be started: %s", number, config->threads,
                  strerror(code));
}

qkv_status qkv_pool_create(size_t threads, size_t queue_max, qkv_pool **pool, qkv_error *error) {
  return qkv_pool_create_with(&(qkv_pool_config){.threads = threads, .queue_max = queue_max}, pool, error);
}

void qkv_pool_destroy(qkv_pool **pool) {
  qkv_pool *old = *pool;
  if (old == NULL) return;
  pthread_mutex_lock(&old->lock);
  old->ending = true;
  pthread_cond_broadcast(&old->work);
  pthread_mutex_unlock(&old->lock);
  for (size_t i = 0; i < old->config.threads; i++) {
    if (old->members[i].started) pthread_join(old->members[i].thread, NULL);
  }
  assert(old->loops == NULL && qkv_fair_length(old->queue) == 0);
  pthread_cond_destroy(&old->work);
  pthread_mutex_destroy(&old->lock);
  free(old->members);
  qkv_fair_destroy(&old->queue);
  free(old);
  *pool = NULL;
}

qkv_status qkv_pool_submit_as(qkv_pool *pool, const qkv_share *share, qkv_job_fn *run, void *context) {
  if (pool->config.threads == 0) return QKV_RESOURCE_EXHAUSTED;
  const qkv_fair_job job = {
      .run = run, .context = context, .share = *share, .queued_ns = pool->config.timed ? qkv_stage_now() : 0};
  pthread_mutex_lock(&pool->lock);
  const qkv_status status = qkv_fair_push(pool->queue, &job);
  if (status == QKV_OK) call_thread(pool);
  pthread_mutex_unlock(&pool->lock);
  return status;
}

qkv_status qkv_pool_submit(qkv_pool *pool, qkv_job_fn *run, void *context) {
  return qkv_pool_submit_as(pool, &(qkv_share){0}, run, context);
}

static void announce(qkv_pool *pool, pool_loop *loop) {
  pthread_mutex_lock(&pool->lock);
  loop->next = pool->loops;
  pool->loops = loop;
  const size_t wanted = loop->count - 1 < pool->config.threads ? loop->count - 1 : pool->config.threads;
  start_on_demand(pool, wanted);
  pthread_mutex_unlock(&pool->lock);
  for (size_t i = 0; i < wanted; i++) pthread_cond_signal(&pool->work);
}

static void withdraw(qkv_pool *pool, pool_loop *loop) {
  pthread_mutex_lock(&pool->lock);
  pool_loop **link = &pool->loops;
  while (*link != loop) link = &(*link)->next;
  *link = loop->next;
  while (loop->helpers > 0) pthread_cond_wait(&loop->finished, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
}

void qkv_pool_loop(qkv_pool *pool, size_t count, qkv_loop_fn *run, void *context) {
  if (count <= 1 || pool->config.threads == 0) {
    for (size_t i = 0; i < count; i++) run(context, i, 0);
    return;
  }
  pool_loop loop = {.run = run, .context = context, .count = count};
  pthread_cond_init(&loop.finished, NULL);
  announce(pool, &loop);
  draw(&loop, 0);
  withdraw(pool, &loop);
  pthread_cond_destroy(&loop.finished);
}

size_t qkv_pool_width(const qkv_pool *pool) {
  return pool->config.threads + 1;
}

size_t qkv_pool_waiting(const qkv_pool *pool) {
  qkv_pool *locked = (qkv_pool *)pool;
  pthread_mutex_lock(&locked->lock);
  size_t waiting = qkv_fair_length(pool->queue);
  pthread_mutex_unlock(&locked->lock);
  return waiting;
}

size_t qkv_pool_running(const qkv_pool *pool) {
  qkv_pool *locked = (qkv_pool *)pool;
  pthread_mutex_lock(&locked->lock);
  const size_t running = pool->running;
  pthread_mutex_unlock(&locked->lock);
  return running;
}
