// Single faults at critical moments: the disk is held, and its requests complete one by one.
#include "tests/fault/moment.h"

// ---- Writes ----

// Two writes are under way, and behind them a half-full buffer, when the segment fails. The next record goes to
// another segment, and not into that buffer.
static void a_failed_segment_keeps_its_buffer(void **state) {
  (void)state;
  moment on;
  piece pieces[7];
  begin(&on, 1);
  put(&on, &pieces[0], 0, SEGMENT / 2);
  assert_int_equal(settle(&on, &pieces[0]), QKV_OK);
  put(&on, &pieces[1], 1, SMALL);  // past the middle: the next segment is prepared
  assert_int_equal(settle(&on, &pieces[1]), QKV_OK);
  while (on.storage->preparing) qkvi_storage_turn(on.storage, true);
  assert_int_not_equal(on.storage->spare, QKVI_NO_SEGMENT);
  fault_disk_hold(on.disk, true);
  for (uint64_t i = 2; i < 5; i++) put(&on, &pieces[i], i, FULL);
  put(&on, &pieces[5], 5, SMALL);
  assert_true(fault_disk_land(on.disk, QKV_IO_WRITE, 0, EIO));
  assert_non_null(on.storage->filling);
  put(&on, &pieces[6], 6, SMALL);
  fault_disk_hold(on.disk, false);
  assert_int_equal(settle(&on, &pieces[2]), QKV_INTERNAL);
  for (size_t i = 3; i < 7; i++) {
    assert_int_equal(settle(&on, &pieces[i]), QKV_OK);
    check(&on, &pieces[i]);
  }
  free_pieces(pieces, 7);
  finish(&on);
}

// A write fails that has records of compaction in it and one that was put. When the first of them has ended, a put
// that waits for a buffer takes this one; the others have failed nevertheless.
static void a_failed_write_fails_for_all_of_its_records(void **state) {
  (void)state;
  moment on;
  piece pieces[7];
  begin(&on, 1);
  for (uint64_t i = 0; i < 2; i++) put(&on, &pieces[i], i, SMALL);
  for (size_t i = 0; i < 2; i++) assert_int_equal(settle(&on, &pieces[i]), QKV_OK);
  qkv_storage_close(&on.storage);  // seals their segment
  open_storage(&on);
  keep_buffers(&on, 3);
  put(&on, &pieces[2], 2, SMALL);
  assert_int_equal(settle(&on, &pieces[2]), QKV_OK);
  fault_disk_hold(on.disk, true);
  for (uint64_t i = 3; i < 5; i++) put(&on, &pieces[i], i, FULL);
  qkv_status compacted = QKV_CANCELLED;
  qkv_storage_compact(on.storage, 1.1, note_done, &compacted);
  turn(&on);
  while (fault_disk_land(on.disk, QKV_IO_READ, 0, 0)) turn(&on);
  assert_int_equal(on.storage->compaction.moving, 2);
  put(&on, &pieces[5], 5, SMALL);
  put(&on, &pieces[6], 6, 3 * MIB);  // fills that buffer up, and waits for more
  assert_null(on.storage->free_buffers);
  assert_true(fault_disk_land(on.disk, QKV_IO_WRITE, 2, EIO));
  fault_disk_hold(on.disk, false);
  assert_int_equal(settle(&on, &pieces[5]), QKV_INTERNAL);
  while (compacted == QKV_CANCELLED) qkvi_storage_turn(on.storage, true);
  for (size_t i = 0; i < 5; i++) check(&on, &pieces[i]);
  (void)settle(&on, &pieces[6]);
  free_pieces(pieces, 7);
  finish(&on);
}

// The first write of a record fails and later ones do not: the record has failed.
static void a_record_fails_with_any_of_its_writes(void **state) {
  (void)state;
  for (size_t failing = 0; failing < 3; failing++) {
    moment on;
    piece pieces[2];
    begin(&on, 1);
    put(&on, &pieces[0], 0, SMALL);
    assert_int_equal(settle(&on, &pieces[0]), QKV_OK);
    fault_disk_hold(on.disk, true);
    put(&on, &pieces[1], 1, 3 * MIB);
    assert_true(fault_disk_land(on.disk, QKV_IO_WRITE, failing, EIO));
    turn(&on);
    assert_false(pieces[1].ended);  // others are under way
    fault_disk_hold(on.disk, false);
    assert_int_equal(settle(&on, &pieces[1]), QKV_INTERNAL);
    check(&on, &pieces[0]);
    free_pieces(pieces, 2);
    finish(&on);
  }
}

