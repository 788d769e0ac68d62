// From put to written: encoding, a place in the stream of records, write buffers of 1 MiB.
#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "storage/internal.h"

// With fewer writes than this under way a buffer is written before it is full.
enum { WRITES_BUSY = 2 };

// ---- Ends ----

void qkvi_put_finish(qkv_storage *storage, qkvi_put *put) {
  if (put->all_previous != NULL) {
    put->all_previous->all_next = put->all_next;
  } else {
    storage->all_first = put->all_next;
  }
  if (put->all_next != NULL) {
    put->all_next->all_previous = put->all_previous;
  } else {
    storage->all_last = put->all_previous;
  }
  free(put->owned);
  free(put);
  qkvi_sync_settle(storage);
}

// The payload is free: callers that wait for dirty bytes may continue.
static void release_dirty(qkv_storage *storage, const qkvi_put *put) {
  pthread_mutex_lock(&storage->lock);
  storage->dirty_bytes -= put->request.bytes;
  qkv_storage_waiter *ready = NULL;
  if (storage->dirty_bytes <= storage->config.dirty_bytes_max / 2) {
    ready = storage->waiters;
    storage->waiters = NULL;
  }
  pthread_mutex_unlock(&storage->lock);
  while (ready != NULL) {
    qkv_storage_waiter *next = ready->next;
    ready->ready(ready);
    ready = next;
  }
}

static void release_waiting(qkv_storage *storage, const qkvi_put *put) {
  pthread_mutex_lock(&storage->lock);
  storage->waiting_bytes -= qkvi_record_extent(put->request.bytes);
  pthread_mutex_unlock(&storage->lock);
}

// The record is not on the disk, or does not count there.
static void refuse(qkv_storage *storage, qkvi_put *put, qkv_status status) {
  if (put->moved) {
    qkvi_compact_moved(storage, put, status);
  } else {
    if (status != QKV_CANCELLED) qkvi_stat_add(storage, &storage->stats.puts_failed, 1);
    put->request.written(put->request.context, put->record, status);
    release_dirty(storage, put);
  }
  qkvi_put_finish(storage, put);
}

void qkvi_forget(qkv_storage *storage, uint64_t record) {
  qkvi_entry entry = {0};
  const bool found = qkvi_index_find(storage->index, record, &entry);
  assert(found);
  (void)found;
  qkvi_segment *segment = storage->segments[entry.segment];
  pthread_mutex_lock(&storage->lock);
  qkvi_index_remove(storage->index, record);
  pthread_mutex_unlock(&storage->lock);
  qkvi_segment_live(storage, segment, -(int64_t)entry.extent, -1);
  qkvi_segment_reap(storage, segment);
}

// Under the lock.
static void count_put(qkv_storage_stats *stats, const qkv_record_header *header) {
  stats->puts++;
  stats->put_bytes += header->raw_bytes;
  stats->put_stored_bytes += header->stored_bytes;
  stats->compressed += header->encoding == QKV_RECORD_ZSTD;
}

static void publish(qkv_storage *storage, qkvi_put *put) {
  qkvi_segment *segment = storage->segments[put->segment];
  qkvi_entry entry = qkvi_entry_of(&put->header, put->segment);
  entry.tokens = put->tokens;
  const bool of_index = entry.kind == QKVI_RECORD_INDEX;
  pthread_mutex_lock(&storage->lock);
  const bool lives = !of_index || qkvi_index_unload(storage->index, &entry);
  if (!of_index) {
    qkvi_index_add(storage->index, &entry);
    count_put(&storage->stats, &put->header);
  }
  pthread_mutex_unlock(&storage->lock);
  if (lives) qkvi_segment_live(storage, segment, (int64_t)entry.extent, 1);
  put->request.written(put->request.context, put->record, QKV_OK);
  free(put->owned);
  put->owned = NULL;
  release_dirty(storage, put);
}

// All of its bytes are written, or some have failed.
static void written(qkv_storage *storage, qkvi_put *put) {
  if (put->error != 0) {
    refuse(storage, put, qkvi_write_error(storage, put->error));
    return;
  }
  if (put->cancelled) {
    refuse(storage, put, QKV_CANCELLED);
    return;
  }
  if (!put->moved) publish(storage, put);
  qkvi_sync_later(storage, storage->segments[put->segment], put);
}

// ---- Write buffers ----

