#include "server/residency/residency.h"

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
#include "engine/base/yield.h"
#include "engine/cache/session_spill.h"
#include "server/contract.h"
#include "server/identity.h"
#include "server/metrics.h"
#include "server/residency/internal.h"

enum { SYNC_WAIT_MS = 30000, PAUSE_MS = 250, PAUSE_MAX_MS = 30000, RESTORERS_MAX = 3 };

int64_t qkvi_now_ms(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void qkvi_residency_lock(qkvi_residency *residency) {
  const int failed = pthread_mutex_lock(&residency->lock);
  assert(failed == 0);
  (void)failed;
}

void qkvi_residency_unlock(qkvi_residency *residency) {
  (void)pthread_mutex_unlock(&residency->lock);
}

void qkvi_progress_signal(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  residency->steps++;
  (void)pthread_cond_broadcast(&residency->moved);
  qkvi_residency_unlock(residency);
}

uint64_t qkvi_progress_await(qkvi_residency *residency, uint64_t seen, int64_t ms) {
  struct timespec until;
  qkv_yield_rest();
  (void)clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += ms / 1000;
  until.tv_nsec += ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  qkvi_residency_lock(residency);
  while (residency->steps == seen && pthread_cond_timedwait(&residency->moved, &residency->lock, &until) != ETIMEDOUT)
    continue;
  seen = residency->steps;
  qkvi_residency_unlock(residency);
  return seen;
}

uint64_t qkvi_progress_count(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const uint64_t steps = residency->steps;
  qkvi_residency_unlock(residency);
  return steps;
}

// ---- Records under way ----

static qkvi_pending *find_pending(qkvi_residency *residency, uint64_t record) {
  qkvi_pending *found;
  HASH_FIND(hh, residency->pending, &record, sizeof record, found);
  return found;
}

static void forget(qkvi_residency *residency, qkvi_pending *pending) {
  HASH_DEL(residency->pending, pending);  // NOLINT(clang-analyzer-unix.Malloc): what was freed is not linked any more
  free(pending->page);
  free(pending);
}

// The disk is left alone for a while, longer each time: pages stay in memory, which serves them.
void qkvi_write_back_note_failure(qkvi_residency *residency, qkv_status status) {
  if (residency->failure == QKV_OK)
    qkv_log(QKV_LOG_ERROR, "the data directory refuses, sessions are in memory alone until it does not", "{s:s}",
            "status", qkv_status_name(status));
  residency->failure = status;
  residency->full |= status == QKV_RESOURCE_EXHAUSTED;
  const int64_t now = qkvi_now_ms();
  if (now >= residency->retry_ms) {  // of many that fail at once one counts
    const int64_t pause = residency->pause_ms == 0 ? PAUSE_MS : 2 * residency->pause_ms;
    residency->pause_ms = pause < PAUSE_MAX_MS ? pause : PAUSE_MAX_MS;
    residency->retry_ms = now + residency->pause_ms;
  }
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_FAILED], 1);
  qkv_metric_set(&residency->metrics[QKV_METRIC_SPILL_DEGRADED], 1);
}

// What was accepted before the disk refused says nothing.
static void note_success(qkvi_residency *residency) {
  if (residency->failure != QKV_OK && qkvi_now_ms() < residency->retry_ms) return;
  if (residency->failure != QKV_OK) qkv_log(QKV_LOG_INFO, "the data directory takes pages again", NULL);
  residency->failure = QKV_OK;
  residency->pause_ms = residency->retry_ms = 0;
  qkv_metric_set(&residency->metrics[QKV_METRIC_SPILL_DEGRADED], 0);
}

static void on_written(void *context, uint64_t record, qkv_status status) {
  qkvi_residency *residency = context;
  qkvi_residency_lock(residency);
  qkvi_pending *pending = find_pending(residency, record);
  assert(pending != NULL);
  free(pending->page);
  pending->page = NULL;
  pending->state = QKV_RECORD_WRITTEN;
  if (status != QKV_OK) {
    if (status != QKV_CANCELLED) qkvi_write_back_note_failure(residency, status);
    forget(residency, pending);
  }
  qkvi_residency_unlock(residency);
  qkvi_progress_signal(residency);
}

