// The public calls: they check, take numbers, and leave the rest to the storage thread.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "storage/internal.h"

// ---- Journal ----

uint64_t qkv_storage_session_number(qkv_storage *storage) {
  pthread_mutex_lock(&storage->lock);
  const uint64_t number = storage->session_next++;
  pthread_mutex_unlock(&storage->lock);
  return number;
}

static void submit_entry(qkv_storage *storage, const qkv_journal_entry *entry, qkv_storage_done_fn *done,
                         void *context) {
  qkvi_pending_entry *pending = qkvi_checked(calloc(1, sizeof *pending));
  *pending = (qkvi_pending_entry){
      .message = {.run = qkvi_journal_message}, .entry = *entry, .done = done, .context = context};
  pending->entry.payload = NULL;
  if (entry->kind == QKV_JOURNAL_SESSION_FORK) {
    const uint64_t before = qkvi_fork_bytes(entry->layers);
    uint8_t *copy = qkvi_checked(malloc(before + entry->bytes));
    qkvi_fork_make(copy, entry);
    pending->entry.payload = copy;
    pending->entry.bytes += before;
    pending->entry.positions = (const uint64_t *)(copy + before) - entry->layers;
  } else if (entry->bytes > 0) {
    void *copy = qkvi_checked(malloc(entry->bytes));
    memcpy(copy, entry->payload, entry->bytes);
    pending->entry.payload = copy;
  }
  pthread_mutex_lock(&storage->lock);
  pending->order = ++storage->journal.submitted;
  if (entry->kind == QKV_JOURNAL_SESSION_TRUNCATE) pending->entry.watermark = storage->record_next;
  qkvi_post_locked(storage, &pending->message);
  pthread_mutex_unlock(&storage->lock);
  qkvi_wake_ring(&storage->wake);
}

qkv_status qkv_storage_journal_long(qkv_storage *storage, const qkv_journal_entry *entry, qkv_storage_done_fn *done,
                                    void *context, qkv_error *error) {
  const uint64_t most = QKV_JOURNAL_PAYLOAD_MAX, bytes = entry->bytes;
  if (entry->kind < QKV_JOURNAL_MODEL || entry->kind > QKV_JOURNAL_SESSION_NOTE) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "journal kind is %d, allowed are %d to %d", (int)entry->kind,
                    QKV_JOURNAL_MODEL, QKV_JOURNAL_SESSION_NOTE);
  }
  if (bytes > most || entry->rest_bytes > most - bytes) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "a journal entry has %" PRIu64 " bytes, at most %" PRIu64,
                    bytes + entry->rest_bytes, most);
  }
  submit_entry(storage, entry, done, context);
  return QKV_OK;
}

qkv_status qkv_storage_journal(qkv_storage *storage, qkv_journal_kind kind, uint64_t session, const void *payload,
                               uint64_t bytes, qkv_storage_done_fn *done, void *context, qkv_error *error) {
  const qkv_journal_entry entry = {.kind = kind, .session = session, .payload = payload, .bytes = bytes};
  return qkv_storage_journal_long(storage, &entry, done, context, error);
}

qkv_status qkv_storage_session_fork(qkv_storage *storage, uint64_t child, uint64_t parent, const uint64_t *positions,
                                    uint32_t layers, const void *payload, uint64_t bytes, qkv_storage_done_fn *done,
                                    void *context, qkv_error *error) {
  if (layers < 1 || layers > QKV_FORK_LAYERS_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "fork.layers is %" PRIu32 ", allowed are 1 to %u", layers,
                    QKV_FORK_LAYERS_MAX);
  }
  const uint64_t most = QKV_JOURNAL_PAYLOAD_MAX - qkvi_fork_bytes(layers);
  if (bytes > most) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "fork.bytes is %" PRIu64 ", at most %" PRIu64 " with %" PRIu32 " layers", bytes, most, layers);
  }
  const qkv_journal_entry entry = {.kind = QKV_JOURNAL_SESSION_FORK,
                                   .session = child,
                                   .parent = parent,
                                   .layers = layers,
                                   .positions = positions,
                                   .payload = payload,
                                   .bytes = bytes};
  submit_entry(storage, &entry, done, context);
  return QKV_OK;
}

