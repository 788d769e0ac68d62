// What the parts of the residency share: budget.c (reservations of memory), eviction.c, write_back.c (writes to the
// SSD), acknowledge.c (durability), closes.c (ends in the journal), restore.c and read_ahead.c (reads from the SSD),
// catalogue.c (the journal), unconfirmed.c (sessions whose end is unconfirmed), recovery.c and rows.c (the start),
// thread.c, progress.c (waiting), upkeep.c, fold.c (fold.h).
#ifndef QKV_SERVER_RESIDENCY_INTERNAL_H
#define QKV_SERVER_RESIDENCY_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/cache/backing.h"
#include "server/residency/residency.h"

#define uthash_fatal(message) abort()
#include <uthash.h>

// A record that is not durable yet.
typedef struct qkvi_pending {
  uint64_t record, session;
  qkv_record_state state;
  struct qkvi_payload {
    qkv_page_hold page;  // what storage writes from: a page where it lies,
    void *copy;          // or a copy from malloc; neither once it has
  } payload;
  UT_hash_handle hh;
} qkvi_pending;

// What the journal has: a model (version 0), or one of its calibrations.
typedef struct qkvi_journaled {
  const qkv_model *model;  // the store's
  uint32_t version;
  bool shared;  // the model was written as one that is shared
  bool kept;    // the calibration is one that pages came with, and was never the model's (Model.calibration_kept)
  bool unfit;   // it is larger than an entry may be: its pages stay in memory alone
  struct qkvi_journaled *next;
} qkvi_journaled;

// The truncations of a session that are not durable: there while some are being written, and, where one failed, until
// the session is closed.
typedef struct qkvi_cuts {
  qkvi_residency *residency;
  uint64_t session;
  uint64_t waiting;  // that are being written
  bool failed;
  UT_hash_handle hh;  // by session
} qkvi_cuts;

// The end of a session or object that is not in the journal yet (closes.c).
typedef struct qkvi_close qkvi_close;

// Shared ranges beyond this number may be read by two sessions at once, in vain for one of the two.
enum { QKVI_RESTORING_SHARED = 64 };

// A layer that a thread brings back; on the stack of that thread.
typedef struct qkvi_restoring {
  const qkv_session *session;
  uint32_t layer;
  const void *shared[QKVI_RESTORING_SHARED];  // ranges of the layer that other sessions have, too; not dereferenced
  size_t shared_count;
  uint64_t window;  // bytes that are read ahead of what is put back
  struct qkvi_restoring *next;
} qkvi_restoring;

// A thread that reserves memory where the budget may be full; on its stack. Threads are served in the order in which
// they came, one at a time.
typedef struct qkvi_turn {
  qkvi_residency *residency;
  const qkv_rpc_call *call;
  size_t held;       // layers that the thread holds meanwhile
  int64_t until_ms;  // it waits for memory until then
  struct qkvi_turn *next;
} qkvi_turn;

// `begin` waits for the turn: CANCELLED where the client of `call` goes before (NULL: no client); then there is no
// turn to end. `take` reserves `bytes` as qkvi_budget_reserve does, once or more; `end` passes the turn on.
qkv_status qkvi_turn_begin(qkvi_turn *turn, qkvi_residency *residency, const qkv_rpc_call *call, size_t held,
                           qkv_error *error);
qkv_status qkvi_turn_take(const qkvi_turn *turn, uint64_t bytes, uint64_t *reservation, qkv_error *error);
void qkvi_turn_end(qkvi_turn *turn);

// A session whose next layers are read ahead (server/residency/read_ahead.c).
typedef struct qkvi_ahead {
  const qkv_session *session;
  struct qkvi_ahead *next;
} qkvi_ahead;

// A session whose end is unconfirmed: records of it may lie where the start could not read.
typedef struct qkvi_unconfirmed {
  uint64_t session;
  UT_hash_handle hh;
} qkvi_unconfirmed;

