// HasObjects, DeleteObjects, ListObjects.
#include <stdlib.h>

#include "qkv/v1/objects.pb-c.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/objects/names.h"

enum { PAGE_SIZE_MAX = 1000 };

qkv_status qkvi_object_names_check(const qkv_rpc_call *call, const char *said, char *const *names, size_t count,
                                   const char **tenant, qkv_error *error) {
  QKV_TRY(qkvi_request_tenant(call, said, tenant, error));
  if (count > QKVI_NAMES_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "objects has %zu entries, at most %d", count, QKVI_NAMES_MAX);
  for (size_t i = 0; i < count; i++) {
    if (qkv_name_check(names[i], "the name", error) != QKV_OK) return qkv_error_prefix(error, "objects[%zu]: ", i);
  }
  return QKV_OK;
}

// ---- HasObjects ----

static void has_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__HasObjectsRequest *request = qkv_rpc_state(call);
  const size_t count = request->n_objects;
  const char *tenant;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (qkvi_object_names_check(call, request->tenant, request->objects, count, &tenant, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  Qkv__V1__HasObjectsResponse response = QKV__V1__HAS_OBJECTS_RESPONSE__INIT;
  response.presence = calloc(count + 1, sizeof *response.presence);
  response.bytes = calloc(count + 1, sizeof *response.bytes);
  uint64_t *in_memory = calloc(count + 1, sizeof *in_memory);
  if (response.presence == NULL || response.bytes == NULL || in_memory == NULL) abort();
  response.n_presence = response.n_bytes = count;
  qkvi_objects_look(daemon->objects, tenant, request->objects, count, request->touch, response.bytes, in_memory);
  for (size_t i = 0; i < count; i++) {
    if (response.bytes[i] > 0)
      response.presence[i] = in_memory[i] == response.bytes[i]
                                 ? QKV__V1__HAS_OBJECTS_RESPONSE__PRESENCE__PRESENCE_MEMORY
                                 : QKV__V1__HAS_OBJECTS_RESPONSE__PRESENCE__PRESENCE_SSD;
  }
  qkvi_control_reply(call, &response.base);
  free(response.presence);
  free(response.bytes);
  free(in_memory);
}

static void on_has(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__has_objects_request__descriptor, QKVI_WAIT_LAYERS, has_job);
}

// ---- DeleteObjects ----

static void delete_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__DeleteObjectsRequest *request = qkv_rpc_state(call);
  const size_t count = request->n_objects;
  const char *tenant;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (qkvi_object_names_check(call, request->tenant, request->objects, count, &tenant, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  Qkv__V1__DeleteObjectsResponse response = QKV__V1__DELETE_OBJECTS_RESPONSE__INIT;
  qkvi_objects_deletion deletion = {.objects = daemon->objects};
  response.deleted = calloc(count + 1, sizeof *response.deleted);
  if (response.deleted == NULL) abort();
  response.n_deleted = count;
  for (size_t i = 0; i < count; i++)
    response.deleted[i] = qkvi_objects_delete(&deletion, tenant, request->objects[i]);
  if (qkvi_objects_deleted(&deletion, &error) == QKV_OK) {
    qkvi_control_reply(call, &response.base);
  } else {
    qkvi_control_fail(call, &error);
  }
  free(response.deleted);
}

static void on_delete(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__delete_objects_request__descriptor, qkvi_session_waits(call), delete_job);
}

// ---- ListObjects ----

static void write_info(const qkvi_object_info *info, Qkv__V1__ObjectInfo *message) {
  qkv__v1__object_info__init(message);
  message->object = (char *)(uintptr_t)info->config.name;
  message->tenant = (char *)(uintptr_t)info->config.tenant;
  message->bytes = info->config.bytes;
  message->checksum = info->config.checksum;
  message->retention =
      info->config.evictable ? QKV__V1__RETENTION__RETENTION_EVICT : QKV__V1__RETENTION__RETENTION_KEEP;
  message->durability = (Qkv__V1__Durability)info->config.durability;
  message->ttl_ms = info->config.ttl_ms;
  message->created_unix_ms = info->config.created_unix_ms;
  message->last_used_unix_ms = info->last_used_unix_ms;
  message->bytes_in_memory = info->bytes_in_memory;
}

static void reply_list(qkv_rpc_call *call, qkvi_object **objects, size_t count, bool more) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  Qkv__V1__ListObjectsResponse response = QKV__V1__LIST_OBJECTS_RESPONSE__INIT;
  qkvi_object_info *infos = calloc(count + 1, sizeof *infos);
  Qkv__V1__ObjectInfo *messages = calloc(count + 1, sizeof *messages);
  response.objects = calloc(count + 1, sizeof *response.objects);
  if (infos == NULL || messages == NULL || response.objects == NULL) abort();
  response.n_objects = count;
  for (size_t i = 0; i < count; i++) {
    qkvi_object_read_info(daemon->objects, objects[i], &infos[i]);
    write_info(&infos[i], &messages[i]);
    response.objects[i] = &messages[i];
  }
  if (more && count > 0) response.next_page_token = infos[count - 1].config.name;
  qkvi_control_reply(call, &response.base);
  free((void *)response.objects);
  free(messages);
  free(infos);
}

static void list_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__ListObjectsRequest *request = qkv_rpc_state(call);
  const char *tenant;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (request->page_size > PAGE_SIZE_MAX)
    (void)qkv_fail(&error, QKV_INVALID_ARGUMENT, "page_size is %u, at most %d", request->page_size, PAGE_SIZE_MAX);
  if (error.status == QKV_OK) (void)qkvi_object_names_check(call, request->tenant, NULL, 0, &tenant, &error);
  if (error.status != QKV_OK) return qkvi_control_fail(call, &error);
  const size_t size = request->page_size == 0 ? PAGE_SIZE_MAX : request->page_size;
  qkvi_object *objects[PAGE_SIZE_MAX + 1];
  const size_t found =
      qkvi_objects_list(daemon->objects, tenant, request->prefix, request->page_token, objects, size + 1);
  reply_list(call, objects, found < size ? found : size, found > size);
  for (size_t i = 0; i < found; i++) qkvi_object_unref(daemon->objects, &objects[i]);
}

static void on_list(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__list_objects_request__descriptor, QKVI_WAIT_LAYERS, list_job);
}

const qkv_rpc_method qkvi_objects_methods[] = {
    {.path = "/qkv.v1.Objects/HasObjects", .message = on_has, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.Objects/DeleteObjects", .message = on_delete, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.Objects/ListObjects", .message = on_list, .destroy = qkvi_control_free},
    {0}};
