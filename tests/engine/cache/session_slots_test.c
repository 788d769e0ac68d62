// engine/cache/session_slots.h under sessions of names of all lengths, with and without a root of their own, which
// come and go: a number names its session, and all memory is given back.
#include "engine/cache/session_slots.h"

#include "engine/cache/session_state.h"
#include "tests/engine/cache/fixture.h"

enum { SESSIONS = 1000, ROUNDS = 20000 };

typedef struct held {
  qkv_session *session;
  qkv_prefix_hash root;
  char name[QKV_NAME_MAX + 1];
} held;

static void make(held *all, size_t i, uint64_t *seed, const qkv_model *model, qkv_arena *arena) {
  const size_t length = 1 + random_below(seed, random_below(seed, 4) == 0 ? QKV_NAME_MAX : 12);
  memset(all[i].name, (int)('a' + i % 26), length);
  all[i].name[length] = '\0';
  all[i].root = qkv_prefix_root("default", model->name, &i, random_below(seed, 2) == 0 ? 0 : sizeof i);
  const qkv_session_config config = {.name = all[i].name,
                                     .tenant = "default",
                                     .purpose = QKV_PURPOSE_ATTEND,
                                     .policy = test_policy(4, 4, 8),
                                     .root = all[i].root};
  assert_int_equal(qkv_session_create(&config, model, arena, &all[i].session, NULL), QKV_OK);
}

static void check(const held *at) {
  qkv_session_info info;
  if (at->session == NULL) return;
  const uint32_t number = qkv_session_number(at->session);
  assert_true(number > 0 && number >> QKV_SESSION_NUMBER_BITS == 0);
  assert_ptr_equal(qkv_session_of(number), at->session);
  assert_string_equal(qkv_session_name(at->session), at->name);
  qkv_session_read_info(at->session, &info, NULL);
  assert_true(qkv_prefix_hash_equal(&info.config.root, &at->root));
}

static void test_random(void **unused) {
  (void)unused;
  static held all[SESSIONS];
  uint64_t seed = 1;
  const qkv_model model = test_model(1, 1, 16, 8, QKV_FP16);
  qkv_arena *arena = qkv_arena_create("memory-budget", (uint64_t)1 << 24);
  for (int round = 0; round < ROUNDS; round++) {
    const size_t i = random_below(&seed, SESSIONS);
    check(&all[i]);
    // At first most come, then most go: chunks are filled, left, and given back.
    if (random_below(&seed, 10) < (round < ROUNDS / 2 ? 8 : 1)) {
      if (all[i].session == NULL) make(all, i, &seed, &model, arena);
    } else {
      qkv_session_unref(&all[i].session);
    }
    check(&all[i]);
  }
  for (size_t i = 0; i < SESSIONS; i++) {
    check(&all[i]);
    qkv_session_unref(&all[i].session);
  }
  assert_int_equal(qkv_heap_read(qkv_arena_heap(arena)).bytes_used, 0);
  assert_int_equal(qkv_arena_read(arena).bytes_used, 0);
  qkv_arena_destroy(&arena);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_random)};
  return cmocka_run_group_tests_name("session_slots", tests, NULL, NULL);
}
