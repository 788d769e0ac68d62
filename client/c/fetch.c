// Fetch: rows out of a session, one response at a time.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <stdlib.h>

#include "client/c/fetch.h"

// Field numbers of qkv/v1/kv_cache.proto.
enum {
  FETCH_SESSION = 1,
  FETCH_LAYERS,
  FETCH_RANGE,
  FETCH_DTYPE,
  FETCH_LAYOUT,
  FETCH_PART,
  FETCH_ROPE,
  FETCH_CHUNK,
  FETCH_CODED
};
enum { RANGE_BEGIN = 1, RANGE_END };
enum { RESPONSE_LAYER = 1, RESPONSE_POSITION, RESPONSE_K, RESPONSE_V };
enum { LAYOUT_HEADS_FIRST = 2, ROPE_FORM_BEFORE = 2 };

static void put_layers(qkv_wire_writer *writer, const uint32_t *layers, size_t count) {
  int64_t *wide = malloc((count + 1) * sizeof *wide);
  assert(wide != NULL);
  for (size_t i = 0; i < count; i++) wide[i] = layers[i];
  if (count > 0) qkv_wire_put_packed(writer, FETCH_LAYERS, wide, count);
  free(wide);
}

grpc_byte_buffer *qkvi_fetch_request(qkv_client *client, const qkv_client_fetch *fetch, bool coded) {
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
  qkv_wire_put_varint(writer, FETCH_CODED, coded);
  return qkvi_request(client);
}

// What a response holds, as views into it.
typedef struct arrived {
  uint32_t layer;
  uint64_t position;
  qkv_tensor part[2];  // K and V: dense, or of rank 0
} arrived;

static qkv_status read_response(qkv_client *client, const grpc_byte_buffer *response, arrived *rows,
                                qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  *rows = (arrived){0};
  qkv_wire_reader_init(&reader, qkvi_view(client, response));
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == RESPONSE_LAYER) rows->layer = (uint32_t)field.value;
    if (field.number == RESPONSE_POSITION) rows->position = field.value;
    if (field.type != QKV_WIRE_BYTES) continue;
    if (field.number == RESPONSE_K) QKV_TRY(qkvi_read_tensor(field.bytes, "k", 3, &rows->part[0], error));
    if (field.number == RESPONSE_V) QKV_TRY(qkvi_read_tensor(field.bytes, "v", 3, &rows->part[1], error));
  }
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

// [at, at + count) along the first dim.
static qkv_client_tensor cut(qkv_client *client, int which, const qkv_tensor *from, int64_t at, int64_t count) {
  qkv_client_tensor rows = {0};
  if (from->rank == 0) return rows;
  size_t bytes = (size_t)(count * from->strides[0]);
  rows = (qkv_client_tensor){.dtype = (int)from->dtype, .rank = 3, .bytes = bytes};
  for (int i = 0; i < 3; i++) {
    rows.dims[i] = from->dims[i];
    rows.strides[i] = from->strides[i];
  }
  rows.dims[0] = count;
  rows.data = whole(client, which, qkv_bytes_slice(from->data, (size_t)(at * from->strides[0]), bytes));
  return rows;
}

// Tokens from `token` on, at most `most`, that came in one piece; a token that did not counts as one.
static int64_t run_of(const qkv_tensor *rows, int64_t token, int64_t most) {
  if (rows->rank == 0) return most;
  size_t stride = (size_t)rows->strides[0];
  qkv_bytes rest = qkv_bytes_slice(rows->data, (size_t)token * stride, (size_t)most * stride);
  int64_t run = (int64_t)((rest.segments[0].length - rest.offset) / stride);
  if (run < 1) return 1;
  return run < most ? run : most;
}

// Gives the rows to the receiver: a run of tokens at a time where they lie, or all in one piece where tokens are not
// the first dim. A MiB arrives in about 20 pieces; making it whole first costs a third of the time it takes to
// arrive.
bool qkvi_fetch_deliver(qkv_client *client, const grpc_byte_buffer *response, void *context, qkv_error *reason) {
  const qkvi_row_receiver *to = context;
  arrived rows;
  if (read_response(client, response, &rows, reason) != QKV_OK) return false;
  const qkv_tensor *k = &rows.part[0], *v = &rows.part[1];
  int64_t tokens = k->rank != 0 ? k->dims[0] : v->dims[0];
  bool in_runs = !to->heads_first && (k->rank == 0 || v->rank == 0 || k->dims[0] == v->dims[0]);
  if (!in_runs) {
    return to->fn(to->context, &(qkv_client_rows){.layer = rows.layer,
                                                  .position = rows.position,
                                                  .k = cut(client, 0, k, 0, k->dims[0]),
                                                  .v = cut(client, 1, v, 0, v->dims[0])});
  }
  for (int64_t token = 0, run = 0; token < tokens; token += run) {
    run = run_of(v, token, run_of(k, token, tokens - token));
    qkv_client_rows part = {.layer = rows.layer,
                            .position = rows.position + (uint64_t)token,
                            .k = cut(client, 0, k, token, run),
                            .v = cut(client, 1, v, token, run)};
    if (!to->fn(to->context, &part)) return false;
  }
  return true;
}

qkv_code qkv_client_fetch_rows(qkv_client *client, const qkv_client_fetch *request,
                               bool (*fn)(void *context, const qkv_client_rows *rows), void *context,
                               qkv_call_error *error) {
  if (request->session == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "session is NULL");
  qkvi_row_receiver to = {request->heads_first, fn, context};
  return qkvi_read_stream(client, qkvi_fetch_method, qkvi_fetch_request(client, request, false), qkvi_fetch_deliver,
                          &to, error);
}
