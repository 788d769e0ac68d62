// Sessions that were opened with RETENTION_EVICT are closed where memory or limit-sessions is full, the longest
// unused first.
//
// Threads: any that may wait for layers. One eviction at a time.
#ifndef QKV_SERVER_EVICT_H
#define QKV_SERVER_EVICT_H

#include "server/daemon.h"

// How often what was refused is tried again behind an eviction: others take what has become free, too.
enum { QKVI_EVICT_TRIES = 4 };

// Closes sessions until memory-budget has `bytes` and limit-sessions a place, and a little more than that, those of
// tenants first that have more than their guaranteed part; `but` (NULL: none) stays. The same of the tenant's own
// where it is the quota of `account` (NULL: none) that is full. False where nothing was refused for want of either
// that could be mended: there are no sessions that may go, or `bytes` is more than the budget.
bool qkvi_evict(qkv_daemon *daemon, const qkv_account *account, const qkv_session *but, uint64_t bytes);

#endif
