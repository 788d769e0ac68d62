#include "storage/io.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "storage/io_drivers.h"
#include "storage/record.h"

enum { ATTEMPTS_MAX = 64 };  // in a row without progress; then the system's answer is final

struct qkv_io {
  uv_loop_t *loop;
  uv_prepare_t *before_poll;  // submits what a turn of the loop has started
  qkv_io_driver driver;
  unsigned depth;
  qkv_io_request *first, **last;  // that wait
  bool pumping;
  qkv_io_stats stats;
};

static void pump(qkv_io *io) {
  if (io->pumping) return;
  io->pumping = true;
  while (io->first != NULL && io->stats.depth < io->depth) {
    qkv_io_request *request = io->first;
    if (!io->driver.start(io->driver.self, request)) break;
    io->first = request->next;
    if (io->first == NULL) io->last = &io->first;
    request->next = NULL;
    io->stats.waiting--;
    io->stats.depth++;
  }
  io->pumping = false;
}

static void flush(uv_prepare_t *handle) {
  qkv_io *io = handle->data;
  pump(io);
  io->driver.flush(io->driver.self);
}

qkv_io *qkv_io_create_over(uv_loop_t *loop, qkv_io_driver driver, unsigned depth) {
  assert(depth >= 1);
  qkv_io *io = calloc(1, sizeof *io);
  uv_prepare_t *prepare = calloc(1, sizeof *prepare);
  if (io == NULL || prepare == NULL) abort();
  *io = (qkv_io){.loop = loop, .before_poll = prepare, .driver = driver, .depth = depth, .last = &io->first};
  prepare->data = io;
  uv_prepare_init(loop, prepare);
  uv_prepare_start(prepare, flush);
  uv_unref((uv_handle_t *)prepare);
  return io;
}

static void free_handle(uv_handle_t *handle) {
  free(handle);
}

void qkv_io_destroy(qkv_io **io) {
  qkv_io *old = *io;
  if (old == NULL) return;
  assert(old->first == NULL && old->stats.depth == 0);
  old->driver.destroy(old->driver.self);
  uv_close((uv_handle_t *)old->before_poll, free_handle);
  free(old);
  *io = NULL;
}

const char *qkv_io_driver_name(const qkv_io *io) {
  return io->driver.name;
}

qkv_io_stats qkv_io_read_stats(const qkv_io *io) {
  return io->stats;
}

void qkv_io_submit(qkv_io *io, qkv_io_request *request) {
  assert(request->offset % QKV_STORAGE_BLOCK == 0 && request->size % QKV_STORAGE_BLOCK == 0);
  assert((uintptr_t)request->bytes % QKV_STORAGE_BLOCK == 0 && request->done != NULL);
  assert((request->size > 0) == (request->kind != QKV_IO_SYNC));
  request->error = 0;
  request->progress = 0;
  request->attempts = 0;
  request->next = NULL;
  *io->last = request;
  io->last = &request->next;
  io->stats.waiting++;
  pump(io);
}

static void again(qkv_io *io, qkv_io_request *request) {
  request->next = io->first;
  if (io->first == NULL) io->last = &request->next;
  io->first = request;
  io->stats.waiting++;
}

static void count(qkv_io *io, const qkv_io_request *request) {
  if (request->error != 0) io->stats.errors++;
  if (request->kind == QKV_IO_SYNC) io->stats.syncs++;
  if (request->kind == QKV_IO_READ) {
    io->stats.reads++;
    io->stats.read_bytes += request->progress;
  }
  if (request->kind == QKV_IO_WRITE) {
    io->stats.writes++;
    io->stats.written_bytes += request->progress;
  }
}