void qkv_storage_session_close(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context) {
  const qkv_journal_entry entry = {.kind = QKV_JOURNAL_SESSION_CLOSE, .session = session};
  submit_entry(storage, &entry, done, context);
}

void qkv_storage_session_truncate(qkv_storage *storage, uint64_t session, uint32_t layer, uint64_t position,
                                  qkv_storage_done_fn *done, void *context) {
  const qkv_journal_entry entry = {
      .kind = QKV_JOURNAL_SESSION_TRUNCATE, .session = session, .layer = layer, .position = position};
  submit_entry(storage, &entry, done, context);
}

// ---- Records ----

uint64_t qkv_storage_record_bytes_max(const qkv_storage *storage) {
  const uint64_t around = QKV_STORAGE_BLOCK + sizeof(qkv_record_header) + qkvi_segment_tail_bytes(1);
  const uint64_t most = storage->config.segment_bytes - around;
  return most < QKV_RECORD_BYTES_MAX ? most : QKV_RECORD_BYTES_MAX;
}

static qkv_status check_put(const qkv_storage *storage, const qkv_storage_put_request *request, qkv_error *error) {
  assert(request->written != NULL);
  const uint64_t bytes = request->bytes, most = qkv_storage_record_bytes_max(storage);
  if (bytes < 1 || bytes > most) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "record has %" PRIu64 " bytes, allowed are 1 to %" PRIu64, bytes,
                    most);
  }
  const qkv_record_meta *meta = &request->meta;
  if (meta->tokens < 1 || meta->tokens > QKV_RECORD_TOKENS_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "record.tokens is %" PRIu32 ", allowed are 1 to %u", meta->tokens,
                    QKV_RECORD_TOKENS_MAX);
  if (meta->layer >= QKV_RECORD_LAYERS_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "record.layer is %" PRIu32 ", at most %u", meta->layer,
                    QKV_RECORD_LAYERS_MAX - 1);
  if (meta->kind >= QKV_RECORD_KINDS)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "record.kind is %u, at most %u", meta->kind, QKV_RECORD_KINDS - 1);
  if (meta->position > UINT64_MAX - meta->tokens) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "record.position is %" PRIu64 ", too large", meta->position);
  }
  return QKV_OK;
}

qkv_status qkvi_admit(qkv_storage *storage, qkvi_put *put, uint64_t dirty_max, qkv_error *error) {
  const uint64_t bytes = put->request.bytes, extent = qkvi_record_extent(bytes);
  if (storage->dirty_bytes > 0 && (bytes > dirty_max || storage->dirty_bytes > dirty_max - bytes)) {
    storage->stats.puts_refused++;
    return qkv_fail(error, QKV_UNAVAILABLE,
                    "storage dirty bytes are %" PRIu64 " of %" PRIu64 ", %" PRIu64 " more are needed",
                    storage->dirty_bytes, dirty_max, bytes);
  }
  if (storage->waiting_bytes > storage->free_bytes || extent > storage->free_bytes - storage->waiting_bytes) {
    storage->stats.puts_refused_budget++;
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "storage budget is %" PRIu64 " bytes, %" PRIu64 " more do not fit",
                    storage->config.bytes_max, extent);
  }
  storage->dirty_bytes += bytes;
  storage->waiting_bytes += extent;
  put->record = storage->record_next++;
  put->order = storage->order_next++;
  put->after = storage->journal.submitted;
  return QKV_OK;
}

qkv_status qkv_storage_put(qkv_storage *storage, const qkv_storage_put_request *request, uint64_t *record,
                           qkv_error *error) {
  QKV_TRY(check_put(storage, request, error));
  qkvi_put *put = qkvi_checked(calloc(1, sizeof *put));
  *put = (qkvi_put){.message = {.run = qkvi_put_message},
                    .storage = storage,
                    .request = *request,
                    .tokens = request->meta.tokens,
                    .segment = QKVI_NO_SEGMENT};
  pthread_mutex_lock(&storage->lock);
  const qkv_status status = qkvi_admit(storage, put, storage->config.dirty_bytes_max, error);
  if (status == QKV_OK) {
    *record = put->record;
    qkvi_post_locked(storage, &put->message);
  }
  pthread_mutex_unlock(&storage->lock);
  if (status != QKV_OK) {
    free(put);
    return status;
  }
  qkvi_wake_ring(&storage->wake);
  return QKV_OK;
}

