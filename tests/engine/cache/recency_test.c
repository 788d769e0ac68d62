// engine/cache/recency.h against a plain model: which sessions a pass gives, in which order, while sessions are used,
// get something and lose it, join and leave; and with all of that at once, under ThreadSanitizer, too.
#include "engine/cache/recency.h"

#include <pthread.h>
#include <sched.h>

#include "engine/cache/session_retier.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"
#include "tests/engine/cache/backing_double.h"

enum { SESSIONS = 40, ROUNDS = 20000, THREADS = 3, TURNS = 20000 };

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  backing_double backing;
  qkv_recency *recency;
  qkv_session *sessions[SESSIONS];
  bool joined[SESSIONS];
  int64_t clock;
} scene;

static void setup(scene *s, bool evictable) {
  memset(s, 0, sizeof *s);
  s->model = test_model(1, 1, 16, 8, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 24);
  double_init(&s->backing);
  s->recency = qkv_recency_create();
  for (uint64_t i = 0; i < SESSIONS; i++) {
    const qkv_session_config config = {.tenant = "default",
                                       .purpose = QKV_PURPOSE_ATTEND,
                                       .policy = test_policy(4, 4, 8),
                                       .durability = QKV_DURABILITY_ASYNC,
                                       .backing = &s->backing.backing,
                                       .evictable = evictable,
                                       .recency = s->recency,  // as the store does
                                       .id = i + 1};
    assert_int_equal(qkv_session_create(&config, &s->model, s->arena, &s->sessions[i], NULL), QKV_OK);
    atomic_store(&s->sessions[i]->last_used_ms, ++s->clock);
  }
}

static void teardown(scene *s) {
  for (size_t i = 0; i < SESSIONS; i++) {
    if (s->joined[i]) qkv_recency_leave(s->recency, s->sessions[i]);
    assert_int_equal(atomic_load(&s->sessions[i]->references), 1);
    qkv_session_unref(&s->sessions[i]);
  }
  qkv_recency_destroy(&s->recency);
  qkv_arena_destroy(&s->arena);
  double_deinit(&s->backing);
}

static void join(scene *s, size_t i) {
  if (!s->joined[i]) qkv_recency_join(s->recency, s->sessions[i]);
  s->joined[i] = true;
}

static void leave(scene *s, size_t i) {
  if (s->joined[i]) qkv_recency_leave(s->recency, s->sessions[i]);
  s->joined[i] = false;
}

static void give(const scene *s, size_t i, uint64_t bytes) {
  atomic_store(&qkvi_working(s->sessions[i])->bytes_coded, bytes);
  qkv_recency_note(s->recency, QKV_RECENCY_CODED, s->sessions[i]);
}

// The least recently used one that has something and was not passed.
static qkv_session *expected(const scene *s, const bool *passed) {
  qkv_session *best = NULL;
  for (size_t i = 0; i < SESSIONS; i++) {
    if (!s->joined[i] || passed[i] || atomic_load(&qkvi_working(s->sessions[i])->bytes_coded) == 0) continue;
    if (best == NULL || qkv_session_last_used_ms(s->sessions[i]) < qkv_session_last_used_ms(best))
      best = s->sessions[i];
  }
  return best;
}

static size_t number_of(const qkv_session *session) {
  return (size_t)qkv_session_id(session) - 1;
}

static void make_pass(scene *s, uint64_t *seed) {
  bool passed[SESSIONS] = {false};
  qkv_recency_begin(s->recency, QKV_RECENCY_CODED);
  for (uint64_t looks = random_below(seed, 2 * SESSIONS); looks > 0; looks--) {
    qkv_session *wanted = expected(s, passed), *next = qkv_recency_next(s->recency, QKV_RECENCY_CODED);
    if (next == NULL) {
      assert_null(wanted);
      break;
    }
    const size_t number = number_of(next);
    assert_false(passed[number]);
    passed[number] = true;
    assert_ptr_equal(next, wanted);
    if (random_below(seed, 3) == 0) atomic_store(&qkvi_working(next)->bytes_coded, 0);
    qkv_session_unref(&next);
    // Meanwhile another one is used, comes or goes.
    const size_t other = (size_t)random_below(seed, SESSIONS);
    if (random_below(seed, 4) == 0) atomic_store(&s->sessions[other]->last_used_ms, ++s->clock);
    if (random_below(seed, 8) == 0) leave(s, other);
    if (random_below(seed, 8) == 0 && !s->joined[other] && !passed[other]) join(s, other);
  }
  qkv_recency_end(s->recency, QKV_RECENCY_CODED);
}

