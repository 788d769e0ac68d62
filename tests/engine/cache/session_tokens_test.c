// A session's token ids: kept without a gap, compared, cut, shared by forks, found again by their hashes.
#include "engine/cache/session_tokens.h"

#include <pthread.h>

#include "engine/cache/store.h"
#include "tests/engine/cache/fixture.h"
#include "tests/engine/cache/used_session.h"

enum { COUNT = 1000, PAGE = QKV_PREFIX_PAGE };

typedef struct scene {
  qkv_arena *arena;
  qkv_prefix_index *index;
  qkv_session_tokens_config config;
  qkv_session_tokens tokens;
  uint32_t open[QKV_PREFIX_PAGE];
  uint32_t ids[COUNT];
} scene;

static void setup_scene(scene *s) {
  uint64_t seed = 5;
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 20);
  s->index = qkv_prefix_index_create(1000, 1000);
  s->config = (qkv_session_tokens_config){
      .arena = s->arena, .index = s->index, .root = qkv_prefix_root("default", "m", NULL, 0), .owner = 1};
  qkv_session_tokens_init(&s->tokens, &s->config);
  qkv_session_tokens_give_open(&s->tokens, s->open);
  for (size_t i = 0; i < COUNT; i++) s->ids[i] = (uint32_t)random_next(&seed);
}

static void teardown_scene(scene *s) {
  qkv_session_tokens_deinit(&s->tokens);
  const qkv_arena_stats stats = qkv_arena_read(s->arena);
  assert_int_equal(stats.bytes_used + stats.bytes_reserved, 0);
  assert_int_equal(qkv_prefix_index_read(s->index).pages, 0);
  assert_int_equal(qkv_prefix_index_read(s->index).holders, 0);
  qkv_prefix_index_destroy(&s->index);
  qkv_arena_destroy(&s->arena);
}

// As an append does it. What it costs is what it takes.
static qkv_status append_ids(scene *s, qkv_session_tokens *tokens, uint64_t position, const uint32_t *ids,
                             size_t count, qkv_error *error) {
  QKV_TRY(qkv_session_tokens_check(tokens, position, ids, count, error));
  uint64_t reserved = qkv_session_tokens_cost(tokens, position, count);
  QKV_TRY(qkv_arena_reserve(s->arena, reserved, error));
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), position, ids, count, &reserved);
  assert_int_equal(reserved, 0);
  return QKV_OK;
}

static void put(scene *s, qkv_session_tokens *tokens, uint64_t begin, uint64_t end) {
  qkv_error error = {0};
  if (append_ids(s, tokens, begin, s->ids + begin, end - begin, &error) != QKV_OK) fail_msg("%s", error.text);
}

// It holds the first `length` ids, and its pages are in the index.
static void check_holds(scene *s, qkv_session_tokens *tokens, uint64_t length) {
  qkv_prefix_hash expected = s->config.root, hash;
  assert_int_equal(qkv_session_tokens_length(tokens), length);
  for (uint64_t page = 0; page < length / PAGE; page++) {
    expected = qkv_prefix_next(&expected, s->ids + page * PAGE);
    assert_true(qkv_session_tokens_hash(tokens, page, &hash));
    assert_true(qkv_prefix_hash_equal(&hash, &expected));
  }
  assert_false(qkv_session_tokens_hash(tokens, length / PAGE, &hash));
  assert_int_equal(qkv_prefix_index_pages(s->index, tokens->holder), length / PAGE);
  if (length == 0) return;
  qkv_error error = {0};
  const uint32_t other = ~s->ids[length - 1];
  assert_int_equal(qkv_session_tokens_check(tokens, length - 1, &other, 1, &error), QKV_ALREADY_EXISTS);
  assert_int_equal(qkv_session_tokens_check(tokens, 0, s->ids, COUNT, NULL), QKV_OK);
}

