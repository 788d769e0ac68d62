// Opening: finds what is alive, from the segments and the journal.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "storage/internal.h"

enum { WINDOW = 4 << 20 };  // bytes of an unsealed segment that are read at a time

// Reserve of epochs whose numbers only unreadable segments may contain: of rewritten journals whose names were lost.
enum { EPOCHS_UNKNOWN = 256 };

// A record, or a copy of one, that a segment has.
typedef struct found_record {
  qkvi_entry entry;
  uint32_t codec, calibration;
  uint64_t hash[2];
  uint32_t tokens;  // the most that any view has, 0: none
} found_record;

// The record that a view has at a layer and position.
typedef struct view_record {
  found_record *found;
  uint32_t tokens;
  uint32_t distance;  // forks to the session that it was put for
} view_record;

typedef struct recovery {
  qkv_storage *storage;
  const qkv_storage_restore *restore;
  found_record *found;
  uint64_t found_count, found_capacity;
  view_record *view;  // of one session at a time
  uint64_t view_count, view_capacity;
  uint64_t *numbers;  // per segment
  uint64_t numbers_count, numbers_capacity;
  bool has_journal;
  uint64_t epoch;         // the largest of any file name
  uint64_t journal_seen;  // of any record
  uint64_t read_bytes;
  qkvi_sessions *sessions;
  // The journal as it is.
  struct journal_window {
    uint8_t *bytes;  // `size` of the file, from `begin` on
    uint64_t begin, size, capacity;
    int error;  // errno of a read that failed
  } window;
  qkvi_journal_header header;
  uint64_t journal_bytes, durable;
  uint64_t *refused;  // sequences of entries that restore->entry() dropped
  uint64_t refused_count, refused_capacity, refused_next;
  // The journal that is being written.
  struct journal_output {
    int file, error;
    uint8_t *bytes;  // `size` to be written at `offset`
    uint64_t offset, size, capacity;
    uint64_t count;  // entries
    bool forks;
  } output;
} recovery;

static void block_done(qkv_io_request *request) {
  (void)request;
}

// 0 or an errno.
static int request_now(recovery *on, qkv_io_kind kind, int file, uint64_t offset, void *bytes, uint64_t size) {
  qkv_io_request request = {
      .kind = kind, .file = file, .offset = offset, .size = size, .bytes = bytes, .done = block_done};
  qkv_io_submit(on->storage->io, &request);
  qkv_io_drain(on->storage->io);
  if (kind == QKV_IO_READ && request.error == 0) on->read_bytes += size;
  return request.error;
}

static qkv_status failed(qkv_error *error, const char *what, int code) {
  const bool full = code == ENOSPC || code == EDQUOT;
  return qkv_fail(error, full ? QKV_RESOURCE_EXHAUSTED : QKV_INTERNAL, "%s: %s", what, strerror(code));
}

// ---- Segments ----

static void add_found(recovery *on, const qkv_record_header *header, const qkvi_segment *segment) {
  if (on->found_count == on->found_capacity) {
    on->found_capacity = on->found_capacity == 0 ? 1024 : 2 * on->found_capacity;
    on->found = qkvi_checked(realloc(on->found, on->found_capacity * sizeof *on->found));
  }
  on->found[on->found_count++] = (found_record){.entry = qkvi_entry_of(header, segment->slot),
                                                .codec = header->codec,
                                                .calibration = header->calibration,
                                                .hash = {header->hash[0], header->hash[1]}};
  if (header->journal > on->journal_seen) on->journal_seen = header->journal;
  // A rewritten journal may be lost with its name, and leave records with numbers of its epoch.
  const uint64_t numbers = header->record > header->journal ? header->record : header->journal;
  if (numbers >> QKVI_EPOCH_SHIFT > on->epoch) on->epoch = numbers >> QKVI_EPOCH_SHIFT;
}

