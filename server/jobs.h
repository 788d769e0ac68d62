// Work for the compute pool on behalf of a call.
#ifndef QKV_SERVER_JOBS_H
#define QKV_SERVER_JOBS_H

#include <stdbool.h>

#include "engine/base/pool.h"
#include "server/rpc.h"

// Gives job(context) to the pool. Where limit-queue jobs wait already, the call is ended with
// RESOURCE_EXHAUSTED; the handler is done with it either way.
void qkvi_job_submit(qkv_rpc_call *call, qkv_job_fn *job, void *context);

// First thing in a job: where the client has gone while the job waited, ends the call and returns false.
bool qkvi_job_wanted(qkv_rpc_call *call);

#endif