static void ids_are_read(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  put(&s, &s.tokens, 0, 300);
  for (uint64_t position = 0; position < 310; position += 7) {
    for (size_t max = 0; max <= COUNT; max += 50) {
      uint32_t read[COUNT + 1];
      const size_t left = position < 300 ? 300 - (size_t)position : 0, expected = left < max ? left : max;
      read[expected] = 12345;
      assert_int_equal(qkv_session_tokens_read(&s.tokens, position, read, max), expected);
      assert_memory_equal(read, s.ids + position, expected * sizeof *read);
      assert_int_equal(read[expected], 12345);
    }
  }
  teardown_scene(&s);
}

static void ids_continue(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  uint64_t at = 0;
  const uint64_t steps[] = {1, 62, 1, 64, 1, 200, 300, 64};
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++, at += steps[i - 1]) {
    put(&s, &s.tokens, at, at + steps[i]);
    check_holds(&s, &s.tokens, at + steps[i]);
  }
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, at / PAGE * qkv_arena_cost(296));
  put(&s, &s.tokens, 0, at);        // another layer, the same
  put(&s, &s.tokens, 70, 200);      // a part
  put(&s, &s.tokens, 70, at + 10);  // and further
  check_holds(&s, &s.tokens, at + 10);
  teardown_scene(&s);
}

static void another_id_is_refused_by_position(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  put(&s, &s.tokens, 0, 200);
  for (size_t i = 0; i < 200; i += 7) {
    uint32_t ids[COUNT];
    char expected[128];
    qkv_error error = {0};
    memcpy(ids, s.ids, sizeof ids);
    ids[i]++;
    const uint64_t from = i / 2;
    assert_int_equal(append_ids(&s, &s.tokens, from, ids + from, 300 - from, &error), QKV_ALREADY_EXISTS);
    (void)snprintf(expected, sizeof expected, "position %zu has token id %u, token_ids[%zu] is %u", i, s.ids[i],
                   i - (size_t)from, ids[i]);
    assert_string_equal(error.text, expected);
    check_holds(&s, &s.tokens, 200);
  }
  teardown_scene(&s);
}

static void a_gap_ends_what_is_held(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  put(&s, &s.tokens, 0, 100);
  put(&s, &s.tokens, 101, 300);
  check_holds(&s, &s.tokens, 100);
  assert_int_equal(qkv_session_tokens_cost(&s.tokens, 101, 500), 0);
  put(&s, &s.tokens, 100, 200);
  check_holds(&s, &s.tokens, 200);
  teardown_scene(&s);
}

static void truncation_cuts_anywhere(void **state) {
  (void)state;
  for (uint64_t cut = 0; cut <= 330; cut += cut % 63 == 0 ? 1 : 62) {
    scene s;
    setup_scene(&s);
    put(&s, &s.tokens, 0, 320);
    qkv_session_tokens_truncate(&s.tokens, cut);
    const uint64_t left = cut < 320 ? cut : 320;
    check_holds(&s, &s.tokens, left);
    assert_int_equal(qkv_arena_read(s.arena).bytes_used, left / PAGE * qkv_arena_cost(296));
    s.ids[left]++;  // another one may follow now
    put(&s, &s.tokens, left, 500);
    check_holds(&s, &s.tokens, 500);
    teardown_scene(&s);
  }
}

// Rows that an append has added may be gone before it keeps their ids.
static void ids_of_truncated_rows_are_not_kept(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  put(&s, &s.tokens, 0, 100);
  const uint64_t cuts = qkv_session_tokens_cuts(&s.tokens);
  uint64_t reserved = qkv_session_tokens_cost(&s.tokens, 100, 100);
  assert_int_equal(qkv_arena_reserve(s.arena, reserved, NULL), QKV_OK);
  qkv_session_tokens_truncate(&s.tokens, 100);
  qkv_session_tokens_keep(&s.tokens, cuts, 100, s.ids + 100, 100, &reserved);
  check_holds(&s, &s.tokens, 100);
  qkv_session_tokens_keep(&s.tokens, cuts + 1, 100, s.ids + 100, 100, &reserved);
  check_holds(&s, &s.tokens, 200);
  qkv_arena_unreserve(s.arena, reserved);
  teardown_scene(&s);
}

