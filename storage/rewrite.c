// Rewrites the journal while the storage runs. The file is read twice, piece by piece: first to find the live
// sessions, then for the entries that are kept, which are copied to "journal.new" with a new place and number. That
// takes journal.piece_bytes of memory and about 52 bytes a session and 130 a cut, however large the file is.
//
//   read piece ─► note sessions ─► ... ─► read piece ─► keep some ─► write ─► ... ─► headers ─► fdatasync ─► rename
//
// Until it is renamed the old file is the journal; no entry is written meanwhile.
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "storage/internal.h"

typedef struct qkvi_rewriting {
  qkvi_sessions *sessions;
  qkvi_journal_walk walk;
  uint8_t *piece;
  bool copying;           // in the second pass
  bool keeping;           // the entry that the walk is in
  int file;               // the new one, or -1
  uint64_t bytes, count;  // of it; entries
} qkvi_rewriting;

uint64_t qkvi_journal_rewrite_at(const qkvi_journal *journal, uint64_t bytes) {
  return bytes * 2 > journal->rewrite_min ? bytes * 2 : journal->rewrite_min;
}

static uint64_t sequence_of(const qkvi_journal *journal, uint64_t count) {
  return (journal->epoch + 1) << QKVI_EPOCH_SHIFT | count;
}

static void take_place(qkv_storage *storage) {
  qkvi_journal *journal = &storage->journal;
  const qkvi_rewriting *on = journal->rewriting;
  qkv_io_close(storage->io, journal->file);
  journal->file = on->file;
  journal->bytes = on->bytes;
  journal->forks = journal->forks_next;
  journal->durable = sequence_of(journal, on->count);
  journal->epoch++;
  journal->rewrite_at = qkvi_journal_rewrite_at(journal, journal->bytes);
  pthread_mutex_lock(&storage->lock);
  const uint64_t first = journal->epoch << QKVI_EPOCH_SHIFT | 1;
  if (storage->record_next < first) storage->record_next = first;
  if (storage->session_next < first) storage->session_next = first;
  pthread_mutex_unlock(&storage->lock);
}

static void end_rewriting(qkv_storage *storage, int error) {
  qkvi_rewriting *on = storage->journal.rewriting;
  if (error == 0) error = qkv_io_rename(storage->io, "journal.new", "journal.qkv");
  // From here on the new file is the journal, whether or not the directory could be synced: a failure is the batch's.
  const bool renamed = error == 0;
  if (error == 0) error = qkv_io_sync_directory(storage->io);
  if (renamed) {
    take_place(storage);
  } else if (on->file >= 0) {
    qkv_io_close(storage->io, on->file);
    (void)qkv_io_remove(storage->io, "journal.new");
  }
  storage->journal.rewriting = NULL;
  qkvi_sessions_destroy(&on->sessions);
  qkvi_journal_walk_deinit(&on->walk);
  free(on->piece);
  free(on);
  qkvi_journal_rewritten(storage, error);
}

static void step(qkv_io_request *request);

static void submit(qkv_storage *storage, qkv_io_kind kind, int file, uint64_t offset, uint64_t size) {
  qkvi_journal *journal = &storage->journal;
  journal->request = (qkv_io_request){.kind = kind,
                                      .file = file,
                                      .offset = offset,
                                      .size = size,
                                      .bytes = size > 0 ? journal->rewriting->piece : NULL,
                                      .done = step,
                                      .context = storage};
  qkv_io_submit(storage->io, &journal->request);
}

