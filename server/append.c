// Append: a stream of messages with rows, each applied when it arrives.
#include "server/append.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "server/control.h"
#include "server/discard.h"
#include "server/handlers.h"
#include "server/jobs.h"
#include "server/restore.h"

typedef struct append_stream {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  qkv_bytes message;  // the one being applied
  uint64_t number;    // its number, from 0
  bool parsed;        // `request` is this message's
  bool bulk;          // it has so much that others go before it
  qkvi_patience patience;
  qkvi_request request;
  size_t next;             // item to apply
  uint64_t items, tokens;  // applied, appended
} append_stream;

// ---- One item ----

enum { TRIES = 4 };

// What the append is to be compared with, and room for the rest: then it fails only where others have changed the
// layer meanwhile.
static qkv_status prepare(const qkv_daemon *daemon, qkv_session *session, const qkvi_item *item, uint64_t *room,
                          qkv_error *error) {
  const uint64_t end = item->position + (uint64_t)item->k.dims[0];
  const qkvi_wanted wanted = {.session = session,
                              .layer = item->layer,
                              .begin = item->position,
                              .end = end,
                              .beside = qkv_session_append_cost(session, item->layer, end)};
  return qkvi_restore(daemon->spill, &wanted, room, error);
}

static qkv_status append_patiently(const qkv_daemon *daemon, qkv_session *session, const qkvi_item *item,
                                   uint64_t *appended, uint64_t *length, qkv_error *error) {
  qkv_status status = QKV_UNAVAILABLE;
  for (int i = 0; i <= TRIES && (status == QKV_UNAVAILABLE || status == QKV_RESOURCE_EXHAUSTED); i++) {
    uint64_t room = 0;
    *error = (qkv_error){0};
    if (i > 0) QKV_TRY(prepare(daemon, session, item, &room, error));
    status = qkv_session_append_in(session, item->layer, &room, item->position, &item->k, &item->v,
                                   item->k_before_rope, appended, length, error);
    qkvi_spill_unclaim(daemon->spill, &room);
    if (i > 0) qkvi_spill_release(daemon->spill, session, item->layer);
  }
  return status;
}

static qkv_status append_rows(const qkv_daemon *daemon, qkv_session *session, const qkvi_item *item,
                              qkvi_patience *patience, uint64_t *appended, uint64_t *length, qkv_error *error) {
  qkv_error reason = {0};
  qkv_status status;
  if (daemon->options->discard) return qkvi_discard_append(session, item, appended, length, error);
  if (*patience == QKVI_FOR_DISK) {
    status = append_patiently(daemon, session, item, appended, length, &reason);
  } else {
    status = (*patience == QKVI_AT_ONCE ? qkv_session_try_append : qkv_session_append)(
        session, item->layer, item->position, &item->k, &item->v, item->k_before_rope, appended, length, &reason);
    const bool cold = status == QKV_UNAVAILABLE && *patience == QKVI_FOR_LAYERS;
    const bool full = status == QKV_RESOURCE_EXHAUSTED && daemon->spill != NULL;
    if (status == QKV_UNAVAILABLE || full) {
      *patience = cold || full ? QKVI_FOR_DISK : QKVI_FOR_LAYERS;
      return QKV_UNAVAILABLE;
    }
  }
  if (status != QKV_OK) *error = reason;
  return status;
}

qkv_status qkvi_append_item(qkv_daemon *daemon, qkv_session *session, const qkvi_item *item, qkvi_patience *patience,
                            uint64_t *appended, uint64_t *length, qkv_error *error) {
  assert(item->k.rank == 3 && item->v.rank == 3);
  if (qkvi_spill_is_loose(daemon->spill, session)) {
    if (*patience != QKVI_FOR_DISK) {
      *patience = QKVI_FOR_DISK;
      return QKV_UNAVAILABLE;
    }
    QKV_TRY(qkvi_spill_tie(daemon->spill, session, error));
  }
  qkv_status status = append_rows(daemon, session, item, patience, appended, length, error);
  if (status == QKV_RESOURCE_EXHAUSTED) qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_BUDGET], 1);
  QKV_TRY(status);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_ITEMS], 1);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_TOKENS], (int64_t)*appended);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_BYTES], (int64_t)qkvi_item_row_bytes(item));
  return QKV_OK;
}

