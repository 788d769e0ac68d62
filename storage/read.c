// Reading: the record as stored, then its check and decoding on any thread that is free.
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "storage/internal.h"

static void arrive(qkvi_read *read, qkv_status status) {
  read->status = status;
  read->arrived(read);
}

// ---- Files ----

static bool find(const qkv_storage *storage, const qkvi_read *read, qkvi_entry *entry) {
  return read->unloaded ? qkvi_index_unloaded(storage->index, read->session, entry)
                        : qkvi_index_find(storage->index, read->record, entry);
}

// A read whose segment is closed while the maximum of open files is in use waits for one of the other reads.
static bool has_file(qkv_storage *storage, const qkvi_read *read) {
  qkvi_entry entry;
  if (storage->reading == 0 || !find(storage, read, &entry)) return true;
  return qkvi_segment_has_place(storage, storage->segments[entry.segment]);
}

static void await_file(qkv_storage *storage, qkvi_read *read) {
  read->message.next = NULL;
  *storage->fileless_last = &read->message;
  storage->fileless_last = &read->message.next;
}

static void begin(qkv_storage *storage, qkvi_read *read);

static void begin_waiting(qkv_storage *storage) {
  while (storage->fileless != NULL && has_file(storage, (qkvi_read *)storage->fileless)) {
    qkvi_message *first = storage->fileless;
    storage->fileless = first->next;
    if (storage->fileless == NULL) storage->fileless_last = &storage->fileless;
    begin(storage, (qkvi_read *)first);
  }
}

// ---- One record ----

static void read_done(qkv_io_request *request) {
  qkvi_read *read = request->context;
  qkv_storage *storage = read->storage;
  read->error = request->error;
  storage->reading--;
  qkvi_segment_leave(storage, storage->segments[read->slot]);
  begin_waiting(storage);
  arrive(read, QKV_OK);
}

static void begin(qkv_storage *storage, qkvi_read *read) {
  qkvi_entry entry;
  if (!find(storage, read, &entry)) {
    arrive(read, QKV_NOT_FOUND);
    return;
  }
  qkvi_segment *segment = storage->segments[entry.segment];
  read->session = entry.session;
  read->store = storage->store;
  read->slot = entry.segment;
  read->number = segment->number;
  read->offset = entry.offset;
  read->extent = entry.extent;
  read->error = qkvi_segment_use(storage, segment);
  if (read->error != 0) {
    arrive(read, QKV_OK);
    return;
  }
  read->bytes = qkvi_aligned(read->extent);
  read->request = (qkv_io_request){.kind = QKV_IO_READ,
                                   .file = segment->file,
                                   .offset = entry.offset,
                                   .size = read->extent,
                                   .bytes = read->bytes,
                                   .done = read_done,
                                   .context = read};
  storage->reading++;
  qkv_io_submit(storage->io, &read->request);
}

void qkvi_read_message(qkv_storage *storage, qkvi_message *message) {
  qkvi_read *read = (qkvi_read *)message;
  free(read->bytes);
  read->bytes = NULL;
  if (storage->fileless == NULL && has_file(storage, read)) {
    begin(storage, read);
  } else {
    await_file(storage, read);
  }
}

qkv_status qkvi_read_decode(const qkvi_read *read, void *buffer, uint64_t bytes, const char **wrong) {
  *wrong = NULL;
  if (read->status != QKV_OK) return read->status;
  const qkv_record_header *header = (const qkv_record_header *)read->bytes;
  if (read->error != 0) {
    *wrong = strerror(read->error);
    return QKV_DATA_LOSS;
  }
  *wrong = qkvi_record_check(header, read->store, read->number, read->offset);
  if (*wrong == NULL && (header->record != read->record || header->session != read->session)) {
    *wrong = "another record lies there";
  }
  if (*wrong == NULL && qkvi_record_extent(header->stored_bytes) != read->extent) *wrong = "impossible size";
  if (*wrong == NULL) *wrong = qkvi_record_check_payload(header, header + 1);
  if (*wrong != NULL) return QKV_DATA_LOSS;
  if (header->raw_bytes != bytes) return QKV_INVALID_ARGUMENT;
  *wrong = qkvi_record_decode(header, header + 1, buffer);
  return *wrong == NULL ? QKV_OK : QKV_DATA_LOSS;
}

void qkvi_read_count(qkvi_read *read, qkv_status status, const char *wrong) {
  qkv_storage *storage = read->storage;
  pthread_mutex_lock(&storage->lock);
  if (status == QKV_OK) {
    storage->stats.reads++;
    storage->stats.read_bytes += read->buffer_bytes;
  }
  if (status == QKV_DATA_LOSS) storage->stats.read_errors++;
  pthread_mutex_unlock(&storage->lock);
  if (status != QKV_DATA_LOSS) return;
  qkv_log(QKV_LOG_ERROR, "a record cannot be read", "{s:I, s:I, s:I, s:I, s:s}", "record", (json_int_t)read->record,
          "session", (json_int_t)read->session, "segment", (json_int_t)read->number, "offset",
          (json_int_t)read->offset, "error", wrong);
}

// ---- One record, by callback ----

static void answer(qkv_storage *storage, qkvi_message *message) {
  qkvi_read *read = (qkvi_read *)message;
  storage->reads--;
  read->done(read->context, read->status);
  free(read->bytes);
  free(read);
}

static void decode_job(void *context) {
  qkvi_read *read = context;
  const char *wrong = NULL;
  const qkv_status status = qkvi_read_decode(read, read->buffer, read->buffer_bytes, &wrong);
  // A transfer error may leave the medium intact: it is read once more before it is given up.
  const bool again = status == QKV_DATA_LOSS && read->attempts++ == 0;
  if (!again) {
    qkvi_read_count(read, status, wrong);
    read->status = status;
  }
  read->message.run = again ? qkvi_read_message : answer;
  qkvi_post(read->storage, &read->message);
}

static void one_arrived(qkvi_read *read) {
  qkv_storage *storage = read->storage;
  if (storage->encoders != NULL && qkv_pool_submit(storage->encoders, decode_job, read) == QKV_OK) return;
  decode_job(read);
}

static void start_one(qkv_storage *storage, qkvi_message *message) {
  storage->reads++;
  qkvi_read_message(storage, message);
}

void qkv_storage_read(qkv_storage *storage, uint64_t record, void *buffer, uint64_t bytes, qkv_storage_done_fn *done,
                      void *context) {
  qkvi_read *read = qkvi_checked(calloc(1, sizeof *read));
  *read = (qkvi_read){.message = {.run = start_one},
                      .storage = storage,
                      .record = record,
                      .buffer = buffer,
                      .buffer_bytes = bytes,
                      .done = done,
                      .context = context,
                      .arrived = one_arrived};
  qkvi_post(storage, &read->message);
}
