// Fetch: decoded rows out, one chunk at a time.
//
// A chunk is decoded by a job of the compute pool and sent from where it was decoded to; the next one is begun
// when it has left. So a client that does not read costs one chunk. Between chunks the session is neither
// locked nor referenced: it can be closed, truncated or appended to, and a closed one gives its memory back.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qkv/v1/kv_cache.pb-c.h"
#include "server/block.h"
#include "server/control.h"
#include "server/daemon.h"
#include "server/discard.h"
#include "server/handlers.h"
#include "server/jobs.h"

#define CHUNK_BYTES 1048576                 // of rows in a response, unless the client says
#define CHUNK_BYTES_MAX QKVI_DISCARD_BYTES  // the same, whatever the client says
#define SCRATCH_FLOATS 262144               // rows on their way to another type or layout

typedef struct fetch_stream {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  char session[QKV_NAME_MAX + 1];
  uint64_t serial;         // of the session, so that another one of its name is not taken for it
  const qkv_model *model;  // the store's
  uint32_t *layers;        // in the order they are asked
  size_t layer_count;
  uint64_t begin, end;  // positions asked; end 0: to the end
  qkv_dtype dtype;
  bool heads_first, before_rope;
  bool wanted[2];         // by qkv_part
  uint64_t chunk_tokens;  // at most, in a response
  size_t at;              // the layer that is sent, an index of `layers`
  bool entered;           // `position` and `stop` are of this layer
  uint64_t position, stop;
  qkv_wire_writer *writer;
} fetch_stream;

typedef struct fetch_chunk {
  uint32_t layer;
  uint64_t position, tokens;
  const void *rows[2];    // by qkv_part; NULL where not wanted
  qkvi_block *blocks[2];  // where they lie; a reference of ours each; NULL for rows that stay
} fetch_chunk;

// ---- The request ----

static uint32_t part_dim(const qkv_model *model, qkv_part part) {
  return part == QKV_K ? model->key_dim : model->value_dim;
}

// Bytes of one token's rows of a part.
static uint64_t token_bytes(const fetch_stream *stream, qkv_part part) {
  return (uint64_t)stream->model->kv_heads * part_dim(stream->model, part) * qkv_dtype_size(stream->dtype);
}

static qkv_status check_enum(unsigned value, unsigned max, const char *name, qkv_error *error) {
  if (value <= max) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %d, known are 0 to %u", name, (int)value, max);
}

static qkv_status check_request(const Qkv__V1__FetchRequest *request, bool discard, qkv_error *error) {
  QKV_TRY(qkv_name_check(request->session, "session", error));
  QKV_TRY(check_enum((unsigned)request->dtype, QKV_BF16, "dtype", error));
  QKV_TRY(check_enum((unsigned)request->layout, QKV__V1__ROW_LAYOUT__ROW_LAYOUT_HEADS_FIRST, "layout", error));
  QKV_TRY(check_enum((unsigned)request->part, QKV__V1__FETCH_REQUEST__PART__PART_V, "part", error));
  QKV_TRY(check_enum((unsigned)request->rope, QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE, "rope", error));
  if (request->coded) return qkv_fail(error, QKV_UNIMPLEMENTED, "coded is set, coded pages are not served yet");
  const Qkv__V1__TokenRange *range = request->range;
  if (range != NULL && range->end != 0 && range->begin > range->end)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "range.begin is %" PRIu64 ", at most range.end %" PRIu64,
                    range->begin, range->end);
  if (discard && (range == NULL || range->end == 0))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "range.end is 0, a daemon with --discard needs an end");
  return QKV_OK;
}

