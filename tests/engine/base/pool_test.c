#include "engine/base/pool.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include <cmocka.h>

#include "engine/base/cpu.h"
#include "engine/base/yield.h"

#define INDEXES 500

static qkv_pool *pool_of(size_t threads, size_t queue_max) {
  qkv_pool *pool = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_pool_create(threads, queue_max, &pool, &error), QKV_OK);
  return pool;
}

// A gate that holds threads until it is opened.
typedef struct gate_state {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int arrived;
  bool open;
} gate_state;

#define GATE_CLOSED \
  { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER }

static void pass_gate(void *context) {
  gate_state *gate = context;
  pthread_mutex_lock(&gate->lock);
  gate->arrived++;
  pthread_cond_broadcast(&gate->changed);
  while (!gate->open) pthread_cond_wait(&gate->changed, &gate->lock);
  pthread_mutex_unlock(&gate->lock);
}

static void await_arrivals(gate_state *gate, int count) {
  pthread_mutex_lock(&gate->lock);
  while (gate->arrived < count) pthread_cond_wait(&gate->changed, &gate->lock);
  pthread_mutex_unlock(&gate->lock);
}

static void open_gate(gate_state *gate) {
  pthread_mutex_lock(&gate->lock);
  gate->open = true;
  pthread_cond_broadcast(&gate->changed);
  pthread_mutex_unlock(&gate->lock);
}

static void add_one(void *context) {
  atomic_fetch_add((_Atomic int *)context, 1);
}

typedef struct tally_state {
  int visits[INDEXES];            // written by the thread that runs the index; read after the loop
  _Atomic int inside[16];         // by worker: two at once would be an error
  _Atomic int worker_collisions;  // times that happened
  size_t width;
} tally_state;

static void visit(void *context, size_t index, size_t worker) {
  tally_state *tally = context;
  if (worker >= tally->width || atomic_fetch_add(&tally->inside[worker], 1) != 0) {
    atomic_fetch_add(&tally->worker_collisions, 1);
  }
  tally->visits[index]++;
  atomic_fetch_sub(&tally->inside[worker], 1);
}

static void assert_visited(const tally_state *tally, size_t count) {
  for (size_t i = 0; i < INDEXES; i++) assert_int_equal(tally->visits[i], i < count ? 1 : 0);
  assert_int_equal(tally->worker_collisions, 0);
}

static void test_loop_covers_each_index_once(void **state) {
  (void)state;
  static const size_t counts[] = {0, 1, 2, 3, 7, INDEXES};
  for (size_t threads = 0; threads < 5; threads++) {
    qkv_pool *pool = pool_of(threads, 4);
    assert_int_equal(qkv_pool_width(pool), threads + 1);
    for (int round = 0; round < 60; round++) {
      for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        tally_state tally = {.width = qkv_pool_width(pool)};
        qkv_pool_loop(pool, counts[i], visit, &tally);
        assert_visited(&tally, counts[i]);
      }
    }
    qkv_pool_destroy(&pool);
    assert_null(pool);
  }
}

static void meet(void *context, size_t index, size_t worker) {
  (void)index;
  (void)worker;
  gate_state *gate = context;
  pthread_mutex_lock(&gate->lock);
  gate->arrived++;
  pthread_cond_broadcast(&gate->changed);
  while (gate->arrived < 4) pthread_cond_wait(&gate->changed, &gate->lock);
  pthread_mutex_unlock(&gate->lock);
}

// Yielding threads come, too, though attention has all processors.
static void test_loop_waits_for_yielding_threads(void **state) {
  (void)state;
  qkv_pool *pool = NULL;
  assert_int_equal(
      qkv_pool_create_with(&(qkv_pool_config){.threads = 3, .queue_max = 1, .yields = true}, &pool, NULL), QKV_OK);
  qkv_yield_urgent_begin(qkv_cpu_count());
  for (int round = 0; round < 5; round++) {
    gate_state gate = GATE_CLOSED;
    qkv_pool_loop(pool, 4, meet, &gate);
    assert_int_equal(gate.arrived, 4);
  }
  qkv_yield_urgent_end(qkv_cpu_count());
  qkv_pool_destroy(&pool);
}

