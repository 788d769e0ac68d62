#include "server/residency/restore.h"

#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>

#include "engine/base/clock.h"
#include "engine/base/histogram.h"
#include "engine/cache/session_spill.h"
#include "server/metrics.h"
#include "server/residency/accounts.h"
#include "server/residency/fold.h"
#include "server/residency/internal.h"

enum { CHUNK_PAGES = 256, TRIES = 8 };

// Reads of fewer bytes are dominated by the device's latency, and say nothing of its rate.
enum { RATED_BYTES = 1 << 18 };
#define RATE_UNKNOWN 1e9  // bytes a second, as of an SSD that was not measured

typedef struct restoring {
  qkvi_restoring here;  // in the list of those under way
  qkvi_residency *residency;
  qkvi_wanted wanted;
  bool ahead;            // no client waits for it
  uint64_t most;         // of memory-budget in use, then
  uint64_t reservation;  // for the pages, and for wanted->extra; while several threads restore under residency->lock
  qkv_missing_page pages[CHUNK_PAGES];
  size_t count;
  const qkv_backing *tier;  // that they come from
  void *reading;            // of these pages
  size_t batch;             // pages that a thread reads and puts back at once
  _Atomic size_t next;      // the first of them that no thread has taken
  _Atomic uint64_t bytes;   // that have come back
  // Of the first batch that has failed; under residency->lock.
  size_t failed;
  qkv_error error;
} restoring;

// ---- One at a time ----

static bool share_range(const qkvi_restoring *a, const qkvi_restoring *b) {
  for (size_t i = 0; i < a->shared_count; i++) {
    for (size_t j = 0; j < b->shared_count; j++) {
      if (a->shared[i] == b->shared[j]) return true;
    }
  }
  return false;
}

// Another thread that restores the same layer, or ranges that the session shares. Under the lock.
static const qkvi_restoring *find_other(const restoring *all) {
  const qkvi_restoring *at = all->residency->restoring, *mine = &all->here;
  while (at != NULL && (at->session != mine->session || at->layer != mine->layer) && !share_range(at, mine))
    at = at->next;
  return at;
}

static void look(restoring *all) {
  const qkvi_wanted *wanted = &all->wanted;
  all->here.session = wanted->session;
  all->here.layer = wanted->layer;
  all->here.shared_count = qkv_session_missing_shared(wanted->session, wanted->layer, wanted->begin, wanted->end,
                                                      wanted->full, all->here.shared, QKVI_RESTORING_SHARED);
}

// Joins the list, unless another thread has the layer.
static bool try_enter(restoring *all) {
  qkvi_residency *residency = all->residency;
  qkvi_residency_lock(residency);
  const bool alone = find_other(all) == NULL;
  if (alone) {
    uint64_t taken = 0;
    for (const qkvi_restoring *at = residency->restoring; at != NULL; at = at->next) taken += at->window;
    all->here.window = qkvi_restore_window(residency, taken);
    all->here.next = residency->restoring;
    residency->restoring = &all->here;
  }
  qkvi_residency_unlock(residency);
  return alone;
}

static void count_holds(qkvi_residency *residency, size_t held, bool waits) {
  qkvi_residency_lock(residency);
  residency->holds = waits ? residency->holds - held : residency->holds + held;
  qkvi_residency_unlock(residency);
}

// False where another thread has the layer and this one does not wait, or no longer.
static bool enter(restoring *all) {
  qkvi_residency *residency = all->residency;
  uint64_t seen = qkvi_progress_count(residency);
  look(all);
  if (try_enter(all)) return true;
  if (all->ahead) return false;
  bool alone = false;
  count_holds(residency, all->wanted.held, true);
  while (!alone && !qkvi_client_is_gone(all->wanted.call)) {
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
    look(all);
    alone = try_enter(all);
  }
  count_holds(residency, all->wanted.held, false);
  return alone;
}

static void leave(restoring *all) {
  qkvi_residency_lock(all->residency);
  qkvi_restoring **link = &all->residency->restoring;
  while (*link != &all->here) link = &(*link)->next;
  *link = all->here.next;
  qkvi_residency_unlock(all->residency);
  qkvi_progress_signal(all->residency);
}

// ---- Pages ----

static qkv_status fail(const restoring *all, const qkv_missing_page *page, const qkv_error *reason,
                       qkv_error *error) {
  if (!all->ahead) qkv_metric_add(&all->residency->metrics[QKV_METRIC_RESTORE_LOST], 1);
  return qkv_fail(error, QKV_DATA_LOSS,
                  "session %s: layer %" PRIu32 ": the page at position %" PRIu64
                  " is lost (%s); truncate to that position and append again",
                  qkv_session_name(all->wanted.session), all->wanted.layer, page->position,
                  reason->text[0] != '\0' ? reason->text : "it is not on the disk");
}

