// The storage on a real directory, on both drivers: records come back, across restarts; closed or cut ones do not;
// limits refuse; damage is detected.
#include "storage/storage.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/storage/fixture.h"

static void puts_come_back(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  static const size_t sizes[] = {1, 127, 4096 - 128, 4096, 70001, 1 << 20, (1 << 20) + 5, 3000001};
  uint64_t records[8];
  for (size_t i = 0; i < 8; i++) records[i] = scene_put(on, session, 0, 64 * i, sizes[i]);
  for (size_t i = 0; i < 8; i++) scene_check(on, session, records[i], 64 * i, sizes[i]);
  const qkv_storage_stats stats = scene_stats(on);
  assert_int_equal(stats.records, 8);
  assert_int_equal(stats.puts, 8);
  assert_true(stats.compressed >= 2 && stats.compressed < 8);
  assert_int_equal(stats.dirty_bytes, 0);
  scene_close(on);

  scene_open(on);
  assert_int_equal(on->record_count, 8);
  for (size_t i = 0; i < 8; i++) {
    assert_int_equal(on->records[i].record, records[i]);
    assert_int_equal(on->records[i].bytes, sizes[i]);
    assert_int_equal(on->records[i].meta.position, 64 * i);
    scene_check(on, session, records[i], 64 * i, sizes[i]);
  }
  // Numbers of another run are larger.
  assert_true(scene_put(on, session, 1, 0, 100) > records[7]);
  assert_true(qkv_storage_session_number(on->storage) > session);
}

static void reads_say_what_is_wrong(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on), record = scene_put(on, session, 0, 0, 5000);
  uint8_t buffer[5001];
  qkv_record_info info;
  assert_int_equal(qkv_storage_find(on->storage, record, &info), QKV_OK);
  assert_int_equal(info.bytes, 5000);
  assert_int_equal(info.meta.kind, 1);
  assert_int_equal(qkv_storage_find(on->storage, record + 1, &info), QKV_NOT_FOUND);
  assert_int_equal(scene_read(on, record + 1, buffer, 5000), QKV_NOT_FOUND);
  assert_int_equal(scene_read(on, record, buffer, 5001), QKV_INVALID_ARGUMENT);
  assert_int_equal(scene_read(on, record, buffer, 5000), QKV_OK);
}

static void puts_are_checked(void **state) {
  scene *on = *state;
  scene_open(on);
  uint64_t record;
  qkv_record_meta meta = {.session = 1, .tokens = 64};
  assert_int_equal(scene_put_status(on, &meta, 5 << 20, false, &record), QKV_INVALID_ARGUMENT);
  meta.tokens = 0;
  assert_int_equal(scene_put_status(on, &meta, 10, false, &record), QKV_INVALID_ARGUMENT);
  meta.tokens = QKV_RECORD_TOKENS_MAX + 1;
  assert_int_equal(scene_put_status(on, &meta, 10, false, &record), QKV_INVALID_ARGUMENT);
  meta.tokens = 2;
  meta.layer = QKV_RECORD_LAYERS_MAX;
  assert_int_equal(scene_put_status(on, &meta, 10, false, &record), QKV_INVALID_ARGUMENT);
  meta.layer = 0;
  meta.kind = QKV_RECORD_KINDS;
  assert_int_equal(scene_put_status(on, &meta, 10, false, &record), QKV_INVALID_ARGUMENT);
  meta.kind = 0;
  meta.position = UINT64_MAX - 1;
  assert_int_equal(scene_put_status(on, &meta, 10, false, &record), QKV_INVALID_ARGUMENT);
  qkv_error error = {0};
  assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_CLOSE, 1, NULL, 0, NULL, NULL, &error),
                   QKV_INVALID_ARGUMENT);
}

static void config_is_checked(void **state) {
  scene *on = *state;
  const qkv_storage_config good = on->config;
  for (int i = 0; i < 7; i++) {
    qkv_error error = {0};
    on->config = good;
    if (i == 0) on->config.directory = "";
    if (i == 1) on->config.segment_bytes = (4 << 20) + 1;
    if (i == 2) on->config.bytes_max = 3 * on->config.segment_bytes;
    if (i == 3) on->config.io = "magic";
    if (i == 4) on->config.depth = 0;
    if (i == 5) on->config.open_files_max = 1;
    if (i == 6) on->config.compact_below = 2;
    assert_int_equal(scene_try_open(on, &error), QKV_INVALID_ARGUMENT);
    assert_true(error.text[0] != '\0');
  }
  on->config = good;
}

