#include "server/residency/residency.h"
#include "engine/base/clock.h"

#include <assert.h>
#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>

#include "engine/base/cpu.h"
#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/metrics.h"
#include "server/residency/internal.h"

enum { RESTORERS_MAX = 3 };

static void init_locks(qkvi_residency *residency) {
  pthread_condattr_t clock;
  int failed = pthread_condattr_init(&clock);
  failed |= pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(&residency->moved, &clock);
  failed |= pthread_mutex_init(&residency->lock, NULL);
  failed |= pthread_mutex_init(&residency->models_lock, NULL);
  failed |= pthread_mutex_init(&residency->unconfirmed_lock, NULL);
  for (int i = 0; i < QKVI_NOTES_LOCKS; i++) failed |= pthread_mutex_init(&residency->notes_locks[i], NULL);
  assert(failed == 0);
  (void)failed;
  (void)pthread_condattr_destroy(&clock);
}

// Memory for pending writes, twice: copies of rows or objects (pages are written in place), and their compressed
// form. Buffers of writes and reads.
static const uint64_t FIXED_BUFFERS = UINT64_C(24) << 20, WINDOW_MAX = UINT64_C(16) << 20, DIRTY_LEAST = 1 << 20;
enum { BUFFERS_PART = 16, WINDOW_PART = 64 };

// The default of storage-dirty: the smaller the budget, the less, down to the least that keeps a disk busy.
static uint64_t dirty_bytes(const qkvi_residency *residency, const qkv_server_options *options) {
  const uint64_t half = residency->buffer_bytes / 2, fixed = half < FIXED_BUFFERS ? half : FIXED_BUFFERS;
  const uint64_t part = (residency->buffer_bytes - fixed) / 2, dirty = part > DIRTY_LEAST ? part : DIRTY_LEAST;
  return dirty < (uint64_t)options->storage_dirty ? dirty : (uint64_t)options->storage_dirty;
}

static qkv_status reserve_buffers(qkvi_residency *residency, const qkv_server_options *options, qkv_error *error) {
  const uint64_t most = 2 * (uint64_t)options->storage_dirty + FIXED_BUFFERS;
  const uint64_t part = qkvi_budget_whole(residency) / BUFFERS_PART, bytes = part < most ? part : most;
  QKV_TRY(qkv_arena_reserve_elsewhere(qkv_store_arena(residency->store), bytes, error));
  residency->buffer_bytes = bytes;
  return QKV_OK;
}

uint64_t qkvi_restore_window(const qkvi_residency *residency, uint64_t taken) {
  const uint64_t part = qkvi_budget_whole(residency) / WINDOW_PART, all = part < WINDOW_MAX ? part : WINDOW_MAX;
  return taken < all ? (all - taken) / 2 : 0;
}

qkv_status qkvi_residency_create(const qkv_server_options *options, qkv_store *store, qkvi_objects *objects,
                                 qkv_metric_value *metrics, qkvi_residency **out, qkv_error *error) {
  *out = NULL;
  if (options->data_dir == NULL) return QKV_OK;
  qkvi_residency *residency = calloc(1, sizeof *residency);
  if (residency == NULL) abort();
  residency->store = store;
  residency->objects = objects;
  residency->metrics = metrics;
  residency->entry_max = QKV_JOURNAL_PAYLOAD_MAX;
  init_locks(residency);
  qkvi_write_back_init_backing(residency, &residency->backings[0], false);
  qkvi_write_back_init_backing(residency, &residency->backings[1], true);
  const int others = qkv_cpu_count() - 1, helpers = others < RESTORERS_MAX ? others : RESTORERS_MAX;
  qkv_status status = qkv_pool_create(helpers > 0 ? (size_t)helpers : 0, 0, &residency->restorers, error);
  if (status == QKV_OK) status = reserve_buffers(residency, options, error);
  if (status == QKV_OK) status = qkvi_residency_recover(residency, options, dirty_bytes(residency, options), error);
  if (status == QKV_OK && pthread_create(&residency->thread, NULL, qkvi_residency_work, residency) != 0) abort();
  if (status == QKV_OK) {
    (void)pthread_setname_np(residency->thread, "qkvd-residency");
    residency->started = true;
    *out = residency;
  } else {
    qkvi_residency_destroy(&residency);
  }
  return status;
}

// Codes exact rows into pages, but for those that have records of their own: the next start has these to the bit.
static qkv_status seal(qkv_session *session, qkv_error *error) {
  return qkv_session_config_of(session)->backing->put_rows != NULL ? QKV_OK : qkv_session_seal(session, error);
}

