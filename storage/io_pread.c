// The driver of threads: pread, pwrite, fdatasync, fallocate, one system call for each request.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/base/pool.h"
#include "storage/io_drivers.h"
#include "storage/wake.h"

enum { THREADS_MAX = 16 };  // more threads do not help a device that io_uring's best depth saturates

typedef struct pread_driver pread_driver;

typedef struct pread_job {
  pread_driver *driver;
  qkv_io_request *request;
  int64_t result;
  struct pread_job *next;
} pread_job;

struct pread_driver {
  qkvi_files *files_pointer;  // first: qkvi_files_fill
  qkvi_files files;
  qkv_io *io;
  qkv_pool *pool;
  qkvi_wake *wake;
  pread_job *jobs, *free;  // as many as may run
  pthread_mutex_t lock;
  pread_job *finished;  // guarded by the lock
};

static int64_t run_request(const qkvi_files *files, const qkv_io_request *request) {
  const int file = files->slots[request->file];
  const uint64_t left = request->size - request->progress;
  const off_t offset = (off_t)(request->offset + request->progress);
  int64_t result = 0;
  switch (request->kind) {
    case QKV_IO_READ:
      result = pread(file, request->bytes + request->progress, left, offset);
      break;
    case QKV_IO_WRITE:
      result = pwrite(file, request->bytes + request->progress, left, offset);
      break;
    case QKV_IO_SYNC:
      result = fdatasync(file);
      break;
    case QKV_IO_ALLOCATE:
      result = fallocate(file, 0, offset, (off_t)left);
      break;
  }
  return result < 0 ? -errno : result;
}

static void run_job(void *context) {
  pread_job *job = context;
  pread_driver *driver = job->driver;
  job->result = run_request(&driver->files, job->request);
  pthread_mutex_lock(&driver->lock);
  job->next = driver->finished;
  driver->finished = job;
  // Under the lock: the thread that takes the last job may end the driver.
  qkvi_wake_ring(driver->wake);
  pthread_mutex_unlock(&driver->lock);
}

static void collect(void *context) {
  pread_driver *driver = context;
  pthread_mutex_lock(&driver->lock);
  pread_job *job = driver->finished;
  driver->finished = NULL;
  pthread_mutex_unlock(&driver->lock);
  while (job != NULL) {
    pread_job *next = job->next;
    qkv_io_request *request = job->request;
    int64_t result = job->result;
    if (request->kind == QKV_IO_ALLOCATE && result == -EOPNOTSUPP) {
      result = qkvi_files_extend(&driver->files, request->file, request->offset + request->size);
    }
    job->next = driver->free;
    driver->free = job;
    qkvi_io_finish(driver->io, request, result);
    job = next;
  }
}

static bool start(void *self, qkv_io_request *request) {
  pread_driver *driver = self;
  pread_job *job = driver->free;
  if (job == NULL) return false;
  job->request = request;
  driver->free = job->next;
  if (qkv_pool_submit(driver->pool, run_job, job) == QKV_OK) return true;
  driver->free = job;
  return false;
}

static void flush(void *self) {
  (void)self;
}

static void adopt(void *self, void *region, size_t bytes) {
  (void)self;
  (void)region;
  (void)bytes;
}

static void free_wake(uv_handle_t *handle) {
  free(handle->data);
}

static void destroy(void *self) {
  pread_driver *driver = self;
  qkv_pool_destroy(&driver->pool);
  assert(driver->finished == NULL);
  pthread_mutex_destroy(&driver->lock);
  qkvi_wake_deinit(driver->wake);
  uv_close((uv_handle_t *)&driver->wake->poll, free_wake);
  qkvi_files_deinit(&driver->files);
  free(driver->jobs);
  free(driver);
}

qkv_status qkvi_pread_create(uv_loop_t *loop, const qkv_io_config *config, qkv_io_driver *driver, qkv_error *error) {
  pread_driver *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  qkv_status status = qkvi_files_init(&made->files, config->directory, error);
  if (status == QKV_OK) {
    const size_t threads = config->depth < THREADS_MAX ? config->depth : THREADS_MAX;
    status = qkv_pool_create_with(
        &(qkv_pool_config){.threads = threads, .queue_max = config->depth, .on_demand = true}, &made->pool, error);
    if (status != QKV_OK) qkvi_files_deinit(&made->files);
  }
  if (status != QKV_OK) {
    free(made);
    return status;
  }
  made->files_pointer = &made->files;
  pthread_mutex_init(&made->lock, NULL);
  made->jobs = calloc(config->depth, sizeof *made->jobs);
  made->wake = calloc(1, sizeof *made->wake);
  if (made->jobs == NULL || made->wake == NULL) abort();
  for (unsigned i = 0; i < config->depth; i++) {
    made->jobs[i] = (pread_job){.driver = made, .next = made->free};
    made->free = &made->jobs[i];
  }
  qkvi_wake_init(loop, made->wake, collect, made);
  *driver = (qkv_io_driver){
      .name = "pread", .self = made, .start = start, .flush = flush, .adopt = adopt, .destroy = destroy};
  qkvi_files_fill(driver);
  return QKV_OK;
}

void qkvi_pread_attach(void *self, qkv_io *io) {
  ((pread_driver *)self)->io = io;
}
