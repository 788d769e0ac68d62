// What is packed of sessions that are not used leaves memory: it is written as a record of the session, and read back
// when the session is used, closed or cut, or when compaction or a check walks its records. That ends the record.
//
// A start finds all records by their headers, and leaves these out. Where one cannot be read the records of its
// session are not found, keep their space, and keep their segments from being compacted, until the next start.
#include <jansson.h>
#include <stdlib.h>

#include "engine/base/log.h"
#include "storage/internal.h"

enum { WRITES_MAX = 8 };

// ---- Writing ----

typedef struct index_write {
  qkvi_message message;
  qkv_storage *storage;
  uint64_t session;
  uint8_t *payload;
} index_write;

static void write_more(qkv_storage *storage, qkvi_message *message) {
  index_write *on = (index_write *)message;
  free(on->payload);
  free(on);
  storage->index_writes--;
  qkvi_unload_fresh(storage);
}

// It goes on later, as the put is not over yet. Where the disk takes nothing, what is packed stays in memory.
static void on_written(void *context, uint64_t record, qkv_status status) {
  index_write *on = context;
  qkv_storage *storage = on->storage;
  if (status != QKV_OK) {
    pthread_mutex_lock(&storage->lock);
    (void)qkvi_index_unload(storage->index, &(qkvi_entry){.record = record, .session = on->session});
    if (status != QKV_CANCELLED) qkvi_index_drop_fresh(storage->index);
    pthread_mutex_unlock(&storage->lock);
  }
  qkvi_post(storage, &on->message);
}

// False: the budget has no space for it.
static bool write_session(qkv_storage *storage, uint64_t session) {
  uint64_t bytes = 0;
  uint8_t *payload = qkvi_index_payload(storage->index, session, &bytes);
  if (payload == NULL) return true;
  if (bytes > qkv_storage_record_bytes_max(storage)) {
    free(payload);
    return true;
  }
  index_write *on = qkvi_checked(calloc(1, sizeof *on));
  qkvi_put *put = qkvi_checked(calloc(1, sizeof *put));
  *on = (index_write){.message = {.run = write_more}, .storage = storage, .session = session, .payload = payload};
  *put = (qkvi_put){.storage = storage,
                    .request = {.meta = {.session = session, .tokens = 1, .kind = QKVI_RECORD_INDEX},
                                .payload = payload,
                                .bytes = bytes,
                                .written = on_written,
                                .context = on},
                    .tokens = 1,
                    .segment = QKVI_NO_SEGMENT};
  pthread_mutex_lock(&storage->lock);
  const qkv_status status = qkvi_admit(storage, put, UINT64_MAX, NULL);
  if (status == QKV_OK) qkvi_index_writing(storage->index, session, put->record);
  pthread_mutex_unlock(&storage->lock);
  if (status != QKV_OK) {
    free(payload);
    free(on);
    free(put);
    return false;
  }
  storage->index_writes++;
  qkvi_put_message(storage, &put->message);
  return true;
}

void qkvi_unload_fresh(qkv_storage *storage) {
  uint64_t session;
  bool taken = true;
  if (storage->index_walks > 0 || storage->ending) return;
  while (taken && storage->index_writes < WRITES_MAX && qkvi_index_take_fresh(storage->index, &session))
    taken = write_session(storage, session);
  if (!taken) qkvi_index_drop_fresh(storage->index);
}

// ---- Reading ----

typedef struct load_waiter {
  qkv_storage_done_fn *done;
  void *context;
  struct load_waiter *next;
} load_waiter;

struct qkvi_load {
  qkvi_read read;
  load_waiter *waiters, **last;
  qkvi_load *next;
};

static bool lies(void *context, const qkvi_entry *entry) {
  const qkv_storage *storage = context;
  const qkvi_segment *segment =
      entry->segment < storage->segments_capacity ? storage->segments[entry->segment] : NULL;
  return segment != NULL && entry->offset + entry->extent <= segment->end;
}

static qkv_status take_payload(qkv_storage *storage, const qkvi_read *read, const uint8_t *payload) {
  pthread_mutex_lock(&storage->lock);
  const bool right = qkvi_index_load(storage->index, read->session, payload, read->buffer_bytes, lies, storage);
  pthread_mutex_unlock(&storage->lock);
  if (!right) return QKV_DATA_LOSS;
  qkvi_segment *segment = storage->segments[read->slot];
  qkvi_segment_live(storage, segment, -(int64_t)read->extent, -1);
  qkvi_segment_reap(storage, segment);
  qkvi_sweep_loaded(storage, read->session);
  return QKV_OK;
}

static void finish_load(qkv_storage *storage, qkvi_load *load, qkv_status status) {
  qkvi_load **link = &storage->loads;
  while (*link != load) link = &(*link)->next;
  *link = load->next;
  while (load->waiters != NULL) {
    load_waiter *waiter = load->waiters;
    load->waiters = waiter->next;
    waiter->done(waiter->context, status);
    free(waiter);
  }
  free(load->read.bytes);
  free(load);
}

static void load_arrived(qkvi_read *read) {
  qkv_storage *storage = read->storage;
  const char *wrong = NULL;
  uint8_t *payload = qkvi_checked(malloc(read->buffer_bytes));
  qkv_status status = qkvi_read_decode(read, payload, read->buffer_bytes, &wrong);
  storage->reads--;
  if (status != QKV_OK && read->attempts++ == 0) {
    free(payload);
    storage->reads++;
    qkvi_read_message(storage, &read->message);
    return;
  }
  qkvi_read_count(read, status, wrong);
  if (status == QKV_OK) status = take_payload(storage, read, payload);
  free(payload);
  if (status != QKV_OK)
    qkv_log(QKV_LOG_ERROR, "the records of a session cannot be found before the next start", "{s:I, s:I}", "session",
            (json_int_t)read->session, "record", (json_int_t)read->record);
  finish_load(storage, (qkvi_load *)read, status == QKV_OK ? QKV_OK : QKV_DATA_LOSS);
}

static void await(qkvi_load *load, qkv_storage_done_fn *done, void *context) {
  if (done == NULL) return;
  load_waiter *waiter = qkvi_checked(malloc(sizeof *waiter));
  *waiter = (load_waiter){.done = done, .context = context};
  *load->last = waiter;
  load->last = &waiter->next;
}

void qkvi_load_session(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context) {
  qkvi_entry entry;
  if (!qkvi_index_unloaded(storage->index, session, &entry)) {
    if (done != NULL) done(context, QKV_OK);
    return;
  }
  qkvi_load *load = storage->loads;
  while (load != NULL && load->read.session != session) load = load->next;
  if (load != NULL) {
    await(load, done, context);
    return;
  }
  load = qkvi_checked(calloc(1, sizeof *load));
  load->read = (qkvi_read){.storage = storage,
                           .record = entry.record,
                           .session = session,
                           .unloaded = true,
                           .buffer_bytes = entry.raw_bytes,
                           .arrived = load_arrived};
  load->last = &load->waiters;
  load->next = storage->loads;
  storage->loads = load;
  await(load, done, context);
  storage->reads++;
  qkvi_read_message(storage, &load->read.message);
}
