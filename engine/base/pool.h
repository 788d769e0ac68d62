// A pool: a bounded number of threads, a bounded queue of jobs, and a parallel loop.
//
// A *job* is run once by one thread. A *loop* splits indexes over the threads that are idle; the thread that starts
// it works too and returns when all indexes are done, so a loop makes progress even when every thread is
// busy, and a job may start loops.
//
// Jobs of one flow start in the order they came, unless some are urgent; those of several flows as fair.h says, by
// the time that they have taken.
//
// Threads: every function may be called from any thread, destroy by the owner alone.
#ifndef QKV_ENGINE_BASE_POOL_H
#define QKV_ENGINE_BASE_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/fair.h"
#include "engine/base/status.h"

typedef struct qkv_pool qkv_pool;

typedef void qkv_job_fn(void *context);
// `worker` is 0 .. qkv_pool_width - 1 and unique among the threads in this loop: an index for scratch.
typedef void qkv_loop_fn(void *context, size_t index, size_t worker);

typedef struct qkv_pool_config {
  size_t threads;    // 0: jobs are refused, loops run on the caller alone
  size_t queue_max;  // jobs that may wait
  // Pins each thread to a processor of its own, as far as there are that many, so that no two threads of a loop share
  // one. Where the system refuses, threads run anywhere.
  bool pinned;
  bool yields;     // to attention (yield.h), before each job and at the work's own yield points
  int nice;        // added to the threads' nice value
  bool on_demand;  // one thread stays; others start when jobs wait, and end after QKV_POOL_LINGER_MS without work
  bool waits;      // jobs may wait long: no flow has all threads (fair.h); with on_demand alone
  bool timed;      // how long jobs wait is counted (histogram.h: QKV_STAGE_QUEUE)
} qkv_pool_config;

enum { QKV_POOL_LINGER_MS = 2000 };

qkv_status qkv_pool_create_with(const qkv_pool_config *config, qkv_pool **pool, qkv_error *error);
qkv_status qkv_pool_create(size_t threads, size_t queue_max, qkv_pool **pool, qkv_error *error);
// Runs what is queued, joins the threads, clears *pool.
void qkv_pool_destroy(qkv_pool **pool);

// RESOURCE_EXHAUSTED when `queue_max` jobs wait already: the caller refuses its own caller.
qkv_status qkv_pool_submit(qkv_pool *pool, qkv_job_fn *run, void *context);
// The same for a flow; qkv_pool_submit is for flow 0. UNAVAILABLE: the flow has its part of the queue (fair.h).
qkv_status qkv_pool_submit_as(qkv_pool *pool, const qkv_share *share, qkv_job_fn *run, void *context);

// run(context, i, worker) for i in [0, count), in any order, on the caller and on idle threads.
void qkv_pool_loop(qkv_pool *pool, size_t count, qkv_loop_fn *run, void *context);

// Threads a loop can use at most, the caller included; >= 1.
size_t qkv_pool_width(const qkv_pool *pool);
// Jobs that wait now, and threads that there are.
size_t qkv_pool_waiting(const qkv_pool *pool);
size_t qkv_pool_running(const qkv_pool *pool);

#endif
