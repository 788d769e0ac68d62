#include "server/watch/log.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session.h"
#include "engine/cache/session_slots.h"

#define uthash_fatal(message) abort()
#include <uthash.h>

typedef struct root_entry {
  uint32_t root;
  qkvi_watch_label *label;
  UT_hash_handle hh;
} root_entry;

struct qkvi_watch_log {
  void (*woken)(void *context);
  void *context;
  pthread_mutex_t lock;
  _Atomic unsigned watchers;  // changed under the lock
  unsigned id_watchers;
  root_entry *roots;
  bool awake;              // `woken` has been called since the last read
  qkvi_watch_event *ring;  // [QKVI_WATCH_RING] while there is a watcher
  uint32_t *ids;           // [QKVI_WATCH_RING][64] while a watcher wants ids
  uint64_t tail, head;     // changes that the ring holds: [tail, head)
};

static void lock(qkvi_watch_log *log) {
  int failed = pthread_mutex_lock(&log->lock);
  assert(failed == 0);
}

static void unlock(qkvi_watch_log *log) {
  int failed = pthread_mutex_unlock(&log->lock);
  assert(failed == 0);
}

static void unref_label(qkvi_watch_label *label) {
  assert(label->references > 0);
  if (--label->references == 0) free(label);
}

qkvi_watch_label *qkvi_watch_label_create(const char *tenant, const char *model) {
  qkvi_watch_label *label = calloc(1, sizeof *label);
  if (label == NULL) abort();
  (void)snprintf(label->tenant, sizeof label->tenant, "%s", tenant);
  (void)snprintf(label->model, sizeof label->model, "%s", model);
  label->references = 1;
  return label;
}

// ---- Writing: with the lock ----

static void forget(qkvi_watch_log *log, uint64_t upto) {
  for (; log->tail < upto; log->tail++) unref_label(log->ring[log->tail % QKVI_WATCH_RING].label);
}

static uint32_t *ids_at(const qkvi_watch_log *log, uint64_t number) {
  return log->ids + (number % QKVI_WATCH_RING) * QKV_PREFIX_PAGE;
}

// True where `woken` is to be called.
static bool put(qkvi_watch_log *log, const qkvi_watch_event *event, const uint32_t *ids) {
  if (log->ring == NULL) return false;
  if (log->head - log->tail == QKVI_WATCH_RING) forget(log, log->tail + 1);
  qkvi_watch_event *kept = &log->ring[log->head % QKVI_WATCH_RING];
  *kept = *event;
  kept->label->references++;
  kept->has_ids = ids != NULL && log->ids != NULL;
  if (kept->has_ids) memcpy(ids_at(log, log->head), ids, QKV_PREFIX_PAGE * sizeof *ids);
  log->head++;
  const bool wake = !log->awake;
  log->awake = true;
  return wake;
}

static root_entry *find_root(qkvi_watch_log *log, uint32_t root) {
  root_entry *entry;
  HASH_FIND(hh, log->roots, &root, sizeof root, entry);
  return entry;
}

// ---- What the index tells ----

static void root_added(void *context, uint32_t root, uint32_t owner) {
  qkvi_watch_log *log = context;
  const qkv_session *session = qkv_session_of(owner);
  root_entry *entry = calloc(1, sizeof *entry);
  if (entry == NULL) abort();
  entry->root = root;
  entry->label = qkvi_watch_label_create(qkv_session_config_of(session)->tenant, qkv_session_model(session)->name);
  lock(log);
  HASH_ADD(hh, log->roots, root, sizeof entry->root, entry);
  unlock(log);
}

static void root_removed(void *context, uint32_t root) {
  qkvi_watch_log *log = context;
  lock(log);
  root_entry *entry = find_root(log, root);
  if (entry != NULL) {
    HASH_DEL(log->roots, entry);
    unref_label(entry->label);
    free(entry);
  }
  unlock(log);
}

static void changed(void *context, const qkv_prefix_change *change) {
  qkvi_watch_log *log = context;
  bool wake = false;
  if (atomic_load_explicit(&log->watchers, memory_order_relaxed) == 0) return;
  lock(log);
  const root_entry *entry = find_root(log, change->root);
  if (entry != NULL)
    wake = put(log,
               &(qkvi_watch_event){.hash = change->hash,
                                   .parent = change->parent,
                                   .label = entry->label,
                                   .page = change->page,
                                   .kind = change->added ? QKVI_WATCH_ADDED : QKVI_WATCH_REMOVED},
               change->ids);
  unlock(log);
  if (wake) log->woken(log->context);
}

