#include "server/handlers/jobs.h"

#include <inttypes.h>
#include <stdlib.h>

#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/residency/fold.h"

qkv_status qkvi_queue_full(qkv_daemon *daemon, qkv_error *error) {
  qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_QUEUE], 1);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-queue is %" PRId64 " jobs, that many wait already",
                  daemon->options->limit_queue);
}

qkv_work qkvi_work_of(qkvi_waits waits, bool bulk) {
  const qkvi_waits computes = QKVI_WAIT_LAYERS;
  if ((waits & ~computes) != 0) return bulk ? QKV_WORK_BULK_BLOCKING : QKV_WORK_BLOCKING;
  return bulk ? QKV_WORK_BULK : QKV_WORK_INTERACTIVE;
}

// The tenant's jobs have the places that others leave them.
static qkv_status part_full(const qkv_rpc_call *call, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_QUEUE], 1);
  qkv_rpc_count_refusal(call);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "limit-queue is %" PRId64
                  " jobs and %d times as many of this tenant wait as there are places left: these are for others",
                  daemon->options->limit_queue, QKV_FAIR_PART);
}

static qkv_status queue(qkv_rpc_call *call, qkv_work work, qkv_share share, qkv_job_fn *job, void *context) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_share of = qkv_rpc_share(call);
  share.flow = of.flow;
  share.weight = of.weight;
  qkv_rpc_queued(call);
  return qkv_executor_submit_as(daemon->executor, work, &share, job, context);
}

static qkv_status try_as(qkv_rpc_call *call, qkv_work work, qkv_share share, qkv_job_fn *job, void *context,
                         qkv_error *error) {
  const qkv_status status = queue(call, work, share, job, context);
  if (status == QKV_OK) return QKV_OK;
  return status == QKV_UNAVAILABLE ? part_full(call, error) : qkvi_queue_full(qkv_rpc_context(call), error);
}

qkv_status qkvi_job_try(qkv_rpc_call *call, qkv_work work, qkv_job_fn *job, void *context, qkv_error *error) {
  return try_as(call, work, (qkv_share){0}, job, context, error);
}

static bool offer(qkv_rpc_call *call, qkv_work work, qkv_share share, qkv_job_fn *job, void *context) {
  if (queue(call, work, share, job, context) == QKV_OK) return true;
  qkv_rpc_dequeued(call);
  return false;
}

bool qkvi_job_offer(qkv_rpc_call *call, qkv_work work, qkv_job_fn *job, void *context) {
  return offer(call, work, (qkv_share){.urgent = false}, job, context);
}

void qkvi_job_submit_as(qkv_rpc_call *call, qkvi_waits waits, qkv_share share, qkv_job_fn *job, void *context) {
  qkv_error error = {0};
  if (try_as(call, qkvi_work_of(waits, false), share, job, context, &error) != QKV_OK)
    qkvi_control_fail(call, &error);
}

void qkvi_job_submit(qkv_rpc_call *call, qkvi_waits waits, qkv_job_fn *job, void *context) {
  qkvi_job_submit_as(call, waits, (qkv_share){0}, job, context);
}

bool qkvi_job_yield(qkv_rpc_call *call, qkv_work here, qkvi_waits waits, bool urgent, qkv_job_fn *job,
                    void *context) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_work work = qkvi_work_of(waits, false);
  if (work == here && qkv_pool_waiting(qkv_executor_pool(daemon->executor, work)) == 0) return false;
  return offer(call, work, (qkv_share){.urgent = urgent, .again = true}, job, context);
}

// A request that a job unpacks, before it goes on as another one.
typedef struct later {
  qkv_rpc_call *call;
  qkv_bytes message;
  const ProtobufCMessageDescriptor *type;
  qkvi_unpack_fn *unpack;
  qkv_job_fn *job;
} later;

static void unpack_job(void *context) {
  const later of = *(later *)context;
  qkv_error error = {0};
  free(context);
  void *request = qkv_rpc_cancelled(of.call) ? NULL : of.unpack(of.message, of.type, &error);
  if (error.status != QKV_OK) {
    if (qkvi_job_wanted(of.call)) qkvi_control_fail(of.call, &error);
    return;
  }
  if (request == NULL) {
    (void)qkvi_job_wanted(of.call);
    return;
  }
  qkv_rpc_set_state(of.call, request);
  of.job(of.call);
}

void qkvi_request_later(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type,
                        qkvi_unpack_fn *unpack, qkv_work work, qkv_job_fn *job) {
  qkv_error error = {0};
  later *of = malloc(sizeof *of);
  if (of == NULL) abort();
  *of = (later){.call = call, .message = message, .type = type, .unpack = unpack, .job = job};
  if (qkvi_job_try(call, work, unpack_job, of, &error) == QKV_OK) return;
  free(of);
  qkvi_control_fail(call, &error);
}

void qkvi_request_work(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_work work,
                       qkv_job_fn *job) {
  qkv_error error = {0};
  if (message.length > QKVI_SOON_BYTES_MAX)
    return qkvi_request_later(call, message, type, qkvi_control_unpack, work, job);
  void *request = qkvi_control_unpack(message, type, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  qkv_rpc_set_state(call, request);
  if (qkvi_job_try(call, work, job, call, &error) != QKV_OK) qkvi_control_fail(call, &error);
}

void qkvi_request_job(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type, qkvi_waits waits,
                      qkv_job_fn *job) {
  qkvi_request_work(call, message, type, qkvi_work_of(waits, false), job);
}

qkvi_waits qkvi_session_waits(const qkv_rpc_call *call) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  return daemon->residency != NULL ? QKVI_WAIT_LAYERS | QKVI_WAIT_DISK : QKVI_WAIT_LAYERS;
}

qkv_status qkvi_request_session(qkv_rpc_call *call, const char *name, qkv_session **session, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  QKV_TRY(qkv_name_check(name, "session", error));
  qkv_rpc_name_session(call, name);
  return qkv_store_session(daemon->store, qkvi_call_tenant(call), name, session, error);
}

qkv_status qkvi_request_layers(qkv_rpc_call *call, const char *name, qkv_session **session, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkvi_waits waits = QKVI_WAIT_LAYERS | QKVI_WAIT_DISK;
  QKV_TRY(qkvi_request_session(call, name, session, error));
  const qkv_status status = qkvi_unfold(daemon->residency, call, *session, &waits, error);
  if (status != QKV_OK) qkv_session_unref(session);
  return status;
}

bool qkvi_job_wanted(qkv_rpc_call *call) {
  qkv_rpc_dequeued(call);
  if (!qkv_rpc_cancelled(call)) return true;
  qkv_rpc_finish(call, QKV_CANCELLED, "the client has gone");
  return false;
}
