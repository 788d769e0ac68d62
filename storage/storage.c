#include "storage/storage.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "storage/internal.h"
#include "storage/space.h"

enum { ENCODERS_NICE = 10 };  // attends are scheduled first

void qkv_storage_config_init(qkv_storage_config *config) {
  *config = (qkv_storage_config){.io = "auto",
                                 .segment_bytes = UINT64_C(256) << 20,
                                 .dirty_bytes_max = UINT64_C(64) << 20,
                                 .compact_bytes_per_s = UINT64_C(64) << 20,
                                 .compact_below = 0.5,
                                 .sync_ms = 1000,
                                 .encoders = 1,
                                 .depth = 32,
                                 .open_files_max = 64,
                                 .compress = true};
}

// ---- Helpers ----

void *qkvi_checked(void *memory) {
  if (memory == NULL) abort();
  return memory;
}

uint8_t *qkvi_aligned(uint64_t bytes) {
  const uint64_t whole = (bytes + QKV_STORAGE_BLOCK - 1) / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
  return qkvi_checked(aligned_alloc(QKV_STORAGE_BLOCK, whole));
}

void qkvi_post_locked(qkv_storage *storage, qkvi_message *message) {
  message->next = NULL;
  *storage->mailbox_last = message;
  storage->mailbox_last = &message->next;
}

void qkvi_post(qkv_storage *storage, qkvi_message *message) {
  pthread_mutex_lock(&storage->lock);
  qkvi_post_locked(storage, message);
  pthread_mutex_unlock(&storage->lock);
  qkvi_wake_ring(&storage->wake);
}

void qkvi_stat_add(qkv_storage *storage, uint64_t *stat, uint64_t delta) {
  pthread_mutex_lock(&storage->lock);
  *stat += delta;
  pthread_mutex_unlock(&storage->lock);
}

qkv_status qkvi_write_error(qkv_storage *storage, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  qkvi_stat_add(storage, full ? &storage->stats.full_errors : &storage->stats.device_errors, 1);
  return full ? QKV_RESOURCE_EXHAUSTED : QKV_INTERNAL;
}

// ---- The loop ----

static void run_mailbox(void *context) {
  qkv_storage *storage = context;
  pthread_mutex_lock(&storage->lock);
  qkvi_message *message = storage->mailbox;
  storage->mailbox = NULL;
  storage->mailbox_last = &storage->mailbox;
  pthread_mutex_unlock(&storage->lock);
  while (message != NULL) {
    qkvi_message *next = message->next;
    message->run(storage, message);
    message = next;
  }
  qkvi_place(storage);
}

static void tick(uv_timer_t *timer) {
  qkv_storage *storage = timer->data;
  qkvi_sync_all(storage);
  qkvi_compact_consider(storage);
}

static bool is_idle(qkv_storage *storage) {
  pthread_mutex_lock(&storage->lock);
  const bool mail = storage->mailbox != NULL;
  pthread_mutex_unlock(&storage->lock);
  return !mail && storage->all_first == NULL && storage->reads == 0 && !storage->preparing &&
         !storage->journal.running && storage->journal.pending == NULL && storage->writes == 0 &&
         storage->compaction.segment == QKVI_NO_SEGMENT && storage->sync_waiters == NULL;
}

// Shutdown: once nothing is under way the open segments are sealed, then the loop stops.
static void try_end(qkv_storage *storage) {
  if (!storage->ending || !is_idle(storage)) return;
  const uint32_t open[] = {storage->current, storage->spare};
  for (size_t i = 0; i < 2; i++) {
    if (open[i] == QKVI_NO_SEGMENT) continue;
    qkvi_segment_retire(storage, storage->segments[open[i]]);
  }
  bool busy = qkv_io_read_stats(storage->io).depth > 0 || qkv_io_read_stats(storage->io).waiting > 0;
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    busy = busy || (storage->segments[i] != NULL && storage->segments[i]->state == QKVI_SEGMENT_SEALING);
  }
  if (busy) return;
  storage->ended = true;
  uv_stop(&storage->loop);
}

static void after_turn(uv_check_t *check) {
  qkv_storage *storage = check->data;
  const qkv_io_stats io = qkv_io_read_stats(storage->io);
  pthread_mutex_lock(&storage->lock);
  storage->stats.io_short = io.short_results;
  storage->stats.io_retries = io.retries;
  storage->stats.io_waiting = io.waiting;
  storage->stats.io_depth = io.depth;
  pthread_mutex_unlock(&storage->lock);
  try_end(storage);
}

static void begin_end(qkv_storage *storage, qkvi_message *message) {
  (void)message;
  storage->ending = true;
  uv_timer_stop(&storage->tick);
  uv_timer_stop(&storage->compact_tick);
  qkvi_sync_all(storage);
  qkvi_compact_go(storage);
  qkvi_compact_consider(storage);
}

static void *thread_main(void *context) {
  qkv_storage *storage = context;
  uv_run(&storage->loop, UV_RUN_DEFAULT);
  return NULL;
}

