#include "storage/gpu/device.h"

#include <assert.h>
#include <jansson.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "engine/base/log.h"

enum {
  HALVES = 2,
  SPIN_NS = 100000,  // a call is polled without sleep: a sleep takes 50 µs and more, an attend as long
  SLEEP_NS = 20000,
};

typedef struct half {
  uint8_t *at;
  qkv_cuda_event done;
  bool used;            // a copy from it, or to it, may be under way
  size_t copy, offset;  // of a download: what lies in it begins there
} half;

struct qkv_gpu_call {
  qkv_gpu_device *device;
  void *input, *output;
  qkv_cuda_memory input_address, output_address;
  qkv_cuda_stream stream;
  qkv_cuda_event done;
  bool launched;
  qkv_gpu_call *next;
};

struct qkv_gpu_device {
  const qkv_cuda_driver *driver;
  qkv_gpu_info info;  // immutable fields
  int ordinal;
  int64_t timeout_ns;
  qkv_cuda_context context;
  qkv_cuda_module module;
  qkv_cuda_function functions[QKV_GPU_KERNELS_MAX];
  uint32_t shared_bytes[QKV_GPU_KERNELS_MAX];
  size_t kernel_count;
  qkv_gpu_heap *heap;

  pthread_mutex_t lock;  // of the following fields
  bool down;
  char reason[QKV_ERROR_TEXT_MAX];
  qkv_gpu_call *available;
  size_t under_way;

  _Atomic uint64_t ended, uploaded;

  pthread_mutex_t copying;  // of the following fields; taken before `lock`
  qkv_cuda_stream stream;
  half halves[HALVES];
  size_t staging_bytes;

  size_t call_count;
  qkv_gpu_call calls[QKV_GPU_CALLS_MAX];
};

static int64_t now_ns(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

// ---- Failure ----

static qkv_status end_of_use(qkv_gpu_device *device, qkv_error *error, const char *what, const char *why) {
  pthread_mutex_lock(&device->lock);
  const bool first = !device->down;
  device->down = true;
  if (first) snprintf(device->reason, sizeof device->reason, "%s: %s", what, why);
  pthread_mutex_unlock(&device->lock);
  if (first)
    qkv_log(QKV_LOG_ERROR, "a GPU is not used any more", "{s:s, s:s, s:s, s:s}", "gpu", device->info.name, "uuid",
            device->info.uuid, "call", what, "error", why);
  return qkv_fail(error, QKV_UNAVAILABLE, "GPU %s: %s: %s", device->info.name, what, why);
}

// A result of the driver as a status.
static qkv_status judge(qkv_gpu_device *device, int result, const char *what, qkv_error *error) {
  if (result == QKV_CUDA_SUCCESS) return QKV_OK;
  if (result == QKV_CUDA_OUT_OF_MEMORY)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "GPU %s: %s: out of memory", device->info.name, what);
  char why[QKV_ERROR_TEXT_MAX / 2];
  snprintf(why, sizeof why, "%s (%d)", qkv_cuda_result_name(device->driver, result), result);
  return end_of_use(device, error, what, why);
}

#define CHECK(device, error, name, ...) QKV_TRY(judge(device, (device)->driver->name(__VA_ARGS__), "cu" #name, error))

bool qkv_gpu_is_up(qkv_gpu_device *device) {
  pthread_mutex_lock(&device->lock);
  const bool up = !device->down;
  pthread_mutex_unlock(&device->lock);
  return up;
}

// Makes the context current for this thread, as every function of the driver needs it.
static qkv_status enter(qkv_gpu_device *device, qkv_error *error) {
  if (!qkv_gpu_is_up(device))
    return qkv_fail(error, QKV_UNAVAILABLE, "GPU %s is not used any more: %s", device->info.name, device->reason);
  CHECK(device, error, CtxSetCurrent, device->context);
  return QKV_OK;
}

// ---- Opening ----

