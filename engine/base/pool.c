#include "engine/base/pool.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/cpu.h"
#include "engine/base/precedence.h"

typedef struct pool_job {
  qkv_job_fn *run;
  void *context;
} pool_job;

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
} pool_member;

// What its threads are like.
typedef struct pool_kind {
  bool pinned, stands_back;
  int nice;
} pool_kind;

struct qkv_pool {
  pthread_mutex_t lock;
  pthread_cond_t work;  // a job or a loop came, or the end
  bool ending;
  pool_loop *loops;  // the active ones, newest first: inner loops before the outer ones that wait for them
  pool_job *queue;   // a ring
  size_t queue_max;
  size_t queue_head;
  size_t queue_length;
  size_t threads;
  pool_kind kind;
  pool_member *members;
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

// The lock is held on entry and on return.
static void help(qkv_pool *pool, pool_loop *loop, size_t worker) {
  loop->helpers++;
  pthread_mutex_unlock(&pool->lock);
  draw(loop, worker);
  qkv_precedence_rest();
  pthread_mutex_lock(&pool->lock);
  if (--loop->helpers == 0) pthread_cond_signal(&loop->finished);
}

// Before a loop is joined, as nobody in it should be waited for. There may be none any more then. The lock is held on
// entry and on return.
static void give_way(qkv_pool *pool) {
  pthread_mutex_unlock(&pool->lock);
  qkv_precedence_give_way();
  pthread_mutex_lock(&pool->lock);
}

// The lock is held on entry and on return.
static void run_job(qkv_pool *pool) {
  pool_job job = pool->queue[pool->queue_head];
  pool->queue_head = (pool->queue_head + 1) % pool->queue_max;
  pool->queue_length--;
  pthread_mutex_unlock(&pool->lock);
  qkv_precedence_give_way();
  job.run(job.context);
  qkv_precedence_rest();
  pthread_mutex_lock(&pool->lock);
}

static void *thread_main(void *context) {
  const pool_member *self = context;
  qkv_pool *pool = self->pool;
  (pool->kind.stands_back ? qkv_precedence_stand_back : qkv_precedence_be_nice)(pool->kind.nice);
  if (pool->kind.pinned) (void)qkv_cpu_pin(self->worker - 1);
  pthread_mutex_lock(&pool->lock);
  for (;;) {
    pool_loop *loop = find_loop(pool);
    if (loop != NULL && pool->kind.stands_back) {
      give_way(pool);
      loop = find_loop(pool);
      if (loop == NULL) qkv_precedence_rest();
    }
    if (loop != NULL) {
      help(pool, loop, self->worker);
    } else if (pool->queue_length > 0) {
      run_job(pool);
    } else if (pool->ending) {
      break;
    } else {
      pthread_cond_wait(&pool->work, &pool->lock);
    }
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

static qkv_status create(size_t threads, size_t queue_max, pool_kind kind, qkv_pool **pool, qkv_error *error) {
  qkv_pool *made = calloc(1, sizeof *made);
  assert(made != NULL);
  pthread_mutex_init(&made->lock, NULL);
  pthread_cond_init(&made->work, NULL);
  made->queue_max = queue_max;
  made->kind = kind;
  made->queue = calloc(queue_max + 1, sizeof *made->queue);
  made->members = calloc(threads + 1, sizeof *made->members);
  assert(made->queue != NULL && made->members != NULL);
  while (made->threads < threads) {
    pool_member *member = &made->members[made->threads];
    member->pool = made;
    member->worker = made->threads + 1;
    int code = pthread_create(&member->thread, NULL, thread_main, member);
    if (code != 0) {
      qkv_status status = qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "thread %zu of %zu cannot be started: %s",
                                   made->threads + 1, threads, strerror(code));
      qkv_pool_destroy(&made);
      return status;
    }
    (void)pthread_setname_np(member->thread, "qkv-pool");
    made->threads++;
  }
  *pool = made;
  return QKV_OK;
}

qkv_status qkv_pool_create(size_t threads, size_t queue_max, qkv_pool **pool, qkv_error *error) {
  return create(threads, queue_max, (pool_kind){0}, pool, error);
}

qkv_status qkv_pool_create_pinned(size_t threads, size_t queue_max, qkv_pool **pool, qkv_error *error) {
  return create(threads, queue_max, (pool_kind){.pinned = true}, pool, error);
}

qkv_status qkv_pool_create_nice(size_t threads, size_t queue_max, int nice, qkv_pool **pool, qkv_error *error) {
  return create(threads, queue_max, (pool_kind){.nice = nice}, pool, error);
}

qkv_status qkv_pool_create_back(size_t threads, size_t queue_max, int nice, qkv_pool **pool, qkv_error *error) {
  return create(threads, queue_max, (pool_kind){.stands_back = true, .nice = nice}, pool, error);
}

void qkv_pool_destroy(qkv_pool **pool) {
  qkv_pool *old = *pool;
  if (old == NULL) return;
  pthread_mutex_lock(&old->lock);
  old->ending = true;
  pthread_cond_broadcast(&old->work);
  pthread_mutex_unlock(&old->lock);
  for (size_t i = 0; i < old->threads; i++) pthread_join(old->members[i].thread, NULL);
  assert(old->loops == NULL && old->queue_length == 0);
  pthread_cond_destroy(&old->work);
  pthread_mutex_destroy(&old->lock);
  free(old->members);
  free(old->queue);
  free(old);
  *pool = NULL;
}

qkv_status qkv_pool_submit(qkv_pool *pool, qkv_job_fn *run, void *context) {
  if (pool->threads == 0) return QKV_RESOURCE_EXHAUSTED;
  pthread_mutex_lock(&pool->lock);
  bool room = pool->queue_length < pool->queue_max;
  if (room) {
    size_t tail = (pool->queue_head + pool->queue_length) % pool->queue_max;
    pool->queue[tail] = (pool_job){.run = run, .context = context};
    pool->queue_length++;
    pthread_cond_signal(&pool->work);
  }
  pthread_mutex_unlock(&pool->lock);
  return room ? QKV_OK : QKV_RESOURCE_EXHAUSTED;
}

static void announce(qkv_pool *pool, pool_loop *loop) {
  pthread_mutex_lock(&pool->lock);
  loop->next = pool->loops;
  pool->loops = loop;
  pthread_mutex_unlock(&pool->lock);
  size_t wanted = loop->count - 1 < pool->threads ? loop->count - 1 : pool->threads;
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
  if (count <= 1 || pool->threads == 0) {
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
  return pool->threads + 1;
}

size_t qkv_pool_waiting(const qkv_pool *pool) {
  qkv_pool *locked = (qkv_pool *)pool;
  pthread_mutex_lock(&locked->lock);
  size_t waiting = pool->queue_length;
  pthread_mutex_unlock(&locked->lock);
  return waiting;
}
