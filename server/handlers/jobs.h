// Jobs of the executor on behalf of a call.
#ifndef QKV_SERVER_HANDLERS_JOBS_H
#define QKV_SERVER_HANDLERS_JOBS_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>

#include "engine/base/executor.h"
#include "server/daemon.h"
#include "server/rpc/rpc.h"

// Fills *error and counts, where limit-queue jobs wait already: RESOURCE_EXHAUSTED.
qkv_status qkvi_queue_full(qkv_daemon *daemon, qkv_error *error);

// Wait reasons: a mask of what a handler may wait for on its thread. Nothing on a completion-queue thread, layers in
// a job that computes, and in one that blocks also the disk, the rows of a layer, which another append has until it
// has coded its pages, and memory of sessions that are closed for others (server/evict.h). A function that would have
// to wait for anything else adds that to the mask and returns QKV_UNAVAILABLE with nothing changed; the caller goes
// on in a job that may wait for all of the mask.
enum { QKVI_WAIT_LAYERS = 1 << 0, QKVI_WAIT_DISK = 1 << 1, QKVI_WAIT_ROWS = 1 << 2, QKVI_WAIT_MEMORY = 1 << 3 };
typedef unsigned qkvi_waits;

// The kind of job that may wait for these.
qkv_work qkvi_work_of(qkvi_waits waits, bool bulk);

// Gives job(context) to the executor. RESOURCE_EXHAUSTED where limit-queue jobs of the kind wait already, or the
// tenant has its part of them.
qkv_status qkvi_job_try(qkv_rpc_call *call, qkv_work work, qkv_job_fn *job, void *context, qkv_error *error);
// The same for a job that its caller offers again later: false, and no refusal is counted.
bool qkvi_job_offer(qkv_rpc_call *call, qkv_work work, qkv_job_fn *job, void *context);
// The same; a refusal ends the call. The handler is done with it either way.
void qkvi_job_submit(qkv_rpc_call *call, qkvi_waits waits, qkv_job_fn *job, void *context);
// The same with a share (engine/base/fair.h) that says whether it is urgent, as steps of decoding are, and whether it
// has run before; flow and weight are the call's.
void qkvi_job_submit_as(qkv_rpc_call *call, qkvi_waits waits, qkv_share share, qkv_job_fn *job, void *context);

// For a job of the kind `here` that has more to do: true where that is a job of another kind, or others of its kind
// wait, and it has been queued again; false where it goes on at once.
bool qkvi_job_yield(qkv_rpc_call *call, qkv_work here, qkvi_waits waits, bool urgent, qkv_job_fn *job, void *context);

// Unpacks a request, attaches it to the call (the method frees it with qkvi_control_free) and goes on in job(call).
// One of more than QKVI_SOON_BYTES_MAX is unpacked there.
void qkvi_request_job(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type, qkvi_waits waits,
                      qkv_job_fn *job);
// The same in a job of a kind.
void qkvi_request_work(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_work work,
                       qkv_job_fn *job);
// Likewise, in any case there; `unpack` is a function of control.h.
typedef void *qkvi_unpack_fn(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error);
void qkvi_request_later(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type,
                        qkvi_unpack_fn *unpack, qkv_work work, qkv_job_fn *job);
// What opening, closing or changing a session waits for: the disk, where there is an SSD tier.
qkvi_waits qkvi_session_waits(const qkv_rpc_call *call);
// The session of the call's tenant that a request names, with a reference. INVALID_ARGUMENT for a bad name,
// NOT_FOUND.
qkv_status qkvi_request_session(qkv_rpc_call *call, const char *name, qkv_session **session, qkv_error *error);

// The same, and makes its layers where it is folded (server/residency/fold.h): in a job that may wait for the disk.
qkv_status qkvi_request_layers(qkv_rpc_call *call, const char *name, qkv_session **session, qkv_error *error);

// Called first in a job, and between its items: where the client has gone meanwhile, ends the call and returns false.
bool qkvi_job_wanted(qkv_rpc_call *call);

#endif
