// The calls SystemSharedMemoryRegister, ...Status, ...Unregister, and their CudaSharedMemory counterparts.
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "qkv/v1/shared_memory.pb-c.h"
#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "storage/gpu/driver.h"

#define DESCRIPTOR_BYTES_MAX (UINT64_C(1) << 48)

static qkv_status allowed(const qkv_daemon *daemon, qkv_error *error) {
  if (daemon->regions != NULL) return QKV_OK;
  return qkv_fail(error, QKV_UNIMPLEMENTED, "this daemon runs without --allow-client-shm");
}

// ---- Register ----

static qkv_status may_register(const qkv_rpc_call *call, uid_t *user, qkv_error *error) {
  QKV_TRY(allowed(qkv_rpc_context(call), error));
  if (qkvi_call_user(call, user)) return QKV_OK;
  return qkv_fail(
      error, QKV_PERMISSION_DENIED,
      "shared memory is registered by a unix socket: of another connection the daemon does not know whose "
      "memory it may use");
}

static qkv_status add_region(const qkv_rpc_call *call, const qkvi_region_spec *spec, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  QKV_TRY(qkvi_regions_add(daemon->regions, spec, error));
  qkv_log(QKV_LOG_DEBUG, "shared memory registered", "{s:s, s:s*, s:s, s:I}", "region", spec->name, "tenant",
          qkvi_tenant_to_log(spec->tenant), "key", spec->kind == QKVI_REGION_CUDA ? "on the GPU" : spec->key, "bytes",
          (json_int_t)spec->bytes);
  return QKV_OK;
}

// Adds a region of what a token stands for.
static qkv_status add_passed(const qkv_rpc_call *call, const char *token, uid_t user, qkvi_region_spec *spec,
                             qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkvi_passed_set *set = NULL;
  if (daemon->passed == NULL)
    return qkv_fail(error, QKV_UNIMPLEMENTED, "descriptor is set, this daemon runs without --shm-listen");
  QKV_TRY(qkvi_passed_take(daemon->passed, token, user, &set, error));
  spec->descriptors = set->descriptors;
  spec->descriptor_count = set->count;
  const qkv_status status = add_region(call, spec, error);
  qkvi_passed_return(daemon->passed, &set, status == QKV_OK);
  return status;
}

static qkv_status add_system(const qkv_rpc_call *call, const Qkv__V1__SystemSharedMemoryRegisterRequest *request,
                             qkv_error *error) {
  const Qkv__V1__SystemSharedMemoryRegion *region = request->region;
  uid_t user = 0;
  QKV_TRY(may_register(call, &user, error));
  if (region == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "region is missing");
  qkvi_region_spec spec = {.kind = QKVI_REGION_SYSTEM,
                           .tenant = qkvi_call_tenant(call),
                           .name = region->name,
                           .key = region->key,
                           .owner = user,
                           .offset = region->offset,
                           .bytes = region->byte_size};
  if (request->descriptor[0] == '\0') return add_region(call, &spec, error);
  if (spec.key[0] != '\0')
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.key is set, and so is descriptor: a region has one of them");
  return add_passed(call, request->descriptor, user, &spec, error);
}

// Of raw_handle and descriptor there is one.
static qkv_status check_cuda(const Qkv__V1__CudaSharedMemoryRegisterRequest *request, qkv_error *error) {
  const bool passed = request->descriptor[0] != '\0';
  if (passed && request->raw_handle.len > 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "raw_handle is set, and so is descriptor: a region has one of them");
  if (!passed && request->raw_handle.len != QKV_CUDA_IPC_BYTES)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "raw_handle has %zu bytes, must be a cudaIpcMemHandle_t of %d",
                    request->raw_handle.len, QKV_CUDA_IPC_BYTES);
  if (!passed || (request->descriptor_bytes > 0 && request->descriptor_bytes <= DESCRIPTOR_BYTES_MAX)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "descriptor_bytes is %" PRIu64 ", must be the bytes of the allocation behind each",
                  request->descriptor_bytes);
}

