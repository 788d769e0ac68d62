#include "server/residency/accounts.h"
#include "engine/base/clock.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine/cache/session_spill.h"
#include "server/metrics.h"
#include "server/residency/internal.h"

enum { IDLE_MS = 250, EXPEL_IDLE_MS = 1000 };

// A pass over the tenant's own sessions of a list, the least recently used first: `look` returns false to end it.
// True where all were visited.
typedef bool look_fn(void *context, qkv_session *session);

static bool look_at_own(qkv_recency *recency, const qkv_account *account, qkv_recency_list list, look_fn *look,
                        void *context) {
  bool more = true;
  while (more) {
    qkv_session *session = qkv_recency_next(recency, list);
    if (session == NULL) break;
    if (qkv_session_account(session) == account) more = look(context, session);
    qkv_session_unref(&session);
  }
  return more;
}

static bool each_own(qkvi_residency *residency, const qkv_account *account, qkv_recency_list list, look_fn *look,
                     void *context) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  qkv_recency_begin(recency, list);
  const bool all = look_at_own(recency, account, list, look, context);
  qkv_recency_end(recency, list);
  return all;
}

// ---- Memory ----

static uint64_t taken(const qkv_account *account) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_account_arena(account));
  return memory.bytes_used + memory.bytes_reserved;
}

static uint64_t ceiling(const qkv_account *account) {
  return qkv_arena_read(qkv_account_arena(account)).bytes_limit;
}

typedef struct eviction {
  qkvi_residency *residency;
  const qkv_account *account;
  uint64_t target, freed;  // bytes
  bool wait;
  bool held;  // a thread holds a layer of a session
} eviction;

static bool evict_one(void *context, qkv_session *session) {
  eviction *on = context;
  const uint64_t now = taken(on->account);
  if (now <= on->target) return false;
  qkv_metric_add(&on->residency->metrics[QKV_METRIC_EVICTION_LOOKS], 1);
  on->freed += qkv_session_evict(session, now - on->target, on->wait);
  on->held |= qkv_session_has_pins(session);
  return true;
}

// Down to `target` bytes, a little more than is asked for, so that the next append need not evict. Whether a thread
// holds layers that could leave else.
static bool evict(qkvi_residency *residency, const qkv_account *account, uint64_t target, bool wait) {
  eviction on = {.residency = residency, .account = account, .target = target, .wait = wait};
  qkv_recency_begin(qkv_store_recency(residency->store), QKV_RECENCY_CODED);  // a pass of objects is part of it
  (void)look_at_own(qkv_store_recency(residency->store), account, QKV_RECENCY_CODED, evict_one, &on);
  qkvi_objects_begin_pass(residency->objects, QKVI_PASS_SPILL);
  const uint64_t left = taken(account);
  if (left > target) on.freed += qkvi_objects_spill(residency->objects, account, true, INT64_MAX, left - target);
  qkv_recency_end(qkv_store_recency(residency->store), QKV_RECENCY_CODED);
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_EVICTED_BYTES], (int64_t)on.freed);
  return on.held;
}

typedef struct sealing {
  qkvi_residency *residency;
  uint64_t bytes, sealed;  // that are missing, and that have been coded
  bool later;              // more can be evicted soon
} sealing;

// Exact rows of sessions that are not in use become pages, which can be evicted, as many as are missing; rows that
// stayed exact are not retried.
static bool seal_one(void *context, qkv_session *session) {
  sealing *on = context;
  if (on->sealed >= on->bytes) return false;
  const uint64_t before = qkv_session_bytes_exact(session);
  if (before == 0 || qkv_session_is_pinned(session)) return true;
  const bool idle = qkv_now_ms() - qkv_session_last_used_ms(session) >= IDLE_MS;
  const qkv_status status = idle ? qkv_session_seal_idle(session, NULL) : QKV_UNAVAILABLE;
  const uint64_t after = qkv_session_bytes_exact(session);
  if (status == QKV_OK) qkv_recency_give_up(qkv_store_recency(on->residency->store), session, after);
  on->later |= status == QKV_UNAVAILABLE || after < before;
  if (after < before) on->sealed += before - after;
  return true;
}

