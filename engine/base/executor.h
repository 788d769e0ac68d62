// The executor: all threads of a daemon that run jobs, by what the jobs do.
//
//   compute    as many threads as processors; a job may wait for a layer for a moment, never for a disk
//   blocking   threads on demand, for jobs that wait most of the time, for a disk or for a tenant's quota. One flow
//              has half of them at most, so that others have threads while its jobs wait (fair.h)
//   upkeep     two threads on demand, for background work, so that no other job keeps it waiting
//
// Compute and blocking have an interactive half, which a client waits for, and a bulk half. Threads of bulk work and
// upkeep have a nice value and yield to attention (yield.h). Each kind has its own queue, which flows share fairly
// (fair.h).
//
// Threads: every function may be called from any thread, destroy by the owner alone.
#ifndef QKV_ENGINE_BASE_EXECUTOR_H
#define QKV_ENGINE_BASE_EXECUTOR_H

#include "engine/base/pool.h"

typedef enum qkv_work {
  QKV_WORK_INTERACTIVE,
  QKV_WORK_BULK,
  QKV_WORK_BLOCKING,
  QKV_WORK_BULK_BLOCKING,
  QKV_WORK_UPKEEP,
  QKV_WORK_KINDS
} qkv_work;

typedef struct qkv_executor_config {
  size_t threads;       // that compute, of each half; >= 1
  size_t blocking_max;  // that may wait for a disk, of each half; >= 1; one flow has half of them
  size_t queue_max;     // jobs of each kind that may wait
  int bulk_nice;
  bool pinned;  // interactive compute threads (pool.h)
} qkv_executor_config;

typedef struct qkv_executor qkv_executor;

// RESOURCE_EXHAUSTED: the system gives no more threads.
qkv_status qkv_executor_create(const qkv_executor_config *config, qkv_executor **executor, qkv_error *error);
// Runs what is queued, interactive work first, joins the threads, clears *executor. NULL inside: nothing.
void qkv_executor_destroy(qkv_executor **executor);

// RESOURCE_EXHAUSTED when `queue_max` jobs of the kind wait already: the caller refuses its own caller.
qkv_status qkv_executor_submit(qkv_executor *executor, qkv_work work, qkv_job_fn *run, void *context);
// The same for a flow; qkv_executor_submit is for flow 0. UNAVAILABLE: the flow has its part of the queue (fair.h).
qkv_status qkv_executor_submit_as(qkv_executor *executor, qkv_work work, const qkv_share *share, qkv_job_fn *run,
                                  void *context);

// The threads of a kind, for loops (pool.h). Borrowed.
qkv_pool *qkv_executor_pool(const qkv_executor *executor, qkv_work work);

// Of all kinds: jobs that wait now, threads that there are.
size_t qkv_executor_waiting(const qkv_executor *executor);
size_t qkv_executor_threads(const qkv_executor *executor);

#endif
