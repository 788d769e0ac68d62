// Append: a stream of messages with rows, each applied when it arrives.
#include "server/handlers/append.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "server/auth/identity.h"
#include "server/evict.h"
#include "server/handlers/append_coded.h"
#include "server/handlers/append_ids.h"
#include "server/handlers/control.h"
#include "server/handlers/discard.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/handlers/stage.h"
#include "server/residency/fold.h"
#include "server/residency/restore.h"

typedef struct append_stream {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  qkv_bytes message;  // the one being applied
  uint64_t number;    // its number, from 0
  bool parsed;        // `request` is this message's
  bool bulk;          // it is so large that others are scheduled before it
  qkvi_waits waits;   // its wait reasons
  qkvi_request request;
  size_t next;                       // item to apply
  uint64_t items, tokens, sessions;  // applied, appended, completed
  bool opened;                       // the session that the message opens
  qkvi_stage stage;
} append_stream;

// ---- One item ----

enum { TRIES = 4 };

// Nothing is freed or brought back for an append that will be refused.
static qkv_status check(qkv_session *session, const qkvi_item *item, qkv_error *error) {
  const bool rows = item->pages == 0;
  return qkv_session_append_check(session, item->layer, item->position, rows ? &item->k : NULL,
                                  rows ? &item->v : NULL, error);
}

// What the append is compared with, and a reservation for the rest: then it fails only where others have changed the
// layer meanwhile.
static qkv_status prepare(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                          const qkvi_append_ids *ids, uint64_t *headroom, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const uint64_t end = item->position + (uint64_t)item->k.dims[0];
  QKV_TRY(check(session, item, error));
  const qkvi_wanted wanted = {
      .call = call,
      .session = session,
      .layer = item->layer,
      .begin = item->position,
      .end = end,
      .extra = qkv_session_append_cost(session, item->layer, end) + qkvi_append_ids_cost(ids)};
  return qkvi_restore(daemon->residency, &wanted, headroom, error);
}

// `headroom` NULL: without a reservation. UNAVAILABLE where it would have to wait for more than `waits`, or where
// pages have to come back.
static qkv_status append_once(const qkv_daemon *daemon, qkv_session *session, const qkvi_item *item,
                              qkvi_append_ids *ids, uint64_t *headroom, qkvi_waits waits, uint64_t *appended,
                              uint64_t *length, qkv_error *error) {
  qkv_append_use use = {.headroom = headroom,
                        .ids = ids->count == 0 ? NULL : ids->ids,
                        .separate = daemon->options->separate_appends,
                        .at_once = (waits & (QKVI_WAIT_ROWS | QKVI_WAIT_DISK)) == 0,
                        .encoder = item->source.encoder.encode != NULL ? &item->source.encoder : NULL};
  QKV_TRY(qkvi_append_ids_reserve(ids, headroom, error));
  const qkv_status status = (waits & QKVI_WAIT_LAYERS) == 0
                                ? qkv_session_try_append(session, item->layer, use.ids, item->position, &item->k,
                                                         &item->v, item->k_before_rope, appended, length, error)
                                : qkv_session_append_in(session, item->layer, &use, item->position, &item->k,
                                                        &item->v, item->k_before_rope, appended, length, error);
  qkvi_append_ids_done(ids, status == QKV_OK);
  ids->pages_shared += use.pages_shared;
  return status;
}

static qkv_status append_waiting(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                                 qkvi_append_ids *ids, uint64_t *appended, uint64_t *length, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_status status = QKV_UNAVAILABLE;
  for (int i = 0; i <= TRIES && (status == QKV_UNAVAILABLE || status == QKV_RESOURCE_EXHAUSTED); i++) {
    uint64_t headroom = 0;
    *error = (qkv_error){0};
    if (i > 0) QKV_TRY(prepare(call, session, item, ids, &headroom, error));
    status = append_once(daemon, session, item, ids, &headroom, QKVI_WAIT_LAYERS | QKVI_WAIT_DISK, appended, length,
                         error);
    qkvi_budget_unreserve(daemon->residency, &headroom);
    if (i > 0) qkvi_budget_release(daemon->residency, session, item->layer);
  }
  return status;
}

