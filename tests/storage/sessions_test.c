// Which truncations the journal keeps: those that some view needs, found in little time however many there are.
#include "storage/sessions.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(cuts_are_kept_that_are_needed),
      cmocka_unit_test(many_cuts_take_little_time),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
