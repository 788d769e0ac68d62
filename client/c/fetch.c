// Fetch: rows out of a session, one response at a time.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <inttypes.h>
#include <stdlib.h>

#include "client/c/fetch.h"
#include "client/c/place.h"

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
  FETCH_CODED,
  FETCH_K_INTO,
  FETCH_V_INTO
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

static void write_fetch(qkv_client *client, const qkv_client_fetch *fetch, bool coded) {
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
}

grpc_byte_buffer *qkvi_fetch_request(qkv_client *client, const qkv_client_fetch *fetch, bool coded) {
  write_fetch(client, fetch, coded);
  return qkvi_request(client);
}

qkv_code qkvi_fetch_check(const qkv_client_fetch *request, qkv_call_error *error) {
  if (request->session == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "session is NULL");
  if (request->layers == NULL || request->layer_count == 0)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "layers is empty, at least 1");
  if (request->heads_first)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "heads_first is set, rows in memory are tokens first");
  for (size_t i = 1; i < request->layer_count; i++) {
    if (request->layers[i] <= request->layers[i - 1])
      return qkvi_fail(error, QKV_INVALID_ARGUMENT, "layers[%zu] is %" PRIu32 ", must be above layers[%zu], %" PRIu32,
                       i, request->layers[i], i - 1, request->layers[i - 1]);
  }
  return QKV_OK;
}

// What a response holds, as views into it.
typedef struct arrived {
  uint32_t layer;
  uint64_t position;
  qkv_tensor part[2];  // K and V: dense, or of rank 0
} arrived;

static qkv_status read_response(qkv_client *client, const grpc_byte_buffer *response, bool shared, arrived *rows,
                                qkv_error *error) {
  qkv_status (*const read)(qkv_bytes, const char *, int, qkv_tensor *, qkv_error *) =
      shared ? qkvi_read_shared_tensor : qkvi_read_tensor;
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
    if (field.number == RESPONSE_K) QKV_TRY(read(field.bytes, "k", 3, &rows->part[0], error));
    if (field.number == RESPONSE_V) QKV_TRY(read(field.bytes, "v", 3, &rows->part[1], error));
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
  if (read_response(client, response, false, &rows, reason) != QKV_OK) return false;
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
  const qkv_code routed = qkvi_route(&client, request->session, error);
  if (routed != QKV_OK) return routed;
  qkvi_row_receiver to = {request->heads_first, fn, context};
  return qkvi_read_stream(client, qkvi_fetch_method, qkvi_fetch_request(client, request, false), qkvi_fetch_deliver,
                          &to, error);
}

// ---- Into the caller's memory ----

typedef struct filling {
  const qkv_client_fetch *request;
  qkv_client_layer_memory *layers;
  size_t at;           // the layer that arrives
  bool shared;         // the daemon has put the rows into their places
  qkv_call_error own;  // of what failed here
} filling;

static bool refuse(filling *all, qkv_code code, const char *what, uint64_t is, uint64_t expected) {
  (void)qkvi_fail(&all->own, code, "layer %" PRIu32 ": %s %" PRIu64 ", expected %" PRIu64,
                  all->request->layers[all->at], what, is, expected);
  return false;
}

// The layer's entry. Responses come in the order of layers and positions.
static qkv_client_layer_memory *entry_of(filling *all, const arrived *rows) {
  const qkv_client_fetch *request = all->request;
  size_t at = all->at;
  while (at < request->layer_count && request->layers[at] != rows->layer) at++;
  if (at == request->layer_count) {
    (void)refuse(all, QKV_INTERNAL, "the daemon sent layer", rows->layer, request->layers[all->at]);
    return NULL;
  }
  all->at = at;
  qkv_client_layer_memory *to = &all->layers[at];
  if (to->tokens == 0) to->position = rows->position;
  if (rows->position == to->position + to->tokens) return to;
  (void)refuse(all, QKV_INTERNAL, "the daemon sent position", rows->position, to->position + to->tokens);
  return NULL;
}

static bool store_part(filling *all, const qkv_tensor *rows, uint64_t at, qkv_client_memory *to) {
  if (rows->rank == 0) return true;
  const size_t bytes = rows->data.length, begin = (size_t)at * (size_t)rows->strides[0];
  if (at > 0 && (to->dtype != (int)rows->dtype || to->heads != rows->dims[1] || to->dim != rows->dims[2]))
    return refuse(all, QKV_INTERNAL, "the daemon sent rows of another shape, of width", (uint64_t)rows->dims[2],
                  (uint64_t)to->dim);
  to->dtype = (int)rows->dtype;
  to->heads = rows->dims[1];
  to->dim = rows->dims[2];
  if (to->data == NULL) return true;
  if (bytes > to->bytes || begin > to->bytes - bytes)
    return refuse(all, QKV_INVALID_ARGUMENT, "bytes of the memory for rows are", to->bytes, begin + bytes);
  if (!all->shared) qkv_bytes_copy(rows->data, 0, bytes, (uint8_t *)to->data + begin);
  return true;
}

