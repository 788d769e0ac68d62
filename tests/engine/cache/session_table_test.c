#include "engine/cache/session_table.h"

#include "engine/cache/session_kind.h"
#include "engine/cache/session_state.h"
#include "tests/engine/cache/fixture.h"

enum { SESSIONS = 500 };

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  qkv_session *sessions[SESSIONS];
  bool held[SESSIONS];
  qkvi_session_table table;
} scene;

// Every other one is of another tenant and has the name of the one before, and every fifth one is staged.
static void setup(scene *s) {
  memset(s, 0, sizeof *s);
  s->model = test_model(1, 1, 16, 8, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 24);
  for (int i = 0; i < SESSIONS; i++) {
    char name[16];
    snprintf(name, sizeof name, "session-%d", i / 2);
    const qkv_session_config config = {.name = name,
                                       .tenant = i % 2 == 0 ? "default" : "x",
                                       .purpose = QKV_PURPOSE_ATTEND,
                                       .policy = test_policy(4, 4, 8),
                                       .staged = i % 5 == 0,
                                       .id = (uint64_t)i};
    assert_int_equal(qkv_session_create(&config, &s->model, s->arena, &s->sessions[i], NULL), QKV_OK);
  }
}

static void teardown(scene *s) {
  qkvi_session_table_deinit(&s->table);
  for (int i = 0; i < SESSIONS; i++) qkv_session_unref(&s->sessions[i]);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  qkv_arena_destroy(&s->arena);
}

// Sessions by name, many at once, are those that are found one by one; and some that nobody has.
static void check_names(const scene *s) {
  char texts[SESSIONS / 2 + 5][16];
  const char *names[SESSIONS / 2 + 5];
  qkv_session *found[SESSIONS / 2 + 5];
  for (int i = 0; i < SESSIONS / 2 + 5; i++) {
    snprintf(texts[i], sizeof texts[i], "session-%d", i);
    names[i] = texts[i];
  }
  for (int tenant = 0; tenant < 3; tenant++) {
    const char *name = (const char *[]){"default", "x", "nobody"}[tenant];
    qkvi_session_table_find_names(&s->table, name, names, SESSIONS / 2 + 5, found);
    for (int i = 0; i < SESSIONS / 2 + 5; i++) {
      const qkvi_table_key key = qkvi_key_of_name(name, names[i]);
      assert_ptr_equal(found[i], qkvi_session_table_find(&s->table, &key));
    }
    qkv_session *expected = tenant < 2 && s->held[12 + tenant] ? s->sessions[12 + tenant] : NULL;
    assert_ptr_equal(found[6], expected);  // neither 12 nor 13 is staged
  }
}

static void check(const scene *s) {
  bool seen[SESSIONS] = {false};
  size_t place = 0, count = 0, held = 0;
  for (const qkv_session *at; (at = qkvi_session_table_next(&s->table, &place)) != NULL; count++) {
    assert_true(s->held[qkv_session_id(at)] && !seen[qkv_session_id(at)]);
    seen[qkv_session_id(at)] = true;
  }
  for (int i = 0; i < SESSIONS; i++) {
    const qkvi_table_key key = qkvi_key_of_session(s->sessions[i]);
    assert_ptr_equal(qkvi_session_table_find(&s->table, &key), s->held[i] ? s->sessions[i] : NULL);
    held += s->held[i];
  }
  assert_true(count == held && s->table.count == held);
  check_names(s);
  assert_true(held * 5 <= s->table.places * 4);
}

static void test_random(void **unused) {
  (void)unused;
  scene s;
  uint64_t seed = 1;
  setup(&s);
  check(&s);
  for (int step = 0; step < 20000; step++) {
    // At first most come, then most go: the table grows and shrinks.
    const size_t i = (size_t)random_below(&seed, SESSIONS);
    const bool wanted = random_below(&seed, 10) < (step < 10000 ? 8 : 1);
    if (wanted == s.held[i]) continue;
    (wanted ? qkvi_session_table_add(&s.table, s.sessions[i]) : qkvi_session_table_remove(&s.table, s.sessions[i]));
    s.held[i] = wanted;
    if (step % 97 == 0) check(&s);
  }
  check(&s);
  assert_true(s.table.places < SESSIONS);
  teardown(&s);
}