// Four indexes that wait for each other end only if four threads run them at the same time.
static void test_loop_uses_idle_threads(void **state) {
  (void)state;
  qkv_pool *pool = pool_of(3, 1);
  for (int round = 0; round < 20; round++) {
    gate_state gate = GATE_CLOSED;
    qkv_pool_loop(pool, 4, meet, &gate);
    assert_int_equal(gate.arrived, 4);
  }
  qkv_pool_destroy(&pool);
}

static void test_loop_progresses_while_all_are_busy(void **state) {
  (void)state;
  qkv_pool *pool = pool_of(2, 2);
  gate_state gate = GATE_CLOSED;
  assert_int_equal(qkv_pool_submit(pool, pass_gate, &gate), QKV_OK);
  assert_int_equal(qkv_pool_submit(pool, pass_gate, &gate), QKV_OK);
  await_arrivals(&gate, 2);
  tally_state tally = {.width = 3};
  qkv_pool_loop(pool, INDEXES, visit, &tally);  // would hang if it needed a helper
  assert_visited(&tally, INDEXES);
  open_gate(&gate);
  qkv_pool_destroy(&pool);
}

static void test_queue_is_bounded(void **state) {
  (void)state;
  qkv_pool *pool = pool_of(1, 3);
  gate_state gate = GATE_CLOSED;
  _Atomic int done = 0;
  assert_int_equal(qkv_pool_submit(pool, pass_gate, &gate), QKV_OK);
  await_arrivals(&gate, 1);
  for (size_t i = 0; i < 3; i++) {
    assert_int_equal(qkv_pool_waiting(pool), i);
    assert_int_equal(qkv_pool_submit(pool, add_one, &done), QKV_OK);
  }
  assert_int_equal(qkv_pool_submit(pool, add_one, &done), QKV_RESOURCE_EXHAUSTED);
  assert_int_equal(qkv_pool_waiting(pool), 3);
  assert_int_equal(done, 0);
  open_gate(&gate);
  qkv_pool_destroy(&pool);  // runs what is queued
  assert_int_equal(done, 3);
}

static void test_no_threads(void **state) {
  (void)state;
  qkv_pool *pool = pool_of(0, 8);
  _Atomic int done = 0;
  assert_int_equal(qkv_pool_submit(pool, add_one, &done), QKV_RESOURCE_EXHAUSTED);
  qkv_pool_destroy(&pool);
  pool = pool_of(1, 0);
  assert_int_equal(qkv_pool_submit(pool, add_one, &done), QKV_RESOURCE_EXHAUSTED);
  qkv_pool_destroy(&pool);
  assert_int_equal(done, 0);
}

typedef struct nest_state {
  qkv_pool *pool;
  _Atomic int sum;
} nest_state;

static void inner(void *context, size_t index, size_t worker) {
  (void)worker;
  atomic_fetch_add(&((nest_state *)context)->sum, (int)index);
}

static void outer(void *context, size_t index, size_t worker) {
  (void)index;
  (void)worker;
  qkv_pool_loop(((nest_state *)context)->pool, 20, inner, context);
}

static void job_with_loops(void *context) {
  qkv_pool_loop(((nest_state *)context)->pool, 10, outer, context);
}

static void test_jobs_with_nested_loops(void **state) {
  (void)state;
  nest_state nest = {.pool = pool_of(3, 64)};
  for (int i = 0; i < 40; i++) assert_int_equal(qkv_pool_submit(nest.pool, job_with_loops, &nest), QKV_OK);
  job_with_loops(&nest);
  qkv_pool_destroy(&nest.pool);
  assert_int_equal(nest.sum, 41 * 10 * 190);
}

