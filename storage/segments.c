// The table of segments: their files, which one takes records, and the space that the budget leaves.
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "storage/internal.h"

qkvi_segment *qkvi_segment_add(qkv_storage *storage, uint64_t number, qkvi_segment_state state, uint64_t file_bytes) {
  qkvi_segment *segment = qkvi_checked(calloc(1, sizeof *segment));
  *segment = (qkvi_segment){
      .number = number, .state = state, .file = -1, .file_bytes = file_bytes, .end = sizeof(qkvi_segment_header)};
  uint32_t slot = 0;
  while (slot < storage->segments_capacity && storage->segments[slot] != NULL) slot++;
  pthread_mutex_lock(&storage->lock);
  if (slot == storage->segments_capacity) {
    const uint32_t capacity = slot == 0 ? 64 : 2 * slot;
    qkvi_segment **grown = realloc((void *)storage->segments, capacity * sizeof *grown);
    storage->segments = qkvi_checked((void *)grown);
    for (uint32_t i = slot; i < capacity; i++) storage->segments[i] = NULL;
    storage->segments_capacity = capacity;
  }
  segment->slot = slot;
  storage->segments[slot] = segment;
  storage->segments_count++;
  pthread_mutex_unlock(&storage->lock);
  return segment;
}

// ---- Files ----

static void close_file(qkv_storage *storage, qkvi_segment *segment) {
  if (segment->file < 0) return;
  qkv_io_close(storage->io, segment->file);
  segment->file = -1;
  storage->open_files--;
}

// False where all are in use.
static bool close_oldest(qkv_storage *storage) {
  qkvi_segment *oldest = NULL;
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    qkvi_segment *segment = storage->segments[i];
    if (segment == NULL || segment->file < 0 || segment->users > 0) continue;
    if (segment->state == QKVI_SEGMENT_OPEN || segment->state == QKVI_SEGMENT_PREPARING) continue;
    if (oldest == NULL || segment->used_at < oldest->used_at) oldest = segment;
  }
  if (oldest != NULL) close_file(storage, oldest);
  return oldest != NULL;
}

bool qkvi_segment_has_place(qkv_storage *storage, const qkvi_segment *segment) {
  return segment->file >= 0 || storage->open_files < storage->config.open_files_max || close_oldest(storage);
}

int qkvi_segment_use(qkv_storage *storage, qkvi_segment *segment) {
  if (segment->file < 0) {
    char name[QKVI_SEGMENT_NAME_MAX];
    (void)qkvi_segment_has_place(storage, segment);
    qkvi_segment_name(segment->number, name);
    const int error = qkv_io_open(storage->io, name, false, &segment->file);
    if (error != 0) {
      segment->file = -1;
      return error;
    }
    storage->open_files++;
  }
  segment->users++;
  segment->used_at = ++storage->use_clock;
  return 0;
}

void qkvi_segment_leave(qkv_storage *storage, qkvi_segment *segment) {
  assert(segment->users > 0);
  segment->users--;
  qkvi_segment_reap(storage, segment);
}

// ---- Space ----

// Records that fit into a new segment, roughly: a share of it goes to its summary.
static uint64_t usable(const qkv_storage *storage) {
  return storage->config.segment_bytes - storage->config.segment_bytes / 16 - 3 * (uint64_t)QKV_STORAGE_BLOCK;
}

static uint64_t left_in(const qkv_storage *storage, uint32_t slot) {
  if (slot == QKVI_NO_SEGMENT) return 0;
  const qkvi_segment *segment = storage->segments[slot];
  const uint64_t taken = segment->end + qkvi_segment_tail_bytes(segment->headers_count + 1);
  return taken < segment->file_bytes ? segment->file_bytes - taken : 0;
}

static uint64_t disk_bytes(const qkv_storage *storage) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    if (storage->segments[i] != NULL) bytes += storage->segments[i]->file_bytes;
  }
  return bytes;
}