static void sessions_close_for_ever(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t gone = scene_session(on), stays = scene_session(on);
  const uint64_t first = scene_put(on, gone, 0, 0, 9000), second = scene_put(on, stays, 0, 0, 9000);
  uint8_t buffer[9000];
  assert_int_equal(scene_close_session(on, gone), QKV_OK);
  assert_int_equal(scene_read(on, first, buffer, 9000), QKV_NOT_FOUND);
  scene_close(on);
  for (int round = 0; round < 2; round++) {
    scene_open(on);
    assert_int_equal(on->record_count, 1);
    assert_int_equal(on->records[0].record, second);
    assert_int_equal(on->entry_count, 1);
    assert_int_equal(on->entries[0].session, stays);
    assert_memory_equal(on->texts[0], "open", 4);
    assert_int_equal(scene_read(on, first, buffer, 9000), QKV_NOT_FOUND);
    scene_close(on);
  }
}

static void records_of_unknown_sessions_are_dead(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t record = scene_put(on, 77, 0, 0, 4000);
  scene_check(on, 77, record, 0, 4000);
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->record_count, 0);
  assert_int_equal(scene_stats(on).segments, 0);
}

static void truncation_cuts(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  uint64_t records[2][4];
  for (uint32_t layer = 0; layer < 2; layer++) {
    for (uint64_t i = 0; i < 4; i++) records[layer][i] = scene_put(on, session, layer, 64 * i, 2000);
  }
  uint8_t buffer[2000];
  qkv_record_info info;
  assert_int_equal(scene_truncate(on, session, 1, 100), QKV_OK);
  assert_int_equal(scene_read(on, records[1][2], buffer, 2000), QKV_NOT_FOUND);
  assert_int_equal(qkv_storage_find(on->storage, records[1][1], &info), QKV_OK);
  assert_int_equal(info.meta.tokens, 36);
  // A record that is put behind the cut counts.
  const uint64_t again = scene_put(on, session, 1, 64, 2000);
  scene_close(on);

  scene_open(on);
  assert_int_equal(on->entry_count, 2);
  assert_int_equal(on->entries[1].kind, QKV_JOURNAL_SESSION_TRUNCATE);
  assert_int_equal(on->entries[1].position, 100);
  assert_int_equal(on->record_count, 6);
  const uint64_t wanted[] = {records[0][0], records[0][1], records[0][2], records[0][3], records[1][0], again};
  for (size_t i = 0; i < 6; i++) {
    assert_int_equal(on->records[i].record, wanted[i]);
    assert_int_equal(on->records[i].meta.tokens, 64);
  }
  assert_int_equal(scene_truncate(on, session, QKV_LAYER_ALL, 70), QKV_OK);
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->record_count, 4);
  assert_int_equal(on->records[1].meta.tokens, 6);
  assert_int_equal(on->records[3].record, again);
}

static void the_journal_keeps_what_counts(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on), gone = scene_session(on);
  enum { LARGE = 4 << 20 };
  char *note = calloc(1, LARGE);
  assert_non_null(note);
  for (char i = 'a'; i < 'a' + 24; i++) {  // 96 MiB: it is rewritten meanwhile
    memset(note, i, 8);
    const uint64_t of = i % 2 == 0 ? session : gone;
    assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_NOTE, of, note, LARGE, NULL, NULL, NULL),
                     QKV_OK);
    if (i == 'c') assert_int_equal(scene_close_session(on, gone), QKV_OK);
  }
  for (uint64_t i = 0; i < 10; i++) assert_int_equal(scene_truncate(on, session, 1, 500 - i), QKV_OK);
  assert_int_equal(scene_truncate(on, session, 2, 600), QKV_OK);
  assert_true(scene_stats(on).journal_bytes < UINT64_C(80) << 20);
  assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_MODEL, 0, "model", 5, NULL, NULL, NULL), QKV_OK);
  free(note);
  scene_close(on);
  for (int round = 0; round < 2; round++) {
    scene_open(on);
    assert_int_equal(on->entry_count, 5);
    assert_int_equal(on->entries[0].kind, QKV_JOURNAL_SESSION_OPEN);
    assert_int_equal(on->entries[1].kind, QKV_JOURNAL_SESSION_NOTE);
    assert_memory_equal(on->texts[1], "xxxxxxxx", 8);
    assert_int_equal(on->entries[2].position, 491);
    assert_int_equal(on->entries[3].position, 600);
    assert_int_equal(on->entries[4].kind, QKV_JOURNAL_MODEL);
    scene_close(on);
  }
}

