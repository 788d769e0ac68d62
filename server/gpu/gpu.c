#include "server/gpu/gpu.h"
#include "engine/base/clock.h"

#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/base/log.h"
#include "engine/kernel/simt/image.h"
#include "server/gpu/internal.h"

enum {
  STAGING_BYTES = 4 << 20,  // of each half
  TIMEOUT_MS = 5000,
  RETRY_MS_MAX = 300000,
  STEADY = 6,  // a GPU that has been used for so many times retry_ms is tried again soon
  KERNELS_BYTES_MAX = 64 << 20,
};

qkv_device *qkvi_gpu_device(qkvi_gpu *gpu) {
  return &gpu->device;
}

// ---- Opening and closing ----

static qkv_status open_named(qkvi_gpu *gpu, qkv_gpu_device **device, qkv_error *error) {
  size_t bytes;
  qkv_gpu_config config = {.driver = &gpu->driver,
                           .device = gpu->config.device,
                           .memory_bytes = gpu->config.memory_bytes,
                           .image = gpu->image != NULL ? gpu->image : qkv_simt_image(&bytes),
                           .staging_bytes = STAGING_BYTES,
                           .timeout_ms = TIMEOUT_MS};
  qkvi_gpu_set_calls(gpu, &config);
  QKV_TRY(qkv_gpu_open(&config, device, error));
  const qkv_status status = qkvi_gpu_prepare_calls(gpu, *device, error);
  if (status == QKV_OK) qkvi_gpu_prepare_areas(gpu, *device);
  if (status != QKV_OK) qkv_gpu_close(device);
  return status;
}

// By the only thread that does.
static bool open_gpu(qkvi_gpu *gpu) {
  qkv_gpu_device *device = NULL;
  qkv_error error = {0};
  const qkv_status status = open_named(gpu, &device, &error);
  pthread_mutex_lock(&gpu->lock);
  gpu->open = device;
  gpu->usable = status == QKV_OK;
  const qkv_gpu_info info = device != NULL ? qkv_gpu_read(device) : (qkv_gpu_info){0};
  if (gpu->usable) {
    gpu->openings++;
    gpu->number = info.ordinal;
    memcpy(gpu->name, info.name, sizeof gpu->name);
    memcpy(gpu->uuid, info.uuid, sizeof gpu->uuid);
  }
  (void)snprintf(gpu->reason, sizeof gpu->reason, "%s", error.text);
  pthread_mutex_unlock(&gpu->lock);
  if (status != QKV_OK) {
    qkv_log(QKV_LOG_WARN, "a GPU is not used, it is tried again later", "{s:s, s:s}", "device", gpu->config.device,
            "reason", error.text);
    return false;
  }
  qkv_log(QKV_LOG_INFO, "a GPU is used", "{s:s, s:i, s:i, s:s, s:s, s:I, s:I}", "gpu", info.name, "major", info.major,
          "minor", info.minor, "uuid", info.uuid, "kernels",
          gpu->config.kernels != NULL ? gpu->config.kernels : "built in", "memory",
          (json_int_t)gpu->config.memory_bytes, "memory_total", (json_int_t)info.bytes_total);
  return true;
}

// The lock is held. Waits until no caller has a copy.
static void close_gpu(qkvi_gpu *gpu) {
  gpu->usable = false;
  while (gpu->held > 0) pthread_cond_wait(&gpu->changed, &gpu->lock);
  qkvi_gpu_drop_copies(gpu);
  while (gpu->given_back != NULL) qkvi_gpu_close_given_back(gpu);
  qkv_gpu_device *device = gpu->open;
  gpu->open = NULL;
  pthread_mutex_unlock(&gpu->lock);
  if (device != NULL) qkv_gpu_close(&device);
  pthread_mutex_lock(&gpu->lock);
}

bool qkvi_gpu_enter(qkvi_gpu *gpu) {
  pthread_mutex_lock(&gpu->lock);
  const bool usable = gpu->usable;
  gpu->held += usable;
  pthread_mutex_unlock(&gpu->lock);
  return usable;
}