// Reads the next piece; at the end begins the second pass, or ends it.
static void go_on(qkv_storage *storage) {
  qkvi_journal *journal = &storage->journal;
  qkvi_rewriting *on = journal->rewriting;
  const uint64_t left = journal->bytes - on->walk.offset;
  if (left > 0) {
    submit(storage, QKV_IO_READ, journal->file, on->walk.offset,
           left < journal->piece_bytes ? left : journal->piece_bytes);
    return;
  }
  int error = on->walk.left == 0 && on->walk.next == journal->durable + 1 ? 0 : EIO;
  if (error == 0 && on->copying) {
    qkvi_journal_header_make(on->piece, storage->store, journal->epoch + 1, sequence_of(journal, on->count),
                             journal->forks_next);
    submit(storage, QKV_IO_WRITE, on->file, 0, 2 * sizeof(qkvi_journal_header));
    return;
  }
  if (error == 0) error = qkv_io_open(storage->io, "journal.new", true, &on->file);
  if (error != 0) on->file = -1;
  if (error != 0) {
    end_rewriting(storage, error);
    return;
  }
  qkvi_journal_walk_deinit(&on->walk);
  qkvi_journal_walk_init(&on->walk, storage->store, journal->epoch);
  on->copying = true;
  go_on(storage);
}

// Moves the kept ones of `size` bytes to the piece's beginning, as they will lie in the new file. Returns how many
// bytes, or UINT64_MAX: damage. Recovery decides about that; the old file stays as it is.
static uint64_t sift(qkv_storage *storage, uint64_t size) {
  qkvi_journal *journal = &storage->journal;
  qkvi_rewriting *on = journal->rewriting;
  uint64_t kept = 0;
  for (uint64_t at = 0; at < size; at += QKV_STORAGE_BLOCK) {
    uint8_t *block = on->piece + at;
    if (!qkvi_journal_walk_block(&on->walk, block)) return UINT64_MAX;
    const qkv_journal_entry *entry = &on->walk.entry;
    if (on->walk.first && !on->copying) (void)qkvi_sessions_note(on->sessions, entry);
    if (!on->copying) continue;
    if (on->walk.first) on->keeping = qkvi_sessions_keep(on->sessions, entry);
    if (!on->keeping) continue;
    if (on->walk.first)
      qkvi_entry_renumber(block, storage->store, sequence_of(journal, ++on->count), on->bytes + kept);
    memset(block + on->walk.used, 0, QKV_STORAGE_BLOCK - on->walk.used);
    if (kept < at) memcpy(on->piece + kept, block, QKV_STORAGE_BLOCK);
    kept += QKV_STORAGE_BLOCK;
  }
  return kept;
}

static void step(qkv_io_request *request) {
  qkv_storage *storage = request->context;
  qkvi_rewriting *on = storage->journal.rewriting;
  if (request->error != 0) {
    end_rewriting(storage, request->error);
  } else if (request->kind == QKV_IO_READ) {
    const uint64_t kept = request->offset == 0 ? 0 : sift(storage, request->size);
    if (kept == UINT64_MAX) {
      end_rewriting(storage, EIO);
    } else if (kept > 0) {
      const uint64_t offset = on->bytes;
      on->bytes += kept;
      submit(storage, QKV_IO_WRITE, on->file, offset, kept);
    } else {
      go_on(storage);
    }
  } else if (request->kind == QKV_IO_SYNC) {
    end_rewriting(storage, 0);
  } else if (request->offset == 0) {  // the headers, which come last
    submit(storage, QKV_IO_SYNC, on->file, 0, 0);
  } else {
    go_on(storage);
  }
}

void qkvi_journal_rewrite(qkv_storage *storage) {
  qkvi_journal *journal = &storage->journal;
  assert(journal->rewriting == NULL && journal->piece_bytes >= 2 * sizeof(qkvi_journal_header));
  (void)qkv_io_remove(storage->io, "journal.new");
  qkvi_rewriting *on = qkvi_checked(calloc(1, sizeof *on));
  *on = (qkvi_rewriting){.sessions = qkvi_sessions_create(),
                         .piece = qkvi_aligned(journal->piece_bytes),
                         .file = -1,
                         .bytes = 2 * sizeof(qkvi_journal_header)};
  qkvi_journal_walk_init(&on->walk, storage->store, journal->epoch);
  journal->rewriting = on;
  // The headers' content is not needed; but so it never ends before this returns.
  submit(storage, QKV_IO_READ, journal->file, 0, 2 * sizeof(qkvi_journal_header));
}
