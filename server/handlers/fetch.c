// Fetch: rows out, one chunk at a time, decoded or, on request, as coded pages (fetch_coded.h).
//
// A run of tokens is decoded by a job of the compute pool and sent from that buffer; the next one is begun when it
// has been sent. So a client that does not read costs one run. A run is a chunk that ends where a page does, if it
// can. Where chunks are smaller than a page it is the rest of the page, which is decoded once and sent in several.
// The last chunk is sent with the status. Between runs the session is neither locked nor referenced: it can be
// closed, truncated or appended to, and a closed one releases its memory.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/block.h"
#include "server/handlers/control.h"
#include "server/handlers/discard.h"
#include "server/handlers/fetch_coded.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/residency/fold.h"
#include "server/residency/read_ahead.h"
#include "server/residency/restore.h"

#define CHUNK_BYTES 1048576                 // of rows in a response, unless the client sets another size
#define CHUNK_BYTES_INTO (8 * CHUNK_BYTES)  // for rows that go to shared memory: a response costs 40 us
#define CHUNK_BYTES_MAX QKVI_DISCARD_BYTES  // of rows in a response, at most

// Decoded tokens of one layer that have not been sent, chunk after chunk, each chunk in the layout that was asked; or
// pages, which are one chunk.
typedef struct fetch_run {
  uint32_t layer;
  uint64_t position, tokens;       // what is left
  const uint8_t *rows[2];          // of what is left, by qkv_part; NULL where not wanted, or placed
  bool placed[2];                  // the GPU has made them where they go
  qkvi_response_block *blocks[2];  // where they lie; a reference of ours each; NULL for rows that stay
  qkvi_coded_run *coded;           // NULL: rows
} fetch_run;

typedef struct fetch_stream {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  qkvi_waits waits;  // its wait reasons
  char session[QKV_NAME_MAX + 1];
  uint64_t serial;         // of the session, to tell it from a later one of its name
  const qkv_model *model;  // the store's
  uint32_t *layers;        // in the order they are asked
  size_t layer_count;
  uint64_t begin, end;  // positions asked; end 0: to the end
  qkv_dtype dtype;
  bool heads_first, before_rope;
  bool coded;  // sealed rows go as pages, of so many tokens at most in a response; 0: not said
  uint32_t coded_tokens;
  bool wanted[2];                       // by qkv_part
  char into_name[2][QKV_NAME_MAX + 1];  // by qkv_part: the region that the rows go to
  qkvi_region_part into[2];             // what is left of it
  qkv_segment into_segment[2];          // its name
  qkvi_region *into_region[2];          // a reference; NULL: into the responses
  uint64_t chunk_tokens;                // at most, in a response
  size_t at;                            // the layer that is sent, an index of `layers`
  bool entered;                         // `position` and `stop` are of this layer
  uint64_t position, stop;
  fetch_run run;
  qkv_wire_writer *writer;
} fetch_stream;

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
  if (request->coded && request->part != QKV__V1__FETCH_REQUEST__PART__PART_BOTH)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "part is %d, pages have both (coded is set)", (int)request->part);
  if (request->coded && (request->k_into != NULL || request->v_into != NULL))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "coded is set, and so is %s: pages cross",
                    request->k_into != NULL ? "k_into" : "v_into");
  if (request->coded && discard)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "coded is set, a daemon with --discard has no pages");
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

// Bytes of one token's rows of all requested parts.
static uint64_t response_token_bytes(const fetch_stream *stream) {
  return (stream->wanted[QKV_K] ? token_bytes(stream, QKV_K) : 0) +
         (stream->wanted[QKV_V] ? token_bytes(stream, QKV_V) : 0);
}

static uint64_t choose_chunk(const fetch_stream *stream, uint32_t asked) {
  const uint64_t bytes = response_token_bytes(stream);
  assert(bytes > 0);
  const bool into = stream->into_region[QKV_K] != NULL || stream->into_region[QKV_V] != NULL;
  uint64_t tokens = (into ? CHUNK_BYTES_INTO : CHUNK_BYTES) / bytes;
  if (asked > 0) tokens = asked < CHUNK_BYTES_MAX / bytes ? asked : CHUNK_BYTES_MAX / bytes;
  return tokens > 0 ? tokens : 1;
}