void qkvi_gpu_leave(qkvi_gpu *gpu) {
  pthread_mutex_lock(&gpu->lock);
  assert(gpu->held > 0);
  if (--gpu->held == 0) pthread_cond_broadcast(&gpu->changed);
  pthread_mutex_unlock(&gpu->lock);
}

void qkvi_gpu_failed(qkvi_gpu *gpu) {
  pthread_mutex_lock(&gpu->lock);
  if (gpu->open != NULL && gpu->usable && !qkv_gpu_is_up(gpu->open)) {
    gpu->usable = false;
    const qkv_gpu_info info = qkv_gpu_read(gpu->open);
    memcpy(gpu->reason, info.reason, sizeof gpu->reason);
    qkvi_gpu_count(gpu, QKV_METRIC_GPU_FAILURES, 1);
    pthread_cond_broadcast(&gpu->changed);
  }
  pthread_mutex_unlock(&gpu->lock);
}

// ---- The thread ----

// The lock is held. Until something has changed, or that time has come.
static void wait_until(qkvi_gpu *gpu, int64_t until_ms) {
  const struct timespec at = {.tv_sec = until_ms / 1000, .tv_nsec = until_ms % 1000 * 1000000};
  (void)pthread_cond_timedwait(&gpu->changed, &gpu->lock, &at);
}

typedef struct retries {
  int64_t at_ms, delay_ms, opened_ms;
} retries;

static void plan_retry(const qkvi_gpu *gpu, retries *next) {
  const int64_t now = qkv_now_ms();
  if (next->opened_ms != 0 && now - next->opened_ms > STEADY * gpu->config.retry_ms)
    next->delay_ms = gpu->config.retry_ms;
  next->at_ms = now + next->delay_ms;
  next->delay_ms = 2 * next->delay_ms < RETRY_MS_MAX ? 2 * next->delay_ms : RETRY_MS_MAX;
}

// The lock is held.
static void retry(qkvi_gpu *gpu, retries *next) {
  if (qkv_now_ms() < next->at_ms) return wait_until(gpu, next->at_ms);
  pthread_mutex_unlock(&gpu->lock);
  const bool opened = open_gpu(gpu);
  pthread_mutex_lock(&gpu->lock);
  if (opened) next->opened_ms = qkv_now_ms();
  if (!opened) plan_retry(gpu, next);
}

static void *run(void *context) {
  qkvi_gpu *gpu = context;
  retries next = {.delay_ms = gpu->config.retry_ms};
  pthread_mutex_lock(&gpu->lock);
  if (gpu->usable) next.opened_ms = qkv_now_ms();
  if (!gpu->usable) plan_retry(gpu, &next);
  while (!gpu->stopping) {
    if (gpu->open == NULL) {
      retry(gpu, &next);
    } else if (!gpu->usable) {
      close_gpu(gpu);
      plan_retry(gpu, &next);
    } else if (gpu->given_back != NULL) {
      qkvi_gpu_close_given_back(gpu);
    } else if (gpu->queue != NULL) {
      qkvi_gpu_upload_next(gpu);
    } else {
      pthread_cond_wait(&gpu->changed, &gpu->lock);
    }
  }
  close_gpu(gpu);
  pthread_mutex_unlock(&gpu->lock);
  return NULL;
}

// ---- Life ----

static qkv_status read_kernels(const char *path, char **out, qkv_error *error) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "--gpu-kernels: %s: %s", path, strerror(errno));
  char *data = malloc(KERNELS_BYTES_MAX + 1);
  if (data == NULL) abort();
  const size_t bytes = fread(data, 1, KERNELS_BYTES_MAX + 1, file);
  const bool failed = ferror(file) != 0;
  fclose(file);
  if (failed || bytes == 0 || bytes > KERNELS_BYTES_MAX) {
    free(data);
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--gpu-kernels: %s %s", path,
                    failed       ? "cannot be read"
                    : bytes == 0 ? "is empty"
                                 : "has more than 64 MiB");
  }
  data[bytes] = '\0';  // which PTX ends with
  *out = realloc(data, bytes + 1);
  return QKV_OK;
}

