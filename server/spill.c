#include "server/spill.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/cpu.h"
#include "engine/base/precedence.h"
#include "engine/cache/session_spill.h"
#include "server/contract.h"
#include "server/metrics.h"
#include "server/spill_internal.h"

enum { SYNC_WAIT_MS = 30000, PAUSE_MS = 250, PAUSE_MAX_MS = 30000, RESTORERS_MAX = 3 };

int64_t qkvi_spill_now_ms(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void qkvi_spill_lock(qkvi_spill *spill) {
  const int failed = pthread_mutex_lock(&spill->lock);
  assert(failed == 0);
  (void)failed;
}

void qkvi_spill_unlock(qkvi_spill *spill) {
  (void)pthread_mutex_unlock(&spill->lock);
}

void qkvi_spill_progress(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  spill->steps++;
  (void)pthread_cond_broadcast(&spill->moved);
  qkvi_spill_unlock(spill);
}

uint64_t qkvi_spill_await(qkvi_spill *spill, uint64_t seen, int64_t ms) {
  struct timespec until;
  qkv_precedence_rest();
  (void)clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += ms / 1000;
  until.tv_nsec += ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  qkvi_spill_lock(spill);
  while (spill->steps == seen && pthread_cond_timedwait(&spill->moved, &spill->lock, &until) != ETIMEDOUT) continue;
  seen = spill->steps;
  qkvi_spill_unlock(spill);
  return seen;
}

uint64_t qkvi_spill_steps(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  const uint64_t steps = spill->steps;
  qkvi_spill_unlock(spill);
  return steps;
}

// ---- Records under way ----

static qkvi_pending *find_pending(qkvi_spill *spill, uint64_t record) {
  qkvi_pending *found;
  HASH_FIND(hh, spill->pending, &record, sizeof record, found);
  return found;
}

static void forget(qkvi_spill *spill, qkvi_pending *pending) {
  HASH_DEL(spill->pending, pending);  // NOLINT(clang-analyzer-unix.Malloc): what was freed is not linked any more
  free(pending->page);
  free(pending);
}

// The disk is left alone for a while, longer each time: pages stay in memory, which serves them.
void qkvi_spill_note_failure(qkvi_spill *spill, qkv_status status) {
  if (spill->failure == QKV_OK)
    qkv_log(QKV_LOG_ERROR, "the data directory refuses, sessions are in memory alone until it does not", "{s:s}",
            "status", qkv_status_name(status));
  spill->failure = status;
  spill->full |= status == QKV_RESOURCE_EXHAUSTED;
  const int64_t now = qkvi_spill_now_ms();
  if (now >= spill->retry_ms) {  // of many that fail at once one counts
    const int64_t pause = spill->pause_ms == 0 ? PAUSE_MS : 2 * spill->pause_ms;
    spill->pause_ms = pause < PAUSE_MAX_MS ? pause : PAUSE_MAX_MS;
    spill->retry_ms = now + spill->pause_ms;
  }
  qkv_metric_add(&spill->metrics[QKV_METRIC_SPILL_FAILED], 1);
  qkv_metric_set(&spill->metrics[QKV_METRIC_SPILL_DEGRADED], 1);
}

// What was accepted before the disk refused says nothing.
static void note_success(qkvi_spill *spill) {
  if (spill->failure != QKV_OK && qkvi_spill_now_ms() < spill->retry_ms) return;
  if (spill->failure != QKV_OK) qkv_log(QKV_LOG_INFO, "the data directory takes pages again", NULL);
  spill->failure = QKV_OK;
  spill->pause_ms = spill->retry_ms = 0;
  qkv_metric_set(&spill->metrics[QKV_METRIC_SPILL_DEGRADED], 0);
}

static void on_written(void *context, uint64_t record, qkv_status status) {
  qkvi_spill *spill = context;
  qkvi_spill_lock(spill);
  qkvi_pending *pending = find_pending(spill, record);
  assert(pending != NULL);
  free(pending->page);
  pending->page = NULL;
  pending->state = QKV_RECORD_WRITTEN;
  if (status != QKV_OK) {
    if (status != QKV_CANCELLED) qkvi_spill_note_failure(spill, status);
    forget(spill, pending);
  }
  qkvi_spill_unlock(spill);
  qkvi_spill_progress(spill);
}

static void on_durable(void *context, uint64_t record, qkv_status status) {
  qkvi_spill *spill = context;
  qkvi_spill_lock(spill);
  qkvi_pending *pending = find_pending(spill, record);
  assert(pending != NULL);
  if (status != QKV_OK) {
    qkvi_spill_note_failure(spill, status);
    pending->state = QKV_RECORD_GONE;
    if (pending->closed) forget(spill, pending);
  } else {
    note_success(spill);
    forget(spill, pending);
  }
  qkvi_spill_unlock(spill);
  qkvi_spill_progress(spill);
}

static void on_hastened(void *context, qkv_status status) {
  qkvi_spill *spill = context;
  (void)status;  // each record says it for itself
  qkvi_spill_lock(spill);
  spill->hastening = false;
  qkvi_spill_unlock(spill);
}

void qkvi_spill_hasten(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  const bool begin = !spill->hastening;
  spill->hastening = true;
  qkvi_spill_unlock(spill);
  if (begin) qkv_storage_sync(spill->storage, on_hastened, spill);
}

// ---- The backing ----

static bool resting(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  const bool rests = spill->retry_ms != 0 && qkvi_spill_now_ms() < spill->retry_ms;
  qkvi_spill_unlock(spill);
  return rests;
}

// Whether a truncation of the session could not be written: what is put after it would stand beside what it cut.
static bool poisoned(qkvi_spill *spill, uint64_t session) {
  qkvi_spill_lock(spill);
  bool found = false;
  for (const qkvi_poisoned *at = spill->poisoned; at != NULL; at = at->next) found |= at->session == session;
  qkvi_spill_unlock(spill);
  return found;
}

static uint64_t put(void *context, uint64_t session, const char *model, const void *page, uint32_t bytes,
                    uint32_t tokens) {
  const qkvi_backing *backing = context;
  qkvi_spill *spill = backing->spill;
  const qkv_page_header *header = page;
  atomic_store_explicit(&spill->unsettled, true, memory_order_relaxed);
  if (resting(spill) || poisoned(spill, session) || !qkvi_spill_calibration_ready(spill, model, header->calibration))
    return 0;
  qkvi_pending *pending = calloc(1, sizeof *pending);
  if (pending == NULL) abort();
  pending->page = malloc(bytes);
  if (pending->page == NULL) abort();
  memcpy(pending->page, page, bytes);
  const qkv_storage_put_request request = {.meta = {.session = session,
                                                    .position = header->position,
                                                    .layer = header->layer,
                                                    .tokens = tokens,
                                                    .codec = header->codec,
                                                    .calibration = header->calibration},
                                           .payload = pending->page,
                                           .bytes = bytes,
                                           .hurry = backing->hurry,
                                           .written = on_written,
                                           .durable = on_durable,
                                           .context = spill};
  pending->state = QKV_RECORD_WAITING;
  pending->session = session;
  // The callbacks may come before put returns; they find the record, and free it, once they have the lock.
  qkvi_spill_lock(spill);
  qkv_error error = {0};
  const qkv_status status = qkv_storage_put(spill->storage, &request, &pending->record, &error);
  const uint64_t record = pending->record;
  if (status == QKV_OK) {
    HASH_ADD(hh, spill->pending, record, sizeof pending->record, pending);
  } else {
    qkv_metric_add(&spill->metrics[QKV_METRIC_SPILL_REFUSED], 1);
    if (status != QKV_UNAVAILABLE) qkvi_spill_note_failure(spill, status);
  }
  qkvi_spill_unlock(spill);
  if (status == QKV_OK) {
    qkv_metric_add(&spill->metrics[QKV_METRIC_SPILL_PAGES], 1);
    qkv_metric_add(&spill->metrics[QKV_METRIC_SPILL_BYTES], bytes);
    return record;
  }
  free(pending->page);
  free(pending);
  return 0;
}

static qkv_record_state state_of(void *context, uint64_t record) {
  qkvi_spill *spill = ((const qkvi_backing *)context)->spill;
  qkvi_spill_lock(spill);
  const qkvi_pending *pending = find_pending(spill, record);
  const qkv_record_state state = pending != NULL ? pending->state : QKV_RECORD_DURABLE;
  qkvi_spill_unlock(spill);
  if (pending != NULL) return state;
  qkv_record_info info;
  return qkv_storage_find(spill->storage, record, &info) == QKV_OK ? QKV_RECORD_DURABLE : QKV_RECORD_GONE;
}

static void drop(void *context, uint64_t record) {
  qkvi_spill *spill = ((const qkvi_backing *)context)->spill;
  qkvi_spill_lock(spill);
  qkvi_pending *pending = find_pending(spill, record);
  if (pending != NULL && pending->state == QKV_RECORD_GONE) forget(spill, pending);
  qkvi_spill_unlock(spill);
  qkv_storage_drop(spill->storage, record);
}

// What the session has under way is nobody's any more.
static void abandon(qkvi_spill *spill, uint64_t session) {
  qkvi_spill_lock(spill);
  for (qkvi_pending *at = spill->pending, *next; at != NULL; at = next) {
    next = at->hh.next;
    if (at->session != session) continue;
    at->closed = true;
    if (at->state == QKV_RECORD_GONE) forget(spill, at);
  }
  qkvi_spill_unlock(spill);
}

static void on_cut(void *context, qkv_status status) {
  qkvi_poisoned *cutting = context;
  qkvi_spill *spill = cutting->spill;
  qkvi_spill_lock(spill);
  spill->cuts--;
  if (status != QKV_OK) {
    qkvi_spill_note_failure(spill, status);
    cutting->next = spill->poisoned;
    spill->poisoned = cutting;
    cutting = NULL;
  }
  qkvi_spill_unlock(spill);
  free(cutting);
  qkvi_spill_progress(spill);
}

void qkvi_spill_cut(qkvi_spill *spill, uint64_t session, uint32_t layer, uint64_t position) {
  qkvi_poisoned *cutting = calloc(1, sizeof *cutting);
  if (cutting == NULL) abort();
  *cutting = (qkvi_poisoned){.spill = spill, .session = session};
  qkvi_spill_lock(spill);
  spill->cuts++;
  qkvi_spill_unlock(spill);
  qkv_storage_session_truncate(spill->storage, session, layer, position, on_cut, cutting);
}

static void cut(void *context, uint64_t session, uint32_t layer, uint64_t position) {
  qkvi_spill_cut(((const qkvi_backing *)context)->spill, session, layer, position);
}

static bool takes(void *context, uint64_t session) {
  qkvi_spill *spill = ((const qkvi_backing *)context)->spill;
  return qkvi_spill_failure(spill) == QKV_OK && !poisoned(spill, session);
}

static void init_backing(qkvi_spill *spill, qkvi_backing *backing, bool hurry) {
  *backing = (qkvi_backing){.spill = spill, .hurry = hurry};
  backing->table =
      (qkv_backing){.context = backing, .put = put, .state = state_of, .drop = drop, .takes = takes, .cut = cut};
}

// ---- Sessions ----

qkv_status qkvi_spill_enlist(qkvi_spill *spill, qkv_session_config *config, qkv_error *error) {
  if (config->durability <= QKV_DURABILITY_MEMORY) return QKV_OK;
  if (spill == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "durability is %s, the daemon has no data-dir",
                    config->durability == QKV_DURABILITY_SYNC ? "SYNC" : "ASYNC");
  config->backing = &spill->backings[config->durability == QKV_DURABILITY_SYNC].table;
  config->id = qkv_storage_session_number(spill->storage);
  return QKV_OK;
}

const qkv_backing *qkvi_spill_backing(qkvi_spill *spill, qkv_durability durability) {
  return &spill->backings[durability == QKV_DURABILITY_SYNC].table;
}

qkv_status qkvi_spill_closed(qkvi_spill *spill, qkv_session *session, qkv_error *error) {
  const qkv_session_config *config = qkv_session_config_of(session);
  qkvi_journal_wait wait = {.spill = spill};
  if (config->backing == NULL) return QKV_OK;
  qkv_session_detach(session);  // whoever still has it puts nothing behind its end
  abandon(spill, config->id);
  qkv_storage_session_close(spill->storage, config->id, qkvi_spill_on_journal, &wait);
  return qkvi_spill_finish_wait(&wait, error);
}

static bool cuts_waiting(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  const bool waiting = spill->cuts > 0;
  qkvi_spill_unlock(spill);
  return waiting;
}

qkv_status qkvi_spill_truncated(qkvi_spill *spill, const qkv_session *session, qkv_error *error) {
  if (qkv_session_config_of(session)->backing == NULL) return QKV_OK;
  const int64_t until = qkvi_spill_now_ms() + SYNC_WAIT_MS;
  uint64_t seen = qkvi_spill_steps(spill);
  while (cuts_waiting(spill)) {
    if (qkvi_spill_now_ms() > until)
      return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the truncation is not durable yet",
                      qkv_session_name(session));
    seen = qkvi_spill_await(spill, seen, QKVI_SPILL_STEP_MS);
  }
  if (!poisoned(spill, qkv_session_config_of(session)->id)) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the disk did not take the truncation, close the session",
                  qkv_session_name(session));
}