// Where a part's rows go, chunk after chunk.
static qkv_status find_into(fetch_stream *stream, qkv_part part, const Qkv__V1__RegionPart *asked, qkv_error *error) {
  static const char *const names[] = {"k_into", "v_into"};
  if (asked == NULL || asked->shared_memory_region[0] == '\0') return QKV_OK;
  if (stream->daemon->regions == NULL)
    return qkv_fail(error, QKV_UNIMPLEMENTED,
                    "%s.shared_memory_region is set, this daemon runs without --allow-client-shm", names[part]);
  QKV_TRY(qkvi_call_check_role(stream->call, QKVI_ROLE_WRITE, error));
  if (!stream->wanted[part])
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is set, `part` leaves these rows out", names[part]);
  QKV_TRY(qkv_name_check(asked->shared_memory_region, names[part], error));
  (void)snprintf(stream->into_name[part], sizeof stream->into_name[part], "%s", asked->shared_memory_region);
  stream->into_segment[part] =
      (qkv_segment){.data = (const uint8_t *)stream->into_name[part], .length = strlen(stream->into_name[part])};
  stream->into[part] = (qkvi_region_part){.region = qkv_bytes_of(&stream->into_segment[part]),
                                          .offset = asked->shared_memory_offset,
                                          .bytes = asked->shared_memory_byte_size};
  return qkvi_regions_find(stream->daemon->regions, qkvi_call_tenant(stream->call), &stream->into[part], names[part],
                           &stream->into_region[part], error);
}

static qkv_status begin_fetch(fetch_stream *stream, const Qkv__V1__FetchRequest *request, qkv_error *error) {
  qkv_session *session = NULL;
  QKV_TRY(check_request(request, stream->daemon->options->discard, error));
  QKV_TRY(
      qkv_store_session(stream->daemon->store, qkvi_call_tenant(stream->call), request->session, &session, error));
  stream->model = qkv_session_model(session);
  stream->serial = qkv_session_serial(session);
  qkv_session_unref(&session);
  (void)snprintf(stream->session, sizeof stream->session, "%s", request->session);
  qkv_rpc_name_session(stream->call, request->session);
  if (request->range != NULL) {
    stream->begin = request->range->begin;
    stream->end = request->range->end;
  }
  stream->dtype = request->dtype == 0 ? stream->model->dtype : (qkv_dtype)request->dtype;
  stream->heads_first = request->layout == QKV__V1__ROW_LAYOUT__ROW_LAYOUT_HEADS_FIRST;
  stream->before_rope = request->rope == QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
  stream->wanted[QKV_K] = request->part != QKV__V1__FETCH_REQUEST__PART__PART_V;
  stream->wanted[QKV_V] = request->part != QKV__V1__FETCH_REQUEST__PART__PART_K;
  stream->coded = request->coded;
  stream->coded_tokens = request->chunk_tokens;
  QKV_TRY(find_into(stream, QKV_K, request->k_into, error));
  QKV_TRY(find_into(stream, QKV_V, request->v_into, error));
  stream->chunk_tokens = choose_chunk(stream, request->chunk_tokens);
  return read_layers(stream, request, error);
}

// ---- Decoding ----

