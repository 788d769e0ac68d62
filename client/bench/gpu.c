#include "client/bench/gpu.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/device_image.h"
#include "engine/cache/page_range.h"
#include "engine/kernel/simt/image.h"
#include "storage/gpu/device.h"

enum {
  CALLS = 16,
  INPUT_BYTES = 1 << 20,
  OUTPUT_BYTES = 2 << 20,
  STAGING_BYTES = 8 << 20,
  TIMEOUT_MS = 60000,
  WARP = 32,
};
#define SCRATCH_BYTES (UINT64_C(16) << 20)
#define MEMORY_BYTES (UINT64_C(1) << 40)  // whatever the GPU has

// A range on the GPU.
typedef struct bench_copy {
  const qkv_page_range *range;
  qkv_cuda_memory at;  // 0: the kernels do not take its pages, or there is no memory
} bench_copy;

typedef struct bench_gpu {
  qkv_device device;  // first, so that one leads to the other
  qkv_cuda_driver driver;
  qkv_gpu_device *open;
  char name[QKV_GPU_NAME_MAX];
  // Numbers of kernels; those of shapes are the shapes'.
  size_t turns[QKV_GPU_KERNELS_MAX];  // by shape
  size_t merge;
  qkv_cuda_memory tables, scratch[CALLS];
  bool used[CALLS];
  bench_copy *copies;
  size_t copy_count;
  uint64_t attended;
} bench_gpu;

static bench_gpu *of(const qkv_device *device) {
  return (bench_gpu *)(uintptr_t)device;
}

// ---- Copies ----

static uint8_t *fill(const qkv_device_pages *pages, size_t *bytes) {
  const qkv_page_entry *entries = qkvi_range_entries(pages->range);
  const qkv_coder *coder = pages->range->coder;
  const qkv_device_layout layout = qkv_device_layout_of(coder);
  *bytes = layout.pages;
  for (uint32_t i = 0; i < pages->range->count; i++) {
    if (!qkv_device_takes_image(coder, entries[i].page)) return NULL;
    *bytes += qkv_device_page_bytes(coder, entries[i].page);
  }
  uint8_t *buffer = malloc(*bytes);
  if (buffer == NULL) abort();
  qkv_device_fill_tables(coder, buffer);
  size_t at = layout.pages;
  for (uint32_t i = 0; i < pages->range->count; i++) {
    ((uint64_t *)(void *)buffer)[i] = at + layout.image;
    at += qkv_device_fill_page(coder, entries[i].page, buffer + at);
  }
  return buffer;
}

static qkv_cuda_memory bring(bench_gpu *gpu, const qkv_device_pages *pages) {
  size_t bytes;
  uint8_t *buffer = fill(pages, &bytes);
  const qkv_cuda_memory at = buffer == NULL ? 0 : qkv_gpu_alloc(gpu->open, bytes);
  for (uint32_t i = 0; at != 0 && i < pages->range->count; i++) ((uint64_t *)(void *)buffer)[i] += at;
  const qkv_gpu_copy copy = {.to = at, .from = buffer, .bytes = bytes};
  const bool uploaded = at != 0 && qkv_gpu_upload(gpu->open, &copy, 1, NULL) == QKV_OK;
  free(buffer);
  return uploaded ? at : 0;
}

static uint64_t hold(qkv_device *device, const qkv_device_pages *pages, qkv_device_copy **copy) {
  bench_gpu *gpu = of(device);
  size_t i = 0;
  while (i < gpu->copy_count && gpu->copies[i].range != pages->range) i++;
  if (i == gpu->copy_count) {
    gpu->copies = realloc(gpu->copies, (i + 1) * sizeof *gpu->copies);
    if (gpu->copies == NULL) abort();
    gpu->copies[gpu->copy_count++] = (bench_copy){.range = pages->range, .at = bring(gpu, pages)};
  }
  gpu->attended += gpu->copies[i].at != 0;
  *copy = (qkv_device_copy *)(void *)gpu;
  return gpu->copies[i].at;
}

static void release(qkv_device *device, qkv_device_copy *copy) {
  (void)device, (void)copy;
}

static bool has(qkv_device *device, const qkv_page_range *range, uint32_t page, uint64_t serial) {
  (void)device, (void)range, (void)page, (void)serial;
  return false;
}

// Ranges go at the end, with the GPU's memory.
static void forget(qkv_device *device, const qkv_page_range *range) {
  (void)device, (void)range;
}

// ---- Calls ----

static bool begin(qkv_device *device, qkv_device_call *call) {
  bench_gpu *gpu = of(device);
  size_t i = 0;
  while (i < CALLS && gpu->used[i]) i++;
  qkv_gpu_call *own = i < CALLS ? qkv_gpu_begin(gpu->open) : NULL;
  if (own == NULL) return false;
  gpu->used[i] = true;
  *call = (qkv_device_call){.own = own,
                            .input = qkv_gpu_input(own),
                            .input_bytes = INPUT_BYTES,
                            .input_address = qkv_gpu_input_address(own),
                            .output = qkv_gpu_output(own),
                            .output_bytes = OUTPUT_BYTES,
                            .output_address = qkv_gpu_output_address(own),
                            .scratch_address = gpu->scratch[i],
                            .scratch_bytes = SCRATCH_BYTES,
                            .tables_address = gpu->tables};
  return true;
}