// Reads a segment by footer and summary. false: it has none, or they are damaged or cannot be read.
static bool read_sealed(recovery *on, qkvi_segment *segment) {
  const uint64_t size = segment->file_bytes;
  qkvi_segment_footer *footer = (qkvi_segment_footer *)qkvi_aligned(QKV_STORAGE_BLOCK);
  uint8_t *summary = NULL;
  bool good = false;
  if (request_now(on, QKV_IO_READ, segment->file, size - QKV_STORAGE_BLOCK, footer, QKV_STORAGE_BLOCK) == 0 &&
      qkvi_segment_footer_check(footer, on->storage->store, segment->number, size) == NULL) {
    const uint64_t bytes = size - QKV_STORAGE_BLOCK - footer->end;
    summary = qkvi_aligned(bytes + QKV_STORAGE_BLOCK);
    good = bytes == 0 || request_now(on, QKV_IO_READ, segment->file, footer->end, summary, bytes) == 0;
    const char *wrong = good ? qkvi_segment_summary_check(footer, (const qkv_record_header *)summary) : NULL;
    if (wrong != NULL) {
      good = false;
      qkv_log(QKV_LOG_ERROR, "a segment's summary is bad, its records are read instead", "{s:I, s:I, s:s}", "segment",
              (json_int_t)segment->number, "offset", (json_int_t)footer->end, "error", wrong);
      on->storage->stats.bad_records++;
    }
  }
  if (good) {
    const qkv_record_header *headers = (const qkv_record_header *)summary;
    segment->end = footer->end;
    for (uint64_t i = 0; i < footer->records; i++) {
      add_found(on, &headers[i], segment);
      segment->data_bytes += qkvi_record_extent(headers[i].stored_bytes);
    }
  }
  free(summary);
  free(footer);
  return good;
}

static void log_bad(recovery *on, const qkvi_segment *segment, uint64_t offset, const char *error) {
  on->storage->stats.bad_records++;
  qkv_log(QKV_LOG_WARN, "recovery drops what is no good record", "{s:I, s:I, s:s}", "segment",
          (json_int_t)segment->number, "offset", (json_int_t)offset, "error", error);
}

// A read that fails now may succeed later: the segment stays as it is.
static void leave_unread(recovery *on, qkvi_segment *segment, uint64_t offset, int error) {
  segment->state = QKVI_SEGMENT_FAILED;
  if (segment->unread) return;
  segment->unread = segment->unmovable = true;
  on->storage->stats.unread_segments++;
  qkv_log(QKV_LOG_ERROR, "a segment cannot be read, it stays for the next start", "{s:I, s:I, s:s}", "segment",
          (json_int_t)segment->number, "offset", (json_int_t)offset, "error", strerror(error));
}

// Reads and checks every record.
static void scan_records(recovery *on, qkvi_segment *segment) {
  qkvi_segment_scan scan;
  qkvi_segment_scan_init(&scan, on->storage->store, segment->number, segment->file_bytes);
  uint64_t capacity = WINDOW;
  uint8_t *window = qkvi_aligned(capacity);
  for (uint64_t wanted = QKV_STORAGE_BLOCK; wanted > 0;) {
    if (wanted > capacity) {
      free(window);
      capacity = wanted;
      window = qkvi_aligned(capacity);
    }
    const uint64_t left = scan.file_bytes - scan.offset, size = left < capacity ? left : capacity,
                   begin = scan.offset;
    if (size == 0) break;
    const int error = request_now(on, QKV_IO_READ, segment->file, begin, window, size);
    if (error != 0) {
      leave_unread(on, segment, begin, error);
      scan.offset += size;
      continue;
    }
    const uint64_t bad = scan.bad;
    for (const qkv_record_header *header;;) {
      const uint64_t at = scan.offset - begin;
      header = qkvi_segment_scan_next(&scan, window + at, size - at, &wanted);
      if (header == NULL) break;
      add_found(on, header, segment);
      qkvi_segment_note(on->storage, segment, header);
    }
    if (scan.bad > bad) log_bad(on, segment, scan.bad_offset, "damaged, or a torn tail");
  }
  free(window);
  segment->end = scan.end;
}

