// Eviction: sessions and objects that are on the SSD leave memory, and exact rows of idle sessions become pages that
// can. Where storage-budget is full the least recently used ones are deleted from the SSD.
#include <inttypes.h>
#include <jansson.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/metrics.h"
#include "server/residency/internal.h"

enum { IDLE_MS = 250, EXPEL_IDLE_MS = 1000 };

// Spills objects that were last used before.
static uint64_t spill_objects(qkvi_residency *residency, uint64_t target, bool all, int64_t before_ms) {
  const uint64_t taken = qkvi_budget_taken(residency);
  return taken > target ? qkvi_objects_spill(residency->objects, NULL, all, before_ms, taken - target) : 0;
}

// What the session's tenant has of memory beyond its guaranteed part.
static uint64_t excess_of(const qkv_session *session) {
  const qkv_account *account = qkv_session_account(session);
  return account == NULL ? UINT64_MAX : qkv_account_excess(account);
}

// One pass at a time: other threads wait for its end. From tenants what is above their part, or with `all` anything.
static uint64_t run(qkvi_residency *residency, uint64_t target, bool wait, bool all) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  uint64_t freed = 0, taken;
  qkv_recency_begin(recency, QKV_RECENCY_CODED);
  qkvi_objects_begin_pass(residency->objects, QKVI_PASS_SPILL);
  while (qkvi_budget_taken(residency) > target) {
    qkv_session *session = qkv_recency_next(recency, QKV_RECENCY_CODED);
    if (session == NULL) break;
    if (all || excess_of(session) > 0)
      freed += spill_objects(residency, target, all, qkv_session_last_used_ms(session));
    taken = qkvi_budget_taken(residency);
    const uint64_t most = all ? UINT64_MAX : excess_of(session);
    if (taken > target && most > 0) {
      qkv_metric_add(&residency->metrics[QKV_METRIC_EVICTION_LOOKS], 1);
      freed += qkv_session_evict(session, taken - target < most ? taken - target : most, wait);
    }
    qkv_session_unref(&session);
  }
  freed += spill_objects(residency, target, all, INT64_MAX);
  qkv_recency_end(recency, QKV_RECENCY_CODED);
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_EVICTED_BYTES], (int64_t)freed);
  return freed;
}

uint64_t qkvi_eviction_run(qkvi_residency *residency, uint64_t target, bool wait) {
  const uint64_t freed = run(residency, target, wait, false);
  return qkvi_budget_taken(residency) <= target ? freed : freed + run(residency, target, wait, true);
}

uint64_t qkvi_budget_evict(qkvi_residency *residency, uint64_t target) {
  return qkvi_eviction_run(residency, target, false);
}

uint64_t qkvi_budget_evict_session(qkvi_residency *residency, qkv_session *session, uint64_t target) {
  const uint64_t taken = qkvi_budget_taken(residency);
  const uint64_t freed = taken > target ? qkv_session_evict(session, taken - target, false) : 0;
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_EVICTED_BYTES], (int64_t)freed);
  return freed;
}

// Seals the rows of one session. Rows that stay exact are not tried again (qkv_recency_give_up). `*used`: it is in
// use again.
static uint64_t seal_session(qkvi_residency *residency, qkv_session *session, bool *used) {
  const uint64_t before = qkv_session_bytes_exact(session);
  const qkv_status status = qkv_session_seal_idle(session, NULL);
  *used = status == QKV_UNAVAILABLE;
  const uint64_t after = qkv_session_bytes_exact(session);
  if (status == QKV_OK) qkv_recency_give_up(qkv_store_recency(residency->store), session, after);
  return before > after ? before - after : 0;
}

