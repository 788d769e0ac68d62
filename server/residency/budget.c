// Sessions that are on the SSD leave memory where its budget is full.
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>

#include "engine/base/yield.h"
#include "engine/cache/session_spill.h"
#include "server/identity.h"
#include "server/metrics.h"
#include "server/residency/internal.h"

enum { IDLE_MS = 250, EXPEL_IDLE_MS = 1000, WAIT_MS = 10000, STAYING_MS = 250 };

uint64_t qkvi_budget_taken(qkvi_residency *residency) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_store_arena(residency->store));
  return memory.bytes_used + memory.bytes_reserved;
}

// Of objects that were last used before.
static uint64_t spill_objects(qkvi_residency *residency, uint64_t target, int64_t before_ms) {
  const uint64_t taken = qkvi_budget_taken(residency);
  return taken > target ? qkvi_objects_spill(residency->objects, before_ms, taken - target) : 0;
}

// One at a time: others wait for the end of its pass.
static uint64_t evict(qkvi_residency *residency, uint64_t target, bool wait) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  uint64_t freed = 0, taken;
  qkv_recency_begin(recency, QKV_RECENCY_CODED);
  qkvi_objects_begin_pass(residency->objects, QKVI_PASS_SPILL);
  while (qkvi_budget_taken(residency) > target) {
    qkv_session *session = qkv_recency_next(recency, QKV_RECENCY_CODED);
    if (session == NULL) break;
    freed += spill_objects(residency, target, qkv_session_last_used_ms(session));
    taken = qkvi_budget_taken(residency);
    if (taken > target) {
      qkv_metric_add(&residency->metrics[QKV_METRIC_EVICTION_LOOKS], 1);
      freed += qkv_session_evict(session, taken - target, wait);
    }
    qkv_session_unref(&session);
  }
  freed += spill_objects(residency, target, INT64_MAX);
  qkv_recency_end(recency, QKV_RECENCY_CODED);
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_EVICTED_BYTES], (int64_t)freed);
  return freed;
}

uint64_t qkvi_budget_evict(qkvi_residency *residency, uint64_t target) {
  return evict(residency, target, false);
}

static bool anything_pending(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  bool any = residency->wanted;
  for (const qkvi_pending *at = residency->pending; at != NULL && !any; at = at->hh.next)
    any = at->state != QKV_RECORD_GONE;
  qkvi_residency_unlock(residency);
  return any || atomic_load_explicit(&residency->unsettled, memory_order_relaxed);
}

// ---- Layers in use ----

void qkvi_budget_hold(qkvi_residency *residency, qkv_session *session, uint32_t layer) {
  qkv_session_pin(session, layer);
  if (residency == NULL) return;
  qkvi_residency_lock(residency);
  residency->holds++;
  qkvi_residency_unlock(residency);
}

void qkvi_budget_release(qkvi_residency *residency, qkv_session *session, uint32_t layer) {
  qkv_session_unpin(session, layer);
  if (residency == NULL) return;
  qkvi_residency_lock(residency);
  assert(residency->holds > 0);
  residency->holds--;
  qkvi_residency_unlock(residency);
  qkvi_progress_signal(residency);
}

static bool anything_held(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const bool any = residency->holds > 0;
  qkvi_residency_unlock(residency);
  return any;
}

// ---- Headroom ----

// Those of one session. Where it was not worth a try, none of them will be: layers that stay exact.
static uint64_t seal_session(qkvi_residency *residency, qkv_session *session) {
  const uint64_t before = qkv_session_bytes_exact(session);
  const qkv_status status = qkv_session_seal(session, NULL);
  const uint64_t after = qkv_session_bytes_exact(session);
  if (status == QKV_OK) qkv_recency_give_up(qkv_store_recency(residency->store), session, after);
  return before > after ? before - after : 0;
}

// Exact rows of the longest unused sessions become pages, which can leave, until `bytes` of rows have. `*left`: there
// are more, of sessions that were in use just now.
static uint64_t seal_idle(qkvi_residency *residency, uint64_t bytes, bool *left) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  uint64_t sealed = 0;
  *left = false;
  qkv_recency_begin(recency, QKV_RECENCY_EXACT);
  while (sealed < bytes && !*left) {
    qkv_session *session = qkv_recency_next(recency, QKV_RECENCY_EXACT);
    if (session == NULL) break;
    if (qkv_session_bytes_exact(session) > 0 && !qkv_session_is_pinned(session)) {
      *left = qkvi_now_ms() - qkv_session_last_used_ms(session) < IDLE_MS;
      if (!*left) sealed += seal_session(residency, session);
    }
    qkv_session_unref(&session);
  }
  qkv_recency_end(recency, QKV_RECENCY_EXACT);
  return sealed;
}