// The same for all sessions. Where memory has no headroom for these, durable pages are evicted,
// and the sessions with rows left are sealed again later.
static size_t seal_all(qkvi_residency *residency, qkv_session *const *sessions, size_t count) {
  size_t left = 0;
  for (size_t i = 0; i < count; i++) left += seal(sessions[i], NULL) == QKV_OK ? 0 : 1;
  if (left > 0) (void)qkvi_budget_evict(residency, 0);
  return left;
}

qkv_session **qkvi_residency_sessions(qkvi_residency *residency, size_t *count) {
  const size_t most = qkv_store_sessions(residency->store) + 1;
  qkv_session **sessions = calloc(most, sizeof *sessions);
  if (sessions == NULL) abort();
  *count = qkv_store_backed(residency->store, sessions, most);
  return sessions;
}

void qkvi_residency_drop_sessions(qkv_session **sessions, size_t count) {
  for (size_t i = 0; i < count; i++) qkv_session_unref(&sessions[i]);
  free((void *)sessions);
}

void qkvi_residency_finish(qkvi_residency *residency, int64_t wait_ms) {
  qkvi_residency_lock(residency);
  residency->finishing = true;
  residency->failure = QKV_OK;  // writing is tried again
  residency->pause_ms = residency->retry_ms = 0;
  qkvi_residency_unlock(residency);
  const int64_t until = qkv_now_ms() + wait_ms;
  uint64_t seen = qkvi_progress_count(residency);
  size_t count;
  qkv_session **sessions = qkvi_residency_sessions(residency, &count);
  size_t left;
  for (;;) {
    const size_t unsealed = seal_all(residency, sessions, count);
    left = 0;
    for (size_t i = 0; i < count; i++) left += qkv_session_settle(sessions[i]) ? 0 : 1;
    left += qkvi_objects_settle(residency->objects) ? 0 : 1;
    left = left > unsealed ? left : unsealed;
    const bool waiting = qkvi_write_back_cuts_waiting(residency, 0) || qkvi_closes_waiting(residency);
    if ((left == 0 && !waiting) || qkv_now_ms() > until) break;
    if (qkvi_write_back_failure(residency) != QKV_OK) break;
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
  for (size_t i = 0; i < count; i++) {
    qkv_error error = {0};
    if (seal(sessions[i], &error) != QKV_OK)
      qkv_log(QKV_LOG_WARN, "the newest rows of a session are not kept", "{s:s, s:s*, s:s}", "session",
              qkv_session_name(sessions[i]), "tenant", qkvi_tenant_to_log(qkv_session_config_of(sessions[i])->tenant),
              "reason", error.text);
  }
  if (left > 0) qkv_log(QKV_LOG_ERROR, "sessions are not durable as a whole", "{s:I}", "sessions", (json_int_t)left);
  qkvi_residency_drop_sessions(sessions, count);
}

void qkvi_residency_destroy(qkvi_residency **residency) {
  qkvi_residency *old = *residency;
  if (old == NULL) return;
  *residency = NULL;
  if (old->started) {
    qkvi_residency_lock(old);
    old->ending = true;
    old->steps++;
    (void)pthread_cond_broadcast(&old->moved);
    qkvi_residency_unlock(old);
    (void)pthread_join(old->thread, NULL);
  }
  qkv_pool_destroy(&old->restorers);
  if (old->storage != NULL) qkv_storage_close(&old->storage);
  qkv_arena_unreserve_elsewhere(qkv_store_arena(old->store), old->buffer_bytes + old->directory_bytes);
  for (qkvi_journaled *known = old->journaled, *next; known != NULL; known = next) {
    next = known->next;
    free(known);
  }
  qkvi_write_back_drop_cuts(old);
  qkvi_closes_drop(old);
  // Clearing frees the table alone; the entries stay linked.
  qkvi_pending *pending = old->pending, *after;
  HASH_CLEAR(hh, old->pending);
  for (; pending != NULL; pending = after) {
    after = pending->hh.next;
    qkvi_write_back_let_go(&pending->payload);
    free(pending);
  }
  qkvi_catalogue_drop_unconfirmed(old);
  for (int i = 0; i < QKVI_NOTES_LOCKS; i++) (void)pthread_mutex_destroy(&old->notes_locks[i]);
  (void)pthread_mutex_destroy(&old->unconfirmed_lock);
  (void)pthread_mutex_destroy(&old->models_lock);
  (void)pthread_mutex_destroy(&old->lock);
  (void)pthread_cond_destroy(&old->moved);
  free(old);
}

qkv_storage *qkvi_residency_storage(const qkvi_residency *residency) {
  return residency->storage;
}