bool qkvi_spill_owes(qkvi_spill *spill, qkv_session *session) {
  if (spill == NULL || qkv_session_config_of(session)->durability != QKV_DURABILITY_SYNC) return false;
  return !qkv_session_settle(session) || cuts_waiting(spill);
}

qkv_status qkvi_spill_failure(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  const qkv_status failure = spill->failure;
  qkvi_spill_unlock(spill);
  return failure;
}

static const char *refusal(qkv_status failure) {
  if (failure == QKV_RESOURCE_EXHAUSTED) return "the disk or storage-budget is full";
  return failure == QKV_OK ? "the disk takes longer than 30 s" : "the disk failed";
}

// Whether what is sealed below ends[layer] of each layer is durable; NULL: everything, and every cut.
static bool is_durable(qkvi_spill *spill, qkv_session *session, const uint64_t *ends) {
  const bool settled = qkv_session_settle(session);
  if (ends == NULL) return settled && !cuts_waiting(spill);
  bool durable = true;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++)
    durable &= qkv_session_is_durable(session, i, ends[i]);
  return durable;
}

static qkv_status await_durable(qkvi_spill *spill, qkv_session *session, const uint64_t *ends, qkv_error *error) {
  const int64_t until = qkvi_spill_now_ms() + SYNC_WAIT_MS;
  uint64_t seen = qkvi_spill_steps(spill);
  while (!is_durable(spill, session, ends)) {
    const qkv_status failure =
        poisoned(spill, qkv_session_config_of(session)->id) ? QKV_INTERNAL : qkvi_spill_failure(spill);
    if (failure == QKV_RESOURCE_EXHAUSTED || failure == QKV_INTERNAL || qkvi_spill_now_ms() > until)
      return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the rows are held, but not durable: %s",
                      qkv_session_name(session), refusal(failure));
    if (qkv_session_config_of(session)->durability != QKV_DURABILITY_SYNC) qkvi_spill_hasten(spill);
    seen = qkvi_spill_await(spill, seen, QKVI_SPILL_STEP_MS);
  }
  return QKV_OK;
}

