#include "engine/cache/session.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine/cache/session_kind.h"
#include "tests/engine/cache/fixture.h"
#include "tests/engine/cache/used_session.h"

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_session *session;
  uint64_t opened;  // bytes that the session takes before its first use
  uint64_t empty;   // and after it without rows
} scene;

static void setup_scene(scene *s) {
  s->model = test_model(1, 2, 16, 8, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 24);
  s->rows = make_sequence(&s->model, 200, 1);
  qkv_session_config config = {.name = "a",
                               .tenant = "default",
                               .purpose = QKV_PURPOSE_ATTEND,
                               .policy = test_policy(4, 4, 8),
                               .first_position = 3};
  qkv_error error = {0};
  if (qkv_session_create(&config, &s->model, s->arena, &s->session, &error) != QKV_OK) fail_msg("%s", error.text);
  s->opened = qkv_arena_read(s->arena).bytes_used;
  use_session(s->session);
  s->empty = qkv_arena_read(s->arena).bytes_used;
}

static void teardown_scene(scene *s) {
  qkv_session_unref(&s->session);
  assert_null(s->session);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

static qkv_status append(scene *s, uint32_t layer, uint64_t begin, uint64_t end, uint64_t *length, qkv_error *error) {
  row_pair pair;
  make_pair(&pair, &s->rows, begin, end, QKV_FP16);
  uint64_t appended = 99;
  qkv_status status = qkv_session_append(s->session, layer, 3 + begin, &pair.k.tensor, &pair.v.tensor, false,
                                         &appended, length, error);
  assert_true(status == QKV_OK || appended == 0);
  free_pair(&pair);
  return status;
}

static void test_layers_are_independent(void **state) {
  (void)state;
  scene s;
  uint64_t length, lengths[4];
  setup_scene(&s);
  assert_int_equal(append(&s, 1, 0, 100, &length, NULL), QKV_OK);
  assert_int_equal(length, 103);
  assert_int_equal(append(&s, 3, 0, 10, &length, NULL), QKV_OK);
  qkv_error error = {0};
  assert_int_equal(append(&s, 3, 11, 12, &length, &error), QKV_FAILED_PRECONDITION);
  assert_string_equal(error.text, "position is 14, the expected position is 13");
  assert_int_equal(length, 13);

  qkv_session_info info;
  qkv_session_read_info(s.session, &info, lengths);
  assert_int_equal(lengths[0], 3);
  assert_int_equal(lengths[1], 103);
  assert_int_equal(lengths[2], 3);
  assert_int_equal(lengths[3], 13);
  assert_int_equal(info.usage.tokens_coded, 64);
  assert_int_equal(info.usage.tokens_exact, 46);
  assert_int_equal(s.empty + info.usage.bytes_coded + info.usage.bytes_exact, qkv_arena_read(s.arena).bytes_used);
  assert_ptr_equal(info.model, &s.model);
  assert_string_equal(info.config.name, "a");
  assert_true(info.created_unix_ms > 0 && info.last_used_unix_ms >= info.created_unix_ms);
  teardown_scene(&s);
}

// A layer that stays exact gives back what came, to the bit, and never seals a page.
static void test_exact_layer(void **state) {
  (void)state;
  qkv_layer_override exact = {.layer = 1, .policy = {.codec = qkv_codec_by_name("exact"), .recent_window = -1}};
  scene s;
  uint64_t length;
  setup_scene(&s);
  qkv_session_unref(&s.session);
  s.model.overrides = &exact;
  s.model.override_count = 1;
  const qkv_session_config config = {.name = "b", .purpose = QKV_PURPOSE_ATTEND, .policy = test_policy(2, 2, 0)};
  assert_int_equal(qkv_session_create(&config, &s.model, s.arena, &s.session, NULL), QKV_OK);
  for (uint32_t layer = 0; layer < 2; layer++) {
    row_pair pair;
    uint64_t appended;
    make_pair(&pair, &s.rows, 0, 200, QKV_FP16);
    assert_int_equal(
        qkv_session_append(s.session, layer, 0, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL),
        QKV_OK);
    free_pair(&pair);
  }
  qkv_session_info info;
  qkv_session_read_info(s.session, &info, NULL);
  assert_int_equal(info.usage.tokens_coded, 192);  // of layer 0
  assert_int_equal(info.usage.tokens_exact, 208);
  const qkv_layer *layer;
  float rows[200 * 16];
  assert_int_equal(qkv_session_read(s.session, 1, &layer, NULL), QKV_OK);
  assert_null(qkv_layer_validate(layer));
  qkv_layer_rows(layer, QKV_K, 0, 200, false, rows);
  assert_memory_equal(rows, s.rows.k, sizeof rows);
  qkv_session_read_done(s.session, 1);
  teardown_scene(&s);
}

static void test_layer_out_of_range(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  const char *text = "layer is 4, the model tiny has 4 layers";
  uint64_t length = 99;
  const qkv_layer *layer;
  qkv_error errors[3] = {{0}, {0}, {0}};
  assert_int_equal(append(&s, 4, 0, 10, &length, &errors[0]), QKV_INVALID_ARGUMENT);
  assert_int_equal(length, 0);
  assert_int_equal(qkv_session_read(s.session, 4, &layer, &errors[1]), QKV_INVALID_ARGUMENT);
  assert_int_equal(append(&s, 0, 0, 10, &length, NULL), QKV_OK);
  assert_int_equal(qkv_session_truncate(s.session, 0, (uint32_t[]){0, 4}, 2, &errors[2]), QKV_INVALID_ARGUMENT);
  for (size_t i = 0; i < 3; i++) assert_string_equal(errors[i].text, text);
  assert_int_equal(append(&s, 0, 0, 10, &length, NULL), QKV_OK);
  assert_int_equal(length, 13);  // nothing was truncated
  teardown_scene(&s);
}

static void test_truncation(void **state) {
  (void)state;
  scene s;
  uint64_t length, lengths[4];
  qkv_session_info info;
  setup_scene(&s);
  for (uint32_t i = 0; i < 4; i++) assert_int_equal(append(&s, i, 0, 100, &length, NULL), QKV_OK);
  assert_int_equal(qkv_session_truncate(s.session, 50, (uint32_t[]){1, 2}, 2, NULL), QKV_OK);
  qkv_session_read_info(s.session, &info, lengths);
  assert_int_equal(lengths[0], 103);
  assert_int_equal(lengths[1], 50);
  assert_int_equal(lengths[2], 50);
  assert_int_equal(lengths[3], 103);
  assert_int_equal(qkv_session_truncate(s.session, 20, NULL, 0, NULL), QKV_OK);
  qkv_session_read_info(s.session, &info, lengths);
  for (size_t i = 0; i < 4; i++) assert_int_equal(lengths[i], 20);
  teardown_scene(&s);
}

static void test_the_last_reference_frees(void **state) {
  (void)state;
  scene s;
  uint64_t length;
  setup_scene(&s);
  qkv_session *other = qkv_session_ref(s.session);
  assert_ptr_equal(other, s.session);
  assert_int_equal(append(&s, 0, 0, 100, &length, NULL), QKV_OK);
  qkv_session_unref(&other);
  assert_null(other);
  qkv_session_unref(&other);
  assert_true(qkv_arena_read(s.arena).bytes_used > s.empty);
  assert_string_equal(qkv_session_name(s.session), "a");
  assert_ptr_equal(qkv_session_model(s.session), &s.model);
  teardown_scene(&s);
}

// An empty session costs memory too, and one that has none left is not created.
static void test_the_fixed_cost(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  assert_in_range(s.opened, 1, 1024);
  assert_in_range(s.empty, 4 * sizeof(qkv_layer), 4 * 1024);
  qkv_session_info info;
  qkv_session_read_info(s.session, &info, NULL);
  assert_int_equal(info.usage.bytes_coded + info.usage.bytes_exact, 0);

  // One that is opened and finds no memory with its first use is as it was.
  const uint64_t kind = qkvi_session_kind_cost(&info.config);  // that both share
  uint64_t left = qkv_arena_read(s.arena).bytes_max - s.empty - (s.empty - kind - 1);
  assert_int_equal(qkv_arena_reserve(s.arena, left, NULL), QKV_OK);
  qkv_session *none = NULL, *idle = NULL;
  const qkv_layer *layer;
  assert_int_equal(qkv_session_create(&info.config, &s.model, s.arena, &idle, NULL), QKV_OK);
  assert_int_equal(qkv_session_read(idle, 0, &layer, NULL), QKV_RESOURCE_EXHAUSTED);
  qkv_session_unref(&idle);
  qkv_arena_unreserve(s.arena, left);
  left = qkv_arena_read(s.arena).bytes_max - s.empty - (s.opened - kind - 1);
  assert_int_equal(qkv_arena_reserve(s.arena, left, NULL), QKV_OK);
  qkv_error error = {0};
  assert_int_equal(qkv_session_create(&info.config, &s.model, s.arena, &none, &error), QKV_RESOURCE_EXHAUSTED);
  assert_null(none);
  assert_non_null(strstr(error.text, "memory-budget is 16777216 bytes"));
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, s.empty);
  qkv_arena_unreserve(s.arena, left);
  teardown_scene(&s);
}

