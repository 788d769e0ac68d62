// Room: sessions that are on the SSD leave memory, and that where its budget is full.
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>

#include "engine/base/precedence.h"
#include "engine/cache/session_spill.h"
#include "server/metrics.h"
#include "server/spill_internal.h"

enum { IDLE_MS = 250, EXPEL_IDLE_MS = 1000, WAIT_MS = 10000 };

static int by_last_use(const void *a, const void *b) {
  const int64_t first = ((const qkvi_spilled *)a)->last_used_ms;
  const int64_t second = ((const qkvi_spilled *)b)->last_used_ms;
  return (first > second) - (first < second);
}

// Sessions that are not in memory alone, the longest unused first. The caller returns each.
qkvi_spilled *qkvi_spill_sessions(qkvi_spill *spill, size_t *count) {
  const size_t room = qkv_store_read_stats(spill->store).sessions + 1;
  qkv_session **listed = calloc(room, sizeof *listed);
  qkvi_spilled *made = calloc(room, sizeof *made);
  if (listed == NULL || made == NULL) abort();
  const size_t all = qkv_store_list(spill->store, "", "", listed, room);
  *count = 0;
  for (size_t i = 0; i < all; i++) {
    qkv_session_info info;
    qkv_session_read_info(listed[i], &info, NULL);
    if (info.config.backing == NULL) {
      qkv_session_unref(&listed[i]);
    } else {
      made[(*count)++] = (qkvi_spilled){listed[i], info.last_used_ms};
    }
  }
  free((void *)listed);
  qsort(made, *count, sizeof *made, by_last_use);
  return made;
}

void qkvi_spill_drop_sessions(qkvi_spilled *sessions, size_t count) {
  for (size_t i = 0; i < count; i++) qkv_session_unref(&sessions[i].session);
  free(sessions);
}

uint64_t qkvi_spill_taken(qkvi_spill *spill) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_store_arena(spill->store));
  return memory.bytes_used + memory.bytes_reserved;
}

static uint64_t evict(qkvi_spill *spill, uint64_t target, bool wait) {
  uint64_t freed = 0;
  size_t count;
  (void)pthread_mutex_lock(&spill->room_lock);
  qkvi_spilled *sessions = qkvi_spill_sessions(spill, &count);
  for (size_t i = 0; i < count; i++) {
    const uint64_t taken = qkvi_spill_taken(spill);
    if (taken <= target) break;
    freed += qkv_session_evict(sessions[i].session, taken - target, wait);
  }
  qkvi_spill_drop_sessions(sessions, count);
  (void)pthread_mutex_unlock(&spill->room_lock);
  qkv_metric_add(&spill->metrics[QKV_METRIC_SPILL_EVICTED_BYTES], (int64_t)freed);
  return freed;
}

uint64_t qkvi_spill_evict(qkvi_spill *spill, uint64_t target) {
  return evict(spill, target, false);
}

static bool anything_pending(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  bool any = spill->wanted;
  for (const qkvi_pending *at = spill->pending; at != NULL && !any; at = at->hh.next)
    any = at->state != QKV_RECORD_GONE;
  qkvi_spill_unlock(spill);
  return any || atomic_load_explicit(&spill->unsettled, memory_order_relaxed);
}

// ---- Layers in use ----

void qkvi_spill_hold(qkvi_spill *spill, qkv_session *session, uint32_t layer) {
  qkv_session_pin(session, layer);
  if (spill == NULL) return;
  qkvi_spill_lock(spill);
  spill->holds++;
  qkvi_spill_unlock(spill);
}

void qkvi_spill_release(qkvi_spill *spill, qkv_session *session, uint32_t layer) {
  qkv_session_unpin(session, layer);
  if (spill == NULL) return;
  qkvi_spill_lock(spill);
  assert(spill->holds > 0);
  spill->holds--;
  qkvi_spill_unlock(spill);
  qkvi_spill_progress(spill);
}

