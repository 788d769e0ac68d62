#include "server/handlers/stage.h"

#include <string.h>

#include "engine/cache/session_spill.h"
#include "server/evict.h"
#include "server/handlers/control.h"
#include "server/handlers/open_session.h"

qkv_session *qkvi_stage_find(const qkvi_stage *stage, const char *name) {
  for (size_t i = stage->count; i-- > 0;) {
    if (strcmp(qkv_session_name(stage->sessions[i]), name) == 0) return stage->sessions[i];
  }
  return NULL;
}

// ---- Opening ----

static qkv_status open_one(const qkv_rpc_call *call, qkvi_stage *stage, const Qkv__V1__OpenSessionRequest *request,
                           qkv_error *error) {
  qkv_session_config config;
  QKV_TRY(qkvi_open_config(call, request, &config, error));
  if (request->n_prefix_token_ids > 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "prefix_token_ids has %zu entries, an append opens without a prefix",
                    request->n_prefix_token_ids);
  if (qkvi_stage_find(stage, request->session) != NULL)
    return qkv_fail(error, QKV_ALREADY_EXISTS, "this stream has opened the session %s already", request->session);
  if (stage->count == QKVI_STAGE_MAX)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "a stream opens %d sessions at most before they are complete",
                    QKVI_STAGE_MAX);
  config.staged = true;
  QKV_TRY(qkvi_open_empty(call, &config, request->model, QKVI_WAIT_MEMORY, &stage->sessions[stage->count], error));
  stage->count++;
  return QKV_OK;
}

static qkv_status open_field(const qkv_rpc_call *call, qkvi_stage *stage, qkv_bytes message, size_t index,
                             qkv_error *error) {
  Qkv__V1__OpenSessionRequest *request =
      qkvi_control_unpack(message, &qkv__v1__open_session_request__descriptor, error);
  qkv_status status = request == NULL ? error->status : open_one(call, stage, request, error);
  if (request != NULL) qkvi_control_free(request);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "open[%zu]: ", index);
}

qkv_status qkvi_stage_open(const qkv_rpc_call *call, qkvi_stage *stage, qkv_bytes message, qkv_error *error) {
  enum { OPEN = 2 };
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, message);
  for (size_t index = 0;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == OPEN) QKV_TRY(open_field(call, stage, field.bytes, index++, error));
  }
}

// ---- Ending ----

static qkv_status seal(qkv_daemon *daemon, qkv_session *session, qkv_error *error) {
  qkv_status status = QKV_RESOURCE_EXHAUSTED;
  for (int i = 0; i <= QKVI_EVICT_TRIES && status == QKV_RESOURCE_EXHAUSTED; i++) {
    qkv_session_info info;
    qkv_session_read_info(session, &info, NULL);
    if (i > 0 && !qkvi_evict(daemon, qkv_session_account(session), session, info.usage.bytes_exact)) break;
    *error = (qkv_error){0};
    status = qkv_session_seal(session, error);
  }
  return status;
}

// Makes the session visible and journals it.
static qkv_status publish(const qkv_rpc_call *call, qkv_session *session, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session_set_whole(session, qkv_session_length(session));
  QKV_TRY(qkv_store_publish(daemon->store, session, error));
  if (qkv_session_config_of(session)->backing == NULL) return QKV_OK;
  qkv_status status = qkvi_catalogue_opened(daemon->residency, session, error);
  if (status == QKV_OK && qkvi_write_back_owes(daemon->residency, session))
    status = qkvi_write_back_sync(daemon->residency, call, session, error);
  return status;
}

qkv_status qkvi_stage_complete(const qkv_rpc_call *call, qkvi_stage *stage, bool sealed, uint64_t *completed,
                               qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  size_t done = 0;
  qkv_status status = QKV_OK;
  while (done < stage->count && status == QKV_OK) {
    qkv_session *session = stage->sessions[done];
    if (sealed) status = seal(daemon, session, error);
    if (status == QKV_OK) status = publish(call, session, error);
    if (status == QKV_OK) qkv_session_unref(&stage->sessions[done++]);
  }
  stage->count -= done;
  memmove(stage->sessions, stage->sessions + done, stage->count * sizeof *stage->sessions);
  *completed += done;
  qkv_metric_add(&daemon->metrics[QKV_METRIC_SESSIONS_COMPLETED], (int64_t)done);
  return status;
}

void qkvi_stage_drop(qkv_daemon *daemon, qkvi_stage *stage) {
  qkv_metric_add(&daemon->metrics[QKV_METRIC_SESSIONS_INCOMPLETE], (int64_t)stage->count);
  while (stage->count > 0) {
    qkv_session **last = &stage->sessions[--stage->count];
    uint64_t freed;
    (void)qkv_store_close_session(daemon->store, *last, &freed, NULL);
    qkvi_catalogue_drop(daemon->residency, *last);
    qkv_session_unref(last);
  }
}
