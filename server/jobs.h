// Work for the compute pool on behalf of a call.
#ifndef QKV_SERVER_JOBS_H
#define QKV_SERVER_JOBS_H

#include <stdbool.h>

#include "engine/base/pool.h"
#include "server/rpc.h"

// Gives job(context) to the pool. RESOURCE_EXHAUSTED where limit-queue jobs wait already.
qkv_status qkvi_job_try(qkv_rpc_call *call, qkv_job_fn *job, void *context, qkv_error *error);

// The same; a refusal ends the call. The handler is done with it either way.
void qkvi_job_submit(qkv_rpc_call *call, qkv_job_fn *job, void *context);

// First thing in a job, and between its items: where the client has gone meanwhile, ends the call and returns false.
bool qkvi_job_wanted(qkv_rpc_call *call);

#endif