// Equal configs are one object, whatever is each session's own.
static void test_kinds(void **unused) {
  (void)unused;
  scene s;
  const size_t before = qkvi_session_kinds();
  setup(&s);
  assert_int_equal(qkvi_session_kinds(), before + 2);  // of two tenants
  assert_ptr_equal(s.sessions[0]->kind, s.sessions[498]->kind);
  assert_ptr_equal(qkv_session_config_of(s.sessions[1]), qkv_session_config_of(s.sessions[3]));
  qkv_session_config config = {.name = "other",
                               .tenant = "x",
                               .purpose = QKV_PURPOSE_ATTEND,
                               .policy = test_policy(4, 4, 8),
                               .ttl_ms = 5,
                               .pinned = true,
                               .whole = 7,
                               .root = {.low = 3}};
  qkv_session *others[3];
  qkv_session_info info;
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &others[0], NULL), QKV_OK);
  assert_ptr_equal(others[0]->kind, s.sessions[1]->kind);
  qkv_session_read_info(others[0], &info, NULL);
  assert_string_equal(info.config.name, "other");
  assert_string_equal(info.config.tenant, "x");
  assert_true(info.config.ttl_ms == 5 && info.config.pinned && info.config.whole == 7 && info.config.root.low == 3);
  config.policy.bits_v = 3;
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &others[1], NULL), QKV_OK);
  config.keep_full = true;
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &others[2], NULL), QKV_OK);
  assert_int_equal(qkvi_session_kinds(), before + 4);
  // Each is in the arena; without memory for one no session is made, and one of a kind that is there is.
  config.keep_full = false;
  config.ema.sample_every = 5;
  const uint64_t used = qkv_arena_read(s.arena).bytes_used;
  qkv_session *more[2];
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &more[0], NULL), QKV_OK);
  const uint64_t first = qkv_arena_read(s.arena).bytes_used - used;
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &more[1], NULL), QKV_OK);
  const uint64_t second = qkv_arena_read(s.arena).bytes_used - used - first;
  assert_int_equal(first, second + qkvi_session_kind_cost(&config));
  for (int i = 0; i < 2; i++) qkv_session_unref(&more[i]);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used);
  qkv_arena_set_limit(s.arena, used + first - 1);
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &more[0], NULL), QKV_RESOURCE_EXHAUSTED);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used + qkv_arena_read(s.arena).bytes_reserved, used);
  config.ema.sample_every = 0;
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &more[0], NULL), QKV_OK);
  qkv_session_unref(&more[0]);
  for (int i = 0; i < 3; i++) qkv_session_unref(&others[i]);
  assert_int_equal(qkvi_session_kinds(), before + 2);
  teardown(&s);
  assert_int_equal(qkvi_session_kinds(), before);
}

static qkv_arena_stats read_arena(const scene *s) {
  return qkv_arena_read(s->arena);
}

// Sessions of many heads: what their coders take is reserved once for those that are coded alike.
static void test_coders_count(void **unused) {
  (void)unused;
  enum { HEADS = 512 };
  scene s = {.arena = qkv_arena_create("memory-budget", (uint64_t)1 << 24)};
  s.model = test_model(HEADS, 1, 16, 8, QKV_FP16);
  s.model.layers = 2;
  qkv_session_config config = {
      .tenant = "x", .name = "a", .purpose = QKV_PURPOSE_ATTEND, .policy = test_policy(4, 4, 8)};
  qkv_session *sessions[4] = {NULL};
  const uint64_t cost = qkvi_session_coders_cost(&config, &s.model);
  assert_true(cost > HEADS * 2 * 64);
  assert_int_equal(qkvi_session_coders_missing(&config, &s.model, s.arena), cost);
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &sessions[0], NULL), QKV_OK);
  assert_int_equal(read_arena(&s).bytes_reserved, cost);
  config.policy.recent_window = 99;  // another kind, coded alike
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &sessions[1], NULL), QKV_OK);
  assert_int_equal(read_arena(&s).bytes_reserved, cost);
  assert_int_equal(qkvi_session_coders_missing(&config, &s.model, s.arena), 0);
  config.policy.bits_k = 3;
  assert_int_equal(qkvi_session_coders_missing(&config, &s.model, s.arena),
                   qkvi_session_coders_cost(&config, &s.model));
  qkv_arena_set_limit(s.arena, read_arena(&s).bytes_used + 2 * cost - 1);
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &sessions[2], NULL), QKV_RESOURCE_EXHAUSTED);
  assert_int_equal(read_arena(&s).bytes_reserved, cost);
  config.found = true;
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &sessions[3], NULL), QKV_OK);
  assert_int_equal(read_arena(&s).bytes_reserved, cost);
  qkv_session_unref(&sessions[3]);
  qkv_arena_set_limit(s.arena, UINT64_MAX);
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &sessions[2], NULL), QKV_OK);
  assert_int_equal(read_arena(&s).bytes_reserved, 2 * cost);
  qkv_session_unref(&sessions[0]);
  assert_int_equal(read_arena(&s).bytes_reserved, 2 * cost);
  qkv_session_unref(&sessions[1]);
  assert_int_equal(read_arena(&s).bytes_reserved, cost);
  qkv_session_unref(&sessions[2]);
  assert_int_equal(read_arena(&s).bytes_reserved + read_arena(&s).bytes_used, 0);
  qkv_arena_destroy(&s.arena);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_random), cmocka_unit_test(test_kinds),
                                     cmocka_unit_test(test_coders_count)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