static uint64_t smaller(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

// Writes rows [tokens][kv_heads][dim] of floats to their place among the run's, from its token `first` on.
static void place_rows(const fetch_stream *stream, uint32_t dim, const float *rows, uint64_t first, uint64_t tokens,
                       uint8_t *out) {
  const uint32_t heads = stream->model->kv_heads;
  const size_t size = qkv_dtype_size(stream->dtype);
  if (!stream->heads_first) {
    qkv_from_float(stream->dtype, rows, out + first * heads * dim * size, tokens * heads * dim);
    return;
  }
  for (uint64_t token = 0; token < tokens; token++) {
    const uint64_t inside = (first + token) % stream->chunk_tokens, begin = first + token - inside;
    const uint64_t chunk_tokens = smaller(stream->run.tokens - begin, stream->chunk_tokens);
    for (uint32_t head = 0; head < heads; head++) {
      const float *row = rows + (token * heads + head) * dim;
      qkv_from_float(stream->dtype, row, out + (begin * heads + head * chunk_tokens + inside) * dim * size, dim);
    }
  }
}

// The first position behind the page that holds `position`, where pages begin as they usually do.
static uint64_t page_end(const qkv_layer *layer, uint64_t position) {
  return position + QKV_PAGE_TOKENS - (position - layer->config.first_position) % QKV_PAGE_TOKENS;
}

static void decode_part(const fetch_stream *stream, const qkv_layer *layer, qkv_part part, uint8_t *out) {
  const fetch_run *run = &stream->run;
  if (stream->dtype == QKV_FP32 && !stream->heads_first) {
    qkv_layer_rows(layer, part, run->position, run->tokens, stream->before_rope, (float *)out);
    return;
  }
  const uint32_t dim = part_dim(stream->model, part);
  const uint64_t capacity = smaller(run->tokens, QKV_PAGE_TOKENS);
  float *scratch = malloc(capacity * stream->model->kv_heads * dim * sizeof *scratch);
  if (scratch == NULL) abort();
  for (uint64_t done = 0; done < run->tokens;) {
    const uint64_t at = run->position + done;
    const uint64_t tokens = smaller(page_end(layer, at) - at, run->tokens - done);
    qkv_layer_rows(layer, part, at, tokens, stream->before_rope, scratch);
    place_rows(stream, dim, scratch, done, tokens, out);
    done += tokens;
  }
  free(scratch);
}

static qkv_status check_headroom(const fetch_stream *stream, qkv_part part, uint64_t tokens, qkv_error *error) {
  const uint64_t bytes = tokens * token_bytes(stream, part), left = stream->into[part].bytes;
  if (bytes <= left) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "%s.shared_memory_byte_size is too small: %" PRIu64 " bytes are left of it, layer %" PRIu32
                  " from position %" PRIu64 " on takes %" PRIu64,
                  part == QKV_K ? "k_into" : "v_into", left, stream->run.layer, stream->run.position, bytes);
}

// The run's parts that go to a GPU which can make their rows there: one behind the other, each chunk in its layout.
static qkv_status place_on_gpu(fetch_stream *stream, const qkv_layer *layer, qkv_error *error) {
  fetch_run *run = &stream->run;
  const uint64_t size = qkv_dtype_size(stream->dtype), heads = stream->model->kv_heads;
  const uint64_t step = stream->heads_first ? smaller(stream->chunk_tokens, run->tokens) : run->tokens;
  qkvi_region *regions[2] = {NULL, NULL};
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    qkvi_region *into = stream->into_region[part];
    run->placed[part] = stream->wanted[part] && into != NULL &&
                        qkvi_region_takes_rows(into, stream->into[part].offset, qkv_dtype_size(stream->dtype));
    if (!run->placed[part]) continue;
    QKV_TRY(check_headroom(stream, part, run->tokens, error));
    regions[part] = into;
  }
  if (!run->placed[QKV_K] && !run->placed[QKV_V]) return QKV_OK;
  for (uint64_t done = 0; done < run->tokens; done += step) {
    qkvi_gpu_rows rows = {.layer = layer,
                          .begin = run->position + done,
                          .tokens = smaller(step, run->tokens - done),
                          .dtype = stream->dtype,
                          .before_rope = stream->before_rope};
    uint64_t bytes[2];
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const uint64_t row = part_dim(stream->model, part) * size;
      bytes[part] = rows.tokens * token_bytes(stream, part);
      rows.to[part].at = stream->into[part].offset + done * token_bytes(stream, part);
      rows.to[part].token_stride = stream->heads_first ? row : heads * row;
      rows.to[part].head_stride = stream->heads_first ? rows.tokens * row : row;
    }
    QKV_TRY(qkvi_regions_fetch(regions, &rows, bytes, error));
  }
  return QKV_OK;
}

// Positions `position` to `stop` of the layer are requested. Rows that are appended after the first chunk of a layer
// without range.end are not sent: an appender could keep a fetch running for ever.
static void enter_layer(fetch_stream *stream, const qkv_layer *layer) {
  if (stream->entered) return;
  uint64_t first = layer->config.first_position;
  stream->position = stream->begin > first ? stream->begin : first;
  stream->stop = stream->end > 0 ? smaller(stream->end, layer->length) : layer->length;
  stream->entered = true;
}

// Tokens of a run from `position` on, at most `most`, so that no page is decoded twice, unless the page is larger
// than a response may be.
static uint64_t choose_run(const fetch_stream *stream, const qkv_layer *layer, uint64_t position, uint64_t most) {
  const uint64_t chunk = stream->chunk_tokens, page = page_end(layer, position) - position;
  if (most <= chunk) return most;
  if (chunk >= page) return chunk - (chunk - page) % QKV_PAGE_TOKENS;
  return page * response_token_bytes(stream) > CHUNK_BYTES_MAX ? chunk : smaller(page, most);
}

