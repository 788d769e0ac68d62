// The thread of the residency: settles what is not durable, and counts the directory of records.
#include <stdatomic.h>

#include "engine/base/clock.h"
#include "engine/cache/session_spill.h"
#include "server/metrics.h"
#include "server/residency/accounts.h"
#include "server/residency/internal.h"

static bool settle_sessions(qkvi_residency *residency) {
  qkv_recency *recency = qkv_store_recency(residency->store);
  bool all = true;
  qkv_recency_begin(recency, QKV_RECENCY_UNSETTLED);
  for (qkv_session *next; (next = qkv_recency_next(recency, QKV_RECENCY_UNSETTLED)) != NULL; qkv_session_unref(&next))
    all &= qkv_session_settle(next);
  qkv_recency_end(recency, QKV_RECENCY_UNSETTLED);
  return qkvi_objects_settle(residency->objects) && all;
}

static bool take_flag(qkvi_residency *residency, bool *flag) {
  qkvi_residency_lock(residency);
  const bool was = *flag;
  *flag = false;
  qkvi_residency_unlock(residency);
  return was;
}

enum { COUNT_MS = 100, DIRECTORY_PART = 8 };

// The directory of records, in the storage's index and in layers, is part of memory-budget, up to an eighth of it.
// The index counts its own bytes: a session of one record takes some 500 of them, one of many 32 a record. The
// entries of pages in memory are larger, and small compared to the pages. Where there is no headroom the coldest
// pages are evicted, and it is tried again.
static void count_directory(qkvi_residency *residency) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(residency->storage, &stats);
  const uint64_t pages = qkv_recency_read_sums(qkv_store_recency(residency->store)).folded_pages,
                 folded = pages < stats.records ? pages : stats.records,
                 most = qkvi_budget_whole(residency) / DIRECTORY_PART,
                 all = stats.index_bytes + (stats.records - folded) * QKV_COLD_PAGE_BYTES,
                 wanted = all < most ? all : most, counted = residency->directory_bytes;
  qkv_arena *arena = qkv_store_arena(residency->store);
  qkv_metric_set(&residency->metrics[QKV_METRIC_STORAGE_KNOWN_BYTES], (int64_t)all);
  if (wanted <= counted) {
    if (wanted < counted) qkv_arena_unreserve_elsewhere(arena, counted - wanted);
    residency->directory_bytes = wanted;
  } else if (qkv_arena_reserve_elsewhere(arena, wanted - counted, NULL) == QKV_OK) {
    residency->directory_bytes = wanted;
  } else {
    const uint64_t budget = qkvi_budget_limit(residency), more = wanted - counted;
    (void)qkvi_budget_evict(residency, budget > more ? budget - more : 0);
  }
}

// Evicts what exceeds a lowered limit. What is not durable yet is evicted later.
static void keep_limit(qkvi_residency *residency) {
  const uint64_t budget = qkvi_budget_limit(residency);
  if (qkvi_budget_taken(residency) <= budget) return;
  (void)qkvi_budget_evict(residency, budget);
  if (qkvi_budget_taken(residency) > budget) qkvi_write_back_hasten(residency);
}

static void keep_counts(qkvi_residency *residency) {
  const int64_t now = qkv_now_ms();
  if (now < residency->counted_ms + COUNT_MS) return;
  residency->counted_ms = now;
  qkvi_write_back_forget_gone(residency);
  count_directory(residency);
  keep_limit(residency);
}

// A full device may have space again; a budget has none, unless something is deleted.
static bool budget_is_full(const qkvi_residency *residency) {
  const qkv_backing *tier = &residency->backings[0].table;
  const qkv_tier_capacity capacity = tier->capacity(tier->context);
  return capacity.bytes > capacity.bytes_max;
}

void *qkvi_residency_work(void *context) {
  qkvi_residency *residency = context;
  uint64_t seen = 0;
  for (;;) {
    if (take_flag(residency, &residency->full) && budget_is_full(residency)) qkvi_eviction_expel(residency);
    qkvi_account_expel(residency);
    const bool rests = qkvi_write_back_rests(residency);
    if (!rests) qkvi_closes_write_again(residency);
    if (!rests && take_flag(residency, &residency->wanted)) qkvi_catalogue_journal_calibrations(residency);
    if (atomic_exchange_explicit(&residency->unsettled, false, memory_order_relaxed) && !settle_sessions(residency))
      atomic_store_explicit(&residency->unsettled, true, memory_order_relaxed);
    keep_counts(residency);
    qkvi_residency_lock(residency);
    const bool ending = residency->ending;
    qkvi_residency_unlock(residency);
    if (ending) return NULL;
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
}