// A record has been placed, but has no buffer yet, when its session is closed.
static void a_place_that_was_given_is_filled(void **state) {
  (void)state;
  moment on;
  piece pieces[3];
  begin(&on, 1);
  keep_buffers(&on, 2);
  fault_disk_hold(on.disk, true);
  for (uint64_t i = 0; i < 2; i++) put(&on, &pieces[i], i, FULL);
  turn(&on);
  while (on.storage->preparing) {
    for (qkv_io_kind kind = QKV_IO_READ; kind <= QKV_IO_ALLOCATE; kind++) (void)fault_disk_land(on.disk, kind, 0, 0);
    turn(&on);
  }
  put(&on, &pieces[2], 2, SMALL);
  assert_null(on.storage->free_buffers);
  qkvi_segment *segment = on.storage->segments[on.storage->current];
  assert_int_equal(segment->placing, 1);
  qkv_status closed = QKV_CANCELLED;
  qkv_storage_session_close(on.storage, on.session, note_done, &closed);
  turn(&on);
  fault_disk_hold(on.disk, false);
  for (size_t i = 0; i < 3; i++) assert_int_equal(settle(&on, &pieces[i]), QKV_CANCELLED);
  assert_int_equal(segment->placing, 0);  // or the storage could not be closed
  free_pieces(pieces, 3);
  finish(&on);
}

// ---- Copies ----

// A copy of a record is written and fails to become durable, another one replaces the original. A start that finds
// both takes the one that survives a power cut.
static void copy_in_doubt(uint64_t seed) {
  moment on;
  piece pieces[3];
  begin(&on, seed);
  put(&on, &pieces[0], 0, SMALL);
  assert_int_equal(settle(&on, &pieces[0]), QKV_OK);
  qkv_storage_close(&on.storage);
  open_storage(&on);
  put(&on, &pieces[1], 1, SMALL);
  assert_int_equal(settle(&on, &pieces[1]), QKV_OK);
  fault_disk_plan(on.disk, &(fault_plan){.sync_error = 1});
  fault_disk_hold(on.disk, true);
  put(&on, &pieces[2], 2, 6 * MIB);  // keeps its segment from being compacted
  qkv_status compacted = QKV_CANCELLED;
  qkv_storage_compact(on.storage, 0.3, note_done, &compacted);
  turn(&on);
  assert_true(fault_disk_land(on.disk, QKV_IO_READ, 0, 0));
  fault_disk_hold(on.disk, false);
  while (compacted == QKV_CANCELLED) qkvi_storage_turn(on.storage, true);
  assert_int_equal(compacted, QKV_RESOURCE_EXHAUSTED);
  assert_int_equal(settle(&on, &pieces[2]), QKV_INTERNAL);
  fault_disk_plan(on.disk, &(fault_plan){0});
  assert_int_equal(compact(&on, 0.3), QKV_OK);
  assert_int_equal(on.storage->stats.compactions, 2);
  qkv_storage_close(&on.storage);
  fault_disk_restart(on.disk, false);
  open_storage(&on);
  assert_int_equal(on.told, 3);
  fault_disk_crash(on.disk);
  qkv_storage_close(&on.storage);
  fault_disk_restart(on.disk, true);
  open_storage(&on);
  for (size_t i = 0; i < 2; i++) check(&on, &pieces[i]);
  free_pieces(pieces, 3);
  finish(&on);
}

static void a_copy_in_doubt_does_not_count(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 16; seed++) copy_in_doubt(seed);
}

