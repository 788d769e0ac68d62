// Opaque objects: in and out in messages of about 1 MiB, from and to the caller's memory.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "client/c/message.h"
#include "client/c/place.h"
#include "qkv/v1/objects.pb-c.h"

enum { PIECE_BYTES = 1 << 20 };

static char *text_or_empty(const char *text) {
  return (char *)(uintptr_t)(text == NULL ? "" : text);
}

// ---- Several daemons ----

typedef qkv_code objects_fn(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error);

static const char *key_of(const void *objects, size_t i) {
  return ((const qkv_client_object *)objects)[i].name;
}

// Calls fn for the objects of each daemon, until it fails; what it writes into them is the caller's.
static qkv_code in_groups(qkv_client *client, const qkv_client_objects *objects, objects_fn *fn,
                          qkv_call_error *error) {
  qkvi_split split;
  if (objects->count == 0) return qkvi_ok(error);
  qkv_code code = qkvi_split_keys(client, key_of, objects->objects, objects->count, &split, error);
  if (code != QKV_OK) return code;
  qkv_client_object *ordered = calloc(objects->count, sizeof *ordered);
  assert(ordered != NULL);
  for (size_t i = 0; i < objects->count; i++) ordered[i] = objects->objects[split.order[i]];
  for (size_t g = 0; g < split.groups && code == QKV_OK; g++) {
    const size_t begin = split.begins[g];
    const qkv_client_objects part = {.objects = ordered + begin, .count = split.begins[g + 1] - begin};
    code = fn(split.parts[g], &part, error);
  }
  for (size_t i = 0; i < objects->count; i++) objects->objects[split.order[i]] = ordered[i];
  free(ordered);
  qkvi_split_free(&split);
  return code;
}

// ---- Put ----

// The next piece of an object into the client's writer (objects.proto). Returns its bytes.
static size_t put_piece(qkv_wire_writer *writer, const qkv_client_object *object, size_t at, size_t most) {
  enum { PIECES = 1, BEGIN = 1, REPLACE = 2, DATA = 15 };
  const size_t left = object->bytes - at, bytes = left < most ? left : most;
  qkv_wire_begin(writer, PIECES);
  if (at == 0) {
    qkv_wire_begin(writer, BEGIN);
    qkv_wire_put_string(writer, 61, text_or_empty(object->name));
    qkv_wire_put_varint(writer, 63, object->bytes);
    qkv_wire_put_fixed64(writer, 64, XXH3_64bits(object->data, object->bytes));
    if (object->evictable) qkv_wire_put_varint(writer, 65, QKV__V1__RETENTION__RETENTION_EVICT);
    qkv_wire_put_varint(writer, 66, (uint64_t)object->durability);
    qkv_wire_put_varint(writer, 67, object->ttl_ms);
    qkv_wire_end(writer);
    qkv_wire_put_varint(writer, REPLACE, object->replace);
  }
  qkv_wire_put_reference(writer, DATA, (const uint8_t *)object->data + at, bytes, NULL);
  qkv_wire_end(writer);
  return bytes;
}

// As much as a message takes, from byte `*at` of object `*next` on.
static grpc_byte_buffer *next_message(qkv_client *client, const qkv_client_objects *objects, size_t *next,
                                      size_t *at) {
  qkv_wire_writer *writer = qkvi_begin_request(client);
  for (size_t used = 0; used < PIECE_BYTES && *next < objects->count;) {
    const qkv_client_object *object = &objects->objects[*next];
    const size_t bytes = put_piece(writer, object, *at, PIECE_BYTES - used);
    used += bytes + strlen(text_or_empty(object->name));
    *at += bytes;
    if (*at < object->bytes) continue;
    *at = 0;
    ++*next;
  }
  return qkvi_request(client);
}

static qkv_code put_of_one(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error) {
  static const char method[] = "/qkv.v1.Objects/PutObjects";
  qkvi_call call;
  qkv_call_error outcome = {0};
  grpc_byte_buffer *response = NULL;
  const qkv_code code = qkvi_call_open(client, method, true, &call, error);
  if (code != QKV_OK) return code;
  for (size_t next = 0, at = 0; next < objects->count;)
    qkvi_call_run(&call, &(qkvi_step){.request = next_message(client, objects, &next, &at)});
  qkvi_call_run(&call, &(qkvi_step){.last = true, .response = &response, .outcome = &outcome});
  qkvi_call_close(&call);
  qkvi_reclaim(client);
  if (response != NULL) grpc_byte_buffer_destroy(response);
  if (error != NULL) *error = outcome;
  return outcome.code;
}

