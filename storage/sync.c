// From written to durable: one fdatasync for all that was written before it began; then summary and footer of a
// segment that takes no more records.
#include <assert.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "storage/internal.h"

static qkvi_segment *segment_of(qkv_io_request *request) {
  return (qkvi_segment *)((char *)request - offsetof(qkvi_segment, request));
}

static void append(qkvi_put_list *list, qkvi_put *put) {
  put->next = NULL;
  if (list->last != NULL) {
    list->last->next = put;
  } else {
    list->first = put;
  }
  list->last = put;
}

void qkvi_sync_later(qkv_storage *storage, qkvi_segment *segment, qkvi_put *put) {
  append(&segment->unsynced, put);
  if (put->request.sync_now || put->moved || storage->sync_waiters != NULL || storage->ending)
    segment->sync_wanted = true;
  if (segment->sync_wanted) qkvi_sync_segment(storage, segment);
}

// The writes in `list` are durable, or may not be.
static void settle(qkv_storage *storage, qkvi_put_list *list, qkv_status status) {
  qkvi_put *put = list->first;
  *list = (qkvi_put_list){0};
  while (put != NULL) {
    qkvi_put *next = put->next;
    if (put->moved) {
      qkvi_compact_moved(storage, put, status);
    } else if (put->request.durable != NULL) {
      put->request.durable(put->request.context, put->record, status);
    }
    qkvi_put_finish(storage, put);
    put = next;
  }
}

// ---- Sealing: everything is durable; summary and footer, fdatasync, and the rest of the file is cut off ----

static void seal_step(qkv_io_request *request) {
  qkv_storage *storage = request->context;
  qkvi_segment *segment = segment_of(request);
  if (request->error == 0 && request->kind == QKV_IO_WRITE) {
    *request = (qkv_io_request){.kind = QKV_IO_SYNC, .file = segment->file, .done = seal_step, .context = storage};
    qkv_io_submit(storage->io, request);
    return;
  }
  free(segment->block);
  segment->block = NULL;
  segment->sync_running = false;
  const uint64_t bytes = segment->end + qkvi_segment_tail_bytes(segment->headers_count);
  int error = request->error;
  if (error == 0 && bytes < segment->file_bytes) error = qkv_io_truncate(storage->io, segment->file, bytes);
  if (error != 0) {
    qkv_log(QKV_LOG_WARN, "a segment cannot be sealed", "{s:I, s:s}", "segment", (json_int_t)segment->number, "error",
            strerror(error));
    (void)qkvi_write_error(storage, error);
    qkvi_segment_fail(storage, segment);
  } else {
    pthread_mutex_lock(&storage->lock);
    segment->file_bytes = bytes;
    segment->state = QKVI_SEGMENT_SEALED;
    pthread_mutex_unlock(&storage->lock);
    free(segment->headers);
    segment->headers = NULL;
    qkvi_segments_count_free(storage);
  }
  qkvi_segment_leave(storage, segment);
  qkvi_compact_consider(storage);
}

static void seal(qkv_storage *storage, qkvi_segment *segment) {
  if (qkvi_segment_use(storage, segment) != 0) {
    qkvi_segment_fail(storage, segment);
    qkvi_segment_reap(storage, segment);
    return;
  }
  const uint64_t bytes = qkvi_segment_tail_bytes(segment->headers_count);
  assert(segment->end + bytes <= segment->file_bytes);
  segment->block = qkvi_aligned(bytes);
  qkvi_segment_tail_make(segment->block, storage->store, segment->number, segment->end, segment->headers,
                         segment->headers_count);
  segment->sync_running = true;
  segment->request = (qkv_io_request){.kind = QKV_IO_WRITE,
                                      .file = segment->file,
                                      .offset = segment->end,
                                      .size = bytes,
                                      .bytes = segment->block,
                                      .done = seal_step,
                                      .context = storage};
  qkv_io_submit(storage->io, &segment->request);
}

// ---- Syncing ----

static void sync_done(qkv_io_request *request) {
  qkv_storage *storage = request->context;
  qkvi_segment *segment = segment_of(request);
  segment->sync_running = false;
  qkvi_stat_add(storage, &storage->stats.syncs, 1);
  qkv_status status = QKV_OK;
  if (request->error != 0) {
    // The system may have dropped the pages: the writes may be lost, and a successful retry would prove nothing.
    qkv_log(QKV_LOG_ERROR, "fdatasync of a segment failed", "{s:I, s:s}", "segment", (json_int_t)segment->number,
            "error", strerror(request->error));
    status = qkvi_write_error(storage, request->error);
    segment->sync_failed = true;
    qkvi_segment_fail(storage, segment);
  }
  settle(storage, &segment->syncing, status);
  if (segment->sync_wanted || segment->state == QKVI_SEGMENT_SEALING) qkvi_sync_segment(storage, segment);
  qkvi_segment_leave(storage, segment);
}

void qkvi_sync_segment(qkv_storage *storage, qkvi_segment *segment) {
  if (segment->sync_running) {
    if (segment->unsynced.first != NULL) segment->sync_wanted = true;
    return;
  }
  segment->sync_wanted = false;
  if (segment->unsynced.first == NULL) {
    const bool quiet = segment->writing == 0 && segment->placing == 0;
    if (segment->state == QKVI_SEGMENT_SEALING && quiet) seal(storage, segment);
    return;
  }
  if (segment->sync_failed || qkvi_segment_use(storage, segment) != 0) {
    settle(storage, &segment->unsynced, QKV_INTERNAL);
    qkvi_segment_reap(storage, segment);
    return;
  }
  segment->syncing = segment->unsynced;
  segment->unsynced = (qkvi_put_list){0};
  segment->sync_running = true;
  segment->request =
      (qkv_io_request){.kind = QKV_IO_SYNC, .file = segment->file, .done = sync_done, .context = storage};
  qkv_io_submit(storage->io, &segment->request);
}

void qkvi_sync_all(qkv_storage *storage) {
  qkvi_flush_buffer(storage);
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    qkvi_segment *segment = storage->segments[i];
    if (segment != NULL && segment->unsynced.first != NULL) qkvi_sync_segment(storage, segment);
  }
}

// ---- Waiters ----

// Of these alone the first of all that are under way is the oldest.
static bool is_callers(const qkvi_put *put) {
  return !put->moved && put->request.meta.kind != QKVI_RECORD_INDEX;
}

void qkvi_sync_settle(qkv_storage *storage) {
  while (storage->sync_waiters != NULL) {
    qkvi_sync_waiter *waiter = storage->sync_waiters;
    for (const qkvi_put *put = storage->all_first; put != NULL; put = put->all_next) {
      if (!is_callers(put)) continue;
      if (put->order < waiter->order) return;
      break;
    }
    storage->sync_waiters = waiter->next;
    waiter->done(waiter->context, QKV_OK);
    free(waiter);
  }
}

void qkvi_sync_message(qkv_storage *storage, qkvi_message *message) {
  qkvi_sync_waiter *waiter = (qkvi_sync_waiter *)message;
  qkvi_sync_waiter **last = &storage->sync_waiters;
  while (*last != NULL) last = &(*last)->next;
  *last = waiter;
  qkvi_sync_all(storage);
  qkvi_sync_settle(storage);
}
