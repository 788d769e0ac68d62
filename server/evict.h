// Sessions that were opened with RETENTION_EVICT are closed where memory or limit-sessions is full, the longest
// unused first.
//
// Threads: any that may wait for memory (QKVI_WAIT_MEMORY, server/handlers/jobs.h). One eviction at a time.
#ifndef QKV_SERVER_EVICT_H
#define QKV_SERVER_EVICT_H

#include "server/daemon.h"

// How often a refused operation is retried after an eviction: other threads may take the freed memory first.
enum { QKVI_EVICT_TRIES = 4 };

// Closes sessions until memory-budget has `bytes` of headroom and limit-sessions a place, and a little more than
// that. Sessions of tenants above their guaranteed part go first; `but` (NULL: none) stays. Where the quota of
// `account` (NULL: none) is full, only sessions of that tenant are closed. False where neither limit is what refused,
// or nothing can be done: no session may be closed, or `bytes` is more than the budget or the quota.
bool qkvi_evict(qkv_daemon *daemon, const qkv_account *account, const qkv_session *but, uint64_t bytes);

#endif