static bool anything_held(qkvi_spill *spill) {
  qkvi_spill_lock(spill);
  const bool any = spill->holds > 0;
  qkvi_spill_unlock(spill);
  return any;
}

// ---- Room ----

// Exact rows of the longest unused sessions become pages, which can leave, until `bytes` of rows have. `*left`: there
// are more, of sessions that were in use just now.
static uint64_t seal_idle(qkvi_spill *spill, uint64_t bytes, bool *left) {
  uint64_t sealed = 0;
  size_t count;
  *left = false;
  (void)pthread_mutex_lock(&spill->room_lock);
  qkvi_spilled *sessions = qkvi_spill_sessions(spill, &count);
  for (size_t i = 0; i < count && sealed < bytes; i++) {
    qkv_session_info info;
    qkv_session_read_info(sessions[i].session, &info, NULL);
    if (info.usage.bytes_exact == 0 || info.config.pinned) continue;
    *left = qkvi_spill_now_ms() - info.last_used_ms < IDLE_MS;
    if (*left) break;
    const uint64_t before = info.usage.bytes_exact;
    (void)qkv_session_seal(sessions[i].session, NULL);
    qkv_session_read_info(sessions[i].session, &info, NULL);
    sealed += before > info.usage.bytes_exact ? before - info.usage.bytes_exact : 0;  // exact layers stay
  }
  qkvi_spill_drop_sessions(sessions, count);
  (void)pthread_mutex_unlock(&spill->room_lock);
  return sealed;
}

// What will not leave, at least: sessions in memory alone and those that are pinned.
static uint64_t staying(qkvi_spill *spill) {
  const size_t room = qkv_store_read_stats(spill->store).sessions + 1;
  qkv_session **listed = calloc(room, sizeof *listed);
  if (listed == NULL) abort();
  const size_t count = qkv_store_list(spill->store, "", "", listed, room);
  uint64_t bytes = qkv_store_read_stats(spill->store).learning_bytes + spill->buffer_bytes;
  for (size_t i = 0; i < count; i++) {
    qkv_session_info info;
    qkv_session_read_info(listed[i], &info, NULL);
    if (info.config.backing == NULL || info.config.pinned)
      bytes += info.usage.bytes_coded + info.usage.bytes_exact + info.usage.bytes_beside;
    qkv_session_unref(&listed[i]);
  }
  free((void *)listed);
  return bytes;
}

// Makes room until it could be reserved. A little more than is asked for leaves memory, so that the next one need not
// ask. What gets free meanwhile, by whomever, is kept for this one.
static qkv_status make_room(qkvi_spill *spill, uint64_t bytes, int64_t until) {
  qkv_arena *arena = qkv_store_arena(spill->store);
  uint64_t seen = qkvi_spill_steps(spill);
  bool waited = false;
  for (;;) {
    const uint64_t budget = qkvi_spill_budget(spill);  // each time, as it follows what lies beside it
    if (bytes > budget) break;
    const uint64_t most = budget - bytes, target = most - most / 16;
    const bool pending = anything_pending(spill);  // before, as what is written meanwhile can leave
    if (qkv_arena_reserve_next(arena, bytes) == QKV_OK) return QKV_OK;
    (void)evict(spill, target, false);
    if (qkvi_spill_taken(spill) > most) (void)evict(spill, target, true);
    if (qkv_arena_reserve_next(arena, bytes) == QKV_OK) return QKV_OK;
    const uint64_t taken = qkvi_spill_taken(spill);
    bool later = pending;
    if (!pending && taken > most && seal_idle(spill, taken - most, &later) > 0 && qkvi_spill_now_ms() < until)
      continue;
    later |= anything_held(spill) || !waited;  // for a room that was given and is not held yet
    waited = true;
    if (!later || qkvi_spill_failure(spill) != QKV_OK || qkvi_spill_now_ms() > until || staying(spill) > most) break;
    qkv_metric_add(&spill->metrics[QKV_METRIC_SPILL_WAITS], 1);
    qkvi_spill_hasten(spill);
    seen = qkvi_spill_await(spill, seen, QKVI_SPILL_STEP_MS);
  }
  qkv_arena_let_go(arena);
  return QKV_RESOURCE_EXHAUSTED;
}