qkv_status qkvi_spill_sync(qkvi_spill *spill, qkv_session *session, qkv_error *error) {
  return await_durable(spill, session, NULL, error);
}

qkv_status qkvi_spill_sync_range(qkvi_spill *spill, qkv_session *session, const uint32_t *layers, size_t layer_count,
                                 uint64_t end, qkv_error *error) {
  const uint32_t all = qkv_session_model(session)->layers;
  qkv_session_info info;
  uint64_t *lengths = calloc(all, sizeof *lengths), *ends = calloc(all, sizeof *ends);
  if (lengths == NULL || ends == NULL) abort();
  qkv_session_read_info(session, &info, lengths);
  for (size_t i = 0; i < (layer_count > 0 ? layer_count : all); i++) {
    const uint32_t layer = layer_count > 0 ? layers[i] : (uint32_t)i;
    ends[layer] = end > 0 && end < lengths[layer] ? end : lengths[layer];
  }
  const qkv_status status = await_durable(spill, session, ends, error);
  free(lengths);
  free(ends);
  return status;
}

// ---- Looking after the disk ----

static bool on_verified(void *context, uint64_t done, uint64_t all) {
  qkvi_spill *spill = context;
  qkvi_spill_lock(spill);
  spill->verify.done = done;
  spill->verify.all = all;
  const bool go_on = !spill->finishing;
  qkvi_spill_unlock(spill);
  return go_on;
}