static void forks_share_and_part(void **state) {
  (void)state;
  const uint64_t positions[] = {0, 1, 63, 64, 65, 128, 200, 320, 330, 400};
  for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) {
    scene s;
    qkv_session_tokens fork;
    uint32_t open[QKV_PREFIX_PAGE];
    setup_scene(&s);
    put(&s, &s.tokens, 0, 330);
    const uint64_t bytes = qkv_arena_read(s.arena).bytes_used, left = positions[i] < 330 ? positions[i] : 330;
    qkv_session_tokens_init(&fork, &s.config);
    qkv_session_tokens_give_open(&fork, open);
    qkv_session_tokens_fork(&s.tokens, positions[i], &fork);
    check_holds(&s, &fork, left);
    assert_int_equal(qkv_arena_read(s.arena).bytes_used, bytes);
    assert_int_equal(qkv_prefix_index_read(s.index).pages, 5);
    const uint32_t before = s.ids[left]++;
    put(&s, &fork, left, 500);
    check_holds(&s, &fork, 500);
    s.ids[left] = before;
    check_holds(&s, &s.tokens, 330);
    s.ids[left]++;
    // The one that was forked goes first.
    qkv_session_tokens_truncate(&s.tokens, 0);
    check_holds(&s, &fork, 500);
    qkv_session_tokens_deinit(&fork);
    teardown_scene(&s);
  }
}

static void hashes_alone_stand_for_pages(void **state) {
  (void)state;
  scene s;
  qkv_error error = {0};
  setup_scene(&s);
  qkv_prefix_hash hash = s.config.root;
  for (size_t page = 0; page < 4; page++) {
    hash = qkv_prefix_next(&hash, s.ids + page * PAGE);
    assert_int_equal(qkv_session_tokens_recover(&s.tokens, &hash, &error), QKV_OK);
  }
  assert_int_equal(qkv_session_tokens_length(&s.tokens), 256);
  assert_int_equal(qkv_prefix_index_pages(s.index, s.tokens.holder), 4);
  put(&s, &s.tokens, 256, 300);  // continues
  uint32_t read[COUNT];
  assert_int_equal(qkv_session_tokens_read(&s.tokens, 0, read, COUNT), 0);
  assert_int_equal(qkv_session_tokens_read(&s.tokens, 256, read, COUNT), 44);
  assert_memory_equal(read, s.ids + 256, 44 * sizeof *read);
  put(&s, &s.tokens, 0, 400);
  check_holds(&s, &s.tokens, 400);
  assert_int_equal(qkv_session_tokens_recover(&s.tokens, &hash, &error), QKV_FAILED_PRECONDITION);
  qkv_session_tokens_truncate(&s.tokens, 192);
  assert_int_equal(qkv_session_tokens_length(&s.tokens), 192);
  // What is left of a page without ids is not known.
  qkv_session_tokens_truncate(&s.tokens, 100);
  assert_int_equal(qkv_session_tokens_length(&s.tokens), 64);
  put(&s, &s.tokens, 100, 200);
  assert_int_equal(qkv_session_tokens_length(&s.tokens), 64);
  put(&s, &s.tokens, 64, 200);
  check_holds(&s, &s.tokens, 200);
  teardown_scene(&s);
}

static void without_memory_nothing_more_is_kept(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  uint64_t reserved = 2 * qkv_arena_cost(296);
  assert_int_equal(qkv_arena_reserve(s.arena, reserved, NULL), QKV_OK);
  qkv_session_tokens_keep(&s.tokens, qkv_session_tokens_cuts(&s.tokens), 0, s.ids, 500, &reserved);
  assert_int_equal(reserved, 0);
  check_holds(&s, &s.tokens, 3 * PAGE - 1);
  teardown_scene(&s);
}