// Tokens that are restored from the SSD at once: a small part of the budget.
static uint64_t restore_tokens(const fetch_stream *stream) {
  const qkv_model *model = stream->model;
  const uint64_t page = (uint64_t)QKV_PAGE_TOKENS * model->kv_heads * (model->key_dim + model->value_dim) * 2;
  const uint64_t pages = smaller(qkvi_budget_limit(stream->daemon->residency) / 8 / page, 64);
  return pages > 0 ? pages * QKV_PAGE_TOKENS : QKV_PAGE_TOKENS;
}

// The next run of coded pages.
static qkv_status take_pages(fetch_stream *stream, qkv_session *session, const qkv_layer *layer, uint64_t stop,
                             qkv_error *error) {
  fetch_run *run = &stream->run;
  const qkvi_coded_wanted wanted = {.call = stream->call,
                                    .session = session,
                                    .layer = layer,
                                    .begin = stream->position,
                                    .end = stop,
                                    .tokens_max = stream->coded_tokens};
  QKV_TRY(qkvi_coded_run_create(stream->daemon, &wanted, &run->coded, error));
  run->position = qkvi_coded_run_position(run->coded);
  run->tokens = qkvi_coded_run_tokens(run->coded);
  stream->position = run->position + run->tokens;
  return QKV_OK;
}

// The next run of the layer; tokens 0 at its end. QKV_UNAVAILABLE, with nothing changed, where it is not in memory.
static qkv_status decode_run(fetch_stream *stream, qkv_session *session, const qkv_layer *layer, qkv_error *error) {
  fetch_run *run = &stream->run;
  enter_layer(stream, layer);
  uint64_t stop = smaller(stream->stop, layer->length);
  if (stream->position >= stop) return QKV_OK;
  if (stream->coded && stream->position < layer->sealed) return take_pages(stream, session, layer, stop, error);
  run->position = stream->position;
  uint64_t most = stop - stream->position;
  if ((stream->waits & QKVI_WAIT_DISK) != 0) most = smaller(most, restore_tokens(stream));
  const uint64_t tokens = choose_run(stream, layer, stream->position, most);
  if (!qkv_layer_holds(layer, stream->position, stream->position + tokens)) return QKV_UNAVAILABLE;
  run->tokens = tokens;
  stream->position += run->tokens;
  QKV_TRY(place_on_gpu(stream, layer, error));
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (!stream->wanted[part] || run->placed[part]) continue;
    QKV_TRY(qkvi_block_create(stream->call, run->tokens * token_bytes(stream, part),
                              (uint64_t)stream->daemon->options->limit_response_bytes, &run->blocks[part], error));
    decode_part(stream, layer, part, run->blocks[part]->data);
    run->rows[part] = run->blocks[part]->data;
  }
  return QKV_OK;
}

static qkv_status find_session(const fetch_stream *stream, qkv_session **session, qkv_error *error) {
  if (qkv_store_session(stream->daemon->store, qkvi_call_tenant(stream->call), stream->session, session, NULL) ==
      QKV_OK) {
    if (qkv_session_serial(*session) == stream->serial) return QKV_OK;
    qkv_session_unref(session);
  }
  return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", stream->session);
}