static void test_order(void **unused) {
  (void)unused;
  uint64_t seed = 5;
  scene s;
  setup(&s, false);
  for (int round = 0; round < ROUNDS; round++) {
    const size_t i = (size_t)random_below(&seed, SESSIONS);
    switch (random_below(&seed, 8)) {
      case 0:
        join(&s, i);
        break;
      case 1:
        if (random_below(&seed, 4) == 0) leave(&s, i);
        break;
      case 2:
      case 3:
        give(&s, i, 1 + random_below(&seed, 100));
        break;
      case 4:
        make_pass(&s, &seed);
        break;
      default:
        atomic_store(&s.sessions[i]->last_used_ms, ++s.clock);
    }
  }
  teardown(&s);
}

static size_t count_pass(const scene *s, qkv_recency_list list) {
  size_t count = 0;
  qkv_recency_begin(s->recency, list);
  for (qkv_session *next; (next = qkv_recency_next(s->recency, list)) != NULL; count++) qkv_session_unref(&next);
  qkv_recency_end(s->recency, list);
  return count;
}

static void expect_order(const scene *s, qkv_recency_list list, const size_t *numbers, size_t count) {
  qkv_recency_begin(s->recency, list);
  for (size_t i = 0; i < count; i++) {
    qkv_session *next = qkv_recency_next(s->recency, list);
    assert_non_null(next);
    assert_int_equal(number_of(next), numbers[i]);
    qkv_session_unref(&next);
  }
  assert_null(qkv_recency_next(s->recency, list));
  qkv_recency_end(s->recency, list);
}

// In the order in which their time ends, also where that comes nearer; those without are not among them.
static void test_the_first_to_expire_comes_first(void **unused) {
  (void)unused;
  scene s;
  setup(&s, false);
  for (size_t i = 0; i < 4; i++) {
    join(&s, i);
    if (i < 3) qkv_session_set_ttl(s.sessions[i], 3000 - 1000 * i);
  }
  expect_order(&s, QKV_RECENCY_EXPIRING, (size_t[]){2, 1, 0}, 3);
  qkv_session_set_ttl(s.sessions[0], 500);
  qkv_session_set_ttl(s.sessions[3], UINT64_MAX);
  expect_order(&s, QKV_RECENCY_EXPIRING, (size_t[]){0, 2, 1, 3}, 4);
  atomic_store(&s.sessions[2]->last_used_ms, 5000);
  expect_order(&s, QKV_RECENCY_EXPIRING, (size_t[]){0, 1, 2, 3}, 4);
  qkv_session_set_ttl(s.sessions[1], 0);
  expect_order(&s, QKV_RECENCY_EXPIRING, (size_t[]){0, 2, 3}, 3);
  qkv_recency_begin(s.recency, QKV_RECENCY_EXPIRING);  // passed, and sooner afterwards
  qkv_session *next = qkv_recency_next(s.recency, QKV_RECENCY_EXPIRING);
  qkv_session_unref(&next);
  next = qkv_recency_next(s.recency, QKV_RECENCY_EXPIRING);
  qkv_session_set_ttl(next, 1);
  atomic_store(&next->last_used_ms, 1);
  qkv_session_unref(&next);
  qkv_recency_end(s.recency, QKV_RECENCY_EXPIRING);
  expect_order(&s, QKV_RECENCY_EXPIRING, (size_t[]){2, 0, 3}, 3);
  teardown(&s);
}

