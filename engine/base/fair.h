// A fair queue: jobs of several flows (tenants), of which each gets processors by its weight, however many jobs it
// has.
//
// Start-time fair queueing (Goyal, Vin, Cheng 1996). A flow's next job starts where its last one ended, in virtual
// time: its cost over the flow's weight later than that one started; of a flow of which nothing waited, now at the
// earliest, which is where the job started that was taken last. The flow that starts first is next. So a flow that
// has waited is served before one that has been served, and one that was idle has saved up no credit.
//
//   flow a, weight 100  |--a1--|--a2--|--a3--|          three long jobs, waiting
//   flow b, weight 100  |b1|b2|                         taken: a1 b1 b2 a2 a3
//
// What a job costs is known when it has run: until then it is taken to be what the flow's jobs cost on average
// lately, and put right by `done`. Urgent jobs go before all others of the queue, in the same order among themselves.
// One job in QKV_FAIR_URGENT + 1 is one of the others, where there are any.
//
// Where jobs wait for long, shares of time are not enough: a flow could have all threads, and the next one to come
// would wait until one of them is free. With a number of `threads` a flow's next job starts only while fewer of its
// jobs run than threads are free, the dynamic threshold of shared-memory switches (Choudhury, Hahne 1998). So a flow
// that is alone has half of the threads, two flows about a third each, and the last free thread goes to a flow that
// has none.
//
// Places in the queue are shared by such a threshold, too: a flow's jobs wait while they are fewer than QKV_FAIR_PART
// times the places that are left. So one that is alone has three quarters of the places, and others find one.
// Flow 0, the owner's own jobs, may have all; so may a job that has run for a while and is queued again for what is
// left of it, as it would else keep its thread. For those there are QKV_FAIR_AGAIN more places where all are taken:
// enough, as the thread of each takes another job then.
//
// Flows are told apart by the last bits of their number: two that have these in common are one flow. Threads: the
// owner's.
#ifndef QKV_ENGINE_BASE_FAIR_H
#define QKV_ENGINE_BASE_FAIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum { QKV_FAIR_FLOWS = 512, QKV_FAIR_URGENT = 8, QKV_FAIR_WEIGHT = 100, QKV_FAIR_PART = 3, QKV_FAIR_AGAIN = 256 };

// The flow that a job belongs to. Zeros: flow 0, of the weight QKV_FAIR_WEIGHT.
typedef struct qkv_share {
  uint64_t flow;
  uint32_t weight;  // 0: QKV_FAIR_WEIGHT
  bool urgent;
  bool again;  // the job has run before
} qkv_share;

typedef struct qkv_fair_job {
  void (*run)(void *context);
  void *context;
  uint64_t queued_ns;  // the owner's
  // The queue's.
  qkv_share share;
  double cost;
  uint64_t number;
} qkv_fair_job;

typedef struct qkv_fair qkv_fair;

// `threads`: as many jobs run at most, and no flow has all of them; 0: any flow may have as many as it gets.
qkv_fair *qkv_fair_create(size_t jobs_max, size_t threads);
void qkv_fair_destroy(qkv_fair **fair);  // what waits is dropped

size_t qkv_fair_length(const qkv_fair *fair);
// RESOURCE_EXHAUSTED where `jobs_max` wait, and for a job that has run before so many more, UNAVAILABLE where the
// flow has its part of them. `job` has its first three fields and the share.
qkv_status qkv_fair_push(qkv_fair *fair, const qkv_fair_job *job);
// Whether a job may start now.
bool qkv_fair_ready(const qkv_fair *fair);
// The next one of those that may start, which is to be given to `done`; there is one (asserted).
qkv_fair_job qkv_fair_pop(qkv_fair *fair);
// The job has taken `ns` nanoseconds.
void qkv_fair_done(qkv_fair *fair, const qkv_fair_job *job, uint64_t ns);

#endif