// ---- Readers that follow each other closely do not keep a writer out ----

enum { READERS = 6 };

typedef struct rush {
  qkv_session *session;
  atomic_int reading;
  atomic_bool over;  // the writer is through, or has been given up
} rush;

static void *read_in_a_loop(void *context) {
  rush *r = context;
  atomic_fetch_add(&r->reading, 1);
  while (!atomic_load(&r->over)) {
    const qkv_layer *layer;
    if (qkv_session_read(r->session, 0, &layer, NULL) != QKV_OK) break;
    (void)nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    qkv_session_read_done(r->session, 0);
  }
  return NULL;
}

static void *give_up_in_time(void *context) {
  rush *r = context;
  for (int i = 0; i < 24000 && !atomic_load(&r->over); i++)
    (void)nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  bool given_up = !atomic_exchange(&r->over, true);
  return given_up ? r : NULL;
}

static void test_a_writer_gets_in(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  rush r = {.session = s.session};
  pthread_t readers[READERS], watch;
  for (size_t i = 0; i < READERS; i++) assert_int_equal(pthread_create(&readers[i], NULL, read_in_a_loop, &r), 0);
  while (atomic_load(&r.reading) < READERS) (void)sched_yield();
  assert_int_equal(pthread_create(&watch, NULL, give_up_in_time, &r), 0);
  uint64_t length;
  qkv_status status = append(&s, 0, 0, 100, &length, NULL);
  atomic_store(&r.over, true);
  void *given_up = NULL;
  assert_int_equal(pthread_join(watch, &given_up), 0);
  for (size_t i = 0; i < READERS; i++) assert_int_equal(pthread_join(readers[i], NULL), 0);
  assert_int_equal(status, QKV_OK);
  assert_null(given_up);
  teardown_scene(&s);
}

