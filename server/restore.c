#include "server/restore.h"

#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>

#include "engine/cache/session_spill.h"
#include "server/metrics.h"
#include "server/spill_internal.h"

enum { CHUNK_PAGES = 256, TRIES = 8 };

typedef struct restoring {
  qkvi_restoring here;  // in the list of those under way
  qkvi_spill *spill;
  qkvi_wanted wanted;
  bool ahead;     // nobody waits for it
  uint64_t most;  // of memory-budget in use, then
  uint64_t room;  // for what comes back, and beside it
  qkv_missing_page pages[CHUNK_PAGES];
  size_t count;
  qkv_storage_batch *batch;  // of these pages
  _Atomic size_t next;       // the first of them that no thread has taken
  _Atomic uint64_t bytes;    // that have come back
  // Of the first page that has failed; under spill->lock.
  size_t failed;
  qkv_error error;
} restoring;

// ---- One at a time ----

static const qkvi_restoring *find_other(const restoring *all) {
  const qkvi_restoring *at = all->spill->restoring;
  while (at != NULL && (at->session != all->wanted.session || at->layer != all->wanted.layer)) at = at->next;
  return at;
}

// False where someone else has the layer and this one does not wait.
static bool enter(restoring *all) {
  qkvi_spill *spill = all->spill;
  qkvi_spill_lock(spill);
  spill->holds -= all->wanted.held;
  while (!all->ahead && find_other(all) != NULL) (void)pthread_cond_wait(&spill->moved, &spill->lock);
  spill->holds += all->wanted.held;
  const bool alone = find_other(all) == NULL;
  if (alone) {
    uint64_t taken = 0;
    for (const qkvi_restoring *at = spill->restoring; at != NULL; at = at->next) taken += at->window;
    all->here = (qkvi_restoring){.session = all->wanted.session,
                                 .layer = all->wanted.layer,
                                 .window = qkvi_spill_window(spill, taken),
                                 .next = spill->restoring};
    spill->restoring = &all->here;
  }
  qkvi_spill_unlock(spill);
  return alone;
}

static void leave(restoring *all) {
  qkvi_spill_lock(all->spill);
  qkvi_restoring **link = &all->spill->restoring;
  while (*link != &all->here) link = &(*link)->next;
  *link = all->here.next;
  qkvi_spill_unlock(all->spill);
  qkvi_spill_progress(all->spill);
}

// ---- Pages ----

static qkv_status fail(const restoring *all, const qkv_missing_page *page, const qkv_error *reason,
                       qkv_error *error) {
  if (!all->ahead) qkv_metric_add(&all->spill->metrics[QKV_METRIC_RESTORE_LOST], 1);
  return qkv_fail(error, QKV_DATA_LOSS,
                  "session %s: layer %" PRIu32 ": the page at position %" PRIu64
                  " is lost (%s); truncate to that position and append again",
                  qkv_session_name(all->wanted.session), all->wanted.layer, page->position,
                  reason->text[0] != '\0' ? reason->text : "it is not on the disk");
}

// Others may have brought it back, or cut it off.
static bool still_missing(const restoring *all, const qkv_missing_page *page) {
  qkv_missing_page now;
  return qkv_session_missing(all->wanted.session, all->wanted.layer, page->position, page->position + 1,
                             all->wanted.full, &now, 1) == 1 &&
         now.record == page->record;
}

static qkv_status restore_page(restoring *all, size_t i, qkv_error *error) {
  const qkv_missing_page *page = &all->pages[i];
  qkv_arena *arena = qkv_store_arena(all->spill->store);
  qkv_error reason = {0};
  void *image = qkv_arena_alloc_beside(arena, page->bytes);
  qkv_status status = qkv_storage_batch_wait(all->batch, i, image, page->bytes, &reason);
  if (status != QKV_OK) qkv_arena_free_beside(arena, image, page->bytes);
  if (status == QKV_NOT_FOUND && !still_missing(all, page)) return QKV_OK;
  if (status == QKV_NOT_FOUND && !qkvi_spill_is_open(all->spill, all->wanted.session))
    return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", qkv_session_name(all->wanted.session));
  if (status != QKV_OK) return fail(all, page, &reason, error);
  status = qkv_session_restore(all->wanted.session, all->wanted.layer, &all->room, page, image, &reason);
  if (status == QKV_DATA_LOSS) return fail(all, page, &reason, error);
  if (status != QKV_OK) return qkv_fail(error, status, "%s", reason.text);
  atomic_fetch_add_explicit(&all->bytes, page->bytes, memory_order_relaxed);
  qkv_metric_add(&all->spill->metrics[QKV_METRIC_RESTORED_PAGES], 1);
  qkv_metric_add(&all->spill->metrics[QKV_METRIC_RESTORED_BYTES], page->bytes);
  return QKV_OK;
}