// Another thread may have restored it, or truncated it.
static bool still_missing(const restoring *all, const qkv_missing_page *page) {
  qkv_missing_page now;
  return qkv_session_missing(all->wanted.session, all->wanted.layer, page->position, page->position + 1,
                             all->wanted.full, &now, 1) == 1 &&
         now.record == page->record;
}

// Pages that a thread has read and that are not back yet.
typedef struct batch {
  qkv_missing_page pages[QKV_RESTORE_PAGES];
  void *images[QKV_RESTORE_PAGES];
  size_t count;
} batch;

// A page that is no longer missing is skipped.
static qkv_status read_page(restoring *all, size_t i, batch *into, qkv_error *error) {
  const qkv_missing_page *page = &all->pages[i];
  qkv_arena *arena = qkv_store_arena(all->residency->store);
  qkv_error reason = {0};
  void *image = qkv_arena_alloc_overhead(arena, page->bytes);
  const qkv_status status = all->tier->read_wait(all->reading, i, image, page->bytes, &reason);
  if (status == QKV_OK) {
    into->pages[into->count] = *page;
    into->images[into->count++] = image;
    return QKV_OK;
  }
  qkv_arena_free_overhead(arena, image, page->bytes);
  if (status == QKV_NOT_FOUND && !still_missing(all, page)) return QKV_OK;
  if (status == QKV_NOT_FOUND && !qkvi_catalogue_is_open(all->residency, all->wanted.session))
    return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", qkv_session_name(all->wanted.session));
  return fail(all, page, &reason, error);
}

// A thread's part of the reservation, at most `bytes`; what it has not used is returned.
static uint64_t take_part(restoring *all, uint64_t bytes) {
  qkvi_residency_lock(all->residency);
  const uint64_t part = bytes < all->reservation ? bytes : all->reservation;
  all->reservation -= part;
  qkvi_residency_unlock(all->residency);
  return part;
}

static void give_back(restoring *all, uint64_t part) {
  qkvi_residency_lock(all->residency);
  all->reservation += part;
  qkvi_residency_unlock(all->residency);
}

static qkv_status put_back(restoring *all, batch *read, qkv_error *error) {
  uint64_t bytes = 0, cost = 0;
  size_t failed = 0;
  qkv_error reason = {0};
  if (read->count == 0) return QKV_OK;
  for (size_t i = 0; i < read->count; i++) {
    bytes += read->pages[i].bytes;
    cost += qkv_arena_cost(read->pages[i].bytes);
  }
  uint64_t part = take_part(all, cost);
  const qkv_status status = qkv_session_restore(all->wanted.session, all->wanted.layer, &part, read->pages,
                                                read->images, read->count, &failed, &reason);
  give_back(all, part);
  if (status == QKV_DATA_LOSS) return fail(all, &read->pages[failed], &reason, error);
  if (status != QKV_OK) return qkv_fail(error, status, "%s", reason.text);
  atomic_fetch_add_explicit(&all->bytes, bytes, memory_order_relaxed);
  qkv_metric_add(&all->residency->metrics[QKV_METRIC_RESTORED_PAGES], (int64_t)read->count);
  qkv_metric_add(&all->residency->metrics[QKV_METRIC_RESTORED_BYTES], (int64_t)bytes);
  return QKV_OK;
}

// Restores pages [first, end): where one cannot be read those before it are restored.
static qkv_status restore_batch(restoring *all, size_t first, size_t end, qkv_error *error) {
  batch read = {.count = 0};
  qkv_status status = QKV_OK;
  for (size_t i = first; i < end && status == QKV_OK; i++) {
    status = read_page(all, i, &read, error);
    (void)sched_yield();  // attends of pages in memory are scheduled first
  }
  qkv_error reason = {0};
  const qkv_status put = put_back(all, &read, &reason);
  if (put == QKV_OK) return status;
  *error = reason;
  return put;
}

// A thread's part of the pages: the next batch, until there are no more or one has failed.
static void restore_pages(void *context, size_t index, size_t worker) {
  restoring *all = context;
  (void)index;
  (void)worker;
  for (size_t first; (first = atomic_fetch_add(&all->next, all->batch)) < all->count;) {
    qkv_error error = {0};
    const size_t end = first + all->batch < all->count ? first + all->batch : all->count;
    if (restore_batch(all, first, end, &error) == QKV_OK) continue;
    atomic_store(&all->next, all->count);
    qkvi_residency_lock(all->residency);
    if (first < all->failed) {
      all->failed = first;
      all->error = error;
    }
    qkvi_residency_unlock(all->residency);
  }
}