static void verify_job(void *context) {
  qkvi_spill *spill = context;
  qkv_storage_verify_report report = {0};
  (void)qkv_storage_verify(spill->storage, on_verified, spill, &report);
  qkvi_spill_lock(spill);
  spill->verify.running = false;
  spill->verify.bad = report.bad;
  spill->verify.bytes = report.bytes;
  qkvi_spill_unlock(spill);
  if (report.bad > 0)
    qkv_log(QKV_LOG_ERROR, "damaged records", "{s:I, s:I}", "bad", (json_int_t)report.bad, "records",
            (json_int_t)report.records);
}

qkv_status qkvi_spill_verify(qkvi_spill *spill, qkv_pool *pool, bool start, qkvi_verify *verify) {
  qkvi_spill_lock(spill);
  const qkvi_verify last = spill->verify;
  const bool begin = start && !last.running;
  if (begin) spill->verify = (qkvi_verify){.running = true};
  qkvi_spill_unlock(spill);
  const qkv_status status = begin ? qkv_pool_submit(pool, verify_job, spill) : QKV_OK;
  qkvi_spill_lock(spill);
  if (status != QKV_OK) spill->verify = last;
  *verify = spill->verify;
  qkvi_spill_unlock(spill);
  return status;
}

qkv_status qkvi_spill_compact(qkvi_spill *spill, double live_share, uint64_t *freed, qkv_error *error) {
  qkv_storage_stats before, after;
  qkvi_journal_wait wait = {.spill = spill};
  qkv_storage_read_stats(spill->storage, &before);
  qkv_storage_compact(spill->storage, live_share, qkvi_spill_on_journal, &wait);
  qkvi_spill_lock(spill);
  while (!wait.done) (void)pthread_cond_wait(&spill->moved, &spill->lock);
  qkvi_spill_unlock(spill);
  qkv_storage_read_stats(spill->storage, &after);
  *freed = before.disk_bytes > after.disk_bytes ? before.disk_bytes - after.disk_bytes : 0;
  return wait.status == QKV_OK ? QKV_OK : qkv_fail(error, wait.status, "the disk did not take what was to be moved");
}