static void on_durable(void *context, uint64_t record, qkv_status status) {
  qkvi_residency *residency = context;
  qkvi_residency_lock(residency);
  qkvi_pending *pending = find_pending(residency, record);
  assert(pending != NULL);
  if (status != QKV_OK) {
    qkvi_write_back_note_failure(residency, status);
    pending->state = QKV_RECORD_GONE;  // as long as the storage has it: forks may ask for it
  } else {
    note_success(residency);
    forget(residency, pending);
  }
  qkvi_residency_unlock(residency);
  qkvi_progress_signal(residency);
}

static void on_hastened(void *context, qkv_status status) {
  qkvi_residency *residency = context;
  (void)status;  // each record says it for itself
  qkvi_residency_lock(residency);
  residency->hastening = false;
  qkvi_residency_unlock(residency);
}

void qkvi_write_back_hasten(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const bool begin = !residency->hastening;
  residency->hastening = true;
  qkvi_residency_unlock(residency);
  if (begin) qkv_storage_sync(residency->storage, on_hastened, residency);
}

// ---- The backing ----

static bool resting(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const bool rests = residency->retry_ms != 0 && qkvi_now_ms() < residency->retry_ms;
  qkvi_residency_unlock(residency);
  return rests;
}

// Whether a truncation of the session could not be written: what is put after it would stand beside what it cut.
bool qkvi_write_back_lost_truncation(qkvi_residency *residency, uint64_t session) {
  qkvi_residency_lock(residency);
  bool found = false;
  for (const qkvi_poisoned *at = residency->poisoned; at != NULL; at = at->next) found |= at->session == session;
  qkvi_residency_unlock(residency);
  return found;
}

uint64_t qkvi_write_back_put(const qkvi_backing *backing, const qkv_record_meta *meta, void *payload,
                             uint64_t bytes) {
  qkvi_residency *residency = backing->residency;
  qkvi_pending *pending = calloc(1, sizeof *pending);
  if (pending == NULL) abort();
  *pending = (qkvi_pending){.session = meta->session, .state = QKV_RECORD_WAITING, .page = payload};
  const qkv_storage_put_request request = {.meta = *meta,
                                           .payload = payload,
                                           .bytes = bytes,
                                           .hurry = backing->hurry,
                                           .written = on_written,
                                           .durable = on_durable,
                                           .context = residency};
  // The callbacks may come before put returns; they find the record, and free it, once they have the lock.
  qkvi_residency_lock(residency);
  qkv_error error = {0};
  const qkv_status status = qkv_storage_put(residency->storage, &request, &pending->record, &error);
  const uint64_t record = pending->record;
  if (status == QKV_OK) {
    HASH_ADD(hh, residency->pending, record, sizeof pending->record, pending);
  } else {
    qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_REFUSED], 1);
    if (status != QKV_UNAVAILABLE) qkvi_write_back_note_failure(residency, status);
  }
  qkvi_residency_unlock(residency);
  if (status == QKV_OK) return record;
  free(payload);
  free(pending);
  return 0;
}

bool qkvi_write_back_refuses(qkvi_residency *residency, uint64_t session) {
  atomic_store_explicit(&residency->unsettled, true, memory_order_relaxed);
  return resting(residency) || qkvi_write_back_lost_truncation(residency, session);
}

static uint64_t put(void *context, uint64_t session, const char *model, const void *page, uint32_t bytes,
                    uint32_t tokens, const qkv_prefix_hash *hash) {
  const qkvi_backing *backing = context;
  qkvi_residency *residency = backing->residency;
  const qkv_page_header *header = page;
  if (qkvi_write_back_refuses(residency, session) ||
      !qkvi_catalogue_calibration_ready(residency, model, header->calibration))
    return 0;
  qkv_record_meta meta = {.session = session,
                          .position = header->position,
                          .layer = header->layer,
                          .tokens = tokens,
                          .codec = header->codec,
                          .calibration = header->calibration};
  _Static_assert(sizeof *hash == sizeof meta.hash, "a hash of 128 bits");
  if (hash != NULL) memcpy(meta.hash, hash, sizeof *hash);
  void *copy = malloc(bytes);
  if (copy == NULL) abort();
  memcpy(copy, page, bytes);
  const uint64_t record = qkvi_write_back_put(backing, &meta, copy, bytes);
  if (record != 0) {
    qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_PAGES], 1);
    qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_BYTES], bytes);
  }
  return record;
}

static qkv_record_state state_of(void *context, uint64_t record) {
  qkvi_residency *residency = ((const qkvi_backing *)context)->residency;
  qkvi_residency_lock(residency);
  const qkvi_pending *pending = find_pending(residency, record);
  const qkv_record_state state = pending != NULL ? pending->state : QKV_RECORD_DURABLE;
  qkvi_residency_unlock(residency);
  if (pending != NULL) return state;
  qkv_record_info info;
  return qkv_storage_find(residency->storage, record, &info) == QKV_OK ? QKV_RECORD_DURABLE : QKV_RECORD_GONE;
}

