// What the files of the storage share: one struct, owned by the storage thread. Not for others: see storage.h.
//
//   storage.c   life, mailbox, thread; calls.c        log.c       the journal's file
//   put.c       encoding, placing, writing            rewrite.c   the journal, rewritten
//   sync.c      fdatasync, sealing                    recover.c   opening
//   segments.c  files, space, preparing               sessions.c  live sessions, forks
//   read.c      reading, batches (batch.c)            compact.c   moving, removing
//   sweep.c     forgets records in no view         pack.c      packs the index; unload.c: and takes it out of memory
//   numbered.c  tables of sessions                 cuts.c      which truncations are needed
//
// `lock` guards what callers read: the mailbox, numbers, dirty bytes, waiters, statistics, and changes of the index
// and the table of segments. The storage thread reads the latter two without it, as only it changes them.
#ifndef QKV_STORAGE_INTERNAL_H
#define QKV_STORAGE_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "engine/base/pool.h"
#include "storage/index.h"
#include "storage/io.h"
#include "storage/journal.h"
#include "storage/segment.h"
#include "storage/sessions.h"
#include "storage/storage.h"
#include "storage/wake.h"

#define QKVI_NO_SEGMENT UINT32_MAX

enum {
  QKVI_WRITE_BYTES = 1 << 20,  // of one write
  QKVI_WRITE_BUFFERS = 8,      // 8 MiB together, the usual RLIMIT_MEMLOCK
};

#define QKVI_COMPACT_RETRY_MS 5000  // after a failure the rate's compaction is tried again

#define QKVI_JOURNAL_REWRITE (UINT64_C(4) << 20)  // bytes of a journal that may be rewritten
#define QKVI_JOURNAL_PIECE (UINT64_C(256) << 10)  // bytes of it that are in memory then
#define QKVI_JOURNAL_BATCH (UINT64_C(4) << 20)    // bytes of entries that are written at once

// Work for the storage thread; embedded in the object that it is about.
typedef struct qkvi_message {
  void (*run)(qkv_storage *storage, struct qkvi_message *message);
  struct qkvi_message *next;
} qkvi_message;

typedef struct qkvi_put qkvi_put;

typedef struct qkvi_put_list {
  qkvi_put *first, *last;
} qkvi_put_list;

// A record that is being written: one that was put, or one that compaction moves.
struct qkvi_put {
  qkvi_message message;
  qkv_storage *storage;
  qkv_storage_put_request request;
  uint64_t record;
  uint64_t order;   // of acceptance
  uint64_t after;   // order of the journal entry that must be durable before it is placed
  uint32_t tokens;  // that count
  qkv_record_header header;
  const uint8_t *stored;  // header.stored_bytes bytes
  uint8_t *owned;         // where `stored` is not the caller's
  uint32_t segment;       // slot, once it is placed
  uint64_t copied;        // bytes of its extent that are in write buffers
  unsigned writing;       // write buffers with bytes of it
  int error;              // errno of the first write that failed
  bool cancelled;         // closed, cut or dropped
  bool queued;            // encoded, not all in buffers
  bool moved;             // by compaction, which `request.context` is
  uint32_t old_segment;   // of a moved one
  uint64_t old_offset;
  qkvi_put *next;                     // in the queue, or of a segment's unsynced ones
  qkvi_put *all_previous, *all_next;  // of all that are under way
};

typedef enum qkvi_segment_state {
  QKVI_SEGMENT_PREPARING,  // being made
  QKVI_SEGMENT_OPEN,       // takes records
  QKVI_SEGMENT_SEALING,    // takes no more; summary and footer are being written
  QKVI_SEGMENT_SEALED,
  QKVI_SEGMENT_FAILED,  // a write or sync failed: takes no more and is never sealed
} qkvi_segment_state;

typedef struct qkvi_segment {
  uint64_t number;
  uint32_t slot;
  qkvi_segment_state state;
  int file;          // -1: closed
  unsigned users;    // requests under way
  unsigned writing;  // of these, write buffers
  unsigned placing;  // of these, a record that is not all in buffers: 0 or 1
  uint64_t used_at;  // order of last use, for closing files
  uint64_t file_bytes;
  uint64_t end;  // offset of the next record
  uint64_t live_bytes, live_records;
  uint64_t data_bytes;         // of records that were placed
  qkv_record_header *headers;  // of these, until it is sealed
  uint64_t headers_count, headers_capacity;
  qkvi_put_list unsynced, syncing;  // written; `syncing`: an fdatasync that covers them is under way
  bool sync_running, sync_wanted;
  bool unmovable;          // compaction could not read all of it
  bool unread;             // the start could not read all of it: it stays for the next start
  bool sync_failed;        // its writes may not be durable
  qkv_io_request request;  // for preparing, syncing and sealing, one after the other
  uint8_t *block;          // what that writes
} qkvi_segment;

