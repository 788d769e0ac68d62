// Fetch: rows out of a session, one response at a time.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <stdlib.h>

#include "client/c/client.h"

// Field numbers of qkv/v1/kv_cache.proto.
enum { FETCH_SESSION = 1, FETCH_LAYERS, FETCH_RANGE, FETCH_DTYPE, FETCH_LAYOUT, FETCH_PART, FETCH_ROPE, FETCH_CHUNK };
enum { RANGE_BEGIN = 1, RANGE_END };
enum { RESPONSE_LAYER = 1, RESPONSE_POSITION, RESPONSE_K, RESPONSE_V };
enum { LAYOUT_HEADS_FIRST = 2, ROPE_FORM_BEFORE = 2 };

static const char fetch_method[] = "/qkv.v1.KvCache/Fetch";

static void put_layers(qkv_wire_writer *writer, const uint32_t *layers, size_t count) {
  int64_t *wide = malloc((count + 1) * sizeof *wide);
  assert(wide != NULL);
  for (size_t i = 0; i < count; i++) wide[i] = layers[i];
  if (count > 0) qkv_wire_put_packed(writer, FETCH_LAYERS, wide, count);
  free(wide);
}

static grpc_byte_buffer *make_request(qkv_client *client, const qkv_client_fetch *fetch) {
  qkv_wire_writer *writer = qkvi_begin_request(client);
  qkv_wire_put_string(writer, FETCH_SESSION, fetch->session);
  put_layers(writer, fetch->layers, fetch->layers == NULL ? 0 : fetch->layer_count);
  if (fetch->begin != 0 || fetch->end != 0) {
    qkv_wire_begin(writer, FETCH_RANGE);
    qkv_wire_put_varint(writer, RANGE_BEGIN, fetch->begin);
    qkv_wire_put_varint(writer, RANGE_END, fetch->end);
    qkv_wire_end(writer);
  }
  qkv_wire_put_varint(writer, FETCH_DTYPE, (uint64_t)fetch->dtype);
  if (fetch->heads_first) qkv_wire_put_varint(writer, FETCH_LAYOUT, LAYOUT_HEADS_FIRST);
  qkv_wire_put_varint(writer, FETCH_PART, (uint64_t)fetch->part);
  if (fetch->before_rope) qkv_wire_put_varint(writer, FETCH_ROPE, ROPE_FORM_BEFORE);
  qkv_wire_put_varint(writer, FETCH_CHUNK, fetch->chunk_tokens);
  return qkvi_request(client);
}

// The data in one piece: where it came in one, in place.
static const void *whole(qkv_client *client, int which, qkv_bytes data) {
  const uint8_t *in_place = qkv_bytes_contiguous(data, 0, data.length);
  if (in_place != NULL) return in_place;
  if (data.length > client->scratch_capacity[which]) {
    free(client->scratch[which]);
    client->scratch[which] = malloc(data.length);
    assert(client->scratch[which] != NULL);
    client->scratch_capacity[which] = data.length;
  }
  qkv_bytes_copy(data, 0, data.length, client->scratch[which]);
  return client->scratch[which];
}

static qkv_status read_rows(qkv_client *client, const char *name, int which, qkv_bytes message,
                            qkv_client_tensor *rows, qkv_error *error) {
  qkv_tensor tensor;
  QKV_TRY(qkvi_read_tensor(message, name, 3, &tensor, error));
  *rows = (qkv_client_tensor){.dtype = (int)tensor.dtype, .rank = 3, .bytes = tensor.data.length};
  for (int i = 0; i < 3; i++) {
    rows->dims[i] = tensor.dims[i];
    rows->strides[i] = tensor.strides[i];
  }
  rows->data = whole(client, which, tensor.data);
  return QKV_OK;
}

static qkv_status read_response(qkv_client *client, const grpc_byte_buffer *response, qkv_client_rows *rows,
                                qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  *rows = (qkv_client_rows){0};
  qkv_wire_reader_init(&reader, qkvi_view(client, response));
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == RESPONSE_LAYER) rows->layer = (uint32_t)field.value;
    if (field.number == RESPONSE_POSITION) rows->position = field.value;
    if (field.type != QKV_WIRE_BYTES) continue;
    if (field.number == RESPONSE_K) QKV_TRY(read_rows(client, "k", 0, field.bytes, &rows->k, error));
    if (field.number == RESPONSE_V) QKV_TRY(read_rows(client, "v", 1, field.bytes, &rows->v, error));
  }
}

qkv_code qkv_client_fetch_rows(qkv_client *client, const qkv_client_fetch *request,
                               bool (*fn)(void *context, const qkv_client_rows *rows), void *context,
                               qkv_call_error *error) {
  qkvi_call call;
  qkv_call_error outcome = {0};
  qkv_error reason = {0};
  bool go_on = true;
  if (request->session == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "session is NULL");
  qkv_code code = qkvi_call_open(client, fetch_method, true, &call, error);
  if (code != QKV_OK) return code;
  qkvi_step step = {.request = make_request(client, request), .last = true};
  while (go_on && reason.status == QKV_OK) {
    grpc_byte_buffer *response = NULL;
    step.response = &response;
    qkvi_call_run(&call, &step);
    step = (qkvi_step){0};
    if (response == NULL) break;
    qkv_client_rows rows;
    if (read_response(client, response, &rows, &reason) == QKV_OK) go_on = fn(context, &rows);
    grpc_byte_buffer_destroy(response);
  }
  if (go_on && reason.status == QKV_OK) qkvi_call_run(&call, &(qkvi_step){.outcome = &outcome});
  qkvi_call_close(&call);
  if (!go_on) return qkvi_fail(error, QKV_CANCELLED, "cancelled by the caller");
  if (reason.status != QKV_OK) return qkvi_malformed(error, fetch_method, &reason);
  if (error != NULL) *error = outcome;
  return outcome.code;
}