// Small enough for each thread to get several.
static size_t batch_size(size_t pages, size_t threads) {
  const size_t size = pages / (2 * threads);
  if (size < 1) return 1;
  return size < QKV_RESTORE_PAGES ? size : QKV_RESTORE_PAGES;
}

// Reading ahead takes only memory that can be freed at once.
static qkv_status take_headroom(restoring *all, uint64_t bytes) {
  qkvi_budget_unreserve(all->residency, &all->reservation);
  if (bytes > all->most) return QKV_RESOURCE_EXHAUSTED;
  (void)qkvi_budget_evict(all->residency, all->most - bytes);
  if (qkvi_budget_taken(all->residency) > all->most - bytes) return QKV_RESOURCE_EXHAUSTED;
  QKV_TRY(qkv_arena_reserve(qkv_store_arena(all->residency->store), bytes, NULL));
  all->reservation = bytes;
  return QKV_OK;
}

static qkv_status restore_chunk(restoring *all, qkv_error *error) {
  uint64_t records[CHUNK_PAGES];
  uint64_t bytes = 0;
  for (size_t i = 0; i < all->count; i++) {
    records[i] = all->pages[i].record;
    bytes += qkv_arena_cost(all->pages[i].bytes);
  }
  if (all->ahead) QKV_TRY(take_headroom(all, bytes));
  all->tier = qkv_session_config_of(all->wanted.session)->backing;
  all->reading = all->tier->read_begin(all->tier->context, records, all->count, all->here.window);
  atomic_store(&all->next, 0);
  all->failed = all->count;
  const size_t width = qkv_pool_width(all->residency->restorers);
  all->batch = batch_size(all->count, width);
  qkv_pool_loop(all->residency->restorers, width < all->count ? width : all->count, restore_pages, all);
  all->tier->read_end(all->reading);
  if (all->failed == all->count) return QKV_OK;
  return qkv_fail(error, all->error.status, "%s", all->error.text);
}

static qkv_status restore_chunks(restoring *all, qkv_error *error) {
  const qkvi_wanted *wanted = &all->wanted;
  for (;;) {
    all->count = qkv_session_missing(wanted->session, wanted->layer, wanted->begin, wanted->end, wanted->full,
                                     all->pages, CHUNK_PAGES);
    if (all->count == 0) return QKV_OK;
    QKV_TRY(restore_chunk(all, error));
  }
}

static uint64_t missing_bytes(const qkvi_wanted *wanted) {
  return qkv_session_missing_bytes(wanted->session, wanted->layer, wanted->begin, wanted->end, wanted->full);
}

static qkv_status check_size(const restoring *all, uint64_t bytes, qkv_error *error) {
  const uint64_t most = qkvi_budget_limit(all->residency) / 2;
  if (bytes <= most) return QKV_OK;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "session %s: layer %" PRIu32 ": %" PRIu64
                  " bytes are to come back from the SSD, half of what memory-budget has for pages is %" PRIu64,
                  qkv_session_name(all->wanted.session), all->wanted.layer, bytes, most);
}

static void let_go(restoring *all) {
  qkvi_budget_unreserve(all->residency, &all->reservation);
  qkvi_budget_release(all->residency, all->wanted.session, all->wanted.layer);
}

// Whether nothing is missing: then the layer is held.
static bool hold_complete(restoring *all) {
  const qkvi_wanted *wanted = &all->wanted;
  if (missing_bytes(wanted) > 0) return false;
  qkvi_budget_hold(all->residency, wanted->session, wanted->layer);
  if (missing_bytes(wanted) == 0) return true;
  let_go(all);
  return false;
}

static qkv_status fail_unstable(const qkvi_wanted *wanted, qkv_error *error) {
  *error = (qkv_error){0};
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "session %s: layer %" PRIu32 " is changed all the time",
                  qkv_session_name(wanted->session), wanted->layer);
}

// Reserves memory for the missing pages, and holds the layer, so that no more are evicted. Pages that were evicted in
// between need a larger reservation.
static qkv_status hold_in_turn(restoring *all, const qkvi_turn *turn, qkv_error *error) {
  const qkvi_wanted *wanted = &all->wanted;
  for (int i = 0; i < TRIES; i++) {
    const uint64_t bytes = missing_bytes(wanted);
    QKV_TRY(check_size(all, bytes, error));
    QKV_TRY(qkvi_turn_take(turn, bytes + wanted->extra, &all->reservation, error));
    qkvi_budget_hold(all->residency, wanted->session, wanted->layer);
    if (missing_bytes(wanted) <= bytes) return QKV_OK;
    let_go(all);
  }
  return fail_unstable(wanted, error);
}