// ---- Those who must not wait ----

typedef struct waiting {
  scene *scene;
  uint64_t length;
} waiting;

static void *append_and_wait(void *context) {
  waiting *w = context;
  return append(w->scene, 0, 10, 20, &w->length, NULL) == QKV_OK ? w : NULL;
}

// While the layer is read, an append waits and a try is refused; while the append waits, so are tries to read. The
// session's info comes at once.
static void test_tries_and_info_do_not_wait(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  uint64_t length, appended, lengths[4];
  assert_int_equal(append(&s, 0, 0, 10, &length, NULL), QKV_OK);
  row_pair pair;
  make_pair(&pair, &s.rows, 0, 10, QKV_FP16);
  const qkv_layer *layer, *again;
  qkv_error error = {0};
  assert_int_equal(qkv_session_try_read(s.session, 0, &layer, &error), QKV_OK);
  assert_int_equal(qkv_session_try_append(s.session, 0, NULL, 3, &pair.k.tensor, &pair.v.tensor, false, &appended,
                                          &length, &error),
                   QKV_UNAVAILABLE);
  assert_string_equal(error.text, "");
  assert_int_equal(qkv_session_try_append(s.session, 1, NULL, 3, &pair.k.tensor, &pair.v.tensor, false, &appended,
                                          &length, &error),
                   QKV_OK);
  assert_int_equal(appended, 10);
  assert_int_equal(length, 13);

  waiting w = {.scene = &s};
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, append_and_wait, &w), 0);
  while (qkv_session_try_read(s.session, 0, &again, &error) == QKV_OK) {
    qkv_session_read_done(s.session, 0);
    (void)sched_yield();
  }
  assert_string_equal(error.text, "");
  qkv_session_info info;
  qkv_session_read_info(s.session, &info, lengths);
  assert_int_equal(lengths[0], 13);
  assert_int_equal(lengths[1], 13);
  assert_int_equal(info.usage.tokens_exact, 20);
  qkv_session_read_done(s.session, 0);
  void *ended = NULL;
  assert_int_equal(pthread_join(thread, &ended), 0);
  assert_ptr_equal(ended, &w);
  qkv_session_read_info(s.session, &info, lengths);
  assert_int_equal(lengths[0], 23);

  assert_int_equal(qkv_session_try_read(s.session, 4, &layer, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "layer is 4, the model tiny has 4 layers");
  free_pair(&pair);
  teardown_scene(&s);
}

