// Reading many records in order, ahead of a compute thread that waits for them one by one.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "storage/internal.h"

typedef enum item_state { ITEM_IDLE, ITEM_READING, ITEM_READY, ITEM_TAKEN } item_state;

typedef struct batch_item {
  qkvi_read read;
  struct qkv_storage_batch *batch;
  item_state state;
  uint64_t cost;  // bytes that it has in memory while it is read or ready
} batch_item;

struct qkv_storage_batch {
  qkv_storage *storage;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  size_t count, started;      // items; the first that was not begun in order
  uint64_t ahead_max, ahead;  // bytes
  size_t reading;
  batch_item *items;
};

static void item_arrived(qkvi_read *read) {
  batch_item *item = (batch_item *)read;
  qkv_storage_batch *batch = item->batch;
  read->storage->reads--;
  pthread_mutex_lock(&batch->lock);
  item->state = ITEM_READY;
  batch->reading--;
  pthread_cond_broadcast(&batch->changed);
  pthread_mutex_unlock(&batch->lock);
}

static void start_item(qkv_storage *storage, qkvi_message *message) {
  storage->reads++;
  qkvi_read_message(storage, message);
}

// The batch's lock is held.
static void begin(qkv_storage_batch *batch, batch_item *item) {
  item->state = ITEM_READING;
  batch->reading++;
  item->read.message.run = start_item;
  qkvi_post(batch->storage, &item->read.message);
}

// Begins the next reads as far as the window goes. The batch's lock is held.
static void read_ahead(qkv_storage_batch *batch) {
  while (batch->started < batch->count) {
    batch_item *item = &batch->items[batch->started];
    if (item->state == ITEM_IDLE) {
      if (batch->ahead > 0 && batch->ahead + item->cost > batch->ahead_max) return;
      batch->ahead += item->cost;
      begin(batch, item);
    }
    batch->started++;
  }
}

qkv_storage_batch *qkv_storage_batch_create(qkv_storage *storage, const uint64_t *records, size_t count,
                                            uint64_t ahead_bytes) {
  qkv_storage_batch *batch = qkvi_checked(calloc(1, sizeof *batch));
  *batch = (qkv_storage_batch){.storage = storage, .count = count, .ahead_max = ahead_bytes};
  pthread_mutex_init(&batch->lock, NULL);
  pthread_cond_init(&batch->changed, NULL);
  batch->items = qkvi_checked(calloc(count + 1, sizeof *batch->items));
  pthread_mutex_lock(&storage->lock);
  for (size_t i = 0; i < count; i++) {
    qkvi_entry entry;
    const bool found = qkvi_index_find(storage->index, records[i], &entry);
    batch->items[i] = (batch_item){.read = {.storage = storage, .record = records[i], .arrived = item_arrived},
                                   .batch = batch,
                                   .cost = found ? entry.extent : 0};
  }
  pthread_mutex_unlock(&storage->lock);
  pthread_mutex_lock(&batch->lock);
  read_ahead(batch);
  pthread_mutex_unlock(&batch->lock);
  return batch;
}

// The batch's lock is held.
static void await_item(qkv_storage_batch *batch, const batch_item *item) {
  while (item->state == ITEM_READING) pthread_cond_wait(&batch->changed, &batch->lock);
}

qkv_status qkv_storage_batch_wait(qkv_storage_batch *batch, size_t i, void *buffer, uint64_t bytes,
                                  qkv_error *error) {
  assert(i < batch->count);
  batch_item *item = &batch->items[i];
  pthread_mutex_lock(&batch->lock);
  assert(item->state != ITEM_TAKEN);
  if (item->state == ITEM_IDLE) {
    batch->ahead += item->cost;
    begin(batch, item);
  }
  await_item(batch, item);
  const char *wrong = NULL;
  qkv_status status;
  for (;;) {
    pthread_mutex_unlock(&batch->lock);
    status = qkvi_read_decode(&item->read, buffer, bytes, &wrong);
    pthread_mutex_lock(&batch->lock);
    if (status != QKV_DATA_LOSS || item->read.attempts++ > 0) break;
    begin(batch, item);  // once more
    await_item(batch, item);
  }
  free(item->read.bytes);
  item->read.bytes = NULL;
  item->state = ITEM_TAKEN;
  batch->ahead -= item->cost;
  read_ahead(batch);
  pthread_mutex_unlock(&batch->lock);
  item->read.buffer_bytes = bytes;
  qkvi_read_count(&item->read, status, wrong);
  if (status == QKV_NOT_FOUND)
    return qkv_fail(error, status, "record %llu is not there", (unsigned long long)item->read.record);
  if (status == QKV_INVALID_ARGUMENT) {
    return qkv_fail(error, status, "record %llu does not have %llu bytes", (unsigned long long)item->read.record,
                    (unsigned long long)bytes);
  }
  if (status == QKV_OK) return QKV_OK;
  return qkv_fail(error, status, "record %llu in segment %llu at %llu: %s", (unsigned long long)item->read.record,
                  (unsigned long long)item->read.number, (unsigned long long)item->read.offset, wrong);
}

void qkv_storage_batch_destroy(qkv_storage_batch **batch) {
  qkv_storage_batch *old = *batch;
  if (old == NULL) return;
  pthread_mutex_lock(&old->lock);
  while (old->reading > 0) pthread_cond_wait(&old->changed, &old->lock);
  pthread_mutex_unlock(&old->lock);
  for (size_t i = 0; i < old->count; i++) free(old->items[i].read.bytes);
  pthread_cond_destroy(&old->changed);
  pthread_mutex_destroy(&old->lock);
  free(old->items);
  free(old);
  *batch = NULL;
}