qkv_status qkvi_append_sync(qkv_daemon *daemon, qkv_session *session, qkvi_patience *patience, qkv_error *error) {
  if (!qkvi_spill_owes(daemon->spill, session)) return QKV_OK;
  if (*patience == QKVI_FOR_DISK) return qkvi_spill_sync(daemon->spill, session, error);
  *patience = QKVI_FOR_DISK;
  return QKV_UNAVAILABLE;
}

static qkv_status apply_item(append_stream *stream, const qkvi_item *item, qkv_error *error) {
  qkv_session *session = NULL;
  uint64_t appended = 0, length = 0;
  QKV_TRY(qkv_store_session(stream->daemon->store, item->session, &session, error));
  qkv_status status = qkvi_append_item(stream->daemon, session, item, &stream->patience, &appended, &length, error);
  qkv_session_unref(&session);
  stream->items += status == QKV_OK;
  stream->tokens += appended;
  return status;
}

// Of all sessions that the message names.
static qkv_status sync_sessions(append_stream *stream, qkv_error *error) {
  const char *last = "";
  for (size_t i = 0; i < stream->request.count && stream->daemon->spill != NULL; i++) {
    const char *name = stream->request.items[i].session;
    qkv_session *session = NULL;
    if (strcmp(name, last) == 0) continue;
    QKV_TRY(qkv_store_session(stream->daemon->store, name, &session, error));
    last = name;
    const qkv_status status = qkvi_append_sync(stream->daemon, session, &stream->patience, error);
    qkv_session_unref(&session);
    QKV_TRY(status);
  }
  return QKV_OK;
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
  const qkv_daemon *daemon = stream->daemon;
  qkv_pool *pool = stream->bulk ? daemon->bulk_pool : daemon->pool;
  if (stream->patience == QKVI_FOR_DISK) pool = stream->bulk ? daemon->bulk_disk_pool : daemon->disk_pool;
  if (qkvi_pool_job_try(stream->call, pool, apply_job, stream, &error) != QKV_OK) fail(stream, &error);
}

// The items in order; the first that fails ends the call. What takes more patience, and the rest, is left to a job.
static void apply(append_stream *stream) {
  for (; stream->next < stream->request.count; stream->next++) {
    qkvi_item *item = &stream->request.items[stream->next];
    if (!qkvi_job_wanted(stream->call)) return;
    if (item->error.status != QKV_OK) return fail(stream, &item->error);
    qkv_status status = apply_item(stream, item, &item->error);
    if (status == QKV_OK) continue;
    if (status == QKV_UNAVAILABLE && item->error.status == QKV_OK) return submit(stream);
    (void)qkvi_item_place(&item->error, stream->next);
    return fail(stream, &item->error);
  }
  qkv_error error = {0};
  const qkv_status synced = sync_sessions(stream, &error);
  if (synced == QKV_UNAVAILABLE && error.status == QKV_OK) return submit(stream);
  if (synced != QKV_OK) return fail(stream, &error);
  stream->number++;
  qkv_rpc_next(stream->call);
}

static void apply_job(void *context) {
  append_stream *stream = context;
  if (qkvi_job_wanted(stream->call) && (stream->parsed || parse(stream))) apply(stream);
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
  stream->patience = QKVI_FOR_LAYERS;
  // There is no work behind rows that are dropped, however many.
  const bool discard = stream->daemon->options->discard;
  stream->bulk = message.length > QKVI_INLINE_MESSAGE_MAX && !discard;
  if (stream->bulk) return submit(stream);
  if (!parse(stream)) return;
  stream->bulk = qkvi_request_row_bytes(&stream->request) > QKVI_INLINE_ROWS_MAX && !discard;
  if (stream->bulk) return submit(stream);
  stream->patience = QKVI_AT_ONCE;
  apply(stream);
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