// Writes from before the crash may not be durable yet: they are synced first, then the footer is written.
static int write_tail(recovery *on, qkvi_segment *segment) {
  int error = qkvi_segment_use(on->storage, segment);
  if (error != 0) return error;
  const uint64_t bytes = qkvi_segment_tail_bytes(segment->headers_count);
  uint8_t *tail = qkvi_aligned(bytes);
  qkvi_segment_tail_make(tail, on->storage->store, segment->number, segment->end, segment->headers,
                         segment->headers_count);
  error = request_now(on, QKV_IO_SYNC, segment->file, 0, NULL, 0);
  if (error == 0) error = request_now(on, QKV_IO_WRITE, segment->file, segment->end, tail, bytes);
  if (error == 0) error = request_now(on, QKV_IO_SYNC, segment->file, 0, NULL, 0);
  if (error == 0) error = qkv_io_truncate(on->storage->io, segment->file, segment->end + bytes);
  free(tail);
  if (error == 0) segment->file_bytes = segment->end + bytes;
  segment->users--;
  return error;
}

// The summary lists only records that count: another copy may not be durable, and with a footer behind it the next
// start would take it for valid.
static void forget_dead(const recovery *on, qkvi_segment *segment) {
  uint64_t count = 0;
  for (uint64_t i = 0; i < segment->headers_count; i++) {
    const qkv_record_header *header = &segment->headers[i];
    qkvi_entry entry;
    if (qkvi_index_find(on->storage->index, header->record, &entry) && entry.segment == segment->slot &&
        entry.offset == header->offset)
      segment->headers[count++] = *header;
  }
  segment->headers_count = count;
}

// Seals segments without a footer, if anything in them is live.
static void seal_segments(recovery *on) {
  qkv_storage *storage = on->storage;
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    qkvi_segment *segment = storage->segments[i];
    if (segment == NULL || segment->state != QKVI_SEGMENT_SEALING) continue;
    forget_dead(on, segment);
    const bool failed = segment->live_records > 0 && write_tail(on, segment) != 0;
    segment->state = failed ? QKVI_SEGMENT_FAILED : QKVI_SEGMENT_SEALED;
    if (failed) continue;
    free(segment->headers);
    segment->headers = NULL;
  }
}

// A damaged header counts as none: the segment's records are read all the same. But a segment that is of a later
// version or of another store is not taken for dead and removed: opening fails.
static qkv_status check_header(recovery *on, const qkvi_segment_header *header, uint64_t number, qkv_error *error) {
  if (qkvi_segment_header_check(header, on->storage->store, number) == NULL) {
    if (header->epoch > on->epoch) on->epoch = header->epoch;
    return QKV_OK;
  }
  if (header->magic == QKVI_SEGMENT_MAGIC && header->version > QKVI_SEGMENT_VERSION)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "segment %" PRIu64 " has version %u, known is %u", number,
                    header->version, QKVI_SEGMENT_VERSION);
  if (qkvi_segment_header_check(header, 0, number) == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "segment %" PRIu64 " is not of the store that journal.qkv is of; move one of them away", number);
  return QKV_OK;
}

static qkv_status read_segment(recovery *on, uint64_t number, qkv_error *error) {
  qkv_storage *storage = on->storage;
  qkvi_segment *segment = qkvi_segment_add(storage, number, QKVI_SEGMENT_SEALED, 0);
  if (number >= storage->segment_next) storage->segment_next = number + 1;
  int code = qkvi_segment_use(storage, segment);
  if (code != 0) return failed(error, "a segment cannot be opened", code);
  code = qkv_io_size(storage->io, segment->file, &segment->file_bytes);
  if (code != 0) return failed(error, "a segment's size", code);
  segment->file_bytes = segment->file_bytes / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
  qkv_status status = QKV_OK;
  if (segment->file_bytes >= 2 * (uint64_t)QKV_STORAGE_BLOCK) {
    qkvi_segment_header *header = (qkvi_segment_header *)qkvi_aligned(QKV_STORAGE_BLOCK);
    if (request_now(on, QKV_IO_READ, segment->file, 0, header, QKV_STORAGE_BLOCK) == 0) {
      status = check_header(on, header, number, error);
    }
    free(header);
    if (status == QKV_OK && !read_sealed(on, segment)) {
      segment->state = QKVI_SEGMENT_SEALING;
      scan_records(on, segment);
    }
  }
  segment->users--;  // it is removed, if dead, when that is known
  return status;
}