static void write_uuid(const qkv_cuda_uuid *uuid, char text[QKV_GPU_NAME_MAX]) {
  const uint8_t *b = uuid->bytes;
  snprintf(text, QKV_GPU_NAME_MAX, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
           b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

// Whether `wanted` names the device: by its number, or by its UUID.
static bool is_named(const char *wanted, int ordinal, const char *uuid) {
  char number[16];
  snprintf(number, sizeof number, "%d", ordinal);
  if (strcmp(wanted, number) == 0) return true;
  if (strncmp(wanted, "GPU-", 4) == 0 || strncmp(wanted, "MIG-", 4) == 0) wanted += 4;
  return strcasecmp(wanted, uuid) == 0;
}

// Devices that say nothing of themselves are passed over: another one may be meant.
qkv_status qkv_gpu_resolve(const qkv_cuda_driver *driver, const char *wanted, int *number, qkv_error *error) {
  int count = 0, device;
  const int result = driver->DeviceGetCount(&count);
  if (result != QKV_CUDA_SUCCESS)
    return qkv_fail(error, QKV_UNAVAILABLE, "cuDeviceGetCount: %s (%d)", qkv_cuda_result_name(driver, result),
                    result);
  for (int i = 0; i < count; i++) {
    qkv_cuda_uuid uuid;
    char text[QKV_GPU_NAME_MAX] = "";
    if (driver->DeviceGet(&device, i) == QKV_CUDA_SUCCESS && driver->DeviceGetUuid(&uuid, device) == QKV_CUDA_SUCCESS)
      write_uuid(&uuid, text);
    *number = i;
    if (is_named(wanted, i, text)) return QKV_OK;
  }
  return qkv_fail(error, QKV_NOT_FOUND, "no GPU %s; the driver has %d", wanted, count);
}

static qkv_status find_device(qkv_gpu_device *device, const char *wanted, qkv_error *error) {
  int number = 0;
  qkv_cuda_uuid uuid;
  QKV_TRY(qkv_gpu_resolve(device->driver, wanted, &number, error));
  CHECK(device, error, DeviceGet, &device->ordinal, number);
  CHECK(device, error, DeviceGetUuid, &uuid, device->ordinal);
  write_uuid(&uuid, device->info.uuid);
  device->info.ordinal = number;
  return QKV_OK;
}

static qkv_status read_device(qkv_gpu_device *device, qkv_error *error) {
  qkv_gpu_info *info = &device->info;
  size_t bytes = 0;
  CHECK(device, error, DeviceGetName, info->name, sizeof info->name, device->ordinal);
  CHECK(device, error, DeviceTotalMem, &bytes, device->ordinal);
  CHECK(device, error, DeviceGetAttribute, &info->processors, QKV_CUDA_ATTRIBUTE_PROCESSORS, device->ordinal);
  CHECK(device, error, DeviceGetAttribute, &info->major, QKV_CUDA_ATTRIBUTE_MAJOR, device->ordinal);
  CHECK(device, error, DeviceGetAttribute, &info->minor, QKV_CUDA_ATTRIBUTE_MINOR, device->ordinal);
  info->bytes_total = bytes;
  return QKV_OK;
}

static qkv_status load_kernels(qkv_gpu_device *device, const qkv_gpu_config *config, qkv_error *error) {
  CHECK(device, error, ModuleLoadData, &device->module, config->image);
  for (size_t i = 0; i < config->kernel_count; i++) {
    qkv_cuda_function *function = &device->functions[i];
    const uint32_t shared = config->kernels[i].shared_bytes;
    CHECK(device, error, ModuleGetFunction, function, device->module, config->kernels[i].name);
    if (shared > 0) CHECK(device, error, FuncSetAttribute, *function, QKV_CUDA_FUNCTION_SHARED_MAX, (int)shared);
    device->shared_bytes[i] = shared;
  }
  device->kernel_count = config->kernel_count;
  return QKV_OK;
}

static qkv_status make_pinned(qkv_gpu_device *device, size_t bytes, void **at, qkv_cuda_memory *address,
                              qkv_error *error) {
  CHECK(device, error, MemHostAlloc, at, bytes, QKV_CUDA_HOST_MAPPED);
  CHECK(device, error, MemHostGetDevicePointer, address, *at, 0);
  return QKV_OK;
}

static qkv_status make_calls(qkv_gpu_device *device, const qkv_gpu_config *config, qkv_error *error) {
  for (size_t i = 0; i < config->calls; i++) {
    qkv_gpu_call *call = &device->calls[i];
    call->device = device;
    device->call_count = i + 1;
    QKV_TRY(make_pinned(device, config->input_bytes, &call->input, &call->input_address, error));
    QKV_TRY(make_pinned(device, config->output_bytes, &call->output, &call->output_address, error));
    CHECK(device, error, StreamCreate, &call->stream, QKV_CUDA_STREAM_NON_BLOCKING);
    CHECK(device, error, EventCreate, &call->done, QKV_CUDA_EVENT_UNTIMED);
    call->next = device->available;
    device->available = call;
  }
  return QKV_OK;
}

static qkv_status make_staging(qkv_gpu_device *device, const qkv_gpu_config *config, qkv_error *error) {
  device->staging_bytes = config->staging_bytes;
  CHECK(device, error, StreamCreate, &device->stream, QKV_CUDA_STREAM_NON_BLOCKING);
  for (size_t i = 0; i < HALVES; i++) {
    CHECK(device, error, MemHostAlloc, (void **)&device->halves[i].at, config->staging_bytes, 0);
    CHECK(device, error, EventCreate, &device->halves[i].done, QKV_CUDA_EVENT_UNTIMED);
  }
  return QKV_OK;
}

static uint64_t take_piece(void *context, uint64_t bytes) {
  qkv_gpu_device *device = context;
  qkv_cuda_memory at = 0;
  if (enter(device, NULL) != QKV_OK) return 0;
  return judge(device, device->driver->MemAlloc(&at, bytes), "cuMemAlloc", NULL) == QKV_OK ? at : 0;
}

static void give_piece(void *context, uint64_t at, uint64_t bytes) {
  qkv_gpu_device *device = context;
  (void)bytes;
  if (!device->down) device->driver->MemFree(at);
}

static qkv_status open_device(qkv_gpu_device *device, const qkv_gpu_config *config, qkv_error *error) {
  QKV_TRY(find_device(device, config->device, error));
  QKV_TRY(read_device(device, error));
  CHECK(device, error, DevicePrimaryCtxRetain, &device->context, device->ordinal);
  QKV_TRY(enter(device, error));
  QKV_TRY(load_kernels(device, config, error));
  QKV_TRY(make_calls(device, config, error));
  QKV_TRY(make_staging(device, config, error));
  return QKV_OK;
}

qkv_status qkv_gpu_open(const qkv_gpu_config *config, qkv_gpu_device **device, qkv_error *error) {
  assert(config->calls > 0 && config->calls <= QKV_GPU_CALLS_MAX && config->kernel_count <= QKV_GPU_KERNELS_MAX);
  qkv_gpu_device *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  made->driver = config->driver;
  made->timeout_ns = config->timeout_ms * 1000000;
  snprintf(made->info.name, sizeof made->info.name, "%s", config->device);
  pthread_mutex_init(&made->lock, NULL);
  pthread_mutex_init(&made->copying, NULL);
  made->heap = qkv_gpu_heap_create(config->memory_bytes,
                                   (qkv_gpu_pieces){.take = take_piece, .give = give_piece, .context = made});
  const qkv_status status = open_device(made, config, error);
  if (status != QKV_OK) qkv_gpu_close(&made);
  *device = made;
  return status;
}

// ---- Closing ----

static void free_calls(qkv_gpu_device *device) {
  const qkv_cuda_driver *driver = device->driver;
  for (size_t i = 0; i < device->call_count; i++) {
    qkv_gpu_call *call = &device->calls[i];
    if (call->done != NULL) driver->EventDestroy(call->done);
    if (call->stream != NULL) driver->StreamDestroy(call->stream);
    if (call->input != NULL) driver->MemFreeHost(call->input);
    if (call->output != NULL) driver->MemFreeHost(call->output);
  }
}

static void free_staging(qkv_gpu_device *device) {
  const qkv_cuda_driver *driver = device->driver;
  for (size_t i = 0; i < HALVES; i++) {
    if (device->halves[i].done != NULL) driver->EventDestroy(device->halves[i].done);
    if (device->halves[i].at != NULL) driver->MemFreeHost(device->halves[i].at);
  }
  if (device->stream != NULL) driver->StreamDestroy(device->stream);
}

// Nothing of a device that is down is freed one by one: a kernel that did not end may still write to pinned memory.
// The reset ends all kernels and frees everything in the context.
static void leave_context(qkv_gpu_device *device) {
  const qkv_cuda_driver *driver = device->driver;
  if (device->down) {
    qkv_gpu_heap_destroy(&device->heap);
    driver->DevicePrimaryCtxReset(device->ordinal);
  } else {
    driver->CtxSetCurrent(device->context);
    free_calls(device);
    free_staging(device);
    qkv_gpu_heap_destroy(&device->heap);
    if (device->module != NULL) driver->ModuleUnload(device->module);
  }
  driver->DevicePrimaryCtxRelease(device->ordinal);
}

void qkv_gpu_close(qkv_gpu_device **device) {
  qkv_gpu_device *old = *device;
  if (old == NULL) return;
  *device = NULL;
  assert(old->under_way == 0);
  if (old->context != NULL) leave_context(old);
  qkv_gpu_heap_destroy(&old->heap);
  pthread_mutex_destroy(&old->lock);
  pthread_mutex_destroy(&old->copying);
  free(old);
}

// ---- Memory ----

qkv_gpu_info qkv_gpu_read(qkv_gpu_device *device) {
  qkv_gpu_info info = device->info;
  info.heap = qkv_gpu_heap_read(device->heap);
  info.calls = atomic_load_explicit(&device->ended, memory_order_relaxed);
  info.uploaded_bytes = atomic_load_explicit(&device->uploaded, memory_order_relaxed);
  pthread_mutex_lock(&device->lock);
  info.up = !device->down;
  memcpy(info.reason, device->reason, sizeof info.reason);
  pthread_mutex_unlock(&device->lock);
  return info;
}

qkv_cuda_memory qkv_gpu_alloc(qkv_gpu_device *device, uint64_t bytes) {
  return qkv_gpu_is_up(device) ? qkv_gpu_heap_alloc(device->heap, bytes) : 0;
}

void qkv_gpu_free(qkv_gpu_device *device, qkv_cuda_memory at, uint64_t bytes) {
  qkv_gpu_heap_free(device->heap, at, bytes);
}

// ---- Waiting ----

static qkv_status wait_for(qkv_gpu_device *device, qkv_cuda_event event, const char *what, qkv_error *error) {
  const int64_t begin = now_ns();
  for (;;) {
    const int result = device->driver->EventQuery(event);
    if (result != QKV_CUDA_NOT_READY) return judge(device, result, what, error);
    const int64_t waited = now_ns() - begin;
    if (waited > device->timeout_ns) return end_of_use(device, error, what, "did not end in time");
    if (waited < SPIN_NS)
      sched_yield();
    else
      nanosleep(&(struct timespec){.tv_nsec = SLEEP_NS}, NULL);
  }
}

// Kernels or copies may still run, and read and write what would be reused: no error leaves the device as it is.
static qkv_status while_running(qkv_gpu_device *device, qkv_status status, const char *what, qkv_error *error) {
  if (status != QKV_RESOURCE_EXHAUSTED) return status;
  return end_of_use(device, error, what, "out of memory while it ran");
}

// ---- Uploads ----

static qkv_status wait_for_half(qkv_gpu_device *device, half *of, qkv_error *error) {
  if (!of->used) return QKV_OK;
  QKV_TRY(wait_for(device, of->done, "an upload", error));
  of->used = false;
  return QKV_OK;
}

// As much of the copies from `*copy`, `*offset` on as fits into a half.
static qkv_status fill_half(qkv_gpu_device *device, half *of, const qkv_gpu_copy *copies, size_t count, size_t *copy,
                            size_t *offset, qkv_error *error) {
  size_t filled = 0;
  of->used = true;
  while (*copy < count && filled < device->staging_bytes) {
    const qkv_gpu_copy *from = &copies[*copy];
    const size_t left = from->bytes - *offset, space = device->staging_bytes - filled;
    const size_t bytes = left < space ? left : space;
    memcpy(of->at + filled, (const uint8_t *)from->from + *offset, bytes);
    CHECK(device, error, MemcpyHtoDAsync, from->to + *offset, of->at + filled, bytes, device->stream);
    filled += bytes;
    *offset += bytes;
    if (*offset == from->bytes) {
      (*copy)++;
      *offset = 0;
    }
  }
  CHECK(device, error, EventRecord, of->done, device->stream);
  atomic_fetch_add_explicit(&device->uploaded, filled, memory_order_relaxed);
  return QKV_OK;
}

static qkv_status upload(qkv_gpu_device *device, const qkv_gpu_copy *copies, size_t count, qkv_error *error) {
  size_t copy = 0, offset = 0;
  for (size_t turn = 0; copy < count; turn++) {
    half *of = &device->halves[turn % HALVES];
    QKV_TRY(wait_for_half(device, of, error));
    QKV_TRY(fill_half(device, of, copies, count, &copy, &offset, error));
  }
  for (size_t i = 0; i < HALVES; i++) QKV_TRY(wait_for_half(device, &device->halves[i], error));
  return QKV_OK;
}

qkv_status qkv_gpu_upload(qkv_gpu_device *device, const qkv_gpu_copy *copies, size_t count, qkv_error *error) {
  pthread_mutex_lock(&device->copying);
  qkv_status status = enter(device, error);
  if (status == QKV_OK) status = while_running(device, upload(device, copies, count, error), "an upload", error);
  pthread_mutex_unlock(&device->copying);
  return status;
}

// ---- Downloads ----

// Asks for as much of the copies from `*copy`, `*offset` on as fits into a half.
static qkv_status ask_for_half(qkv_gpu_device *device, half *to, const qkv_gpu_copy_back *copies, size_t count,
                               size_t *copy, size_t *offset, qkv_error *error) {
  size_t filled = 0;
  to->used = true;
  to->copy = *copy;
  to->offset = *offset;
  while (*copy < count && filled < device->staging_bytes) {
    const size_t left = copies[*copy].bytes - *offset, space = device->staging_bytes - filled;
    const size_t bytes = left < space ? left : space;
    CHECK(device, error, MemcpyDtoHAsync, to->at + filled, copies[*copy].from + *offset, bytes, device->stream);
    filled += bytes;
    *offset += bytes;
    if (*offset == copies[*copy].bytes) {
      (*copy)++;
      *offset = 0;
    }
  }
  CHECK(device, error, EventRecord, to->done, device->stream);
  return QKV_OK;
}

// Waits for what a half was asked for, and hands it out.
static qkv_status empty_half(qkv_gpu_device *device, half *of, const qkv_gpu_copy_back *copies, size_t count,
                             qkv_error *error) {
  if (!of->used) return QKV_OK;
  QKV_TRY(wait_for(device, of->done, "a download", error));
  of->used = false;
  size_t taken = 0, offset = of->offset;
  for (size_t i = of->copy; i < count && taken < device->staging_bytes; i++, offset = 0) {
    const size_t left = copies[i].bytes - offset, space = device->staging_bytes - taken;
    const size_t bytes = left < space ? left : space;
    memcpy((uint8_t *)copies[i].to + offset, of->at + taken, bytes);
    taken += bytes;
  }
  return QKV_OK;
}

static qkv_status download(qkv_gpu_device *device, const qkv_gpu_copy_back *copies, size_t count, qkv_error *error) {
  size_t copy = 0, offset = 0, turn = 0;
  for (; copy < count; turn++) {
    half *to = &device->halves[turn % HALVES];
    QKV_TRY(empty_half(device, to, copies, count, error));
    QKV_TRY(ask_for_half(device, to, copies, count, &copy, &offset, error));
  }
  for (size_t i = 0; i < HALVES; i++)
    QKV_TRY(empty_half(device, &device->halves[turn++ % HALVES], copies, count, error));
  return QKV_OK;
}

qkv_status qkv_gpu_download(qkv_gpu_device *device, const qkv_gpu_copy_back *copies, size_t count, qkv_error *error) {
  pthread_mutex_lock(&device->copying);
  qkv_status status = enter(device, error);
  if (status == QKV_OK) status = while_running(device, download(device, copies, count, error), "a download", error);
  pthread_mutex_unlock(&device->copying);
  return status;
}

// ---- Copies within the device ----

static qkv_status copy_within(qkv_gpu_device *device, qkv_cuda_memory to, qkv_cuda_memory from, size_t bytes,
                              qkv_error *error) {
  half *of = &device->halves[0];  // for its event
  QKV_TRY(wait_for_half(device, of, error));
  CHECK(device, error, MemcpyDtoDAsync, to, from, bytes, device->stream);
  CHECK(device, error, EventRecord, of->done, device->stream);
  return wait_for(device, of->done, "a copy", error);
}

qkv_status qkv_gpu_copy_within(qkv_gpu_device *device, qkv_cuda_memory to, qkv_cuda_memory from, size_t bytes,
                               qkv_error *error) {
  pthread_mutex_lock(&device->copying);
  qkv_status status = enter(device, error);
  if (status == QKV_OK) status = while_running(device, copy_within(device, to, from, bytes, error), "a copy", error);
  pthread_mutex_unlock(&device->copying);
  return status;
}

// ---- Memory of other processes ----

// Errors that the driver's contexts do not recover from: the device's, not of what was opened.
static bool is_of_device(int result) {
  static const int results[] = {214, 700, 702, 709, 714, 715, 716, 717, 718, 719};
  for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
    if (results[i] == result) return true;
  }
  return false;
}

static qkv_status judge_lent(qkv_gpu_device *device, int result, const char *what, qkv_error *error) {
  if (result == QKV_CUDA_SUCCESS || result == QKV_CUDA_OUT_OF_MEMORY || is_of_device(result))
    return judge(device, result, what, error);
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "GPU %s: %s: %s (%d)", device->info.name, what,
                  qkv_cuda_result_name(device->driver, result), result);
}

