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

enum { IDLE_MS = 250, EXPEL_IDLE_MS = 1000, WAIT_MS = 10000 };

static int by_last_use(const void *a, const void *b) {
  const int64_t first = ((const qkvi_resident *)a)->last_used_ms;
  const int64_t second = ((const qkvi_resident *)b)->last_used_ms;
  return (first > second) - (first < second);
}

static qkvi_resident *list_sessions(qkvi_residency *residency, bool holding, size_t *count) {
  const size_t most = qkv_store_read_stats(residency->store).sessions + 1;
  qkv_session **listed = calloc(most, sizeof *listed);
  qkvi_resident *made = calloc(most, sizeof *made);
  if (listed == NULL || made == NULL) abort();
  *count = qkv_store_backed(residency->store, holding, listed, most);
  for (size_t i = 0; i < *count; i++) made[i] = (qkvi_resident){listed[i], qkv_session_last_used_ms(listed[i])};
  free((void *)listed);
  qsort(made, *count, sizeof *made, by_last_use);
  return made;
}

// Sessions that are not in memory alone, the longest unused first. The caller returns each.
qkvi_resident *qkvi_residency_sessions(qkvi_residency *residency, size_t *count) {
  return list_sessions(residency, false, count);
}

void qkvi_residency_drop_sessions(qkvi_resident *sessions, size_t count) {
  for (size_t i = 0; i < count; i++) qkv_session_unref(&sessions[i].session);
  free(sessions);
}

uint64_t qkvi_budget_taken(qkvi_residency *residency) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_store_arena(residency->store));
  return memory.bytes_used + memory.bytes_reserved;
}

// Of objects that were last used before.
static uint64_t spill_objects(qkvi_residency *residency, uint64_t target, int64_t before_ms) {
  const uint64_t taken = qkvi_budget_taken(residency);
  return taken > target ? qkvi_objects_spill(residency->objects, before_ms, taken - target) : 0;
}

static uint64_t evict(qkvi_residency *residency, uint64_t target, bool wait) {
  uint64_t freed = 0;
  size_t count;
  (void)pthread_mutex_lock(&residency->room_lock);
  qkvi_resident *sessions = list_sessions(residency, true, &count);
  qkvi_objects_begin_pass(residency->objects, QKVI_PASS_SPILL);
  for (size_t i = 0; i < count; i++) {
    freed += spill_objects(residency, target, sessions[i].last_used_ms);
    const uint64_t taken = qkvi_budget_taken(residency);
    if (taken <= target) break;
    qkv_metric_add(&residency->metrics[QKV_METRIC_EVICTION_LOOKS], 1);
    freed += qkv_session_evict(sessions[i].session, taken - target, wait);
  }
  freed += spill_objects(residency, target, INT64_MAX);
  qkvi_residency_drop_sessions(sessions, count);
  (void)pthread_mutex_unlock(&residency->room_lock);
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

// Exact rows of the longest unused sessions become pages, which can leave, until `bytes` of rows have. `*left`: there
// are more, of sessions that were in use just now.
static uint64_t seal_idle(qkvi_residency *residency, uint64_t bytes, bool *left) {
  uint64_t sealed = 0;
  size_t count;
  *left = false;
  (void)pthread_mutex_lock(&residency->room_lock);
  qkvi_resident *sessions = list_sessions(residency, true, &count);
  for (size_t i = 0; i < count && sealed < bytes; i++) {
    qkv_session_info info;
    qkv_session_read_info(sessions[i].session, &info, NULL);
    if (info.usage.bytes_exact == 0 || info.config.pinned) continue;
    *left = qkvi_now_ms() - info.last_used_ms < IDLE_MS;
    if (*left) break;
    const uint64_t before = info.usage.bytes_exact;
    (void)qkv_session_seal(sessions[i].session, NULL);
    qkv_session_read_info(sessions[i].session, &info, NULL);
    sealed += before > info.usage.bytes_exact ? before - info.usage.bytes_exact : 0;  // exact layers stay
  }
  qkvi_residency_drop_sessions(sessions, count);
  (void)pthread_mutex_unlock(&residency->room_lock);
  return sealed;
}

static uint64_t kept_bytes(qkv_session *session) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  return info.usage.bytes_coded - info.usage.bytes_shared + info.usage.bytes_exact + info.usage.bytes_beside;
}

// What will not leave, at least: sessions in memory alone and those that are pinned.
static uint64_t staying(qkvi_residency *residency) {
  const size_t room = qkv_store_read_stats(residency->store).sessions + 1;
  qkv_session **listed = calloc(room, sizeof *listed);
  if (listed == NULL) abort();
  const size_t count = qkv_store_list(residency->store, &(qkv_store_filter){0}, listed, room);
  uint64_t bytes = qkv_store_read_stats(residency->store).learning_bytes + residency->buffer_bytes +
                   qkvi_objects_staying(residency->objects);
  for (size_t i = 0; i < count; i++) {
    if (qkv_session_config_of(listed[i])->backing == NULL || qkv_session_is_pinned(listed[i]))
      bytes += kept_bytes(listed[i]);
    qkv_session_unref(&listed[i]);
  }
  free((void *)listed);
  return bytes;
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
  for (;;) {
    const uint64_t budget = qkvi_budget_limit(residency);  // each time, as it follows what lies beside it
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
    if (!later || qkvi_write_back_failure(residency) != QKV_OK || qkvi_now_ms() > until || staying(residency) > most)
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

// Sessions that may be evicted first, the longest unused ones first.
static int by_worth(const void *a, const void *b) {
  const bool first = qkv_session_config_of(((const qkvi_resident *)a)->session)->evictable;
  const bool second = qkv_session_config_of(((const qkvi_resident *)b)->session)->evictable;
  return first != second ? second - first : by_last_use(a, b);
}

// storage-budget has no room: the longest unused session that nobody has pinned goes from it, and from memory, or
// objects that were not used for longer.
void qkvi_residency_expel(qkvi_residency *residency) {
  size_t count;
  bool gone = false;
  qkvi_resident *sessions = qkvi_residency_sessions(residency, &count);
  qsort(sessions, count, sizeof *sessions, by_worth);
  for (size_t i = 0; i < count && !gone; i++) {
    qkv_session *session = sessions[i].session;
    qkv_session_info info;
    qkv_error error = {0};
    uint64_t freed;
    qkv_session_read_info(session, &info, NULL);
    if (info.config.pinned || info.usage.bytes_stored == 0) continue;
    if (qkvi_now_ms() - info.last_used_ms < EXPEL_IDLE_MS || info.config.staged) continue;
    gone = qkvi_objects_expel(residency->objects, info.config.evictable, info.last_used_ms);
    if (gone) break;
    if (qkv_store_close_session(residency->store, session, &freed, NULL) != QKV_OK) continue;
    if (qkvi_catalogue_closed(residency, session, &error) != QKV_OK)
      qkv_log(QKV_LOG_ERROR, "a session that was deleted may come back", "{s:s, s:s*, s:s}", "session",
              qkv_session_name(session), "tenant", qkvi_tenant_to_log(info.config.tenant), "reason", error.text);
    qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_EXPELLED], 1);
    qkv_log(QKV_LOG_WARN, "storage-budget is full, a session was deleted", "{s:s, s:s*, s:I}", "session",
            qkv_session_name(session), "tenant", qkvi_tenant_to_log(info.config.tenant), "bytes",
            (json_int_t)info.usage.bytes_stored);
    gone = true;
  }
  if (!gone) (void)qkvi_objects_expel(residency->objects, false, INT64_MAX);
  qkvi_residency_drop_sessions(sessions, count);
}