static qkv_status read_layers(fetch_stream *stream, const Qkv__V1__FetchRequest *request, qkv_error *error) {
  const qkv_model *model = stream->model;
  if (request->n_layers > model->layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "layers has %zu entries, the model %s has %" PRIu32 " layers",
                    request->n_layers, model->name, model->layers);
  stream->layer_count = request->n_layers > 0 ? request->n_layers : model->layers;
  stream->layers = malloc(stream->layer_count * sizeof *stream->layers);
  if (stream->layers == NULL) abort();
  for (size_t i = 0; i < stream->layer_count; i++) {
    stream->layers[i] = request->n_layers > 0 ? request->layers[i] : (uint32_t)i;
    if (stream->layers[i] >= model->layers)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "layers[%zu] is %" PRIu32 ", the model %s has %" PRIu32 " layers",
                      i, stream->layers[i], model->name, model->layers);
  }
  return QKV_OK;
}

// Whole pages where there is room for one, so that most pages are decoded once.
static uint64_t choose_chunk(const fetch_stream *stream, uint32_t asked) {
  uint64_t bytes = (stream->wanted[QKV_K] ? token_bytes(stream, QKV_K) : 0) +
                   (stream->wanted[QKV_V] ? token_bytes(stream, QKV_V) : 0);
  uint64_t tokens = CHUNK_BYTES / bytes;
  if (tokens >= QKV_PAGE_TOKENS) tokens -= tokens % QKV_PAGE_TOKENS;
  if (asked > 0) tokens = asked < CHUNK_BYTES_MAX / bytes ? asked : CHUNK_BYTES_MAX / bytes;
  return tokens > 0 ? tokens : 1;
}

static qkv_status begin_fetch(fetch_stream *stream, const Qkv__V1__FetchRequest *request, qkv_error *error) {
  qkv_session *session = NULL;
  QKV_TRY(check_request(request, stream->daemon->options->discard, error));
  QKV_TRY(qkv_store_session(stream->daemon->store, request->session, &session, error));
  stream->model = qkv_session_model(session);
  stream->serial = qkv_session_serial(session);
  qkv_session_unref(&session);
  (void)snprintf(stream->session, sizeof stream->session, "%s", request->session);
  if (request->range != NULL) {
    stream->begin = request->range->begin;
    stream->end = request->range->end;
  }
  stream->dtype = request->dtype == 0 ? stream->model->dtype : (qkv_dtype)request->dtype;
  stream->heads_first = request->layout == QKV__V1__ROW_LAYOUT__ROW_LAYOUT_HEADS_FIRST;
  stream->before_rope = request->rope == QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
  stream->wanted[QKV_K] = request->part != QKV__V1__FETCH_REQUEST__PART__PART_V;
  stream->wanted[QKV_V] = request->part != QKV__V1__FETCH_REQUEST__PART__PART_K;
  stream->chunk_tokens = choose_chunk(stream, request->chunk_tokens);
  return read_layers(stream, request, error);
}

// ---- Decoding ----

// Rows [tokens][kv_heads][dim] of floats into their place among `chunk_tokens` tokens, from `first` on.
static void place_rows(const fetch_stream *stream, uint32_t dim, const float *rows, uint64_t first, uint64_t tokens,
                       uint64_t chunk_tokens, uint8_t *out) {
  const uint32_t heads = stream->model->kv_heads;
  const size_t size = qkv_dtype_size(stream->dtype);
  if (!stream->heads_first) {
    qkv_from_float(stream->dtype, rows, out + first * heads * dim * size, tokens * heads * dim);
    return;
  }
  for (uint64_t token = 0; token < tokens; token++) {
    for (uint32_t head = 0; head < heads; head++) {
      const float *row = rows + (token * heads + head) * dim;
      qkv_from_float(stream->dtype, row, out + (head * chunk_tokens + first + token) * dim * size, dim);
    }
  }
}

