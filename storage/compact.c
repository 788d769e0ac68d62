// Compaction: live records of a mostly dead segment are read, checked and put again, with the same numbers. Once they
// are durable in their new place the index points there, and the segment is removed when no live record is left.
#include <assert.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "storage/internal.h"

// Records under way at a time, in bytes (or one); the period of the rate; retries of a bad read.
enum { MOVING_MAX = 4 << 20, TICK_MS = 20, ATTEMPTS_MAX = 3 };
// With headroom for fewer than two segments, those are worth compacting that are not mostly dead.
static const double PRESSED_SHARE = 0.9;
// Every start seals the open segments: more segments than this of less than an eighth of their size are merged.
enum { SMALL_MAX = 16 };

static double live_share(const qkvi_segment *segment) {
  return (double)segment->live_bytes / (double)segment->file_bytes;
}

static bool is_candidate(const qkvi_segment *segment) {
  // A failed one is valid as far as it was read or written; it has no footer.
  return segment != NULL && segment->live_records > 0 && !segment->unmovable &&
         (segment->state == QKVI_SEGMENT_SEALED || segment->state == QKVI_SEGMENT_FAILED) &&
         segment->unsynced.first == NULL && segment->syncing.first == NULL && segment->placing == 0 &&
         segment->writing == 0;
}

static bool is_pressed(const qkv_storage *storage) {
  return storage->config.bytes_max > 0 && storage->free_bytes < 2 * storage->config.segment_bytes;
}

static qkvi_segment *worst_below(const qkv_storage *storage, double share, uint64_t number_max) {
  qkvi_segment *worst = NULL;
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    qkvi_segment *segment = storage->segments[i];
    if (!is_candidate(segment) || segment->number >= number_max || live_share(segment) >= share) continue;
    if (worst == NULL || live_share(segment) < live_share(worst)) worst = segment;
  }
  return worst;
}

static qkvi_segment *smallest_of_many(const qkv_storage *storage) {
  qkvi_segment *smallest = NULL;
  unsigned small = 0;
  for (uint32_t i = 0; i < storage->segments_capacity; i++) {
    qkvi_segment *segment = storage->segments[i];
    if (!is_candidate(segment) || segment->file_bytes >= storage->config.segment_bytes / 8) continue;
    small++;
    if (smallest == NULL || segment->file_bytes < smallest->file_bytes) smallest = segment;
  }
  return small > SMALL_MAX ? smallest : NULL;
}

static void answer_asked(qkv_storage *storage, qkv_status status) {
  qkvi_compaction *compaction = &storage->compaction;
  qkvi_compact_request *asked = compaction->asked;
  compaction->asked = asked->next;
  if (compaction->asked == NULL) compaction->asked_last = &compaction->asked;
  asked->done(asked->context, status);
  free(asked);
}

static qkvi_segment *choose(qkv_storage *storage) {
  qkvi_compaction *compaction = &storage->compaction;
  while (compaction->asked != NULL) {
    qkvi_segment *segment = NULL;
    if (!compaction->aborted) segment = worst_below(storage, compaction->asked->live_share, compaction->asked->below);
    if (segment != NULL) return segment;
    answer_asked(storage, compaction->aborted ? QKV_RESOURCE_EXHAUSTED : QKV_OK);
  }
  if (storage->config.compact_bytes_per_s == 0 || storage->ending || compaction->aborted) return NULL;
  const double share = is_pressed(storage) ? PRESSED_SHARE : storage->config.compact_below;
  qkvi_segment *worst = worst_below(storage, share, UINT64_MAX);
  return worst != NULL ? worst : smallest_of_many(storage);
}

static void finish_segment(qkv_storage *storage) {
  qkvi_compaction *compaction = &storage->compaction;
  qkvi_segment *segment = storage->segments[compaction->segment];
  compaction->segment = QKVI_NO_SEGMENT;
  qkvi_end_walk(storage);
  free(compaction->records);
  compaction->records = NULL;
  qkvi_stat_add(storage, &storage->stats.compactions, 1);
  // A segment with live records that could not be moved would be tried again at once, unless it is no candidate now.
  if (segment->live_records > 0 && !segment->unmovable) compaction->aborted = true;
  segment->users--;
  qkvi_segment_reap(storage, segment);
  uv_timer_stop(&storage->compact_tick);
}

static void retry(uv_timer_t *timer) {
  qkv_storage *storage = timer->data;
  storage->compaction.aborted = false;
  qkvi_compact_consider(storage);
}

