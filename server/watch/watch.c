#include "server/watch/watch.h"
#include "engine/base/clock.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/watch/ids.h"
#include "server/watch/log.h"
#include "server/watch/message.h"
#include "server/watch/places.h"
#include "server/watch/sequence.h"

// Changes of a message; how often places are checked, and at least a message is sent.
enum { EVENTS = 1024, PLACES_MS = 500, HEARTBEAT_MS = 10000 };
enum { REST_MS = 100 };

// One Watch call. The fields below `busy` are those of the thread or the callback that has it.
typedef struct watcher {
  qkvi_watch_hub *hub;
  qkv_rpc_call *call;
  struct watcher *next, *previous;  // in the hub's list, and `linked`, with its lock
  bool linked;
  bool busy;  // the hub's thread or gRPC has it
  char tenant[QKV_NAME_MAX + 1], model[QKV_NAME_MAX + 1];
  bool wants_ids;
  bool reset, missed;   // to be said with the next message
  uint32_t scan;        // where the snapshot goes on in the index; 0: it has been sent
  qkvi_watch_ids *ids;  // the snapshot's ids; NULL: nothing is left
  int64_t rests_ms;     // nothing is sent until then: there was no place for a job
  bool complete;        // that is to be said
  uint64_t cursor;      // the next change
  int64_t sent_ms;
} watcher;

struct qkvi_watch_hub {
  qkv_store *store;
  qkv_executor *executor;
  qkv_metric_value *metrics;
  size_t watchers_max, tenant_max;
  uint64_t instance;
  qkvi_watch_key key;  // of the sequence numbers that clients are told
  qkvi_watch_log *log;
  qkvi_watch_places *places;  // NULL: everything is in memory; the job's while `looking`
  pthread_mutex_t lock;
  pthread_cond_t work;
  watcher *first, *last;  // the one that was served last is at the end
  size_t count;
  bool draining, ending, forget_places;
  bool looking;        // a job looks at places
  _Atomic bool woken;  // changes have come
  pthread_t thread;
  bool running;
};

static void lock(qkvi_watch_hub *hub) {
  int failed = pthread_mutex_lock(&hub->lock);
  assert(failed == 0);
}

static void unlock(qkvi_watch_hub *hub) {
  int failed = pthread_mutex_unlock(&hub->lock);
  assert(failed == 0);
}

// Called by the thread that writes to the log: a flag and a signal, no lock. A signal that the hub's thread misses
// costs a tick.
static void woken(void *context) {
  qkvi_watch_hub *hub = context;
  atomic_store_explicit(&hub->woken, true, memory_order_relaxed);
  (void)pthread_cond_signal(&hub->work);
}

// ---- The list: with the lock ----

static void link_last(watcher *at) {
  qkvi_watch_hub *hub = at->hub;
  at->linked = true;
  at->next = NULL;
  at->previous = hub->last;
  if (hub->last != NULL) hub->last->next = at;
  if (hub->last == NULL) hub->first = at;
  hub->last = at;
}

static void unlink_watcher(watcher *at) {
  qkvi_watch_hub *hub = at->hub;
  at->linked = false;
  if (at->next != NULL) at->next->previous = at->previous;
  if (at->next == NULL) hub->last = at->previous;
  if (at->previous != NULL) at->previous->next = at->next;
  if (at->previous == NULL) hub->first = at->next;
}

static size_t count_of(const qkvi_watch_hub *hub, const char *tenant) {
  size_t count = 0;
  for (const watcher *at = hub->first; at != NULL; at = at->next) count += strcmp(at->tenant, tenant) == 0;
  return count;
}

static bool is_due(const watcher *at, uint64_t head, int64_t now) {
  return at->reset || at->scan != 0 || at->ids != NULL || at->complete || at->cursor != head ||
         now - at->sent_ms >= HEARTBEAT_MS;
}

static watcher *find_due(qkvi_watch_hub *hub) {
  const uint64_t head = qkvi_watch_log_head(hub->log);
  const int64_t now = qkv_now_ms();
  for (watcher *at = hub->first; at != NULL; at = at->next) {
    if (!at->busy && now >= at->rests_ms && is_due(at, head, now)) return at;
  }
  return NULL;
}

// ---- A message ----

// One message's changes. In the snapshot they are pages of the index.
typedef struct batch {
  qkvi_watch_hub *hub;
  qkvi_watch_event events[EVENTS];
  uint32_t ids[EVENTS][QKV_PREFIX_PAGE];
  size_t count;
} batch;

