#include "server/reserve.h"

#include "server/evict.h"
#include "server/residency/accounts.h"

// Once memory of others, or of the tenant's own sessions, was evicted for it.
static qkv_status reserve_waiting(const qkv_rpc_call *call, qkv_account *account, uint64_t bytes, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  uint64_t reservation = 0;
  QKV_TRY(qkvi_account_headroom(daemon->residency, call, account, bytes, 0, error));
  QKV_TRY(qkvi_budget_reserve(daemon->residency, call, bytes, 0, &reservation, error));
  const qkv_status status = qkv_arena_reserve_in(qkv_account_arena(account), &reservation, bytes, error);
  qkvi_budget_unreserve(daemon->residency, &reservation);
  return status;
}

qkv_status qkvi_reserve(const qkv_rpc_call *call, qkv_account *account, uint64_t bytes, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_arena *arena = qkv_account_arena(account);
  qkv_error refused = {0};
  qkv_status status = qkv_arena_reserve(arena, bytes, &refused);
  for (int i = 0; i <= QKVI_EVICT_TRIES && status == QKV_RESOURCE_EXHAUSTED; i++) {
    if (i > 0 && !qkvi_evict(daemon, account, NULL, bytes)) break;
    refused = (qkv_error){0};
    status = daemon->residency == NULL ? qkv_arena_reserve(arena, bytes, &refused)
                                       : reserve_waiting(call, account, bytes, &refused);
  }
  if (status == QKV_RESOURCE_EXHAUSTED) qkv_metric_add(&daemon->metrics[QKV_METRIC_REFUSED_BUDGET], 1);
  return status == QKV_OK ? QKV_OK : qkv_fail(error, status, "%s", refused.text);
}