#define CHECK_LENT(device, error, name, ...) \
  QKV_TRY(judge_lent(device, (device)->driver->name(__VA_ARGS__), "cu" #name, error))

qkv_status qkv_gpu_open_handle(qkv_gpu_device *device, const qkv_cuda_ipc *handle, qkv_gpu_lent *lent,
                               qkv_error *error) {
  qkv_cuda_memory base = 0;
  size_t bytes = 0;
  *lent = (qkv_gpu_lent){0};
  QKV_TRY(enter(device, error));
  CHECK_LENT(device, error, IpcOpenMemHandle, &lent->at, *handle, QKV_CUDA_IPC_LAZY_PEER_ACCESS);
  const qkv_status status =
      judge_lent(device, device->driver->MemGetAddressRange(&base, &bytes, lent->at), "cuMemGetAddressRange", error);
  lent->bytes = bytes;
  if (status != QKV_OK) qkv_gpu_close_lent(device, lent);
  return status;
}

static qkv_status map_descriptor(qkv_gpu_device *device, int descriptor, qkv_cuda_memory at, uint64_t bytes,
                                 qkv_error *error) {
  qkv_cuda_allocation allocation = 0;
  CHECK_LENT(device, error, MemImportFromShareableHandle, &allocation, (void *)(intptr_t)descriptor,
             QKV_CUDA_DESCRIPTOR);
  const qkv_status status =
      judge_lent(device, device->driver->MemMap(at, bytes, 0, allocation, 0), "cuMemMap", error);
  device->driver->MemRelease(allocation);  // the mapping keeps it
  return status;
}

qkv_status qkv_gpu_open_descriptors(qkv_gpu_device *device, const int *descriptors, size_t count, uint64_t each,
                                    qkv_gpu_lent *lent, qkv_error *error) {
  const qkv_cuda_access access = {QKV_CUDA_PLACE_DEVICE, device->ordinal, QKV_CUDA_READ_WRITE};
  *lent = (qkv_gpu_lent){0};
  assert(count > 0 && each > 0 && each <= UINT64_MAX / count);
  QKV_TRY(enter(device, error));
  CHECK_LENT(device, error, MemAddressReserve, &lent->at, count * each, 0, 0, 0);
  lent->reserved = count * each;
  qkv_status status = QKV_OK;
  for (size_t i = 0; i < count && status == QKV_OK; i++) {
    status = map_descriptor(device, descriptors[i], lent->at + lent->bytes, each, error);
    if (status == QKV_OK) lent->bytes += each;
  }
  if (status == QKV_OK)
    status =
        judge_lent(device, device->driver->MemSetAccess(lent->at, lent->bytes, &access, 1), "cuMemSetAccess", error);
  if (status != QKV_OK) qkv_gpu_close_lent(device, lent);
  return status;
}

void qkv_gpu_close_lent(qkv_gpu_device *device, const qkv_gpu_lent *lent) {
  if (enter(device, NULL) != QKV_OK) return;  // the reset ends all mappings
  if (lent->reserved == 0) {
    device->driver->IpcCloseMemHandle(lent->at);
    return;
  }
  if (lent->bytes > 0) device->driver->MemUnmap(lent->at, lent->bytes);
  device->driver->MemAddressFree(lent->at, lent->reserved);
}

// ---- Calls ----

qkv_gpu_call *qkv_gpu_begin(qkv_gpu_device *device) {
  pthread_mutex_lock(&device->lock);
  qkv_gpu_call *call = device->down ? NULL : device->available;
  if (call != NULL) {
    device->available = call->next;
    device->under_way++;
  }
  pthread_mutex_unlock(&device->lock);
  return call;
}

void *qkv_gpu_input(qkv_gpu_call *call) {
  return call->input;
}
const void *qkv_gpu_output(qkv_gpu_call *call) {
  return call->output;
}
qkv_cuda_memory qkv_gpu_input_address(const qkv_gpu_call *call) {
  return call->input_address;
}
qkv_cuda_memory qkv_gpu_output_address(const qkv_gpu_call *call) {
  return call->output_address;
}

qkv_status qkv_gpu_launch(qkv_gpu_call *call, size_t kernel, uint32_t blocks, uint32_t threads, const void *arguments,
                          size_t argument_bytes, qkv_error *error) {
  qkv_gpu_device *device = call->device;
  assert(kernel < device->kernel_count && argument_bytes <= QKV_GPU_ARGUMENT_BYTES_MAX);
  void *extra[] = {QKV_CUDA_ARGUMENTS, (void *)(uintptr_t)arguments, QKV_CUDA_ARGUMENT_BYTES, &argument_bytes,
                   QKV_CUDA_ARGUMENTS_END};
  QKV_TRY(enter(device, error));
  CHECK(device, error, LaunchKernel, device->functions[kernel], blocks, 1, 1, threads, 1, 1,
        device->shared_bytes[kernel], call->stream, NULL, extra);
  call->launched = true;
  return QKV_OK;
}

qkv_status qkv_gpu_wait(qkv_gpu_call *call, qkv_error *error) {
  qkv_gpu_device *device = call->device;
  if (!call->launched) return QKV_OK;
  qkv_status status = enter(device, error);
  if (status == QKV_OK)
    status = judge(device, device->driver->EventRecord(call->done, call->stream), "cuEventRecord", error);
  if (status == QKV_OK) status = wait_for(device, call->done, "a call", error);
  status = while_running(device, status, "a call", error);
  call->launched = false;
  if (status == QKV_OK) atomic_fetch_add_explicit(&device->ended, 1, memory_order_relaxed);
  return status;
}

void qkv_gpu_end(qkv_gpu_call *call) {
  qkv_gpu_device *device = call->device;
  assert(!call->launched);
  pthread_mutex_lock(&device->lock);
  assert(device->under_way > 0);
  device->under_way--;
  call->next = device->available;
  device->available = call;
  pthread_mutex_unlock(&device->lock);
}
