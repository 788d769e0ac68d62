// Writes of sessions to the SSD: records and truncations that are under way, and the pause after a failure. The table
// of the tier (engine/cache/backing.h) is made here.
#include <assert.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "server/metrics.h"
#include "server/residency/internal.h"

enum { PAUSE_MS = 250, PAUSE_MAX_MS = 30000 };

// ---- Records under way ----

static qkvi_pending *find_pending(qkvi_residency *residency, uint64_t record) {
  qkvi_pending *found;
  HASH_FIND(hh, residency->pending, &record, sizeof record, found);
  return found;
}

void qkvi_write_back_let_go(qkvi_payload *payload) {
  qkv_page_let_go(&payload->page);
  free(payload->copy);
  payload->copy = NULL;
}

static void forget(qkvi_residency *residency, qkvi_pending *pending) {
  HASH_DEL(residency->pending, pending);  // NOLINT(clang-analyzer-unix.Malloc): what was freed is not linked any more
  qkvi_write_back_let_go(&pending->payload);
  free(pending);
}

// Writing pauses after a failure, longer each time: pages stay in memory, which serves them.
void qkvi_write_back_note_failure(qkvi_residency *residency, qkv_status status) {
  if (residency->failure == QKV_OK)
    qkv_log(QKV_LOG_ERROR, "the data directory refuses, sessions are in memory alone until it does not", "{s:s}",
            "status", qkv_status_name(status));
  residency->failure = status;
  residency->full |= status == QKV_RESOURCE_EXHAUSTED;
  const int64_t now = qkv_now_ms();
  if (now >= residency->retry_ms) {  // of many that fail at once one counts
    const int64_t pause = residency->pause_ms == 0 ? PAUSE_MS : 2 * residency->pause_ms;
    residency->pause_ms = pause < PAUSE_MAX_MS ? pause : PAUSE_MAX_MS;
    residency->retry_ms = now + residency->pause_ms;
  }
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_FAILED], 1);
  qkv_metric_set(&residency->metrics[QKV_METRIC_SPILL_DEGRADED], 1);
}

