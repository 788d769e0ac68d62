// The journal's file: entries that came while one batch was written form the next one. A file that has grown, or in
// which a write has failed, is rewritten (rewrite.c).
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "storage/internal.h"

#define uthash_fatal(text) abort()
#include <uthash.h>

// Sessions whose closing or truncation could not be written: after a crash their later records would be mixed with
// rows that should be gone.
struct qkvi_failed_end {
  uint64_t session;
  UT_hash_handle hh;
};

bool qkvi_session_end_failed(const qkv_storage *storage, uint64_t session) {
  qkvi_failed_end *found = NULL;
  HASH_FIND(hh, storage->failed_ends, &session, sizeof session, found);
  return found != NULL;
}

static void note_failed_end(qkv_storage *storage, uint64_t session) {
  if (!qkvi_session_end_failed(storage, session)) {
    qkvi_failed_end *made = qkvi_checked(calloc(1, sizeof *made));
    made->session = session;
    HASH_ADD(hh, storage->failed_ends, session, sizeof made->session, made);
  }
  for (qkvi_put *put = storage->all_first; put != NULL; put = put->all_next) {
    if (!put->moved && put->request.meta.session == session) put->cancelled = true;
  }
}

void qkvi_failed_ends_clear(qkv_storage *storage) {
  qkvi_failed_end *failed = storage->failed_ends;
  HASH_CLEAR(hh, storage->failed_ends);
  while (failed != NULL) {
    qkvi_failed_end *next = failed->hh.next;
    free(failed);
    failed = next;
  }
}

// ---- Kinds, and entries that say nothing ----

static bool opens(const qkv_journal_entry *entry) {
  return entry->kind == QKV_JOURNAL_SESSION_OPEN || entry->kind == QKV_JOURNAL_SESSION_FORK;
}

static bool takes(const qkv_journal_entry *entry) {
  return entry->kind == QKV_JOURNAL_SESSION_CLOSE || entry->kind == QKV_JOURNAL_SESSION_TRUNCATE;
}

// It keeps its place in the order, which records wait for, as an empty note of no session.
static void refuse(qkvi_pending_entry *entry, qkv_status status) {
  free((void *)entry->entry.payload);
  entry->entry = (qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_NOTE};
  entry->refused = status;
}

// A fork of a session that could not be journaled, or one of whose truncations could not, would find other rows.
static void check_fork(qkv_storage *storage, qkvi_pending_entry *entry) {
  if (entry->entry.kind != QKV_JOURNAL_SESSION_FORK) return;
  const uint64_t parent = entry->entry.parent;
  if (!qkvi_session_end_failed(storage, parent) && !qkvi_sessions_failed(storage->sessions, parent)) {
    storage->journal.forks_next = true;
    return;
  }
  qkvi_sessions_fail(storage->sessions, entry->entry.session);
  refuse(entry, QKV_INTERNAL);
}

// ---- Ends of a batch ----

static void end_batch(qkv_storage *storage, int error) {
  qkvi_journal *journal = &storage->journal;
  qkvi_pending_entry *entry = journal->batch;
  journal->batch = NULL;
  journal->running = false;
  if (error != 0) {
    qkv_log(QKV_LOG_ERROR, "the journal cannot be written", "{s:s}", "error", strerror(error));
    journal->failed = true;
  }
  const qkv_status status = error == 0 ? QKV_OK : qkvi_write_error(storage, error);
  while (entry != NULL) {
    qkvi_pending_entry *next = entry->next;
    if (error == 0) journal->durable = entry->entry.sequence;
    journal->resolved = entry->order;
    if (error != 0 && takes(&entry->entry)) note_failed_end(storage, entry->entry.session);
    if (error != 0 && opens(&entry->entry)) qkvi_sessions_fail(storage->sessions, entry->entry.session);
    if (entry->done != NULL) entry->done(entry->context, entry->refused == QKV_OK ? status : entry->refused);
    free((void *)entry->entry.payload);
    free(entry);
    entry = next;
  }
  qkvi_journal_write(storage);
  qkvi_place(storage);
}

static void write_piece(qkv_storage *storage);

static void batch_step(qkv_io_request *request) {
  qkv_storage *storage = request->context;
  qkvi_journal *journal = &storage->journal;
  if (request->error == 0 && request->kind == QKV_IO_WRITE) {
    journal->written += request->size;
    if (journal->written < journal->batch_bytes) {
      write_piece(storage);
      return;
    }
    *request = (qkv_io_request){.kind = QKV_IO_SYNC, .file = journal->file, .done = batch_step, .context = storage};
    qkv_io_submit(storage->io, request);
    return;
  }
  free(journal->buffer);
  journal->buffer = NULL;
  if (request->error == 0) {
    journal->bytes += journal->batch_bytes;
    pthread_mutex_lock(&storage->lock);
    storage->stats.journal_bytes = journal->bytes;  // before it is answered
    pthread_mutex_unlock(&storage->lock);
  }
  end_batch(storage, request->error);
}