// No thread that waits for memory holds the layer meanwhile. The bytes are counted when the turn has come: others may
// have restored, or evicted, pages that the sessions share.
static qkv_status reserve_and_hold(restoring *all, qkv_error *error) {
  qkvi_turn turn;
  if (all->wanted.extra == 0 && hold_complete(all)) return QKV_OK;
  QKV_TRY(check_size(all, missing_bytes(&all->wanted), error));
  QKV_TRY(qkvi_account_headroom(all->residency, all->wanted.call, qkv_session_account(all->wanted.session),
                                missing_bytes(&all->wanted) + all->wanted.extra, all->wanted.held, error));
  QKV_TRY(qkvi_turn_begin(&turn, all->residency, all->wanted.call, all->wanted.held, error));
  const qkv_status status = hold_in_turn(all, &turn, error);
  qkvi_turn_end(&turn);
  return status;
}

// Pages that were demoted meanwhile need another try, and so does memory below a tenant's quota, which is not
// reserved: others of the tenant may have taken it.
static qkv_status restore(restoring *all, qkv_error *error) {
  const qkvi_wanted *wanted = &all->wanted;
  const int64_t until = qkvi_memory_until_ms(wanted->call);
  for (int i = 0; i < TRIES || qkv_now_ms() < until; i++) {
    *error = (qkv_error){0};
    QKV_TRY(reserve_and_hold(all, error));
    const qkv_status status = restore_chunks(all, error);
    if (status == QKV_OK && all->reservation >= wanted->extra) return QKV_OK;
    let_go(all);
    if (status != QKV_OK && status != QKV_RESOURCE_EXHAUSTED) return status;
    *error = (qkv_error){0};
    if (qkvi_client_is_gone(wanted->call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    const uint64_t seen = qkvi_progress_count(all->residency);
    if (i > 0) (void)qkvi_call_await(all->residency, wanted->call, QKV_RPC_WAIT_MEMORY, seen);
  }
  return fail_unstable(wanted, error);
}

// Of two concurrent updates one may be lost.
static void note_rate(qkvi_residency *residency, uint64_t bytes, double took) {
  if (bytes < RATED_BYTES || took <= 0) return;
  const double rate = (double)bytes / took, before = (double)atomic_load(&residency->restore_rate);
  atomic_store(&residency->restore_rate, (uint64_t)(before == 0 ? rate : (7 * before + rate) / 8));
}

double qkvi_restore_ms(const qkvi_residency *residency, uint64_t bytes) {
  const double rate = (double)atomic_load(&residency->restore_rate);
  return 1000 * (double)bytes / (rate == 0 ? RATE_UNKNOWN : rate);
}

qkv_status qkvi_restore(qkvi_residency *residency, const qkvi_wanted *wanted, uint64_t *headroom, qkv_error *error) {
  restoring all = {.residency = residency, .wanted = *wanted};
  qkv_error reason = {0};
  qkvi_waits waits = QKVI_WAIT_LAYERS | QKVI_WAIT_DISK;
  QKV_TRY(qkvi_unfold(residency, wanted->call, wanted->session, &waits, error));
  if (!enter(&all)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
  const double began = qkv_now_s();
  const uint64_t began_ns = qkv_stage_now();
  const qkv_status status = restore(&all, &reason);
  qkv_stage_add(QKV_STAGE_RESTORE, began_ns);
  note_rate(residency, atomic_load(&all.bytes), qkv_now_s() - began);
  leave(&all);
  if (headroom != NULL)
    *headroom += all.reservation;
  else
    qkvi_budget_unreserve(residency, &all.reservation);
  return status == QKV_OK ? QKV_OK : qkv_fail(error, status, "%s", reason.text);
}

uint64_t qkvi_restore_ahead(qkvi_residency *residency, const qkvi_wanted *wanted, uint64_t memory_max) {
  qkv_error error = {0};
  restoring all = {.residency = residency, .wanted = *wanted, .ahead = true, .most = memory_max};
  if (!enter(&all)) return 0;
  (void)restore_chunks(&all, &error);
  qkvi_budget_unreserve(residency, &all.reservation);
  leave(&all);
  return atomic_load(&all.bytes);
}