static bool submit(qkv_device *device, qkv_device_call *call, const qkv_simt_shape *shape,
                   const qkv_device_kernels *kernels) {
  const bench_gpu *gpu = of(device);
  size_t kernel = 0;
  while (qkv_simt_shape_at(kernel) != shape) kernel++;
  qkv_status status = QKV_OK;
  if (shape->turn != NULL)
    status = qkv_gpu_launch(call->own, gpu->turns[kernel], kernels->turn.count * QKV_SIMT_TURN_BLOCKS,
                            QKV_SIMT_WARPS * WARP, &kernels->turn, sizeof kernels->turn, NULL);
  if (status == QKV_OK)
    status = qkv_gpu_launch(call->own, kernel, kernels->attend.count * QKV_SIMT_RANGE_RUNS / QKV_SIMT_WARPS,
                            QKV_SIMT_WARPS * WARP, &kernels->attend, sizeof kernels->attend, NULL);
  if (status == QKV_OK)
    status = qkv_gpu_launch(call->own, gpu->merge, kernels->merge.count, QKV_SIMT_MERGE_THREADS, &kernels->merge,
                            sizeof kernels->merge, NULL);
  if (status != QKV_OK) (void)qkv_gpu_wait(call->own, NULL);
  return status == QKV_OK;
}

static bool wait(qkv_device *device, qkv_device_call *call) {
  (void)device;
  return qkv_gpu_wait(call->own, NULL) == QKV_OK;
}

static void end(qkv_device *device, qkv_device_call *call) {
  bench_gpu *gpu = of(device);
  for (size_t i = 0; i < CALLS; i++) gpu->used[i] &= gpu->scratch[i] != call->scratch_address;
  qkv_gpu_end(call->own);
}

// ---- Opening ----

static size_t list_kernels(bench_gpu *gpu, qkv_gpu_kernel kernels[QKV_GPU_KERNELS_MAX]) {
  const qkv_simt_shape *shape;
  size_t count = 0;
  for (; (shape = qkv_simt_shape_at(count)) != NULL; count++)
    kernels[count] = (qkv_gpu_kernel){shape->name, shape->shared_bytes};
  for (size_t i = 0; (shape = qkv_simt_shape_at(i)) != NULL; i++) {
    if (shape->turn == NULL) continue;
    gpu->turns[i] = count;
    kernels[count++] = (qkv_gpu_kernel){shape->turn, QKV_SIMT_TURN_SHARED_BYTES(shape->dim)};
  }
  gpu->merge = count;
  kernels[count++] = (qkv_gpu_kernel){"qkv_simt_merge_partials", 0};
  return count;
}

static qkv_status open_gpu(bench_gpu *gpu, qkv_error *error) {
  qkv_gpu_kernel kernels[QKV_GPU_KERNELS_MAX];
  qkv_simt_tables tables;
  size_t bytes;
  const qkv_gpu_config config = {.driver = &gpu->driver,
                                 .device = "0",
                                 .memory_bytes = MEMORY_BYTES,
                                 .image = qkv_simt_image(&bytes),
                                 .kernels = kernels,
                                 .kernel_count = list_kernels(gpu, kernels),
                                 .calls = CALLS,
                                 .input_bytes = INPUT_BYTES,
                                 .output_bytes = OUTPUT_BYTES,
                                 .staging_bytes = STAGING_BYTES,
                                 .timeout_ms = TIMEOUT_MS};
  if (config.image == NULL)
    return qkv_fail(error, QKV_UNAVAILABLE, "this program was built without kernels for GPUs");
  QKV_TRY(qkv_cuda_load(&gpu->driver, error));
  QKV_TRY(qkv_gpu_open(&config, &gpu->open, error));
  memcpy(gpu->name, qkv_gpu_read(gpu->open).name, sizeof gpu->name);
  qkv_simt_tables_fill(&tables);
  gpu->tables = qkv_gpu_alloc(gpu->open, sizeof tables);
  bool all = gpu->tables != 0;
  for (size_t i = 0; i < CALLS; i++) all &= (gpu->scratch[i] = qkv_gpu_alloc(gpu->open, SCRATCH_BYTES)) != 0;
  if (!all) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "the GPU has no memory for what kernels compute");
  return qkv_gpu_upload(gpu->open, &(qkv_gpu_copy){gpu->tables, &tables, sizeof tables}, 1, error);
}

qkv_status qkv_bench_gpu_open(qkv_device **device, qkv_error *error) {
  bench_gpu *gpu = calloc(1, sizeof *gpu);
  if (gpu == NULL) abort();
  gpu->device = (qkv_device){.hold = hold,
                             .release = release,
                             .has = has,
                             .forget = forget,
                             .begin = begin,
                             .submit = submit,
                             .wait = wait,
                             .end = end};
  *device = &gpu->device;
  const qkv_status status = open_gpu(gpu, error);
  if (status != QKV_OK) qkv_bench_gpu_close(device);
  return status;
}

const char *qkv_bench_gpu_name(const qkv_device *device) {
  return of(device)->name;
}

uint64_t qkv_bench_gpu_attended(const qkv_device *device) {
  return of(device)->attended;
}

void qkv_bench_gpu_close(qkv_device **device) {
  if (*device == NULL) return;
  bench_gpu *gpu = of(*device);
  *device = NULL;
  if (gpu->open != NULL) qkv_gpu_close(&gpu->open);
  free(gpu->copies);
  free(gpu);
}