// A thread's part of the pages: the next one, until there are no more or one has failed.
static void restore_pages(void *context, size_t index, size_t worker) {
  restoring *all = context;
  (void)index;
  (void)worker;
  for (size_t i; (i = atomic_fetch_add(&all->next, 1)) < all->count;) {
    qkv_error error = {0};
    const qkv_status status = restore_page(all, i, &error);
    (void)sched_yield();  // attends of what is in memory go first
    if (status == QKV_OK) continue;
    atomic_store(&all->next, all->count);
    qkvi_spill_lock(all->spill);
    if (i < all->failed) {
      all->failed = i;
      all->error = error;
    }
    qkvi_spill_unlock(all->spill);
  }
}

// What nobody has asked for takes what leaves at once.
static qkv_status take_room(restoring *all, uint64_t bytes) {
  qkvi_spill_unclaim(all->spill, &all->room);
  if (bytes > all->most) return QKV_RESOURCE_EXHAUSTED;
  (void)qkvi_spill_evict(all->spill, all->most - bytes);
  if (qkvi_spill_taken(all->spill) > all->most - bytes) return QKV_RESOURCE_EXHAUSTED;
  QKV_TRY(qkv_arena_reserve(qkv_store_arena(all->spill->store), bytes, NULL));
  all->room = bytes;
  return QKV_OK;
}

static qkv_status restore_chunk(restoring *all, qkv_error *error) {
  qkv_storage_item items[CHUNK_PAGES];
  const uint64_t session = qkv_session_config_of(all->wanted.session)->id;
  uint64_t bytes = 0;
  for (size_t i = 0; i < all->count; i++) {
    items[i] = (qkv_storage_item){.session = session, .record = all->pages[i].record};
    bytes += qkv_arena_cost(all->pages[i].bytes);
  }
  if (all->ahead) QKV_TRY(take_room(all, bytes));
  all->batch = qkv_storage_batch_create(all->spill->storage, items, all->count, all->here.window);
  atomic_store(&all->next, 0);
  all->failed = all->count;
  const size_t width = qkv_pool_width(all->spill->restorers);
  qkv_pool_loop(all->spill->restorers, width < all->count ? width : all->count, restore_pages, all);
  qkv_storage_batch_destroy(&all->batch);
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

static qkv_status claim(restoring *all, uint64_t bytes, qkv_error *error) {
  const uint64_t most = qkvi_spill_budget(all->spill) / 2;
  if (bytes > most)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "session %s: layer %" PRIu32 ": %" PRIu64
                    " bytes are to come back from the SSD, half of what memory-budget has for pages is %" PRIu64,
                    qkv_session_name(all->wanted.session), all->wanted.layer, bytes, most);
  return qkvi_spill_claim(all->spill, bytes + all->wanted.beside, all->wanted.held, &all->room, error);
}

// The layer is held once there is room for what is missing, so that nobody waits for room and holds it meanwhile.
// What has left in between, or was demoted, needs a larger one.
static qkv_status restore(restoring *all, qkv_error *error) {
  const qkvi_wanted *wanted = &all->wanted;
  qkv_status status = QKV_RESOURCE_EXHAUSTED;
  for (int i = 0; i < TRIES && status == QKV_RESOURCE_EXHAUSTED; i++) {
    *error = (qkv_error){0};
    const uint64_t bytes = missing_bytes(wanted);
    QKV_TRY(claim(all, bytes, error));
    qkvi_spill_hold(all->spill, wanted->session, wanted->layer);
    if (missing_bytes(wanted) <= bytes) status = restore_chunks(all, error);
    if (status == QKV_OK && all->room >= wanted->beside) return QKV_OK;
    if (status == QKV_OK) status = QKV_RESOURCE_EXHAUSTED;
    qkvi_spill_unclaim(all->spill, &all->room);
    qkvi_spill_release(all->spill, wanted->session, wanted->layer);
  }
  return qkv_fail(error, status, "session %s: layer %" PRIu32 " is changed all the time",
                  qkv_session_name(wanted->session), wanted->layer);
}

qkv_status qkvi_restore(qkvi_spill *spill, const qkvi_wanted *wanted, uint64_t *room, qkv_error *error) {
  restoring all = {.spill = spill, .wanted = *wanted};
  qkv_error reason = {0};
  (void)enter(&all);
  const qkv_status status = restore(&all, &reason);
  leave(&all);
  if (room != NULL)
    *room += all.room;
  else
    qkvi_spill_unclaim(spill, &all.room);
  return status == QKV_OK ? QKV_OK : qkv_fail(error, status, "%s", reason.text);
}

uint64_t qkvi_restore_ahead(qkvi_spill *spill, const qkvi_wanted *wanted, uint64_t memory_max) {
  qkv_error error = {0};
  restoring all = {.spill = spill, .wanted = *wanted, .ahead = true, .most = memory_max};
  if (!enter(&all)) return 0;
  (void)restore_chunks(&all, &error);
  qkvi_spill_unclaim(spill, &all.room);
  leave(&all);
  return atomic_load(&all.bytes);
}
