// Limits and space: dirty bytes, budget, open files; compaction keeps live records and frees the rest.
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "storage/space.h"
#include "tests/storage/fixture.h"

enum { SIZE = 100000, COUNT = 60 };

// ---- Dirty bytes ----

typedef struct gate_state {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool arrived, open, ready;
} gate_state;

static void pass_gate(void *context, uint64_t record, qkv_status status) {
  (void)record;
  gate_state *gate = context;
  pthread_mutex_lock(&gate->lock);
  if (status != QKV_OK) abort();
  gate->arrived = true;
  pthread_cond_broadcast(&gate->changed);
  while (!gate->open) pthread_cond_wait(&gate->changed, &gate->lock);
  pthread_mutex_unlock(&gate->lock);
}

static void note_ready(qkv_storage_waiter *waiter) {
  gate_state *gate = waiter->context;
  pthread_mutex_lock(&gate->lock);
  gate->ready = true;
  pthread_cond_broadcast(&gate->changed);
  pthread_mutex_unlock(&gate->lock);
}

static void dirty_bytes_push_back(void **state) {
  scene *on = *state;
  on->config.dirty_bytes_max = 150000;
  scene_open(on);
  gate_state gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
  uint8_t *payload = calloc(1, SIZE);
  assert_non_null(payload);
  const qkv_storage_put_request request = {.meta = {.session = scene_session(on), .tokens = 64},
                                           .payload = payload,
                                           .bytes = SIZE,
                                           .written = pass_gate,
                                           .context = &gate};
  uint64_t record;
  qkv_error error = {0};
  assert_int_equal(qkv_storage_put(on->storage, &request, &record, NULL), QKV_OK);
  // The first one's bytes are dirty until its callback has returned.
  assert_int_equal(qkv_storage_put(on->storage, &request, &record, &error), QKV_UNAVAILABLE);
  assert_non_null(strstr(error.text, "100000 of 150000"));
  qkv_storage_waiter waiter = {.ready = note_ready, .context = &gate};
  qkv_storage_when_ready(on->storage, &waiter);
  pthread_mutex_lock(&gate.lock);
  while (!gate.arrived) pthread_cond_wait(&gate.changed, &gate.lock);
  assert_false(gate.ready);
  gate.open = true;
  pthread_cond_broadcast(&gate.changed);
  while (!gate.ready) pthread_cond_wait(&gate.changed, &gate.lock);
  pthread_mutex_unlock(&gate.lock);
  assert_int_equal(qkv_storage_put(on->storage, &request, &record, NULL), QKV_OK);
  scene_sync(on);
  assert_int_equal(scene_stats(on).puts_refused, 1);
  scene_close(on);
  free(payload);
}

// ---- Budget ----

static void the_budget_is_kept(void **state) {
  scene *on = *state;
  on->config.segment_bytes = 1 << 20;
  on->config.bytes_max = 6 << 20;
  scene_open(on);
  for (int round = 0; round < 3; round++) {
    const uint64_t session = scene_session(on);
    uint64_t record, position = 0;
    qkv_status status = QKV_OK;
    while (status == QKV_OK) {
      const qkv_record_meta meta = {.session = session, .position = position, .tokens = 64};
      status = scene_put_status(on, &meta, SIZE, true, &record);
      assert_true(scene_stats(on).disk_bytes <= on->config.bytes_max);
      position += 64;
    }
    assert_int_equal(status, QKV_RESOURCE_EXHAUSTED);
    assert_true(position / 64 > 30);
    assert_int_equal(scene_close_session(on, session), QKV_OK);
  }
  assert_int_equal(scene_stats(on).live_bytes, 0);
}