void qkvi_segments_count_free(qkv_storage *storage) {
  uint64_t capacity = UINT64_MAX;
  if (storage->config.bytes_max > 0) {
    const uint64_t used = disk_bytes(storage);
    uint64_t more =
        used < storage->config.bytes_max ? (storage->config.bytes_max - used) / storage->config.segment_bytes : 0;
    // The last segment is reserved for compaction.
    if (more > 0) more--;
    capacity = left_in(storage, storage->current) + left_in(storage, storage->spare) + more * usable(storage);
  }
  pthread_mutex_lock(&storage->lock);
  storage->free_bytes = capacity;
  pthread_mutex_unlock(&storage->lock);
}

void qkvi_segment_live(qkv_storage *storage, qkvi_segment *segment, int64_t bytes, int64_t records) {
  pthread_mutex_lock(&storage->lock);
  segment->live_bytes += (uint64_t)bytes;
  segment->live_records += (uint64_t)records;
  storage->stats.live_bytes += (uint64_t)bytes;
  pthread_mutex_unlock(&storage->lock);
}

void qkvi_segment_note(qkv_storage *storage, qkvi_segment *segment, const qkv_record_header *header) {
  if (segment->headers_count == segment->headers_capacity) {
    segment->headers_capacity = segment->headers_capacity == 0 ? 64 : 2 * segment->headers_capacity;
    segment->headers = qkvi_checked(realloc(segment->headers, segment->headers_capacity * sizeof *segment->headers));
  }
  segment->headers[segment->headers_count++] = *header;
  pthread_mutex_lock(&storage->lock);
  segment->data_bytes += qkvi_record_extent(header->stored_bytes);
  pthread_mutex_unlock(&storage->lock);
}

// ---- Going ----

void qkvi_segment_reap(qkv_storage *storage, qkvi_segment *segment) {
  if (segment->users > 0 || segment->live_records > 0 || segment->unread) return;
  if (segment->state != QKVI_SEGMENT_SEALED && segment->state != QKVI_SEGMENT_FAILED) return;
  if (segment->unsynced.first != NULL || segment->syncing.first != NULL) return;
  if (storage->compaction.segment == segment->slot || segment->slot == storage->current) return;
  char name[QKVI_SEGMENT_NAME_MAX];
  qkvi_segment_name(segment->number, name);
  close_file(storage, segment);
  const int error = qkv_io_remove(storage->io, name);
  if (error != 0 && error != ENOENT) {
    qkv_log(QKV_LOG_WARN, "a dead segment cannot be removed", "{s:s, s:s}", "segment", name, "error",
            strerror(error));
  }
  pthread_mutex_lock(&storage->lock);
  storage->segments[segment->slot] = NULL;
  storage->segments_count--;
  pthread_mutex_unlock(&storage->lock);
  free(segment->headers);
  free(segment->block);
  free(segment);
  storage->compaction.aborted = false;
  storage->no_spare = false;
  qkvi_segments_count_free(storage);
}

static void become(qkv_storage *storage, qkvi_segment *segment, qkvi_segment_state state) {
  pthread_mutex_lock(&storage->lock);
  segment->state = state;
  pthread_mutex_unlock(&storage->lock);
}

void qkvi_segment_fail(qkv_storage *storage, qkvi_segment *segment) {
  become(storage, segment, QKVI_SEGMENT_FAILED);
  if (storage->current == segment->slot) storage->current = QKVI_NO_SEGMENT;
  if (storage->spare == segment->slot) storage->spare = QKVI_NO_SEGMENT;
  qkvi_segments_count_free(storage);
}

void qkvi_segment_retire(qkv_storage *storage, qkvi_segment *segment) {
  assert(segment->state == QKVI_SEGMENT_OPEN);
  become(storage, segment, QKVI_SEGMENT_SEALING);
  if (storage->current == segment->slot) storage->current = QKVI_NO_SEGMENT;
  if (storage->spare == segment->slot) storage->spare = QKVI_NO_SEGMENT;
  qkvi_sync_segment(storage, segment);
}

// ---- A new one: create, allocate, header, fdatasync, fsync of the directory ----

// Records that wait for it fail; a spare segment is dispensable.
static void prepare_failed(qkv_storage *storage, int error) {
  storage->no_spare = true;
  if (storage->current == QKVI_NO_SEGMENT) qkvi_put_fail_queue(storage, error);
}