// ---- The journal ----

static void note_name(void *context, const char *name) {
  recovery *on = context;
  uint64_t number;
  if (strcmp(name, "journal.qkv") == 0) on->has_journal = true;
  if (!qkvi_segment_parse_name(name, &number)) return;
  if (on->numbers_count == on->numbers_capacity) {
    on->numbers_capacity = on->numbers_capacity == 0 ? 64 : 2 * on->numbers_capacity;
    on->numbers = qkvi_checked(realloc(on->numbers, on->numbers_capacity * sizeof *on->numbers));
  }
  on->numbers[on->numbers_count++] = number;
}

// The size of a read of the journal: journal.piece_bytes, or an entry that is larger.
static const uint8_t *window_at(void *context, uint64_t offset, uint64_t size) {
  recovery *on = context;
  struct journal_window *window = &on->window;
  if (offset >= window->begin && offset - window->begin + size <= window->size)
    return window->bytes + (offset - window->begin);
  if (size > window->capacity || window->bytes == NULL) {
    free(window->bytes);
    window->capacity = size > on->storage->journal.piece_bytes ? size : on->storage->journal.piece_bytes;
    window->bytes = qkvi_aligned(window->capacity);
  }
  const uint64_t left = on->journal_bytes - offset;
  window->begin = offset;
  window->size = left < window->capacity ? left : window->capacity;
  window->error = request_now(on, QKV_IO_READ, on->storage->journal.file, offset, window->bytes, window->size);
  if (window->error == 0) return window->bytes;
  window->size = 0;
  return NULL;
}

// Later reads read the file anew, not the old window.
static qkvi_journal_source journal_source(recovery *on) {
  on->window.size = 0;
  return (qkvi_journal_source){.context = on, .size = on->journal_bytes, .at = window_at};
}

static qkv_status journal_failed(const recovery *on, qkv_status status, qkv_error *error) {
  return status == QKV_INTERNAL && on->window.error != 0 ? failed(error, "journal.qkv", on->window.error) : status;
}

static qkv_status open_journal(recovery *on, qkv_error *error) {
  qkvi_journal *journal = &on->storage->journal;
  int code = qkv_io_open(on->storage->io, "journal.qkv", false, &journal->file);
  if (code != 0) journal->file = -1;
  if (code == 0) code = qkv_io_size(on->storage->io, journal->file, &on->journal_bytes);
  if (code != 0) return failed(error, "journal.qkv", code);
  on->journal_bytes = on->journal_bytes / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
  const qkvi_journal_source source = journal_source(on);
  const qkv_status status = qkvi_journal_header_read(&source, &on->header, error);
  on->storage->store = on->header.store;
  on->epoch = on->header.epoch;
  return journal_failed(on, status, error);
}

static qkv_status scan_journal(recovery *on, void (*each)(void *context, const qkv_journal_entry *entry),
                               qkvi_journal_report *report, qkv_error *error) {
  const qkvi_journal_source source = journal_source(on);
  return journal_failed(on, qkvi_journal_scan(&source, &on->header, on->durable, each, on, report, error), error);
}

static void note_entry(void *context, const qkv_journal_entry *entry) {
  (void)qkvi_sessions_note(((recovery *)context)->sessions, entry);
}

// Determines the live sessions, by all entries.
static qkv_status note_entries(recovery *on, qkvi_journal_report *report, qkv_error *error) {
  const qkvi_journal_source source = journal_source(on);
  qkvi_sessions_destroy(&on->sessions);
  on->sessions = qkvi_sessions_create();
  const qkv_status status = qkvi_journal_durable(&source, &on->header, on->journal_seen, &on->durable, error);
  return status == QKV_OK ? scan_journal(on, note_entry, report, error) : journal_failed(on, status, error);
}

static bool opens(const qkv_journal_entry *entry) {
  return entry->kind == QKV_JOURNAL_SESSION_OPEN || entry->kind == QKV_JOURNAL_SESSION_FORK;
}