// ---- The thread ----

static bool settle_sessions(qkvi_spill *spill) {
  size_t count;
  bool all = true;
  qkvi_spilled *sessions = qkvi_spill_sessions(spill, &count);
  for (size_t i = 0; i < count; i++) all &= qkv_session_settle(sessions[i].session);
  qkvi_spill_drop_sessions(sessions, count);
  return all;
}

static bool take_flag(qkvi_spill *spill, bool *flag) {
  qkvi_spill_lock(spill);
  const bool was = *flag;
  *flag = false;
  qkvi_spill_unlock(spill);
  return was;
}

// memory-budget, which what is fixed at the start is a part of.
static uint64_t whole_budget(const qkvi_spill *spill) {
  return qkv_arena_read(qkv_store_arena(spill->store)).bytes_max;
}

// What a page on the SSD takes beside its bytes: its entry in the layer (engine/cache/layer.h) and in the storage's
// index, each in arrays that double, and in the index's table.
enum { RECORD_COST = 2 * (sizeof(qkv_page_entry) + 80) + 16, COUNT_MS = 100, DIRECTORY_PART = 8 };

// These are part of memory-budget, up to an eighth of it. Where there is no room the coldest pages leave, and it is
// tried again.
static void count_directory(qkvi_spill *spill) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(spill->storage, &stats);
  const uint64_t most = whole_budget(spill) / DIRECTORY_PART, all = stats.records * RECORD_COST,
                 wanted = all < most ? all : most, counted = spill->directory_bytes;
  qkv_arena *arena = qkv_store_arena(spill->store);
  if (wanted <= counted) {
    if (wanted < counted) qkv_arena_unreserve_elsewhere(arena, counted - wanted);
    spill->directory_bytes = wanted;
  } else if (qkv_arena_reserve_elsewhere(arena, wanted - counted, NULL) == QKV_OK) {
    spill->directory_bytes = wanted;
  } else {
    const uint64_t budget = qkvi_spill_budget(spill), more = wanted - counted;
    (void)qkvi_spill_evict(spill, budget > more ? budget - more : 0);
  }
}

// What is beyond a limit that has become less leaves. What is not durable yet does so later.
static void keep_limit(qkvi_spill *spill) {
  const uint64_t budget = qkvi_spill_budget(spill);
  if (qkvi_spill_taken(spill) <= budget) return;
  (void)qkvi_spill_evict(spill, budget);
  if (qkvi_spill_taken(spill) > budget) qkvi_spill_hasten(spill);
}