static bool is_wanted(const void *context, const qkvi_watch_event *event) {
  const watcher *at = context;
  return (at->tenant[0] == '\0' || strcmp(at->tenant, event->label->tenant) == 0) &&
         (at->model[0] == '\0' || strcmp(at->model, event->label->model) == 0);
}

// With the index locked.
static bool take_page(void *context, const qkv_prefix_page *page) {
  batch *all = context;
  qkvi_watch_label *label = qkvi_watch_log_label(all->hub->log, page->root);
  if (label == NULL) return true;
  all->events[all->count++] = (qkvi_watch_event){
      .hash = page->hash, .parent = page->parent, .label = label, .page = page->depth - 1, .kind = QKVI_WATCH_ADDED};
  return true;
}

static void begin_snapshot(watcher *at, bool missed) {
  at->reset = true;
  at->missed = missed;
  at->scan = 1;
  at->cursor = qkvi_watch_log_head(at->hub->log);
  qkvi_watch_ids_destroy(&at->ids);
  if (at->wants_ids) at->ids = qkvi_watch_ids_create(at->tenant, at->model);
  at->complete = true;
}

// The next part that is due. True where the snapshot ends with it.
static bool fill(watcher *at, batch *all) {
  qkvi_watch_hub *hub = at->hub;
  all->count = 0;
  if (at->scan != 0) {
    at->scan = qkv_prefix_index_scan(qkv_store_prefixes(hub->store), at->scan, EVENTS, take_page, all);
  } else if (at->ids != NULL) {
    bool ends;
    all->count = qkvi_watch_ids_next(at->ids, hub->store, all->events, &all->ids[0][0], EVENTS, &ends);
    if (ends) qkvi_watch_ids_destroy(&at->ids);
  } else if (!qkvi_watch_log_read(hub->log, &at->cursor, all->events, at->wants_ids ? &all->ids[0][0] : NULL, EVENTS,
                                  &all->count)) {
    qkv_metric_add(&hub->metrics[QKV_METRIC_WATCH_MISSED], 1);
    begin_snapshot(at, true);
  } else {
    qkv_metric_add(&hub->metrics[QKV_METRIC_WATCH_EVENTS], (int64_t)all->count);
  }
  return at->complete && at->scan == 0 && at->ids == NULL;
}

// The hub owns the call and gives it to gRPC, or parks it again where there is nothing to send.
static void park(watcher *at);

static void serve(watcher *at, batch *all) {
  const bool ends = fill(at, all);
  const bool first = at->reset;
  size_t bytes, told;
  Qkv__V1__WatchResponse response = QKV__V1__WATCH_RESPONSE__INIT;
  response.reset = first;
  response.missed = first && at->missed;
  response.complete = ends;
  response.instance = at->hub->instance;
  response.sequence = qkvi_watch_conceal(&at->hub->key, at->cursor - 1);
  uint8_t *packed = qkvi_watch_pack(&response, all->events, at->wants_ids ? &all->ids[0][0] : NULL, all->count,
                                    is_wanted, at, &bytes, &told);
  qkvi_watch_log_return(at->hub->log, all->events, all->count);
  if (told == 0 && !first && !ends && qkv_now_ms() - at->sent_ms < HEARTBEAT_MS) {
    free(packed);
    return park(at);
  }
  if (ends) {
    at->complete = false;
    lock(at->hub);
    at->hub->forget_places = true;  // this watcher has not got them yet
    unlock(at->hub);
  }
  at->reset = at->missed = false;
  at->sent_ms = qkv_now_ms();
  qkv_rpc_send_bytes(at->call, packed, bytes);  // from here on gRPC owns it
  free(packed);
}

// ---- The thread ----

static batch *create_batch(qkvi_watch_hub *hub) {
  batch *all = calloc(1, sizeof *all);
  if (all == NULL) abort();
  all->hub = hub;
  return all;
}

static void ids_job(void *context) {
  watcher *at = context;
  if (!qkvi_job_wanted(at->call)) return;
  batch *all = create_batch(at->hub);
  serve(at, all);
  free(all);
}

// The snapshot's ids are read from many sessions, some of them on the disk: others would wait for it.
static void serve_ids(watcher *at) {
  if (qkvi_job_offer(at->call, qkvi_work_of(qkvi_session_waits(at->call), true), ids_job, at)) return;
  at->rests_ms = qkv_now_ms() + REST_MS;
  park(at);
}