// Tiers: those not looked at for longest first; what needs nothing, or is as low as it gets, only once it was used.
static void test_tiers_are_looked_at_in_turn(void **unused) {
  (void)unused;
  scene s;
  setup(&s, false);
  for (size_t i = 0; i < 4; i++) {
    qkvi_working(s.sessions[i])->tiers.aimed = i < 3;
    join(&s, i);
    atomic_store(&s.sessions[i]->last_used_ms, (int64_t)(100 + i));
    atomic_store(&qkvi_working(s.sessions[i])->tiers.looked_ms, (int64_t)(10 - i));
    atomic_store(&qkvi_working(s.sessions[i])->bytes_coded, 1);
    qkv_recency_note(s.recency, QKV_RECENCY_AIMED, s.sessions[i]);
    qkv_recency_note(s.recency, QKV_RECENCY_DEMOTABLE, s.sessions[i]);
  }
  expect_order(&s, QKV_RECENCY_AIMED, (size_t[]){2, 1, 0}, 3);
  expect_order(&s, QKV_RECENCY_DEMOTABLE, (size_t[]){0, 1, 2, 3}, 4);
  qkv_session_tiers_looked(s.sessions[2]);
  expect_order(&s, QKV_RECENCY_AIMED, (size_t[]){1, 0, 2}, 3);
  qkv_session_tiers_settled(s.sessions[0], 100);
  qkv_session_tiers_settled(s.sessions[1], 100);  // it was used at 101
  qkv_session_tiers_lowest(s.sessions[3], 103);
  expect_order(&s, QKV_RECENCY_AIMED, (size_t[]){1, 2}, 2);
  expect_order(&s, QKV_RECENCY_DEMOTABLE, (size_t[]){0, 1, 2}, 3);
  atomic_store(&qkvi_working(s.sessions[0])->tiers.looked_ms, 1);
  qkv_session_touch(s.sessions[0]);
  qkv_session_touch(s.sessions[3]);
  expect_order(&s, QKV_RECENCY_AIMED, (size_t[]){0, 1, 2}, 3);
  assert_int_equal(count_pass(&s, QKV_RECENCY_DEMOTABLE), 4);
  teardown(&s);
}

// What has nothing in memory any more is not among them.
static void test_the_empty_are_not_looked_at(void **unused) {
  (void)unused;
  scene s;
  setup(&s, false);
  for (size_t i = 0; i < SESSIONS; i++) {
    join(&s, i);
    give(&s, i, 10);
  }
  assert_int_equal(count_pass(&s, QKV_RECENCY_CODED), SESSIONS);
  for (size_t i = 1; i < SESSIONS; i++) atomic_store(&qkvi_working(s.sessions[i])->bytes_coded, 0);
  assert_int_equal(count_pass(&s, QKV_RECENCY_CODED), 1);
  give(&s, 7, 1);
  assert_int_equal(count_pass(&s, QKV_RECENCY_CODED), 2);
  atomic_store(&s.sessions[7]->pinned, true);
  assert_int_equal(count_pass(&s, QKV_RECENCY_CODED), 1);
  // Shared pages may come back by another session.
  atomic_store(&qkvi_working(s.sessions[8])->shares, true);
  qkv_recency_note(s.recency, QKV_RECENCY_CODED, s.sessions[8]);
  for (int i = 0; i < 3; i++) assert_int_equal(count_pass(&s, QKV_RECENCY_CODED), 2);
  teardown(&s);
}

// Those that are pinned are in neither list, so that no pass of others has to walk over them.
static void test_the_pinned_are_not_looked_at(void **unused) {
  (void)unused;
  for (int evictable = 0; evictable < 2; evictable++) {
    const qkv_recency_list own = evictable ? QKV_RECENCY_EVICTABLE : QKV_RECENCY_KEPT;
    scene s;
    setup(&s, evictable);
    qkv_session_set_pinned(s.sessions[0], true);
    for (size_t i = 0; i < SESSIONS; i++) join(&s, i);
    assert_int_equal(count_pass(&s, evictable ? QKV_RECENCY_KEPT : QKV_RECENCY_EVICTABLE), 0);
    assert_int_equal(count_pass(&s, own), SESSIONS - 1);
    for (size_t i = 0; i < 10; i++) qkv_session_set_pinned(s.sessions[i], true);
    assert_int_equal(count_pass(&s, own), SESSIONS - 10);
    qkv_recency_begin(s.recency, own);  // one that has been passed meanwhile
    qkv_session *first = qkv_recency_next(s.recency, own);
    qkv_session_set_pinned(first, true);
    qkv_recency_end(s.recency, own);
    assert_int_equal(count_pass(&s, own), SESSIONS - 11);
    qkv_session_set_pinned(first, false);
    qkv_session_unref(&first);
    for (size_t i = 0; i < 10; i++) qkv_session_set_pinned(s.sessions[i], false);
    assert_int_equal(count_pass(&s, own), SESSIONS);
    teardown(&s);
  }
}

