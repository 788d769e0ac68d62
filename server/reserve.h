// Memory of a tenant, with what has to leave for it.
//
// Threads: any that may wait for memory, and for the disk where there is an SSD tier (server/handlers/jobs.h).
#ifndef QKV_SERVER_RESERVE_H
#define QKV_SERVER_RESERVE_H

#include "server/daemon.h"

// Reserves bytes of memory-budget in the tenant's account. Rows and objects leave memory for it, of others and where
// its quota is full the tenant's own, or those are closed that may be. RESOURCE_EXHAUSTED names budget or quota;
// CANCELLED where the client of `call` goes before.
qkv_status qkvi_reserve(const qkv_rpc_call *call, qkv_account *account, uint64_t bytes, qkv_error *error);

#endif
