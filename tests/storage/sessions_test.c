// Which truncations the journal keeps: those that some view needs, found in little time however many there are. What
// forks have in common.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "storage/sessions_internal.h"

enum { EVENTS = 60, LAYERS = 3 };

// Cuts of session 1, and forks of it.
typedef struct event {
  bool forks;
  uint32_t layer;
  uint64_t position;
} event;

static qkv_journal_entry entry_of(const event *from, size_t at) {
  static const uint64_t positions[LAYERS] = {100, 100, 100};
  if (from->forks)
    return (qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_FORK,
                               .session = 2 + at,
                               .parent = 1,
                               .layers = LAYERS,
                               .positions = positions,
                               .sequence = 2 + at};
  return (qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_TRUNCATE,
                             .session = 1,
                             .layer = from->layer,
                             .position = from->position,
                             .sequence = 2 + at};
}

static bool covers(const event *one, const event *other) {
  return !one->forks && (one->layer == QKV_LAYER_ALL || one->layer == other->layer) &&
         one->position <= other->position;
}

// By the definition: up to the next cut that covers it, some fork has no covering cut between itself and this cut's
// time; or no later one covers it, for the session itself.
static bool is_needed(const event *events, size_t count, size_t at) {
  size_t later = at + 1, earlier = at;
  while (later < count && !covers(&events[later], &events[at])) later++;
  if (later == count) return true;
  while (earlier > 0 && !covers(&events[earlier - 1], &events[at])) earlier--;
  for (size_t i = earlier; i < later; i++) {
    if (events[i].forks) return true;
  }
  return false;
}

static qkvi_sessions *sessions_of(const event *events, size_t count) {
  qkvi_sessions *sessions = qkvi_sessions_create();
  const qkv_journal_entry open = {.kind = QKV_JOURNAL_SESSION_OPEN, .session = 1, .sequence = 1};
  assert_int_equal(qkvi_sessions_note(sessions, &open), QKV_OK);
  for (size_t i = 0; i < count; i++) {
    const qkv_journal_entry entry = entry_of(&events[i], i);
    assert_int_equal(qkvi_sessions_note(sessions, &entry), QKV_OK);
  }
  return sessions;
}

static uint64_t next_random(uint64_t *seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return *seed >> 33;
}

static void cuts_are_kept_that_are_needed(void **state) {
  (void)state;
  size_t kept = 0, dropped = 0;
  for (uint64_t seed = 1; seed <= 2000; seed++) {
    event events[EVENTS];
    uint64_t random = seed;
    const size_t count = 1 + next_random(&random) % EVENTS;
    for (size_t i = 0; i < count; i++) {
      const uint64_t layer = next_random(&random) % (LAYERS + 1);
      events[i] = (event){.forks = next_random(&random) % 8 == 0,
                          .layer = layer == LAYERS ? QKV_LAYER_ALL : (uint32_t)layer,
                          .position = next_random(&random) % 8};
    }
    qkvi_sessions *sessions = sessions_of(events, count);
    for (size_t i = 0; i < count; i++) {
      const qkv_journal_entry entry = entry_of(&events[i], i);
      const bool needed = events[i].forks || is_needed(events, count, i);
      if (qkvi_sessions_keep(sessions, &entry) != needed) fail_msg("seed %lu, event %zu", (unsigned long)seed, i);
      if (!events[i].forks) *(needed ? &kept : &dropped) += 1;
    }
    qkvi_sessions_destroy(&sessions);
  }
  assert_true(kept > 1000 && dropped > 1000);
}

