#include "server/jobs.h"

#include <inttypes.h>

#include "server/control.h"
#include "server/daemon.h"

qkv_status qkvi_queue_full(qkv_daemon *daemon, qkv_error *error) {
  qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_QUEUE], 1);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-queue is %" PRId64 " jobs, that many wait already",
                  daemon->options->limit_queue);
}

qkv_status qkvi_pool_job_try(qkv_rpc_call *call, qkv_pool *pool, qkv_job_fn *job, void *context, qkv_error *error) {
  return qkv_pool_submit(pool, job, context) == QKV_OK ? QKV_OK : qkvi_queue_full(qkv_rpc_context(call), error);
}

// The pool that has the patience.
static qkv_pool *pool_of(const qkv_daemon *daemon, qkvi_patience patience) {
  return patience == QKVI_FOR_DISK ? daemon->disk_pool : daemon->pool;
}

qkv_status qkvi_patient_job_try(qkv_rpc_call *call, qkvi_patience patience, qkv_job_fn *job, void *context,
                                qkv_error *error) {
  return qkvi_pool_job_try(call, pool_of(qkv_rpc_context(call), patience), job, context, error);
}

void qkvi_patient_job_submit(qkv_rpc_call *call, qkvi_patience patience, qkv_job_fn *job, void *context) {
  qkv_error error = {0};
  if (qkvi_patient_job_try(call, patience, job, context, &error) != QKV_OK) qkvi_control_fail(call, &error);
}

qkv_status qkvi_job_try(qkv_rpc_call *call, qkv_job_fn *job, void *context, qkv_error *error) {
  return qkvi_patient_job_try(call, QKVI_FOR_LAYERS, job, context, error);
}

void qkvi_job_submit(qkv_rpc_call *call, qkv_job_fn *job, void *context) {
  qkvi_patient_job_submit(call, QKVI_FOR_LAYERS, job, context);
}

void qkvi_request_pool_job(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type,
                           qkv_pool *pool, qkv_job_fn *job) {
  qkv_error error = {0};
  void *request = qkvi_control_unpack(message, type, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  qkv_rpc_set_state(call, request);
  if (qkvi_pool_job_try(call, pool, job, call, &error) != QKV_OK) qkvi_control_fail(call, &error);
}

void qkvi_request_job(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type,
                      qkvi_patience patience, qkv_job_fn *job) {
  qkvi_request_pool_job(call, message, type, pool_of(qkv_rpc_context(call), patience), job);
}

qkvi_patience qkvi_session_patience(const qkv_rpc_call *call) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  return daemon->spill != NULL ? QKVI_FOR_DISK : QKVI_FOR_LAYERS;
}

qkv_status qkvi_request_session(const qkv_daemon *daemon, const char *name, qkv_session **session, qkv_error *error) {
  QKV_TRY(qkv_name_check(name, "session", error));
  return qkv_store_session(daemon->store, name, session, error);
}

bool qkvi_job_wanted(qkv_rpc_call *call) {
  if (!qkv_rpc_cancelled(call)) return true;
  qkv_rpc_finish(call, QKV_CANCELLED, "the client has gone");
  return false;
}
