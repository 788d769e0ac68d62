// The SSD tier: records that outlive the process, and the journal that says which of them count.
//
//   caller's threads                         storage thread (a libuv loop)           encoders
//   put ──► dirty bytes, mailbox ──────────► ─────────────────────────────────────► zstd?, XXH3
//                                            write buffers (1 MiB) ──► segment  ◄──── encoded
//   written(), durable() ◄────────────────── completions, fdatasync for many
//   read ──────────────────────────────────► driver ──► check ──► done()
//   batch: wait(i) checks and decodes on the caller's own thread, later reads run meanwhile
//
// A record (record.h) lies in a segment (segment.h); numbers of records stay valid when compaction moves the bytes.
// Metadata lies in the journal (journal.h). A directory belongs to one process (lock file).
//
// Promises
// - A record that durable() was called for with QKV_OK survives any crash, unless its session was closed or
//   truncated.
// - A read gives the bytes that were put, or a miss (NOT_FOUND), or DATA_LOSS. Never other bytes.
// - An acknowledged close or truncation is permanent. A record that was only dropped may come back after a restart
//   unless one with a higher number took its place: close or truncate where that must not happen.
// - Errors of the disk are statuses and counters, never an abort. Segments that cannot be read when a directory is
//   opened stay for the next opening (stats.unread_segments). Until then their records must not become newer than
//   those that take their place: see qkv_storage_restore.
//
// Threads: any, for every function; callbacks run on the storage thread, must not block, and may call anything here
// but open, close, verify, and the batch's wait. Memory: dirty_bytes_max + about 10 MiB of buffers + 88 bytes a
// record + 190 bytes a session and 24 a layer of each fork + pending reads. Everything is bounded; calls beyond a
// bound are refused.
#ifndef QKV_STORAGE_STORAGE_H
#define QKV_STORAGE_STORAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "storage/journal.h"
#include "storage/record.h"

typedef struct qkv_storage qkv_storage;

typedef struct qkv_storage_config {
  const char *directory;         // created where it is missing; its parent exists
  const char *io;                // "auto", "uring", "pread"
  uint64_t bytes_max;            // budget of all segments on the disk; 0: what the file system has (space.h)
  uint64_t segment_bytes;        // of one file, a multiple of 4096, 1 MiB to 64 GiB
  uint64_t dirty_bytes_max;      // payloads that wait to be written
  uint64_t compact_bytes_per_s;  // rate of background compaction; 0: only when asked for
  double compact_below;          // share of live bytes under which a sealed segment is compacted
  int64_t sync_ms;               // records without `sync_now` are durable after about this time
  size_t encoders;               // threads that compress and hash; 0: the storage thread does it
  unsigned depth;                // requests at a time in the driver
  unsigned open_files_max;       // segments that are open at a time
  bool compress;                 // try zstd
} qkv_storage_config;

// auto, the file system's budget, 256 MiB segments, 64 MiB dirty, 64 MiB/s below 0.5, 1 s, 1 encoder, depth 32, 64
// files, zstd.
void qkv_storage_config_init(qkv_storage_config *config);

// ---- Opening ----

// A record as it is reported. `tokens` of the meta is how many count: fewer than were put where a truncation cut it.
typedef struct qkv_record_info {
  uint64_t record;
  qkv_record_meta meta;  // of qkv_storage_find without codec, calibration and hash, which are zero there
  uint64_t bytes;        // of the payload as it was put
  uint64_t extent;       // bytes that the record takes on the disk, a multiple of 4096
} qkv_record_info;