static double now_s(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

// As a session has them that decodes speculatively: each one behind the last. In quadratic time they take minutes.
static void many_cuts_take_little_time(void **state) {
  (void)state;
  enum { STEPS = 4000, MANY_LAYERS = 32 };
  event *events = calloc((size_t)STEPS * MANY_LAYERS, sizeof *events);
  assert_non_null(events);
  for (size_t i = 0; i < (size_t)STEPS * MANY_LAYERS; i++)
    events[i] = (event){.layer = (uint32_t)i % MANY_LAYERS, .position = i / MANY_LAYERS};
  const double begin = now_s();
  qkvi_sessions *sessions = sessions_of(events, (size_t)STEPS * MANY_LAYERS);
  for (size_t i = 0; i < (size_t)STEPS * MANY_LAYERS; i++) {
    const qkv_journal_entry entry = entry_of(&events[i], i);
    assert_true(qkvi_sessions_keep(sessions, &entry));
  }
  qkvi_sessions_destroy(&sessions);
  assert_true(now_s() - begin < 5);
  free(events);
}

// ---- Forks ----

static void note(qkvi_sessions *sessions, const qkv_journal_entry *entry) {
  assert_int_equal(qkvi_sessions_note(sessions, entry), QKV_OK);
}

static void fork_at(qkvi_sessions *sessions, uint64_t session, uint64_t parent, uint64_t position) {
  const uint64_t positions[LAYERS] = {position, position, position};
  note(sessions, &(qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_FORK,
                                      .session = session,
                                      .parent = parent,
                                      .layers = LAYERS,
                                      .positions = positions,
                                      .sequence = session});
}

static void cut(qkvi_sessions *sessions, uint64_t session, uint64_t position) {
  note(sessions, &(qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_TRUNCATE,
                                      .session = session,
                                      .layer = QKV_LAYER_ALL,
                                      .position = position,
                                      .sequence = 100 + session});
}

static void end(qkvi_sessions *sessions, uint64_t session) {
  note(sessions, &(qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_CLOSE, .session = session, .sequence = 200});
}

// Whether two sessions have one lineage.
static bool have_one(const qkvi_sessions *sessions, uint64_t a, uint64_t b) {
  const qkvi_session *first = qkvi_sessions_find(sessions, a), *second = qkvi_sessions_find(sessions, b);
  return first->lined && second->lined && first->at == second->at;
}

// Tokens of a record of the owner's at this position that all views together need.
static uint32_t needed(const qkvi_sessions *sessions, uint64_t owner, uint64_t record, uint64_t position) {
  return qkvi_sessions_needed(sessions,
                              &(qkvi_entry){.record = record, .session = owner, .position = position, .tokens = 64});
}

static uint32_t seen(const qkvi_sessions *sessions, uint64_t heir, uint64_t record, uint64_t position) {
  qkvi_view view;
  qkvi_view_init(&view, qkvi_sessions_find(sessions, heir));
  assert_true(qkvi_view_up(&view));
  const uint32_t tokens =
      qkvi_view_tokens(&view, &(qkvi_entry){.record = record, .position = position, .tokens = 64});
  qkvi_view_deinit(&view);
  return tokens;
}

static bool sweep(void *context, const qkvi_session *session) {
  (void)session;
  ++*(int *)context;
  return true;
}

static void forks_that_see_the_same_have_one_lineage(void **state) {
  (void)state;
  int swept = 0;
  qkvi_sessions *sessions = sessions_of(NULL, 0);
  fork_at(sessions, 2, 1, 128);
  fork_at(sessions, 3, 1, 64);
  fork_at(sessions, 4, 1, 128);
  qkvi_sessions_run(sessions, sweep, &swept);
  for (uint64_t session = 5; session < 9; session++) fork_at(sessions, session, 1, 128);
  assert_false(have_one(sessions, 2, 3));
  for (uint64_t session = 4; session < 9; session++) assert_true(have_one(sessions, 2, session));
  // A cut of one of them, and a fork of one, are not those of the others.
  cut(sessions, 5, 10);
  fork_at(sessions, 9, 6, 100);
  assert_false(have_one(sessions, 2, 5) || have_one(sessions, 2, 6) || have_one(sessions, 5, 6));
  assert_true(have_one(sessions, 2, 4) && have_one(sessions, 2, 7));
  assert_int_equal(seen(sessions, 5, 1, 0), 10);
  assert_int_equal(seen(sessions, 6, 1, 64), 64);
  assert_int_equal(seen(sessions, 7, 1, 64), 64);
  fork_at(sessions, 10, 5, 100);  // of one whose limit has become less
  assert_int_equal(qkvi_sessions_parent(sessions, 10), 5);
  // What the parent puts behind a cut is a fork's that comes later, and not theirs.
  note(sessions, &(qkv_journal_entry){.kind = QKV_JOURNAL_SESSION_TRUNCATE,
                                      .session = 1,
                                      .layer = QKV_LAYER_ALL,
                                      .position = 64,
                                      .watermark = 50,
                                      .sequence = 150});
  fork_at(sessions, 11, 1, 128);
  assert_false(have_one(sessions, 2, 11));
  assert_int_equal(seen(sessions, 7, 49, 64), 64);
  assert_int_equal(seen(sessions, 7, 51, 64), 0);
  assert_int_equal(seen(sessions, 11, 49, 64), 0);
  assert_int_equal(seen(sessions, 11, 51, 64), 64);
  qkvi_sessions_destroy(&sessions);
}

// What the closed parent put stays until the last of them goes, in any order.
static void the_last_of_them_gives_up_what_they_see(void **state) {
  (void)state;
  int swept = 0;
  qkvi_sessions *sessions = sessions_of(NULL, 0);
  qkvi_sessions_run(sessions, sweep, &swept);
  for (uint64_t session = 2; session < 5; session++) fork_at(sessions, session, 1, 100);
  fork_at(sessions, 5, 3, 100);
  end(sessions, 1);
  end(sessions, 2);
  end(sessions, 3);
  end(sessions, 5);
  assert_int_equal(needed(sessions, 1, 1, 64), 36);
  assert_true(qkvi_sessions_known(sessions, 1) && !qkvi_sessions_known(sessions, 3));
  swept = 0;
  end(sessions, 4);
  assert_int_equal(swept, 2);  // its own records, and the parent's
  assert_false(qkvi_sessions_known(sessions, 1) || qkvi_sessions_known(sessions, 4));
  qkvi_sessions_destroy(&sessions);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(cuts_are_kept_that_are_needed),
      cmocka_unit_test(many_cuts_take_little_time),
      cmocka_unit_test(forks_that_see_the_same_have_one_lineage),
      cmocka_unit_test(the_last_of_them_gives_up_what_they_see),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