// Codes exact rows of the least recently used sessions into pages, which can be evicted, until `bytes` of rows are
// coded. `*left`: there are more, of sessions that were in use just now.
uint64_t qkvi_eviction_seal_idle(qkvi_residency *residency, uint64_t bytes, bool *left) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  uint64_t sealed = 0;
  bool idle = true, used, any_used = false;
  qkv_recency_begin(recency, QKV_RECENCY_EXACT);
  while (sealed < bytes && idle) {
    qkv_session *session = qkv_recency_next(recency, QKV_RECENCY_EXACT);
    if (session == NULL) break;
    if (qkv_session_bytes_exact(session) > 0 && !qkv_session_is_pinned(session)) {
      idle = qkv_now_ms() - qkv_session_last_used_ms(session) >= IDLE_MS;
      if (idle) sealed += seal_session(residency, session, &used);
      any_used |= idle && used;
    }
    qkv_session_unref(&session);
  }
  qkv_recency_end(recency, QKV_RECENCY_EXACT);
  *left = !idle || any_used;
  return sealed;
}

// ---- From the disk ----

void qkvi_eviction_expel_one(qkvi_residency *residency, qkv_session *session, const char *reason) {
  const char *name = qkv_session_name(session), *tenant = qkvi_tenant_to_log(qkv_session_config_of(session)->tenant);
  const uint64_t bytes = qkv_session_bytes_stored(session);
  qkv_error error = {0};
  uint64_t freed;
  if (qkv_store_close_session(residency->store, session, &freed, NULL) != QKV_OK) return;  // by another one
  if (qkvi_catalogue_closed(residency, session, &error) != QKV_OK)
    qkv_log(QKV_LOG_ERROR, "a session that was deleted may come back", "{s:s, s:s*, s:s}", "session", name, "tenant",
            tenant, "reason", error.text);
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_EXPELLED], 1);
  qkv_log(QKV_LOG_WARN, reason, "{s:s, s:s*, s:I}", "session", name, "tenant", tenant, "bytes", (json_int_t)bytes);
}

bool qkvi_eviction_may_expel(const qkv_session *session) {
  return qkv_session_config_of(session)->backing != NULL && qkv_session_bytes_stored(session) > 0 &&
         !qkv_session_is_pinned(session) && !qkv_session_is_staged(session);
}

static bool is_over_ssd(const qkv_session *session) {
  const qkv_account *account = qkv_session_account(session);
  return account == NULL || qkv_account_is_over_ssd(account);
}

// The least recently used session of a list that may be deleted, with a reference; NULL: there is none, or all were
// used just now. Of tenants above their guaranteed part there, or with `all` of any.
static qkv_session *find_expelled(qkvi_residency *residency, qkv_recency_list list, bool all) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  const int64_t now = qkv_now_ms();
  qkv_session *session;
  qkv_recency_begin(recency, list);
  while ((session = qkv_recency_next(recency, list)) != NULL) {
    const bool idle = now - qkv_session_last_used_ms(session) >= EXPEL_IDLE_MS;
    if (idle && (all || is_over_ssd(session)) && qkvi_eviction_may_expel(session)) break;
    qkv_session_unref(&session);
    if (!idle) break;
  }
  qkv_recency_end(recency, list);
  return session;
}

// Deletes that session, or objects that were not used for longer. False: there is nothing to delete.
static bool expel_from(qkvi_residency *residency, qkv_recency_list list, bool all) {
  qkv_session *session = find_expelled(residency, list, all);
  if (session == NULL) return false;
  const qkvi_objects_expulsion objects = {
      .evictable = list == QKV_RECENCY_EVICTABLE, .all = all, .before_ms = qkv_session_last_used_ms(session)};
  if (!qkvi_objects_expel(residency->objects, &objects))
    qkvi_eviction_expel_one(residency, session, "storage-budget is full, a session was deleted");
  qkv_session_unref(&session);
  return true;
}

// storage-budget has no headroom: deletes the least recently used session that is not pinned, evictable ones first.
void qkvi_eviction_expel(qkvi_residency *residency) {
  for (int all = 0; all < 2; all++) {
    const qkvi_objects_expulsion objects = {.all = all != 0, .before_ms = INT64_MAX};
    if (expel_from(residency, QKV_RECENCY_EVICTABLE, all != 0) || expel_from(residency, QKV_RECENCY_KEPT, all != 0) ||
        qkvi_objects_expel(residency->objects, &objects))
      return;
  }
}