static void take_turn(qkvi_spill *spill, size_t held) {
  qkv_precedence_rest();
  qkvi_spill_lock(spill);
  assert(spill->holds >= held);
  spill->holds -= held;
  const uint64_t mine = spill->turns++;
  while (spill->turn != mine) (void)pthread_cond_wait(&spill->moved, &spill->lock);
  qkvi_spill_unlock(spill);
}

static void end_turn(qkvi_spill *spill, size_t held) {
  qkvi_spill_lock(spill);
  spill->holds += held;
  spill->turn++;
  qkvi_spill_unlock(spill);
  qkvi_spill_progress(spill);
}

static qkv_status refuse(const qkvi_spill *spill, uint64_t bytes, qkv_error *error) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_store_arena(spill->store));
  if (memory.bytes_limit == memory.bytes_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "memory-budget is %" PRIu64 " bytes, %" PRIu64 " more are needed and nothing else can leave it",
                    memory.bytes_max, bytes);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "memory-budget is %" PRIu64 " bytes, %" PRIu64 " of them for what lies beside the pages, %" PRIu64
                  " more are needed and nothing else can leave it",
                  memory.bytes_max, memory.bytes_max - memory.bytes_limit, bytes);
}

qkv_status qkvi_spill_claim(qkvi_spill *spill, uint64_t bytes, size_t held, uint64_t *room, qkv_error *error) {
  const int64_t until = qkvi_spill_now_ms() + WAIT_MS;
  qkv_status status = bytes <= qkvi_spill_budget(spill) ? QKV_OK : QKV_RESOURCE_EXHAUSTED;
  if (status == QKV_OK && bytes > 0) {
    take_turn(spill, held);
    const int64_t least = qkvi_spill_now_ms() + QKVI_SPILL_STEP_MS;  // however long the turn took to come
    status = make_room(spill, bytes, until > least ? until : least);
    end_turn(spill, held);
  }
  if (status != QKV_OK) return refuse(spill, bytes, error);
  *room += bytes;
  return QKV_OK;
}

void qkvi_spill_unclaim(qkvi_spill *spill, uint64_t *room) {
  if (*room == 0) return;
  qkv_arena_unreserve(qkv_store_arena(spill->store), *room);
  *room = 0;
  qkvi_spill_progress(spill);
}

// ---- On the disk ----

// storage-budget has no room: the longest unused session that nobody has pinned goes from it, and from memory.
void qkvi_spill_expel(qkvi_spill *spill) {
  size_t count;
  qkvi_spilled *sessions = qkvi_spill_sessions(spill, &count);
  for (size_t i = 0; i < count; i++) {
    qkv_session *session = sessions[i].session;
    qkv_session_info info;
    qkv_error error = {0};
    uint64_t freed;
    qkv_session_read_info(session, &info, NULL);
    if (info.config.pinned || info.usage.bytes_stored == 0) continue;
    if (qkvi_spill_now_ms() - info.last_used_ms < EXPEL_IDLE_MS) break;
    if (qkv_store_close_session(spill->store, session, &freed, NULL) != QKV_OK) continue;
    if (qkvi_spill_closed(spill, session, &error) != QKV_OK)
      qkv_log(QKV_LOG_ERROR, "a session that was deleted may come back", "{s:s, s:s}", "session",
              qkv_session_name(session), "reason", error.text);
    qkv_metric_add(&spill->metrics[QKV_METRIC_SPILL_EXPELLED], 1);
    qkv_log(QKV_LOG_WARN, "storage-budget is full, a session was deleted", "{s:s, s:I}", "session",
            qkv_session_name(session), "bytes", (json_int_t)info.usage.bytes_stored);
    break;
  }
  qkvi_spill_drop_sessions(sessions, count);
}
