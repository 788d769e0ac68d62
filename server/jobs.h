// Work for the pools on behalf of a call: the compute pool, and the disk pool for whatever waits for the disk.
#ifndef QKV_SERVER_JOBS_H
#define QKV_SERVER_JOBS_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>

#include "engine/base/pool.h"
#include "server/daemon.h"
#include "server/rpc.h"

// What is said, and counted, where limit-queue jobs wait already: RESOURCE_EXHAUSTED.
qkv_status qkvi_queue_full(qkv_daemon *daemon, qkv_error *error);

// Gives job(context) to a pool, the compute pool where none is named. RESOURCE_EXHAUSTED where limit-queue jobs wait
// already.
qkv_status qkvi_pool_job_try(qkv_rpc_call *call, qkv_pool *pool, qkv_job_fn *job, void *context, qkv_error *error);
qkv_status qkvi_job_try(qkv_rpc_call *call, qkv_job_fn *job, void *context, qkv_error *error);

// The same; a refusal ends the call. The handler is done with it either way.
void qkvi_job_submit(qkv_rpc_call *call, qkv_job_fn *job, void *context);

// What a handler may wait for where it runs: nothing on a completion-queue thread, layers in a job of the compute
// pool, the disk, too, in one of the disk pool. Functions that come to what they may not wait for raise it to what
// they need and return QKV_UNAVAILABLE with nothing changed; the caller goes on in a job for that.
typedef enum qkvi_patience { QKVI_AT_ONCE, QKVI_FOR_LAYERS, QKVI_FOR_DISK } qkvi_patience;

// Goes on in a job of the pool that has the patience.
qkv_status qkvi_patient_job_try(qkv_rpc_call *call, qkvi_patience patience, qkv_job_fn *job, void *context,
                                qkv_error *error);
void qkvi_patient_job_submit(qkv_rpc_call *call, qkvi_patience patience, qkv_job_fn *job, void *context);

// Unpacks a request, hangs it on the call (the method frees it with qkvi_control_free) and goes on in job(call).
void qkvi_request_job(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type,
                      qkvi_patience patience, qkv_job_fn *job);
// The same in a pool that is named.
void qkvi_request_pool_job(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type,
                           qkv_pool *pool, qkv_job_fn *job);
// What changes a session's life needs: the disk pool's where there is an SSD tier, which is then waited for.
qkvi_patience qkvi_session_patience(const qkv_rpc_call *call);
// The session that a request names, with a reference. INVALID_ARGUMENT for a bad name, NOT_FOUND.
qkv_status qkvi_request_session(const qkv_daemon *daemon, const char *name, qkv_session **session, qkv_error *error);

// First thing in a job, and between its items: where the client has gone meanwhile, ends the call and returns false.
bool qkvi_job_wanted(qkv_rpc_call *call);

#endif