// qkv_record_meta.kind
typedef enum qkvi_record_kind {
  QKVI_RECORD_PAGE = 0,    // a page of codes (engine/codec/page.h)
  QKVI_RECORD_ROWS = 1,    // exact rows (server/residency/rows.h)
  QKVI_RECORD_OBJECT = 2,  // a part of an opaque object (server/objects/objects.h)
  QKVI_RECORD_FOLD = 3,    // the layers of a session (engine/cache/session_fold.h), of this process alone
} qkvi_record_kind;

typedef struct qkvi_backing {
  qkv_backing table;  // its context is this
  qkvi_residency *residency;
  bool sync_now;  // of SYNC sessions
} qkvi_backing;

enum { QKVI_NOTES_LOCKS = 64 };

struct qkvi_residency {
  qkv_store *store;
  qkvi_objects *objects;  // may be NULL
  qkv_storage *storage;
  qkv_metric_value *metrics;
  qkvi_backing backings[2];  // ASYNC, SYNC
  qkv_pool *restorers;       // that help the threads that bring pages back

  pthread_mutex_t lock;  // of everything down to `holds`; nothing is waited for under it but `moved`
  pthread_cond_t moved;  // `steps` has grown
  uint64_t steps;
  qkvi_pending *pending;
  qkv_status failure;          // of the last record; OK again once one is durable
  int64_t pause_ms, retry_ms;  // after a failure nothing is written for so long, until then
  qkvi_journaled *journaled;
  uint64_t entry_max;  // bytes of an entry of the journal: QKV_JOURNAL_PAYLOAD_MAX, or less in tests
  qkvi_cuts *cuts;
  uint64_t closes;            // that are being written
  qkvi_close *failed_closes;  // that are to be written again
  size_t failed_close_count;
  qkvi_unconfirmed *unconfirmed;
  qkvi_verify verify;
  bool compacting;                 // for a call
  bool finishing, ending, wanted;  // wanted: a page waits for its calibration to be in the journal
  bool full;                       // the budget or the device has no headroom
  bool hastening;                  // a caller waits for a sync now
  qkvi_restoring *restoring;       // layers that are being brought back
  qkvi_ahead *ahead;               // sessions that are read ahead
  size_t ahead_count;
  qkvi_turn *turns;  // threads that claim memory, first come, first served: the first one evicts for it
  size_t holds;      // of layers, but those of threads that wait for memory or for a layer

  pthread_mutex_t models_lock;       // one model at a time into the journal
  pthread_mutex_t unconfirmed_lock;  // the end of one session at a time is confirmed
  // By the session's number: one note of a session at a time, in the journal and in memory.
  pthread_mutex_t notes_locks[QKVI_NOTES_LOCKS];
  _Atomic bool unsettled;         // some session may have something to settle
  _Atomic uint64_t restore_rate;  // bytes a second that came back lately; 0: not known yet
  pthread_t thread;
  bool started;
  uint64_t expel_above;   // bytes on the disk; with more, the budget has no headroom for another segment
  bool unread;            // the start could not read all segments
  uint64_t buffer_bytes;  // of memory-budget, reserved for writes to the disk and reads from it
  // The thread's: bytes of memory-budget reserved for the directory of records, as of its last count.
  uint64_t directory_bytes;
  int64_t counted_ms;
};

// Parts of the SSD's table (read.c).
void *qkvi_tier_read_begin(void *context, const uint64_t *records, size_t count, uint64_t ahead_bytes);
qkv_status qkvi_tier_read_wait(void *reading, size_t i, void *image, uint64_t bytes, qkv_error *error);
void qkvi_tier_read_end(void *reading);

// Bytes that a thread that brings pages back may have read and not consumed yet, while others have `taken`: half of
// what is left, so that all together keep to their reservation. 0: one page at a time.
uint64_t qkvi_restore_window(const qkvi_residency *residency, uint64_t taken);

