#include "server/lifetime.h"

#include <jansson.h>

#include "engine/cache/session_spill.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "server/auth/identity.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"

// ---- Pin, Touch ----

static qkv_status pin(qkv_rpc_call *call, const Qkv__V1__PinRequest *request, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session *session = NULL;
  QKV_TRY(qkvi_request_session(call, request->session, &session, error));
  const bool pinned = !request->unpin;
  const qkv_status status = qkvi_catalogue_note(daemon->residency, session, &(qkvi_note){.pinned = &pinned}, error);
  qkv_session_unref(&session);
  return status;
}

static void pin_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_error error = {0};
  Qkv__V1__PinResponse response = QKV__V1__PIN_RESPONSE__INIT;
  if (!qkvi_job_wanted(call)) return;
  if (pin(call, qkv_rpc_state(call), &error) != QKV_OK) return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static qkv_status touch(qkv_rpc_call *call, const Qkv__V1__TouchRequest *request, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session *session = NULL;
  QKV_TRY(qkvi_request_session(call, request->session, &session, error));
  qkv_session_touch(session);
  qkv_status status = QKV_OK;
  if (request->ttl_ms_set_case == QKV__V1__TOUCH_REQUEST__TTL_MS_SET_TTL_MS) {
    status = qkvi_catalogue_note(daemon->residency, session, &(qkvi_note){.ttl_ms = &request->ttl_ms}, error);
  }
  qkv_session_unref(&session);
  return status;
}

static void touch_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_error error = {0};
  Qkv__V1__TouchResponse response = QKV__V1__TOUCH_RESPONSE__INIT;
  if (!qkvi_job_wanted(call)) return;
  if (touch(call, qkv_rpc_state(call), &error) != QKV_OK) return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_pin(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__pin_request__descriptor, qkvi_session_waits(call), pin_job);
}

static void on_touch(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__touch_request__descriptor, qkvi_session_waits(call), touch_job);
}

const qkv_rpc_method qkvi_lifetime_methods[] = {
    {.path = "/qkv.v1.KvCache/Pin", .message = on_pin, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/Touch", .message = on_touch, .destroy = qkvi_control_free},
    {0}};

// ---- Expiry ----

static void expire(qkv_daemon *daemon, qkv_session *session) {
  uint64_t freed = 0;
  qkv_error error = {0};
  if (qkv_store_close_session(daemon->store, session, &freed, NULL) != QKV_OK) return;
  if (qkvi_catalogue_closed(daemon->residency, session, &error) != QKV_OK)
    qkv_log(QKV_LOG_ERROR, "a session that expired may come back", "{s:s, s:s*, s:s}", "session",
            qkv_session_name(session), "tenant", qkvi_tenant_to_log(qkv_session_config_of(session)->tenant), "reason",
            error.text);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_SESSIONS_EXPIRED], 1);
  qkv_log(QKV_LOG_INFO, "session expired", "{s:s, s:s*, s:I}", "session", qkv_session_name(session), "tenant",
          qkvi_tenant_to_log(qkv_session_config_of(session)->tenant), "bytes", (json_int_t)freed);
}

// Closes those that expire first, until one has time left.
void qkvi_lifetime_expire(qkv_daemon *daemon) {
  qkv_recency *recency = qkv_store_recency(daemon->store);
  bool more = true;
  qkv_recency_begin(recency, QKV_RECENCY_EXPIRING);
  while (more) {
    qkv_session *session = qkv_recency_next(recency, QKV_RECENCY_EXPIRING);
    more = session != NULL && qkv_session_expired(session);
    if (more) expire(daemon, session);
    qkv_session_unref(&session);
  }
  qkv_recency_end(recency, QKV_RECENCY_EXPIRING);
  qkvi_objects_expire(daemon->objects);
}