// Called during open, on the caller's thread, in four passes.
// 1. entry(): all entries in their order, without those of closed sessions and of sessions that are given up, and
//    without superseded ones. false drops the entry for good, with a SESSION_OPEN or SESSION_FORK its session, but
//    never a SESSION_TRUNCATE. The parent of a SESSION_FORK may be a session that was not reported.
// 2. Each session's view (qkv_storage_session_fork), by session, layer, position, kind. meta.session is the session
//    whose view it is, so an inherited record is reported once for each session that has it. Of several with the same
//    four, the session's own with the highest number; without an own one, of those with most tokens that of the
//    nearest ancestor with the highest number.
// 3. keep(): once more the entries that are kept, in their order. false drops one, of the kinds MODEL and
//    CALIBRATION, that is no longer needed. Not called where segments were not read.
// 4. reach(): of each open session that has heirs, in each layer, how far their views go into what is put for it from
//    now on. Where a crash has left less of the session than that, truncate it to what is left before anything is put
//    for it: else its heirs get that in place of rows that they had.
// Any may be NULL: everything is kept.
//
// Where stats.unread_segments is not 0 afterwards, every session may have more records than were reported, its own
// and inherited ones, which the next opening finds. Before anything is put for a session, or it is forked, truncate
// its layers to where they end. Each session needs that for itself: truncating a parent leaves its heirs unchanged.
typedef struct qkv_storage_restore {
  void *context;
  bool (*entry)(void *context, const qkv_journal_entry *entry);
  void (*record)(void *context, const qkv_record_info *info);
  bool (*keep)(void *context, const qkv_journal_entry *entry);
  void (*reach)(void *context, uint64_t session, const uint64_t *reach, uint32_t layers);
} qkv_storage_restore;

// Recovers the content of the directory and starts the storage thread. FAILED_PRECONDITION: another process has the
// directory, or it has segments and no journal, or some of another store or a later version. INVALID_ARGUMENT: a
// field of the config. PERMISSION_DENIED, NOT_FOUND, INTERNAL: errors of the system. DATA_LOSS: both headers of the
// journal are damaged. UNAVAILABLE: io_uring is asked for and refused.
qkv_status qkv_storage_open(const qkv_storage_config *config, const qkv_storage_restore *restore,
                            qkv_storage **storage, qkv_error *error);
// Finishes what has been submitted, seals, syncs, stops the thread. Batches must have been destroyed.
void qkv_storage_close(qkv_storage **storage);

// ---- Journal ----

// A number for a new session, never given before.
uint64_t qkv_storage_session_number(qkv_storage *storage);

typedef void qkv_storage_done_fn(void *context, qkv_status status);

// Appends an entry of kind MODEL, CALIBRATION, SESSION_OPEN or SESSION_NOTE; the payload is copied. done() (may be
// NULL): it is durable, or INTERNAL, RESOURCE_EXHAUSTED by the disk, and then a later opening may or may not find it.
// Puts for a session may follow without waiting, but count after a crash only once its SESSION_OPEN is durable. An
// entry that failed may be written again: the session is reported once, whether or not the first one was written.
// INVALID_ARGUMENT: kind, or more than QKV_JOURNAL_PAYLOAD_MAX bytes.
qkv_status qkv_storage_journal(qkv_storage *storage, qkv_journal_kind kind, uint64_t session, const void *payload,
                               uint64_t bytes, qkv_storage_done_fn *done, void *context, qkv_error *error);
// The same with a payload in two parts: entry->rest is not copied and must stay valid until done(), which then is not
// NULL.
qkv_status qkv_storage_journal_long(qkv_storage *storage, const qkv_journal_entry *entry, qkv_storage_done_fn *done,
                                    void *context, qkv_error *error);
// Opens session `child` (of qkv_storage_session_number) with the caller's bytes, as a SESSION_OPEN does, as a fork of
// `parent`: in each of `layers` layers it has what the parent has below positions[layer], and nothing in other
// layers. A position is at most the parent's length in that layer: beyond it the child would get rows that the parent
// puts later. All arguments are copied. Time and memory depend on the layers alone, not on the records.
//
// The child's view of a record of the parent
// - It has the tokens below positions[layer] that the truncations of the parent before the fork have left.
// - Records that the parent puts later, below these positions, are the child's, too, until a truncation of the parent
//   separates them: of records put after it, the child has only what lies below the cut. Rows that the child still
//   needs and that were not put before must then be put for the child.
// - The child inherits in the same way what the parent has inherited itself.
// - Truncations of the child change its view alone. Inherited rows that they remove never come back.
// - An own record of the child wins over an inherited one with the same layer, position and kind.
//
// A record lives as long as the view of any session that is not closed has it: closing or cutting a session leaves
// its heirs what they have, also of records that are still being written.
//
// done() as for qkv_storage_journal, and FAILED_PRECONDITION: `parent` is not open, or `child` is;
// RESOURCE_EXHAUSTED: `parent` is at the end of a chain of QKV_FORK_DEPTH_MAX forks; INTERNAL also where an entry
// that the fork builds on could not be written. INVALID_ARGUMENT: layers, bytes.
qkv_status qkv_storage_session_fork(qkv_storage *storage, uint64_t child, uint64_t parent, const uint64_t *positions,
                                    uint32_t layers, const void *payload, uint64_t bytes, qkv_storage_done_fn *done,
                                    void *context, qkv_error *error);
