// SystemSharedMemoryRegister, ...Status, ...Unregister.
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

static qkv_status allowed(const qkv_daemon *daemon, qkv_error *error) {
  if (daemon->regions != NULL) return QKV_OK;
  return qkv_fail(error, QKV_UNIMPLEMENTED, "this daemon runs without --allow-client-shm");
}

// ---- Register ----

static qkv_status add_region(const qkv_rpc_call *call, const Qkv__V1__SystemSharedMemoryRegion *region,
                             qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  uid_t user = 0;
  QKV_TRY(allowed(daemon, error));
  if (region == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "region is missing");
  if (!qkvi_call_user(call, &user))
    return qkv_fail(
        error, QKV_PERMISSION_DENIED,
        "shared memory is registered by a unix socket: of another connection the daemon does not know whose "
        "memory it may use");
  const qkvi_region_spec spec = {.tenant = qkvi_call_tenant(call),
                                 .name = region->name,
                                 .key = region->key,
                                 .offset = region->offset,
                                 .bytes = region->byte_size};
  QKV_TRY(qkvi_regions_add(daemon->regions, &spec, user, error));
  qkv_log(QKV_LOG_DEBUG, "shared memory registered", "{s:s, s:s*, s:s, s:I}", "region", spec.name, "tenant",
          qkvi_tenant_to_log(spec.tenant), "key", spec.key, "bytes", (json_int_t)spec.bytes);
  return QKV_OK;
}

static void register_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__SystemSharedMemoryRegisterRequest *request = qkv_rpc_state(call);
  Qkv__V1__SystemSharedMemoryRegisterResponse response = QKV__V1__SYSTEM_SHARED_MEMORY_REGISTER_RESPONSE__INIT;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (add_region(call, request->region, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_register(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__system_shared_memory_register_request__descriptor, QKVI_WAIT_LAYERS,
                   register_job);
}

// ---- Status ----

typedef struct region_list {
  Qkv__V1__SystemSharedMemoryRegion **regions;
  size_t count, capacity;
} region_list;

static char *copy_text(const char *text) {
  char *copy = strdup(text);
  if (copy == NULL) abort();
  return copy;
}

static void list_region(void *context, const qkvi_region_spec *spec) {
  region_list *list = context;
  if (list->count == list->capacity) {
    list->capacity = 2 * list->capacity + 8;
    list->regions = realloc((void *)list->regions, list->capacity * sizeof *list->regions);
    if (list->regions == NULL) abort();
  }
  Qkv__V1__SystemSharedMemoryRegion *region = malloc(sizeof *region);
  if (region == NULL) abort();
  qkv__v1__system_shared_memory_region__init(region);
  region->name = copy_text(spec->name);
  region->key = copy_text(spec->key);
  region->offset = spec->offset;
  region->byte_size = spec->bytes;
  list->regions[list->count++] = region;
}

static void free_list(region_list *list) {
  for (size_t i = 0; i < list->count; i++) qkvi_control_free(list->regions[i]);
  free((void *)list->regions);
}

static void status_job(void *context) {
  qkv_rpc_call *call = context;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__SystemSharedMemoryStatusRequest *request = qkv_rpc_state(call);
  Qkv__V1__SystemSharedMemoryStatusResponse response = QKV__V1__SYSTEM_SHARED_MEMORY_STATUS_RESPONSE__INIT;
  region_list list = {0};
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  qkv_status status = allowed(daemon, &error);
  if (status == QKV_OK)
    status = qkvi_regions_each(daemon->regions, qkvi_call_tenant(call), request->name, list_region, &list, &error);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  response.regions = list.regions;
  response.n_regions = list.count;
  qkvi_control_reply(call, &response.base);
  free_list(&list);
}

static void on_status(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__system_shared_memory_status_request__descriptor, QKVI_WAIT_LAYERS,
                   status_job);
}

// ---- Unregister ----

static void unregister_job(void *context) {
  qkv_rpc_call *call = context;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__SystemSharedMemoryUnregisterRequest *request = qkv_rpc_state(call);
  Qkv__V1__SystemSharedMemoryUnregisterResponse response = QKV__V1__SYSTEM_SHARED_MEMORY_UNREGISTER_RESPONSE__INIT;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  qkv_status status = allowed(daemon, &error);
  if (status == QKV_OK) status = qkvi_regions_remove(daemon->regions, qkvi_call_tenant(call), request->name, &error);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_unregister(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__system_shared_memory_unregister_request__descriptor, QKVI_WAIT_LAYERS,
                   unregister_job);
}

const qkv_rpc_method qkvi_shared_memory_methods[] = {
    {.path = "/qkv.v1.SharedMemory/SystemSharedMemoryRegister", .message = on_register, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.SharedMemory/SystemSharedMemoryStatus", .message = on_status, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.SharedMemory/SystemSharedMemoryUnregister",
     .message = on_unregister,
     .destroy = qkvi_control_free},
    {0}};