static void buffer_done(qkv_io_request *request) {
  qkvi_buffer *buffer = request->context;
  qkv_storage *storage = buffer->storage;
  qkvi_segment *segment = storage->segments[buffer->segment];
  storage->writes--;
  segment->writing--;
  if (request->error != 0) {
    qkv_log(QKV_LOG_ERROR, "a write to a segment failed", "{s:I, s:I, s:s}", "segment", (json_int_t)segment->number,
            "offset", (json_int_t)buffer->offset, "error", strerror(request->error));
    qkvi_segment_fail(storage, segment);
  }
  // The buffer, with its request, may be in use again before all of its records have ended.
  qkvi_put *finished[sizeof buffer->puts / sizeof *buffer->puts];
  const unsigned count = buffer->count;
  const int error = request->error;
  memcpy((void *)finished, (void *)buffer->puts, count * sizeof *finished);
  buffer->next = storage->free_buffers;
  storage->free_buffers = buffer;
  for (unsigned i = 0; i < count; i++) {
    qkvi_put *put = finished[i];
    if (error != 0) put->error = error;
    put->writing--;
    if (put->writing == 0 && !put->queued) written(storage, put);
  }
  if (segment->state == QKVI_SEGMENT_SEALING) qkvi_sync_segment(storage, segment);
  qkvi_segment_leave(storage, segment);
  qkvi_place(storage);
}

void qkvi_flush_buffer(qkv_storage *storage) {
  qkvi_buffer *buffer = storage->filling;
  if (buffer == NULL) return;
  storage->filling = NULL;
  storage->writes++;
  const qkvi_segment *segment = storage->segments[buffer->segment];
  buffer->request = (qkv_io_request){.kind = QKV_IO_WRITE,
                                     .file = segment->file,
                                     .offset = buffer->offset,
                                     .size = buffer->used,
                                     .bytes = buffer->bytes,
                                     .done = buffer_done,
                                     .context = buffer};
  qkv_io_submit(storage->io, &buffer->request);
}

// A buffer with space behind `offset` of the segment, or NULL.
static qkvi_buffer *buffer_at(qkv_storage *storage, qkvi_segment *segment, uint64_t offset) {
  // A buffer of a segment that has failed meanwhile is written as it is.
  if (storage->filling != NULL && storage->filling->segment != segment->slot) qkvi_flush_buffer(storage);
  if (storage->filling != NULL) {
    assert(storage->filling->offset + storage->filling->used == offset);
    return storage->filling;
  }
  qkvi_buffer *buffer = storage->free_buffers;
  // A file that is being written stays open.
  if (buffer == NULL || qkvi_segment_use(storage, segment) != 0) return NULL;
  storage->free_buffers = buffer->next;
  segment->writing++;
  buffer->used = 0;
  buffer->count = 0;
  buffer->segment = segment->slot;
  buffer->offset = offset;
  storage->filling = buffer;
  return buffer;
}

// ---- Placing ----

// Copies bytes [copied, copied + size) of the record as it lies on the disk: header, payload, zeros.
static void copy_extent(const qkvi_put *put, uint8_t *out, uint64_t size) {
  uint64_t at = put->copied;
  const uint64_t end = at + size, header = sizeof put->header, payload = header + put->header.stored_bytes;
  if (at < header) {
    const uint64_t piece = (end < header ? end : header) - at;
    memcpy(out, (const uint8_t *)&put->header + at, piece);
    out += piece;
    at += piece;
  }
  if (at < payload && at < end) {
    const uint64_t piece = (end < payload ? end : payload) - at;
    memcpy(out, put->stored + (at - header), piece);
    out += piece;
    at += piece;
  }
  if (at < end) memset(out, 0, end - at);
}

// Whether all of the record is in buffers now.
static bool copy_record(qkv_storage *storage, qkvi_put *put, qkvi_segment *segment) {
  const uint64_t extent = qkvi_record_extent(put->header.stored_bytes);
  while (put->copied < extent) {
    qkvi_buffer *buffer = buffer_at(storage, segment, put->header.offset + put->copied);
    if (buffer == NULL) return false;
    const uint64_t capacity = QKVI_WRITE_BYTES - buffer->used, left = extent - put->copied;
    const uint64_t size = left < capacity ? left : capacity;
    copy_extent(put, buffer->bytes + buffer->used, size);
    buffer->puts[buffer->count++] = put;
    buffer->used += size;
    put->copied += size;
    put->writing++;
    if (buffer->used == QKVI_WRITE_BYTES) qkvi_flush_buffer(storage);
  }
  return true;
}

static void dequeue(qkv_storage *storage, qkvi_put *put) {
  assert(storage->queue.first == put);
  storage->queue.first = put->next;
  if (put->next == NULL) storage->queue.last = NULL;
  put->next = NULL;
  put->queued = false;
  if (!put->moved) release_waiting(storage, put);
}