static void drop(void *context, uint64_t record) {
  qkvi_residency *residency = ((const qkvi_backing *)context)->residency;
  qkv_storage_drop(residency->storage, record);
}

// Records that did not become durable, and that the storage has no more.
static void forget_gone(qkvi_residency *residency) {
  qkv_record_info info;
  qkvi_residency_lock(residency);
  for (qkvi_pending *at = residency->pending, *next; at != NULL; at = next) {
    next = at->hh.next;
    if (at->state == QKV_RECORD_GONE && qkv_storage_find(residency->storage, at->record, &info) != QKV_OK)
      forget(residency, at);
  }
  qkvi_residency_unlock(residency);
}

static void on_cut(void *context, qkv_status status) {
  qkvi_poisoned *cutting = context;
  qkvi_residency *residency = cutting->residency;
  qkvi_residency_lock(residency);
  residency->cuts--;
  if (status != QKV_OK) {
    qkvi_write_back_note_failure(residency, status);
    cutting->next = residency->poisoned;
    residency->poisoned = cutting;
    cutting = NULL;
  }
  qkvi_residency_unlock(residency);
  free(cutting);
  qkvi_progress_signal(residency);
}

void qkvi_write_back_cut(qkvi_residency *residency, uint64_t session, uint32_t layer, uint64_t position) {
  qkvi_poisoned *cutting = calloc(1, sizeof *cutting);
  if (cutting == NULL) abort();
  *cutting = (qkvi_poisoned){.residency = residency, .session = session};
  qkvi_residency_lock(residency);
  residency->cuts++;
  qkvi_residency_unlock(residency);
  qkv_storage_session_truncate(residency->storage, session, layer, position, on_cut, cutting);
}

static void cut(void *context, uint64_t session, uint32_t layer, uint64_t position) {
  qkvi_write_back_cut(((const qkvi_backing *)context)->residency, session, layer, position);
}

static bool takes(void *context, uint64_t session) {
  qkvi_residency *residency = ((const qkvi_backing *)context)->residency;
  return qkvi_write_back_failure(residency) == QKV_OK && !qkvi_write_back_lost_truncation(residency, session);
}

static void init_backing(qkvi_residency *residency, qkvi_backing *backing, bool hurry) {
  *backing = (qkvi_backing){.residency = residency, .hurry = hurry};
  backing->table = (qkv_backing){.context = backing,
                                 .put = put,
                                 .state = state_of,
                                 .drop = drop,
                                 .takes = takes,
                                 .cut = cut,
                                 .read_begin = qkvi_tier_read_begin,
                                 .read_wait = qkvi_tier_read_wait,
                                 .read_end = qkvi_tier_read_end};
  if (hurry) backing->table.put_rows = qkvi_rows_put;
}

// ---- Sessions ----

qkv_status qkvi_catalogue_enlist(qkvi_residency *residency, qkv_session_config *config, qkv_error *error) {
  if (config->durability <= QKV_DURABILITY_MEMORY) return QKV_OK;
  if (residency == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "durability is %s, the daemon has no data-dir",
                    config->durability == QKV_DURABILITY_SYNC ? "SYNC" : "ASYNC");
  config->backing = &residency->backings[config->durability == QKV_DURABILITY_SYNC].table;
  config->id = qkv_storage_session_number(residency->storage);
  return QKV_OK;
}

const qkv_backing *qkvi_write_back_backing(qkvi_residency *residency, qkv_durability durability) {
  return &residency->backings[durability == QKV_DURABILITY_SYNC].table;
}

qkv_status qkvi_catalogue_closed(qkvi_residency *residency, qkv_session *session, qkv_error *error) {
  const qkv_session_config *config = qkv_session_config_of(session);
  qkvi_journal_wait wait = {.residency = residency};
  if (config->backing == NULL) return QKV_OK;
  qkv_session_detach(session);  // whoever still has it puts nothing behind its end
  qkv_storage_session_close(residency->storage, config->id, qkvi_catalogue_on_journal, &wait);
  return qkvi_catalogue_finish_wait(&wait, error);
}