// The driver and kernels; why there are none.
static qkv_status find_driver(qkvi_gpu *gpu, qkv_error *error) {
  size_t bytes;
  if (gpu->image == NULL && qkv_simt_image(&bytes) == NULL)
    return qkv_fail(error, QKV_UNAVAILABLE, "this build has no kernels for GPUs, and there are no --gpu-kernels");
  return qkv_cuda_load(&gpu->driver, error);
}

static void init(qkvi_gpu *gpu, const qkvi_gpu_config *config) {
  pthread_condattr_t monotonic;
  gpu->config = *config;
  gpu->number = -1;
  gpu->scratch_bytes = qkvi_gpu_scratch_bytes(config->memory_bytes);
  gpu->device = (qkv_device){.hold = qkvi_gpu_hold,
                             .release = qkvi_gpu_release,
                             .has = qkvi_gpu_has,
                             .forget = qkvi_gpu_forget,
                             .begin = qkvi_gpu_begin_call,
                             .submit = qkvi_gpu_submit,
                             .wait = qkvi_gpu_wait_call,
                             .end = qkvi_gpu_end_call};
  pthread_mutex_init(&gpu->lock, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&gpu->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
}

static void deinit(qkvi_gpu *gpu) {
  qkvi_gpu_destroy_copies(gpu);
  pthread_cond_destroy(&gpu->changed);
  pthread_mutex_destroy(&gpu->lock);
  free(gpu->resident.items);
  free(gpu->image);
  free(gpu);
}

qkv_status qkvi_gpu_create(const qkvi_gpu_config *config, qkvi_gpu **out, qkv_error *error) {
  qkvi_gpu *gpu = calloc(1, sizeof *gpu);
  qkv_error reason = {0};
  *out = NULL;
  if (gpu == NULL) abort();
  init(gpu, config);
  const qkv_status status = config->kernels == NULL ? QKV_OK : read_kernels(config->kernels, &gpu->image, error);
  if (status != QKV_OK || find_driver(gpu, &reason) != QKV_OK) {
    if (status == QKV_OK) qkv_log(QKV_LOG_WARN, "no GPU is used", "{s:s}", "reason", reason.text);
    deinit(gpu);
    return status;
  }
  (void)open_gpu(gpu);
  const int failed = pthread_create(&gpu->thread, NULL, run, gpu);
  assert(failed == 0);
  (void)failed;
  (void)pthread_setname_np(gpu->thread, "qkvd-gpu");
  *out = gpu;
  return QKV_OK;
}

void qkvi_gpu_destroy(qkvi_gpu **gpu) {
  qkvi_gpu *old = *gpu;
  if (old == NULL) return;
  *gpu = NULL;
  pthread_mutex_lock(&old->lock);
  old->stopping = true;
  pthread_cond_broadcast(&old->changed);
  pthread_mutex_unlock(&old->lock);
  pthread_join(old->thread, NULL);
  deinit(old);
}

qkvi_gpu_stats qkvi_gpu_read(qkvi_gpu *gpu) {
  pthread_mutex_lock(&gpu->lock);
  const qkv_gpu_info info = gpu->open != NULL ? qkv_gpu_read(gpu->open) : (qkv_gpu_info){0};
  qkvi_gpu_stats stats = {.device = gpu->config.device,
                          .number = gpu->number,
                          .sessions = atomic_load_explicit(&gpu->device.sessions, memory_order_relaxed),
                          .bytes_limit = gpu->config.memory_bytes,
                          .bytes = info.heap.bytes_used,
                          .ranges = gpu->resident.count,
                          .uploaded_bytes = info.uploaded_bytes,
                          .down = !gpu->usable};
  for (size_t i = 0; i < QKVI_GPU_COUNTERS; i++) stats.counts[i] = qkv_metric_read(&gpu->counts[i]);
  (void)snprintf(stats.name, sizeof stats.name, "%s", gpu->name);
  (void)snprintf(stats.uuid, sizeof stats.uuid, "%s", gpu->uuid);
  (void)snprintf(stats.reason, sizeof stats.reason, "%s", gpu->reason);
  pthread_mutex_unlock(&gpu->lock);
  return stats;
}