// A piece of the stream of records.
typedef struct qkvi_buffer {
  qkv_storage *storage;
  uint8_t *bytes;
  uint64_t used;
  uint32_t segment;
  uint64_t offset;                                       // in it
  qkvi_put *puts[QKVI_WRITE_BYTES / QKV_STORAGE_BLOCK];  // with bytes in it
  unsigned count;
  qkv_io_request request;
  struct qkvi_buffer *next;  // free ones
} qkvi_buffer;

// The journal's file (log.c).
typedef struct qkvi_pending_entry {
  qkvi_message message;
  uint64_t order;  // of submission
  qkv_journal_entry
      entry;           // payload is owned and as it is stored, the rest is not; its sequence comes with its batch
  qkv_status refused;  // the entry is void: the status that done() gets
  qkv_storage_done_fn *done;
  void *context;
  struct qkvi_pending_entry *next;
} qkvi_pending_entry;

typedef struct qkvi_journal {
  int file;
  uint64_t bytes;                // up to the last durable entry
  uint64_t epoch, durable;       // sequence of the newest durable entry
  uint64_t submitted, resolved;  // orders of the newest entry, and of the newest that is durable or has failed
  uint64_t rewrite_at;           // bytes at which it is due to be rewritten
  bool running, failed;
  bool forks, forks_next;                       // the file may have SESSION_FORK; the next one may
  qkvi_pending_entry *pending, **pending_last;  // not begun
  qkvi_pending_entry *batch;                    // being written
  qkv_io_request request;
  uint8_t *buffer;
  uint64_t batch_bytes, written;                 // of the batch in the file; of them, those that have been written
  qkvi_entry_header header;                      // of the one entry of a batch that goes piece by piece
  struct qkvi_rewriting *rewriting;              // NULL: it is not being rewritten
  uint64_t rewrite_min, piece_bytes, batch_max;  // QKVI_JOURNAL_*, or less in tests
} qkvi_journal;

typedef struct qkvi_sync_waiter {
  qkvi_message message;
  uint64_t order;  // puts accepted before this
  qkv_storage_done_fn *done;
  void *context;
  struct qkvi_sync_waiter *next;
} qkvi_sync_waiter;

typedef struct qkvi_compact_request {
  qkvi_message message;
  double live_share;
  uint64_t below;  // it covers segments with smaller numbers
  qkv_storage_done_fn *done;
  void *context;
  struct qkvi_compact_request *next;
} qkvi_compact_request;

typedef struct qkvi_compaction {
  uint32_t segment;   // slot that is being emptied, or QKVI_NO_SEGMENT
  bool listing;       // its records are being found
  uint64_t *records;  // numbers in it
  uint64_t count, next;
  unsigned moving;  // records under way
  uint64_t moving_bytes;
  int64_t allowance;  // bytes that the rate allows now
  qkvi_compact_request *asked, **asked_last;
  bool going;
  bool aborted;       // the disk is full or fails: not tried again before something changes, or for retry_ms
  uint64_t retry_ms;  // QKVI_COMPACT_RETRY_MS, or less in tests
} qkvi_compaction;

typedef struct qkvi_failed_end qkvi_failed_end;
typedef struct qkvi_load qkvi_load;

struct qkv_storage {
  qkv_storage_config config;
  int lock_file;
  uv_loop_t loop;
  qkv_io *io;
  qkvi_wake wake;
  uv_timer_t tick;  // sync_ms
  uv_timer_t compact_tick;
  uv_check_t after;  // of a turn: whether it can end
  pthread_t thread;
  bool threaded, ending, ended;
  qkv_pool *encoders;  // NULL: the storage thread
  uint64_t store;      // its number

  pthread_mutex_t lock;
  qkvi_message *mailbox, **mailbox_last;
  uint64_t record_next, session_next;
  uint64_t order_next;
  uint64_t dirty_bytes;
  uint64_t free_bytes;     // for new records, by the budget; UINT64_MAX without one
  uint64_t waiting_bytes;  // extents of puts that are not placed
  qkv_storage_waiter *waiters;
  qkv_storage_stats stats;