void qkvi_catalogue_drop(qkvi_residency *residency, qkv_session *session) {
  if (residency == NULL || qkv_session_config_of(session)->backing == NULL) return;
  qkv_session_detach(session);
  qkv_storage_session_close(residency->storage, qkv_session_config_of(session)->id, NULL, NULL);
}

static bool cuts_waiting(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const bool waiting = residency->cuts > 0;
  qkvi_residency_unlock(residency);
  return waiting;
}

qkv_status qkvi_write_back_truncated(qkvi_residency *residency, const qkv_session *session, qkv_error *error) {
  if (qkv_session_config_of(session)->backing == NULL) return QKV_OK;
  const int64_t until = qkvi_now_ms() + SYNC_WAIT_MS;
  uint64_t seen = qkvi_progress_count(residency);
  while (cuts_waiting(residency)) {
    if (qkvi_now_ms() > until)
      return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the truncation is not durable yet",
                      qkv_session_name(session));
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
  if (!qkvi_write_back_lost_truncation(residency, qkv_session_config_of(session)->id)) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the disk did not take the truncation, close the session",
                  qkv_session_name(session));
}

bool qkvi_write_back_owes(qkvi_residency *residency, qkv_session *session) {
  if (residency == NULL || qkv_session_config_of(session)->durability != QKV_DURABILITY_SYNC) return false;
  return !qkv_session_settle(session) || cuts_waiting(residency);
}

qkv_status qkvi_write_back_failure(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const qkv_status failure = residency->failure;
  qkvi_residency_unlock(residency);
  return failure;
}

static const char *refusal(qkv_status failure) {
  if (failure == QKV_RESOURCE_EXHAUSTED) return "the disk or storage-budget is full";
  return failure == QKV_OK ? "the disk takes longer than 30 s" : "the disk failed";
}

// Whether what is sealed below ends[layer] of each layer is durable; NULL: everything, and every cut.
static bool is_durable(qkvi_residency *residency, qkv_session *session, const uint64_t *ends) {
  const bool settled = qkv_session_settle(session);
  if (ends == NULL) return settled && !cuts_waiting(residency);
  bool durable = true;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++)
    durable &= qkv_session_is_durable(session, i, ends[i]);
  return durable;
}

static qkv_status await_durable(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                const uint64_t *ends, qkv_error *error) {
  const int64_t until = qkvi_now_ms() + SYNC_WAIT_MS;
  uint64_t seen = qkvi_progress_count(residency);
  while (!is_durable(residency, session, ends)) {
    if (qkvi_client_is_gone(call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    const qkv_status failure = qkvi_write_back_lost_truncation(residency, qkv_session_config_of(session)->id)
                                   ? QKV_INTERNAL
                                   : qkvi_write_back_failure(residency);
    if (failure == QKV_RESOURCE_EXHAUSTED || failure == QKV_INTERNAL || qkvi_now_ms() > until)
      return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the rows are held, but not durable: %s",
                      qkv_session_name(session), refusal(failure));
    if (qkv_session_config_of(session)->durability != QKV_DURABILITY_SYNC) qkvi_write_back_hasten(residency);
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
  return QKV_OK;
}

qkv_status qkvi_write_back_sync(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                qkv_error *error) {
  return await_durable(residency, call, session, NULL, error);
}

qkv_status qkvi_write_back_sync_range(qkvi_residency *residency, qkv_session *session, const uint32_t *layers,
                                      size_t layer_count, uint64_t end, qkv_error *error) {
  const uint32_t all = qkv_session_model(session)->layers;
  qkv_session_info info;
  uint64_t *lengths = calloc(all, sizeof *lengths), *ends = calloc(all, sizeof *ends);
  if (lengths == NULL || ends == NULL) abort();
  qkv_session_read_info(session, &info, lengths);
  for (size_t i = 0; i < (layer_count > 0 ? layer_count : all); i++) {
    const uint32_t layer = layer_count > 0 ? layers[i] : (uint32_t)i;
    ends[layer] = end > 0 && end < lengths[layer] ? end : lengths[layer];
  }
  const qkv_status status = await_durable(residency, NULL, session, ends, error);
  free(lengths);
  free(ends);
  return status;
}

// ---- The thread ----

static bool settle_sessions(qkvi_residency *residency) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  bool all = true;
  qkv_recency_begin(recency, QKV_RECENCY_UNSETTLED);
  for (qkv_session *next; (next = qkv_recency_next(recency, QKV_RECENCY_UNSETTLED)) != NULL; qkv_session_unref(&next))
    all &= qkv_session_settle(next);
  qkv_recency_end(recency, QKV_RECENCY_UNSETTLED);
  return qkvi_objects_settle(residency->objects) && all;
}

static bool take_flag(qkvi_residency *residency, bool *flag) {
  qkvi_residency_lock(residency);
  const bool was = *flag;
  *flag = false;
  qkvi_residency_unlock(residency);
  return was;
}

// memory-budget, which what is fixed at the start is a part of.
static uint64_t whole_budget(const qkvi_residency *residency) {
  return qkv_arena_read(qkv_store_arena(residency->store)).bytes_max;
}

enum { COUNT_MS = 100, DIRECTORY_PART = 8 };

// What is known of records, in the storage's index and in layers, is part of memory-budget, up to an eighth of it.
// The index counts its own bytes: a session of one record takes some 500 of them, one of many 32 a record. The
// entries of pages in memory are larger, and small against the pages. Where there is no headroom the coldest pages
// leave, and it is tried again.
static void count_directory(qkvi_residency *residency) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(residency->storage, &stats);
  const uint64_t most = whole_budget(residency) / DIRECTORY_PART,
                 all = stats.index_bytes + stats.records * QKV_COLD_PAGE_BYTES, wanted = all < most ? all : most,
                 counted = residency->directory_bytes;
  qkv_arena *arena = qkv_store_arena(residency->store);
  qkv_metric_set(&residency->metrics[QKV_METRIC_STORAGE_KNOWN_BYTES], (int64_t)all);
  if (wanted <= counted) {
    if (wanted < counted) qkv_arena_unreserve_elsewhere(arena, counted - wanted);
    residency->directory_bytes = wanted;
  } else if (qkv_arena_reserve_elsewhere(arena, wanted - counted, NULL) == QKV_OK) {
    residency->directory_bytes = wanted;
  } else {
    const uint64_t budget = qkvi_budget_limit(residency), more = wanted - counted;
    (void)qkvi_budget_evict(residency, budget > more ? budget - more : 0);
  }
}