void qkv_storage_when_ready(qkv_storage *storage, qkv_storage_waiter *waiter) {
  pthread_mutex_lock(&storage->lock);
  const bool ready = storage->dirty_bytes <= storage->config.dirty_bytes_max / 2;
  if (!ready) {
    waiter->next = storage->waiters;
    storage->waiters = waiter;
  }
  pthread_mutex_unlock(&storage->lock);
  if (ready) waiter->ready(waiter);
}

void qkv_storage_sync(qkv_storage *storage, qkv_storage_done_fn *done, void *context) {
  qkvi_sync_waiter *waiter = qkvi_checked(calloc(1, sizeof *waiter));
  *waiter = (qkvi_sync_waiter){.message = {.run = qkvi_sync_message}, .done = done, .context = context};
  pthread_mutex_lock(&storage->lock);
  waiter->order = storage->order_next;
  qkvi_post_locked(storage, &waiter->message);
  pthread_mutex_unlock(&storage->lock);
  qkvi_wake_ring(&storage->wake);
}

typedef struct drop_message {
  qkvi_message message;
  uint64_t record;
} drop_message;

static void drop(qkv_storage *storage, qkvi_message *message) {
  const uint64_t record = ((drop_message *)message)->record;
  free(message);
  if (qkvi_index_find(storage->index, record, NULL)) {
    qkvi_forget(storage, record);
    qkvi_compact_consider(storage);
    return;
  }
  for (qkvi_put *put = storage->all_first; put != NULL; put = put->all_next) {
    if (put->record == record && !put->moved) put->cancelled = true;
  }
}

void qkv_storage_drop(qkv_storage *storage, uint64_t record) {
  drop_message *message = qkvi_checked(calloc(1, sizeof *message));
  *message = (drop_message){.message = {.run = drop}, .record = record};
  qkvi_post(storage, &message->message);
}

qkv_status qkv_storage_find(qkv_storage *storage, uint64_t record, qkv_record_info *info) {
  pthread_mutex_lock(&storage->lock);
  qkvi_entry entry;
  const bool found = qkvi_index_find(storage->index, record, &entry);
  pthread_mutex_unlock(&storage->lock);
  if (found) *info = qkvi_entry_info(&entry);
  return found ? QKV_OK : QKV_NOT_FOUND;
}

qkv_status qkv_storage_find_last(qkv_storage *storage, uint64_t session, uint16_t kind, qkv_record_info *info) {
  qkvi_index_walk walk;
  qkvi_entry entry, last = {0};
  pthread_mutex_lock(&storage->lock);
  qkvi_index_walk_init(storage->index, session, &walk);
  while (qkvi_index_walk_next(storage->index, &walk, &entry)) {
    if (entry.kind == kind && entry.record > last.record) last = entry;
  }
  pthread_mutex_unlock(&storage->lock);
  if (last.record == 0) return QKV_NOT_FOUND;
  *info = qkvi_entry_info(&last);
  return QKV_OK;
}

// ---- Looking after it ----

void qkv_storage_read_stats(qkv_storage *storage, qkv_storage_stats *stats) {
  pthread_mutex_lock(&storage->lock);
  *stats = storage->stats;
  stats->io = qkv_io_driver_name(storage->io);
  stats->records = qkvi_index_records(storage->index);
  stats->sessions = qkvi_index_sessions(storage->index);
  stats->index_bytes = qkvi_index_bytes(storage->index);
  stats->segments = storage->segments_count;
  stats->dirty_bytes = storage->dirty_bytes;
  stats->budget_bytes = storage->config.bytes_max;
  stats->disk_bytes = stats->dead_bytes = 0;
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    const qkvi_segment *segment = storage->segments[i];
    if (segment == NULL) continue;
    stats->disk_bytes += segment->file_bytes;
    stats->dead_bytes += segment->data_bytes - segment->live_bytes;
  }
  pthread_mutex_unlock(&storage->lock);
}

static int compare_segments(const void *a, const void *b) {
  const qkv_storage_segment *first = a, *second = b;
  return first->segment < second->segment ? -1 : first->segment > second->segment;
}