// The next run that has tokens; tokens 0 at the end of the last layer. Missing pages are restored where it may wait
// for the disk.
static qkv_status find_run(fetch_stream *stream, qkv_session *session, qkv_error *error) {
  fetch_run *run = &stream->run;
  const qkv_layer *layer = NULL;
  qkv_status status = QKV_OK;
  bool held = false;
  while (status == QKV_OK && stream->at < stream->layer_count && run->tokens == 0) {
    run->layer = stream->layers[stream->at];
    status = qkv_session_read(session, run->layer, &layer, error);
    if (status != QKV_OK) break;
    status = decode_run(stream, session, layer, error);
    qkv_session_read_done(session, run->layer);
    if (status == QKV_UNAVAILABLE && error->status == QKV_OK && (stream->waits & QKVI_WAIT_DISK) != 0) {
      const uint64_t end = stream->position + smaller(stream->stop - stream->position, restore_tokens(stream));
      if (held) qkvi_budget_release(stream->daemon->residency, session, run->layer);
      const qkvi_wanted wanted = {
          .call = stream->call, .session = session, .layer = run->layer, .begin = stream->position, .end = end};
      status = qkvi_restore(stream->daemon->residency, &wanted, NULL, error);
      held = status == QKV_OK;
      const uint64_t after = end + smaller(stream->stop - end, restore_tokens(stream));
      if (status == QKV_OK) qkvi_read_ahead_run(stream->daemon, session, run->layer, end, after);
      continue;
    }
    if (run->tokens > 0 || status != QKV_OK) break;
    if (held) qkvi_budget_release(stream->daemon->residency, session, run->layer);
    held = false;
    stream->at++;
    stream->entered = false;
  }
  if (held) qkvi_budget_release(stream->daemon->residency, session, run->layer);
  return status;
}

static qkv_status next_run(fetch_stream *stream, qkv_error *error) {
  qkv_session *session = NULL;
  qkv_status status = find_session(stream, &session, error);
  if (status != QKV_OK) return status;
  status = qkvi_unfold(stream->daemon->residency, stream->call, session, &stream->waits, error);
  if (status == QKV_OK) status = find_run(stream, session, error);
  qkv_session_unref(&session);
  return status;
}

// The same with the engine left out (server/handlers/discard.h).
static void next_discarded(fetch_stream *stream) {
  fetch_run *run = &stream->run;
  if (!stream->entered) stream->position = stream->begin;
  stream->entered = true;
  stream->stop = stream->end;
  if (stream->position >= stream->end) {
    stream->position = stream->begin;
    stream->at++;
  }
  if (stream->at == stream->layer_count || stream->begin == stream->end) return;
  run->layer = stream->layers[stream->at];
  run->position = stream->position;
  run->tokens = smaller(stream->end - stream->position, stream->chunk_tokens);
  stream->position += run->tokens;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (stream->wanted[part]) run->rows[part] = qkvi_discard_rows();
  }
}

// ---- Answers ----

static void drop_run(fetch_run *run) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) qkvi_block_release(run->blocks[part]);
  qkvi_coded_run_destroy(&run->coded);
  *run = (fetch_run){0};
}

// The run's next rows of a part go to the client's memory, where it has some for them.
static qkv_status write_shared(const fetch_stream *stream, qkv_part part, uint64_t tokens, qkv_error *error) {
  const qkvi_region_part *into = &stream->into[part];
  const fetch_run *run = &stream->run;
  const size_t bytes = tokens * token_bytes(stream, part);
  if (run->rows[part] == NULL || stream->into_region[part] == NULL) return QKV_OK;
  QKV_TRY(check_headroom(stream, part, tokens, error));
  return qkvi_region_write(stream->into_region[part], into->offset, run->rows[part], bytes, error);
}

// The part's rows of the run's next tokens. Field numbers are those of kv_cache.proto and tensor.proto.
static void put_rows(fetch_stream *stream, uint32_t field, qkv_part part, uint64_t tokens) {
  qkv_wire_writer *writer = stream->writer;
  fetch_run *run = &stream->run;
  const bool heads_first = stream->heads_first;
  const int64_t heads = stream->model->kv_heads, count = (int64_t)tokens;
  const int64_t dims[3] = {heads_first ? heads : count, heads_first ? count : heads, part_dim(stream->model, part)};
  size_t bytes = tokens * token_bytes(stream, part);
  qkv_wire_begin(writer, field);
  qkv_wire_put_varint(writer, 1, (uint64_t)stream->dtype);
  qkv_wire_put_packed(writer, 2, dims, 3);
  if (stream->into_region[part] != NULL) {
    qkvi_region_put(writer, &stream->into[part], 0, bytes);
    qkv_rpc_count_bytes(stream->call, bytes);
    stream->into[part].offset += bytes;
    stream->into[part].bytes -= bytes;
  } else {
    if (run->blocks[part] != NULL) qkvi_block_hold(run->blocks[part]);
    qkv_wire_put_reference(writer, 15, run->rows[part], bytes, run->blocks[part]);
  }
  qkv_wire_end(writer);
  if (!run->placed[part]) run->rows[part] += bytes;
  qkv_metric_add(&stream->daemon->metrics[QKV_METRIC_FETCH_BYTES], (int64_t)bytes);
}