static uint64_t extent_of(const qkvi_pending_entry *entry) {
  return qkvi_entry_extent(entry->entry.bytes + entry->entry.rest_bytes);
}

// Moves pending entries into the batch: batch_max bytes of them, or one.
static void take_batch(qkv_storage *storage) {
  qkvi_journal *journal = &storage->journal;
  journal->batch_bytes = 0;
  journal->forks_next = journal->forks;
  qkvi_pending_entry **last = &journal->batch;
  while (journal->pending != NULL) {
    qkvi_pending_entry *entry = journal->pending;
    check_fork(storage, entry);
    if (journal->batch_bytes > 0 && journal->batch_bytes + extent_of(entry) > journal->batch_max) break;
    journal->batch_bytes += extent_of(entry);
    journal->pending = entry->next;
    entry->next = NULL;
    *last = entry;
    last = &entry->next;
  }
  if (journal->pending == NULL) journal->pending_last = &journal->pending;
}

static void submit_write(qkv_storage *storage, uint64_t size) {
  qkvi_journal *journal = &storage->journal;
  journal->request = (qkv_io_request){.kind = QKV_IO_WRITE,
                                      .file = journal->file,
                                      .offset = journal->bytes + journal->written,
                                      .size = size,
                                      .bytes = journal->buffer,
                                      .done = batch_step,
                                      .context = storage};
  qkv_io_submit(storage->io, &journal->request);
}

// Of an entry that is larger than a batch.
static void write_piece(qkv_storage *storage) {
  qkvi_journal *journal = &storage->journal;
  const uint64_t left = journal->batch_bytes - journal->written,
                 size = left < journal->piece_bytes ? left : journal->piece_bytes;
  qkvi_entry_copy(journal->buffer, &journal->header, &journal->batch->entry, journal->written, size);
  submit_write(storage, size);
}

static void write_batch(qkv_storage *storage) {
  qkvi_journal *journal = &storage->journal;
  uint64_t at = 0, sequence = journal->durable;
  journal->written = 0;
  if (journal->batch_bytes > journal->batch_max) {
    journal->batch->entry.sequence = sequence + 1;
    journal->header =
        qkvi_entry_header_make(&journal->batch->entry, storage->store, journal->durable, journal->bytes);
    journal->buffer = qkvi_aligned(journal->piece_bytes);
    write_piece(storage);
    return;
  }
  journal->buffer = qkvi_aligned(journal->batch_bytes);
  for (qkvi_pending_entry *entry = journal->batch; entry != NULL; entry = entry->next) {
    entry->entry.sequence = ++sequence;
    qkvi_entry_make(journal->buffer + at, &entry->entry, storage->store, journal->durable, journal->bytes + at);
    at += extent_of(entry);
  }
  submit_write(storage, at);
}

void qkvi_journal_rewritten(qkv_storage *storage, int error) {
  if (error != 0) {
    end_batch(storage, error);
    return;
  }
  storage->journal.failed = false;
  write_batch(storage);
}

// ---- Entries ----

void qkvi_journal_write(qkv_storage *storage) {
  qkvi_journal *journal = &storage->journal;
  if (journal->running || journal->pending == NULL) return;
  journal->running = true;
  take_batch(storage);
  if (journal->failed || journal->bytes > journal->rewrite_at || journal->forks_next != journal->forks) {
    qkvi_journal_rewrite(storage);
  } else {
    write_batch(storage);
  }
}

void qkvi_journal_message(qkv_storage *storage, qkvi_message *message) {
  qkvi_pending_entry *entry = (qkvi_pending_entry *)message;
  qkvi_journal *journal = &storage->journal;
  const qkv_journal_kind kind = entry->entry.kind;
  const uint64_t number = entry->entry.session, parent = qkvi_sessions_parent(storage->sessions, number);
  // The effect of an entry on records takes place at once.
  if (kind == QKV_JOURNAL_SESSION_FORK) qkvi_unpack_session(storage, entry->entry.parent, NULL, NULL);
  if (kind == QKV_JOURNAL_SESSION_TRUNCATE) qkvi_unpack_session(storage, number, NULL, NULL);
  const qkv_status status = qkvi_sessions_note(storage->sessions, &entry->entry);
  if (status != QKV_OK) refuse(entry, status);
  // What was swept has been unpacked, and an heir that was used may have gone.
  if (kind == QKV_JOURNAL_SESSION_CLOSE) qkvi_pack_quiet(storage, number);
  if (kind == QKV_JOURNAL_SESSION_CLOSE && parent != 0) qkvi_pack_quiet(storage, parent);
  if (takes(&entry->entry)) qkvi_compact_consider(storage);
  entry->next = NULL;
  *journal->pending_last = entry;
  journal->pending_last = &entry->next;
  qkvi_journal_write(storage);
}