  qkvi_index *index;
  qkvi_sessions *sessions;  // the storage thread's
  qkvi_segment **segments;  // by slot; NULL: free
  uint32_t segments_capacity;
  uint64_t segments_count;
  uint64_t segment_next;  // number
  uint64_t use_clock;
  unsigned open_files;
  uint32_t current, spare;   // slots or QKVI_NO_SEGMENT: takes records; made ahead
  bool preparing, no_spare;  // `no_spare`: making one has failed, not tried again before something changes

  qkvi_put_list queue;  // encoded, to be placed
  bool placing;
  qkvi_put *all_first, *all_last;
  qkvi_sync_waiter *sync_waiters;
  uint8_t *region;
  qkvi_buffer buffers[QKVI_WRITE_BUFFERS];
  qkvi_buffer *free_buffers, *filling;
  unsigned writes;                          // buffers under way
  uint64_t reads;                           // requests and decodings under way
  uint64_t reading;                         // of these, with the disk
  qkvi_message *fileless, **fileless_last;  // reads that wait for the file of another to be closed
  qkvi_journal journal;
  qkvi_failed_end *failed_ends;
  qkvi_compaction compaction;
  unsigned index_walks;   // by compaction and checks: meanwhile nothing is packed
  unsigned index_writes;  // of packed sessions, under way
  qkvi_load *loads;       // of unloaded sessions, under way
};

// storage.c
void *qkvi_checked(void *memory);  // aborts without
uint8_t *qkvi_aligned(uint64_t bytes);
void qkvi_post(qkv_storage *storage, qkvi_message *message);
void qkvi_post_locked(qkv_storage *storage, qkvi_message *message);
void qkvi_stat_add(qkv_storage *storage, uint64_t *stat, uint64_t delta);
// The status of an errno of a write, counted.
qkv_status qkvi_write_error(qkv_storage *storage, int error);
// A storage without io, journal and records, for recovery.
qkv_storage *qkvi_storage_create(const qkv_storage_config *config);
// Opens over the caller's io (which the storage then owns) whose loop is storage->loop, without a thread:
// qkvi_storage_turn runs it, on the caller's thread. For tests.
qkv_status qkvi_storage_open_over(qkv_storage *storage, const qkv_storage_restore *restore, qkv_error *error);
void qkvi_storage_turn(qkv_storage *storage, bool wait);
void qkvi_storage_destroy(qkv_storage **storage);

// segments.c
qkvi_segment *qkvi_segment_add(qkv_storage *storage, uint64_t number, qkvi_segment_state state, uint64_t file_bytes);
// Whether its file is open or may be opened within open_files_max; closes an unused file for it.
bool qkvi_segment_has_place(qkv_storage *storage, const qkvi_segment *segment);
// Opens its file where it is closed, also beyond open_files_max. 0 or an errno. Counts a user.
int qkvi_segment_use(qkv_storage *storage, qkvi_segment *segment);
void qkvi_segment_leave(qkv_storage *storage, qkvi_segment *segment);
// A segment that takes a record of `extent` bytes, or NULL: then one is being made and qkvi_place is called again.
qkvi_segment *qkvi_segment_for(qkv_storage *storage, uint64_t extent);
void qkvi_segment_note(qkv_storage *storage, qkvi_segment *segment, const qkv_record_header *header);
void qkvi_segment_live(qkv_storage *storage, qkvi_segment *segment, int64_t bytes, int64_t records);
// The segment takes no more records: seals it once everything in it is durable.
void qkvi_segment_retire(qkv_storage *storage, qkvi_segment *segment);
void qkvi_segment_fail(qkv_storage *storage, qkvi_segment *segment);
// Deletes the segment if it has no live records and no users.
void qkvi_segment_reap(qkv_storage *storage, qkvi_segment *segment);
void qkvi_segments_count_free(qkv_storage *storage);  // recomputes storage->free_bytes

// calls.c. Under the lock: checks the limits, of which one is given, then assigns the numbers.
qkv_status qkvi_admit(qkv_storage *storage, qkvi_put *put, uint64_t dirty_max, qkv_error *error);

// put.c
void qkvi_put_message(qkv_storage *storage, qkvi_message *message);
void qkvi_put_enqueue(qkv_storage *storage, qkvi_put *put);  // encoded
void qkvi_place(qkv_storage *storage);
void qkvi_put_fail_queue(qkv_storage *storage, int error);
void qkvi_put_finish(qkv_storage *storage, qkvi_put *put);  // frees
void qkvi_flush_buffer(qkv_storage *storage);

// Removes a record from the index; its space becomes dead.
void qkvi_forget(qkv_storage *storage, uint64_t record);