static qkv_status add_cuda(const qkv_rpc_call *call, const Qkv__V1__CudaSharedMemoryRegisterRequest *request,
                           qkv_error *error) {
  const Qkv__V1__CudaSharedMemoryRegion *region = request->region;
  uid_t user = 0;
  QKV_TRY(may_register(call, &user, error));
  if (region == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "region is missing");
  QKV_TRY(check_cuda(request, error));
  qkvi_region_spec spec = {.kind = QKVI_REGION_CUDA,
                           .tenant = qkvi_call_tenant(call),
                           .name = region->name,
                           .device_id = region->device_id,
                           .handle = request->raw_handle.data,
                           .descriptor_bytes = request->descriptor_bytes,
                           .offset = request->offset,
                           .bytes = region->byte_size};
  if (request->descriptor[0] != '\0') return add_passed(call, request->descriptor, user, &spec, error);
  return add_region(call, &spec, error);
}

static void register_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__SystemSharedMemoryRegisterRequest *request = qkv_rpc_state(call);
  Qkv__V1__SystemSharedMemoryRegisterResponse response = QKV__V1__SYSTEM_SHARED_MEMORY_REGISTER_RESPONSE__INIT;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (add_system(call, request, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_register(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__system_shared_memory_register_request__descriptor, QKVI_WAIT_LAYERS,
                   register_job);
}

static void register_cuda_job(void *context) {
  qkv_rpc_call *call = context;
  Qkv__V1__CudaSharedMemoryRegisterResponse response = QKV__V1__CUDA_SHARED_MEMORY_REGISTER_RESPONSE__INIT;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (add_cuda(call, qkv_rpc_state(call), &error) != QKV_OK) return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

// The driver may take its time, as the disk does.
static void on_register_cuda(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__cuda_shared_memory_register_request__descriptor,
                   QKVI_WAIT_LAYERS | QKVI_WAIT_DISK, register_cuda_job);
}

// ---- Status ----

typedef struct region_list {
  ProtobufCMessage **regions;
  size_t count, capacity;
} region_list;

static char *copy_text(const char *text) {
  char *copy = strdup(text);
  if (copy == NULL) abort();
  return copy;
}

static void *make_message(size_t bytes) {
  void *message = malloc(bytes);
  if (message == NULL) abort();
  return message;
}

static ProtobufCMessage *system_message(const qkvi_region_spec *spec) {
  Qkv__V1__SystemSharedMemoryRegion *region = make_message(sizeof *region);
  qkv__v1__system_shared_memory_region__init(region);
  region->name = copy_text(spec->name);
  region->key = copy_text(spec->key);
  region->offset = spec->offset;
  region->byte_size = spec->bytes;
  return &region->base;
}

static ProtobufCMessage *cuda_message(const qkvi_region_spec *spec) {
  Qkv__V1__CudaSharedMemoryRegion *region = make_message(sizeof *region);
  qkv__v1__cuda_shared_memory_region__init(region);
  region->name = copy_text(spec->name);
  region->device_id = spec->device_id;
  region->byte_size = spec->bytes;
  return &region->base;
}

static void list_region(void *context, const qkvi_region_spec *spec) {
  region_list *list = context;
  if (list->count == list->capacity) {
    list->capacity = 2 * list->capacity + 8;
    list->regions = realloc((void *)list->regions, list->capacity * sizeof *list->regions);
    if (list->regions == NULL) abort();
  }
  list->regions[list->count++] = spec->kind == QKVI_REGION_CUDA ? cuda_message(spec) : system_message(spec);
}

static void free_list(region_list *list) {
  for (size_t i = 0; i < list->count; i++) qkvi_control_free(list->regions[i]);
  free((void *)list->regions);
}

static qkv_status list_all(const qkv_rpc_call *call, qkvi_region_kind kind, const char *name, region_list *list,
                           qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  QKV_TRY(allowed(daemon, error));
  return qkvi_regions_each(daemon->regions, kind, qkvi_call_tenant(call), name, list_region, list, error);
}

static void status_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__SystemSharedMemoryStatusRequest *request = qkv_rpc_state(call);
  Qkv__V1__SystemSharedMemoryStatusResponse response = QKV__V1__SYSTEM_SHARED_MEMORY_STATUS_RESPONSE__INIT;
  region_list list = {0};
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (list_all(call, QKVI_REGION_SYSTEM, request->name, &list, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  response.regions = (Qkv__V1__SystemSharedMemoryRegion **)list.regions;
  response.n_regions = list.count;
  qkvi_control_reply(call, &response.base);
  free_list(&list);
}

static void status_cuda_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__CudaSharedMemoryStatusRequest *request = qkv_rpc_state(call);
  Qkv__V1__CudaSharedMemoryStatusResponse response = QKV__V1__CUDA_SHARED_MEMORY_STATUS_RESPONSE__INIT;
  region_list list = {0};
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (list_all(call, QKVI_REGION_CUDA, request->name, &list, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  response.regions = (Qkv__V1__CudaSharedMemoryRegion **)list.regions;
  response.n_regions = list.count;
  qkvi_control_reply(call, &response.base);
  free_list(&list);
}

static void on_status(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__system_shared_memory_status_request__descriptor, QKVI_WAIT_LAYERS,
                   status_job);
}

static void on_status_cuda(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__cuda_shared_memory_status_request__descriptor, QKVI_WAIT_LAYERS,
                   status_cuda_job);
}

// ---- Unregister ----

static qkv_status remove_regions(const qkv_rpc_call *call, qkvi_region_kind kind, const char *name,
                                 qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  QKV_TRY(allowed(daemon, error));
  return qkvi_regions_remove(daemon->regions, kind, qkvi_call_tenant(call), name, error);
}

static void unregister_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__SystemSharedMemoryUnregisterRequest *request = qkv_rpc_state(call);
  Qkv__V1__SystemSharedMemoryUnregisterResponse response = QKV__V1__SYSTEM_SHARED_MEMORY_UNREGISTER_RESPONSE__INIT;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (remove_regions(call, QKVI_REGION_SYSTEM, request->name, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void unregister_cuda_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__CudaSharedMemoryUnregisterRequest *request = qkv_rpc_state(call);
  Qkv__V1__CudaSharedMemoryUnregisterResponse response = QKV__V1__CUDA_SHARED_MEMORY_UNREGISTER_RESPONSE__INIT;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (remove_regions(call, QKVI_REGION_CUDA, request->name, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_unregister(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__system_shared_memory_unregister_request__descriptor, QKVI_WAIT_LAYERS,
                   unregister_job);
}

static void on_unregister_cuda(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__cuda_shared_memory_unregister_request__descriptor, QKVI_WAIT_LAYERS,
                   unregister_cuda_job);
}

const qkv_rpc_method qkvi_shared_memory_methods[] = {
    {.path = "/qkv.v1.SharedMemory/SystemSharedMemoryRegister", .message = on_register, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.SharedMemory/SystemSharedMemoryStatus", .message = on_status, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.SharedMemory/SystemSharedMemoryUnregister",
     .message = on_unregister,
     .destroy = qkvi_control_free},
    {.path = "/qkv.v1.SharedMemory/CudaSharedMemoryRegister",
     .message = on_register_cuda,
     .destroy = qkvi_control_free},
    {.path = "/qkv.v1.SharedMemory/CudaSharedMemoryStatus", .message = on_status_cuda, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.SharedMemory/CudaSharedMemoryUnregister",
     .message = on_unregister_cuda,
     .destroy = qkvi_control_free},
    {0}};
