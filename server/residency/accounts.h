// Keeps a tenant within its quota of memory, and of the SSD, by evicting its own sessions: those of others stay.
//
// Threads: any that may wait for the disk.
#ifndef QKV_SERVER_RESIDENCY_ACCOUNTS_H
#define QKV_SERVER_RESIDENCY_ACCOUNTS_H

#include "engine/cache/accounts.h"
#include "server/residency/residency.h"

// Evicts sessions of the tenant from memory, the least recently used first, until its account has `bytes` below its
// ceiling. Nothing is reserved: other calls of the tenant may take it. Waits up to 10 s for what is not durable yet,
// and for layers of the tenant that other threads hold, where the caller itself holds none (`held`).
// RESOURCE_EXHAUSTED "quota host_bytes of tenant x is 1048576 bytes, 1000000 in use, 65536 more are needed and
// nothing else of it can leave memory"; CANCELLED where the client of `call` goes before. OK at once without a
// ceiling.
qkv_status qkvi_account_headroom(qkvi_residency *residency, const qkv_rpc_call *call, qkv_account *account,
                                 uint64_t bytes, size_t held, qkv_error *error);

// One account that is full on the SSD loses its least recently used session there that is not pinned, as it is where
// storage-budget is full. Cheap where none is full.
void qkvi_account_expel(qkvi_residency *residency);

#endif
