// The driver of io_uring: all requests of a turn of the loop are submitted in one call, completions come by eventfd.
#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "storage/io_drivers.h"

#define PIECE_MAX (UINT64_C(1) << 30)  // of a read or write; the front goes on with the rest

typedef struct uring_driver {
  qkvi_files *files_pointer;  // first: qkvi_files_fill
  qkvi_files files;
  qkv_io *io;
  struct io_uring ring;
  int event;              // signals completions
  uv_poll_t *poll;        // for `event`
  uv_timer_t *retry;      // where the kernel had no space for submissions
  bool fixed_files;       // slots are registered
  const uint8_t *region;  // registered, or NULL
  size_t region_bytes;    // of it
  unsigned unsubmitted;   // in the submission queue
} uring_driver;

static bool is_fixed(const uring_driver *driver, const qkv_io_request *request) {
  return driver->region != NULL && request->bytes >= driver->region &&
         request->bytes + request->size <= driver->region + driver->region_bytes;
}

static void prepare(const uring_driver *driver, struct io_uring_sqe *sqe, const qkv_io_request *request) {
  const int file = driver->fixed_files ? request->file : driver->files.slots[request->file];
  const uint64_t offset = request->offset + request->progress;
  const uint64_t rest = request->size - request->progress;
  const uint64_t left = request->bytes != NULL && rest > PIECE_MAX ? PIECE_MAX : rest;
  uint8_t *bytes = request->bytes == NULL ? NULL : request->bytes + request->progress;
  const bool fixed = is_fixed(driver, request);
  switch (request->kind) {
    case QKV_IO_READ:
      if (fixed) {
        io_uring_prep_read_fixed(sqe, file, bytes, (unsigned)left, offset, 0);
      } else {
        io_uring_prep_read(sqe, file, bytes, (unsigned)left, offset);
      }
      break;
    case QKV_IO_WRITE:
      if (fixed) {
        io_uring_prep_write_fixed(sqe, file, bytes, (unsigned)left, offset, 0);
      } else {
        io_uring_prep_write(sqe, file, bytes, (unsigned)left, offset);
      }
      break;
    case QKV_IO_SYNC:
      io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);
      break;
    case QKV_IO_ALLOCATE:
      io_uring_prep_fallocate(sqe, file, 0, (off_t)offset, (off_t)left);
      break;
  }
  if (driver->fixed_files) sqe->flags |= IOSQE_FIXED_FILE;
}

static bool start(void *self, qkv_io_request *request) {
  uring_driver *driver = self;
  struct io_uring_sqe *sqe = io_uring_get_sqe(&driver->ring);
  if (sqe == NULL) return false;
  prepare(driver, sqe, request);
  io_uring_sqe_set_data(sqe, request);
  driver->unsubmitted++;
  return true;
}

static void flush(void *self);

static void flush_again(uv_timer_t *timer) {
  flush(timer->data);
}

static void flush(void *self) {
  uring_driver *driver = self;
  while (driver->unsubmitted > 0) {
    const int submitted = io_uring_submit(&driver->ring);
    if (submitted == -EINTR) continue;
    if (submitted <= 0) {
      // EAGAIN, EBUSY: no memory, or completions have to be consumed first. It stays in the queue.
      uv_timer_start(driver->retry, flush_again, 1, 0);
      return;
    }
    driver->unsubmitted -= (unsigned)submitted;
  }
}

static void collect(uv_poll_t *poll, int status, int events) {
  (void)status;
  (void)events;
  uring_driver *driver = poll->data;
  uint64_t told;
  (void)!read(driver->event, &told, sizeof told);
  struct io_uring_cqe *cqe;
  while (io_uring_peek_cqe(&driver->ring, &cqe) == 0 && cqe != NULL) {
    qkv_io_request *request = io_uring_cqe_get_data(cqe);
    int64_t result = cqe->res;
    io_uring_cqe_seen(&driver->ring, cqe);
    if (request->kind == QKV_IO_ALLOCATE && result == -EOPNOTSUPP) {
      result = qkvi_files_extend(&driver->files, request->file, request->offset + request->size);
    }
    qkvi_io_finish(driver->io, request, result);
  }
}

// ---- Files and buffers ----

static int open_file(void *self, const char *name, bool create, int *file) {
  uring_driver *driver = self;
  const int result = qkvi_files_open(&driver->files, name, create, file);
  if (result != 0 || !driver->fixed_files) return result;
  const int updated = io_uring_register_files_update(&driver->ring, (unsigned)*file, &driver->files.slots[*file], 1);
  if (updated == 1) return 0;
  qkvi_files_close(&driver->files, *file);
  return updated < 0 ? updated : -EIO;
}

static void close_file(void *self, int file) {
  uring_driver *driver = self;
  int none = -1;
  if (driver->fixed_files) (void)io_uring_register_files_update(&driver->ring, (unsigned)file, &none, 1);
  qkvi_files_close(&driver->files, file);
}

