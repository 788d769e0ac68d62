// Files of one directory, read and written asynchronously: one interface, several drivers.
//
//   qkv_io_submit ──► waiting ──► driver (at most `depth` at a time) ──► raw result ──► short? retry ──► done()
//
// The front (io.c) bounds the depth, goes on after short results, retries interrupted requests, counts. A driver only
// starts requests and reports the system's results, short ones included, so that every driver, also the
// fault-injecting one of tests/fault, goes through the same code. Drivers: io_uring (batched submission, registered
// buffers and files where they are allowed, completions by eventfd into the loop) and pread (threads).
//
// O_DIRECT: offset, size and address of READ and WRITE are multiples of 4096. Where a file system refuses O_DIRECT
// (tmpfs) files are opened without it, and the log says so once.
//
// Threads: that of the loop alone. Blocking calls (open, rename, ...) take microseconds to milliseconds and are made
// where that does not matter.
#ifndef QKV_STORAGE_IO_H
#define QKV_STORAGE_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "engine/base/status.h"

typedef struct qkv_io qkv_io;
typedef struct qkv_io_request qkv_io_request;

typedef enum qkv_io_kind {
  QKV_IO_READ,
  QKV_IO_WRITE,
  QKV_IO_SYNC,      // fdatasync
  QKV_IO_ALLOCATE,  // reserves [offset, offset + size); the file is that long then
} qkv_io_kind;

typedef void qkv_io_done_fn(qkv_io_request *request);

// Filled by the caller, who must not touch it or its bytes until done() is called, always from the loop.
struct qkv_io_request {
  qkv_io_kind kind;
  int file;         // of qkv_io_open
  uint64_t offset;  // bytes
  uint64_t size;    // bytes; 0 for SYNC
  uint8_t *bytes;   // NULL for SYNC and ALLOCATE
  qkv_io_done_fn *done;
  void *context;
  int error;  // set before done(): 0, or an errno; ENODATA for a read beyond the end
  // The front's and the driver's.
  uint64_t progress;  // bytes that are done
  unsigned attempts;  // in a row without progress
  qkv_io_request *next;
  void *driver;
};

typedef struct qkv_io_stats {
  uint64_t reads, writes, syncs;
  uint64_t read_bytes, written_bytes;
  uint64_t short_results;   // went on with the rest
  uint64_t retries;         // EINTR, EAGAIN
  uint64_t errors;          // requests that failed
  uint64_t depth, waiting;  // now: in the driver, in front of it
} qkv_io_stats;

// The functions of a driver. All but `start` may block; results are 0 or -errno. `done` is called from the loop.
typedef struct qkv_io_driver {
  const char *name;
  void *self;
  // Begins a request, which is a whole one or the rest of one: [offset + progress, offset + size). Its result goes to
  // qkvi_io_finish. false: the driver's queue is full; the request is offered again after the next result.
  bool (*start)(void *self, qkv_io_request *request);
  void (*flush)(void *self);  // submits started requests to the system
  int (*open)(void *self, const char *name, bool create, int *file);
  void (*close)(void *self, int file);
  int (*size)(void *self, int file, uint64_t *bytes);
  int (*truncate)(void *self, int file, uint64_t bytes);
  int (*rename)(void *self, const char *from, const char *to);
  int (*remove)(void *self, const char *name);
  int (*list)(void *self, void (*each)(void *context, const char *name), void *context);
  int (*sync_directory)(void *self);
  void (*adopt)(void *self, void *region, size_t bytes);  // buffers of many writes lie there; may register them
  void (*destroy)(void *self);                            // nothing is under way
} qkv_io_driver;

typedef struct qkv_io_config {
  const char *directory;  // exists
  const char *driver;     // "auto", "uring", "pread"
  unsigned depth;         // requests at a time, 1 to 1024
} qkv_io_config;

// Opens `directory` with the driver that is asked for; `auto` takes io_uring where it works and says in the log why
// it does not elsewhere: seccomp (EPERM), kernel.io_uring_disabled (EPERM), RLIMIT_MEMLOCK (ENOMEM), an old kernel
// (ENOSYS). UNAVAILABLE with that reason for `uring`. The loop is borrowed.
qkv_status qkv_io_create(uv_loop_t *loop, const qkv_io_config *config, qkv_io **io, qkv_error *error);
// The same over the caller's driver, which the io then owns.
qkv_io *qkv_io_create_over(uv_loop_t *loop, qkv_io_driver driver, unsigned depth);
// Nothing may be under way (asserted). Leaves the loop without handles of its own after the loop has run once more.
void qkv_io_destroy(qkv_io **io);

const char *qkv_io_driver_name(const qkv_io *io);
qkv_io_stats qkv_io_read_stats(const qkv_io *io);

void qkv_io_submit(qkv_io *io, qkv_io_request *request);
// Runs the loop until nothing is under way.
void qkv_io_drain(qkv_io *io);

// For drivers: the system's result of a started request: bytes, or -errno.
void qkvi_io_finish(qkv_io *io, qkv_io_request *request, int64_t result);

// Blocking. 0 or an errno.
int qkv_io_open(qkv_io *io, const char *name, bool create, int *file);
void qkv_io_close(qkv_io *io, int file);
int qkv_io_size(qkv_io *io, int file, uint64_t *bytes);
int qkv_io_truncate(qkv_io *io, int file, uint64_t bytes);
int qkv_io_rename(qkv_io *io, const char *from, const char *to);
int qkv_io_remove(qkv_io *io, const char *name);
int qkv_io_list(qkv_io *io, void (*each)(void *context, const char *name), void *context);
int qkv_io_sync_directory(qkv_io *io);
void qkv_io_adopt(qkv_io *io, void *region, size_t bytes);

#endif
