// Sessions whose end or truncation the journal does not take, and forks of one that a kill has shortened, over a real
// storage in this process.
#include "engine/base/clock.h"
#include "server/residency/residency.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#include "tests/server/residency_fixture.h"

static _Atomic bool failing;

int fdatasync(int file) {  // in place of libc's; not io_uring's
  if (!atomic_load(&failing)) return (int)syscall(SYS_fdatasync, file);
  errno = EIO;
  return -1;
}

// ---- A journal that does not take entries ----

// Whether all ends are in the journal, at most a minute later.
static bool await_closes(qkvi_residency *residency) {
  const int64_t until = qkv_now_ms() + 60000;
  for (uint64_t seen = qkvi_progress_count(residency);; seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS)) {
    const bool waiting = qkvi_closes_waiting(residency);
    if (!waiting || qkv_now_ms() > until) return !waiting;
  }
}

// Journals a fork of the session that is then refused in memory.
static void fork_in_vain(const scene *s, qkv_session *parent) {
  const uint64_t positions[LAYERS] = {0};
  qkvi_catalogue_fork fork;
  qkv_session_config config = *qkv_session_config_of(parent);
  config.name = "fork";
  assert_int_equal(qkvi_catalogue_enlist(s->residency, &config, NULL), QKV_OK);
  assert_int_equal(qkvi_catalogue_fork_begin(s->residency, parent, &config, positions, &fork, NULL), QKV_OK);
  qkvi_residency_lock(s->residency);
  while (!fork.wait->done) (void)pthread_cond_wait(&s->residency->moved, &s->residency->lock);
  qkvi_residency_unlock(s->residency);
  atomic_store(&failing, true);
  assert_int_equal(qkvi_catalogue_fork_done(&fork, NULL, NULL), QKV_INTERNAL);
}

// The journal does not take the ends of sessions for a while: they are written once it does, and nothing comes back.
static void test_ends_are_written_again(void **unused) {
  (void)unused;
  scene s;
  qkv_session *sessions[3];
  static const char *names[] = {"closed", "dropped", "parent"};
  uint64_t freed;
  setup(&s, "pread");
  for (int i = 0; i < 3; i++) {
    sessions[i] = open_session(&s, names[i], QKV_DURABILITY_ASYNC);
    assert_int_equal(append(&s, sessions[i], 0, 0, 64), QKV_OK);
    sync_all(&s, sessions[i]);
  }
  fork_in_vain(&s, sessions[2]);
  for (int i = 0; i < 2; i++) assert_int_equal(qkv_store_close_session(s.store, sessions[i], &freed, NULL), QKV_OK);
  assert_int_equal(qkvi_catalogue_closed(s.residency, sessions[0], NULL), QKV_INTERNAL);
  qkvi_catalogue_drop(s.residency, sessions[1]);
  for (int i = 0; i < 3; i++) qkv_session_unref(&sessions[i]);
  assert_true(qkvi_closes_waiting(s.residency));
  atomic_store(&failing, false);
  assert_true(await_closes(s.residency));
  assert_int_equal(qkvi_write_back_failure(s.residency), QKV_OK);
  restart(&s);
  assert_int_equal(qkv_store_read_stats(s.store).sessions, 1);
  sessions[2] = find_session(&s, "parent");
  qkv_session_unref(&sessions[2]);
  teardown(&s);
}

static unsigned failed_cuts(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const unsigned count = HASH_COUNT(residency->cuts);
  qkvi_residency_unlock(residency);
  return count;
}

// Truncations that the journal does not take: one of each session is kept, and none of a closed one.
static void test_failed_truncations_are_few(void **unused) {
  (void)unused;
  scene s;
  qkv_error error = {0};
  setup(&s, "pread");
  qkv_session *sessions[2] = {open_session(&s, "a", QKV_DURABILITY_ASYNC),
                              open_session(&s, "b", QKV_DURABILITY_ASYNC)};
  for (int i = 0; i < 2; i++) {
    assert_int_equal(append(&s, sessions[i], 0, 0, 256), QKV_OK);
    sync_all(&s, sessions[i]);
  }
  atomic_store(&failing, true);
  for (uint64_t end = 200; end >= 190; end--) {
    assert_int_equal(qkv_session_truncate(sessions[0], end, NULL, 0, NULL), QKV_OK);
    assert_int_equal(qkvi_write_back_truncated(s.residency, NULL, sessions[0], &error), QKV_UNAVAILABLE);
  }
  atomic_store(&failing, false);
  assert_int_equal(failed_cuts(s.residency), 1);
  assert_true(qkvi_write_back_lost_truncation(s.residency, qkv_session_id(sessions[0])));
  assert_false(qkvi_write_back_lost_truncation(s.residency, qkv_session_id(sessions[1])));
  close_session(&s, &sessions[0]);
  assert_int_equal(failed_cuts(s.residency), 0);
  qkv_session_unref(&sessions[1]);
  teardown(&s);
}

// ---- A kill ----