// A full disk may have space after some time, a failing one may work. Called again it does not delay the retry.
static void retry_later(qkv_storage *storage) {
  if (!storage->compaction.aborted || storage->ending || storage->config.compact_bytes_per_s == 0) {
    uv_timer_stop(&storage->compact_tick);
  } else if (uv_is_active((uv_handle_t *)&storage->compact_tick) == 0) {
    uv_timer_start(&storage->compact_tick, retry, storage->compaction.retry_ms, 0);
  }
}

// All records of the segment can be found now; or not, then it stays.
static void move_listed(void *context, qkv_status status) {
  qkv_storage *storage = context;
  qkvi_compaction *compaction = &storage->compaction;
  qkvi_segment *segment = storage->segments[compaction->segment];
  compaction->listing = false;
  if (status != QKV_OK) segment->unmovable = true;
  compaction->records = qkvi_checked(malloc((segment->live_records + 1) * sizeof *compaction->records));
  compaction->count = compaction->next = 0;
  for (uint32_t place = 0; place < qkvi_index_places(storage->index); place++) {
    qkvi_entry entry;
    if (qkvi_index_at(storage->index, place, &entry) && entry.segment == segment->slot)
      compaction->records[compaction->count++] = entry.record;
  }
  // Without a rate only requested compaction is done, at once. The loop's clock may be late, and the first share
  // early.
  uv_update_time(&storage->loop);
  if (storage->config.compact_bytes_per_s > 0)
    uv_timer_start(&storage->compact_tick, qkvi_compact_tick, TICK_MS, TICK_MS);
  qkvi_compact_go(storage);
}

void qkvi_compact_consider(qkv_storage *storage) {
  qkvi_compaction *compaction = &storage->compaction;
  if (compaction->segment != QKVI_NO_SEGMENT) return;
  qkvi_segment *segment = choose(storage);
  if (segment == NULL) {
    retry_later(storage);
    return;
  }
  compaction->segment = segment->slot;
  compaction->listing = true;
  segment->users++;
  qkvi_begin_walk(storage, segment->slot, move_listed, storage);
}

// ---- One record ----

typedef struct move_read {
  qkvi_read read;
  uint64_t extent;
} move_read;

static void move_ended(qkv_storage *storage, uint64_t extent) {
  qkvi_compaction *compaction = &storage->compaction;
  compaction->moving--;
  compaction->moving_bytes -= extent;
  qkvi_compact_go(storage);
}

static bool lies_at(const qkv_storage *storage, uint64_t record, uint32_t segment, uint64_t offset) {
  qkvi_entry entry;
  return qkvi_index_find(storage->index, record, &entry) && entry.segment == segment && entry.offset == offset;
}

// A record that is damaged on the disk is dropped: a later read is a miss.
static void give_up_record(qkv_storage *storage, const qkvi_read *read, const char *wrong) {
  qkv_log(QKV_LOG_ERROR, "compaction found a bad record and drops it", "{s:I, s:I, s:I, s:s}", "record",
          (json_int_t)read->record, "segment", (json_int_t)read->number, "offset", (json_int_t)read->offset, "error",
          wrong);
  qkvi_stat_add(storage, &storage->stats.bad_records, 1);
  if (lies_at(storage, read->record, read->slot, read->offset)) qkvi_forget(storage, read->record);
}

// A read that fails now may succeed at another time: the record stays, and so does its segment.
static void leave_record(qkv_storage *storage, const qkvi_read *read, const char *wrong) {
  qkv_log(QKV_LOG_ERROR, "compaction cannot read a record and leaves it", "{s:I, s:I, s:I, s:s}", "record",
          (json_int_t)read->record, "segment", (json_int_t)read->number, "offset", (json_int_t)read->offset, "error",
          wrong);
  qkvi_entry entry;
  if (qkvi_index_find(storage->index, read->record, &entry)) storage->segments[entry.segment]->unmovable = true;
}