// Closes a session. Records that are in no other session's view are unreadable for later operations; from done() on
// permanently.
void qkv_storage_session_close(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context);
// Removes the session's rows of `layer` (or QKV_LAYER_ALL) at and beyond `position`: records that begin there and are
// in no other session's view are unreadable for later operations; from done() on permanently. Of a record across
// `position` restore reports the tokens below.
void qkv_storage_session_truncate(qkv_storage *storage, uint64_t session, uint32_t layer, uint64_t position,
                                  qkv_storage_done_fn *done, void *context);

// ---- Records ----

typedef void qkv_storage_put_fn(void *context, uint64_t record, qkv_status status);

typedef struct qkv_storage_put_request {
  qkv_record_meta meta;
  const void *payload;  // borrowed until written()
  uint64_t bytes;       // 1 to QKV_RECORD_BYTES_MAX, and it must fit into a segment
  bool sync_now;        // sync now rather than within sync_ms
  // The payload is free, and with QKV_OK the record can be read. Otherwise nothing was put: RESOURCE_EXHAUSTED (the
  // disk or the budget is full), INTERNAL (it failed), CANCELLED (session closed or cut and no heir needs it, record
  // dropped). Never NULL.
  qkv_storage_put_fn *written;
  // After written(QKV_OK) only, once: the record is durable, or INTERNAL: it may not be. May be NULL.
  qkv_storage_put_fn *durable;
  void *context;
} qkv_storage_put_request;

// Bytes of the largest payload that fits into a segment, and that qkv_storage_put takes.
uint64_t qkv_storage_record_bytes_max(const qkv_storage *storage);

// UNAVAILABLE: dirty_bytes_max is reached, try again when qkv_storage_when_ready calls ready(). RESOURCE_EXHAUSTED:
// bytes_max; close sessions. INVALID_ARGUMENT: a field. Callbacks are called if and only if this returns QKV_OK. A
// put for a closed session that has heirs is CANCELLED unless one of them needs it.
qkv_status qkv_storage_put(qkv_storage *storage, const qkv_storage_put_request *request, uint64_t *record,
                           qkv_error *error);

// The caller's, until ready() is called.
typedef struct qkv_storage_waiter {
  void (*ready)(struct qkv_storage_waiter *waiter);
  void *context;
  struct qkv_storage_waiter *next;  // the storage's
} qkv_storage_waiter;

// Calls ready() once as soon as no more than half of dirty_bytes_max is dirty; perhaps before this returns.
void qkv_storage_when_ready(qkv_storage *storage, qkv_storage_waiter *waiter);

// done(): every put that was accepted before is durable or has failed.
void qkv_storage_sync(qkv_storage *storage, qkv_storage_done_fn *done, void *context);

// Makes a record unreadable for later operations; its space is freed later. Drop a replaced record only once the new
// one is durable. An unknown number is ignored.
void qkv_storage_drop(qkv_storage *storage, uint64_t record);

// Of a session that is not used: between the two what is known of its records takes some bytes each, or is on the
// disk alone, and they are not found, not read and not dropped. Nothing for one that is a fork or has forks. done():
// they are found again; DATA_LOSS: what is known of them cannot be read, they are not found before the next start.
void qkv_storage_session_pack(qkv_storage *storage, uint64_t session);
void qkv_storage_session_unpack(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context);

// NOT_FOUND, without a text: it is not written yet, or no longer there.
qkv_status qkv_storage_find(qkv_storage *storage, uint64_t record, qkv_record_info *info);

// The last record of the session of this kind, among those that are not packed. O(its records).
qkv_status qkv_storage_find_last(qkv_storage *storage, uint64_t session, uint16_t kind, qkv_record_info *info);

// Reads the payload of a record into `buffer`, whose `bytes` are qkv_record_info.bytes (checked against the header:
// INVALID_ARGUMENT). The header must name the session that the record was put for, else it is another record. done():
// NOT_FOUND, DATA_LOSS (counted and logged with segment and offset; the bytes of the buffer are undefined then), or
// QKV_OK.
void qkv_storage_read(qkv_storage *storage, uint64_t record, void *buffer, uint64_t bytes, qkv_storage_done_fn *done,
                      void *context);