// Once the start's entries are in it.
static uint64_t journal_bytes(const scene *s) {
  qkv_storage_stats stats;
  for (uint64_t seen = 0; qkvi_write_back_cuts_waiting(s->residency, 0);)
    seen = qkvi_progress_await(s->residency, seen, QKVI_STEP_MS);
  qkv_storage_read_stats(s->residency->storage, &stats);
  return stats.journal_bytes;
}

static uint64_t shortest(const scene *s, const char *name) {
  qkv_session *session = find_session(s, name);
  qkv_session_info info;
  uint64_t lengths[LAYERS], least = UINT64_MAX;
  qkv_session_read_info(session, &info, lengths);
  for (size_t i = 0; i < LAYERS; i++) least = lengths[i] < least ? lengths[i] : least;
  qkv_session_unref(&session);
  return least;
}

// What the directory has now is what the next start finds, as after a kill.
static void kill_and_start(scene *s) {
  char command[256];
  snprintf(command, sizeof command, "cp -r %s %s-kill", s->directory, s->directory);
  assert_int_equal(system(command), 0);  // NOLINT(cert-env33-c)
  stop(s);
  snprintf(command, sizeof command, "rm -r %s && mv %s-kill %s", s->directory, s->directory, s->directory);
  assert_int_equal(system(command), 0);  // NOLINT(cert-env33-c)
  start(s);
}

// A truncation of all layers is one entry in the journal; one of some layers, as older daemons wrote it for all, is
// one for each. A start finds both right.
static void test_a_truncation_is_one_entry(void **unused) {
  (void)unused;
  scene s;
  static const uint32_t layers[LAYERS] = {0, 1, 2, 3};
  setup(&s, "pread");
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, 256), QKV_OK);
  sync_all(&s, session);
  const uint64_t before = journal_bytes(&s);
  for (uint64_t end = 200; end >= 191; end--)
    assert_int_equal(qkv_session_truncate(session, end, NULL, 0, NULL), QKV_OK);
  assert_int_equal(journal_bytes(&s) - before, 10 * QKV_STORAGE_BLOCK);
  qkv_session_unref(&session);
  kill_and_start(&s);
  assert_int_equal(shortest(&s, "a"), 191);
  session = find_session(&s, "a");
  const uint64_t found = journal_bytes(&s);
  assert_int_equal(qkv_session_truncate(session, 150, layers, LAYERS, NULL), QKV_OK);
  assert_int_equal(journal_bytes(&s) - found, LAYERS * QKV_STORAGE_BLOCK);
  qkv_session_unref(&session);
  kill_and_start(&s);
  assert_int_equal(shortest(&s, "a"), 150);
  teardown(&s);
}

// As where they are found to be damaged.
static void lose_pages(const scene *s, const char *name, size_t page) {
  qkv_session *session = find_session(s, name);
  uint64_t freed;
  for (uint32_t i = 0; i < LAYERS; i++) {
    const qkv_layer *layer;
    assert_int_equal(qkv_session_read(session, i, &layer, NULL), QKV_OK);
    qkv_storage_drop(s->residency->storage, qkvi_layer_peek(layer, page).record);
    qkv_session_read_done(session, i);
  }
  qkv_session_unref(&session);
  assert_int_equal(qkvi_upkeep_compact(s->residency, 1.1, &freed, NULL), QKV_OK);
}

// A kill takes the exact rows of a session, of which a fork has a record of its own. The session gets other rows in
// their place: the fork never has these, also where its record is lost.
static void test_a_fork_has_no_rows_of_after_a_kill(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "pread");
  qkv_session *parent = open_session(&s, "parent", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, parent, 0, 0, 100), QKV_OK);
  sync_all(&s, parent);
  qkv_session *fork = fork_session(&s, parent, "fork", 100);
  assert_int_equal(qkv_session_seal(fork, NULL), QKV_OK);
  sync_all(&s, fork);
  qkv_session_unref(&fork);
  qkv_session_unref(&parent);
  kill_and_start(&s);
  assert_int_equal(shortest(&s, "parent"), 64);
  assert_int_equal(shortest(&s, "fork"), 100);
  parent = find_session(&s, "parent");
  assert_int_equal(append(&s, parent, 1, 64, 128), QKV_OK);
  sync_all(&s, parent);
  qkv_session_unref(&parent);
  lose_pages(&s, "fork", 1);
  uint64_t bytes[4];
  for (int i = 0; i < 4; i++) {
    restart(&s);
    assert_int_equal(shortest(&s, "parent"), 128);
    assert_int_equal(shortest(&s, "fork"), 64);
    bytes[i] = journal_bytes(&s);
  }
  assert_int_equal(bytes[3], bytes[1]);  // they are separated once
  teardown(&s);
}

int main(void) {
  qkv_log_setup(stderr, QKV_LOG_ERROR);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_ends_are_written_again),
      cmocka_unit_test(test_failed_truncations_are_few),
      cmocka_unit_test(test_a_truncation_is_one_entry),
      cmocka_unit_test(test_a_fork_has_no_rows_of_after_a_kill),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