void qkvi_watch_log_moved(qkvi_watch_log *log, const qkvi_watch_event *event) {
  lock(log);
  const bool wake = put(log, event, NULL);
  unlock(log);
  if (wake) log->woken(log->context);
}

// ---- Life ----

qkvi_watch_log *qkvi_watch_log_create(void (*woken)(void *context), void *context) {
  qkvi_watch_log *log = calloc(1, sizeof *log);
  if (log == NULL) abort();
  log->woken = woken;
  log->context = context;
  log->tail = log->head = 2;  // a reader of nothing yet has sequence 1: with 0 it would ask for a snapshot
  atomic_init(&log->watchers, 0);
  int failed = pthread_mutex_init(&log->lock, NULL);
  assert(failed == 0);
  return log;
}

qkv_prefix_observer qkvi_watch_log_observer(qkvi_watch_log *log) {
  return (qkv_prefix_observer){
      .context = log, .root_added = root_added, .root_removed = root_removed, .changed = changed};
}

void qkvi_watch_log_destroy(qkvi_watch_log **log) {
  qkvi_watch_log *left = *log;
  if (left == NULL) return;
  *log = NULL;
  assert(left->ring == NULL);  // no watcher
  root_entry *entry = left->roots, *next;
  HASH_CLEAR(hh, left->roots);
  for (; entry != NULL; entry = next) {
    next = entry->hh.next;
    unref_label(entry->label);
    free(entry);
  }
  (void)pthread_mutex_destroy(&left->lock);
  free(left);
}

void qkvi_watch_log_begin(qkvi_watch_log *log, bool ids) {
  lock(log);
  if (log->ring == NULL) log->ring = calloc(QKVI_WATCH_RING, sizeof *log->ring);
  if (ids && log->ids == NULL) log->ids = calloc(QKVI_WATCH_RING, QKV_PREFIX_PAGE * sizeof *log->ids);
  if (log->ring == NULL || (ids && log->ids == NULL)) abort();
  log->id_watchers += ids;
  (void)atomic_fetch_add(&log->watchers, 1);
  unlock(log);
}

void qkvi_watch_log_end(qkvi_watch_log *log, bool ids) {
  lock(log);
  log->id_watchers -= ids;
  if (log->id_watchers == 0) {
    for (uint64_t i = log->tail; i < log->head; i++) log->ring[i % QKVI_WATCH_RING].has_ids = false;
    free(log->ids);
    log->ids = NULL;
  }
  if (atomic_fetch_sub(&log->watchers, 1) == 1) {
    forget(log, log->head);
    free(log->ring);
    log->ring = NULL;
    log->awake = false;
    log->tail = ++log->head;  // changes from here on are not recorded: nobody goes on from what was told before
  }
  unlock(log);
}

uint64_t qkvi_watch_log_head(qkvi_watch_log *log) {
  lock(log);
  const uint64_t head = log->head;
  unlock(log);
  return head;
}

// ---- Reading ----

bool qkvi_watch_log_read(qkvi_watch_log *log, uint64_t *cursor, qkvi_watch_event *events, uint32_t *ids, size_t max,
                         size_t *count) {
  *count = 0;
  lock(log);
  log->awake = false;
  const bool known = *cursor >= log->tail && *cursor <= log->head;
  for (; known && *cursor < log->head && *count < max; ++*cursor, ++*count) {
    qkvi_watch_event *event = &events[*count];
    *event = log->ring[*cursor % QKVI_WATCH_RING];
    event->label->references++;
    event->has_ids &= ids != NULL;
    if (event->has_ids) memcpy(ids + *count * QKV_PREFIX_PAGE, ids_at(log, *cursor), QKV_PREFIX_PAGE * sizeof *ids);
  }
  unlock(log);
  return known;
}

void qkvi_watch_log_return(qkvi_watch_log *log, const qkvi_watch_event *events, size_t count) {
  lock(log);
  for (size_t i = 0; i < count; i++) unref_label(events[i].label);
  unlock(log);
}

qkvi_watch_label *qkvi_watch_log_label(qkvi_watch_log *log, uint32_t root) {
  lock(log);
  const root_entry *entry = find_root(log, root);
  if (entry != NULL) entry->label->references++;
  unlock(log);
  return entry != NULL ? entry->label : NULL;
}