typedef struct awaited {
  pthread_mutex_t lock;
  pthread_cond_t ended;
  bool done;
  qkv_status status;
} awaited;

static void note_ended(void *context, qkv_status status) {
  awaited *on = context;
  pthread_mutex_lock(&on->lock);
  on->status = status;
  on->done = true;
  pthread_cond_signal(&on->ended);
  pthread_mutex_unlock(&on->lock);
}

// Larger than one write; the payload stays the caller's until it is durable.
static void a_long_entry_is_written_from_where_it_lies(void **state) {
  scene *on = *state;
  enum { LARGE = 9 << 20 };
  awaited wait = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
  uint8_t *rest = malloc(LARGE);
  assert_non_null(rest);
  scene_fill(rest, LARGE, 3, false);
  scene_open(on);
  qkv_journal_entry entry = {
      .kind = QKV_JOURNAL_CALIBRATION, .payload = "begins", .bytes = 6, .rest = rest, .rest_bytes = LARGE};
  assert_int_equal(qkv_storage_journal_long(on->storage, &entry, note_ended, &wait, NULL), QKV_OK);
  assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_MODEL, 0, "behind", 6, NULL, NULL, NULL), QKV_OK);
  pthread_mutex_lock(&wait.lock);
  while (!wait.done) pthread_cond_wait(&wait.ended, &wait.lock);
  pthread_mutex_unlock(&wait.lock);
  assert_int_equal(wait.status, QKV_OK);
  entry.rest_bytes = QKV_JOURNAL_PAYLOAD_MAX;
  assert_int_equal(qkv_storage_journal_long(on->storage, &entry, note_ended, &wait, NULL), QKV_INVALID_ARGUMENT);
  scene_close(on);
  for (int round = 0; round < 2; round++) {  // its checksum is verified, and it is rewritten
    scene_open(on);
    assert_int_equal(on->entry_count, 2);
    assert_int_equal(on->entries[0].bytes, 6 + LARGE);
    assert_memory_equal(on->texts[0], "begins", 6);
    assert_memory_equal(on->texts[0] + 6, rest, sizeof on->texts[0] - 6);
    assert_memory_equal(on->texts[1], "behind", 6);
    scene_close(on);
  }
  free(rest);
}

static void entries_that_nobody_needs_go(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  const uint64_t record = scene_put(on, session, 0, 0, 3000);
  assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_CALIBRATION, 0, "old", 3, NULL, NULL, NULL), QKV_OK);
  assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_CALIBRATION, 0, "new", 3, NULL, NULL, NULL), QKV_OK);
  assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_NOTE, session, "old", 3, NULL, NULL, NULL),
                   QKV_OK);
  scene_close(on);
  on->unwanted = "old";
  scene_open(on);
  assert_int_equal(on->entry_count, 4);  // reported once more
  scene_close(on);
  on->unwanted = NULL;
  scene_open(on);
  assert_int_equal(on->entry_count, 3);
  assert_int_equal(on->entries[0].kind, QKV_JOURNAL_SESSION_OPEN);
  assert_memory_equal(on->texts[1], "new", 3);
  assert_int_equal(on->entries[2].kind, QKV_JOURNAL_SESSION_NOTE);  // not of a kind that can be dropped
  scene_check(on, session, record, 0, 3000);
}

// An entry that opens a session may exist twice, as its writer could not know whether the first write succeeded.
static void a_session_that_opens_twice_is_told_once(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on), other = scene_session(on);
  const uint64_t record = scene_put(on, session, 0, 0, 3000);
  for (int i = 0; i < 2; i++)
    assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_OPEN, session, "open", 4, NULL, NULL, NULL),
                     QKV_OK);
  for (int round = 0; round < 3; round++) {
    scene_close(on);
    scene_open(on);
    assert_int_equal(on->entry_count, 2);
    assert_int_equal(on->entries[0].session, session);
    assert_int_equal(on->entries[1].session, other);
    scene_check(on, session, record, 0, 3000);
  }
  assert_int_equal(scene_close_session(on, session), QKV_OK);
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->entry_count, 1);
}

