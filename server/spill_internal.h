// What spill.c, spill_room.c and recovery.c share.
#ifndef QKV_SERVER_SPILL_INTERNAL_H
#define QKV_SERVER_SPILL_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/cache/backing.h"
#include "server/spill.h"

#define uthash_fatal(message) abort()
#include <uthash.h>

// A record that is not durable yet.
typedef struct qkvi_pending {
  uint64_t record, session;
  qkv_record_state state;
  bool closed;  // its session is: nobody asks for it
  void *page;   // the copy that storage writes from; NULL once it has
  UT_hash_handle hh;
} qkvi_pending;

// What the journal has: a model (version 0), or one of its calibrations.
typedef struct qkvi_known {
  char model[QKV_NAME_MAX + 1];
  uint32_t version;
  struct qkvi_known *next;
} qkvi_known;

// A truncation on its way; those that failed are kept.
typedef struct qkvi_poisoned {
  qkvi_spill *spill;
  uint64_t session;
  struct qkvi_poisoned *next;
} qkvi_poisoned;

// A layer that someone brings back; on that one's stack.
typedef struct qkvi_restoring {
  const qkv_session *session;
  uint32_t layer;
  uint64_t window;  // bytes that are read ahead of what is put back
  struct qkvi_restoring *next;
} qkvi_restoring;

// A session of which layers to come are brought back (server/read_ahead.c).
typedef struct qkvi_ahead {
  const qkv_session *session;
  struct qkvi_ahead *next;
} qkvi_ahead;

// A session whose end may move: records of it may lie where the start could not read.
typedef struct qkvi_loose {
  uint64_t session;
  UT_hash_handle hh;
} qkvi_loose;

typedef struct qkvi_backing {
  qkv_backing table;  // its context is this
  qkvi_spill *spill;
  bool hurry;  // of SYNC sessions
} qkvi_backing;

struct qkvi_spill {
  qkv_store *store;
  qkv_storage *storage;
  qkv_metric_value *metrics;
  qkvi_backing backings[2];  // ASYNC, SYNC
  qkv_pool *restorers;       // that help whoever brings pages back

  pthread_mutex_t lock;  // of everything down to `holds`; nothing is waited for under it but `moved`
  pthread_cond_t moved;  // `steps` has grown
  uint64_t steps;
  qkvi_pending *pending;
  uint64_t cuts;               // truncations that are not durable yet
  qkv_status failure;          // of the last record; OK again once one is durable
  int64_t pause_ms, retry_ms;  // since it failed the disk rests so long, until then
  qkvi_known *known;
  qkvi_poisoned *poisoned;
  qkvi_loose *loose;
  qkvi_verify verify;
  bool finishing, ending, wanted;  // wanted: a page waits for its calibration to be in the journal
  bool full;                       // for want of room, the budget's or the device's
  bool hastening;                  // a sync that someone waits for is under way
  qkvi_restoring *restoring;       // layers that are being brought back
  qkvi_ahead *ahead;               // sessions that are read ahead
  size_t ahead_count;
  uint64_t turn, turns;  // whose turn it is to make room, and how many have asked for one
  size_t holds;          // of layers, but those of whoever waits for room or for a layer

  pthread_mutex_t room_lock;    // one eviction at a time
  pthread_mutex_t models_lock;  // one model at a time into the journal
  pthread_mutex_t loose_lock;   // one session at a time is tied
  _Atomic bool unsettled;       // some session may have something to settle
  pthread_t thread;
  bool started;
  uint64_t expel_above;   // bytes on the disk; with more storage-budget has no room for another segment
  bool unread;            // the start could not read all segments
  uint64_t buffer_bytes;  // of memory-budget, reserved for what is on its way to the disk and back
  // The spill thread's: the same for what is known of each record, as of then.
  uint64_t directory_bytes;
  int64_t counted_ms;
};

// Bytes that one who brings pages back may have read and not taken yet, beside others with `taken`: half of what is
// left, so that all together keep to what is reserved for them. 0: one page at a time.
uint64_t qkvi_spill_window(const qkvi_spill *spill, uint64_t taken);

#define QKVI_SPILL_STEP_MS 20  // at least so often what is waited for is looked at

int64_t qkvi_spill_now_ms(void);
void qkvi_spill_lock(qkvi_spill *spill);
void qkvi_spill_unlock(qkvi_spill *spill);
uint64_t qkvi_spill_steps(qkvi_spill *spill);
// Waits until something has happened since `seen`, or `ms` are over. Returns what to wait from the next time.
uint64_t qkvi_spill_await(qkvi_spill *spill, uint64_t seen, int64_t ms);
qkv_status qkvi_spill_failure(qkvi_spill *spill);
// Something that is waited for has moved.
void qkvi_spill_progress(qkvi_spill *spill);
// What is written becomes durable now rather than within a second.
void qkvi_spill_hasten(qkvi_spill *spill);

// Sessions that are not in memory alone, the longest unused first; to be given back.
typedef struct qkvi_spilled {
  qkv_session *session;  // a reference
  int64_t last_used_ms;
} qkvi_spilled;
qkvi_spilled *qkvi_spill_sessions(qkvi_spill *spill, size_t *count);
void qkvi_spill_drop_sessions(qkvi_spilled *sessions, size_t count);

// Whether it is this one that has its name.
bool qkvi_spill_is_open(qkvi_spill *spill, const qkv_session *session);

// Bytes of memory-budget that are used or promised.
uint64_t qkvi_spill_taken(qkvi_spill *spill);

// storage-budget has no room: the longest unused session that nobody has pinned goes from it, and from memory.
void qkvi_spill_expel(qkvi_spill *spill);

// Opens the storage and fills the store (recovery.c). So much may wait to be written.
qkv_status qkvi_spill_recover(qkvi_spill *spill, const qkv_server_options *options, uint64_t dirty_bytes,
                              qkv_error *error);

// Under the lock, or before the thread is started.
void qkvi_spill_note_known(qkvi_spill *spill, const char *model, uint32_t version);
void qkvi_spill_note_loose(qkvi_spill *spill, uint64_t session);
void qkvi_spill_drop_loose(qkvi_spill *spill);
const qkv_backing *qkvi_spill_backing(qkvi_spill *spill, qkv_durability durability);
// The disk refused something; under the lock.
void qkvi_spill_note_failure(qkvi_spill *spill, qkv_status status);

// Waiting for an entry of the journal: `done` with this as its context, then finish.
typedef struct qkvi_journal_wait {
  qkvi_spill *spill;
  bool done;
  qkv_status status;
} qkvi_journal_wait;
void qkvi_spill_on_journal(void *context, qkv_status status);
qkv_status qkvi_spill_finish_wait(qkvi_journal_wait *wait, qkv_error *error);
// Whether pages of this calibration may be put: it is in the journal. If not, it is noted down for the thread, which
// then writes those that sessions on the SSD are coded with.
bool qkvi_spill_calibration_ready(qkvi_spill *spill, const char *model, uint32_t version);
void qkvi_spill_journal_calibrations(qkvi_spill *spill);

// Writes an entry and waits until it is durable.
qkv_status qkvi_spill_journal(qkvi_spill *spill, qkv_journal_kind kind, uint64_t session, const void *payload,
                              uint64_t bytes, qkv_error *error);
// What was put of a layer up to now ends at `position`, for ever.
void qkvi_spill_cut(qkvi_spill *spill, uint64_t session, uint32_t layer, uint64_t position);

#endif