void qkvi_storage_turn(qkv_storage *storage, bool wait) {
  assert(!storage->threaded);
  uv_run(&storage->loop, wait ? UV_RUN_ONCE : UV_RUN_NOWAIT);
}

// ---- Opening ----

static qkv_status check_config(const qkv_storage_config *config, qkv_error *error) {
  const uint64_t segment = config->segment_bytes;
  if (config->directory == NULL || config->directory[0] == '\0') {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the storage has no directory");
  }
  if (segment % QKV_STORAGE_BLOCK != 0 || segment < UINT64_C(1) << 20 || segment > QKV_SEGMENT_BYTES_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "storage segment bytes are %" PRIu64 ", allowed are multiples of 4096 from 1 MiB to 64 GiB",
                    segment);
  }
  if (config->bytes_max != 0 && config->bytes_max / 4 < segment) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "storage budget is %" PRIu64 " bytes, at least four segments of %" PRIu64 " are needed",
                    config->bytes_max, segment);
  }
  if (config->dirty_bytes_max < 1 || config->sync_ms < 1) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "storage dirty bytes and sync time must be at least 1");
  }
  if (!(config->compact_below >= 0 && config->compact_below <= 1)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "storage compaction share is %g, allowed are 0 to 1",
                    config->compact_below);
  }
  if (config->open_files_max < 4 || config->open_files_max > 1024) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "storage open files are %u, allowed are 4 to 1024",
                    config->open_files_max);
  }
  return QKV_OK;
}

qkv_storage *qkvi_storage_create(const qkv_storage_config *config) {
  qkv_storage *storage = qkvi_checked(calloc(1, sizeof *storage));
  storage->config = *config;
  storage->lock_file = -1;
  storage->journal.file = -1;
  storage->journal.pending_last = &storage->journal.pending;
  storage->journal.rewrite_min = QKVI_JOURNAL_REWRITE;
  storage->journal.piece_bytes = QKVI_JOURNAL_PIECE;
  storage->journal.batch_max = QKVI_JOURNAL_BATCH;
  storage->mailbox_last = &storage->mailbox;
  storage->fileless_last = &storage->fileless;
  storage->compaction.asked_last = &storage->compaction.asked;
  storage->compaction.segment = QKVI_NO_SEGMENT;
  storage->compaction.retry_ms = QKVI_COMPACT_RETRY_MS;
  storage->current = storage->spare = QKVI_NO_SEGMENT;
  storage->index = qkvi_index_create();
  pthread_mutex_init(&storage->lock, NULL);
  if (uv_loop_init(&storage->loop) != 0) abort();
  qkvi_wake_init(&storage->loop, &storage->wake, run_mailbox, storage);
  uv_timer_init(&storage->loop, &storage->tick);
  uv_timer_init(&storage->loop, &storage->compact_tick);
  uv_check_init(&storage->loop, &storage->after);
  storage->tick.data = storage->compact_tick.data = storage->after.data = storage;
  // Zeroed by the system, touched here once: no page faults while writing.
  const size_t bytes = (size_t)QKVI_WRITE_BYTES * QKVI_WRITE_BUFFERS;
  storage->region = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (storage->region == MAP_FAILED) abort();
  for (size_t i = 0; i < QKVI_WRITE_BUFFERS; i++) {
    qkvi_buffer *buffer = &storage->buffers[i];
    buffer->storage = storage;
    buffer->bytes = storage->region + i * QKVI_WRITE_BYTES;
    buffer->next = storage->free_buffers;
    storage->free_buffers = buffer;
  }
  return storage;
}

static qkv_status take_directory(qkv_storage *storage, qkv_error *error) {
  const char *directory = storage->config.directory;
  errno = 0;
  if (mkdir(directory, 0700) != 0 && errno != EEXIST) {
    return qkv_fail(error, errno == EACCES ? QKV_PERMISSION_DENIED : QKV_NOT_FOUND, "%s: %s", directory,
                    strerror(errno));
  }
  char path[4096];
  if (errno != EEXIST && snprintf(path, sizeof path, "%s/..", directory) < (int)sizeof path) {
    const int parent = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);  // makes a new name durable
    if (parent >= 0) {
      (void)fsync(parent);
      close(parent);
    }
  }
  if (snprintf(path, sizeof path, "%s/lock", directory) >= (int)sizeof path) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the storage directory's path is too long");
  }
  storage->lock_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (storage->lock_file < 0) {
    return qkv_fail(error, errno == EACCES ? QKV_PERMISSION_DENIED : QKV_NOT_FOUND, "%s: %s", path, strerror(errno));
  }
  if (flock(storage->lock_file, LOCK_EX | LOCK_NB) != 0) {
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "%s is in use by another process (its lock file is taken)",
                    directory);
  }
  return QKV_OK;
}