static bool store(qkv_client *client, const grpc_byte_buffer *response, void *context, qkv_error *reason) {
  filling *all = context;
  arrived rows;
  if (read_response(client, response, all->shared, &rows, reason) != QKV_OK) return false;
  const qkv_tensor *k = &rows.part[0], *v = &rows.part[1];
  if (k->rank == 0 && v->rank == 0) return true;
  qkv_client_layer_memory *to = entry_of(all, &rows);
  if (to == NULL) return false;
  const int asked = all->request->part, parts = (k->rank != 0 ? 1 : 0) + (v->rank != 0 ? 2 : 0);
  if (parts != (asked == 0 ? 3 : asked))
    return refuse(all, QKV_INTERNAL, "the daemon sent parts", (uint64_t)parts, (uint64_t)asked);
  const int64_t tokens = k->rank != 0 ? k->dims[0] : v->dims[0];
  if (v->rank != 0 && v->dims[0] != tokens)
    return refuse(all, QKV_INTERNAL, "tokens of v are", (uint64_t)v->dims[0], (uint64_t)tokens);
  if (!store_part(all, k, to->tokens, &to->k) || !store_part(all, v, to->tokens, &to->v)) return false;
  to->tokens += (uint64_t)tokens;
  return true;
}

static qkv_code fill(qkv_client *client, filling *all, grpc_byte_buffer *message, qkv_call_error *error) {
  const qkv_code code = qkvi_read_stream(client, qkvi_fetch_method, message, store, all, error);
  // What failed here has ended the stream, which says CANCELLED.
  return all->own.code == QKV_OK ? code : qkvi_fail(error, all->own.code, "%s", all->own.text);
}

static bool is_shared(const qkv_client *client, const qkv_client_fetch *request,
                      const qkv_client_layer_memory *layers) {
  for (size_t i = 0; i < request->layer_count; i++) {
    const qkv_client_memory *k = &layers[i].k, *v = &layers[i].v;
    if (request->part != 2 && qkvi_share_of(client, k->data, k->bytes) == NULL) return false;
    if (request->part != 1 && qkvi_share_of(client, v->data, v->bytes) == NULL) return false;
  }
  return client->shares != NULL;
}

// Memory on a GPU that the rows would have to be copied to here.
static qkv_code check_memory(const qkv_client *client, const qkv_client_fetch *request,
                             const qkv_client_layer_memory *layers, qkv_call_error *error) {
  for (size_t i = 0; i < request->layer_count; i++) {
    const qkv_client_memory *k = &layers[i].k, *v = &layers[i].v;
    if ((request->part != 2 && qkvi_is_on_gpu(client, k->data, k->bytes)) ||
        (request->part != 1 && qkvi_is_on_gpu(client, v->data, v->bytes)))
      return qkvi_fail(error, QKV_INVALID_ARGUMENT,
                       "layers[%zu] has memory on a GPU: all memory for rows has to lie in what is lent, as a whole",
                       i);
  }
  return QKV_OK;
}

static void put_into(qkv_client *client, uint32_t field, const qkv_client_memory *memory) {
  qkv_wire_begin(client->writer, field);
  qkvi_share_put(client->writer, 1, qkvi_share_of(client, memory->data, memory->bytes), memory->data, memory->bytes);
  qkv_wire_end(client->writer);
}

// A call for each layer, as a request has one place for all of its keys.
static qkv_code fetch_shared(qkv_client *client, const qkv_client_fetch *request, qkv_client_layer_memory *layers,
                             qkv_call_error *error) {
  qkv_code code = qkvi_shares_ready(client, error);
  for (size_t i = 0; i < request->layer_count && code == QKV_OK; i++) {
    qkv_client_fetch one = *request;
    one.layers = &request->layers[i];
    one.layer_count = 1;
    filling all = {.request = &one, .layers = &layers[i], .shared = true};
    write_fetch(client, &one, false);
    if (request->part != 2) put_into(client, FETCH_K_INTO, &layers[i].k);
    if (request->part != 1) put_into(client, FETCH_V_INTO, &layers[i].v);
    code = fill(client, &all, qkvi_request(client), error);
  }
  return code;
}

qkv_code qkv_client_fetch_into(qkv_client *client, const qkv_client_fetch *request, qkv_client_layer_memory *layers,
                               qkv_call_error *error) {
  qkv_code code = qkvi_fetch_check(request, error);
  if (code == QKV_OK) code = qkvi_route(&client, request->session, error);
  if (code != QKV_OK) return code;
  for (size_t i = 0; i < request->layer_count; i++) layers[i].position = layers[i].tokens = 0;
  filling all = {.request = request, .layers = layers};
  const bool shared = is_shared(client, request, layers);
  if (!shared) code = check_memory(client, request, layers, error);
  if (code != QKV_OK) return code;
  code = shared ? fetch_shared(client, request, layers, error)
                : fill(client, &all, qkvi_fetch_request(client, request, false), error);
  for (size_t i = 0; i < request->layer_count && code != QKV_OK; i++) layers[i].tokens = 0;
  return code;
}