static void once_closed_it_is_not_indexed(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  put(&s, &s.tokens, 0, 100);
  qkv_session_tokens_close(&s.tokens);
  assert_int_equal(qkv_prefix_index_read(s.index).pages, 0);
  put(&s, &s.tokens, 100, 200);
  qkv_session_tokens_truncate(&s.tokens, 0);
  put(&s, &s.tokens, 0, 200);
  assert_int_equal(qkv_prefix_index_read(s.index).pages, 0);
  assert_int_equal(qkv_session_tokens_length(&s.tokens), 200);
  teardown_scene(&s);
}

static void a_fork_of_a_closed_one_is_indexed(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  qkv_session_tokens fork;
  uint32_t open[QKV_PREFIX_PAGE];
  put(&s, &s.tokens, 0, 300);
  qkv_session_tokens_init(&fork, &s.config);
  qkv_session_tokens_give_open(&fork, open);
  qkv_session_tokens_close(&s.tokens);
  qkv_session_tokens_fork(&s.tokens, 200, &fork);
  check_holds(&s, &fork, 200);
  put(&s, &fork, 200, 400);
  check_holds(&s, &fork, 400);
  qkv_session_tokens_deinit(&fork);
  teardown_scene(&s);
}

// ---- In a store ----

static qkv_session *open_session(qkv_store *store, const char *name, const char *tenant) {
  qkv_session_config config = {.purpose = QKV_PURPOSE_ATTEND, .policy = test_policy(4, 4, 8)};
  qkv_session *session = NULL;
  qkv_error error = {0};
  config.name = name;
  config.tenant = tenant;
  if (qkv_store_open(store, &config, "tiny", &session, &error) != QKV_OK) fail_msg("%s", error.text);
  use_session(session);
  return session;
}

static void keep(qkv_session *session, const uint32_t *ids, size_t count) {
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  uint64_t reserved = qkv_session_tokens_cost(tokens, 0, count);
  qkv_arena *arena = qkv_account_arena(qkv_session_account(session));
  assert_int_equal(qkv_arena_reserve(arena, reserved, NULL), QKV_OK);
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), 0, ids, count, &reserved);
  assert_int_equal(reserved, 0);
}

static void a_store_matches_its_open_sessions(void **state) {
  (void)state;
  uint32_t ids[200];
  uint64_t pages[4], freed;
  qkv_session *found[4];
  const qkv_store_config config = {.memory_budget = 1 << 24,
                                   .models_max = 1,
                                   .sessions_max = 8,
                                   .policy = test_policy(4, 4, 8),
                                   .prefixes_max = 100};
  qkv_store *store = qkv_store_create(&config);
  const qkv_model model = test_model(1, 2, 16, 8, QKV_FP16), *shared = NULL;
  assert_int_equal(qkv_store_register_model(store, &model, &shared, NULL), QKV_OK);
  qkv_store_share_model(store, shared);
  for (uint32_t i = 0; i < 200; i++) ids[i] = i;
  qkv_session *a = open_session(store, "a", "x"), *b = open_session(store, "b", "x"),
              *c = open_session(store, "c", "y");
  keep(a, ids, 200);
  keep(b, ids, 100);
  keep(c, ids, 200);
  const qkv_prefix_hash root = qkv_prefix_root("x", "tiny", NULL, 0);
  assert_int_equal(qkv_store_match(store, &root, ids, 200, found, pages, 4), 2);
  assert_ptr_equal(found[0], a);
  assert_int_equal(pages[0], 3);
  assert_ptr_equal(found[1], b);
  assert_int_equal(pages[1], 1);
  assert_int_equal(qkv_store_close(store, "x", "a", &freed, NULL), QKV_OK);
  qkv_session_unref(&found[0]);
  qkv_session_unref(&found[1]);
  // A truncation shortens it.
  assert_int_equal(qkv_session_truncate(b, 63, NULL, 0, NULL), QKV_OK);
  assert_int_equal(qkv_store_match(store, &root, ids, 200, found, pages, 4), 0);
  qkv_session_unref(&a);
  qkv_session_unref(&b);
  qkv_session_unref(&c);
  qkv_store_destroy(&store);
}