// ---- Reading many, for compute threads ----

typedef struct qkv_storage_batch qkv_storage_batch;

// Starts reading `records` (`count` numbers, copied) in their order, up to `ahead_bytes` (at least one record) ahead
// of the last one that was waited for.
qkv_storage_batch *qkv_storage_batch_create(qkv_storage *storage, const uint64_t *records, size_t count,
                                            uint64_t ahead_bytes);
// Waits for record `i`, checks it and decodes it into `buffer` on this thread. Each one once, by any thread, best in
// order. Statuses as of qkv_storage_read.
qkv_status qkv_storage_batch_wait(qkv_storage_batch *batch, size_t i, void *buffer, uint64_t bytes, qkv_error *error);
// When no thread waits any more. Waits for reads that are under way. Clears *batch.
void qkv_storage_batch_destroy(qkv_storage_batch **batch);

// ---- Maintenance ----

// Memory of the index for each record, at most, where there are many: storage/index.h.
#define QKV_STORAGE_RECORD_BYTES 32

typedef struct qkv_storage_stats {
  const char *io;              // the driver
  uint64_t records, sessions;  // that can be read; sessions that have any
  uint64_t index_bytes;        // memory of the index
  uint64_t segments;           // files
  uint64_t disk_bytes;         // of all segments
  uint64_t budget_bytes;       // bytes_max, or what was taken in its place; 0: none
  uint64_t live_bytes;         // of records that can be read, headers and blocks counted
  uint64_t dead_bytes;         // of records that cannot
  uint64_t dirty_bytes;        // payloads that wait to be written
  uint64_t journal_bytes;
  uint64_t puts, put_bytes;      // written
  uint64_t put_stored_bytes;     // of these, after compression
  uint64_t compressed;           // records that were stored compressed
  uint64_t puts_refused;         // for dirty bytes
  uint64_t puts_refused_budget;  // for bytes_max
  uint64_t puts_failed;          // by the disk
  uint64_t full_errors;          // ENOSPC and EDQUOT
  uint64_t device_errors;        // other errors of writes and syncs
  uint64_t reads, read_bytes;    // that succeeded, payload
  uint64_t read_errors;          // DATA_LOSS
  uint64_t syncs;                // fdatasync of segments
  uint64_t compactions, compacted_bytes;
  uint64_t recovered_records, recovered_bytes;  // of this start, live
  uint64_t recovery_read_bytes;                 // headers, summaries, journal, tails
  double recovery_s;
  uint64_t unread_segments;                             // that this start could not read, or not all of it
  uint64_t bad_records;                                 // damaged, found by recovery or compaction
  uint64_t bad_entries;                                 // of the journal
  uint64_t sessions_given_up;                           // because of these
  uint64_t io_short, io_retries, io_waiting, io_depth;  // of the driver's front
} qkv_storage_stats;

void qkv_storage_read_stats(qkv_storage *storage, qkv_storage_stats *stats);

typedef struct qkv_storage_segment {
  uint64_t segment;  // number; its file is segment-<16 hex digits>.qkv
  uint64_t file_bytes, live_bytes, records;
  bool sealed;
  bool unread;  // this start could not read all of it
} qkv_storage_segment;

// Up to `count` segments in ascending order, into `segments`; returns how many exist.
size_t qkv_storage_list_segments(qkv_storage *storage, qkv_storage_segment *segments, size_t count);

// Compacts every sealed segment whose live share is below `live_share`, without a rate; done() when that is over.
void qkv_storage_compact(qkv_storage *storage, double live_share, qkv_storage_done_fn *done, void *context);

typedef struct qkv_storage_verify_report {
  uint64_t records, bytes;  // that were read
  uint64_t bad;             // DATA_LOSS
} qkv_storage_verify_report;

// Reads and checks every record. Blocks the caller; progress() (may be NULL) is called on its thread after every
// record and ends it by false: CANCELLED. QKV_OK also where bad ones were found.
qkv_status qkv_storage_verify(qkv_storage *storage, bool (*progress)(void *context, uint64_t done, uint64_t all),
                              void *context, qkv_storage_verify_report *report);

#endif