// While a segment is compacted the device cannot read its records, temporarily or at all: none is dropped, and the
// next compaction moves them.
static void what_compaction_cannot_read_stays(void **state) {
  (void)state;
  static const double errors[] = {0.5, 1};
  for (uint64_t seed = 1; seed <= 16; seed++) {
    moment on;
    piece pieces[2];
    begin(&on, seed);
    for (uint64_t i = 0; i < 2; i++) put(&on, &pieces[i], i, SMALL);
    for (size_t i = 0; i < 2; i++) assert_int_equal(settle(&on, &pieces[i]), QKV_OK);
    qkv_storage_close(&on.storage);  // seals their segment
    open_storage(&on);
    fault_disk_plan(on.disk, &(fault_plan){.segment_error = errors[seed % 2]});
    (void)compact(&on, 1.1);
    assert_int_equal(on.storage->stats.bad_records, 0);
    fault_disk_plan(on.disk, &(fault_plan){0});
    for (size_t i = 0; i < 2; i++) check(&on, &pieces[i]);
    free_pieces(pieces, 2);
    finish(&on);
  }
}

// Two sealed segments of a large record and a small one; then compaction has a rate.
static void seal_two(moment *on, piece pieces[4]) {
  for (uint64_t i = 0; i < 4; i++) {
    put(on, &pieces[i], i, i % 2 == 0 ? MIB : SMALL);
    assert_int_equal(settle(on, &pieces[i]), QKV_OK);
    if (i % 2 == 0) continue;
    qkv_storage_close(&on->storage);
    open_storage_with(on, 1 << 30);
  }
}

// Waits until compaction, which comes without a request, has moved a record.
static void await_compaction(moment *on) {
  for (int ms = 0; on->storage->stats.compacted_bytes == 0 && ms < 5000; ms++) {
    qkvi_storage_turn(on->storage, false);
    (void)usleep(1000);
  }
  assert_true(on->storage->stats.compacted_bytes > 0);
}

// The device can never read a live record of one mostly dead segment: that one stays, and others are emptied.
static void an_unreadable_record_keeps_its_segment_alone(void **state) {
  (void)state;
  enum { READS = 4 };  // compaction reads it so often
  moment on;
  piece pieces[4];
  begin(&on, 1);
  seal_two(&on, pieces);
  fault_disk_hold(on.disk, true);
  qkv_storage_drop(on.storage, pieces[0].number);
  for (int left = READS; left > 0; qkvi_storage_turn(on.storage, false)) {
    if (fault_disk_land(on.disk, QKV_IO_READ, 0, EIO)) left--;
  }
  fault_disk_hold(on.disk, false);
  qkv_storage_drop(on.storage, pieces[2].number);
  await_compaction(&on);
  check(&on, &pieces[1]);
  check(&on, &pieces[3]);
  free_pieces(pieces, 4);
  finish(&on);
}

// What compaction writes fails for a while; nothing else happens later.
static void compaction_is_tried_again(void **state) {
  (void)state;
  moment on;
  piece pieces[4];
  begin(&on, 1);
  seal_two(&on, pieces);
  fault_disk_plan(on.disk, &(fault_plan){.write_error = 1});
  qkv_storage_drop(on.storage, pieces[0].number);
  while (!on.storage->compaction.aborted) qkvi_storage_turn(on.storage, true);
  fault_disk_plan(on.disk, &(fault_plan){0});
  await_compaction(&on);
  check(&on, &pieces[1]);
  free_pieces(pieces, 4);
  finish(&on);
}

// ---- Heirs ----

static qkv_status fork_of(moment *on, uint64_t child, uint64_t parent, uint64_t position) {
  qkv_status status = QKV_CANCELLED;
  assert_int_equal(
      qkv_storage_session_fork(on->storage, child, parent, &position, 1, NULL, 0, note_done, &status, NULL), QKV_OK);
  while (status == QKV_CANCELLED) qkvi_storage_turn(on->storage, true);
  return status;
}

static qkv_status cut(moment *on, uint64_t session, uint64_t position) {
  qkv_status status = QKV_CANCELLED;
  qkv_storage_session_truncate(on->storage, session, QKV_LAYER_ALL, position, note_done, &status);
  while (status == QKV_CANCELLED) qkvi_storage_turn(on->storage, true);
  return status;
}

