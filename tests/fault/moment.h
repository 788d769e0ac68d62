// A storage over a disk that is held, and completes requests one by one: what tests of single faults do with it.
#ifndef QKV_TESTS_FAULT_MOMENT_H
#define QKV_TESTS_FAULT_MOMENT_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/base/log.h"
#include "storage/internal.h"
#include "tests/fault/disk.h"

enum { MIB = 1 << 20, SEGMENT = 16 << 20, SMALL = 1000, FULL = MIB - sizeof(qkv_record_header), PIECE = 16 << 10 };

typedef struct moment {
  fault_disk *disk;
  qkv_storage *storage;
  uint64_t session;
  size_t told;     // records, by the last opening
  size_t entries;  // of the journal
} moment;

// A record that was put.
typedef struct piece {
  uint64_t number, size;
  uint8_t *bytes;
  bool ended, settled;  // written() has been called; nothing more will be
  qkv_status status;    // the last one
} piece;

// ---- Doing ----

static inline void count_record(void *context, const qkv_record_info *info) {
  (void)info;
  ((moment *)context)->told++;
}

// Models, the first of which has one byte.
static inline bool count_entry(void *context, const qkv_journal_entry *entry) {
  moment *on = context;
  const uint8_t *payload = entry->payload;
  if (entry->kind == QKV_JOURNAL_MODEL) {
    for (uint64_t i = 0; i < entry->bytes; i++) assert_int_equal(payload[i], 1 + on->entries);
    on->entries++;
  }
  return true;
}

static inline qkv_status try_open(moment *on, uint64_t compact_bytes_per_s, qkv_error *error) {
  qkv_storage_config config;
  qkv_storage_config_init(&config);
  config.directory = "";
  config.segment_bytes = SEGMENT;
  config.compact_bytes_per_s = compact_bytes_per_s;
  config.sync_ms = INT64_C(1) << 40;
  config.encoders = 0;
  config.compress = false;
  on->storage = qkvi_storage_create(&config);
  on->storage->io = fault_disk_attach(on->disk, &on->storage->loop, 32);
  on->storage->journal.piece_bytes = on->storage->journal.batch_max = PIECE;
  on->storage->compaction.retry_ms = 10;
  on->told = on->entries = 0;
  const qkv_storage_restore restore = {.context = on, .record = count_record, .entry = count_entry};
  return qkvi_storage_open_over(on->storage, &restore, error);
}

static inline void open_storage_with(moment *on, uint64_t compact_bytes_per_s) {
  qkv_error error = {0};
  if (try_open(on, compact_bytes_per_s, &error) != QKV_OK) fail_msg("%s", error.text);
}

static inline void open_storage(moment *on) {
  open_storage_with(on, 0);
}

// Everything that can happen while the disk is held.
static inline void turn(moment *on) {
  for (int i = 0; i < 8; i++) qkvi_storage_turn(on->storage, false);
}

static inline void note_done(void *context, qkv_status status) {
  *(qkv_status *)context = status;
}

static inline qkv_status journal_bytes(moment *on, qkv_journal_kind kind, const void *payload, uint64_t bytes) {
  qkv_status status = QKV_CANCELLED;  // which it never is
  assert_int_equal(qkv_storage_journal(on->storage, kind, on->session, payload, bytes, note_done, &status, NULL),
                   QKV_OK);
  while (status == QKV_CANCELLED) qkvi_storage_turn(on->storage, true);
  return status;
}

static inline qkv_status journal(moment *on, qkv_journal_kind kind) {
  return journal_bytes(on, kind, "x", 1);
}

static inline void note_written(void *context, uint64_t record, qkv_status status) {
  piece *made = context;
  assert_true(!made->ended && record == made->number);
  made->ended = true;
  made->settled = status != QKV_OK;
  made->status = status;
}

static inline void note_durable(void *context, uint64_t record, qkv_status status) {
  piece *made = context;
  assert_true(made->ended && !made->settled && record == made->number);
  made->settled = true;
  made->status = status;
}

static inline void put(moment *on, piece *made, uint64_t position, uint64_t size) {
  *made = (piece){.size = size, .bytes = malloc(size)};
  assert_non_null(made->bytes);
  memset(made->bytes, (int)(1 + position % 255), size);
  const qkv_storage_put_request request = {.meta = {.session = on->session, .position = position, .tokens = 1},
                                           .payload = made->bytes,
                                           .bytes = size,
                                           .sync_now = true,
                                           .written = note_written,
                                           .durable = note_durable,
                                           .context = made};
  assert_int_equal(qkv_storage_put(on->storage, &request, &made->number, NULL), QKV_OK);
  turn(on);
}

static inline qkv_status settle(moment *on, const piece *made) {
  while (!made->settled) qkvi_storage_turn(on->storage, true);
  return made->status;
}

// Checks that the record exists and has its bytes.
static inline void check(moment *on, const piece *made) {
  uint8_t *bytes = malloc(made->size);
  assert_non_null(bytes);
  qkv_status status = QKV_CANCELLED;
  qkv_storage_read(on->storage, made->number, bytes, made->size, note_done, &status);
  while (status == QKV_CANCELLED) qkvi_storage_turn(on->storage, true);
  assert_int_equal(status, QKV_OK);
  assert_memory_equal(bytes, made->bytes, made->size);
  free(bytes);
}

static inline qkv_status compact(moment *on, double live_share) {
  qkv_status status = QKV_CANCELLED;
  qkv_storage_compact(on->storage, live_share, note_done, &status);
  while (status == QKV_CANCELLED) qkvi_storage_turn(on->storage, true);
  return status;
}

static inline void free_pieces(piece *pieces, size_t count) {
  for (size_t i = 0; i < count; i++) free(pieces[i].bytes);
}

static inline void keep_buffers(moment *on, int count) {
  for (int left = QKVI_WRITE_BUFFERS; left > count; left--)
    on->storage->free_buffers = on->storage->free_buffers->next;
}

// ---- Life ----

static inline void begin(moment *on, uint64_t seed) {
  *on = (moment){.disk = fault_disk_create(seed)};
  open_storage(on);
  on->session = qkv_storage_session_number(on->storage);
  assert_int_equal(journal(on, QKV_JOURNAL_SESSION_OPEN), QKV_OK);
}

static inline void finish(moment *on) {
  qkv_storage_close(&on->storage);
  fault_disk_destroy(&on->disk);
}

#endif