// The run's next chunk, which ends the call where nothing can follow.
static void send_chunk(fetch_stream *stream) {
  fetch_run *run = &stream->run;
  const uint64_t tokens = run->coded != NULL ? run->tokens : smaller(run->tokens, stream->chunk_tokens);
  qkv_error error = {0};
  if (write_shared(stream, QKV_K, tokens, &error) != QKV_OK || write_shared(stream, QKV_V, tokens, &error) != QKV_OK)
    return qkvi_control_fail(stream->call, &error);
  qkv_wire_writer_clear(stream->writer);
  qkv_wire_put_varint(stream->writer, 1, run->layer);
  qkv_wire_put_varint(stream->writer, 2, run->position);
  if (run->rows[QKV_K] != NULL || run->placed[QKV_K]) put_rows(stream, 3, QKV_K, tokens);
  if (run->rows[QKV_V] != NULL || run->placed[QKV_V]) put_rows(stream, 4, QKV_V, tokens);
  if (run->coded != NULL)
    qkv_metric_add(&stream->daemon->metrics[QKV_METRIC_FETCH_BYTES],
                   (int64_t)qkvi_coded_run_put(run->coded, stream->writer));
  run->position += tokens;
  run->tokens -= tokens;
  const bool last = run->tokens == 0 && stream->position >= stream->stop && stream->at + 1 == stream->layer_count;
  if (run->tokens == 0) drop_run(run);  // the pieces hold its blocks
  (last ? qkv_rpc_reply : qkv_rpc_send)(stream->call, stream->writer, qkvi_block_release);
}

static void send_job(void *context);

// The rest of the fetch continues in a job that may wait for the disk.
static void wait_for_disk(fetch_stream *stream) {
  stream->waits |= QKVI_WAIT_DISK;
  qkvi_job_submit(stream->call, stream->waits, send_job, stream);
}

static void send_next(fetch_stream *stream) {
  qkv_error error = {0};
  qkv_status status = QKV_OK;
  if (stream->daemon->options->discard)
    next_discarded(stream);
  else
    status = next_run(stream, &error);
  if (status == QKV_UNAVAILABLE && error.status == QKV_OK) return wait_for_disk(stream);
  if (status != QKV_OK) return qkvi_control_fail(stream->call, &error);
  if (stream->run.tokens == 0) return qkv_rpc_finish(stream->call, QKV_OK, "");
  send_chunk(stream);
}

static void send_job(void *context) {
  fetch_stream *stream = context;
  if (!qkvi_job_wanted(stream->call)) return;
  if (stream->run.tokens > 0)
    send_chunk(stream);
  else
    send_next(stream);
}

// Copying to a GPU waits for it.
static bool may_wait(const fetch_stream *stream) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (stream->into_region[part] != NULL && qkvi_region_is_on_gpu(stream->into_region[part])) return true;
  }
  return false;
}

static void on_sent(qkv_rpc_call *call) {
  fetch_stream *stream = qkv_rpc_state(call);
  if (!may_wait(stream)) {
    if (stream->run.tokens > 0) return send_chunk(stream);
    if (stream->daemon->options->discard) return send_next(stream);
  }
  qkvi_job_submit(call, stream->waits, send_job, stream);
}

static void on_message(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  Qkv__V1__FetchRequest *request = qkvi_control_unpack_here(message, &qkv__v1__fetch_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  fetch_stream *stream = calloc(1, sizeof *stream);
  if (stream == NULL) abort();
  stream->call = call;
  stream->daemon = qkv_rpc_context(call);
  stream->writer = qkv_wire_writer_create();
  stream->waits = QKVI_WAIT_LAYERS;
  qkv_rpc_set_state(call, stream);
  qkv_status status = begin_fetch(stream, request, &error);
  qkvi_control_free(request);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  on_sent(call);
}

static void destroy(void *state) {
  fetch_stream *stream = state;
  if (stream == NULL) return;
  drop_run(&stream->run);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) qkvi_region_release(stream->into_region[part]);
  qkv_wire_writer_destroy(&stream->writer);
  free(stream->layers);
  free(stream);
}

const qkv_rpc_method qkvi_fetch_methods[] = {
    {.path = "/qkv.v1.KvCache/Fetch", .message = on_message, .sent = on_sent, .destroy = destroy}, {0}};