// Records are being written when their session is closed or cut: what an heir needs becomes durable.
static void writes_that_heirs_need_go_on(void **state) {
  (void)state;
  for (int closes = 0; closes < 2; closes++) {
    moment on;
    piece pieces[3];
    begin(&on, 1);
    const uint64_t child = qkv_storage_session_number(on.storage);
    assert_int_equal(fork_of(&on, child, on.session, 2), QKV_OK);
    fault_disk_hold(on.disk, true);
    for (uint64_t i = 0; i < 3; i++) put(&on, &pieces[i], i, SMALL);
    qkv_status gone = QKV_CANCELLED;
    if (closes == 1) qkv_storage_session_close(on.storage, on.session, note_done, &gone);
    if (closes == 0) qkv_storage_session_truncate(on.storage, on.session, 0, 1, note_done, &gone);
    turn(&on);
    fault_disk_hold(on.disk, false);
    for (size_t i = 0; i < 3; i++) assert_int_equal(settle(&on, &pieces[i]), i < 2 ? QKV_OK : QKV_CANCELLED);
    while (gone == QKV_CANCELLED) qkvi_storage_turn(on.storage, true);
    for (int starts = 0; starts < 2; starts++) {
      for (size_t i = 0; i < 2; i++) check(&on, &pieces[i]);
      fault_disk_crash(on.disk);
      qkv_storage_close(&on.storage);
      fault_disk_restart(on.disk, true);
      open_storage(&on);
      assert_int_equal(on.told, closes == 1 ? 2 : 3);  // of the child, and one of the parent
    }
    free_pieces(pieces, 3);
    finish(&on);
  }
}

// A cut cannot be written. A fork of the remaining rows would find, after a crash, rows that should be cut. So it is
// not written either, nor is a fork of that fork.
static void a_fork_needs_the_cut_before_it(void **state) {
  (void)state;
  moment on;
  piece made;
  begin(&on, 1);
  const uint64_t first = qkv_storage_session_number(on.storage), second = qkv_storage_session_number(on.storage),
                 third = qkv_storage_session_number(on.storage);
  put(&on, &made, 5, SMALL);
  assert_int_equal(settle(&on, &made), QKV_OK);
  assert_int_equal(fork_of(&on, first, on.session, 10), QKV_OK);
  fault_disk_plan(on.disk, &(fault_plan){.sync_error = 1});
  assert_int_equal(cut(&on, on.session, 3), QKV_INTERNAL);
  fault_disk_plan(on.disk, &(fault_plan){0});
  assert_int_equal(fork_of(&on, second, on.session, 10), QKV_INTERNAL);
  assert_int_equal(fork_of(&on, third, second, 10), QKV_INTERNAL);
  assert_int_equal(fork_of(&on, qkv_storage_session_number(on.storage), first, 10), QKV_OK);
  qkv_storage_close(&on.storage);
  open_storage(&on);
  // The first fork, its own fork, and the session itself, whose cut was never acknowledged.
  assert_int_equal(on.told, 3);
  check(&on, &made);
  free_pieces(&made, 1);
  finish(&on);
}

// Records that a start cannot read are inherited nevertheless: a cut of the parent leaves them to the heir, a cut of
// the heir ends its view of them.
static void what_is_not_read_is_inherited(void **state) {
  (void)state;
  moment on;
  piece pieces[3];
  begin(&on, 1);
  const uint64_t child = qkv_storage_session_number(on.storage);
  for (uint64_t i = 0; i < 3; i++) put(&on, &pieces[i], i, SMALL);
  for (size_t i = 0; i < 3; i++) assert_int_equal(settle(&on, &pieces[i]), QKV_OK);
  assert_int_equal(fork_of(&on, child, on.session, 10), QKV_OK);
  for (int round = 0; round < 3; round++) {
    qkv_storage_close(&on.storage);
    fault_disk_plan(on.disk, &(fault_plan){.segment_error = 1});
    open_storage(&on);
    assert_int_equal(on.storage->stats.unread_segments, 1);
    assert_int_equal(on.told, 0);
    fault_disk_plan(on.disk, &(fault_plan){0});
    if (round == 0) assert_int_equal(cut(&on, on.session, 1), QKV_OK);
    if (round == 1) assert_int_equal(cut(&on, child, 2), QKV_OK);
    if (round == 2) qkv_storage_session_close(on.storage, on.session, NULL, NULL);
    qkv_storage_close(&on.storage);
    open_storage(&on);
    static const size_t told[] = {1 + 3, 1 + 2, 2};
    assert_int_equal(on.told, told[round]);
  }
  for (size_t i = 0; i < 2; i++) check(&on, &pieces[i]);
  free_pieces(pieces, 3);
  finish(&on);
}