#define QKVI_STEP_MS 20  // a waiting thread checks its condition at least so often

// Waiting for memory. A thread does so for QKVI_MEMORY_WAIT_MS, and one that has waited for its call before for half
// of what is left of twice that time: a call of many items does not have a thread that long for each. `call` NULL:
// none.
enum { QKVI_MEMORY_WAIT_MS = 10000 };
int64_t qkvi_memory_until_ms(const qkv_rpc_call *call);
// As qkvi_progress_await, for a step; counted for the call.
uint64_t qkvi_call_await(qkvi_residency *residency, const qkv_rpc_call *call, qkv_rpc_wait what, uint64_t seen);

// Whether the client no longer waits for the call's result; NULL: false.
bool qkvi_client_is_gone(const qkv_rpc_call *call);
void qkvi_residency_lock(qkvi_residency *residency);
void qkvi_residency_unlock(qkvi_residency *residency);
uint64_t qkvi_progress_count(qkvi_residency *residency);
// Waits until there was progress since `seen`, or `ms` are over. Returns `seen` of the next wait.
uint64_t qkvi_progress_await(qkvi_residency *residency, uint64_t seen, int64_t ms);
qkv_status qkvi_write_back_failure(qkvi_residency *residency);
// Wakes the threads that wait for progress.
void qkvi_progress_signal(qkvi_residency *residency);
// Sync now: what is written becomes durable now rather than within a second.
void qkvi_write_back_hasten(qkvi_residency *residency);

// All sessions that are not in memory alone, with a reference each, which the caller returns. For rare operations.
qkv_session **qkvi_residency_sessions(qkvi_residency *residency, size_t *count);
void qkvi_residency_drop_sessions(qkv_session **sessions, size_t count);

// Whether this session is the open one of its name.
bool qkvi_catalogue_is_open(qkvi_residency *residency, const qkv_session *session);

// Bytes of memory-budget that are used or promised.
uint64_t qkvi_budget_taken(qkvi_residency *residency);
// The whole memory-budget, including what is reserved for good at the start.
uint64_t qkvi_budget_whole(const qkvi_residency *residency);

// Whether a session may be deleted for want of space on the SSD; deletes it, in memory, too: `reason` is the log's
// message.
bool qkvi_eviction_may_expel(const qkv_session *session);
void qkvi_eviction_expel_one(qkvi_residency *residency, qkv_session *session, const char *reason);

// storage-budget has no headroom: deletes the least recently used session that is not pinned, from the SSD and from
// memory, or objects that were not used for longer.
void qkvi_eviction_expel(qkvi_residency *residency);
// Evicts sessions and objects from memory, the least recently used first, down to `target` bytes. Layers in use are
// waited for, or skipped. Returns the bytes that were freed. One run at a time: other callers wait for its end.
uint64_t qkvi_eviction_run(qkvi_residency *residency, uint64_t target, bool wait);
// Codes exact rows of the least recently used sessions into pages, which can be evicted, until `bytes` of rows are
// coded; returns how many. `*left`: there are more, of sessions that were in use just now.
uint64_t qkvi_eviction_seal_idle(qkvi_residency *residency, uint64_t bytes, bool *left);

// Opens the storage and fills the store (recovery.c). At most `dirty_bytes` may wait to be written.
qkv_status qkvi_residency_recover(qkvi_residency *residency, const qkv_server_options *options, uint64_t dirty_bytes,
                                  qkv_error *error);

// Under the lock, or before the thread is started.
void qkvi_catalogue_note_journaled(qkvi_residency *residency, const qkvi_journaled *what);
void qkvi_catalogue_note_unconfirmed(qkvi_residency *residency, uint64_t session);
void qkvi_catalogue_drop_unconfirmed(qkvi_residency *residency);
// Puts a payload [bytes], which is released once it is written, or at once where 0 is returned: refused for now.
// Releasing NULL is allowed.
typedef struct qkvi_payload qkvi_payload;
uint64_t qkvi_write_back_put(const qkvi_backing *backing, const qkv_record_meta *meta, qkvi_payload *payload,
                             uint64_t bytes);