// Asked for the page of an append, which has the layer's rows meanwhile.
typedef struct asking_encoder {
  qkv_row_encoder base;
  scene *scene;
  int asked;
  qkv_status same, other;  // of appends to this layer and to another one
  qkv_error error;
} asking_encoder;

static qkv_status append_at_once(scene *s, uint32_t layer, qkv_error *error) {
  row_pair pair;
  uint64_t appended = 99, length = 99;
  make_pair(&pair, &s->rows, 0, 1, QKV_FP16);
  const qkv_status status = qkv_session_append_in(s->session, layer, &(qkv_append_use){.at_once = true}, 3,
                                                  &pair.k.tensor, &pair.v.tensor, false, &appended, &length, error);
  assert_int_equal(appended, status == QKV_OK ? 1 : 0);
  free_pair(&pair);
  return status;
}

static bool ask(const qkv_row_encoder *encoder, const qkv_row_page *page, void *image, size_t *bytes) {
  asking_encoder *own = (asking_encoder *)encoder;
  (void)page;
  (void)image;
  (void)bytes;
  if (own->asked++ > 0) return false;
  own->same = append_at_once(own->scene, 0, &own->error);
  own->other = append_at_once(own->scene, 1, &own->error);
  return false;
}

// An append with `at_once` does not wait for another append to the layer. To other layers, and when that other append
// is over, it is like any append.
static void test_append_at_once(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  asking_encoder asking = {.base = {.encode = ask}, .scene = &s};
  row_pair pair;
  uint64_t appended, length;
  make_pair(&pair, &s.rows, 0, 100, QKV_FP16);
  assert_int_equal(qkv_session_append_in(s.session, 0, &(qkv_append_use){.encoder = &asking.base}, 3, &pair.k.tensor,
                                         &pair.v.tensor, false, &appended, &length, NULL),
                   QKV_OK);
  assert_int_equal(appended, 100);
  assert_int_equal(asking.asked, 1);
  assert_int_equal(asking.same, QKV_UNAVAILABLE);
  assert_int_equal(asking.other, QKV_OK);
  assert_string_equal(asking.error.text, "");
  qkv_error error = {0};
  assert_int_equal(append_at_once(&s, 2, &error), QKV_OK);
  free_pair(&pair);
  teardown_scene(&s);
}

// ---- The time of day, set by somebody ----

static _Atomic int64_t set_by_s;

int clock_gettime(clockid_t clock, struct timespec *now) {  // in place of libc's
  const int status = (int)syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += atomic_load(&set_by_s);
  return status;
}

// How long a session is unused has nothing to do with it.
static void test_the_clock_is_set(void **state) {
  (void)state;
  scene s;
  qkv_session_info before, info;
  setup_scene(&s);
  qkv_session_set_ttl(s.session, 60 * 60 * 1000);
  qkv_session_read_info(s.session, &before, NULL);
  atomic_store(&set_by_s, 24 * 60 * 60);
  assert_false(qkv_session_expired(s.session));
  qkv_session_read_info(s.session, &info, NULL);
  assert_int_equal(info.last_used_ms, before.last_used_ms);
  atomic_store(&set_by_s, -24 * 60 * 60);
  qkv_session_set_ttl(s.session, 1);
  (void)nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
  assert_true(qkv_session_expired(s.session));
  qkv_session_read_info(s.session, &info, NULL);
  assert_true(info.last_used_unix_ms >= info.created_unix_ms);
  atomic_store(&set_by_s, 0);
  teardown_scene(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_layers_are_independent),   cmocka_unit_test(test_exact_layer),
      cmocka_unit_test(test_layer_out_of_range),       cmocka_unit_test(test_truncation),
      cmocka_unit_test(test_the_last_reference_frees), cmocka_unit_test(test_the_fixed_cost),
      cmocka_unit_test(test_a_writer_gets_in),         cmocka_unit_test(test_tries_and_info_do_not_wait),
      cmocka_unit_test(test_append_at_once),           cmocka_unit_test(test_the_clock_is_set),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