// Nine tenths of what is there, at least what is held, and four segments.
static void a_budget_follows_from_the_file_system(void **state) {
  (void)state;
  const uint64_t mib = 1 << 20;
  qkvi_space space = {.available = 1000 * mib, .whole = 2000 * mib};
  assert_int_equal(qkvi_space_budget(&space, mib), 900 * mib);
  assert_int_equal(qkvi_space_budget(&space, 256 * mib), 1024 * mib);
  space.held = space.allocated = 500 * mib;
  assert_int_equal(qkvi_space_budget(&space, mib), 1350 * mib);
  space.held = 800 * mib;  // its files have holes, or the file system packs them
  assert_int_equal(qkvi_space_budget(&space, mib), 1350 * mib);
  space.available = 0;
  assert_int_equal(qkvi_space_budget(&space, mib), 800 * mib);
  space.whole = 0;
  assert_int_equal(qkvi_space_budget(&space, mib), 0);
}

static void a_budget_is_taken_where_none_is_given(void **state) {
  scene *on = *state;
  on->config.segment_bytes = 1 << 20;
  scene_open(on);
  const uint64_t session = scene_session(on);
  for (uint64_t i = 0; i < COUNT; i++) (void)scene_put(on, session, 0, 64 * i, SIZE);
  scene_close(on);
  qkvi_space space;
  assert_int_equal(qkvi_space_read(on->directory, &space), 0);
  assert_true(space.held > COUNT * SIZE / 2 && space.whole > 0);
  scene_open(on);
  // Others write to the disk, too, meanwhile: the last tenth is as large as that may be.
  const uint64_t budget = scene_stats(on).budget_bytes, all = space.allocated + space.available;
  assert_true(budget >= 4 << 20 && budget >= space.held && budget <= all + (4 << 20));
  assert_true(budget >= all / 10 * 8);
  on->config.bytes_max = 64 << 20;
  scene_close(on);
  scene_open(on);
  assert_int_equal(scene_stats(on).budget_bytes, 64 << 20);
  assert_int_equal(qkvi_space_read("/nonexistent", &space), ENOENT);
}

// ---- Open files ----

static unsigned open_segments(void) {
  unsigned count = 0;
  DIR *listing = opendir("/proc/self/fd");
  assert_non_null(listing);
  for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
    char target[256];
    const ssize_t size = readlinkat(dirfd(listing), entry->d_name, target, sizeof target - 1);
    target[size > 0 ? size : 0] = '\0';
    count += strstr(target, "/segment-") != NULL ? 1 : 0;
  }
  closedir(listing);
  return count;
}

// One batch wants records of more segments than may be open.
static void files_stay_few(void **state) {
  enum { RECORDS = 150, OPEN_MAX = 4 };
  scene *on = *state;
  on->config.segment_bytes = 1 << 20;
  on->config.open_files_max = OPEN_MAX;
  scene_open(on);
  const uint64_t session = scene_session(on);
  uint64_t records[RECORDS];
  for (uint64_t i = 0; i < RECORDS; i++) records[i] = scene_put(on, session, 0, 64 * i, SIZE);
  assert_true(scene_stats(on).segments > 2 * OPEN_MAX);
  uint8_t *buffer = malloc(SIZE);
  assert_non_null(buffer);
  qkv_storage_batch *batch = qkv_storage_batch_create(on->storage, records, RECORDS, (uint64_t)RECORDS * 2 * SIZE);
  for (size_t i = 0; i < RECORDS; i++) {
    assert_int_equal(qkv_storage_batch_wait(batch, i, buffer, SIZE, NULL), QKV_OK);
    assert_true(open_segments() <= OPEN_MAX);
  }
  qkv_storage_batch_destroy(&batch);
  assert_int_equal(scene_compact(on, 1.1), QKV_OK);  // which reads one by one
  for (size_t i = 0; i < RECORDS; i++) scene_check(on, session, records[i], 64 * i, SIZE);
  free(buffer);
}

// ---- Compaction ----

// Puts COUNT records and drops two of three.
static uint64_t put_many(scene *on, uint64_t records[COUNT]) {
  const uint64_t session = scene_session(on);
  for (size_t i = 0; i < COUNT; i++) records[i] = scene_put(on, session, 0, 64 * i, SIZE);
  return session;
}

