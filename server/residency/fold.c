#include "server/residency/fold.h"
#include "engine/base/clock.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/metrics.h"
#include "server/residency/accounts.h"
#include "server/residency/internal.h"

enum { STEP_MS = 50 };

// ---- Records ----

static bool has_ended(const qkv_backing *table, uint64_t record, qkv_record_state *state) {
  *state = table->state(table->context, record);
  return *state != QKV_RECORD_WAITING;
}

// Waits until the record can be read. It need not be durable: the next process does not need it.
uint64_t qkvi_fold_put(void *context, uint64_t session, const void *bytes, uint64_t count, const _Atomic bool *stop) {
  const qkvi_backing *backing = context;
  qkvi_residency *residency = backing->residency;
  if (count > qkv_storage_record_bytes_max(residency->storage)) return 0;
  if (qkvi_write_back_refuses(residency, session)) return 0;
  qkvi_payload payload = {.copy = malloc(count)};
  if (payload.copy == NULL) abort();
  memcpy(payload.copy, bytes, count);
  const qkv_record_meta meta = {.session = session, .tokens = 1, .kind = QKVI_RECORD_FOLD};
  uint64_t seen = qkvi_progress_count(residency);
  const uint64_t record = qkvi_write_back_put(backing, &meta, &payload, count);
  qkv_record_state state = QKV_RECORD_GONE;
  if (record == 0) return 0;
  while (!has_ended(&backing->table, record, &state) && !atomic_load(stop))
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  if (state >= QKV_RECORD_WRITTEN) {
    qkv_storage_session_pack(residency->storage, session);
    return record;
  }
  qkv_storage_drop(residency->storage, record);
  return 0;
}

qkv_status qkvi_fold_read(void *context, uint64_t session, uint64_t *record, uint8_t **bytes, uint64_t *count,
                          qkv_error *error) {
  qkvi_residency *residency = ((const qkvi_backing *)context)->residency;
  qkvi_journal_wait unpacked = {.residency = residency};
  qkv_record_info info;
  qkv_storage_session_unpack(residency->storage, session, qkvi_catalogue_on_journal, &unpacked);
  QKV_TRY(qkvi_catalogue_finish_wait(&unpacked, error));
  QKV_TRY(qkv_storage_find_last(residency->storage, session, QKVI_RECORD_FOLD, &info));
  uint8_t *read = malloc(info.bytes);
  if (read == NULL) abort();
  qkv_storage_batch *batch = qkv_storage_batch_create(residency->storage, &info.record, 1, info.bytes);
  const qkv_status status = qkv_storage_batch_wait(batch, 0, read, info.bytes, error);
  qkv_storage_batch_destroy(&batch);
  if (status != QKV_OK) free(read);
  if (status != QKV_OK) return status;
  *record = info.record;
  *bytes = read;
  *count = info.bytes;
  return QKV_OK;
}

void qkvi_fold_keep(void *context, uint64_t session) {
  qkv_storage_session_pack(((const qkvi_backing *)context)->residency->storage, session);
}

// ---- Folding ----

static bool may_fold(qkvi_residency *residency, const qkv_session *session) {
  return qkv_session_may_fold(session) && !qkvi_catalogue_is_unconfirmed(residency, session) &&
         !qkvi_write_back_rests(residency);
}

static void set_metrics(qkvi_residency *residency) {
  const qkv_recency_sums sums = qkv_recency_read_sums(qkv_store_recency(residency->store));
  qkv_metric_set(&residency->metrics[QKV_METRIC_STORAGE_FOLDED], (int64_t)sums.folded);
  qkv_metric_set(&residency->metrics[QKV_METRIC_STORAGE_UNFOLDED], (int64_t)sums.unfolded);
}

bool qkvi_fold_step(qkvi_residency *residency, int64_t after_ms) {
  if (residency == NULL || after_ms == 0) return false;
  qkv_recency *recency = qkv_store_recency(residency->store);
  const int64_t began = qkv_now_ms();
  bool more = false;
  qkv_recency_begin(recency, QKV_RECENCY_SUNK);
  for (qkv_session *session; (session = qkv_recency_next(recency, QKV_RECENCY_SUNK)) != NULL;) {
    const bool idle = qkv_now_ms() - qkv_session_sunk_since_ms(session) >= after_ms;
    const bool folded = idle && may_fold(residency, session) && qkv_store_fold(residency->store, session);
    if (idle && !folded) qkv_session_fold_later(session, qkv_now_ms());
    qkv_session_unref(&session);
    more = idle && qkv_now_ms() - began >= STEP_MS;
    if (!idle || more) break;
  }
  qkv_recency_end(recency, QKV_RECENCY_SUNK);
  set_metrics(residency);
  return more;
}

// ---- Unfolding ----

static qkv_status unfold(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                         qkv_error *error) {
  const uint64_t cost = qkv_session_unfold_cost(session);
  uint64_t reservation = 0;
  QKV_TRY(qkvi_account_headroom(residency, call, qkv_session_account(session), cost, 0, error));
  QKV_TRY(qkvi_budget_reserve(residency, call, cost, 0, &reservation, error));
  const qkv_status status = qkv_session_unfold(session, &reservation, error);
  qkvi_budget_unreserve(residency, &reservation);
  return status;
}

static void report(qkvi_residency *residency, const qkv_session *session, qkv_status status, const qkv_error *error) {
  set_metrics(residency);
  if (status == QKV_DATA_LOSS)
    qkv_log(QKV_LOG_ERROR, "the layers of a session cannot be made again before the next start", "{s:s, s:s*, s:s}",
            "session", qkv_session_name(session), "tenant",
            qkvi_tenant_to_log(qkv_session_config_of(session)->tenant), "reason", error->text);
}

qkv_status qkvi_unfold(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session, qkvi_waits *waits,
                       qkv_error *error) {
  if (!qkv_session_is_folded(session)) return QKV_OK;
  if ((*waits & QKVI_WAIT_DISK) == 0) {
    *waits |= QKVI_WAIT_DISK;
    return QKV_UNAVAILABLE;
  }
  qkv_error reason = {0};
  const qkv_status status = unfold(residency, call, session, &reason);
  report(residency, session, status, &reason);
  return status == QKV_OK ? QKV_OK : qkv_fail(error, status, "%s", reason.text);
}