qkv_code qkv_client_put_objects(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error) {
  for (size_t i = 0; i < objects->count; i++) {
    if (objects->objects[i].data == NULL || objects->objects[i].bytes == 0)
      return qkvi_fail(error, QKV_INVALID_ARGUMENT, "objects[%zu] has no bytes", i);
  }
  return in_groups(client, objects, put_of_one, error);
}

// ---- Get ----

typedef struct arriving {
  const qkv_client_objects *objects;
  XXH3_state_t *hash;
  size_t index;       // of the object that comes; count: none does
  uint64_t checksum;  // of that
} arriving;

static void begin(arriving *to, size_t index, const Qkv__V1__ObjectInfo *info) {
  qkv_client_object *object = &to->objects->objects[index];
  to->index = index;
  to->checksum = info->checksum;
  object->bytes = info->bytes;
  object->received = 0;
  (void)XXH3_64bits_reset(to->hash);
}

static qkv_status take_data(const arriving *to, qkv_bytes data, qkv_error *reason) {
  qkv_client_object *object = &to->objects->objects[to->index];
  if (data.length > object->bytes - object->received)
    return qkv_fail(reason, QKV_INTERNAL, "object %s has more than its %zu bytes", object->name, object->bytes);
  const size_t at = object->received;
  object->received += data.length;
  if (object->bytes > object->capacity) return QKV_OK;  // told by `bytes`
  qkv_bytes_copy(data, 0, data.length, (uint8_t *)object->data + at);
  (void)XXH3_64bits_update(to->hash, (uint8_t *)object->data + at, data.length);
  if (object->received == object->bytes && XXH3_64bits_digest(to->hash) != to->checksum)
    return qkv_fail(reason, QKV_DATA_LOSS, "object %s does not have its checksum", object->name);
  return QKV_OK;
}

static qkv_status take_info(arriving *to, size_t index, qkv_bytes message, qkv_error *reason) {
  uint8_t *flat = malloc(message.length + 1);
  assert(flat != NULL);
  qkv_bytes_copy(message, 0, message.length, flat);
  Qkv__V1__ObjectInfo *info = qkv__v1__object_info__unpack(NULL, message.length, flat);
  free(flat);
  if (info == NULL) return qkv_fail(reason, QKV_INTERNAL, "an ObjectInfo cannot be read");
  begin(to, index, info);
  qkv__v1__object_info__free_unpacked(info, NULL);
  return QKV_OK;
}

static qkv_status take_piece(arriving *to, qkv_bytes piece, qkv_error *reason) {
  enum { INDEX = 1, INFO = 2, MISSING = 3, DATA = 15 };
  qkv_wire_reader reader;
  qkv_wire_field field;
  qkv_bytes info = {0}, data = {0};
  uint64_t index = 0;
  bool more = true, begins = false, missing = false;
  qkv_wire_reader_init(&reader, piece);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, reason));
    if (!more) break;
    if (field.number == INDEX) index = field.value;
    if (field.number == MISSING) missing = field.value != 0;
    if (field.number == INFO && field.type == QKV_WIRE_BYTES) begins = true;
    if (field.number == INFO && field.type == QKV_WIRE_BYTES) info = field.bytes;
    if (field.number == DATA && field.type == QKV_WIRE_BYTES) data = field.bytes;
  }
  if (index >= to->objects->count) return qkv_fail(reason, QKV_INTERNAL, "index is %" PRIu64, index);
  if (missing) {
    to->objects->objects[index].bytes = to->objects->objects[index].received = 0;
    return QKV_OK;
  }
  if (begins) QKV_TRY(take_info(to, index, info, reason));
  if (to->index != index) return qkv_fail(reason, QKV_INTERNAL, "bytes of objects that do not begin");
  return take_data(to, data, reason);
}

static bool take_message(qkv_client *client, const grpc_byte_buffer *response, void *context, qkv_error *reason) {
  enum { PIECES = 1 };
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, qkvi_view(client, response));
  for (;;) {
    if (qkv_wire_next(&reader, &field, &more, reason) != QKV_OK) return false;
    if (!more) return true;
    if (field.number != PIECES || field.type != QKV_WIRE_BYTES) continue;
    if (take_piece(context, field.bytes, reason) != QKV_OK) return false;
  }
}