// ---- Names ----

// The journal is rewritten, the directory's sync fails, numbers of the new epoch are assigned, and the power fails,
// which brings the old journal back. They are not assigned again.
static void numbers_are_given_once(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 8; seed++) {
    moment on;
    piece pieces[3];
    begin(&on, seed);
    put(&on, &pieces[0], 0, SMALL);  // into a segment that needs no directory any more
    assert_int_equal(settle(&on, &pieces[0]), QKV_OK);
    on.storage->journal.rewrite_at = 0;
    fault_disk_plan(on.disk, &(fault_plan){.directory_error = 1});
    assert_int_equal(journal(&on, QKV_JOURNAL_SESSION_NOTE), QKV_INTERNAL);
    fault_disk_plan(on.disk, &(fault_plan){0});
    put(&on, &pieces[1], 1, SMALL);
    assert_int_equal(settle(&on, &pieces[1]), QKV_OK);
    const uint64_t session = qkv_storage_session_number(on.storage);
    fault_disk_crash(on.disk);
    qkv_storage_close(&on.storage);
    fault_disk_restart(on.disk, true);
    open_storage(&on);
    assert_int_equal(on.told, 2);
    assert_true(qkv_storage_session_number(on.storage) > session);
    put(&on, &pieces[2], 2, SMALL);
    assert_true(pieces[2].number > pieces[1].number);
    assert_int_equal(settle(&on, &pieces[2]), QKV_OK);
    for (size_t i = 0; i < 3; i++) check(&on, &pieces[i]);
    free_pieces(pieces, 3);
    finish(&on);
  }
}

// ---- A device that does not give ----

// At a start the device can read none of the segments: they stay, whatever is put, closed and compacted meanwhile,
// and the next start finds their live records.
static void what_is_not_read_stays(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 8; seed++) {
    moment on;
    piece pieces[4], other;
    begin(&on, seed);
    for (uint64_t i = 0; i < 3; i++) put(&on, &pieces[i], i, SMALL);
    for (size_t i = 0; i < 3; i++) assert_int_equal(settle(&on, &pieces[i]), QKV_OK);
    const uint64_t kept = on.session, numbers = on.storage->record_next;
    if (seed % 2 == 0) fault_disk_crash(on.disk);  // the segment is not sealed
    qkv_storage_close(&on.storage);
    fault_disk_restart(on.disk, seed % 4 == 0);
    for (int start = 0; start < 3; start++) {
      fault_disk_plan(on.disk, &(fault_plan){.segment_error = 1});
      open_storage(&on);
      assert_int_equal(on.told, 0);
      assert_in_range(on.storage->stats.unread_segments, 1, 3);  // those of earlier starts, too
      assert_true(on.storage->record_next > numbers);
      fault_disk_plan(on.disk, &(fault_plan){0});
      on.session = qkv_storage_session_number(on.storage);
      assert_int_equal(journal(&on, QKV_JOURNAL_SESSION_OPEN), QKV_OK);
      put(&on, &other, 0, SMALL);
      assert_int_equal(settle(&on, &other), QKV_OK);
      qkv_status closed = QKV_CANCELLED;
      qkv_storage_session_close(on.storage, on.session, note_done, &closed);
      while (closed == QKV_CANCELLED) qkvi_storage_turn(on.storage, true);
      assert_int_equal(compact(&on, 1.1), QKV_OK);
      free_pieces(&other, 1);
      qkv_storage_close(&on.storage);
      fault_disk_restart(on.disk, true);
    }
    open_storage(&on);
    assert_int_equal(on.told, 3);
    assert_int_equal(on.storage->stats.unread_segments, 0);
    on.session = kept;
    put(&on, &pieces[3], 3, SMALL);
    assert_int_equal(settle(&on, &pieces[3]), QKV_OK);
    for (size_t i = 0; i < 4; i++) check(&on, &pieces[i]);
    free_pieces(pieces, 4);
    finish(&on);
  }
}