// Applies a result to the request. Whether it has to go on.
static bool goes_on(qkv_io *io, qkv_io_request *request, int64_t result) {
  if (result == -EINTR || result == -EAGAIN) {
    io->stats.retries++;
    if (++request->attempts < ATTEMPTS_MAX) return true;
  }
  if (result < 0) {
    request->error = (int)-result;
    return false;
  }
  if (request->kind != QKV_IO_READ && request->kind != QKV_IO_WRITE) return false;
  if (result == 0) {
    request->error = request->kind == QKV_IO_READ ? ENODATA : EIO;
    return false;
  }
  const uint64_t done = request->progress + (uint64_t)result;
  assert(done <= request->size);
  if (done == request->size) {
    request->progress = done;
    return false;
  }
  // The rest begins at a block again.
  const uint64_t whole = done / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
  io->stats.short_results++;
  request->attempts = whole > request->progress ? 0 : request->attempts + 1;
  request->progress = whole;
  if (request->attempts < ATTEMPTS_MAX) return true;
  request->error = EIO;
  return false;
}

void qkvi_io_finish(qkv_io *io, qkv_io_request *request, int64_t result) {
  assert(io->stats.depth > 0);
  io->stats.depth--;
  if (goes_on(io, request, result)) {
    again(io, request);
  } else {
    count(io, request);
    request->done(request);
  }
  pump(io);
}

void qkv_io_drain(qkv_io *io) {
  while (io->first != NULL || io->stats.depth > 0) uv_run(io->loop, UV_RUN_ONCE);
}

// ---- Which driver ----

static qkv_status create_named(uv_loop_t *loop, const qkv_io_config *config, bool uring, qkv_io **io,
                               qkv_error *error) {
  qkv_io_driver driver = {0};
  QKV_TRY(uring ? qkvi_uring_create(loop, config, &driver, error) : qkvi_pread_create(loop, config, &driver, error));
  *io = qkv_io_create_over(loop, driver, config->depth);
  if (uring) {
    qkvi_uring_attach(driver.self, *io);
  } else {
    qkvi_pread_attach(driver.self, *io);
  }
  return QKV_OK;
}

qkv_status qkv_io_create(uv_loop_t *loop, const qkv_io_config *config, qkv_io **io, qkv_error *error) {
  const bool automatic = strcmp(config->driver, "auto") == 0;
  if (!automatic && strcmp(config->driver, "uring") != 0 && strcmp(config->driver, "pread") != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "storage io is %s, allowed are auto, uring, pread", config->driver);
  }
  if (config->depth < 1 || config->depth > 1024) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "storage depth is %u, allowed are 1 to 1024", config->depth);
  }
  if (!automatic) return create_named(loop, config, strcmp(config->driver, "uring") == 0, io, error);
  qkv_error reason = {0};
  const qkv_status status = create_named(loop, config, true, io, &reason);
  if (status == QKV_OK) return QKV_OK;
  if (status != QKV_UNAVAILABLE) return qkv_fail(error, status, "%s", reason.text);
  qkv_log(QKV_LOG_WARN, "io_uring is not used, storage reads and writes with threads", "{s:s}", "reason",
          reason.text);
  return create_named(loop, config, false, io, error);
}

// ---- Blocking calls ----

int qkv_io_open(qkv_io *io, const char *name, bool create, int *file) {
  return -io->driver.open(io->driver.self, name, create, file);
}

void qkv_io_close(qkv_io *io, int file) {
  io->driver.close(io->driver.self, file);
}

int qkv_io_size(qkv_io *io, int file, uint64_t *bytes) {
  return -io->driver.size(io->driver.self, file, bytes);
}

int qkv_io_truncate(qkv_io *io, int file, uint64_t bytes) {
  return -io->driver.truncate(io->driver.self, file, bytes);
}

int qkv_io_rename(qkv_io *io, const char *from, const char *to) {
  return -io->driver.rename(io->driver.self, from, to);
}

int qkv_io_remove(qkv_io *io, const char *name) {
  return -io->driver.remove(io->driver.self, name);
}

int qkv_io_list(qkv_io *io, void (*each)(void *context, const char *name), void *context) {
  return -io->driver.list(io->driver.self, each, context);
}

int qkv_io_sync_directory(qkv_io *io) {
  return -io->driver.sync_directory(io->driver.self);
}

void qkv_io_adopt(qkv_io *io, void *region, size_t bytes) {
  io->driver.adopt(io->driver.self, region, bytes);
}