static void keep_counts(qkvi_spill *spill) {
  const int64_t now = qkvi_spill_now_ms();
  if (now < spill->counted_ms + COUNT_MS) return;
  spill->counted_ms = now;
  count_directory(spill);
  keep_limit(spill);
}

// A device without room may have it again; a budget has not, unless something goes.
static bool budget_is_full(qkvi_spill *spill) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(spill->storage, &stats);
  return stats.disk_bytes > spill->expel_above;
}

static void *work(void *context) {
  qkvi_spill *spill = context;
  uint64_t seen = 0;
  for (;;) {
    if (take_flag(spill, &spill->full) && budget_is_full(spill)) qkvi_spill_expel(spill);
    if (!resting(spill) && take_flag(spill, &spill->wanted)) qkvi_spill_journal_calibrations(spill);
    if (atomic_exchange_explicit(&spill->unsettled, false, memory_order_relaxed) && !settle_sessions(spill))
      atomic_store_explicit(&spill->unsettled, true, memory_order_relaxed);
    keep_counts(spill);
    qkvi_spill_lock(spill);
    const bool ending = spill->ending;
    qkvi_spill_unlock(spill);
    if (ending) return NULL;
    seen = qkvi_spill_await(spill, seen, QKVI_SPILL_STEP_MS);
  }
}

// ---- Life ----

static void init_locks(qkvi_spill *spill) {
  pthread_condattr_t clock;
  int failed = pthread_condattr_init(&clock);
  failed |= pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(&spill->moved, &clock);
  failed |= pthread_mutex_init(&spill->lock, NULL);
  failed |= pthread_mutex_init(&spill->room_lock, NULL);
  failed |= pthread_mutex_init(&spill->models_lock, NULL);
  failed |= pthread_mutex_init(&spill->loose_lock, NULL);
  assert(failed == 0);
  (void)failed;
  (void)pthread_condattr_destroy(&clock);
}

// Pages that wait to be written, twice: as they are and as zstd has left them. Buffers of writes and reads.
static const uint64_t FIXED_BUFFERS = UINT64_C(24) << 20, WINDOW_MAX = UINT64_C(16) << 20, DIRTY_LEAST = 1 << 20;
enum { BUFFERS_PART = 16, WINDOW_PART = 64 };

// What storage-dirty may be: the smaller the budget, the less, down to what a disk is worth being asked for.
static uint64_t dirty_bytes(const qkvi_spill *spill, const qkv_server_options *options) {
  const uint64_t half = spill->buffer_bytes / 2, fixed = half < FIXED_BUFFERS ? half : FIXED_BUFFERS;
  const uint64_t part = (spill->buffer_bytes - fixed) / 2, dirty = part > DIRTY_LEAST ? part : DIRTY_LEAST;
  return dirty < (uint64_t)options->storage_dirty ? dirty : (uint64_t)options->storage_dirty;
}

static qkv_status reserve_buffers(qkvi_spill *spill, const qkv_server_options *options, qkv_error *error) {
  const uint64_t most = 2 * (uint64_t)options->storage_dirty + FIXED_BUFFERS;
  const uint64_t part = whole_budget(spill) / BUFFERS_PART, bytes = part < most ? part : most;
  QKV_TRY(qkv_arena_reserve_elsewhere(qkv_store_arena(spill->store), bytes, error));
  spill->buffer_bytes = bytes;
  return QKV_OK;
}

uint64_t qkvi_spill_window(const qkvi_spill *spill, uint64_t taken) {
  const uint64_t part = whole_budget(spill) / WINDOW_PART, all = part < WINDOW_MAX ? part : WINDOW_MAX;
  return taken < all ? (all - taken) / 2 : 0;
}

