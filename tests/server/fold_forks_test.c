// Folding of sessions that share pages, while they and their parents are used, cut and closed, over a real storage.
#include "server/residency/fold.h"

#include "engine/cache/session_fold.h"
#include "engine/cache/session_state.h"
#include "tests/server/fold_threads.h"

enum { ROUNDS = 40, READERS = 2, STAYING = 3, CUT = 500 };

// One family for good, of which the first is the parent.
static const char *const names[STAYING] = {"a", "b", "c"};

static bool is_folded(const qkv_session *session) {
  for (int i = 0; i < 40000 && !qkv_session_is_folded(session); i++) (void)usleep(500);
  return qkv_session_is_folded(session);
}

// Sometimes in memory afterwards, sometimes not.
static void *read_and_sink(void *context) {
  user *on = context;
  for (int round = 0; round < ROUNDS && !atomic_load(&on->wrong); round++) {
    qkv_session *session = NULL;
    qkv_session_info info;
    if (qkv_store_session(on->s->store, "default", names[next_random(&on->seed) % STAYING], &session, NULL) != QKV_OK)
      return NULL;
    qkv_session_read_info(session, &info, NULL);
    if (info.usage.tokens_coded != (uint64_t)LAYERS * TOKENS || info.usage.tokens_cold > info.usage.tokens_coded)
      atomic_store(&on->wrong, true);
    const uint32_t layer = (uint32_t)(next_random(&on->seed) % LAYERS);
    if (!same_layer(on->s, session, layer, on->wanted)) atomic_store(&on->wrong, true);
    if (next_random(&on->seed) % 2 == 0) sink(on->s, session);
    qkv_session_unref(&session);
    if (round % 2 == 0) (void)usleep(3000);
  }
  return NULL;
}

static void check(const scene *s, qkv_session **session, const content *wanted, bool closes) {
  for (uint32_t i = 0; i < LAYERS; i++) assert_true(same_layer(s, *session, i, wanted));
  sink(s, *session);
  if (closes) close_session(s, session);
  qkv_session_unref(session);
}

// A parent and a fork, of which the fork is folded at once: meanwhile the parent is used, evicted, cut or closed.
static void family(const user *on, int round) {
  const scene *s = on->s;
  qkv_session *parent = open_session(s, "parent", round % 2 == 0 ? QKV_DURABILITY_ASYNC : QKV_DURABILITY_SYNC);
  assert_int_equal(append(s, parent, 0, 0, TOKENS), QKV_OK);
  assert_int_equal(qkv_session_seal(parent, NULL), QKV_OK);
  sync_all(s, parent);
  qkv_session *fork = fork_session(s, parent, "fork", TOKENS), *held = fork;
  qkv_session_unref(&fork);
  assert_true(is_folded(held));  // the store has it
  const int way = round % 4;
  if (way == 0) {
    sink(s, parent);
    qkv_session_unref(&parent);
  } else if (way == 1) {
    assert_int_equal(qkv_session_truncate(parent, CUT, NULL, 0, NULL), QKV_OK);
    assert_int_equal(append(s, parent, 1, CUT, TOKENS), QKV_OK);
    assert_int_equal(qkv_session_seal(parent, NULL), QKV_OK);
    sync_all(s, parent);
    check(s, &parent, on->wanted_cut, false);
  } else if (way == 2) {
    close_session(s, &parent);
  } else {
    check(s, &parent, on->wanted, false);
  }
  fork = find_session(s, "fork");
  check(s, &fork, on->wanted, round % 3 == 0);
  if (way != 2) {
    parent = find_session(s, "parent");
    check(s, &parent, way == 1 ? on->wanted_cut : on->wanted, true);
  }
  if (round % 3 == 0) return;
  fork = find_session(s, "fork");
  check(s, &fork, on->wanted, true);
}

static uint64_t ssd_bytes(const scene *s) {
  qkv_session *session = find_session(s, names[0]);
  const uint64_t bytes = qkv_account_read(qkv_session_account(session)).ssd_bytes;
  qkv_session_unref(&session);
  return bytes;
}

static void test_families(const char *io) {
  scene s;
  user readers[READERS], folder, compactor;
  _Atomic bool stop = false;
  setup(&s, io);
  content wanted = in_memory(&s, TOKENS), wanted_cut = in_memory(&s, CUT);
  qkv_session *parent = open_session(&s, names[0], QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, parent, 0, 0, TOKENS), QKV_OK);
  assert_int_equal(qkv_session_seal(parent, NULL), QKV_OK);
  sync_all(&s, parent);
  const uint64_t stored = ssd_bytes(&s);
  for (int i = 1; i < STAYING; i++) {
    qkv_session *fork = fork_session(&s, parent, names[i], TOKENS);
    qkv_session_unref(&fork);
  }
  qkv_session_unref(&parent);
  folder = (user){.s = &s, .stop = &stop};
  compactor = folder;
  begin(&folder, fold);
  begin(&compactor, compact);
  for (int i = 0; i < READERS; i++) {
    readers[i] = (user){.s = &s, .wanted = &wanted, .seed = 7 + (uint64_t)i};
    begin(&readers[i], read_and_sink);
  }
  const user own = {.s = &s, .wanted = &wanted, .wanted_cut = &wanted_cut};
  for (int round = 0; round < ROUNDS / 2; round++) family(&own, round);
  for (int i = 0; i < READERS; i++) end(&readers[i]);
  for (int i = 0; i < STAYING; i++) {
    qkv_session *session = find_session(&s, names[i]), *held = session;
    sink(&s, session);
    qkv_session_unref(&session);
    assert_true(is_folded(held));
  }
  atomic_store(&stop, true);
  end(&folder);
  end(&compactor);
  assert_int_equal(ssd_bytes(&s), stored);
  assert_true(qkv_recency_read_sums(qkv_store_recency(s.store)).unfolded > 0);
  restart(&s);
  for (int i = 0; i < STAYING; i++) assert_same(&s, names[i], &wanted);
  free_content(&wanted);
  free_content(&wanted_cut);
  teardown(&s);
}

static void test_families_uring(void **unused) {
  (void)unused;
  test_families("auto");
}

static void test_families_pread(void **unused) {
  (void)unused;
  test_families("pread");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_families_uring),
      cmocka_unit_test(test_families_pread),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