// What will not leave, at least: sessions in memory alone and those that are pinned, what is reserved and objects.
static uint64_t staying(qkvi_residency *residency) {
  return qkv_store_staying(residency->store) + qkv_store_read_stats(residency->store).learning_bytes +
         residency->buffer_bytes + qkvi_objects_staying(residency->objects);
}

// Looked at a few times a second.
static bool too_much_stays(qkvi_residency *residency, uint64_t most, int64_t *next_ms) {
  const int64_t now = qkvi_now_ms();
  if (now < *next_ms) return false;
  *next_ms = now + STAYING_MS;
  return staying(residency) > most;
}

bool qkvi_client_is_gone(const qkv_rpc_call *call) {
  return call != NULL && qkv_rpc_cancelled(call);
}

// Evicts until `bytes` could be reserved. A little more than is asked for leaves memory, so that the next one need
// not ask. What gets free meanwhile, by whomever, is kept for this one.
static qkv_status make_headroom(qkvi_residency *residency, const qkv_rpc_call *call, uint64_t bytes, int64_t until) {
  qkv_arena *arena = qkv_store_arena(residency->store);
  uint64_t seen = qkvi_progress_count(residency);
  bool waited = false;
  int64_t next_ms = 0;
  for (;;) {
    const uint64_t budget = qkvi_budget_limit(residency);  // each time, as it follows what memory outside pages takes
    if (bytes > budget) break;
    const uint64_t most = budget - bytes, target = most - most / 16;
    const bool pending = anything_pending(residency);  // before, as what is written meanwhile can leave
    if (qkv_arena_reserve_next(arena, bytes) == QKV_OK) return QKV_OK;
    (void)evict(residency, target, false);
    if (qkvi_budget_taken(residency) > most) (void)evict(residency, target, true);
    if (qkv_arena_reserve_next(arena, bytes) == QKV_OK) return QKV_OK;
    const uint64_t taken = qkvi_budget_taken(residency);
    bool later = pending;
    if (!pending && taken > most && seal_idle(residency, taken - most, &later) > 0 && qkvi_now_ms() < until) continue;
    later |= anything_held(residency) || !waited;  // a reservation may be another thread's that holds nothing yet
    waited = true;
    if (qkvi_client_is_gone(call)) break;
    if (!later || qkvi_write_back_failure(residency) != QKV_OK || qkvi_now_ms() > until ||
        too_much_stays(residency, most, &next_ms))
      break;
    qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_WAITS], 1);
    qkvi_write_back_hasten(residency);
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
  qkv_arena_let_go(arena);
  return qkvi_client_is_gone(call) ? QKV_CANCELLED : QKV_RESOURCE_EXHAUSTED;
}

static void join_turns(qkvi_turn *mine) {
  qkvi_residency *residency = mine->residency;
  qkvi_residency_lock(residency);
  assert(residency->holds >= mine->held);
  residency->holds -= mine->held;
  qkvi_turn **link = &residency->turns;
  while (*link != NULL) link = &(*link)->next;
  *link = mine;
  qkvi_residency_unlock(residency);
}

// From any place among those who wait.
void qkvi_turn_end(qkvi_turn *turn) {
  qkvi_residency *residency = turn->residency;
  qkvi_residency_lock(residency);
  residency->holds += turn->held;
  qkvi_turn **link = &residency->turns;
  while (*link != turn) link = &(*link)->next;
  *link = turn->next;
  qkvi_residency_unlock(residency);
  qkvi_progress_signal(residency);
}

static bool is_first(const qkvi_turn *mine) {
  qkvi_residency_lock(mine->residency);
  const bool first = mine->residency->turns == mine;
  qkvi_residency_unlock(mine->residency);
  return first;
}

static qkv_status refuse(const qkvi_residency *residency, uint64_t bytes, qkv_error *error) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_store_arena(residency->store));
  if (memory.bytes_limit == memory.bytes_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "memory-budget is %" PRIu64 " bytes, %" PRIu64 " more are needed and nothing else can leave it",
                    memory.bytes_max, bytes);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "memory-budget is %" PRIu64 " bytes, %" PRIu64 " of them for memory outside pages, %" PRIu64
                  " more are needed and nothing else can leave it",
                  memory.bytes_max, memory.bytes_max - memory.bytes_limit, bytes);
}