static void prepare_done(qkv_storage *storage, qkvi_segment *segment, int error) {
  storage->preparing = false;
  free(segment->block);
  segment->block = NULL;
  segment->users--;
  if (error == 0) error = qkv_io_sync_directory(storage->io);
  if (error != 0) {
    qkvi_segment_fail(storage, segment);
    qkvi_segment_reap(storage, segment);
    prepare_failed(storage, error);
    return;
  }
  become(storage, segment, QKVI_SEGMENT_OPEN);
  storage->no_spare = false;
  if (storage->current == QKVI_NO_SEGMENT) {
    storage->current = segment->slot;
  } else {
    storage->spare = segment->slot;
  }
  qkvi_segments_count_free(storage);
  qkvi_place(storage);
}

static void prepare_step(qkv_io_request *request) {
  qkv_storage *storage = request->context;
  // The segment is the one that is being prepared.
  qkvi_segment *segment = (qkvi_segment *)((char *)request - offsetof(qkvi_segment, request));
  if (request->error != 0 || request->kind == QKV_IO_SYNC) {
    prepare_done(storage, segment, request->error);
    return;
  }
  const qkv_io_kind next = request->kind == QKV_IO_ALLOCATE ? QKV_IO_WRITE : QKV_IO_SYNC;
  *request = (qkv_io_request){.kind = next,
                              .file = segment->file,
                              .size = next == QKV_IO_WRITE ? QKV_STORAGE_BLOCK : 0,
                              .bytes = next == QKV_IO_WRITE ? segment->block : NULL,
                              .done = prepare_step,
                              .context = storage};
  qkv_io_submit(storage->io, request);
}

static bool within_budget(const qkv_storage *storage) {
  return storage->config.bytes_max == 0 ||
         disk_bytes(storage) + storage->config.segment_bytes <= storage->config.bytes_max;
}

static void prepare_segment(qkv_storage *storage) {
  if (storage->preparing) return;
  if (!within_budget(storage) || storage->segments_count == QKVI_SEGMENTS_MAX) {
    prepare_failed(storage, ENOSPC);
    return;
  }
  if (storage->open_files >= storage->config.open_files_max) (void)close_oldest(storage);
  char name[QKVI_SEGMENT_NAME_MAX];
  const uint64_t number = storage->segment_next++;
  qkvi_segment_name(number, name);
  int file = -1;
  const int error = qkv_io_open(storage->io, name, true, &file);
  if (error != 0) {
    prepare_failed(storage, error);
    return;
  }
  qkvi_segment *segment = qkvi_segment_add(storage, number, QKVI_SEGMENT_PREPARING, storage->config.segment_bytes);
  segment->file = file;
  storage->open_files++;
  segment->users = 1;
  segment->block = qkvi_aligned(QKV_STORAGE_BLOCK);
  qkvi_segment_header_make((qkvi_segment_header *)segment->block, storage->store, number, storage->journal.epoch);
  storage->preparing = true;
  segment->request = (qkv_io_request){
      .kind = QKV_IO_ALLOCATE, .file = file, .size = segment->file_bytes, .done = prepare_step, .context = storage};
  qkv_io_submit(storage->io, &segment->request);
}

static bool fits(const qkvi_segment *segment, uint64_t extent) {
  const uint64_t tail = qkvi_segment_tail_bytes(segment->headers_count + 1);
  return segment->end + extent + tail <= segment->file_bytes;
}

qkvi_segment *qkvi_segment_for(qkv_storage *storage, uint64_t extent) {
  if (storage->current != QKVI_NO_SEGMENT && !fits(storage->segments[storage->current], extent)) {
    qkvi_flush_buffer(storage);
    qkvi_segment_retire(storage, storage->segments[storage->current]);
    storage->current = QKVI_NO_SEGMENT;
  }
  if (storage->current == QKVI_NO_SEGMENT) {
    storage->current = storage->spare;
    storage->spare = QKVI_NO_SEGMENT;
    qkvi_segments_count_free(storage);
  }
  if (storage->current == QKVI_NO_SEGMENT) {
    prepare_segment(storage);
    return NULL;
  }
  qkvi_segment *segment = storage->segments[storage->current];
  // The next one is prepared while this one has space left.
  const bool half = segment->end > segment->file_bytes / 2;
  if (half && storage->spare == QKVI_NO_SEGMENT && !storage->no_spare) prepare_segment(storage);
  return segment;
}