typedef struct caller_state {
  qkv_pool *pool;
  _Atomic int *done;
  int refused;
  bool right;
} caller_state;

static void *call_a_lot(void *context) {
  caller_state *self = context;
  self->right = true;
  for (int round = 0; round < 100; round++) {
    tally_state tally = {.width = qkv_pool_width(self->pool)};
    qkv_pool_loop(self->pool, INDEXES, visit, &tally);
    for (size_t i = 0; i < INDEXES; i++) self->right = self->right && tally.visits[i] == 1;
    self->right = self->right && tally.worker_collisions == 0;
    if (qkv_pool_submit(self->pool, add_one, self->done) != QKV_OK) self->refused++;
  }
  return NULL;
}

static void test_many_callers(void **state) {
  (void)state;
  qkv_pool *pool = pool_of(3, 2);
  _Atomic int done = 0;
  pthread_t threads[4];
  caller_state callers[4];
  for (int i = 0; i < 4; i++) {
    callers[i] = (caller_state){.pool = pool, .done = &done};
    assert_int_equal(pthread_create(&threads[i], NULL, call_a_lot, &callers[i]), 0);
  }
  int refused = 0;
  for (int i = 0; i < 4; i++) {
    (void)pthread_join(threads[i], NULL);
    assert_true(callers[i].right);
    refused += callers[i].refused;
  }
  qkv_pool_destroy(&pool);
  assert_int_equal(done + refused, 400);
}

static void note_priority(void *context) {
  *(_Atomic int *)context = 100 + getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
}

// Of that pool's threads alone.
static void test_nice_threads(void **state) {
  (void)state;
  qkv_pool *pool = NULL;
  _Atomic int seen = 0;
  const int own = getpriority(PRIO_PROCESS, 0);
  assert_int_equal(qkv_pool_create_with(&(qkv_pool_config){.threads = 1, .queue_max = 1, .nice = 3}, &pool, NULL),
                   QKV_OK);
  assert_int_equal(qkv_pool_submit(pool, note_priority, &seen), QKV_OK);
  qkv_pool_destroy(&pool);
  assert_int_equal(seen - 100, own + 3 < 19 ? own + 3 : 19);
  assert_int_equal(getpriority(PRIO_PROCESS, 0), own);
}

static void await_running(const qkv_pool *pool, size_t running) {
  while (qkv_pool_running(pool) != running) (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

// As many threads as jobs at once, up to the most; one is left when they have had nothing to do for a while.
static void test_threads_on_demand(void **state) {
  (void)state;
  qkv_pool *pool = NULL;
  const qkv_pool_config config = {.threads = 3, .queue_max = 8, .on_demand = true};
  assert_int_equal(qkv_pool_create_with(&config, &pool, NULL), QKV_OK);
  assert_int_equal(qkv_pool_running(pool), 1);
  for (int round = 0; round < 2; round++) {
    gate_state gate = GATE_CLOSED;
    for (size_t i = 0; i < 3; i++) assert_int_equal(qkv_pool_submit(pool, pass_gate, &gate), QKV_OK);
    await_arrivals(&gate, 3);
    assert_int_equal(qkv_pool_submit(pool, pass_gate, &gate), QKV_OK);
    assert_int_equal(qkv_pool_running(pool), 3);
    assert_int_equal(qkv_pool_waiting(pool), 1);
    open_gate(&gate);
    await_running(pool, 1);
    assert_int_equal(qkv_pool_waiting(pool), 0);
  }
  // A loop starts threads, too, and they end with the pool.
  gate_state gate = GATE_CLOSED;
  qkv_pool_loop(pool, 4, meet, &gate);
  assert_int_equal(qkv_pool_running(pool), 3);
  qkv_pool_destroy(&pool);
}

typedef struct place {
  gate_state *gate;
  int cpu;  // -1: more than one
} place;

static void note_place(void *context) {
  place *seen = context;
  cpu_set_t set;
  seen->cpu = -1;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) == 1) seen->cpu = sched_getcpu();
  pass_gate(seen->gate);  // so each job has a thread of its own
}

