// Accounts: each tenant's usage of a store, and its limits.
//
//   memory     an arena of its own over the store's (arena.h), which all of its sessions are made in
//   SSD        bytes of pages on it, before they are packed there
//   GPU        bytes of copies of pages on all GPUs
//   sessions   in the store's table
//   objects    of the server, which counts them here
//
// An account exists while anything refers to it. The function `limits` gives its limits: it is called when an account
// is made, and again for all of them by qkv_accounts_refresh.
//
// Threads: any. One lock over the table, which `limits` is called under; the counters are atomic.
#ifndef QKV_ENGINE_CACHE_ACCOUNTS_H
#define QKV_ENGINE_CACHE_ACCOUNTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/name.h"

// 0: no ceiling, nothing guaranteed.
typedef struct qkv_account_limits {
  uint64_t host_bytes, host_guaranteed;
  uint64_t ssd_bytes, ssd_guaranteed;
  uint64_t gpu_bytes;
  uint64_t sessions;
} qkv_account_limits;

typedef struct qkv_accounts qkv_accounts;
typedef struct qkv_account qkv_account;

typedef void qkv_account_limits_fn(void *context, const char *tenant, qkv_account_limits *limits);

// `arena` outlives them. `limits` NULL: there are none.
qkv_accounts *qkv_accounts_create(qkv_arena *arena, qkv_account_limits_fn *limits, void *context);
void qkv_accounts_destroy(qkv_accounts **accounts);  // no account is left (asserted)
void qkv_accounts_refresh(qkv_accounts *accounts);

// A reference to the tenant's account, which is made where it is missing.
qkv_account *qkv_accounts_join(qkv_accounts *accounts, const char *tenant);
qkv_account *qkv_account_ref(qkv_account *account);
void qkv_account_unref(qkv_account **account);  // NULL inside: nothing

qkv_arena *qkv_account_arena(const qkv_account *account);
// The account that the arena belongs to; NULL: none.
qkv_account *qkv_account_of(const qkv_arena *arena);
const char *qkv_account_tenant(const qkv_account *account);

// What it has of memory beyond its guaranteed part; whether it has more than that of memory, or of the SSD.
uint64_t qkv_account_excess(const qkv_account *account);
bool qkv_account_is_over(const qkv_account *account);
bool qkv_account_is_over_ssd(const qkv_account *account);

// One session more: RESOURCE_EXHAUSTED "quota sessions of tenant x is 10, 10 are open". One at a time for an account.
qkv_status qkv_account_open(qkv_account *account, qkv_error *error);
void qkv_account_close(qkv_account *account);

// Sessions that may be closed where something is full (recency.h, QKV_RECENCY_EVICTABLE).
void qkv_account_add_evictable(qkv_account *account);
void qkv_account_drop_evictable(qkv_account *account);
uint64_t qkv_account_evictable(const qkv_account *account);

// One object more, or less; no limit is checked.
void qkv_account_add_object(qkv_account *account);
void qkv_account_drop_object(qkv_account *account);
uint64_t qkv_account_objects(const qkv_account *account);

// Bytes of pages on the SSD. `claim` comes before a write; where the limit would be exceeded it returns false and
// marks the account as full there. `add` counts bytes that are there already, whatever the limit. All three do
// nothing for NULL.
bool qkv_account_claim_ssd(qkv_account *account, uint64_t bytes);
void qkv_account_add_ssd(qkv_account *account, uint64_t bytes);
void qkv_account_drop_ssd(qkv_account *account, uint64_t bytes);
// Whether a claim was refused since the last drop or change of limits.
bool qkv_account_is_full_ssd(const qkv_account *account);
// An account that is full on the SSD, with a reference, or NULL: of several each in its turn, as one may stay full.
qkv_account *qkv_accounts_full_ssd(qkv_accounts *accounts);

// Bytes of copies on GPUs. `claim` comes before a copy is made; false: the limit would be exceeded.
bool qkv_account_claim_gpu(qkv_account *account, uint64_t bytes);
void qkv_account_drop_gpu(qkv_account *account, uint64_t bytes);
// Whether the limit leaves so many bytes more, and whether it would if there were no other copies.
bool qkv_account_fits_gpu(const qkv_account *account, uint64_t bytes);
bool qkv_account_may_fit_gpu(const qkv_account *account, uint64_t bytes);
// Until when (clock.h) no copy is tried, as there was none to replace. Another value of `limits` ends that.
void qkv_account_wait_gpu(qkv_account *account, int64_t until_ms);
bool qkv_account_waits_gpu(const qkv_account *account, int64_t now_ms);

typedef struct qkv_account_usage {
  qkv_account_limits limits;
  uint64_t host_bytes;  // reservations counted
  uint64_t ssd_bytes;
  uint64_t gpu_bytes;
  uint64_t sessions;
} qkv_account_usage;
qkv_account_usage qkv_account_read(const qkv_account *account);

// The usage of a tenant; false: nothing refers to its account, and all is 0.
bool qkv_accounts_read(qkv_accounts *accounts, const char *tenant, qkv_account_usage *usage);

// Calls fn with the tenant of each account, in no order, without the lock: some at a time, others may take it in
// between.
void qkv_accounts_each(qkv_accounts *accounts, void (*fn)(void *context, const char *tenant), void *context);

#endif