static void drop_most(scene *on, const uint64_t records[COUNT]) {
  for (size_t i = 0; i < COUNT; i++) {
    if (i % 3 != 0) qkv_storage_drop(on->storage, records[i]);
  }
  scene_sync(on);
}

static uint64_t scatter(scene *on, uint64_t records[COUNT]) {
  const uint64_t session = put_many(on, records);
  drop_most(on, records);
  return session;
}

static void check_scattered(scene *on, uint64_t session, const uint64_t records[COUNT]) {
  uint8_t *buffer = malloc(SIZE);
  for (size_t i = 0; i < COUNT; i++) {
    if (i % 3 == 0) {
      scene_check(on, session, records[i], 64 * i, SIZE);
    } else {
      assert_int_equal(scene_read(on, records[i], buffer, SIZE), QKV_NOT_FOUND);
    }
  }
  free(buffer);
}

static void compaction_gives_space_back(void **state) {
  scene *on = *state;
  on->config.segment_bytes = 1 << 20;
  on->config.open_files_max = 4;
  scene_open(on);
  uint64_t records[COUNT];
  const uint64_t session = scatter(on, records);
  const qkv_storage_stats before = scene_stats(on);
  assert_int_equal(scene_compact(on, 0.9), QKV_OK);
  const qkv_storage_stats after = scene_stats(on);
  assert_int_equal(after.records, COUNT / 3);
  assert_true(after.disk_bytes < before.disk_bytes / 2);
  assert_true(after.compacted_bytes > 0 && after.compactions >= 4);
  check_scattered(on, session, records);
  qkv_storage_segment segments[64];
  const size_t count = qkv_storage_list_segments(on->storage, segments, 64);
  assert_int_equal(count, after.segments);
  uint64_t live = 0, listed = 0;
  for (size_t i = 0; i < count; i++) {
    live += segments[i].live_bytes;
    listed += segments[i].records;
    if (i > 0) assert_true(segments[i].segment > segments[i - 1].segment);
  }
  assert_int_equal(live, after.live_bytes);
  assert_int_equal(listed, COUNT / 3);
  scene_close(on);
  scene_open(on);
  assert_int_equal(on->record_count, COUNT / 3);
  check_scattered(on, session, records);
}

// The caller's hash lies in the header that compaction moves.
static void compaction_keeps_hashes(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  uint64_t hashed = 0, plain = 0;
  const qkv_record_meta meta = {.session = session, .tokens = 64, .hash = {UINT64_MAX, 0x1234}};
  const qkv_record_meta without = {.session = session, .position = 64, .tokens = 64};
  assert_int_equal(scene_put_status(on, &meta, SIZE, true, &hashed), QKV_OK);
  assert_int_equal(scene_put_status(on, &without, SIZE, true, &plain), QKV_OK);
  for (int round = 0; round < 3; round++) {
    scene_close(on);
    scene_open(on);
    assert_int_equal(on->record_count, 2);
    assert_true(on->records[0].meta.hash[0] == UINT64_MAX && on->records[0].meta.hash[1] == 0x1234);
    assert_true(on->records[1].meta.hash[0] == 0 && on->records[1].meta.hash[1] == 0);
    assert_int_equal(scene_compact(on, 1.1), QKV_OK);
    assert_int_equal(scene_stats(on).compactions, 1);
  }
}

static void compaction_comes_by_itself(void **state) {
  scene *on = *state;
  on->config.segment_bytes = 1 << 20;
  on->config.compact_bytes_per_s = UINT64_C(1) << 30;
  on->config.sync_ms = 1;
  scene_open(on);
  uint64_t records[COUNT];
  const uint64_t session = scatter(on, records);
  // A sync is a turn of the storage's loop; the test's time limit ends a compaction that never comes.
  while (scene_stats(on).dead_bytes > scene_stats(on).live_bytes) scene_sync(on);
  assert_true(scene_stats(on).compactions > 0);
  check_scattered(on, session, records);
}

