// Reservations of memory-budget, first come, first served.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine/base/clock.h"
#include "engine/base/yield.h"
#include "engine/cache/session_spill.h"
#include "server/metrics.h"
#include "server/residency/internal.h"

enum { STAYING_MS = 250 };

uint64_t qkvi_budget_limit(const qkvi_residency *residency) {
  return qkv_arena_read(qkv_store_arena(residency->store)).bytes_limit;
}

// The whole memory-budget, including what is reserved for good at the start.
uint64_t qkvi_budget_whole(const qkvi_residency *residency) {
  return qkv_arena_read(qkv_store_arena(residency->store)).bytes_max;
}

uint64_t qkvi_budget_taken(qkvi_residency *residency) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_store_arena(residency->store));
  return memory.bytes_used + memory.bytes_reserved;
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

// Bytes that cannot be evicted, at least: sessions in memory alone and pinned ones, reservations and objects.
static uint64_t staying(qkvi_residency *residency) {
  return qkv_store_staying(residency->store) + qkv_store_read_stats(residency->store).learning_bytes +
         residency->buffer_bytes + qkvi_objects_staying(residency->objects);
}

// Recomputed a few times a second.
static bool too_much_stays(qkvi_residency *residency, uint64_t most, int64_t *next_ms) {
  const int64_t now = qkv_now_ms();
  if (now < *next_ms) return false;
  *next_ms = now + STAYING_MS;
  return staying(residency) > most;
}

int64_t qkvi_memory_until_ms(const qkv_rpc_call *call) {
  const int64_t waited = call == NULL ? 0 : qkv_rpc_waited_ms(call, QKV_RPC_WAIT_MEMORY),
                left = 2 * QKVI_MEMORY_WAIT_MS - waited;
  return qkv_now_ms() + (left > 0 ? left / 2 : 0);
}

bool qkvi_client_is_gone(const qkv_rpc_call *call) {
  return call != NULL && qkv_rpc_cancelled(call);
}

// Evicts until `bytes` could be reserved. A little more than is asked for is evicted, so that the next thread need
// not. Memory that any thread frees meanwhile is kept for this one.
static qkv_status make_headroom(qkvi_residency *residency, const qkv_rpc_call *call, uint64_t bytes, int64_t until) {
  qkv_arena *arena = qkv_store_arena(residency->store);
  uint64_t seen = qkvi_progress_count(residency);
  bool waited = false;
  int64_t next_ms = 0;
  for (;;) {
    const uint64_t budget = qkvi_budget_limit(residency);  // each time, as it follows what memory outside pages takes
    if (bytes > budget) break;
    const uint64_t most = budget - bytes, target = most - most / 16;
    const bool pending = anything_pending(residency);  // before, as what is written meanwhile can be evicted
    if (qkv_arena_reserve_next(arena, bytes) == QKV_OK) return QKV_OK;
    (void)qkvi_eviction_run(residency, target, false);
    if (qkvi_budget_taken(residency) > most) (void)qkvi_eviction_run(residency, target, true);
    if (qkv_arena_reserve_next(arena, bytes) == QKV_OK) return QKV_OK;
    const uint64_t taken = qkvi_budget_taken(residency);
    bool later = pending;
    if (!pending && taken > most && qkvi_eviction_seal_idle(residency, taken - most, &later) > 0 &&
        qkv_now_ms() < until)
      continue;
    later |= anything_held(residency) || !waited;  // a reservation may be another thread's that holds nothing yet
    waited = true;
    if (qkvi_client_is_gone(call)) break;
    if (!later || qkvi_write_back_failure(residency) != QKV_OK || qkv_now_ms() > until ||
        too_much_stays(residency, most, &next_ms))
      break;
    qkv_metric_add(&residency->metrics[QKV_METRIC_SPILL_WAITS], 1);
    qkvi_write_back_hasten(residency);
    seen = qkvi_call_await(residency, call, QKV_RPC_WAIT_MEMORY, seen);
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

// From any position in the queue.
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
  *turn = (qkvi_turn){.residency = residency, .call = call, .held = held, .until_ms = qkvi_memory_until_ms(call)};
  qkv_yield_rest();
  join_turns(turn);
  for (uint64_t seen = qkvi_progress_count(residency); !is_first(turn);) {
    if (qkvi_client_is_gone(call)) {
      qkvi_turn_end(turn);
      return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    }
    seen = qkvi_call_await(residency, call, QKV_RPC_WAIT_MEMORY, seen);
  }
  const int64_t least = qkv_now_ms() + QKVI_STEP_MS;  // even if the turn took long to come
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