static void test_pinned_threads(void **state) {
  (void)state;
  if (qkv_cpu_count() < 2) skip();  // two threads have one processor then
  qkv_pool *pool = NULL;
  gate_state gate = GATE_CLOSED;
  place seen[] = {{.gate = &gate}, {.gate = &gate}};
  assert_int_equal(
      qkv_pool_create_with(&(qkv_pool_config){.threads = 2, .queue_max = 2, .pinned = true}, &pool, NULL), QKV_OK);
  for (size_t i = 0; i < 2; i++) assert_int_equal(qkv_pool_submit(pool, note_place, &seen[i]), QKV_OK);
  await_arrivals(&gate, 2);
  open_gate(&gate);
  qkv_pool_destroy(&pool);
  assert_true(seen[0].cpu >= 0 && seen[1].cpu >= 0);
  assert_int_not_equal(seen[0].cpu, seen[1].cpu);
}

// ---- Shares ----

// Jobs of a flow that come again as soon as they have run, until it is over.
typedef struct flood {
  qkv_pool *pool;
  qkv_share share;
  _Atomic bool *over;
  _Atomic uint64_t *ns;  // that the flow's jobs took
  _Atomic int *left;     // jobs of all flows that have not ended
  uint64_t job_ns;
} flood;

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void work_and_come_again(void *context) {
  flood *own = context;
  const uint64_t begin = now_ns();
  uint64_t took = 0;
  while ((took = now_ns() - begin) < own->job_ns) continue;
  atomic_fetch_add(own->ns, took);
  if (atomic_load(own->over) || qkv_pool_submit_as(own->pool, &own->share, work_and_come_again, own) != QKV_OK)
    atomic_fetch_sub(own->left, 1);
}

// One flow has 40 long jobs waiting all the time, the other one as many as there are threads, short ones: each gets
// half of the threads' time.
static void test_a_flood_leaves_others_their_share(void **state) {
  (void)state;
  enum { MANY = 40, FEW = 2, ALL = MANY + FEW };
  qkv_pool *pool = NULL;
  flood floods[ALL];
  _Atomic bool over = false;
  _Atomic uint64_t ns[2] = {0, 0};
  _Atomic int left = ALL;
  assert_int_equal(qkv_pool_create(1, 2 * ALL, &pool, NULL), QKV_OK);
  for (int i = 0; i < ALL; i++) {
    const bool many = i < MANY;
    floods[i] = (flood){.pool = pool,
                        .share = {.flow = many ? 1 : 2},
                        .over = &over,
                        .ns = &ns[many ? 0 : 1],
                        .left = &left,
                        .job_ns = many ? 1000000 : 200000};
    assert_int_equal(qkv_pool_submit_as(pool, &floods[i].share, work_and_come_again, &floods[i]), QKV_OK);
  }
  const struct timespec while_ = {.tv_nsec = 400 * 1000 * 1000};
  (void)nanosleep(&while_, NULL);
  const double few = (double)atomic_load(&ns[1]), all = few + (double)atomic_load(&ns[0]);
  atomic_store(&over, true);
  qkv_pool_destroy(&pool);
  assert_int_equal(atomic_load(&left), 0);
  assert_true(few / all > 0.9 / 2 && few / all < 1.1 / 2);
}

// ---- Jobs that wait ----

static qkv_pool *waiting_pool(size_t threads, size_t queue_max) {
  qkv_pool *pool = NULL;
  const qkv_pool_config config = {.threads = threads, .queue_max = queue_max, .on_demand = true, .waits = true};
  assert_int_equal(qkv_pool_create_with(&config, &pool, NULL), QKV_OK);
  return pool;
}