// pack.c. Between the two all records of the segment (QKVI_ANY_SEGMENT: all records) are found and walked: from
// done() on, which gets DATA_LOSS where those of a session cannot be read. The same for a caller's thread.
void qkvi_begin_walk(qkv_storage *storage, uint32_t segment, qkv_storage_done_fn *done, void *context);
void qkvi_end_walk(qkv_storage *storage);
void qkvi_begin_check(qkv_storage *storage, qkv_storage_done_fn *done, void *context);
void qkvi_end_check(qkv_storage *storage);
// Packs the session where no view of a session that is used has its records, and then likewise its ancestors.
void qkvi_pack_quiet(qkv_storage *storage, uint64_t session);
// The session is used. What its view has is found from done() on (NULL: nobody waits), perhaps before this returns.
void qkvi_unpack_session(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context);

// unload.c. Writes what has been packed lately, as far as the budget of the disk allows.
void qkvi_unload_fresh(qkv_storage *storage);
// The session's own records are found from done() on, likewise, where they were not in memory.
void qkvi_load_session(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context);

// sync.c
void qkvi_sync_later(qkv_storage *storage, qkvi_segment *segment, qkvi_put *put);
void qkvi_sync_segment(qkv_storage *storage, qkvi_segment *segment);
void qkvi_sync_all(qkv_storage *storage);
void qkvi_sync_message(qkv_storage *storage, qkvi_message *message);
void qkvi_sync_settle(qkv_storage *storage);  // answers waiters

// read.c
typedef struct qkvi_read {
  qkvi_message message;
  qkv_storage *storage;
  uint64_t record;
  uint64_t session;  // that it was put for, by the index
  bool unloaded;     // it is what `session` has unloaded, and not in the index
  qkv_io_request request;
  uint8_t *bytes;                  // the record as it is read, or NULL
  uint64_t store, number, offset;  // where it should lie
  uint32_t slot;
  uint64_t extent;  // bytes there
  unsigned attempts;
  int error;
  qkv_status status;  // NOT_FOUND, or OK: `bytes` are valid
  void *buffer;
  uint64_t buffer_bytes;
  qkv_storage_done_fn *done;
  void *context;
  void (*arrived)(struct qkvi_read *read);  // on the storage thread: bytes or a status have arrived
} qkvi_read;
void qkvi_read_message(qkv_storage *storage, qkvi_message *message);
// Checks and decodes into `buffer`, on any thread. OK, INVALID_ARGUMENT, or DATA_LOSS with what is wrong.
qkv_status qkvi_read_decode(const qkvi_read *read, void *buffer, uint64_t bytes, const char **wrong);
// Counts and logs a read's end.
void qkvi_read_count(qkvi_read *read, qkv_status status, const char *wrong);

// log.c
void qkvi_journal_message(qkv_storage *storage, qkvi_message *message);
void qkvi_journal_write(qkv_storage *storage);
// The rewriting that the batch waited for has ended: writes the batch now, or fails it.
void qkvi_journal_rewritten(qkv_storage *storage, int error);
bool qkvi_session_end_failed(const qkv_storage *storage, uint64_t session);
void qkvi_failed_ends_clear(qkv_storage *storage);

// rewrite.c
// Rewrites the journal without closed sessions and superseded entries; then qkvi_journal_rewritten().
void qkvi_journal_rewrite(qkv_storage *storage);
// The size at which a journal of `bytes` is due to be rewritten again.
uint64_t qkvi_journal_rewrite_at(const qkvi_journal *journal, uint64_t bytes);

// sweep.c
// Forgets own records of a session, and cancels puts, that no view needs any more (a qkvi_sweep_fn of the storage).
bool qkvi_sweep(void *context, const qkvi_session *session);
// Those of a session that was unloaded then, and whose records have been loaded.
void qkvi_sweep_loaded(qkv_storage *storage, uint64_t session);
// The put as an entry of the index: only session, layer, position and tokens are set.
qkvi_entry qkvi_put_entry(const qkvi_put *put);

// compact.c
void qkvi_compact_consider(qkv_storage *storage);
void qkvi_compact_go(qkv_storage *storage);
void qkvi_compact_message(qkv_storage *storage, qkvi_message *message);
void qkvi_compact_moved(qkv_storage *storage, qkvi_put *put, qkv_status status);  // durable, or not
void qkvi_compact_tick(uv_timer_t *timer);

// recover.c
qkv_status qkvi_recover(qkv_storage *storage, const qkv_storage_restore *restore, qkv_error *error);

#endif