static void tell_entry(void *context, const qkv_journal_entry *entry) {
  recovery *on = context;
  const qkv_storage_restore *restore = on->restore;
  if (!qkvi_sessions_keep(on->sessions, entry) || restore == NULL || restore->entry == NULL) return;
  if (entry->kind >= QKV_JOURNAL_SESSION_OPEN && !qkvi_sessions_alive(on->sessions, entry->session)) return;
  if (restore->entry(restore->context, entry) || entry->kind == QKV_JOURNAL_SESSION_TRUNCATE) return;
  if (opens(entry)) qkvi_sessions_drop(on->sessions, entry->session);
  if (on->refused_count == on->refused_capacity) {
    on->refused_capacity = on->refused_capacity == 0 ? 64 : 2 * on->refused_capacity;
    on->refused = qkvi_checked(realloc(on->refused, on->refused_capacity * sizeof *on->refused));
  }
  on->refused[on->refused_count++] = entry->sequence;
}

// Scans all entries again, before or after the records are known: they must be the same, or nothing is done.
static qkv_status scan_again(recovery *on, void (*each)(void *context, const qkv_journal_entry *entry),
                             const qkvi_journal_report *before, qkv_error *error) {
  qkvi_journal_report report = {0};
  QKV_TRY(scan_journal(on, each, &report, error));
  if (report.last == before->last && report.end == before->end && report.bad == before->bad) return QKV_OK;
  return qkv_fail(error, QKV_INTERNAL, "journal.qkv is not the same each time that it is read");
}

// ---- Rewriting the journal ----

static void flush_output(recovery *on) {
  struct journal_output *output = &on->output;
  if (output->size > 0 && output->error == 0)
    output->error = request_now(on, QKV_IO_WRITE, output->file, output->offset, output->bytes, output->size);
  output->offset += output->size;
  output->size = 0;
}

static void write_entry(recovery *on, const qkv_journal_entry *entry) {
  struct journal_output *output = &on->output;
  qkv_journal_entry numbered = qkvi_entry_stored(entry);
  output->forks = output->forks || entry->kind == QKV_JOURNAL_SESSION_FORK;
  numbered.sequence = (on->epoch + 1) << QKVI_EPOCH_SHIFT | ++output->count;
  // All of it is durable before it can be seen.
  const qkvi_entry_header header =
      qkvi_entry_header_make(&numbered, on->storage->store, 0, output->offset + output->size);
  const uint64_t extent = qkvi_entry_extent(numbered.bytes);
  for (uint64_t from = 0, size; from < extent; from += size) {
    if (output->size == output->capacity) flush_output(on);
    const uint64_t left = extent - from, capacity = output->capacity - output->size;
    size = left < capacity ? left : capacity;
    qkvi_entry_copy(output->bytes + output->size, &header, &numbered, from, size);
    output->size += size;
  }
}

static void keep_entry(void *context, const qkv_journal_entry *entry) {
  recovery *on = context;
  const qkv_storage_restore *restore = on->restore;
  if (on->refused_next < on->refused_count && on->refused[on->refused_next] == entry->sequence) {
    on->refused_next++;
    if (!opens(entry)) return;  // heirs may need a session that was refused
  }
  if (!qkvi_sessions_keep(on->sessions, entry)) return;
  const bool may_go = entry->kind < QKV_JOURNAL_SESSION_OPEN && on->storage->stats.unread_segments == 0;
  if (!may_go || restore == NULL || restore->keep == NULL || restore->keep(restore->context, entry))
    write_entry(on, entry);
}

static void close_dropped(void *context, uint64_t session) {
  write_entry(context, &(qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_CLOSE, .session = session});
}