static void the_newest_of_a_place_wins(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  scene_put(on, session, 0, 64, 3000);
  const uint64_t newest = scene_put(on, session, 0, 64, 3500);
  qkv_record_meta other = {.session = session, .position = 64, .tokens = 10, .kind = 2};
  uint64_t tail = 0;
  assert_int_equal(scene_put_status(on, &other, 10, true, &tail), QKV_OK);
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->record_count, 2);
  assert_int_equal(on->records[0].record, newest);
  assert_int_equal(on->records[1].record, tail);
  scene_check(on, session, newest, 64, 3500);
}

static void dropped_records_are_gone(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on), record = scene_put(on, session, 0, 0, 3000);
  uint8_t buffer[3000];
  qkv_storage_drop(on->storage, record);
  qkv_storage_drop(on->storage, record + 1000);
  assert_int_equal(scene_read(on, record, buffer, 3000), QKV_NOT_FOUND);
  const qkv_storage_stats stats = scene_stats(on);
  assert_int_equal(stats.records, 0);
  assert_int_equal(stats.live_bytes, 0);
  assert_int_equal(stats.dead_bytes, 4096);
}

static void a_second_storage_is_refused(void **state) {
  scene *on = *state;
  scene_open(on);
  qkv_storage *other = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_storage_open(&on->config, NULL, &other, &error), QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(error.text, "in use by another process"));
  scene_close(on);
  scene_open(on);
}

static void a_missing_journal_is_refused(void **state) {
  scene *on = *state;
  scene_open(on);
  scene_put(on, scene_session(on), 0, 0, 3000);
  scene_close(on);
  char path[128];
  qkv_error error = {0};
  scene_file(on, "journal.qkv", path);
  assert_int_equal(unlink(path), 0);
  assert_int_equal(scene_try_open(on, &error), QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(error.text, "no journal.qkv"));
}

// A segment of an unknown version prevents opening, and stays.
static void foreign_segments_are_refused(void **state) {
  scene *on = *state;
  char path[128], aside[140];
  qkv_error error = {0};
  scene_open(on);
  scene_put(on, scene_session(on), 0, 0, 3000);
  scene_close(on);
  scene_file(on, "segment-", path);
  (void)snprintf(aside, sizeof aside, "%s.aside", on->directory);
  assert_int_equal(rename(path, aside), 0);
  char journal[128];
  scene_file(on, "journal.qkv", journal);
  assert_int_equal(unlink(journal), 0);
  scene_open(on);
  scene_close(on);
  assert_int_equal(rename(aside, path), 0);
  assert_int_equal(scene_try_open(on, &error), QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(error.text, "is not of the store"));
  scene_damage(path, 8);  // its version, which is 17 now
  error = (qkv_error){0};
  assert_int_equal(scene_try_open(on, &error), QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(error.text, "has version 17"));
  assert_int_equal(unlink(path), 0);
  scene_open(on);
}

static void damage_is_data_loss(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  const uint64_t first = scene_put(on, session, 0, 0, 10000), second = scene_put(on, session, 0, 64, 10000);
  scene_close(on);
  char path[128];
  scene_file(on, "segment-", path);
  scene_damage(path, 4096 + 5000);
  scene_open(on);
  uint8_t buffer[10000];
  assert_int_equal(on->record_count, 2);
  assert_int_equal(scene_read(on, first, buffer, 10000), QKV_DATA_LOSS);
  scene_check(on, session, second, 64, 10000);
  qkv_storage_verify_report report;
  assert_int_equal(qkv_storage_verify(on->storage, NULL, NULL, &report), QKV_OK);
  assert_int_equal(report.records, 2);
  assert_int_equal(report.bad, 1);
  assert_int_equal(report.bytes, 10000);
  assert_int_equal(scene_stats(on).read_errors, 2);
}

static void a_lost_footer_costs_nothing(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  uint64_t records[20];
  for (size_t i = 0; i < 20; i++) records[i] = scene_put(on, session, 0, 64 * i, 10000 + i);
  scene_close(on);
  char path[128];
  scene_file(on, "segment-", path);
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  const long size = ftell(file);
  (void)fclose(file);
  for (int part = 0; part < 2; part++) {  // footer, summary
    scene_damage(path, (uint64_t)size - (part == 0 ? 100 : 4096 + 100));
    scene_open(on);
    assert_int_equal(on->record_count, 20);
    for (size_t i = 0; i < 20; i++) scene_check(on, session, records[i], 64 * i, 10000 + i);
    scene_close(on);
  }
}