// Without a budget the disk would be filled, and then nothing is durable any more: the oldest would stay there, and
// no newer rows come after it.
static qkv_status take_budget(qkv_storage *storage, qkv_error *error) {
  qkv_storage_config *config = &storage->config;
  if (config->bytes_max != 0) return QKV_OK;
  qkvi_space space;
  const int code = qkvi_space_read(config->directory, &space);
  if (code != 0) return qkv_fail(error, QKV_INTERNAL, "%s: %s", config->directory, strerror(code));
  config->bytes_max = qkvi_space_budget(&space, config->segment_bytes);
  qkv_log(QKV_LOG_INFO, "the storage budget follows from the file system", "{s:I, s:I, s:I, s:I}", "budget_bytes",
          (json_int_t)config->bytes_max, "held_bytes", (json_int_t)space.held, "available_bytes",
          (json_int_t)space.available, "whole_bytes", (json_int_t)space.whole);
  return QKV_OK;
}

qkv_status qkvi_storage_open_over(qkv_storage *storage, const qkv_storage_restore *restore, qkv_error *error) {
  QKV_TRY(qkvi_recover(storage, restore, error));
  qkv_io_adopt(storage->io, storage->region, (size_t)QKVI_WRITE_BYTES * QKVI_WRITE_BUFFERS);
  qkvi_segments_count_free(storage);
  uv_check_start(&storage->after, after_turn);
  uv_timer_start(&storage->tick, tick, (uint64_t)storage->config.sync_ms, (uint64_t)storage->config.sync_ms);
  return QKV_OK;
}

static void ignore_close(uv_handle_t *handle) {
  (void)handle;
}

void qkvi_storage_destroy(qkv_storage **storage) {
  qkv_storage *old = *storage;
  qkv_pool_destroy(&old->encoders);
  for (uint32_t i = 0; i < old->segments_capacity; i++) {
    qkvi_segment *segment = old->segments[i];
    if (segment == NULL) continue;
    if (segment->file >= 0) qkv_io_close(old->io, segment->file);
    free(segment->headers);
    free(segment->block);
    free(segment);
  }
  if (old->journal.file >= 0) qkv_io_close(old->io, old->journal.file);
  qkv_io_destroy(&old->io);
  qkvi_wake_deinit(&old->wake);
  uv_close((uv_handle_t *)&old->wake.poll, ignore_close);
  uv_close((uv_handle_t *)&old->tick, ignore_close);
  uv_close((uv_handle_t *)&old->compact_tick, ignore_close);
  uv_close((uv_handle_t *)&old->after, ignore_close);
  uv_run(&old->loop, UV_RUN_DEFAULT);
  if (uv_loop_close(&old->loop) != 0) abort();
  munmap(old->region, (size_t)QKVI_WRITE_BYTES * QKVI_WRITE_BUFFERS);
  qkvi_failed_ends_clear(old);
  qkvi_index_destroy(&old->index);
  qkvi_sessions_destroy(&old->sessions);
  pthread_mutex_destroy(&old->lock);
  if (old->lock_file >= 0) close(old->lock_file);
  free((void *)old->segments);
  free(old);
  *storage = NULL;
}

static qkv_status open_all(qkv_storage *storage, const qkv_storage_restore *restore, qkv_error *error) {
  const qkv_storage_config *config = &storage->config;
  QKV_TRY(take_directory(storage, error));
  QKV_TRY(take_budget(storage, error));
  const qkv_io_config io = {.directory = config->directory, .driver = config->io, .depth = config->depth};
  QKV_TRY(qkv_io_create(&storage->loop, &io, &storage->io, error));
  if (config->encoders > 0)
    QKV_TRY(qkv_pool_create_with(
        &(qkv_pool_config){.threads = config->encoders, .queue_max = 1024, .nice = ENCODERS_NICE, .on_demand = true},
        &storage->encoders, error));
  QKV_TRY(qkvi_storage_open_over(storage, restore, error));
  const int code = pthread_create(&storage->thread, NULL, thread_main, storage);
  if (code != 0) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "the storage thread: %s", strerror(code));
  (void)pthread_setname_np(storage->thread, "qkv-storage");
  storage->threaded = true;
  return QKV_OK;
}

qkv_status qkv_storage_open(const qkv_storage_config *config, const qkv_storage_restore *restore,
                            qkv_storage **storage, qkv_error *error) {
  QKV_TRY(check_config(config, error));
  qkv_storage *made = qkvi_storage_create(config);
  const qkv_status status = open_all(made, restore, error);
  made->config.directory = NULL;  // borrowed for this call
  made->config.io = NULL;
  if (status != QKV_OK) {
    qkvi_storage_destroy(&made);
    return status;
  }
  qkv_log(QKV_LOG_INFO, "storage is open", "{s:s, s:I, s:I, s:f}", "io", qkv_io_driver_name(made->io), "records",
          (json_int_t)made->stats.recovered_records, "read_bytes", (json_int_t)made->stats.recovery_read_bytes,
          "seconds", made->stats.recovery_s);
  *storage = made;
  return QKV_OK;
}

void qkv_storage_close(qkv_storage **storage) {
  qkv_storage *old = *storage;
  if (old == NULL) return;
  qkvi_message end = {.run = begin_end};
  qkvi_post(old, &end);
  if (old->threaded) {
    pthread_join(old->thread, NULL);
  } else {
    while (!old->ended) uv_run(&old->loop, UV_RUN_ONCE);
  }
  qkvi_storage_destroy(storage);
}
