// What is packed of sessions that are not used leaves memory, and comes back: through closes, truncations, forks,
// compaction, checks, restarts and damage.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "storage/internal.h"
#include "tests/storage/fixture.h"

enum { SESSIONS = 12, RECORDS = 40, BYTES = 5000, WAIT_US = 2000 };

typedef struct filled {
  uint64_t numbers[SESSIONS];
  uint64_t records[SESSIONS][RECORDS];
} filled;

static uint64_t position_of(size_t record) {
  return 64 * (record / 2);
}

static void fill(scene *on, filled *all) {
  on->config.segment_bytes = 1 << 20;
  scene_open(on);
  for (size_t s = 0; s < SESSIONS; s++) all->numbers[s] = scene_session(on);
  // In turn, so that each has records in all segments.
  for (size_t r = 0; r < RECORDS; r++) {
    for (size_t s = 0; s < SESSIONS; s++) {
      const qkv_record_meta meta = {
          .session = all->numbers[s], .layer = r % 2, .position = position_of(r), .tokens = 64, .kind = 1};
      assert_int_equal(scene_put_status(on, &meta, BYTES, false, &all->records[s][r]), QKV_OK);
    }
  }
  scene_sync(on);
}

static bool is_unloaded(scene *on, uint64_t session) {
  qkvi_entry entry;
  pthread_mutex_lock(&on->storage->lock);
  const bool unloaded = qkvi_index_unloaded(on->storage->index, session, &entry);
  pthread_mutex_unlock(&on->storage->lock);
  return unloaded;
}

static void await_unloaded(scene *on, uint64_t session) {
  while (!is_unloaded(on, session)) (void)usleep(WAIT_US);
}

static void unload_all(scene *on, const filled *all) {
  for (size_t s = 0; s < SESSIONS; s++) qkv_storage_session_pack(on->storage, all->numbers[s]);
  for (size_t s = 0; s < SESSIONS; s++) await_unloaded(on, all->numbers[s]);
}

static void on_done(void *context, qkv_status status) {
  atomic_store((_Atomic int *)context, (int)status);
}

static qkv_status unpack(scene *on, uint64_t session) {
  _Atomic int status = -1;
  qkv_storage_session_unpack(on->storage, session, on_done, &status);
  while (atomic_load(&status) < 0) (void)usleep(100);
  return (qkv_status)atomic_load(&status);
}

static void check_all_of(scene *on, const filled *all, size_t s) {
  for (size_t r = 0; r < RECORDS; r++) scene_check(on, all->numbers[s], all->records[s][r], position_of(r), BYTES);
}

static void what_is_unloaded_comes_back(void **state) {
  scene *on = *state;
  filled all;
  uint8_t buffer[BYTES];
  fill(on, &all);
  const qkv_storage_stats before = scene_stats(on);
  unload_all(on, &all);
  const qkv_storage_stats after = scene_stats(on);
  assert_int_equal(after.records, SESSIONS * RECORDS);
  assert_int_equal(after.sessions, SESSIONS);
  assert_int_equal(after.puts, before.puts);
  assert_int_equal(scene_read(on, all.records[2][5], buffer, BYTES), QKV_NOT_FOUND);
  assert_int_equal(unpack(on, all.numbers[2]), QKV_OK);
  check_all_of(on, &all, 2);
  // A check finds all of them, and they leave memory again.
  qkv_storage_verify_report report;
  assert_int_equal(qkv_storage_verify(on->storage, NULL, NULL, &report), QKV_OK);
  assert_true(report.records == SESSIONS * RECORDS && report.bad == 0);
  await_unloaded(on, all.numbers[11]);
  assert_false(is_unloaded(on, all.numbers[2]));
  // So does a start.
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->record_count, SESSIONS * RECORDS);
  for (size_t i = 0; i < on->record_count; i++) assert_int_equal(on->records[i].meta.kind, 1);
  assert_int_equal(scene_stats(on).records, SESSIONS * RECORDS);
  for (size_t s = 0; s < SESSIONS; s++) check_all_of(on, &all, s);
}