static void adopt(void *self, void *region, size_t bytes) {
  uring_driver *driver = self;
  const struct iovec vector = {.iov_base = region, .iov_len = bytes};
  const int result = io_uring_register_buffers(&driver->ring, &vector, 1);
  if (result == 0) {
    driver->region = region;
    driver->region_bytes = bytes;
    return;
  }
  qkv_log(QKV_LOG_INFO, "write buffers are not registered with io_uring", "{s:s, s:s}", "error", strerror(-result),
          "likely", result == -ENOMEM ? "RLIMIT_MEMLOCK is too low" : "the kernel does not allow it");
}

// ---- Life ----

static void free_handle(uv_handle_t *handle) {
  free(handle);
}

static void free_poll(uv_handle_t *handle) {
  close((int)(intptr_t)handle->data);
  free(handle);
}

static void destroy(void *self) {
  uring_driver *driver = self;
  assert(driver->unsubmitted == 0);
  uv_poll_stop(driver->poll);
  driver->poll->data = (void *)(intptr_t)driver->event;
  uv_close((uv_handle_t *)driver->poll, free_poll);
  uv_close((uv_handle_t *)driver->retry, free_handle);
  io_uring_queue_exit(&driver->ring);
  qkvi_files_deinit(&driver->files);
  free(driver);
}

static const char *reason_of(int error) {
  if (error == EPERM) {
    char setting = '0';
    FILE *file = fopen("/proc/sys/kernel/io_uring_disabled", "re");
    if (file != NULL) {
      if (fread(&setting, 1, 1, file) != 1) setting = '0';
      (void)fclose(file);
    }
    return setting == '0' ? "a seccomp filter forbids it, as container runtimes do"
                          : "sysctl kernel.io_uring_disabled";
  }
  if (error == ENOMEM) return "RLIMIT_MEMLOCK is too low";
  if (error == ENOSYS) return "the kernel has none";
  if (error == EMFILE || error == ENFILE) return "too many open files";
  return "an old kernel";
}

static bool has_operations(struct io_uring *ring) {
  static const int needed[] = {IORING_OP_READ,        IORING_OP_WRITE, IORING_OP_READ_FIXED,
                               IORING_OP_WRITE_FIXED, IORING_OP_FSYNC, IORING_OP_FALLOCATE};
  struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
  if (probe == NULL) return false;
  bool all = true;
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
    all = all && io_uring_opcode_supported(probe, needed[i]);
  io_uring_free_probe(probe);
  return all;
}

// The ring and its eventfd. 0 or an errno.
static int setup_ring(uring_driver *driver, unsigned depth) {
  int result = io_uring_queue_init(depth, &driver->ring, 0);
  if (result < 0) return -result;
  if (!has_operations(&driver->ring)) {
    io_uring_queue_exit(&driver->ring);
    return EINVAL;
  }
  driver->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  result = driver->event < 0 ? -errno : io_uring_register_eventfd(&driver->ring, driver->event);
  if (result < 0) {
    if (driver->event >= 0) close(driver->event);
    io_uring_queue_exit(&driver->ring);
    return -result;
  }
  driver->fixed_files = io_uring_register_files_sparse(&driver->ring, QKVI_FILES_MAX) == 0;
  return 0;
}

qkv_status qkvi_uring_create(uv_loop_t *loop, const qkv_io_config *config, qkv_io_driver *driver, qkv_error *error) {
  uring_driver *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  qkv_status status = qkvi_files_init(&made->files, config->directory, error);
  if (status == QKV_OK) {
    const int failed = setup_ring(made, config->depth);
    if (failed != 0) {
      qkvi_files_deinit(&made->files);
      status = qkv_fail(error, QKV_UNAVAILABLE, "io_uring: %s; likely: %s", strerror(failed), reason_of(failed));
    }
  }
  if (status != QKV_OK) {
    free(made);
    return status;
  }
  made->files_pointer = &made->files;
  made->poll = calloc(1, sizeof *made->poll);
  made->retry = calloc(1, sizeof *made->retry);
  if (made->poll == NULL || made->retry == NULL) abort();
  uv_poll_init(loop, made->poll, made->event);
  uv_timer_init(loop, made->retry);
  made->poll->data = made;
  made->retry->data = made;
  uv_poll_start(made->poll, UV_READABLE, collect);
  *driver = (qkv_io_driver){
      .name = "uring", .self = made, .start = start, .flush = flush, .adopt = adopt, .destroy = destroy};
  qkvi_files_fill(driver);
  driver->open = open_file;
  driver->close = close_file;
  return QKV_OK;
}

void qkvi_uring_attach(void *self, qkv_io *io) {
  ((uring_driver *)self)->io = io;
}