// Places the first record of the queue. false: not now.
static bool place_first(qkv_storage *storage, qkvi_put *put) {
  // A placed record keeps its place: the segment counts on its bytes.
  if (put->segment == QKVI_NO_SEGMENT && put->cancelled) {
    dequeue(storage, put);
    refuse(storage, put, QKV_CANCELLED);
    return true;
  }
  if (put->segment == QKVI_NO_SEGMENT) {
    if (put->after > storage->journal.resolved) return false;
    const uint64_t extent = qkvi_record_extent(put->header.stored_bytes);
    qkvi_segment *segment = qkvi_segment_for(storage, extent);
    if (segment == NULL) return false;
    put->segment = segment->slot;
    qkvi_record_place(&put->header, storage->store, segment->number, segment->end, storage->journal.durable);
    qkvi_segment_note(storage, segment, &put->header);
    segment->end += extent;
    segment->users++;  // until it is in buffers, which count themselves
    segment->placing++;
  }
  qkvi_segment *segment = storage->segments[put->segment];
  if (!copy_record(storage, put, segment)) return false;
  dequeue(storage, put);
  segment->placing--;
  if (put->writing == 0) written(storage, put);  // all of its writes have ended already
  if (segment->state == QKVI_SEGMENT_SEALING) qkvi_sync_segment(storage, segment);
  qkvi_segment_leave(storage, segment);
  return true;
}

void qkvi_place(qkv_storage *storage) {
  if (storage->placing) return;  // a callback of a refused record
  storage->placing = true;
  while (storage->queue.first != NULL && place_first(storage, storage->queue.first)) {
  }
  storage->placing = false;
  // An idle disk gets what there is.
  if (storage->writes < WRITES_BUSY) qkvi_flush_buffer(storage);
  qkvi_segments_count_free(storage);
}

void qkvi_put_fail_queue(qkv_storage *storage, int error) {
  while (storage->queue.first != NULL && storage->queue.first->segment == QKVI_NO_SEGMENT) {
    qkvi_put *put = storage->queue.first;
    dequeue(storage, put);
    refuse(storage, put, put->cancelled ? QKV_CANCELLED : qkvi_write_error(storage, error));
  }
}

// ---- Encoding ----

static void encoded(qkv_storage *storage, qkvi_message *message) {
  qkvi_put_enqueue(storage, (qkvi_put *)message);
  qkvi_place(storage);
}

static void encode(qkvi_put *put) {
  const qkv_storage_put_request *request = &put->request;
  uint64_t stored = 0;
  if (put->storage->config.compress) {
    put->owned = qkvi_checked(malloc(request->bytes));
    stored = qkvi_record_compress(request->payload, request->bytes, put->owned);
    if (stored == 0) {
      free(put->owned);
      put->owned = NULL;
    }
  }
  const qkv_record_encoding encoding = stored > 0 ? QKV_RECORD_ZSTD : QKV_RECORD_PLAIN;
  put->stored = stored > 0 ? put->owned : request->payload;
  qkvi_record_describe(&put->header, &request->meta, put->record, request->bytes, encoding, put->stored,
                       stored > 0 ? stored : request->bytes);
}

static void encode_job(void *context) {
  qkvi_put *put = context;
  encode(put);
  put->message.run = encoded;
  qkvi_post(put->storage, &put->message);
}

void qkvi_put_enqueue(qkv_storage *storage, qkvi_put *put) {
  put->next = NULL;
  put->queued = true;
  if (storage->queue.last != NULL) {
    storage->queue.last->next = put;
  } else {
    storage->queue.first = put;
  }
  storage->queue.last = put;
}

void qkvi_put_message(qkv_storage *storage, qkvi_message *message) {
  qkvi_put *put = (qkvi_put *)message;
  put->all_previous = storage->all_last;
  if (storage->all_last != NULL) {
    storage->all_last->all_next = put;
  } else {
    storage->all_first = put;
  }
  storage->all_last = put;
  if (put->moved) {
    qkvi_put_enqueue(storage, put);
    return;
  }
  const qkvi_entry entry = qkvi_put_entry(put);
  put->tokens = qkvi_sessions_needed(storage->sessions, &entry);
  put->cancelled = put->tokens == 0 || qkvi_session_end_failed(storage, put->request.meta.session);
  if (storage->encoders != NULL && qkv_pool_submit(storage->encoders, encode_job, put) == QKV_OK) return;
  encode(put);
  encoded(storage, message);
}