size_t qkv_storage_list_segments(qkv_storage *storage, qkv_storage_segment *segments, size_t count) {
  size_t all = 0, listed = 0;
  pthread_mutex_lock(&storage->lock);
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    const qkvi_segment *segment = storage->segments[i];
    if (segment == NULL) continue;
    all++;
    if (listed == count) continue;
    segments[listed++] = (qkv_storage_segment){.segment = segment->number,
                                               .file_bytes = segment->file_bytes,
                                               .live_bytes = segment->live_bytes,
                                               .records = segment->live_records,
                                               .sealed = segment->state == QKVI_SEGMENT_SEALED,
                                               .unread = segment->unread};
  }
  pthread_mutex_unlock(&storage->lock);
  if (listed > 0) qsort(segments, listed, sizeof *segments, compare_segments);
  return all;
}

void qkv_storage_compact(qkv_storage *storage, double live_share, qkv_storage_done_fn *done, void *context) {
  qkvi_compact_request *asked = qkvi_checked(calloc(1, sizeof *asked));
  *asked = (qkvi_compact_request){
      .message = {.run = qkvi_compact_message}, .live_share = live_share, .done = done, .context = context};
  qkvi_post(storage, &asked->message);
}

// ---- Verify ----

enum { VERIFY_AHEAD = 8 << 20, VERIFY_PIECE = 1024 };

// All records as they are now.
static size_t snapshot(qkv_storage *storage, qkv_record_info **infos) {
  pthread_mutex_lock(&storage->lock);
  const uint64_t records = qkvi_index_records(storage->index);
  *infos = qkvi_checked(malloc((records + 1) * sizeof **infos));
  size_t count = 0;
  for (uint32_t place = 0; place < qkvi_index_places(storage->index); place++) {
    qkvi_entry entry;
    if (qkvi_index_at(storage->index, place, &entry)) (*infos)[count++] = qkvi_entry_info(&entry);
  }
  pthread_mutex_unlock(&storage->lock);
  return count;
}

static qkv_status verify_piece(qkv_storage *storage, const qkv_record_info *infos, size_t count, size_t before,
                               size_t all, bool (*progress)(void *context, uint64_t done, uint64_t all),
                               void *context, qkv_storage_verify_report *report) {
  uint64_t records[VERIFY_PIECE];
  for (size_t i = 0; i < count; i++) records[i] = infos[i].record;
  qkv_storage_batch *batch = qkv_storage_batch_create(storage, records, count, VERIFY_AHEAD);
  qkv_status status = QKV_OK;
  for (size_t i = 0; i < count && status == QKV_OK; i++) {
    void *buffer = qkvi_checked(malloc(infos[i].bytes));
    const qkv_status read = qkv_storage_batch_wait(batch, i, buffer, infos[i].bytes, NULL);
    free(buffer);
    if (read != QKV_NOT_FOUND) report->records++;
    if (read == QKV_OK) report->bytes += infos[i].bytes;
    if (read != QKV_OK && read != QKV_NOT_FOUND) report->bad++;
    if (progress != NULL && !progress(context, before + i + 1, all)) status = QKV_CANCELLED;
  }
  qkv_storage_batch_destroy(&batch);
  return status;
}

typedef struct check_begin {
  sem_t begun;
  qkv_status status;
} check_begin;

static void check_begun(void *context, qkv_status status) {
  check_begin *begin = context;
  begin->status = status;
  (void)sem_post(&begin->begun);
}

qkv_status qkv_storage_verify(qkv_storage *storage, bool (*progress)(void *context, uint64_t done, uint64_t all),
                              void *context, qkv_storage_verify_report *report) {
  *report = (qkv_storage_verify_report){0};
  qkv_record_info *infos = NULL;
  check_begin begin = {.status = QKV_OK};
  if (sem_init(&begin.begun, 0, 0) != 0) abort();
  qkvi_begin_check(storage, check_begun, &begin);
  while (sem_wait(&begin.begun) != 0) assert(errno == EINTR);
  (void)sem_destroy(&begin.begun);
  if (begin.status != QKV_OK) report->bad++;
  const size_t all = snapshot(storage, &infos);
  qkv_status status = QKV_OK;
  for (size_t at = 0; at < all && status == QKV_OK; at += VERIFY_PIECE) {
    const size_t count = all - at < VERIFY_PIECE ? all - at : VERIFY_PIECE;
    status = verify_piece(storage, infos + at, count, at, all, progress, context, report);
  }
  free(infos);
  qkvi_end_check(storage);
  return status;
}
