// Lists of very many sessions: what other callers of the store wait for, and which sessions they have while others
// are opened and closed.
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "engine/base/clock.h"
#include "engine/cache/store.h"
#include "tests/engine/cache/fixture.h"

enum { SESSIONS = 20000, LISTERS = 3, OPENED = 200, STAYING = 3000 };

static qkv_store *make_store(size_t sessions) {
  qkv_store *store = qkv_store_create(&(qkv_store_config){.memory_budget = UINT64_C(1) << 30,
                                                          .models_max = 1,
                                                          .sessions_max = sessions,
                                                          .policy = test_policy(4, 2, 64)});
  qkv_model model = {.name = "m",
                     .tenant = "a",
                     .layers = 1,
                     .kv_heads = 1,
                     .q_heads = 1,
                     .key_dim = 8,
                     .value_dim = 8,
                     .dtype = QKV_FP16,
                     .policy = QKV_POLICY_UNSET};
  assert_int_equal(qkv_store_register_model(store, &model, NULL, NULL), QKV_OK);
  return store;
}

static bool open_one(qkv_store *store, const char *prefix, int i) {
  char name[32];
  qkv_session *session = NULL;
  (void)snprintf(name, sizeof name, "%s%06d", prefix, i);
  const qkv_session_config config = {
      .tenant = "a", .name = name, .purpose = QKV_PURPOSE_ATTEND, .policy = QKV_POLICY_UNSET};
  if (qkv_store_open(store, &config, "m", &session, NULL) != QKV_OK) return false;
  qkv_session_unref(&session);
  return true;
}

static bool close_one(qkv_store *store, const char *prefix, int i) {
  char name[32];
  uint64_t freed;
  (void)snprintf(name, sizeof name, "%s%06d", prefix, i);
  return qkv_store_close(store, "a", name, &freed, NULL) == QKV_OK;
}

static qkv_store *make_full(int sessions) {
  qkv_store *store = make_store((size_t)sessions + OPENED + 1);
  for (int i = 0; i < sessions; i++) assert_true(open_one(store, "s", i));
  return store;
}

static bool note_sessions(void *context, const qkv_model *model, size_t sessions) {
  (void)model;
  *(size_t *)context = sessions;
  return true;
}

// A look at the models of a tenant looks at no session.
static void test_models_of_many_sessions(void **state) {
  enum { TIMES = 10, LOOKS = 20 };
  (void)state;
  qkv_store *store = make_full(SESSIONS);
  double looks = INFINITY, lists = INFINITY;
  size_t sessions = 0;
  for (int i = 0; i < TIMES; i++) {
    qkv_session *first = NULL;
    const double begin = qkv_now_s();
    for (int look = 0; look < LOOKS; look++) qkv_store_each_model(store, "a", note_sessions, &sessions);
    const double middle = qkv_now_s();
    assert_int_equal(qkv_store_list(store, &(qkv_store_filter){.tenant = "a"}, &first, 1), 1);
    looks = fmin(looks, middle - begin);
    lists = fmin(lists, qkv_now_s() - middle);
    assert_string_equal(qkv_session_name(first), "s000000");
    qkv_session_unref(&first);
  }
  assert_int_equal(sessions, SESSIONS);
  if (looks > lists) fail_msg("%d looks at models take %g s, one list of all sessions %g", LOOKS, looks, lists);
  qkv_store_destroy(&store);
}

typedef struct lister {
  qkv_store *store;
  _Atomic bool done;
  _Atomic int lists, wrong;
} lister;

static void *list_first(void *context) {
  lister *of = context;
  while (!of->done) {
    qkv_session *first = NULL;
    if (qkv_store_list(of->store, &(qkv_store_filter){.tenant = "a"}, &first, 1) != 1) of->wrong++;
    qkv_session_unref(&first);
    of->lists++;
  }
  return NULL;
}

// A session is opened and closed between two parts of a list, not behind all lists that overlap.
static void test_lists_keep_nobody_waiting(void **state) {
  enum { ROUNDS = 10 };
  (void)state;
  lister of = {.store = make_full(SESSIONS)};
  pthread_t threads[LISTERS];
  for (int i = 0; i < LISTERS; i++) assert_int_equal(pthread_create(&threads[i], NULL, list_first, &of), 0);
  while (of.lists < LISTERS) sched_yield();
  // In each of these, where a list keeps others waiting; where none does, a round without a processor may see many.
  int lists = INT_MAX;
  for (int round = 0; round < ROUNDS && lists > OPENED / 2; round++) {
    const int before = of.lists;
    for (int i = 0; i < OPENED; i++) assert_true(open_one(of.store, "x", i) && close_one(of.store, "x", i));
    if (of.lists - before < lists) lists = of.lists - before;
  }
  of.done = true;
  for (int i = 0; i < LISTERS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  assert_int_equal(of.wrong, 0);
  if (lists > OPENED / 2) fail_msg("at least %d lists ended while %d sessions were opened and closed", lists, OPENED);
  qkv_store_destroy(&of.store);
}

// Sessions come and go among those that stay, and the table grows and shrinks with them.
static void *open_and_close(void *context) {
  lister *of = context;
  while (!of->done) {
    for (int i = 0; i < STAYING * 2; i++) of->wrong += !open_one(of->store, "x", i);
    for (int i = 0; i < STAYING * 2; i++) of->wrong += !close_one(of->store, "x", i);
  }
  return NULL;
}

static void test_what_stays_is_listed_once(void **state) {
  enum { LISTS = 60 };
  (void)state;
  lister of = {.store = make_store(STAYING * 4)};
  pthread_t thread;
  qkv_session **listed = calloc(STAYING + 1, sizeof *listed);
  assert_non_null(listed);
  for (int i = 0; i < STAYING; i++) assert_true(open_one(of.store, "s", i));
  assert_int_equal(pthread_create(&thread, NULL, open_and_close, &of), 0);
  for (int list = 0; list < LISTS; list++) {
    const size_t max = list % 2 == 0 ? STAYING + 1 : 7;
    const qkv_store_filter filter = {.tenant = "a", .prefix = "s"};
    const size_t count = qkv_store_list(of.store, &filter, listed, max);
    assert_int_equal(count, max < STAYING ? max : STAYING);
    for (size_t i = 0; i < count; i++) {
      char name[32];
      (void)snprintf(name, sizeof name, "s%06zu", i);
      assert_string_equal(qkv_session_name(listed[i]), name);
      qkv_session_unref(&listed[i]);
    }
  }
  of.done = true;
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(of.wrong, 0);
  free(listed);
  qkv_store_destroy(&of.store);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_models_of_many_sessions),
                                     cmocka_unit_test(test_lists_keep_nobody_waiting),
                                     cmocka_unit_test(test_what_stays_is_listed_once)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