static int end_output(recovery *on) {
  struct journal_output *output = &on->output;
  flush_output(on);
  qkvi_journal_header_make(output->bytes, on->storage->store, on->epoch + 1,
                           (on->epoch + 1) << QKVI_EPOCH_SHIFT | output->count, output->forks);
  int code = output->error;
  if (code == 0)
    code = request_now(on, QKV_IO_WRITE, output->file, 0, output->bytes, 2 * sizeof(qkvi_journal_header));
  if (code == 0) code = request_now(on, QKV_IO_SYNC, output->file, 0, NULL, 0);
  if (code == 0) code = qkv_io_rename(on->storage->io, "journal.new", "journal.qkv");
  if (code == 0) code = qkv_io_sync_directory(on->storage->io);
  return code;
}

// Replaces the old journal, whose source is `before`, by the new one; NULL: there is none.
static qkv_status write_journal(recovery *on, const qkvi_journal_report *before, qkv_error *error) {
  qkv_storage *storage = on->storage;
  qkvi_journal *journal = &storage->journal;
  struct journal_output *output = &on->output;
  *output = (struct journal_output){.offset = 2 * sizeof(qkvi_journal_header), .capacity = journal->piece_bytes};
  int code = qkv_io_open(storage->io, "journal.new", true, &output->file);
  if (code != 0) return failed(error, "journal.new", code);
  output->bytes = qkvi_aligned(output->capacity);
  qkv_status status = before == NULL ? QKV_OK : scan_again(on, keep_entry, before, error);
  if (status == QKV_OK) {
    qkvi_sessions_dropped(on->sessions, close_dropped, on);
    code = end_output(on);
    if (code != 0) status = failed(error, "the journal cannot be written", code);
  }
  free(output->bytes);
  if (status != QKV_OK) {
    qkv_io_close(storage->io, output->file);
    return status;
  }
  if (journal->file >= 0) qkv_io_close(storage->io, journal->file);
  journal->file = output->file;
  journal->bytes = output->offset;
  journal->rewrite_at = qkvi_journal_rewrite_at(journal, journal->bytes);
  journal->forks = output->forks;
  journal->epoch = on->epoch + 1;
  journal->durable = journal->epoch << QKVI_EPOCH_SHIFT | output->count;
  storage->stats.journal_bytes = journal->bytes;
  storage->record_next = storage->session_next = journal->epoch << QKVI_EPOCH_SHIFT | 1;
  return QKV_OK;
}

// ---- What is alive ----

#define ORDER(field)                              \
  if (first->field != second->field) {            \
    return first->field < second->field ? -1 : 1; \
  }

// Of several at one place the highest number comes first, and of its copies the one in the oldest segment: only
// durable records are copied, so the original is valid where a copy may not be durable.
static int compare(const void *a, const void *b) {
  const qkvi_entry *first = &((const found_record *)a)->entry, *second = &((const found_record *)b)->entry;
  ORDER(session)
  ORDER(layer)
  ORDER(position)
  ORDER(kind)
  if (first->record != second->record) return first->record > second->record ? -1 : 1;
  ORDER(segment)
  ORDER(offset)
  return 0;
}

// Of copies of one record, which `first` begins, the one that counts: one with a footer behind it, where there is
// one. A copy without may have failed to become durable, and stay readable until the power fails.
static const found_record *best_copy(const recovery *on, const found_record *first, const found_record *end) {
  for (const found_record *copy = first; copy < end && copy->entry.record == first->entry.record; copy++) {
    if (on->storage->segments[copy->entry.segment]->state == QKVI_SEGMENT_SEALED) return copy;
  }
  return first;
}

// Keeps the found records of known sessions, one copy of each, in order. What an earlier process had unloaded goes.
static void sift_records(recovery *on) {
  uint64_t known = 0, count = 0;
  for (uint64_t i = 0; i < on->found_count; i++) {
    const qkvi_entry *entry = &on->found[i].entry;
    if (entry->kind != QKVI_RECORD_INDEX && qkvi_sessions_known(on->sessions, entry->session))
      on->found[known++] = on->found[i];
  }
  if (known > 0) qsort(on->found, known, sizeof *on->found, compare);
  for (uint64_t i = 0; i < known; i++) {
    if (i > 0 && on->found[i].entry.record == on->found[count - 1].entry.record) continue;
    on->found[count++] = *best_copy(on, &on->found[i], on->found + known);
  }
  on->found_count = count;
}