// What is beyond a limit that has become less leaves. What is not durable yet does so later.
static void keep_limit(qkvi_residency *residency) {
  const uint64_t budget = qkvi_budget_limit(residency);
  if (qkvi_budget_taken(residency) <= budget) return;
  (void)qkvi_budget_evict(residency, budget);
  if (qkvi_budget_taken(residency) > budget) qkvi_write_back_hasten(residency);
}

static void keep_counts(qkvi_residency *residency) {
  const int64_t now = qkvi_now_ms();
  if (now < residency->counted_ms + COUNT_MS) return;
  residency->counted_ms = now;
  forget_gone(residency);
  count_directory(residency);
  keep_limit(residency);
}

// A device without room may have it again; a budget has not, unless something goes.
static bool budget_is_full(qkvi_residency *residency) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(residency->storage, &stats);
  return stats.disk_bytes > residency->expel_above;
}

static void *work(void *context) {
  qkvi_residency *residency = context;
  uint64_t seen = 0;
  for (;;) {
    if (take_flag(residency, &residency->full) && budget_is_full(residency)) qkvi_residency_expel(residency);
    if (!resting(residency) && take_flag(residency, &residency->wanted))
      qkvi_catalogue_journal_calibrations(residency);
    if (atomic_exchange_explicit(&residency->unsettled, false, memory_order_relaxed) && !settle_sessions(residency))
      atomic_store_explicit(&residency->unsettled, true, memory_order_relaxed);
    keep_counts(residency);
    qkvi_residency_lock(residency);
    const bool ending = residency->ending;
    qkvi_residency_unlock(residency);
    if (ending) return NULL;
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
}

// ---- Life ----

static void init_locks(qkvi_residency *residency) {
  pthread_condattr_t clock;
  int failed = pthread_condattr_init(&clock);
  failed |= pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(&residency->moved, &clock);
  failed |= pthread_mutex_init(&residency->lock, NULL);
  failed |= pthread_mutex_init(&residency->models_lock, NULL);
  failed |= pthread_mutex_init(&residency->loose_lock, NULL);
  failed |= pthread_mutex_init(&residency->notes_lock, NULL);
  assert(failed == 0);
  (void)failed;
  (void)pthread_condattr_destroy(&clock);
}

// Pages that wait to be written, twice: as they are and as zstd has left them. Buffers of writes and reads.
static const uint64_t FIXED_BUFFERS = UINT64_C(24) << 20, WINDOW_MAX = UINT64_C(16) << 20, DIRTY_LEAST = 1 << 20;
enum { BUFFERS_PART = 16, WINDOW_PART = 64 };

// What storage-dirty may be: the smaller the budget, the less, down to what a disk is worth being asked for.
static uint64_t dirty_bytes(const qkvi_residency *residency, const qkv_server_options *options) {
  const uint64_t half = residency->buffer_bytes / 2, fixed = half < FIXED_BUFFERS ? half : FIXED_BUFFERS;
  const uint64_t part = (residency->buffer_bytes - fixed) / 2, dirty = part > DIRTY_LEAST ? part : DIRTY_LEAST;
  return dirty < (uint64_t)options->storage_dirty ? dirty : (uint64_t)options->storage_dirty;
}

static qkv_status reserve_buffers(qkvi_residency *residency, const qkv_server_options *options, qkv_error *error) {
  const uint64_t most = 2 * (uint64_t)options->storage_dirty + FIXED_BUFFERS;
  const uint64_t part = whole_budget(residency) / BUFFERS_PART, bytes = part < most ? part : most;
  QKV_TRY(qkv_arena_reserve_elsewhere(qkv_store_arena(residency->store), bytes, error));
  residency->buffer_bytes = bytes;
  return QKV_OK;
}

uint64_t qkvi_restore_window(const qkvi_residency *residency, uint64_t taken) {
  const uint64_t part = whole_budget(residency) / WINDOW_PART, all = part < WINDOW_MAX ? part : WINDOW_MAX;
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
  // The last segment is compaction's.
  residency->expel_above = options->storage_budget > 0
                               ? (uint64_t)options->storage_budget - 2 * (uint64_t)options->storage_segment
                               : UINT64_MAX;
  residency->metrics = metrics;
  init_locks(residency);
  init_backing(residency, &residency->backings[0], false);
  init_backing(residency, &residency->backings[1], true);
  const int others = qkv_cpu_count() - 1, helpers = others < RESTORERS_MAX ? others : RESTORERS_MAX;
  qkv_status status = qkv_pool_create(helpers > 0 ? (size_t)helpers : 0, 0, &residency->restorers, error);
  if (status == QKV_OK) status = reserve_buffers(residency, options, error);
  if (status == QKV_OK) status = qkvi_residency_recover(residency, options, dirty_bytes(residency, options), error);
  if (status == QKV_OK && pthread_create(&residency->thread, NULL, work, residency) != 0) abort();
  if (status == QKV_OK) {
    (void)pthread_setname_np(residency->thread, "qkvd-residency");
    residency->started = true;
    *out = residency;
  } else {
    qkvi_residency_destroy(&residency);
  }
  return status;
}

// The exact rows of all sessions become pages. Where memory has no headroom for these, what is durable leaves it, and
// the rest is sealed another time: the sessions of which something is left.
static size_t seal_all(qkvi_residency *residency, qkv_session *const *sessions, size_t count) {
  size_t left = 0;
  for (size_t i = 0; i < count; i++) left += qkv_session_seal(sessions[i], NULL) == QKV_OK ? 0 : 1;
  if (left > 0) (void)qkvi_budget_evict(residency, 0);
  return left;
}

qkv_session **qkvi_residency_sessions(qkvi_residency *residency, size_t *count) {
  const size_t most = qkv_store_read_stats(residency->store).sessions + 1;
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
  residency->failure = QKV_OK;  // the disk gets another chance
  residency->pause_ms = residency->retry_ms = 0;
  qkvi_residency_unlock(residency);
  const int64_t until = qkvi_now_ms() + wait_ms;
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
    if ((left == 0 && !cuts_waiting(residency)) || qkvi_now_ms() > until) break;
    if (qkvi_write_back_failure(residency) != QKV_OK) break;
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
  for (size_t i = 0; i < count; i++) {
    qkv_error error = {0};
    if (qkv_session_seal(sessions[i], &error) != QKV_OK)
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
  qkvi_catalogue_drop_loose(old);
  (void)pthread_mutex_destroy(&old->notes_lock);
  (void)pthread_mutex_destroy(&old->loose_lock);
  (void)pthread_mutex_destroy(&old->models_lock);
  (void)pthread_mutex_destroy(&old->lock);
  (void)pthread_cond_destroy(&old->moved);
  free(old);
}

uint64_t qkvi_budget_limit(const qkvi_residency *residency) {
  return qkv_arena_read(qkv_store_arena(residency->store)).bytes_limit;
}

qkv_storage *qkvi_residency_storage(const qkvi_residency *residency) {
  return residency->storage;
}
