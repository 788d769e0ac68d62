// Folding of sessions that are sunk (engine/cache/session_fold.h): after `fold-after` without a use, in the
// background, and back with their next use.
//
// Threads: any.
#ifndef QKV_SERVER_RESIDENCY_FOLD_H
#define QKV_SERVER_RESIDENCY_FOLD_H

#include "server/handlers/jobs.h"
#include "server/residency/residency.h"

// Folds sessions, the longest unused first, for some 50 ms. Waits. True where more are due. `after_ms`: without a
// use; 0: none is folded. `residency` NULL: nothing.
bool qkvi_fold_step(qkvi_residency *residency, int64_t after_ms);

// Makes the layers of a session that is folded; memory is reserved for them as for pages that come back. Where the
// thread may not wait for the disk, that is added to `*waits` and QKV_UNAVAILABLE is returned, with *error left
// alone. Errors of qkvi_budget_reserve and qkv_session_unfold.
qkv_status qkvi_unfold(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session, qkvi_waits *waits,
                       qkv_error *error);

#endif