// Index of the first record of a session, or of a later one.
static uint64_t first_of(const recovery *on, uint64_t session) {
  uint64_t low = 0, high = on->found_count;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (on->found[middle].entry.session < session) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

static void add_to_view(recovery *on, found_record *found, uint32_t tokens, uint32_t distance) {
  if (on->view_count == on->view_capacity) {
    on->view_capacity = on->view_capacity == 0 ? 1024 : 2 * on->view_capacity;
    on->view = qkvi_checked(realloc(on->view, on->view_capacity * sizeof *on->view));
  }
  on->view[on->view_count++] = (view_record){.found = found, .tokens = tokens, .distance = distance};
}

// The winner of several at one place first. An own record belongs to the view's own history. Of inherited ones all
// rows that count are in the view, so the one that has most wins.
static int compare_view(const void *a, const void *b) {
  const view_record *one = a, *other = b;
  const qkvi_entry *first = &one->found->entry, *second = &other->found->entry;
  ORDER(layer)
  ORDER(position)
  ORDER(kind)
  if ((one->distance == 0) != (other->distance == 0)) return one->distance == 0 ? -1 : 1;
  if (one->distance > 0 && one->tokens != other->tokens) return one->tokens > other->tokens ? -1 : 1;
  if (one->distance != other->distance) return one->distance < other->distance ? -1 : 1;
  return first->record > second->record ? -1 : first->record < second->record;
}

static void gather_view(recovery *on, const qkvi_session *session) {
  qkvi_view view;
  uint32_t distance = 0;
  qkvi_view_init(&view, session);
  on->view_count = 0;
  do {
    const uint64_t owner = qkvi_session_number(view.owner);
    for (uint64_t i = first_of(on, owner); i < on->found_count && on->found[i].entry.session == owner; i++) {
      const uint32_t tokens = qkvi_view_tokens(&view, &on->found[i].entry);
      if (tokens > 0) add_to_view(on, &on->found[i], tokens, distance);
    }
    distance++;
  } while (qkvi_view_up(&view));
  qkvi_view_deinit(&view);
  // Own records alone are already in order.
  if (distance > 1 && on->view_count > 0) qsort(on->view, on->view_count, sizeof *on->view, compare_view);
}

static void tell_view(recovery *on, const qkvi_session *session) {
  const qkv_storage_restore *restore = on->restore;
  gather_view(on, session);
  const qkvi_entry *before = NULL;
  for (uint64_t i = 0; i < on->view_count; i++) {
    found_record *found = on->view[i].found;
    const qkvi_entry *entry = &found->entry;
    const bool same_place = before != NULL && before->layer == entry->layer && before->position == entry->position &&
                            before->kind == entry->kind;
    if (same_place) continue;
    before = entry;
    if (on->view[i].tokens > found->tokens) found->tokens = on->view[i].tokens;
    if (restore == NULL || restore->record == NULL) continue;
    qkv_record_info info = qkvi_entry_info(entry);
    info.meta.session = qkvi_session_number(session);
    info.meta.tokens = on->view[i].tokens;
    info.meta.codec = found->codec;
    info.meta.calibration = found->calibration;
    memcpy(info.meta.hash, found->hash, sizeof found->hash);
    restore->record(restore->context, &info);
  }
}

static void index_records(recovery *on) {
  qkv_storage *storage = on->storage;
  for (uint64_t i = 0; i < on->found_count; i++) {
    qkvi_entry *entry = &on->found[i].entry;
    entry->tokens = on->found[i].tokens;
    if (entry->tokens == 0) continue;
    qkvi_index_add(storage->index, entry);
    qkvi_segment_live(storage, storage->segments[entry->segment], (int64_t)entry->extent, 1);
    storage->stats.recovered_records++;
    storage->stats.recovered_bytes += entry->raw_bytes;
  }
}

static void settle_records(recovery *on) {
  const qkvi_session **live = NULL;
  sift_records(on);
  const size_t count = qkvi_sessions_live(on->sessions, &live);
  for (size_t i = 0; i < count; i++) tell_view(on, live[i]);
  free((void *)live);
  index_records(on);
}

static int compare_numbers(const void *a, const void *b) {
  const uint64_t first = *(const uint64_t *)a, second = *(const uint64_t *)b;
  return first < second ? -1 : first > second;
}

static qkv_status read_segments(recovery *on, qkv_error *error) {
  // In ascending order, so that slots are, too: the older segment has the smaller slot.
  if (on->numbers_count > 0) qsort(on->numbers, on->numbers_count, sizeof *on->numbers, compare_numbers);
  if (on->numbers_count > QKVI_SEGMENTS_MAX)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "there are %" PRIu64 " segments, at most %" PRIu32,
                    on->numbers_count, QKVI_SEGMENTS_MAX);
  for (uint64_t i = 0; i < on->numbers_count; i++) QKV_TRY(read_segment(on, on->numbers[i], error));
  return QKV_OK;
}