// A record that was accepted before the failure does not end the pause.
void qkvi_write_back_note_success(qkvi_residency *residency) {
  if (residency->failure != QKV_OK && qkv_now_ms() < residency->retry_ms) return;
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
  qkvi_payload payload = pending->payload;
  pending->payload = (qkvi_payload){.copy = NULL};
  pending->state = QKV_RECORD_WRITTEN;
  if (status != QKV_OK) {
    if (status != QKV_CANCELLED) qkvi_write_back_note_failure(residency, status);
    forget(residency, pending);
  }
  qkvi_residency_unlock(residency);
  qkvi_write_back_let_go(&payload);
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
    qkvi_write_back_note_success(residency);
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

bool qkvi_write_back_rests(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const bool rests = residency->retry_ms != 0 && qkv_now_ms() < residency->retry_ms;
  qkvi_residency_unlock(residency);
  return rests;
}

// Under the lock.
static qkvi_cuts *find_cuts(qkvi_residency *residency, uint64_t session) {
  qkvi_cuts *found;
  HASH_FIND(hh, residency->cuts, &session, sizeof session, found);
  return found;
}

static void free_done_cuts(qkvi_residency *residency, qkvi_cuts *cuts) {
  if (cuts->waiting > 0 || cuts->failed) return;
  HASH_DEL(residency->cuts, cuts);
  free(cuts);
}

// Whether a truncation of the session could not be written: rows that are put after it would be mixed with what it
// cut.
bool qkvi_write_back_lost_truncation(qkvi_residency *residency, uint64_t session) {
  qkvi_residency_lock(residency);
  const qkvi_cuts *cuts = find_cuts(residency, session);
  const bool lost = cuts != NULL && cuts->failed;
  qkvi_residency_unlock(residency);
  return lost;
}

void qkvi_write_back_forget_cuts(qkvi_residency *residency, uint64_t session) {
  qkvi_cuts *cuts = find_cuts(residency, session);
  if (cuts == NULL) return;
  cuts->failed = false;
  free_done_cuts(residency, cuts);
}

void qkvi_write_back_drop_cuts(qkvi_residency *residency) {
  // Clearing frees the table alone; the entries stay linked.
  qkvi_cuts *at = residency->cuts;
  HASH_CLEAR(hh, residency->cuts);
  for (qkvi_cuts *next; at != NULL; at = next) {
    next = at->hh.next;
    free(at);
  }
}

uint64_t qkvi_write_back_put(const qkvi_backing *backing, const qkv_record_meta *meta, qkvi_payload *payload,
                             uint64_t bytes) {
  qkvi_residency *residency = backing->residency;
  qkvi_pending *pending = calloc(1, sizeof *pending);
  if (pending == NULL) abort();
  *pending = (qkvi_pending){.session = meta->session, .state = QKV_RECORD_WAITING, .payload = *payload};
  const qkv_storage_put_request request = {.meta = *meta,
                                           .payload = payload->copy != NULL ? payload->copy : payload->page.image,
                                           .bytes = bytes,
                                           .sync_now = backing->sync_now,
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
    // A record that is larger than the storage takes says nothing about the disk.
    const bool failed = status != QKV_UNAVAILABLE && status != QKV_INVALID_ARGUMENT;
    if (failed) qkvi_write_back_note_failure(residency, status);
  }
  qkvi_residency_unlock(residency);
  if (status == QKV_OK) return record;
  qkvi_write_back_let_go(payload);
  free(pending);
  return 0;
}

bool qkvi_write_back_refuses(qkvi_residency *residency, uint64_t session) {
  atomic_store_explicit(&residency->unsettled, true, memory_order_relaxed);
  return qkvi_write_back_rests(residency) || qkvi_write_back_lost_truncation(residency, session);
}

static uint64_t put(void *context, uint64_t session, const qkv_model *model, qkv_page_hold *page, uint32_t tokens,
                    const qkv_prefix_hash *hash) {
  const qkvi_backing *backing = context;
  qkvi_residency *residency = backing->residency;
  const qkv_page_header *header = page->image;
  qkvi_payload payload = {.page = *page};
  const uint32_t bytes = page->bytes;
  if (qkvi_write_back_refuses(residency, session) ||
      !qkvi_catalogue_calibration_ready(residency, model, header->calibration)) {
    qkvi_write_back_let_go(&payload);
    return 0;
  }
  qkv_record_meta meta = {.session = session,
                          .position = header->position,
                          .layer = header->layer,
                          .tokens = tokens,
                          .codec = header->codec,
                          .calibration = header->calibration};
  _Static_assert(sizeof *hash == sizeof meta.hash, "a hash of 128 bits");
  if (hash != NULL) memcpy(meta.hash, hash, sizeof *hash);
  const uint64_t record = qkvi_write_back_put(backing, &meta, &payload, bytes);
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

// Forgets records that did not become durable and that the storage no longer has.
void qkvi_write_back_forget_gone(qkvi_residency *residency) {
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
  qkvi_cuts *cuts = context;
  qkvi_residency *residency = cuts->residency;
  qkvi_residency_lock(residency);
  cuts->waiting--;
  if (status != QKV_OK) {
    qkvi_write_back_note_failure(residency, status);
    cuts->failed = true;
  }
  free_done_cuts(residency, cuts);
  qkvi_residency_unlock(residency);
  qkvi_progress_signal(residency);
}

void qkvi_write_back_cut(qkvi_residency *residency, uint64_t session, uint32_t layer, uint64_t position) {
  qkvi_residency_lock(residency);
  qkvi_cuts *cuts = find_cuts(residency, session);
  if (cuts == NULL) {
    cuts = calloc(1, sizeof *cuts);
    if (cuts == NULL) abort();
    *cuts = (qkvi_cuts){.residency = residency, .session = session};
    HASH_ADD(hh, residency->cuts, session, sizeof cuts->session, cuts);
  }
  cuts->waiting++;
  qkvi_residency_unlock(residency);
  qkv_storage_session_truncate(residency->storage, session, layer, position, on_cut, cuts);
}

static void cut(void *context, uint64_t session, uint32_t layer, uint64_t position) {
  _Static_assert(QKV_BACKING_LAYERS == QKV_LAYER_ALL, "the journal's all layers");
  qkvi_write_back_cut(((const qkvi_backing *)context)->residency, session, layer, position);
}

static qkv_status health(void *context, uint64_t session) {
  qkvi_residency *residency = ((const qkvi_backing *)context)->residency;
  if (qkvi_write_back_lost_truncation(residency, session)) return QKV_INTERNAL;
  return qkvi_write_back_failure(residency);
}

static qkv_tier_capacity capacity(void *context) {
  const qkvi_residency *residency = ((const qkvi_backing *)context)->residency;
  qkv_storage_stats stats;
  qkv_storage_read_stats(residency->storage, &stats);
  return (qkv_tier_capacity){.bytes = stats.disk_bytes, .bytes_max = residency->expel_above};
}

void qkvi_write_back_init_backing(qkvi_residency *residency, qkvi_backing *backing, bool sync_now) {
  *backing = (qkvi_backing){.residency = residency, .sync_now = sync_now};
  backing->table = (qkv_backing){.context = backing,
                                 .put = put,
                                 .put_fold = qkvi_fold_put,
                                 .read_fold = qkvi_fold_read,
                                 .keep_fold = qkvi_fold_keep,
                                 .state = state_of,
                                 .drop = drop,
                                 .health = health,
                                 .capacity = capacity,
                                 .cut = cut,
                                 .read_begin = qkvi_tier_read_begin,
                                 .read_wait = qkvi_tier_read_wait,
                                 .read_end = qkvi_tier_read_end};
  if (sync_now) backing->table.put_rows = qkvi_rows_put;
}

const qkv_backing *qkvi_write_back_backing(qkvi_residency *residency, qkv_durability durability) {
  return &residency->backings[durability == QKV_DURABILITY_SYNC].table;
}

qkv_status qkvi_write_back_failure(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const qkv_status failure = residency->failure;
  qkvi_residency_unlock(residency);
  return failure;
}

bool qkvi_write_back_cuts_waiting(qkvi_residency *residency, uint64_t session) {
  qkvi_residency_lock(residency);
  const qkvi_cuts *at = session == 0 ? residency->cuts : find_cuts(residency, session);
  bool waiting = at != NULL && at->waiting > 0;
  for (; session == 0 && at != NULL && !waiting; at = at->hh.next) waiting = at->waiting > 0;
  qkvi_residency_unlock(residency);
  return waiting;
}