// After layers the rows, or the disk, where pages may have to come back.
static qkvi_waits next_wait(const qkv_daemon *daemon, qkvi_waits waits, bool full) {
  if (!full && (waits & QKVI_WAIT_LAYERS) == 0) return QKVI_WAIT_LAYERS;
  return daemon->residency != NULL ? QKVI_WAIT_DISK : QKVI_WAIT_ROWS;
}

static qkv_status append_with_ids(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                                  qkvi_append_ids *ids, qkvi_waits *waits, uint64_t *appended, uint64_t *length,
                                  qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_error reason = {0};
  qkv_status status;
  if ((*waits & QKVI_WAIT_DISK) != 0) {
    status = append_waiting(call, session, item, ids, appended, length, &reason);
  } else {
    status = append_once(daemon, session, item, ids, NULL, *waits, appended, length, &reason);
    const bool full = status == QKV_RESOURCE_EXHAUSTED && daemon->residency != NULL;
    if (status == QKV_UNAVAILABLE || full) {
      *waits |= next_wait(daemon, *waits, full);
      return QKV_UNAVAILABLE;
    }
  }
  if (status != QKV_OK) *error = reason;
  return status;
}

static qkv_status append_rows(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                              qkvi_waits *waits, uint64_t *appended, uint64_t *length, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkvi_append_ids ids;
  *appended = *length = 0;
  if (item->pages > 0) return qkvi_append_pages(call, session, item, waits, appended, length, error);
  if (daemon->options->discard) return qkvi_discard_append(session, item, appended, length, error);
  // Pages of these tokens may be another session's: the search is too long for a completion-queue thread.
  if ((*waits & QKVI_WAIT_LAYERS) == 0 && item->token_ids.count >= QKV_PREFIX_PAGE) {
    *waits |= QKVI_WAIT_LAYERS;
    return QKV_UNAVAILABLE;
  }
  qkvi_append_ids_init(&ids, session, item);
  const qkv_status status = append_with_ids(call, session, item, &ids, waits, appended, length, error);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_SHARED_PAGES], (int64_t)ids.pages_shared);
  qkvi_append_ids_deinit(&ids);
  return status;
}

// Where memory is full sessions may be closed for it, by a thread that may wait until they have left it.
static qkv_status append_evicting(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                                  qkvi_waits *waits, uint64_t *appended, uint64_t *length, qkv_error *error) {
  qkv_status status = append_rows(call, session, item, waits, appended, length, error);
  if (status == QKV_RESOURCE_EXHAUSTED && (*waits & (QKVI_WAIT_MEMORY | QKVI_WAIT_DISK)) == 0) {
    *waits |= QKVI_WAIT_LAYERS | QKVI_WAIT_MEMORY;
    *error = (qkv_error){0};
    return QKV_UNAVAILABLE;
  }
  qkv_error invalid = {0};
  if (status == QKV_RESOURCE_EXHAUSTED && check(session, item, &invalid) != QKV_OK) {
    *error = invalid;
    return invalid.status;
  }
  for (int i = 0; i < QKVI_EVICT_TRIES && status == QKV_RESOURCE_EXHAUSTED; i++) {
    // The layer is in memory: it was refused for want of memory.
    const uint64_t tokens = item->pages > 0 ? item->token_ids.count : (uint64_t)item->k.dims[0];
    const uint64_t bytes = qkv_session_append_cost(session, item->layer, item->position + tokens) + item->page_bytes;
    if (!qkvi_evict(qkv_rpc_context(call), qkv_session_account(session), session, bytes)) break;
    *error = (qkv_error){0};
    status = append_rows(call, session, item, waits, appended, length, error);
  }
  return status;
}