static void move_arrived(qkvi_read *read) {
  qkv_storage *storage = read->storage;
  const move_read *move = (const move_read *)read;
  const uint64_t extent = move->extent;
  const char *wrong = NULL;
  storage->reads--;
  const qkv_record_header *header = (const qkv_record_header *)read->bytes;
  const bool unread = read->status == QKV_OK && read->error != 0;
  if (unread) {
    wrong = strerror(read->error);
  } else if (read->status == QKV_OK) {
    wrong = qkvi_record_check(header, read->store, read->number, read->offset);
    if (wrong == NULL && header->record != read->record) wrong = "another record lies there";
    if (wrong == NULL && qkvi_record_extent(header->stored_bytes) != read->extent) wrong = "impossible size";
    if (wrong == NULL) wrong = qkvi_record_check_payload(header, header + 1);
  }
  if (wrong != NULL && read->attempts++ < ATTEMPTS_MAX) {
    storage->reads++;
    qkvi_read_message(storage, &read->message);
    return;
  }
  if (unread) {
    leave_record(storage, read, wrong);
  } else if (wrong != NULL) {
    give_up_record(storage, read, wrong);
  }
  if (wrong != NULL || read->status != QKV_OK) {
    free(read->bytes);
    free(read);
    move_ended(storage, extent);
    return;
  }
  qkvi_put *put = qkvi_checked(calloc(1, sizeof *put));
  *put = (qkvi_put){.storage = storage,
                    .record = read->record,
                    .header = *header,
                    .stored = (const uint8_t *)(header + 1),
                    .owned = read->bytes,
                    .segment = QKVI_NO_SEGMENT,
                    .moved = true,
                    .old_segment = read->slot,
                    .old_offset = read->offset};
  free(read);
  qkvi_put_message(storage, &put->message);
  qkvi_place(storage);
}

void qkvi_compact_moved(qkv_storage *storage, qkvi_put *put, qkv_status status) {
  const uint64_t extent = qkvi_record_extent(put->header.stored_bytes);
  const bool lives = lies_at(storage, put->record, put->old_segment, put->old_offset);
  if (status == QKV_OK && lives) {
    qkvi_segment *from = storage->segments[put->old_segment], *to = storage->segments[put->segment];
    pthread_mutex_lock(&storage->lock);
    qkvi_index_move(storage->index, put->record, put->segment, put->header.offset);
    storage->stats.compacted_bytes += extent;
    pthread_mutex_unlock(&storage->lock);
    qkvi_segment_live(storage, to, (int64_t)extent, 1);
    qkvi_segment_live(storage, from, -(int64_t)extent, -1);
  } else if (status != QKV_OK) {
    storage->compaction.aborted = true;
  }
  move_ended(storage, extent);
}

// ---- Pace ----

void qkvi_compact_go(qkv_storage *storage) {
  qkvi_compaction *compaction = &storage->compaction;
  if (compaction->going || compaction->listing || compaction->segment == QKVI_NO_SEGMENT) return;
  compaction->going = true;
  const bool unpaced = compaction->asked != NULL || is_pressed(storage);
  while (compaction->next < compaction->count && !compaction->aborted && !storage->ending) {
    if (compaction->moving_bytes >= MOVING_MAX || (!unpaced && compaction->allowance <= 0)) break;
    const uint64_t record = compaction->records[compaction->next++];
    qkvi_entry entry;
    if (!qkvi_index_find(storage->index, record, &entry) || entry.segment != compaction->segment) continue;
    move_read *move = qkvi_checked(calloc(1, sizeof *move));
    move->extent = entry.extent;
    move->read = (qkvi_read){.storage = storage, .record = record, .arrived = move_arrived};
    compaction->moving++;
    compaction->moving_bytes += move->extent;
    compaction->allowance -= (int64_t)move->extent;
    storage->reads++;
    qkvi_read_message(storage, &move->read.message);
  }
  compaction->going = false;
  const bool over = compaction->next == compaction->count || compaction->aborted || storage->ending;
  if (compaction->moving == 0 && over) {
    finish_segment(storage);
    qkvi_compact_consider(storage);
  } else if (compaction->moving > 0) {
    qkvi_place(storage);
  }
}

void qkvi_compact_tick(uv_timer_t *timer) {
  qkv_storage *storage = timer->data;
  const int64_t share = (int64_t)(storage->config.compact_bytes_per_s / (1000 / TICK_MS));
  qkvi_compaction *compaction = &storage->compaction;
  if (compaction->allowance < share) compaction->allowance += share;
  qkvi_compact_go(storage);
}

void qkvi_compact_message(qkv_storage *storage, qkvi_message *message) {
  qkvi_compact_request *asked = (qkvi_compact_request *)message;
  asked->next = NULL;
  asked->below = storage->segment_next;
  storage->compaction.aborted = false;
  *storage->compaction.asked_last = asked;
  storage->compaction.asked_last = &asked->next;
  qkvi_compact_consider(storage);
  qkvi_compact_go(storage);
}