void qkvi_write_back_let_go(qkvi_payload *payload);
// Whether nothing of the session is put now; it is tried again later.
bool qkvi_write_back_refuses(qkvi_residency *residency, uint64_t session);
// As qkv_backing.put_rows, in records of kind QKVI_RECORD_ROWS.
uint64_t qkvi_rows_put(void *context, uint64_t session, const qkv_model *model, uint32_t layer, uint64_t position,
                       uint32_t *taken, const void *k, const void *v, const uint32_t *ids);
// As qkv_backing.put_fold, read_fold and keep_fold, in records of kind QKVI_RECORD_FOLD.
uint64_t qkvi_fold_put(void *context, uint64_t session, const void *bytes, uint64_t count, const _Atomic bool *stop);
qkv_status qkvi_fold_read(void *context, uint64_t session, uint64_t *record, uint8_t **bytes, uint64_t *count,
                          qkv_error *error);
void qkvi_fold_keep(void *context, uint64_t session);
const qkv_backing *qkvi_write_back_backing(qkvi_residency *residency, qkv_durability durability);
// A write failed; one of those that are tried again after a failure did not. Under the lock.
void qkvi_write_back_note_failure(qkvi_residency *residency, qkv_status status);
void qkvi_write_back_note_success(qkvi_residency *residency);

// The table of a tier; `sync_now` as of qkvi_backing.
void qkvi_write_back_init_backing(qkvi_residency *residency, qkvi_backing *backing, bool sync_now);
// Whether writes pause after a failure. Whether truncations are being written: of a session; 0: of any.
bool qkvi_write_back_rests(qkvi_residency *residency);
bool qkvi_write_back_cuts_waiting(qkvi_residency *residency, uint64_t session);
// Forgets records that did not become durable and that the storage no longer has.
void qkvi_write_back_forget_gone(qkvi_residency *residency);
// The thread (thread.c).
void *qkvi_residency_work(void *context);

// Waits for an entry of the journal: qkvi_catalogue_on_journal is its `done`, with this as context; then finish_wait.
typedef struct qkvi_journal_wait {
  qkvi_residency *residency;
  bool done;
  qkv_status status;
} qkvi_journal_wait;
// The session is closed, in the journal too: under the lock.
void qkvi_write_back_forget_cuts(qkvi_residency *residency, uint64_t session);
void qkvi_write_back_drop_cuts(qkvi_residency *residency);  // at the end of the residency
bool qkvi_write_back_lost_truncation(qkvi_residency *residency, uint64_t session);
void qkvi_catalogue_on_journal(void *context, qkv_status status);
qkv_status qkvi_catalogue_finish_wait(qkvi_journal_wait *wait, qkv_error *error);
// Whether pages of this calibration may be put: it is journaled. If not, the thread is asked to journal the
// calibrations that sessions on the SSD are coded with.
bool qkvi_catalogue_calibration_ready(qkvi_residency *residency, const qkv_model *model, uint32_t version);
void qkvi_catalogue_journal_calibrations(qkvi_residency *residency);

// Journals the end of a session or object (closes.c). done() as of qkv_storage_session_close, may be NULL; an end
// that failed is written again later.
void qkvi_closes_add(qkvi_residency *residency, uint64_t session, qkv_storage_done_fn *done, void *context);
void qkvi_closes_write_again(qkvi_residency *residency);
// Whether some are not in the journal yet.
bool qkvi_closes_waiting(qkvi_residency *residency);
// At the end of the residency.
void qkvi_closes_drop(qkvi_residency *residency);

// Truncates what was put of a layer up to now to `position`, for good.
void qkvi_write_back_cut(qkvi_residency *residency, uint64_t session, uint32_t layer, uint64_t position);

#endif