qkv_status qkvi_append_item(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item, qkvi_waits *waits,
                            uint64_t *appended, uint64_t *length, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  assert((item->k.rank == 3 && item->v.rank == 3) || item->pages > 0);
  QKV_TRY(qkvi_unfold(daemon->residency, call, session, waits, error));
  if (qkvi_catalogue_is_unconfirmed(daemon->residency, session)) {
    if ((*waits & QKVI_WAIT_DISK) == 0) {
      *waits |= QKVI_WAIT_DISK;
      return QKV_UNAVAILABLE;
    }
    QKV_TRY(qkvi_catalogue_tie(daemon->residency, call, session, error));
  }
  qkv_status status = append_evicting(call, session, item, waits, appended, length, error);
  if (status == QKV_RESOURCE_EXHAUSTED) qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_BUDGET], 1);
  QKV_TRY(status);
  qkv_rpc_count_rows(call, *appended);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_ITEMS], 1);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_TOKENS], (int64_t)*appended);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_BYTES], (int64_t)qkvi_item_row_bytes(item));
  return QKV_OK;
}

qkv_status qkvi_append_sync(const qkv_rpc_call *call, qkv_session *session, qkvi_waits *waits, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  if (!qkvi_write_back_owes(daemon->residency, session)) return QKV_OK;
  if ((*waits & QKVI_WAIT_DISK) != 0) return qkvi_write_back_sync(daemon->residency, call, session, error);
  *waits |= QKVI_WAIT_DISK;
  return QKV_UNAVAILABLE;
}

static qkv_status apply_item(append_stream *stream, const qkvi_item *item, qkv_error *error) {
  qkv_session *session = qkvi_stage_find(&stream->stage, item->session);
  uint64_t appended = 0, length = 0;
  if (session != NULL) {
    (void)qkv_session_ref(session);
  } else {
    QKV_TRY(qkv_store_session(stream->daemon->store, qkvi_call_tenant(stream->call), item->session, &session, error));
  }
  qkv_status status = qkvi_append_item(stream->call, session, item, &stream->waits, &appended, &length, error);
  qkv_session_unref(&session);
  stream->items += status == QKV_OK;
  stream->tokens += appended;
  return status;
}

// All sessions that the message names, except staged ones, which follow when they are complete.
static qkv_status sync_sessions(append_stream *stream, qkv_error *error) {
  const char *last = "";
  for (size_t i = 0; i < stream->request.count && stream->daemon->residency != NULL; i++) {
    const char *name = stream->request.items[i].session;
    qkv_session *session = NULL;
    if (strcmp(name, last) == 0 || qkvi_stage_find(&stream->stage, name) != NULL) continue;
    QKV_TRY(qkv_store_session(stream->daemon->store, qkvi_call_tenant(stream->call), name, &session, error));
    last = name;
    const qkv_status status = qkvi_append_sync(stream->call, session, &stream->waits, error);
    qkv_session_unref(&session);
    QKV_TRY(status);
  }
  return QKV_OK;
}

// ---- The stream ----

static void fail(append_stream *stream, qkv_error *error) {
  qkvi_stage_drop(stream->daemon, &stream->stage);  // before the client is answered
  (void)qkv_error_prefix(error, "message %" PRIu64 ": ", stream->number);
  qkvi_control_fail(stream->call, error);
}

// False where the call is over.
static bool parse(append_stream *stream) {
  const qkvi_limits limits = qkvi_limits_of(stream->daemon->options);
  qkv_error error = {0};
  qkv_status status = qkvi_request_parse(stream->message, QKVI_APPEND_REQUEST, &limits, &stream->request, &error);
  stream->parsed = status == QKV_OK;
  if (status == QKV_OK && stream->request.count > 0 && stream->request.items[0].error.status == QKV_OK)
    qkv_rpc_name_session(stream->call, stream->request.items[0].session);
  if (status != QKV_OK) fail(stream, &error);
  return status == QKV_OK;
}

static void apply_job(void *context);

static void submit(append_stream *stream) {
  qkv_error error = {0};
  const qkv_work work = qkvi_work_of(stream->waits, stream->bulk);
  if (qkvi_job_try(stream->call, work, apply_job, stream, &error) != QKV_OK) fail(stream, &error);
}

// Before sessions are opened or completed, for which others may be closed. False: a job goes on that may wait for
// that.
static bool may_stage(append_stream *stream) {
  const qkvi_waits wanted = qkvi_session_waits(stream->call) | QKVI_WAIT_MEMORY;
  if ((wanted & ~stream->waits) == 0) return true;
  stream->waits |= wanted;
  submit(stream);
  return false;
}

