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
  qkv_bytes message;  // the one being applied
  uint64_t number;    // its number, from 0
  bool parsed;        // `request` is this message's
  qkvi_request request;
  size_t next;             // item to apply
  uint64_t items, tokens;  // applied, appended
} append_stream;

// ---- One item ----

static qkv_status append_rows(qkv_daemon *daemon, qkv_session *session, const qkvi_item *item, bool wait,
                              uint64_t *appended, uint64_t *length, qkv_error *error) {
  if (daemon->options->discard) return qkvi_discard_append(session, item, appended, length, error);
  return (wait ? qkv_session_append : qkv_session_try_append)(session, item->layer, item->position, &item->k,
                                                              &item->v, item->k_before_rope, appended, length, error);
}

qkv_status qkvi_append_item(qkv_daemon *daemon, qkv_session *session, const qkvi_item *item, bool wait,
                            uint64_t *appended, uint64_t *length, qkv_error *error) {
  assert(item->k.rank == 3 && item->v.rank == 3);
  qkv_status status = append_rows(daemon, session, item, wait, appended, length, error);
  if (status == QKV_RESOURCE_EXHAUSTED) qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_BUDGET], 1);
  QKV_TRY(status);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_ITEMS], 1);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_TOKENS], (int64_t)*appended);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_BYTES], (int64_t)qkvi_item_row_bytes(item));
  return QKV_OK;
}

static qkv_status apply_item(append_stream *stream, const qkvi_item *item, bool wait, qkv_error *error) {
  qkv_session *session = NULL;
  uint64_t appended = 0, length = 0;
  QKV_TRY(qkv_store_session(stream->daemon->store, item->session, &session, error));
  qkv_status status = qkvi_append_item(stream->daemon, session, item, wait, &appended, &length, error);
  qkv_session_unref(&session);
  stream->items += status == QKV_OK;
  stream->tokens += appended;
  return status;
}

// ---- The stream ----

static void fail(const append_stream *stream, qkv_error *error) {
  (void)qkv_error_prefix(error, "message %" PRIu64 ": ", stream->number);
  qkvi_control_fail(stream->call, error);
}

// False where the call is over.
static bool parse(append_stream *stream) {
  const qkvi_limits limits = qkvi_limits_of(stream->daemon->options);
  qkv_error error = {0};
  qkv_status status = qkvi_request_parse(stream->message, QKVI_APPEND_REQUEST, &limits, &stream->request, &error);
  stream->parsed = status == QKV_OK;
  if (status != QKV_OK) fail(stream, &error);
  return status == QKV_OK;
}

static void apply_job(void *context);

static void submit(append_stream *stream) {
  qkv_error error = {0};
  if (qkvi_job_try(stream->call, apply_job, stream, &error) != QKV_OK) fail(stream, &error);
}

// The items in order; the first that fails ends the call. Without `wait`, the first whose layer is in use and the
// rest are left to a job.
static void apply(append_stream *stream, bool wait) {
  for (; stream->next < stream->request.count; stream->next++) {
    qkvi_item *item = &stream->request.items[stream->next];
    if (!qkvi_job_wanted(stream->call)) return;
    if (item->error.status != QKV_OK) return fail(stream, &item->error);
    qkv_status status = apply_item(stream, item, wait, &item->error);
    if (status == QKV_UNAVAILABLE) return submit(stream);
    if (status == QKV_OK) continue;
    (void)qkvi_item_place(&item->error, stream->next);
    return fail(stream, &item->error);
  }
  stream->number++;
  qkv_rpc_next(stream->call);
}

static void apply_job(void *context) {
  append_stream *stream = context;
  if (qkvi_job_wanted(stream->call) && (stream->parsed || parse(stream))) apply(stream, true);
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
  stream->message = message;
  stream->parsed = false;
  stream->next = 0;
  // There is no work behind rows that are dropped, however many.
  const bool discard = stream->daemon->options->discard;
  if (message.length > QKVI_INLINE_MESSAGE_MAX && !discard) return submit(stream);
  if (!parse(stream)) return;
  if (qkvi_request_row_bytes(&stream->request) > QKVI_INLINE_ROWS_MAX && !discard) return submit(stream);
  apply(stream, false);
}

static void on_end(qkv_rpc_call *call) {
  const append_stream *stream = qkv_rpc_state(call);
  if (stream == NULL)
    return qkv_rpc_finish(call, QKV_INVALID_ARGUMENT,
                          "the call of /qkv.v1.KvCache/Append has no message, 1 is needed");
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
