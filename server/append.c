// Append: a stream of messages with rows, each applied when it arrives.
#include "server/append.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "qkv/v1/kv_cache.pb-c.h"
#include "server/control.h"
#include "server/discard.h"
#include "server/handlers.h"
#include "server/jobs.h"

typedef struct append_stream {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  qkvi_request request;    // the message being applied
  uint64_t message;        // its number, from 0
  uint64_t items, tokens;  // applied, appended
} append_stream;

// ---- One item ----

qkv_status qkvi_append_item(qkv_daemon *daemon, qkv_session *session, const qkvi_item *item, uint64_t *appended,
                            uint64_t *length, qkv_error *error) {
  assert(item->k.rank == 3 && item->v.rank == 3);
  qkv_status status = daemon->options->discard
                          ? qkvi_discard_append(session, item, appended, length, error)
                          : qkv_session_append(session, item->layer, item->position, &item->k, &item->v,
                                               item->k_before_rope, appended, length, error);
  if (status == QKV_RESOURCE_EXHAUSTED) qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_BUDGET], 1);
  QKV_TRY(status);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_ITEMS], 1);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_TOKENS], (int64_t)*appended);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_BYTES], (int64_t)qkvi_item_row_bytes(item));
  return QKV_OK;
}

static qkv_status apply_item(append_stream *stream, const qkvi_item *item, qkv_error *error) {
  qkv_session *session = NULL;
  uint64_t appended = 0, length = 0;
  QKV_TRY(qkv_store_session(stream->daemon->store, item->session, &session, error));
  qkv_status status = qkvi_append_item(stream->daemon, session, item, &appended, &length, error);
  qkv_session_unref(&session);
  stream->items += status == QKV_OK;
  stream->tokens += appended;
  return status;
}

// ---- The stream ----

static void fail(const append_stream *stream, qkv_error *error) {
  (void)qkv_error_prefix(error, "message %" PRIu64 ": ", stream->message);
  qkvi_control_fail(stream->call, error);
}

// The items in order; the first that fails ends the call.
static void apply(append_stream *stream) {
  for (size_t i = 0; i < stream->request.count; i++) {
    qkvi_item *item = &stream->request.items[i];
    if (item->error.status == QKV_OK && apply_item(stream, item, &item->error) != QKV_OK)
      (void)qkvi_item_place(&item->error, i);
    if (item->error.status != QKV_OK) return fail(stream, &item->error);
  }
  stream->message++;
  qkv_rpc_next(stream->call);
}

static void apply_job(void *context) {
  append_stream *stream = context;
  if (qkvi_job_wanted(stream->call)) apply(stream);
}

static append_stream *stream_of(qkv_rpc_call *call) {
  append_stream *stream = qkv_rpc_state(call);
  if (stream != NULL) return stream;
  stream = calloc(1, sizeof *stream);
  if (stream == NULL) abort();
  stream->call = call;
  stream->daemon = qkv_rpc_context(call);
  qkv_rpc_set_state(call, stream);
  return stream;
}

static void on_message(qkv_rpc_call *call, qkv_bytes message) {
  append_stream *stream = stream_of(call);
  const qkvi_limits limits = qkvi_limits_of(stream->daemon->options);
  qkv_error error = {0};
  if (qkvi_request_parse(message, QKVI_APPEND_REQUEST, &limits, &stream->request, &error) != QKV_OK)
    return fail(stream, &error);
  if (qkvi_request_row_bytes(&stream->request) > QKVI_INLINE_ROWS_MAX)
    qkvi_job_submit(call, apply_job, stream);
  else
    apply(stream);
}

static void on_end(qkv_rpc_call *call) {
  const append_stream *stream = qkv_rpc_state(call);
  if (stream == NULL) return qkv_rpc_finish(call, QKV_INVALID_ARGUMENT, "the call has no message, at least 1");
  Qkv__V1__AppendResponse response = QKV__V1__APPEND_RESPONSE__INIT;
  response.items = stream->items;
  response.tokens = stream->tokens;
  qkvi_control_reply(call, &response.base);
}

static void destroy(void *state) {
  append_stream *stream = state;
  if (stream == NULL) return;
  qkvi_request_deinit(&stream->request);
  free(stream);
}

const qkv_rpc_method qkvi_append_methods[] = {
    {.path = "/qkv.v1.KvCache/Append", .message = on_message, .end = on_end, .destroy = destroy}, {0}};