static void await_work(qkvi_watch_hub *hub) {
  struct timespec until;
  (void)clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += 50000000;  // a wake-up may be missed
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  if (hub->count == 0) {
    (void)pthread_cond_wait(&hub->work, &hub->lock);
  } else if (!atomic_exchange(&hub->woken, false)) {
    (void)pthread_cond_timedwait(&hub->work, &hub->lock, &until);
  }
}

static void look_job(void *context) {
  qkvi_watch_hub *hub = context;
  lock(hub);
  const bool forget = hub->forget_places;
  hub->forget_places = false;
  unlock(hub);
  if (forget) qkvi_watch_places_forget(hub->places);
  qkvi_watch_places_look(hub->places, hub->store, hub->log);
  lock(hub);
  hub->looking = false;
  unlock(hub);
}

// With the lock, while there is a call: so the executor is there. A job, as it waits for layers.
static void look_at_places(qkvi_watch_hub *hub) {
  hub->looking = qkv_executor_submit(hub->executor, QKV_WORK_BULK_BLOCKING, look_job, hub) == QKV_OK;
}

static void *work(void *context) {
  qkvi_watch_hub *hub = context;
  batch *all = create_batch(hub);
  int64_t looked_ms = 0;
  lock(hub);
  while (!hub->ending) {
    watcher *due = find_due(hub);
    if (due != NULL) {
      due->busy = true;
      unlink_watcher(due);
      link_last(due);
      unlock(hub);
      if (due->scan == 0 && due->ids != NULL)
        serve_ids(due);
      else
        serve(due, all);
      lock(hub);
    } else {
      await_work(hub);
    }
    const bool looks = hub->places != NULL && hub->count > 0 && !hub->looking;
    if (looks && qkv_now_ms() - looked_ms >= PLACES_MS) {
      look_at_places(hub);
      looked_ms = qkv_now_ms();
    }
  }
  unlock(hub);
  free(all);
  return NULL;
}

// ---- Calls ----

static void finish(watcher *at, bool draining) {
  qkv_rpc_finish(at->call, draining ? QKV_UNAVAILABLE : QKV_CANCELLED,
                 draining ? "draining: the daemon is about to stop" : "cancelled");
}

static void park(watcher *at) {
  qkvi_watch_hub *hub = at->hub;
  lock(hub);
  const bool draining = hub->draining, over = draining || qkv_rpc_cancelled(at->call);
  at->busy = over;
  unlock(hub);
  if (over) return finish(at, draining);
  woken(hub);
}

static qkv_status read_request(const Qkv__V1__WatchRequest *request, watcher *at, qkv_error *error) {
  const char *tenant = NULL;
  QKV_TRY(qkvi_asked_tenant(at->call, request->tenant, &tenant, error));
  if (request->model[0] != '\0') QKV_TRY(qkv_name_check(request->model, "model", error));
  (void)snprintf(at->tenant, sizeof at->tenant, "%s", tenant);
  (void)snprintf(at->model, sizeof at->model, "%s", request->model);
  at->wants_ids = request->token_ids;
  return QKV_OK;
}

static qkv_status join(qkvi_watch_hub *hub, watcher *at, qkv_error *error) {
  lock(hub);
  const bool draining = hub->draining, full = hub->count >= hub->watchers_max;
  const size_t own = count_of(hub, at->tenant);
  if (!draining && !full && own < hub->tenant_max) {
    hub->count++;
    at->hub = hub;
    at->busy = true;
    link_last(at);
  }
  unlock(hub);
  if (draining) return qkv_fail(error, QKV_UNAVAILABLE, "draining: the daemon is about to stop");
  if (full)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-watchers is %zu, all are in use", hub->watchers_max);
  if (own >= hub->tenant_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-watchers is %zu, and one tenant may have %zu",
                    hub->watchers_max, hub->tenant_max);
  qkv_metric_add(&hub->metrics[QKV_METRIC_WATCHERS], 1);
  return QKV_OK;
}

static void on_watch(qkv_rpc_call *call, qkv_bytes message) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkvi_watch_hub *hub = daemon->watch;
  qkv_error error = {0};
  Qkv__V1__WatchRequest *request = qkvi_control_unpack_here(message, &qkv__v1__watch_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  watcher *at = calloc(1, sizeof *at);
  if (at == NULL) abort();
  at->call = call;
  qkv_rpc_set_state(call, at);
  qkv_status status = read_request(request, at, &error);
  if (status == QKV_OK) status = join(hub, at, &error);
  if (status == QKV_OK) {
    qkvi_watch_log_begin(hub->log, at->wants_ids);
    at->cursor = qkvi_watch_reveal(&hub->key, request->after) + 1;
    at->sent_ms = qkv_now_ms() - HEARTBEAT_MS;  // something is sent at once
    if (request->instance != hub->instance || request->after == 0) begin_snapshot(at, false);
  }
  qkvi_control_free(request);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  park(at);
}