// Opens the message's sessions. False where the call is over, or a job goes on: very many rows are coded in one that
// computes.
static bool open_stage(append_stream *stream) {
  qkv_error refused = {0};
  if (stream->opened || stream->request.opens == 0) return true;
  if (!may_stage(stream)) return false;
  stream->opened = true;
  if (qkvi_stage_open(stream->call, &stream->stage, stream->message, &refused) != QKV_OK) {
    fail(stream, &refused);
    return false;
  }
  if (!stream->bulk || stream->request.count == 0) return true;
  stream->waits = QKVI_WAIT_LAYERS;
  submit(stream);
  return false;
}

// The items in order; the first that fails ends the call. An item that has to wait for more, and the rest, is left to
// a job.
static void apply(append_stream *stream) {
  const uint64_t shared =
      qkvi_request_load(&stream->request, stream->daemon->regions, qkvi_call_tenant(stream->call));
  if (shared > 0) qkv_rpc_count_bytes(stream->call, shared);
  if (!open_stage(stream)) return;
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
  if (stream->request.complete && !may_stage(stream)) return;
  if (stream->request.complete &&
      qkvi_stage_complete(stream->call, &stream->stage, stream->request.seal, &stream->sessions, &error) != QKV_OK)
    return fail(stream, &error);
  stream->number++;
  qkvi_request_unload(&stream->request);
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
  stream->opened = false;
  stream->next = 0;
  stream->waits = QKVI_WAIT_LAYERS;
  // Discarded rows cost nothing, however many, unless they have to be copied.
  const bool discard = stream->daemon->options->discard;
  stream->bulk = message.length > QKVI_INLINE_MESSAGE_MAX && !discard;
  if (stream->bulk) return submit(stream);
  if (!parse(stream)) return;
  stream->bulk = (qkvi_request_row_bytes(&stream->request) > QKVI_INLINE_ROWS_MAX && !discard) ||
                 stream->request.shared_bytes > QKVI_INLINE_ROWS_MAX ||
                 qkvi_request_may_wait(&stream->request, stream->daemon->regions);
  if (stream->bulk) return submit(stream);
  stream->waits = 0;
  apply(stream);
}

// The pages of what the stream has not completed are freed one by one, which may take a tenth of a second.
static void fail_incomplete(void *context) {
  append_stream *stream = context;
  char text[256];
  if (!qkvi_job_wanted(stream->call)) return;
  (void)snprintf(text, sizeof text, "the stream has ended without `complete`: session %s is dropped",
                 qkv_session_name(stream->stage.sessions[0]));
  qkvi_stage_drop(stream->daemon, &stream->stage);
  qkv_rpc_finish(stream->call, QKV_FAILED_PRECONDITION, text);
}

static void on_end(qkv_rpc_call *call) {
  append_stream *stream = qkv_rpc_state(call);
  if (stream == NULL)
    return qkv_rpc_finish(call, QKV_INVALID_ARGUMENT,
                          "the call of /qkv.v1.KvCache/Append has no message, 1 is needed");
  if (stream->stage.count > 0) return qkvi_job_submit(call, qkvi_session_waits(call), fail_incomplete, stream);
  Qkv__V1__AppendResponse response = QKV__V1__APPEND_RESPONSE__INIT;
  response.items = stream->items;
  response.tokens = stream->tokens;
  response.sessions = stream->sessions;
  qkvi_control_reply(call, &response.base);
}

static void drop_stream(void *context) {
  append_stream *stream = context;
  qkvi_stage_drop(stream->daemon, &stream->stage);
  free(stream);
}

// Where the client has gone sessions may be left, which a job drops.
static void destroy(void *state) {
  append_stream *stream = state;
  if (stream == NULL) return;
  qkvi_request_deinit(&stream->request);
  if (stream->stage.count == 0 ||
      qkv_executor_submit(stream->daemon->executor, QKV_WORK_BULK, drop_stream, stream) != QKV_OK)
    drop_stream(stream);
}

const qkv_rpc_method qkvi_append_methods[] = {
    {.path = "/qkv.v1.KvCache/Append", .message = on_message, .end = on_end, .destroy = destroy}, {0}};