// ---- The journal ----

static void write_model(moment *on, size_t which, uint64_t bytes) {
  uint8_t *payload = malloc(bytes);
  assert_non_null(payload);
  memset(payload, (int)(1 + which), bytes);
  assert_int_equal(journal_bytes(on, QKV_JOURNAL_MODEL, payload, bytes), QKV_OK);
  free(payload);
}

// A journal of several pieces, with entries that are larger than one, ends at `end`: there the file ends, or zeros
// begin. All complete entries before it are found, and more can be written. Returns its size without that.
static uint64_t tear_journal(uint64_t end, bool zeros) {
  static const uint64_t sizes[] = {1, 9000, 40000, 4096 - 128, 4096 - 127, 3 * PIECE - 128, 20000};
  enum { MODELS = sizeof sizes / sizeof *sizes };
  moment on;
  size_t whole = 0;
  begin(&on, 1);
  for (size_t i = 0; i < MODELS; i++) {
    const uint64_t from = on.storage->journal.bytes;
    write_model(&on, i, sizes[i]);
    // Behind the payload there are zeros up to a block.
    if ((zeros ? from + sizeof(qkvi_entry_header) + sizes[i] : on.storage->journal.bytes) <= end) whole++;
  }
  const uint64_t size = on.storage->journal.bytes;
  assert_true(size > 4 * PIECE);
  if (end > size) end = size;
  if (!zeros) assert_int_equal(qkv_io_truncate(on.storage->io, on.storage->journal.file, end), 0);
  qkv_storage_close(&on.storage);
  uint64_t bytes;
  uint8_t *file = fault_disk_bytes(on.disk, "journal.qkv", &bytes);
  assert_int_equal(bytes, zeros ? size : end);
  memset(file + end, 0, size - end);
  open_storage(&on);
  assert_int_equal(on.entries, whole);
  write_model(&on, whole, 5000);
  for (int i = 0; i < 2; i++) {
    qkv_storage_close(&on.storage);
    open_storage(&on);
    assert_int_equal(on.entries, whole + 1);
  }
  finish(&on);
  return size;
}

static void a_journal_may_be_torn_anywhere(void **state) {
  (void)state;
  const uint64_t size = tear_journal(UINT64_MAX, false);
  for (uint64_t end = 2 * sizeof(qkvi_journal_header); end < size; end += 2048) {
    (void)tear_journal(end, false);
    (void)tear_journal(end, true);
  }
}

int main(void) {
  FILE *nowhere = fopen("/dev/null", "we");
  if (nowhere != NULL) qkv_log_setup(nowhere, QKV_LOG_ERROR);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_failed_segment_keeps_its_buffer),
      cmocka_unit_test(a_failed_write_fails_for_all_of_its_records),
      cmocka_unit_test(a_record_fails_with_any_of_its_writes),
      cmocka_unit_test(a_place_that_was_given_is_filled),
      cmocka_unit_test(a_copy_in_doubt_does_not_count),
      cmocka_unit_test(what_compaction_cannot_read_stays),
      cmocka_unit_test(an_unreadable_record_keeps_its_segment_alone),
      cmocka_unit_test(compaction_is_tried_again),
      cmocka_unit_test(writes_that_heirs_need_go_on),
      cmocka_unit_test(a_fork_needs_the_cut_before_it),
      cmocka_unit_test(what_is_not_read_is_inherited),
      cmocka_unit_test(numbers_are_given_once),
      cmocka_unit_test(what_is_not_read_stays),
      cmocka_unit_test(a_journal_may_be_torn_anywhere),
  };
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  if (nowhere != NULL) (void)fclose(nowhere);
  return failed;
}