static void decode_part(const fetch_stream *stream, const qkv_layer *layer, qkv_part part, const fetch_chunk *chunk,
                        uint8_t *out) {
  if (stream->dtype == QKV_FP32 && !stream->heads_first) {
    qkv_layer_rows(layer, part, chunk->position, chunk->tokens, stream->before_rope, (float *)out);
    return;
  }
  const uint32_t dim = part_dim(stream->model, part);
  const uint64_t token_floats = (uint64_t)stream->model->kv_heads * dim;
  const uint64_t room = token_floats < SCRATCH_FLOATS ? SCRATCH_FLOATS / token_floats : 1;
  float *scratch = malloc(room * token_floats * sizeof *scratch);
  if (scratch == NULL) abort();
  for (uint64_t done = 0; done < chunk->tokens;) {
    // Up to the end of a page, where pages begin as they usually do.
    uint64_t inside = (chunk->position + done - layer->config.first_position) % QKV_PAGE_TOKENS;
    uint64_t tokens = QKV_PAGE_TOKENS - inside;
    if (tokens > room) tokens = room;
    if (tokens > chunk->tokens - done) tokens = chunk->tokens - done;
    qkv_layer_rows(layer, part, chunk->position + done, tokens, stream->before_rope, scratch);
    place_rows(stream, dim, scratch, done, tokens, chunk->tokens, out);
    done += tokens;
  }
  free(scratch);
}

static uint64_t smaller(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

// Positions `position` to `stop` of the layer are wanted. Rows that are appended after the first chunk of a layer
// without range.end are not sent: an appender could keep a fetch running for ever.
static void enter_layer(fetch_stream *stream, const qkv_layer *layer) {
  if (stream->entered) return;
  uint64_t first = layer->config.first_position;
  stream->position = stream->begin > first ? stream->begin : first;
  stream->stop = stream->end > 0 ? smaller(stream->end, layer->length) : layer->length;
  stream->entered = true;
}

// The next chunk of the layer; tokens 0 at its end.
static qkv_status decode_chunk(fetch_stream *stream, const qkv_layer *layer, fetch_chunk *chunk, qkv_error *error) {
  enter_layer(stream, layer);
  uint64_t stop = smaller(stream->stop, layer->length);
  if (stream->position >= stop) return QKV_OK;
  chunk->position = stream->position;
  chunk->tokens = smaller(stop - stream->position, stream->chunk_tokens);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (!stream->wanted[part]) continue;
    QKV_TRY(qkvi_block_create(chunk->tokens * token_bytes(stream, part),
                              (uint64_t)stream->daemon->options->limit_response_bytes, &chunk->blocks[part], error));
    decode_part(stream, layer, part, chunk, chunk->blocks[part]->data);
    chunk->rows[part] = chunk->blocks[part]->data;
  }
  return QKV_OK;
}

static qkv_status find_session(const fetch_stream *stream, qkv_session **session, qkv_error *error) {
  if (qkv_store_session(stream->daemon->store, stream->session, session, NULL) == QKV_OK) {
    if (qkv_session_serial(*session) == stream->serial) return QKV_OK;
    qkv_session_unref(session);
  }
  return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", stream->session);
}

// The next chunk that has tokens; tokens 0 at the end of the last layer.
static qkv_status next_chunk(fetch_stream *stream, fetch_chunk *chunk, qkv_error *error) {
  qkv_session *session = NULL;
  const qkv_layer *layer = NULL;
  qkv_status status = find_session(stream, &session, error);
  while (status == QKV_OK && stream->at < stream->layer_count && chunk->tokens == 0) {
    chunk->layer = stream->layers[stream->at];
    status = qkv_session_read(session, chunk->layer, &layer, error);
    if (status != QKV_OK) break;
    status = decode_chunk(stream, layer, chunk, error);
    qkv_session_read_done(session, chunk->layer);
    stream->position += chunk->tokens;
    if (chunk->tokens > 0) continue;
    stream->at++;
    stream->entered = false;
  }
  if (session != NULL) qkv_session_unref(&session);
  return status;
}

