// Ends of sessions and objects in the journal. One that the disk refuses is kept and written again, by the
// residency's thread, while writing does not pause: else the next start would bring back what the caller has lost
// sight of.
//
// Threads: any. Memory: 48 bytes for each that is not written, of at most FAILED_MAX.
#include <stdlib.h>

#include "engine/base/log.h"
#include "server/residency/internal.h"

// Those that are written again at a time.
enum { FAILED_MAX = 1 << 16, AGAIN_MAX = 256 };

struct qkvi_close {
  qkvi_residency *residency;
  uint64_t session;
  qkv_storage_done_fn *done;  // of the first try; NULL: nobody waits
  void *context;
  bool again;               // it has failed before
  struct qkvi_close *next;  // of those that failed
};

// Under the lock. false: too many have failed.
static bool keep(qkvi_residency *residency, qkvi_close *close) {
  if (residency->failed_close_count == FAILED_MAX) return false;
  close->done = NULL;
  close->again = true;
  close->next = residency->failed_closes;
  residency->failed_closes = close;
  residency->failed_close_count++;
  return true;
}

static void on_closed(void *context, qkv_status status) {
  qkvi_close *close = context;
  qkvi_residency *residency = close->residency;
  qkv_storage_done_fn *done = close->done;
  void *waiting = close->context;
  qkvi_residency_lock(residency);
  residency->closes--;
  if (status == QKV_OK) qkvi_write_back_forget_cuts(residency, close->session);
  if (status == QKV_OK && close->again) qkvi_write_back_note_success(residency);
  if (status != QKV_OK) qkvi_write_back_note_failure(residency, status);
  const bool kept = status != QKV_OK && keep(residency, close);
  qkvi_residency_unlock(residency);
  if (!kept) free(close);
  if (done != NULL) done(waiting, status);
  qkvi_progress_signal(residency);
}

void qkvi_closes_add(qkvi_residency *residency, uint64_t session, qkv_storage_done_fn *done, void *context) {
  qkvi_close *close = malloc(sizeof *close);
  if (close == NULL) abort();
  *close = (qkvi_close){.residency = residency, .session = session, .done = done, .context = context};
  qkvi_residency_lock(residency);
  residency->closes++;
  qkvi_residency_unlock(residency);
  qkv_storage_session_close(residency->storage, session, on_closed, close);
}

void qkvi_closes_write_again(qkvi_residency *residency) {
  qkvi_close *again = NULL;
  qkvi_residency_lock(residency);
  for (int i = 0; i < AGAIN_MAX && residency->failed_closes != NULL; i++) {
    qkvi_close *close = residency->failed_closes;
    residency->failed_closes = close->next;
    residency->failed_close_count--;
    residency->closes++;
    close->next = again;
    again = close;
  }
  qkvi_residency_unlock(residency);
  while (again != NULL) {
    qkvi_close *close = again;
    again = close->next;
    qkv_storage_session_close(residency->storage, close->session, on_closed, close);
  }
}

bool qkvi_closes_waiting(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const bool waiting = residency->closes > 0 || residency->failed_closes != NULL;
  qkvi_residency_unlock(residency);
  return waiting;
}

void qkvi_closes_drop(qkvi_residency *residency) {
  for (qkvi_close *close = residency->failed_closes, *next; close != NULL; close = next) {
    next = close->next;
    free(close);
  }
  residency->failed_closes = NULL;
}
