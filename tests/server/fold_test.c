// Folding of sessions while they are used, over a real storage.
#include "server/residency/fold.h"

#include "engine/cache/session_fold.h"
#include "engine/cache/session_state.h"
#include "tests/server/fold_threads.h"

enum { ROUNDS = 60, READERS = 3, SESSIONS = 3 };

static const char *const names[SESSIONS] = {"a", "b", "c"};

// Reads sessions, found by their names, and sinks them.
static void *read_and_sink(void *context) {
  user *on = context;
  const qkv_recency *recency = qkv_store_recency(on->s->store);
  for (int round = 0; !atomic_load(&on->wrong); round++) {
    // On a busy machine all rounds may have passed before the first session is folded.
    if (round >= ROUNDS && qkv_recency_read_sums(recency).unfolded > 0) break;
    qkv_session *session = NULL;
    const char *name = names[next_random(&on->seed) % SESSIONS];
    if (qkv_store_session(on->s->store, "default", name, &session, NULL) != QKV_OK) {
      atomic_store(&on->wrong, true);
      break;
    }
    const uint32_t layer = (uint32_t)(next_random(&on->seed) % LAYERS);
    if (qkv_session_length(session) != TOKENS || !same_layer(on->s, session, layer, on->wanted))
      atomic_store(&on->wrong, true);
    sink(on->s, session);
    qkv_session_unref(&session);
    if (round % 4 == 0) (void)usleep(2000);
  }
  return NULL;
}

static void await_folded(const scene *s, uint64_t count) {
  while (qkv_recency_read_sums(qkv_store_recency(s->store)).folded < count) {
    (void)qkvi_fold_step(s->residency, 1);
    (void)usleep(1000);
  }
}

static void test_uses_while_sessions_are_folded(const char *io) {
  scene s;
  user readers[READERS], folder, compactor;
  _Atomic bool stop = false;
  setup(&s, io);
  content wanted = in_memory(&s, TOKENS);
  for (int i = 0; i < SESSIONS; i++) {
    qkv_session *session = open_session(&s, names[i], i % 2 == 0 ? QKV_DURABILITY_ASYNC : QKV_DURABILITY_SYNC);
    assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
    sync_all(&s, session);
    sink(&s, session);
    qkv_session_unref(&session);
  }
  folder = (user){.s = &s, .stop = &stop};
  compactor = folder;
  begin(&folder, fold);
  begin(&compactor, compact);
  for (int i = 0; i < READERS; i++) {
    readers[i] = (user){.s = &s, .wanted = &wanted, .seed = 7 + (uint64_t)i};
    begin(&readers[i], read_and_sink);
  }
  for (int i = 0; i < READERS; i++) end(&readers[i]);
  atomic_store(&stop, true);
  end(&folder);
  end(&compactor);
  await_folded(&s, SESSIONS);
  assert_true(qkv_recency_read_sums(qkv_store_recency(s.store)).unfolded > 0);
  restart(&s);
  for (int i = 0; i < SESSIONS; i++) assert_same(&s, names[i], &wanted);
  free_content(&wanted);
  teardown(&s);
}

static void test_uses_while_sessions_are_folded_uring(void **unused) {
  (void)unused;
  test_uses_while_sessions_are_folded("auto");
}

static void test_uses_while_sessions_are_folded_pread(void **unused) {
  (void)unused;
  test_uses_while_sessions_are_folded("pread");
}

// Calls are refused, the session can be deleted, and the next start finds it by its pages.
static void test_a_record_that_is_lost(void **unused) {
  (void)unused;
  scene s;
  qkv_error error = {0};
  setup(&s, "auto");
  content wanted = in_memory(&s, TOKENS);
  for (int i = 0; i < 2; i++) {
    qkv_session *session = open_session(&s, names[i], QKV_DURABILITY_ASYNC);
    assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
    sync_all(&s, session);
    sink(&s, session);
    qkv_session_unref(&session);
  }
  await_folded(&s, 2);
  for (int i = 0; i < 2; i++) {
    qkvi_waits waits = QKVI_WAIT_DISK;
    qkv_session *session = find_session(&s, names[i]);
    qkvi_journal_wait unpacked = {.residency = s.residency};
    qkv_storage_session_unpack(s.residency->storage, session->id, qkvi_catalogue_on_journal, &unpacked);
    assert_int_equal(qkvi_catalogue_finish_wait(&unpacked, NULL), QKV_OK);
    qkv_record_info info;
    assert_int_equal(qkv_storage_find_last(s.residency->storage, session->id, QKVI_RECORD_FOLD, &info), QKV_OK);
    qkv_storage_drop(s.residency->storage, info.record);
    const qkv_status status = qkvi_unfold(s.residency, NULL, session, &waits, &error);
    assert_int_equal(status, QKV_DATA_LOSS);
    assert_int_equal(append(&s, session, 0, 0, 10), QKV_DATA_LOSS);
    if (i == 1) {
      close_session(&s, &session);
    } else {
      qkv_session_unref(&session);
    }
  }
  restart(&s);
  assert_same(&s, "a", &wanted);
  assert_int_equal(qkv_store_read_stats(s.store).sessions, 1);
  free_content(&wanted);
  teardown(&s);
}

// A thread that may not wait for the disk is told to.
static void test_threads_that_may_not_wait(void **unused) {
  (void)unused;
  scene s;
  qkv_error error = {0};
  qkvi_waits waits = QKVI_WAIT_LAYERS;
  setup(&s, "auto");
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
  sync_all(&s, session);
  sink(&s, session);
  qkv_session_unref(&session);
  await_folded(&s, 1);
  // A check reads all records, also of folded sessions, and the record of their layers.
  qkv_storage_verify_report report;
  qkv_storage_stats stats;
  assert_int_equal(qkv_storage_verify(s.residency->storage, NULL, NULL, &report), QKV_OK);
  assert_true(report.records == LAYERS * TOKENS / 64 + 1 && report.bad == 0);
  qkv_storage_read_stats(s.residency->storage, &stats);
  assert_int_equal(stats.records, LAYERS * TOKENS / 64 + 1);
  session = find_session(&s, "a");
  assert_int_equal(qkvi_unfold(s.residency, NULL, session, &waits, &error), QKV_UNAVAILABLE);
  assert_true(waits == (QKVI_WAIT_LAYERS | QKVI_WAIT_DISK) && error.status == QKV_OK);
  assert_int_equal(qkvi_unfold(s.residency, NULL, session, &waits, &error), QKV_OK);
  assert_false(qkv_session_is_folded(session));
  qkv_session_unref(&session);
  teardown(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_uses_while_sessions_are_folded_uring),
      cmocka_unit_test(test_uses_while_sessions_are_folded_pread),
      cmocka_unit_test(test_a_record_that_is_lost),
      cmocka_unit_test(test_threads_that_may_not_wait),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