static bool settle_one(void *context, qkv_session *session) {
  (void)context;
  return qkv_session_settle(session);
}

static qkv_status refuse(const qkv_account *account, uint64_t bytes, qkv_error *error) {
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "quota host_bytes of tenant %s is %" PRIu64 " bytes, %" PRIu64 " in use, %" PRIu64
                  " more are needed and nothing else of it can leave memory",
                  qkv_account_tenant(account), ceiling(account), taken(account), bytes);
}

static bool fits(const qkv_account *account, uint64_t bytes) {
  const uint64_t most = ceiling(account), now = taken(account);
  return now <= most && bytes <= most - now;
}

qkv_status qkvi_account_headroom(qkvi_residency *residency, const qkv_rpc_call *call, qkv_account *account,
                                 uint64_t bytes, size_t held, qkv_error *error) {
  if (account == NULL || fits(account, bytes)) return QKV_OK;
  const int64_t until = qkvi_memory_until_ms(call);
  uint64_t seen = qkvi_progress_count(residency);
  bool waited = false;
  while (!fits(account, bytes)) {
    const uint64_t most = ceiling(account), target = most < bytes ? 0 : (most - bytes) - (most - bytes) / 16;
    if (bytes > most) return refuse(account, bytes, error);
    if (qkvi_client_is_gone(call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    const bool settled = each_own(residency, account, QKV_RECENCY_UNSETTLED, settle_one, NULL);
    const bool pending =
        !qkvi_objects_settle(residency->objects) || !settled;  // before, as what is written meanwhile can be evicted
    const bool later = evict(residency, account, target, waited) && held == 0;
    if (fits(account, bytes)) break;
    const uint64_t now = taken(account), left = most - bytes;
    sealing on = {.residency = residency, .bytes = now > left ? now - left : 1, .later = pending || later || !waited};
    (void)each_own(residency, account, QKV_RECENCY_EXACT, seal_one, &on);
    waited = true;
    if (!on.later || qkvi_write_back_failure(residency) != QKV_OK || qkv_now_ms() > until)
      return refuse(account, bytes, error);
    qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_WAITS], 1);
    qkvi_write_back_hasten(residency);
    seen = qkvi_call_await(residency, call, QKV_RPC_WAIT_MEMORY, seen);
  }
  return QKV_OK;
}

// ---- SSD ----

typedef struct expulsion {
  qkvi_residency *residency;
  qkv_session *session;  // with a reference; NULL: none yet
} expulsion;

static bool find_one(void *context, qkv_session *session) {
  expulsion *on = context;
  const bool idle = qkv_now_ms() - qkv_session_last_used_ms(session) >= EXPEL_IDLE_MS;
  if (idle && qkvi_eviction_may_expel(session)) on->session = qkv_session_ref(session);
  return idle && on->session == NULL;
}

// Objects of the tenant that were not used for longer are deleted before the session.
static bool expel_object(qkvi_residency *residency, const qkv_account *account, const qkv_session *session,
                         bool evictable) {
  const qkvi_objects_expulsion wanted = {
      .account = account,
      .evictable = evictable,
      .before_ms = session == NULL ? INT64_MAX : qkv_session_last_used_ms(session)};
  return qkvi_objects_expel(residency->objects, &wanted);
}

static bool expel_of(qkvi_residency *residency, const qkv_account *account, qkv_recency_list list) {
  expulsion on = {.residency = residency};
  (void)each_own(residency, account, list, find_one, &on);
  const bool object = expel_object(residency, account, on.session, list == QKV_RECENCY_EVICTABLE);
  if (!object && on.session != NULL)
    qkvi_eviction_expel_one(residency, on.session, "quota ssd_bytes is full, a session was deleted");
  const bool expelled = object || on.session != NULL;
  qkv_session_unref(&on.session);
  return expelled;
}

void qkvi_account_expel(qkvi_residency *residency) {
  qkv_account *account = qkv_accounts_full_ssd(qkv_store_accounts(residency->store));
  if (account == NULL) return;
  if (!expel_of(residency, account, QKV_RECENCY_EVICTABLE)) (void)expel_of(residency, account, QKV_RECENCY_KEPT);
  qkv_account_unref(&account);
}
