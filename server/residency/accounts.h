// What a tenant's quota of memory, or of the SSD, asks of its own sessions: those of others stay where they are.
//
// Threads: any that may wait for the disk.
#ifndef QKV_SERVER_RESIDENCY_ACCOUNTS_H
#define QKV_SERVER_RESIDENCY_ACCOUNTS_H

#include "engine/cache/accounts.h"
#include "server/residency/residency.h"

// Sessions of the tenant leave memory, the longest unused first, until its account has `bytes` below its ceiling;
// what others of the tenant take meanwhile is not kept. Waits up to 10 s for what is not durable yet.
// RESOURCE_EXHAUSTED "quota host_bytes of tenant x is 1048576 bytes, 1000000 in use, 65536 more are needed and
// nothing else of it can leave memory"; CANCELLED where the client of `call` goes before. OK at once without a
// ceiling.
qkv_status qkvi_account_headroom(qkvi_residency *residency, const qkv_rpc_call *call, qkv_account *account,
                                 uint64_t bytes, qkv_error *error);

// One account that is full on the SSD loses its longest unused session there that is not pinned, as it is where
// storage-budget is full. Takes a look where none is.
void qkvi_account_expel(qkvi_residency *residency);

#endif