// The same with the engine left out (server/discard.h).
static void next_discarded(fetch_stream *stream, fetch_chunk *chunk) {
  if (!stream->entered) stream->position = stream->begin;
  stream->entered = true;
  if (stream->position >= stream->end) {
    stream->position = stream->begin;
    stream->at++;
  }
  if (stream->at == stream->layer_count || stream->begin == stream->end) return;
  chunk->layer = stream->layers[stream->at];
  chunk->position = stream->position;
  chunk->tokens = smaller(stream->end - stream->position, stream->chunk_tokens);
  stream->position += chunk->tokens;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (stream->wanted[part]) chunk->rows[part] = qkvi_discard_rows();
  }
}

// ---- Answers ----

static void drop_blocks(fetch_chunk *chunk) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) qkvi_block_release(chunk->blocks[part]);
}

// Field numbers are those of kv_cache.proto and tensor.proto.
static void put_rows(const fetch_stream *stream, uint32_t field, qkv_part part, const fetch_chunk *chunk) {
  qkv_wire_writer *writer = stream->writer;
  const int64_t heads = stream->model->kv_heads, tokens = (int64_t)chunk->tokens;
  const int64_t dims[3] = {stream->heads_first ? heads : tokens, stream->heads_first ? tokens : heads,
                           part_dim(stream->model, part)};
  size_t bytes = chunk->tokens * token_bytes(stream, part);
  qkv_wire_begin(writer, field);
  qkv_wire_put_varint(writer, 1, (uint64_t)stream->dtype);
  qkv_wire_put_packed(writer, 2, dims, 3);
  qkv_wire_put_reference(writer, 15, chunk->rows[part], bytes, chunk->blocks[part]);
  qkv_wire_end(writer);
  qkv_metric_add(&stream->daemon->metrics[QKV_METRIC_FETCH_BYTES], (int64_t)bytes);
}

static void send_next(fetch_stream *stream) {
  const bool discard = stream->daemon->options->discard;
  qkv_error error = {0};
  fetch_chunk chunk = {0};
  if (discard)
    next_discarded(stream, &chunk);
  else if (next_chunk(stream, &chunk, &error) != QKV_OK) {
    drop_blocks(&chunk);
    return qkvi_control_fail(stream->call, &error);
  }
  if (chunk.tokens == 0) return qkv_rpc_finish(stream->call, QKV_OK, "");
  qkv_wire_writer_clear(stream->writer);
  qkv_wire_put_varint(stream->writer, 1, chunk.layer);
  qkv_wire_put_varint(stream->writer, 2, chunk.position);
  if (chunk.rows[QKV_K] != NULL) put_rows(stream, 3, QKV_K, &chunk);
  if (chunk.rows[QKV_V] != NULL) put_rows(stream, 4, QKV_V, &chunk);
  qkv_rpc_send(stream->call, stream->writer, qkvi_block_release);
}

static void send_job(void *context) {
  fetch_stream *stream = context;
  if (qkvi_job_wanted(stream->call)) send_next(stream);
}

static void on_sent(qkv_rpc_call *call) {
  fetch_stream *stream = qkv_rpc_state(call);
  if (stream->daemon->options->discard) return send_next(stream);
  qkvi_job_submit(call, send_job, stream);
}

static void on_message(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  Qkv__V1__FetchRequest *request = qkvi_control_unpack(message, &qkv__v1__fetch_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  fetch_stream *stream = calloc(1, sizeof *stream);
  if (stream == NULL) abort();
  stream->call = call;
  stream->daemon = qkv_rpc_context(call);
  stream->writer = qkv_wire_writer_create();
  qkv_rpc_set_state(call, stream);
  qkv_status status = begin_fetch(stream, request, &error);
  qkvi_control_free(request);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  on_sent(call);
}

static void destroy(void *state) {
  fetch_stream *stream = state;
  if (stream == NULL) return;
  qkv_wire_writer_destroy(&stream->writer);
  free(stream->layers);
  free(stream);
}

const qkv_rpc_method qkvi_fetch_methods[] = {
    {.path = "/qkv.v1.KvCache/Fetch", .message = on_message, .sent = on_sent, .destroy = destroy}, {0}};