// Records that nobody needs are freed, though nobody knew where they are.
static void closes_and_cuts_of_unloaded_sessions(void **state) {
  scene *on = *state;
  filled all;
  fill(on, &all);
  unload_all(on, &all);
  const uint64_t extent = scene_stats(on).live_bytes / (SESSIONS * RECORDS);
  for (size_t s = 0; s < SESSIONS / 2; s++) assert_int_equal(scene_close_session(on, all.numbers[s]), QKV_OK);
  assert_int_equal(scene_truncate(on, all.numbers[7], 1, 640), QKV_OK);
  assert_int_equal(scene_truncate(on, all.numbers[7], QKV_LAYER_ALL, 672), QKV_OK);
  // Of layer 1 ten records are left, of layer 0 eleven, the last one with 32 tokens.
  while (scene_stats(on).records != SESSIONS / 2 * RECORDS - 19) (void)usleep(WAIT_US);
  assert_true(scene_stats(on).live_bytes < (SESSIONS / 2 * RECORDS + SESSIONS) * extent);
  qkv_record_info info;
  assert_int_equal(qkv_storage_find(on->storage, all.records[7][20], &info), QKV_OK);
  assert_true(info.meta.position == 640 && info.meta.tokens == 32);
  assert_int_equal(qkv_storage_find(on->storage, all.records[7][21], &info), QKV_NOT_FOUND);
  // A fork loads its parent, which is used then.
  const uint64_t positions[] = {320, 320};
  const uint64_t fork = scene_fork(on, all.numbers[8], positions, 2, NULL);
  assert_int_equal(unpack(on, all.numbers[8]), QKV_OK);
  check_all_of(on, &all, 8);
  assert_int_equal(scene_close_session(on, all.numbers[8]), QKV_OK);
  while (scene_stats(on).records != (SESSIONS / 2 - 1) * RECORDS - 19 + 10) (void)usleep(WAIT_US);
  assert_int_equal(scene_close_session(on, fork), QKV_OK);
  // Compaction finds the records that are left, of sessions that are unloaded, too.
  assert_int_equal(scene_compact(on, 1), QKV_OK);
  assert_true(scene_stats(on).compactions > 0);
  for (size_t s = 9; s < SESSIONS; s++) {
    assert_int_equal(unpack(on, all.numbers[s]), QKV_OK);
    check_all_of(on, &all, s);
  }
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->record_count, (SESSIONS / 2 - 1) * RECORDS - 19);
  for (size_t s = 9; s < SESSIONS; s++) check_all_of(on, &all, s);
}

// Its records are out of reach, and stay where they are, until the next start.
static void what_was_unloaded_is_damaged(void **state) {
  scene *on = *state;
  filled all;
  uint8_t buffer[BYTES];
  char path[256];
  qkvi_entry entry = {0};
  fill(on, &all);
  unload_all(on, &all);
  pthread_mutex_lock(&on->storage->lock);
  assert_true(qkvi_index_unloaded(on->storage->index, all.numbers[0], &entry));
  const uint64_t number = on->storage->segments[entry.segment]->number;
  pthread_mutex_unlock(&on->storage->lock);
  (void)snprintf(path, sizeof path, "%s/segment-%016llx.qkv", on->directory, (unsigned long long)number);
  scene_damage(path, entry.offset + sizeof(qkv_record_header) + 9);
  assert_int_equal(unpack(on, all.numbers[0]), QKV_DATA_LOSS);
  assert_int_equal(scene_read(on, all.records[0][0], buffer, BYTES), QKV_NOT_FOUND);
  assert_int_equal(unpack(on, all.numbers[1]), QKV_OK);
  check_all_of(on, &all, 1);
  assert_int_equal(scene_compact(on, 1), QKV_OK);  // it leaves the segments that they may lie in
  qkv_storage_verify_report report;
  assert_int_equal(qkv_storage_verify(on->storage, NULL, NULL, &report), QKV_OK);
  assert_true(report.bad == 1 && report.records == (SESSIONS - 1) * RECORDS);
  assert_int_equal(scene_truncate(on, all.numbers[0], QKV_LAYER_ALL, 640), QKV_OK);
  scene_close(on);
  scene_open(on);
  for (size_t r = 0; r < RECORDS; r++) {
    if (position_of(r) < 640) scene_check(on, all.numbers[0], all.records[0][r], position_of(r), BYTES);
  }
  assert_int_equal(on->record_count, SESSIONS * RECORDS - (RECORDS - 20));
}

typedef struct waiting {
  _Atomic bool held, durable, durable_first, synced;
} waiting;

static void hold(void *context, qkv_status status) {
  const waiting *on = context;
  assert_int_equal(status, QKV_OK);
  while (atomic_load(&on->held)) (void)usleep(100);
}

static void on_written(void *context, uint64_t record, qkv_status status) {
  (void)context;
  (void)record;
  assert_int_equal(status, QKV_OK);
}

static void on_durable(void *context, uint64_t record, qkv_status status) {
  (void)record;
  atomic_store(&((waiting *)context)->durable, status == QKV_OK);
}

static void on_synced(void *context, qkv_status status) {
  waiting *on = context;
  atomic_store(&on->durable_first, status == QKV_OK && atomic_load(&on->durable));
  atomic_store(&on->synced, true);
}