static void on_sent(qkv_rpc_call *call) {
  park(qkv_rpc_state(call));
}

static void on_cancelled(qkv_rpc_call *call) {
  watcher *at = qkv_rpc_state(call);
  if (at == NULL || at->hub == NULL) return;
  lock(at->hub);
  const bool parked = !at->busy;
  at->busy = true;
  unlock(at->hub);
  if (parked) finish(at, false);
}

static void on_destroy(void *state) {
  watcher *at = state;
  if (at == NULL) return;
  qkvi_watch_hub *hub = at->hub;
  if (hub != NULL) {
    lock(hub);
    unlink_watcher(at);
    hub->count--;
    unlock(hub);
    qkvi_watch_log_end(hub->log, at->wants_ids);
    qkv_metric_add(&hub->metrics[QKV_METRIC_WATCHERS], -1);
  }
  qkvi_watch_ids_destroy(&at->ids);
  free(at);
}

// ---- Life ----

qkvi_watch_hub *qkvi_watch_hub_create(qkv_store *store, qkv_executor *executor, qkv_metric_value *metrics,
                                      size_t watchers_max, size_t tenant_max, bool places) {
  struct timespec now;
  pthread_condattr_t clock;
  qkvi_watch_hub *hub = calloc(1, sizeof *hub);
  if (hub == NULL) abort();
  (void)clock_gettime(CLOCK_REALTIME, &now);
  hub->store = store;
  hub->executor = executor;
  hub->metrics = metrics;
  hub->watchers_max = watchers_max;
  hub->tenant_max = tenant_max;
  hub->instance = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
  hub->key = qkvi_watch_key_create();
  hub->log = qkvi_watch_log_create(woken, hub);
  if (places) hub->places = qkvi_watch_places_create();
  int failed = pthread_mutex_init(&hub->lock, NULL);
  failed |= pthread_condattr_init(&clock);
  failed |= pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(&hub->work, &clock);
  const qkv_prefix_observer observer = qkvi_watch_log_observer(hub->log);
  qkv_prefix_index_observe(qkv_store_prefixes(store), &observer);
  failed |= pthread_create(&hub->thread, NULL, work, hub);
  assert(failed == 0);
  (void)pthread_condattr_destroy(&clock);
  (void)pthread_setname_np(hub->thread, "qkvd-watch");
  hub->running = true;
  return hub;
}

// A parked one, taken. The lock is held.
static watcher *take_parked(qkvi_watch_hub *hub) {
  watcher *at = hub->first;
  while (at != NULL && at->busy) at = at->next;
  if (at != NULL) at->busy = true;
  return at;
}

void qkvi_watch_hub_drain(qkvi_watch_hub *hub) {
  if (hub == NULL) return;
  lock(hub);
  hub->draining = true;
  for (watcher *at; (at = take_parked(hub)) != NULL;) {
    unlock(hub);
    finish(at, true);
    lock(hub);
  }
  unlock(hub);
}

void qkvi_watch_hub_stop(qkvi_watch_hub *hub) {
  if (hub == NULL || !hub->running) return;
  lock(hub);
  assert(hub->first == NULL);
  hub->ending = true;
  (void)pthread_cond_signal(&hub->work);
  unlock(hub);
  (void)pthread_join(hub->thread, NULL);
  hub->running = false;
}

void qkvi_watch_hub_destroy(qkvi_watch_hub **hub) {
  qkvi_watch_hub *left = *hub;
  if (left == NULL) return;
  *hub = NULL;
  qkvi_watch_places_destroy(&left->places);
  qkvi_watch_log_destroy(&left->log);
  (void)pthread_cond_destroy(&left->work);
  (void)pthread_mutex_destroy(&left->lock);
  free(left);
}

const qkv_rpc_method qkvi_watch_methods[] = {{.path = "/qkv.v1.KvCache/Watch",
                                              .message = on_watch,
                                              .sent = on_sent,
                                              .cancelled = on_cancelled,
                                              .destroy = on_destroy},
                                             {0}};