static qkv_status read_all(recovery *on, qkv_error *error) {
  qkv_storage *storage = on->storage;
  qkvi_journal_report report = {0};
  QKV_TRY(open_journal(on, error));
  QKV_TRY(read_segments(on, error));
  if (storage->stats.unread_segments > 0) on->epoch += EPOCHS_UNKNOWN;
  QKV_TRY(note_entries(on, &report, error));
  // A transfer error may leave the medium intact, and much depends on it: it is read once more.
  if (report.bad > 0) QKV_TRY(note_entries(on, &report, error));
  storage->stats.sessions_given_up = qkvi_sessions_give_up(on->sessions, report.lost_before);
  if (report.bad > 0 || storage->stats.sessions_given_up > 0) {
    storage->stats.bad_entries = report.bad;
    qkv_log(QKV_LOG_ERROR, "the journal has lost entries that were durable; sessions that they may concern are gone",
            "{s:I, s:I}", "bad", (json_int_t)report.bad, "sessions", (json_int_t)storage->stats.sessions_given_up);
  }
  QKV_TRY(scan_again(on, tell_entry, &report, error));
  settle_records(on);
  seal_segments(on);
  return write_journal(on, &report, error);
}

qkv_status qkvi_recover(qkv_storage *storage, const qkv_storage_restore *restore, qkv_error *error) {
  recovery on = {.storage = storage, .restore = restore};
  const double begin = qkv_now_s();
  storage->segment_next = 1;
  storage->journal.file = -1;
  const int code = qkv_io_list(storage->io, note_name, &on);
  qkv_status status = QKV_OK;
  (void)qkv_io_remove(storage->io, "journal.new");
  if (code != 0) {
    status = failed(error, "the directory cannot be listed", code);
  } else if (on.has_journal) {
    status = read_all(&on, error);
  } else if (on.numbers_count > 0) {
    status =
        qkv_fail(error, QKV_FAILED_PRECONDITION,
                 "there are %" PRIu64 " segments and no journal.qkv; move them away to begin anew", on.numbers_count);
  } else {
    if (storage->store == 0 && getrandom(&storage->store, sizeof storage->store, 0) != sizeof storage->store) abort();
    storage->store |= 1;  // never 0
    on.sessions = qkvi_sessions_create();
    status = write_journal(&on, NULL, error);
  }
  for (uint32_t i = 0; status == QKV_OK && i < storage->segments_capacity; i++) {
    if (storage->segments[i] != NULL) qkvi_segment_reap(storage, storage->segments[i]);
  }
  storage->stats.recovery_read_bytes = on.read_bytes;
  storage->stats.recovery_s = qkv_now_s() - begin;
  if (status == QKV_OK) {
    storage->sessions = on.sessions;
    on.sessions = NULL;
    qkvi_sessions_run(storage->sessions, qkvi_sweep, storage);
    if (restore != NULL && restore->reach != NULL)
      qkvi_sessions_tell_reach(storage->sessions, restore->reach, restore->context);
  }
  qkvi_sessions_destroy(&on.sessions);
  free(on.view);
  free(on.window.bytes);
  free(on.refused);
  free(on.numbers);
  free(on.found);
  return status;
}