// What is written of an index is accepted after the caller's record, and is under way before it. The storage thread
// is held, so that it takes all of it at once.
static void a_sync_does_not_take_an_index_for_a_record(void **state) {
  scene *on = *state;
  filled all;
  waiting waits = {.held = true};
  uint8_t payload[BYTES] = {1};
  uint64_t record;
  fill(on, &all);
  qkv_storage_session_unpack(on->storage, all.numbers[0], hold, &waits);
  qkv_storage_session_pack(on->storage, all.numbers[1]);
  const qkv_storage_put_request request = {
      .meta = {.session = all.numbers[2], .position = position_of(RECORDS), .tokens = 64, .kind = 1},
      .payload = payload,
      .bytes = BYTES,
      .written = on_written,
      .durable = on_durable,
      .context = &waits};
  assert_int_equal(qkv_storage_put(on->storage, &request, &record, NULL), QKV_OK);
  qkv_storage_sync(on->storage, on_synced, &waits);
  atomic_store(&waits.held, false);
  while (!atomic_load(&waits.synced)) (void)usleep(WAIT_US);
  assert_true(atomic_load(&waits.durable_first));
  await_unloaded(on, all.numbers[1]);
}

static void put_own(scene *on, uint64_t session, size_t r, uint64_t *record) {
  const qkv_record_meta meta = {
      .session = session, .layer = r % 2, .position = position_of(r), .tokens = 64, .kind = 1};
  assert_int_equal(scene_put_status(on, &meta, BYTES, true, record), QKV_OK);
}

// Forks of forks: what any of them needs stays in memory while that one is used, and leaves it with the last one.
static void forks_leave_with_their_ancestors(void **state) {
  scene *on = *state;
  filled all;
  uint64_t own[RECORDS], other[RECORDS];
  uint8_t buffer[BYTES];
  const uint64_t positions[] = {640, 640}, more[] = {1280, 1280};
  fill(on, &all);
  const uint64_t root = all.numbers[0], fork = scene_fork(on, root, positions, 2, NULL);
  for (size_t r = 20; r < RECORDS; r++) put_own(on, fork, r, &own[r]);
  const uint64_t heir = scene_fork(on, fork, more, 2, NULL), sibling = scene_fork(on, root, positions, 2, NULL);
  for (size_t r = 20; r < RECORDS; r++) put_own(on, sibling, r, &other[r]);
  qkv_storage_session_pack(on->storage, root);
  qkv_storage_session_pack(on->storage, fork);
  qkv_storage_session_pack(on->storage, sibling);
  await_unloaded(on, sibling);
  assert_false(is_unloaded(on, root) || is_unloaded(on, fork));
  assert_int_equal(scene_read(on, own[20], buffer, BYTES), QKV_OK);
  qkv_storage_session_pack(on->storage, heir);  // it has no records of its own
  await_unloaded(on, root);
  await_unloaded(on, fork);
  assert_int_equal(scene_read(on, own[20], buffer, BYTES), QKV_NOT_FOUND);
  // A use brings back all that its view has, and nothing else.
  assert_int_equal(unpack(on, heir), QKV_OK);
  assert_true(is_unloaded(on, sibling) && !is_unloaded(on, root) && !is_unloaded(on, fork));
  scene_check(on, root, all.records[0][3], position_of(3), BYTES);
  scene_check(on, fork, own[21], position_of(21), BYTES);
  // What was used goes, and so do records that only it needed; the others leave memory again.
  assert_int_equal(scene_close_session(on, root), QKV_OK);
  assert_false(is_unloaded(on, root));
  assert_int_equal(scene_close_session(on, heir), QKV_OK);
  await_unloaded(on, root);
  await_unloaded(on, fork);
  assert_int_equal(scene_stats(on).records, (SESSIONS - 1) * RECORDS + 20 + 2 * (RECORDS - 20));
  // A check and compaction find them.
  qkv_storage_verify_report report;
  assert_int_equal(qkv_storage_verify(on->storage, NULL, NULL, &report), QKV_OK);
  assert_true(report.records == (SESSIONS - 1) * RECORDS + 20 + 2 * (RECORDS - 20) && report.bad == 0);
  assert_int_equal(scene_compact(on, 1), QKV_OK);
  assert_int_equal(unpack(on, sibling), QKV_OK);
  scene_check(on, root, all.records[0][19], position_of(19), BYTES);
  scene_check(on, sibling, other[20], position_of(20), BYTES);
  // Their ends free all of it.
  qkv_storage_session_pack(on->storage, sibling);
  await_unloaded(on, root);
  assert_int_equal(scene_close_session(on, fork), QKV_OK);
  assert_int_equal(scene_close_session(on, sibling), QKV_OK);
  while (scene_stats(on).records != (SESSIONS - 1) * RECORDS) (void)usleep(WAIT_US);
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->record_count, (SESSIONS - 1) * RECORDS);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      BOTH(what_is_unloaded_comes_back),
      BOTH(closes_and_cuts_of_unloaded_sessions),
      BOTH(what_was_unloaded_is_damaged),
      BOTH(forks_leave_with_their_ancestors),
      BOTH(a_sync_does_not_take_an_index_for_a_record),
  };
  return cmocka_run_group_tests_name("unload", tests, NULL, NULL);
}