qkv_status qkvi_turn_begin(qkvi_turn *turn, qkvi_residency *residency, const qkv_rpc_call *call, size_t held,
                           qkv_error *error) {
  *turn = (qkvi_turn){.residency = residency, .call = call, .held = held, .until_ms = qkvi_now_ms() + WAIT_MS};
  qkv_yield_rest();
  join_turns(turn);
  for (uint64_t seen = qkvi_progress_count(residency); !is_first(turn);) {
    if (qkvi_client_is_gone(call)) {
      qkvi_turn_end(turn);
      return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    }
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
  const int64_t least = qkvi_now_ms() + QKVI_STEP_MS;  // however long the turn took to come
  if (turn->until_ms < least) turn->until_ms = least;
  return QKV_OK;
}

qkv_status qkvi_turn_take(const qkvi_turn *turn, uint64_t bytes, uint64_t *reservation, qkv_error *error) {
  qkvi_residency *residency = turn->residency;
  qkv_status status = bytes <= qkvi_budget_limit(residency) ? QKV_OK : QKV_RESOURCE_EXHAUSTED;
  if (status == QKV_OK && bytes > 0) status = make_headroom(residency, turn->call, bytes, turn->until_ms);
  if (status == QKV_CANCELLED) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
  if (status != QKV_OK) return refuse(residency, bytes, error);
  *reservation += bytes;
  return QKV_OK;
}

qkv_status qkvi_budget_reserve(qkvi_residency *residency, const qkv_rpc_call *call, uint64_t bytes, size_t held,
                               uint64_t *reservation, qkv_error *error) {
  qkvi_turn turn;
  if (bytes == 0) return QKV_OK;
  if (bytes > qkvi_budget_limit(residency)) return refuse(residency, bytes, error);
  QKV_TRY(qkvi_turn_begin(&turn, residency, call, held, error));
  const qkv_status status = qkvi_turn_take(&turn, bytes, reservation, error);
  qkvi_turn_end(&turn);
  return status;
}

void qkvi_budget_unreserve(qkvi_residency *residency, uint64_t *reservation) {
  if (*reservation == 0) return;
  qkv_arena_unreserve(qkv_store_arena(residency->store), *reservation);
  *reservation = 0;
  qkvi_progress_signal(residency);
}

// ---- On the disk ----

// What is on the SSD of one session goes, and what is in memory.
static void expel_session(qkvi_residency *residency, qkv_session *session) {
  const qkv_session_config *config = qkv_session_config_of(session);
  const uint64_t bytes = qkv_session_bytes_stored(session);
  qkv_error error = {0};
  uint64_t freed;
  if (qkv_store_close_session(residency->store, session, &freed, NULL) != QKV_OK) return;  // by another one
  if (qkvi_catalogue_closed(residency, session, &error) != QKV_OK)
    qkv_log(QKV_LOG_ERROR, "a session that was deleted may come back", "{s:s, s:s*, s:s}", "session", config->name,
            "tenant", qkvi_tenant_to_log(config->tenant), "reason", error.text);
  qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_EXPELLED], 1);
  qkv_log(QKV_LOG_WARN, "storage-budget is full, a session was deleted", "{s:s, s:s*, s:I}", "session", config->name,
          "tenant", qkvi_tenant_to_log(config->tenant), "bytes", (json_int_t)bytes);
}

static bool may_be_expelled(const qkv_session *session) {
  return qkv_session_config_of(session)->backing != NULL && qkv_session_bytes_stored(session) > 0 &&
         !qkv_session_is_pinned(session) && !qkv_session_is_staged(session);
}

// The longest unused session of a list that may be, with a reference; NULL: there is none, or all were used just now.
static qkv_session *find_expelled(qkvi_residency *residency, qkv_recency_list list) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  const int64_t now = qkvi_now_ms();
  qkv_session *session;
  qkv_recency_begin(recency, list);
  while ((session = qkv_recency_next(recency, list)) != NULL) {
    const bool idle = now - qkv_session_last_used_ms(session) >= EXPEL_IDLE_MS;
    if (idle && may_be_expelled(session)) break;
    qkv_session_unref(&session);
    if (!idle) break;
  }
  qkv_recency_end(recency, list);
  return session;
}

// That session, or objects that were not used for longer. False: there is nothing.
static bool expel_from(qkvi_residency *residency, qkv_recency_list list) {
  qkv_session *session = find_expelled(residency, list);
  if (session == NULL) return false;
  if (!qkvi_objects_expel(residency->objects, list == QKV_RECENCY_EVICTABLE, qkv_session_last_used_ms(session)))
    expel_session(residency, session);
  qkv_session_unref(&session);
  return true;
}

// storage-budget has no headroom: the longest unused session that nobody has pinned goes from it, first of those that
// may be evicted.
void qkvi_residency_expel(qkvi_residency *residency) {
  if (!expel_from(residency, QKV_RECENCY_EVICTABLE) && !expel_from(residency, QKV_RECENCY_KEPT))
    (void)qkvi_objects_expel(residency->objects, false, INT64_MAX);
}