static void submit_as(qkv_pool *pool, uint64_t flow, qkv_job_fn *run, void *context) {
  assert_int_equal(qkv_pool_submit_as(pool, &(qkv_share){.flow = flow}, run, context), QKV_OK);
}

// However many of its jobs wait, and also where all that are queued have to run since the pool ends.
static void test_a_flow_that_waits_leaves_threads(void **state) {
  (void)state;
  qkv_pool *pool = waiting_pool(4, 16);
  gate_state first = GATE_CLOSED, second = GATE_CLOSED;
  _Atomic int done = 0;
  for (int i = 0; i < 6; i++) submit_as(pool, 1, pass_gate, &first);
  await_arrivals(&first, 2);
  submit_as(pool, 2, pass_gate, &second);
  await_arrivals(&second, 1);
  assert_int_equal(qkv_pool_waiting(pool), 4);
  assert_int_equal(first.arrived, 2);
  submit_as(pool, 2, add_one, &done);
  submit_as(pool, 3, pass_gate, &second);
  await_arrivals(&second, 2);
  assert_int_equal(qkv_pool_waiting(pool), 5);
  assert_int_equal(qkv_pool_running(pool), 4);
  open_gate(&second);
  while (atomic_load(&done) == 0) (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  open_gate(&first);
  qkv_pool_destroy(&pool);
  assert_int_equal(first.arrived, 6);
}

// Two flows with a thread each, of three: as a job of the one ends, the other one's next job starts, as it has had
// less time, and then the first one's next job may start, too, on a thread that has to be made for it.
static void test_the_end_of_a_job_lets_two_start(void **state) {
  (void)state;
  qkv_pool *pool = waiting_pool(3, 16);
  gate_state first = GATE_CLOSED, others = GATE_CLOSED;
  submit_as(pool, 1, pass_gate, &first);
  await_arrivals(&first, 1);
  submit_as(pool, 2, pass_gate, &others);
  await_arrivals(&others, 1);
  submit_as(pool, 1, pass_gate, &others);
  submit_as(pool, 2, pass_gate, &others);
  assert_int_equal(qkv_pool_running(pool), 2);
  assert_int_equal(qkv_pool_waiting(pool), 2);
  (void)nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  open_gate(&first);
  await_arrivals(&others, 3);
  assert_int_equal(qkv_pool_running(pool), 3);
  open_gate(&others);
  qkv_pool_destroy(&pool);
}

enum { CROWD = 5, CROWD_THREADS = 6 };

typedef struct crowd {
  qkv_pool *pool;
  _Atomic int inside[CROWD], worst, done;
} crowd;

typedef struct crowd_member {
  crowd *all;
  unsigned flow;
} crowd_member;

static void stay_a_moment(void *context) {
  const crowd_member *own = context;
  const int inside = atomic_fetch_add(&own->all->inside[own->flow], 1) + 1;
  int worst = atomic_load(&own->all->worst);
  while (inside > worst && !atomic_compare_exchange_weak(&own->all->worst, &worst, inside)) continue;
  if (own->flow % 2 == 0) (void)nanosleep(&(struct timespec){.tv_nsec = 50000 * (own->flow + 1)}, NULL);
  atomic_fetch_sub(&own->all->inside[own->flow], 1);
  atomic_fetch_add(&own->all->done, 1);
}

static void *submit_a_lot(void *context) {
  crowd_member *own = context;
  for (int i = 0; i < 300; i++) submit_as(own->all->pool, own->flow, stay_a_moment, own);
  return NULL;
}

// All run, and none of five flows ever has more than half of the threads.
static void test_flows_that_wait_all_end(void **state) {
  (void)state;
  for (int round = 0; round < 3; round++) {
    crowd all = {.pool = waiting_pool(CROWD_THREADS, CROWD * 400)};
    crowd_member members[CROWD];
    pthread_t threads[CROWD];
    for (unsigned i = 0; i < CROWD; i++) {
      members[i] = (crowd_member){.all = &all, .flow = i};
      assert_int_equal(pthread_create(&threads[i], NULL, submit_a_lot, &members[i]), 0);
    }
    for (int i = 0; i < CROWD; i++) (void)pthread_join(threads[i], NULL);
    const int most = round == 0 ? CROWD * 300 : 0;  // or the pool's end runs what is left
    while (atomic_load(&all.done) < most) (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    qkv_pool_destroy(&all.pool);
    assert_int_equal(all.done, CROWD * 300);
    assert_in_range(all.worst, 1, CROWD_THREADS / 2);
  }
}

typedef struct loop_state {
  qkv_pool *pool;
  qkv_loop_fn *run;
  void *context;
} loop_state;

static void *run_loop_of_two(void *context) {
  const loop_state *loop = context;
  qkv_pool_loop(loop->pool, 2, loop->run, loop->context);
  return NULL;
}

static void pass_gate_in_loop(void *context, size_t index, size_t worker) {
  (void)index;
  (void)worker;
  pass_gate(context);
}

static void open_by_job(void *context) {
  open_gate(context);
}

// As pass_gate; after 20 s it counts no arrivals any more.
static void await_job(void *context, size_t index, size_t worker) {
  (void)index;
  (void)worker;
  gate_state *gate = context;
  struct timespec until;
  (void)clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 20;
  pthread_mutex_lock(&gate->lock);
  gate->arrived++;
  pthread_cond_broadcast(&gate->changed);
  while (!gate->open && pthread_cond_timedwait(&gate->changed, &gate->lock, &until) == 0) continue;
  if (!gate->open) gate->arrived = -1;
  pthread_mutex_unlock(&gate->lock);
}

// The pool's thread helps in a loop of another thread, and the next loop has begun before it ends.
static void test_loops_of_others_leave_threads_to_jobs(void **state) {
  (void)state;
  qkv_pool *pool = pool_of(1, 1);
  gate_state first = GATE_CLOSED, ran = GATE_CLOSED;
  pthread_t threads[2];
  loop_state loops[2] = {{pool, pass_gate_in_loop, &first}, {pool, await_job, &ran}};
  assert_int_equal(pthread_create(&threads[0], NULL, run_loop_of_two, &loops[0]), 0);
  await_arrivals(&first, 2);
  assert_int_equal(qkv_pool_submit(pool, open_by_job, &ran), QKV_OK);
  assert_int_equal(pthread_create(&threads[1], NULL, run_loop_of_two, &loops[1]), 0);
  await_arrivals(&ran, 1);
  open_gate(&first);
  for (int i = 0; i < 2; i++) (void)pthread_join(threads[i], NULL);
  assert_int_equal(ran.arrived, 2);
  qkv_pool_destroy(&pool);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_loop_covers_each_index_once),
                                     cmocka_unit_test(test_loop_uses_idle_threads),
                                     cmocka_unit_test(test_loop_waits_for_yielding_threads),
                                     cmocka_unit_test(test_loop_progresses_while_all_are_busy),
                                     cmocka_unit_test(test_queue_is_bounded),
                                     cmocka_unit_test(test_no_threads),
                                     cmocka_unit_test(test_jobs_with_nested_loops),
                                     cmocka_unit_test(test_many_callers),
                                     cmocka_unit_test(test_nice_threads),
                                     cmocka_unit_test(test_threads_on_demand),
                                     cmocka_unit_test(test_pinned_threads),
                                     cmocka_unit_test(test_a_flood_leaves_others_their_share),
                                     cmocka_unit_test(test_a_flow_that_waits_leaves_threads),
                                     cmocka_unit_test(test_the_end_of_a_job_lets_two_start),
                                     cmocka_unit_test(test_flows_that_wait_all_end),
                                     cmocka_unit_test(test_loops_of_others_leave_threads_to_jobs)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