// ---- Threads ----

enum { THREADS = 4, ROUNDS = 200, SHARED = 3 * PAGE };

typedef struct worker {
  qkv_store *store;
  size_t number;
  uint64_t hits;
  pthread_t thread;
} worker;

static void match_and_drop(worker *own, const uint32_t *ids, size_t count) {
  const qkv_prefix_hash root = qkv_prefix_root("x", "tiny", NULL, 0);
  qkv_session *found[QKV_STORE_MATCH_MAX];
  uint64_t pages[QKV_STORE_MATCH_MAX];
  const size_t found_count = qkv_store_match(own->store, &root, ids, count, found, pages, QKV_STORE_MATCH_MAX);
  for (size_t i = 0; i < found_count; i++) {
    own->hits += strcmp(qkv_session_config_of(found[i])->tenant, "x") == 0;
    qkv_session_unref(&found[i]);
  }
}

// Opens, keeps, matches, truncates and closes; every thread's sessions begin alike.
static void *work(void *context) {
  worker *own = context;
  uint64_t seed = own->number, freed;
  for (size_t round = 0; round < ROUNDS; round++) {
    uint32_t ids[SHARED + 2 * PAGE] = {0};
    const size_t count = SHARED + random_below(&seed, 2 * PAGE + 1);
    char name[32];
    for (size_t i = SHARED; i < count; i++) ids[i] = (uint32_t)own->number + 1;
    (void)snprintf(name, sizeof name, "%zu-%zu", own->number, round);
    qkv_session *session = open_session(own->store, name, "x");
    keep(session, ids, count);
    match_and_drop(own, ids, count);
    assert_int_equal(qkv_session_truncate(session, random_below(&seed, count), NULL, 0, NULL), QKV_OK);
    match_and_drop(own, ids, count);
    assert_int_equal(qkv_store_close(own->store, "x", name, &freed, NULL), QKV_OK);
    match_and_drop(own, ids, count);
    qkv_session_unref(&session);
  }
  return NULL;
}

static void matches_race_with_closing(void **state) {
  (void)state;
  worker workers[THREADS] = {0};
  const qkv_store_config config = {.memory_budget = 1 << 24,
                                   .models_max = 1,
                                   .sessions_max = THREADS,
                                   .policy = test_policy(4, 4, 8),
                                   .prefixes_max = 100};
  qkv_store *store = qkv_store_create(&config);
  const qkv_model model = test_model(1, 2, 16, 8, QKV_FP16), *shared = NULL;
  assert_int_equal(qkv_store_register_model(store, &model, &shared, NULL), QKV_OK);
  qkv_store_share_model(store, shared);
  for (size_t i = 0; i < THREADS; i++) {
    workers[i] = (worker){.store = store, .number = i};
    assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
  }
  for (size_t i = 0; i < THREADS; i++) {
    assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
    assert_true(workers[i].hits >= ROUNDS);  // its own, before it truncates
  }
  assert_int_equal(qkv_prefix_index_read(qkv_store_prefixes(store)).pages, 0);
  qkv_store_destroy(&store);  // which checks that all of the memory has come back
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ids_continue),
      cmocka_unit_test(ids_are_read),
      cmocka_unit_test(another_id_is_refused_by_position),
      cmocka_unit_test(a_gap_ends_what_is_held),
      cmocka_unit_test(truncation_cuts_anywhere),
      cmocka_unit_test(ids_of_truncated_rows_are_not_kept),
      cmocka_unit_test(forks_share_and_part),
      cmocka_unit_test(hashes_alone_stand_for_pages),
      cmocka_unit_test(without_memory_nothing_more_is_kept),
      cmocka_unit_test(once_closed_it_is_not_indexed),
      cmocka_unit_test(a_fork_of_a_closed_one_is_indexed),
      cmocka_unit_test(a_store_matches_its_open_sessions),
      cmocka_unit_test(matches_race_with_closing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