// Exact rows that cannot be coded are not tried again before there are others.
static void test_what_is_given_up(void **unused) {
  (void)unused;
  scene s;
  setup(&s, false);
  join(&s, 0);
  atomic_store(&qkvi_working(s.sessions[0])->bytes_exact, 100);
  qkv_recency_note(s.recency, QKV_RECENCY_EXACT, s.sessions[0]);
  for (uint64_t bytes = 99; bytes <= 100; bytes++) {
    qkv_recency_begin(s.recency, QKV_RECENCY_EXACT);
    qkv_session *next = qkv_recency_next(s.recency, QKV_RECENCY_EXACT);
    assert_ptr_equal(next, s.sessions[0]);
    qkv_session_unref(&next);
    qkv_recency_give_up(s.recency, s.sessions[0], bytes);  // 99: there are others already
    qkv_recency_end(s.recency, QKV_RECENCY_EXACT);
  }
  assert_int_equal(count_pass(&s, QKV_RECENCY_EXACT), 0);
  atomic_store(&qkvi_working(s.sessions[0])->bytes_exact, 101);
  qkv_recency_note(s.recency, QKV_RECENCY_EXACT, s.sessions[0]);
  assert_int_equal(count_pass(&s, QKV_RECENCY_EXACT), 1);
  teardown(&s);
}

// ---- At once ----

typedef struct giver {
  scene *s;
  uint64_t seed;
  pthread_t thread;
} giver;

static void *give_on(void *context) {
  giver *on = context;
  for (int i = 0; i < TURNS; i++) {
    const size_t at = (size_t)random_below(&on->seed, SESSIONS);
    qkv_session_touch(on->s->sessions[at]);
    give(on->s, at, 1);
    if (i % 64 == 0) (void)sched_yield();
  }
  return NULL;
}

static void *take_on(void *context) {
  giver *on = context;
  for (int i = 0; i < TURNS; i++) {
    qkv_recency_begin(on->s->recency, QKV_RECENCY_CODED);
    for (int looks = 0; looks < 5; looks++) {
      qkv_session *next = qkv_recency_next(on->s->recency, QKV_RECENCY_CODED);
      if (next == NULL) break;
      atomic_store(&qkvi_working(next)->bytes_coded, 0);
      qkv_session_unref(&next);
    }
    qkv_recency_end(on->s->recency, QKV_RECENCY_CODED);
  }
  return NULL;
}

static void *come_and_go(void *context) {
  giver *on = context;
  for (int i = 0; i < TURNS; i++) {
    const size_t at = (size_t)random_below(&on->seed, SESSIONS);
    leave(on->s, at);
    join(on->s, at);
  }
  return NULL;
}

// Every session that has something at the end is found.
static void test_nothing_is_lost(void **unused) {
  (void)unused;
  scene s;
  setup(&s, false);
  for (size_t i = 0; i < SESSIONS; i++) join(&s, i);
  giver on[2 * THREADS + 1];
  for (size_t i = 0; i < 2 * THREADS + 1; i++) {
    on[i] = (giver){.s = &s, .seed = i + 1};
    assert_int_equal(
        pthread_create(&on[i].thread, NULL, i == 0 ? come_and_go : (i <= THREADS ? give_on : take_on), &on[i]), 0);
  }
  for (size_t i = 0; i < 2 * THREADS + 1; i++) assert_int_equal(pthread_join(on[i].thread, NULL), 0);
  size_t left = 0;
  for (size_t i = 0; i < SESSIONS; i++) left += atomic_load(&qkvi_working(s.sessions[i])->bytes_coded) > 0;
  assert_int_equal(count_pass(&s, QKV_RECENCY_CODED), left);
  teardown(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_order),
      cmocka_unit_test(test_the_first_to_expire_comes_first),
      cmocka_unit_test(test_tiers_are_looked_at_in_turn),
      cmocka_unit_test(test_the_empty_are_not_looked_at),
      cmocka_unit_test(test_the_pinned_are_not_looked_at),
      cmocka_unit_test(test_what_is_given_up),
      cmocka_unit_test(test_nothing_is_lost),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
