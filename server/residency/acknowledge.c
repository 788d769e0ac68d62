// Waiting until what a call has done is durable, before it is acknowledged.
#include <inttypes.h>
#include <stdlib.h>

#include "engine/base/clock.h"
#include "engine/cache/session_spill.h"
#include "server/residency/internal.h"

enum { SYNC_WAIT_MS = 30000, QUOTA_WAIT_MS = 5000 };

qkv_status qkvi_write_back_truncated(qkvi_residency *residency, const qkv_rpc_call *call, const qkv_session *session,
                                     qkv_error *error) {
  if (qkv_session_config_of(session)->backing == NULL) return QKV_OK;
  const int64_t until = qkv_now_ms() + SYNC_WAIT_MS;
  uint64_t seen = qkvi_progress_count(residency);
  while (qkvi_write_back_cuts_waiting(residency, qkv_session_id(session))) {
    if (qkvi_client_is_gone(call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    if (qkv_now_ms() > until)
      return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the truncation is not durable yet",
                      qkv_session_name(session));
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
  if (!qkvi_write_back_lost_truncation(residency, qkv_session_id(session))) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the disk did not take the truncation, close the session",
                  qkv_session_name(session));
}

bool qkvi_write_back_owes(qkvi_residency *residency, qkv_session *session) {
  if (residency == NULL || qkv_session_config_of(session)->durability != QKV_DURABILITY_SYNC) return false;
  return !qkv_session_settle(session) || qkvi_write_back_cuts_waiting(residency, qkv_session_id(session));
}

// The tenant's quota of the SSD is full; its sessions that are not in use are deleted there meanwhile (accounts.h).
static bool is_over_quota(const qkv_session *session) {
  const qkv_account *account = qkv_session_account(session);
  return account != NULL && qkv_account_is_full_ssd(account);
}

static const char *refusal(qkv_status failure) {
  if (failure == QKV_RESOURCE_EXHAUSTED) return "the disk or storage-budget is full";
  return failure == QKV_OK ? "the disk takes longer than 30 s" : "the disk failed";
}

// Whether what is sealed below ends[layer] of each layer is durable; NULL: everything, and the session's truncations.
// Those of other sessions are not waited for: a fork is journaled behind its parent's.
static bool is_durable(qkvi_residency *residency, qkv_session *session, const uint64_t *ends) {
  const bool settled = qkv_session_settle(session);
  if (ends == NULL) return settled && !qkvi_write_back_cuts_waiting(residency, qkv_session_id(session));
  bool durable = true;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++)
    durable &= qkv_session_is_durable(session, i, ends[i]);
  return durable;
}

// Of a call's sessions all are written at the same time: it waits for all together as long as for one.
static qkv_status await_durable(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                const uint64_t *ends, qkv_error *error) {
  const qkv_backing *tier = qkv_session_config_of(session)->backing;
  const int64_t began = qkv_now_ms() - (call == NULL ? 0 : qkv_rpc_waited_ms(call, QKV_RPC_WAIT_DISK));
  uint64_t seen = qkvi_progress_count(residency);
  while (!is_durable(residency, session, ends)) {
    if (qkvi_client_is_gone(call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    const qkv_status failure = tier == NULL ? QKV_OK : tier->health(tier->context, qkv_session_id(session));
    if (is_over_quota(session) && qkv_now_ms() > began + QUOTA_WAIT_MS)
      return qkv_fail(error, QKV_UNAVAILABLE,
                      "session %s: the rows are held, but not durable: quota ssd_bytes of tenant %s is full",
                      qkv_session_name(session), qkv_session_config_of(session)->tenant);
    if (failure == QKV_RESOURCE_EXHAUSTED || failure == QKV_INTERNAL || qkv_now_ms() > began + SYNC_WAIT_MS)
      return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the rows are held, but not durable: %s",
                      qkv_session_name(session), refusal(failure));
    if (qkv_session_config_of(session)->durability != QKV_DURABILITY_SYNC) qkvi_write_back_hasten(residency);
    seen = qkvi_call_await(residency, call, QKV_RPC_WAIT_DISK, seen);
  }
  return QKV_OK;
}

qkv_status qkvi_write_back_sync(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                qkv_error *error) {
  return await_durable(residency, call, session, NULL, error);
}

qkv_status qkvi_write_back_sync_range(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                      const uint32_t *layers, size_t layer_count, uint64_t end, qkv_error *error) {
  const uint32_t all = qkv_session_model(session)->layers;
  qkv_session_info info;
  uint64_t *lengths = calloc(all, sizeof *lengths), *ends = calloc(all, sizeof *ends);
  if (lengths == NULL || ends == NULL) abort();
  qkv_session_read_info(session, &info, lengths);
  for (size_t i = 0; i < (layer_count > 0 ? layer_count : all); i++) {
    const uint32_t layer = layer_count > 0 ? layers[i] : (uint32_t)i;
    ends[layer] = end > 0 && end < lengths[layer] ? end : lengths[layer];
  }
  const qkv_status status = await_durable(residency, call, session, ends, error);
  free(lengths);
  free(ends);
  return status;
}