// For sealed segments recovery reads the summaries, not the records.
static void recovery_reads_little(void **state) {
  enum { COUNT = 40, SIZE = 200000 };
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  for (uint64_t i = 0; i < COUNT; i++) scene_put(on, session, 0, 64 * i, SIZE);
  scene_close(on);
  scene_open(on);
  const qkv_storage_stats stats = scene_stats(on);
  assert_int_equal(stats.recovered_records, COUNT);
  assert_int_equal(stats.recovered_bytes, (uint64_t)COUNT * SIZE);
  assert_true(stats.live_bytes >= (uint64_t)COUNT * SIZE);
  // The journal, and a header, a summary and a footer for each segment.
  assert_true(stats.recovery_read_bytes <= (3 * stats.segments + 8) * QKV_STORAGE_BLOCK);
}

// ---- Batches ----

typedef struct batch_state {
  scene *on;
  qkv_storage_batch *batch;
  const uint64_t *records;
  uint64_t session;
  size_t first, step;
} batch_state;

enum { BATCH = 40, BATCH_BYTES = 50001 };

static void *take_items(void *context) {
  const batch_state *take = context;
  uint8_t *wanted = malloc(BATCH_BYTES), *got = malloc(BATCH_BYTES);
  for (size_t i = take->first; i < BATCH; i += take->step) {
    scene_fill(wanted, BATCH_BYTES, take->session ^ (64 * i << 8) ^ BATCH_BYTES, true);
    qkv_error error = {0};
    if (qkv_storage_batch_wait(take->batch, i, got, BATCH_BYTES, &error) != QKV_OK) abort();
    if (memcmp(wanted, got, BATCH_BYTES) != 0) abort();
  }
  free(wanted);
  free(got);
  return NULL;
}

static void batches_read_ahead(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  uint64_t records[BATCH + 1];
  for (size_t i = 0; i < BATCH; i++) records[i] = scene_put(on, session, 0, 64 * i, BATCH_BYTES);
  static const uint64_t ahead[] = {0, 120000, 100 << 20};
  for (size_t i = 0; i < 3; i++) {
    qkv_storage_batch *batch = qkv_storage_batch_create(on->storage, records, BATCH, ahead[i]);
    batch_state takes[2];
    pthread_t threads[2];
    for (size_t t = 0; t < 2; t++) {
      takes[t] = (batch_state){on, batch, records, session, t, 2};
      assert_int_equal(pthread_create(&threads[t], NULL, take_items, &takes[t]), 0);
    }
    for (size_t t = 0; t < 2; t++) pthread_join(threads[t], NULL);
    qkv_storage_batch_destroy(&batch);
  }
  records[BATCH] = 12345;
  qkv_storage_batch *batch = qkv_storage_batch_create(on->storage, records, BATCH + 1, 1 << 20);
  qkv_error error = {0};
  uint8_t byte;
  assert_int_equal(qkv_storage_batch_wait(batch, BATCH, &byte, 1, &error), QKV_NOT_FOUND);
  assert_int_equal(qkv_storage_batch_wait(batch, 3, &byte, 1, NULL), QKV_INVALID_ARGUMENT);
  qkv_storage_batch_destroy(&batch);  // most of it was never waited for
}

int main(void) {
  const struct CMUnitTest tests[] = {
      BOTH(puts_come_back),
      BOTH(reads_say_what_is_wrong),
      BOTH(puts_are_checked),
      BOTH(config_is_checked),
      BOTH(sessions_close_for_ever),
      BOTH(records_of_unknown_sessions_are_dead),
      BOTH(truncation_cuts),
      BOTH(the_journal_keeps_what_counts),
      BOTH(a_long_entry_is_written_from_where_it_lies),
      BOTH(a_session_that_opens_twice_is_told_once),
      BOTH(the_newest_of_a_place_wins),
      BOTH(entries_that_nobody_needs_go),
      BOTH(dropped_records_are_gone),
      BOTH(a_second_storage_is_refused),
      BOTH(a_missing_journal_is_refused),
      BOTH(foreign_segments_are_refused),
      BOTH(damage_is_data_loss),
      BOTH(a_lost_footer_costs_nothing),
      BOTH(recovery_reads_little),
      BOTH(batches_read_ahead),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