static double now_s(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void compaction_keeps_to_its_rate(void **state) {
  scene *on = *state;
  const double rate = 1 << 20;
  on->config.segment_bytes = 1 << 20;
  on->config.compact_bytes_per_s = (uint64_t)rate;
  on->config.sync_ms = 1;
  scene_open(on);
  uint64_t records[COUNT];
  const uint64_t session = put_many(on, records);
  const double begin = now_s();
  drop_most(on, records);
  while (scene_stats(on).dead_bytes > scene_stats(on).live_bytes) {
    scene_sync(on);
    // A share of 20 ms and one record may be ahead of the time.
    const uint64_t moved = scene_stats(on).compacted_bytes;
    assert_true((double)moved <= (now_s() - begin + 0.04) * rate + 2 * SIZE);
  }
  assert_true(scene_stats(on).compacted_bytes > 4 * SIZE);
  check_scattered(on, session, records);
}

static void small_segments_become_fewer(void **state) {
  scene *on = *state;
  uint64_t records[24], session = 0;
  for (uint64_t i = 0; i < 24; i++) {
    scene_open(on);
    if (i == 0) session = scene_session(on);
    records[i] = scene_put(on, session, 0, 64 * i, 1000);
    scene_close(on);
  }
  on->config.compact_bytes_per_s = UINT64_C(1) << 30;
  on->config.sync_ms = 1;
  scene_open(on);
  assert_int_equal(on->record_count, 24);
  while (scene_stats(on).segments > 17) scene_sync(on);
  for (uint64_t i = 0; i < 24; i++) scene_check(on, session, records[i], 64 * i, 1000);
}

static void compaction_drops_what_is_damaged(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  const uint64_t bad = scene_put(on, session, 0, 0, 10000), good = scene_put(on, session, 0, 64, 10000);
  scene_close(on);
  char path[128];
  scene_file(on, "segment-", path);
  scene_damage(path, 4096 + 200);
  scene_open(on);
  uint8_t buffer[10000];
  assert_int_equal(scene_compact(on, 1.1), QKV_OK);
  assert_int_equal(scene_stats(on).bad_records, 1);
  assert_int_equal(scene_read(on, bad, buffer, 10000), QKV_NOT_FOUND);
  scene_check(on, session, good, 64, 10000);
}

// ---- Verify ----

static bool stop_at_three(void *context, uint64_t done, uint64_t all) {
  *(uint64_t *)context = done;
  assert_int_equal(all, 5);
  return done < 3;
}

static void verify_can_be_ended(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t session = scene_session(on);
  for (uint64_t i = 0; i < 5; i++) scene_put(on, session, 0, 64 * i, 5000);
  qkv_storage_verify_report report;
  uint64_t done = 0;
  assert_int_equal(qkv_storage_verify(on->storage, stop_at_three, &done, &report), QKV_CANCELLED);
  assert_int_equal(done, 3);
  assert_int_equal(qkv_storage_verify(on->storage, NULL, NULL, &report), QKV_OK);
  assert_int_equal(report.records, 5);
  assert_int_equal(report.bytes, 25000);
  assert_int_equal(report.bad, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      BOTH(dirty_bytes_push_back),
      BOTH(the_budget_is_kept),
      cmocka_unit_test(a_budget_follows_from_the_file_system),
      BOTH(a_budget_is_taken_where_none_is_given),
      BOTH(files_stay_few),
      BOTH(compaction_gives_space_back),
      BOTH(compaction_keeps_hashes),
      BOTH(compaction_comes_by_itself),
      BOTH(compaction_keeps_to_its_rate),
      BOTH(compaction_drops_what_is_damaged),
      BOTH(verify_can_be_ended),
      BOTH(small_segments_become_fewer),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