qkv_status qkvi_spill_create(const qkv_server_options *options, qkv_store *store, qkv_metric_value *metrics,
                             qkvi_spill **out, qkv_error *error) {
  *out = NULL;
  if (options->data_dir == NULL) return QKV_OK;
  qkvi_spill *spill = calloc(1, sizeof *spill);
  if (spill == NULL) abort();
  spill->store = store;
  // The last segment is compaction's.
  spill->expel_above = options->storage_budget > 0
                           ? (uint64_t)options->storage_budget - 2 * (uint64_t)options->storage_segment
                           : UINT64_MAX;
  spill->metrics = metrics;
  init_locks(spill);
  init_backing(spill, &spill->backings[0], false);
  init_backing(spill, &spill->backings[1], true);
  const int others = qkv_cpu_count() - 1, helpers = others < RESTORERS_MAX ? others : RESTORERS_MAX;
  qkv_status status = qkv_pool_create(helpers > 0 ? (size_t)helpers : 0, 0, &spill->restorers, error);
  if (status == QKV_OK) status = reserve_buffers(spill, options, error);
  if (status == QKV_OK) status = qkvi_spill_recover(spill, options, dirty_bytes(spill, options), error);
  if (status == QKV_OK && pthread_create(&spill->thread, NULL, work, spill) != 0) abort();
  if (status == QKV_OK) {
    (void)pthread_setname_np(spill->thread, "qkvd-spill");
    spill->started = true;
    *out = spill;
  } else {
    qkvi_spill_destroy(&spill);
  }
  return status;
}

void qkvi_spill_finish(qkvi_spill *spill, int64_t wait_ms) {
  qkvi_spill_lock(spill);
  spill->finishing = true;
  spill->failure = QKV_OK;  // the disk gets another chance
  spill->pause_ms = spill->retry_ms = 0;
  qkvi_spill_unlock(spill);
  const int64_t until = qkvi_spill_now_ms() + wait_ms;
  uint64_t seen = qkvi_spill_steps(spill);
  size_t count;
  qkvi_spilled *sessions = qkvi_spill_sessions(spill, &count);
  for (size_t i = 0; i < count; i++) {
    qkv_error error = {0};
    if (qkv_session_seal(sessions[i].session, &error) != QKV_OK)
      qkv_log(QKV_LOG_WARN, "the newest rows of a session are not kept", "{s:s, s:s}", "session",
              qkv_session_name(sessions[i].session), "reason", error.text);
  }
  size_t left;
  for (;;) {
    left = 0;
    for (size_t i = 0; i < count; i++) left += qkv_session_settle(sessions[i].session) ? 0 : 1;
    if ((left == 0 && !cuts_waiting(spill)) || qkvi_spill_now_ms() > until) break;
    if (qkvi_spill_failure(spill) != QKV_OK) break;
    seen = qkvi_spill_await(spill, seen, QKVI_SPILL_STEP_MS);
  }
  if (left > 0) qkv_log(QKV_LOG_ERROR, "sessions are not durable as a whole", "{s:I}", "sessions", (json_int_t)left);
  qkvi_spill_drop_sessions(sessions, count);
}

void qkvi_spill_destroy(qkvi_spill **spill) {
  qkvi_spill *old = *spill;
  if (old == NULL) return;
  *spill = NULL;
  if (old->started) {
    qkvi_spill_lock(old);
    old->ending = true;
    old->steps++;
    (void)pthread_cond_broadcast(&old->moved);
    qkvi_spill_unlock(old);
    (void)pthread_join(old->thread, NULL);
  }
  qkv_pool_destroy(&old->restorers);
  if (old->storage != NULL) qkv_storage_close(&old->storage);
  qkv_arena_unreserve_elsewhere(qkv_store_arena(old->store), old->buffer_bytes + old->directory_bytes);
  for (qkvi_known *known = old->known, *next; known != NULL; known = next) {
    next = known->next;
    free(known);
  }
  for (qkvi_poisoned *at = old->poisoned, *next; at != NULL; at = next) {
    next = at->next;
    free(at);
  }
  // Clearing frees the table alone; the entries stay linked.
  qkvi_pending *pending = old->pending, *after;
  HASH_CLEAR(hh, old->pending);
  for (; pending != NULL; pending = after) {
    after = pending->hh.next;
    free(pending->page);
    free(pending);
  }
  qkvi_spill_drop_loose(old);
  (void)pthread_mutex_destroy(&old->loose_lock);
  (void)pthread_mutex_destroy(&old->models_lock);
  (void)pthread_mutex_destroy(&old->room_lock);
  (void)pthread_mutex_destroy(&old->lock);
  (void)pthread_cond_destroy(&old->moved);
  free(old);
}

uint64_t qkvi_spill_budget(const qkvi_spill *spill) {
  return qkv_arena_read(qkv_store_arena(spill->store)).bytes_limit;
}

qkv_storage *qkvi_spill_storage(const qkvi_spill *spill) {
  return spill->storage;
}