static qkv_code get_of_one(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error) {
  arriving to = {.objects = objects, .hash = XXH3_createState(), .index = objects->count};
  assert(to.hash != NULL);
  qkv_wire_writer *writer = qkvi_begin_request(client);
  for (size_t i = 0; i < objects->count; i++) {
    qkv_wire_put_string(writer, 2, text_or_empty(objects->objects[i].name));
    objects->objects[i].bytes = objects->objects[i].received = 0;
  }
  qkv_code code =
      qkvi_read_stream(client, "/qkv.v1.Objects/GetObjects", qkvi_request(client), take_message, &to, error);
  XXH3_freeState(to.hash);
  for (size_t i = 0; i < objects->count && code == QKV_OK; i++) {
    const qkv_client_object *object = &objects->objects[i];
    if (object->received != object->bytes)
      code = qkvi_fail(error, QKV_INTERNAL, "of object %s %zu of %zu bytes have come", object->name, object->received,
                       object->bytes);
  }
  return code;
}

qkv_code qkv_client_get_objects(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error) {
  return in_groups(client, objects, get_of_one, error);
}

// ---- Has, Delete ----

// The names of the objects, to be freed.
static char **names_of(const qkv_client_objects *objects) {
  char **names = calloc(objects->count + 1, sizeof *names);
  assert(names != NULL);
  for (size_t i = 0; i < objects->count; i++) names[i] = text_or_empty(objects->objects[i].name);
  return names;
}

static qkv_code incomplete(const char *method, qkv_call_error *error) {
  qkv_error reason = {0};
  (void)qkv_fail(&reason, QKV_INTERNAL, "it does not have an entry for each name");
  return qkvi_malformed(error, method, &reason);
}

static qkv_code has_of_one(qkv_client *client, const qkv_client_objects *objects, bool touch, qkv_call_error *error) {
  static const char method[] = "/qkv.v1.Objects/HasObjects";
  Qkv__V1__HasObjectsRequest request = QKV__V1__HAS_OBJECTS_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.objects = names_of(objects);
  request.n_objects = objects->count;
  request.touch = touch;
  const qkv_code code = qkv_client_call_message(client, method, &request.base,
                                                &qkv__v1__has_objects_response__descriptor, &answer, error);
  free((void *)request.objects);
  if (code != QKV_OK) return code;
  const Qkv__V1__HasObjectsResponse *response = (const Qkv__V1__HasObjectsResponse *)answer;
  const bool whole = response->n_bytes == objects->count;
  for (size_t i = 0; i < objects->count && whole; i++) objects->objects[i].bytes = response->bytes[i];
  protobuf_c_message_free_unpacked(answer, NULL);
  return whole ? QKV_OK : incomplete(method, error);
}

static qkv_code look_at(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error) {
  return has_of_one(client, objects, false, error);
}

static qkv_code use(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error) {
  return has_of_one(client, objects, true, error);
}

qkv_code qkv_client_has_objects(qkv_client *client, const qkv_client_objects *objects, bool touch,
                                qkv_call_error *error) {
  return in_groups(client, objects, touch ? use : look_at, error);
}

// Leaves 1 in `received` of those that were there.
static qkv_code delete_of_one(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error) {
  static const char method[] = "/qkv.v1.Objects/DeleteObjects";
  Qkv__V1__DeleteObjectsRequest request = QKV__V1__DELETE_OBJECTS_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.objects = names_of(objects);
  request.n_objects = objects->count;
  const qkv_code code = qkv_client_call_message(client, method, &request.base,
                                                &qkv__v1__delete_objects_response__descriptor, &answer, error);
  free((void *)request.objects);
  if (code != QKV_OK) return code;
  const Qkv__V1__DeleteObjectsResponse *response = (const Qkv__V1__DeleteObjectsResponse *)answer;
  const bool whole = response->n_deleted == objects->count;
  for (size_t i = 0; i < objects->count && whole; i++) objects->objects[i].received = response->deleted[i] != 0;
  protobuf_c_message_free_unpacked(answer, NULL);
  return whole ? QKV_OK : incomplete(method, error);
}

qkv_code qkv_client_delete_objects(qkv_client *client, const qkv_client_objects *objects, size_t *deleted,
                                   qkv_call_error *error) {
  size_t count = 0;
  for (size_t i = 0; i < objects->count; i++) objects->objects[i].received = 0;
  const qkv_code code = in_groups(client, objects, delete_of_one, error);
  for (size_t i = 0; i < objects->count; i++) count += objects->objects[i].received;
  if (deleted != NULL) *deleted = count;
  return code;
}
