// The daemon: the object that owns everything else.
//
// Made by main before any thread is started and given to every handler as its call's context:
//
//   qkv_daemon *daemon = qkv_rpc_context(call);
//
// Threads: the pointers are fixed while calls run; each object they point to has its own rules. `draining` and
// `metrics` are atomic.
#ifndef QKV_SERVER_DAEMON_H
#define QKV_SERVER_DAEMON_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/executor.h"
#include "engine/cache/store.h"
#include "server/auth/audit.h"
#include "server/auth/auth.h"
#include "server/calibrations.h"
#include "server/gpu/gpus.h"
#include "server/handlers/health.h"
#include "server/http/observed.h"
#include "server/kept_calibrations.h"
#include "server/memory.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/residency/residency.h"
#include "server/retier.h"
#include "server/rpc/rpc.h"
#include "server/rpc/tls.h"
#include "server/shared_memory/passed.h"
#include "server/shared_memory/regions.h"
#include "server/tenants/quotas.h"
#include "server/watch/watch.h"

typedef void qkvi_drain_fn(void *context, int64_t notice_ms, int64_t grace_ms);

typedef struct qkv_daemon {
  const qkv_server_options *options;
  const qkv_options *option_set;  // the same with their sources
  qkv_store *store;
  qkvi_calibrations *calibrations;  // from files
  qkvi_kept_calibrations *kept;     // of pages that come from elsewhere
  qkv_executor *executor;           // jobs of calls, and background jobs
  qkvi_objects *objects;
  qkvi_regions *regions;      // of clients' shared memory; NULL without allow-client-shm
  qkvi_passed *passed;        // descriptors for these; NULL without shm-listen
  qkvi_residency *residency;  // NULL without a data-dir
  qkvi_retierer *retierer;
  qkvi_watch_hub *watch;
  qkvi_memory memory;
  qkv_rpc_server *rpc;
  qkvi_gpus *gpus;         // NULL: without gpu-memory, a driver or kernels
  struct qkvi_http *http;  // NULL without an admin-listen
  qkvi_observed observed;  // calls by method and tenant
  qkvi_jwt *jwt;           // NULL: without jwks
  qkvi_auth *auth;         // NULL: without auth-file
  qkvi_audit *audit;       // NULL: without audit-log
  qkvi_quotas *quotas;
  _Atomic bool quotas_bind;  // those of memory and SSD; not during recovery at a start
  qkvi_tls *tls;             // NULL: without tls-cert
  qkv_error reload_told[4];  // the reasons that the log has last, of auth-file, TLS, quota-file and jwks
  qkv_health health;
  pthread_mutex_t evicting;  // sessions, one thread at a time (server/evict.h)
  int64_t started_ms;        // on the monotonic clock
  _Atomic bool draining;     // set once, before calls are refused
  // Of Admin.Drain: begins a drain in another thread; NULL: this process does not end so.
  _Atomic(qkvi_drain_fn *) drain_asked;
  void *drain_context;     // written before
  _Atomic bool comparing;  // codecs, one call at a time (server/handlers/compare.c)
  qkv_metric_value metrics[QKV_METRIC_COUNT];
} qkv_daemon;

// Time limit for writing the sessions that outlive the process, after the calls have ended.
#define QKV_DAEMON_FINISH_MS 30000

// Starts pool, store and server; calls are served from here on. `options` and `option_set` are borrowed.
qkv_status qkv_daemon_create(const qkv_server_options *options, const qkv_options *option_set, qkv_daemon **out,
                             qkv_error *error);

// Health says NOT_SERVING, after `notice_ms` new calls are refused, running ones get `grace_ms`, and durable sessions
// are written. Blocks; once.
void qkv_daemon_drain(qkv_daemon *daemon, int64_t notice_ms, int64_t grace_ms);
void qkv_daemon_destroy(qkv_daemon **daemon);  // after drain

int64_t qkv_daemon_uptime_ms(const qkv_daemon *daemon);

// Scheduling priority (nice) of bulk rows and of background work: as many threads as in the compute pool get a tenth
// of the processor time of those where there is not enough for both. In addition they yield to attention
// (engine/base/yield.h).
enum { QKV_DAEMON_BULK_NICE = 10 };

// Calibrates the models that are due. Takes seconds where the model is large; one call at a time, not after drain.
void qkv_daemon_learn(qkv_daemon *daemon);

// A bounded step of bringing sessions to their tiers (server/retier.h); closes those that have expired. True where
// more urgent work is left. One call at a time, not after drain; waits for layers.
bool qkv_daemon_retier(qkv_daemon *daemon);
// Keeps the process within memory-budget and a tenth (server/memory.h). Any thread; never waits.
void qkv_daemon_keep_memory(qkv_daemon *daemon);
// Ends calls whose first message is late, and returns idle memory to the system (server/memory.h). One call at a
// time, not after drain; never waits.
void qkv_daemon_tend(qkv_daemon *daemon);

// The quotas have changed.
void qkv_daemon_apply_quotas(qkv_daemon *daemon);

// Reads auth-file, jwks, quota-file and the files of TLS again, where they have changed, or with `always`. One call
// at a time.
void qkv_daemon_reload(qkv_daemon *daemon, bool always);

// Sets the gauges from what they measure.
void qkv_daemon_update_gauges(qkv_daemon *daemon);

#endif
