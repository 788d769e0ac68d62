// Pages that appends take from other sessions: which, what becomes of them, and everything at once from several
// threads.
#include <pthread.h>
#include <stdatomic.h>

#include "engine/cache/session.h"
#include "engine/cache/session_coded.h"
#include "engine/cache/session_retier.h"
#include "engine/cache/session_share.h"
#include "tests/engine/cache/backing_double.h"

enum { TOKENS = 700, LAYERS = 4, PAGE = QKV_PREFIX_PAGE, WINDOW = 70, SEALED = (TOKENS - WINDOW) / PAGE };

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  qkv_prefix_index *index;
  sequence rows[2];  // of the same ids, and yet others
  uint32_t ids[TOKENS];
  qkv_session_config config;
} scene;

static void setup(scene *s) {
  uint64_t seed = 3;
  s->model = test_model(1, 2, 16, 8, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 27);
  s->index = qkv_prefix_index_create(1024, 1024);
  for (int i = 0; i < 2; i++) s->rows[i] = make_sequence(&s->model, TOKENS, (uint64_t)i + 1);
  for (size_t i = 0; i < TOKENS; i++) s->ids[i] = (uint32_t)(random_normal(&seed) * 1e6F);
  s->config = (qkv_session_config){.name = "s",
                                   .tenant = "default",
                                   .purpose = QKV_PURPOSE_ATTEND,
                                   .policy = test_policy(4, 4, WINDOW),
                                   .durability = QKV_DURABILITY_MEMORY,
                                   .prefixes = s->index,
                                   .root = qkv_prefix_root("default", "m", NULL, 0)};
}

static void teardown(scene *s) {
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  assert_int_equal(qkv_arena_read(s->arena).bytes_reserved, 0);
  qkv_arena_destroy(&s->arena);
  qkv_prefix_index_destroy(&s->index);
  for (int i = 0; i < 2; i++) free_sequence(&s->rows[i]);
}

static qkv_session *open_session(const scene *s, const qkv_session_config *config) {
  qkv_session *session = NULL;
  qkv_error error = {0};
  if (qkv_session_create(config, &s->model, s->arena, &session, &error) != QKV_OK) fail_msg("%s", error.text);
  return session;
}

static void close_session(qkv_session **session) {
  qkv_session_tokens_close(qkv_session_tokens_of(*session));
  qkv_session_unref(session);
}

// As the daemon does it: the ids are checked and reserved for, rows appended, ids kept. Returns pages that were
// taken.
static uint64_t append(const scene *s, qkv_session *session, uint32_t layer, int rows, uint64_t begin, uint64_t end) {
  row_pair pair;
  uint64_t appended, length;
  qkv_error error = {0};
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  qkv_append_use use = {.ids = s->ids + begin};
  make_pair(&pair, &s->rows[rows], begin, end, QKV_FP16);
  uint64_t reserved = qkv_session_tokens_cost(tokens, begin, end - begin);
  if (qkv_session_tokens_check(tokens, begin, s->ids + begin, end - begin, &error) != QKV_OK ||
      qkv_arena_reserve(s->arena, reserved, &error) != QKV_OK ||
      qkv_session_append_in(session, layer, &use, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length,
                            &error) != QKV_OK)
    fail_msg("%s", error.text);
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), begin, s->ids + begin, end - begin, &reserved);
  qkv_arena_unreserve(s->arena, reserved);
  free_pair(&pair);
  return use.pages_shared;
}

static uint64_t append_all(const scene *s, qkv_session *session, int rows, uint64_t begin, uint64_t end) {
  uint64_t taken = 0;
  for (uint32_t layer = 0; layer < LAYERS; layer++) taken += append(s, session, layer, rows, begin, end);
  return taken;
}

static const void *image_of(qkv_session *session, uint32_t layer, size_t page) {
  const qkv_layer *read;
  if (qkv_session_read(session, layer, &read, NULL) != QKV_OK) fail();
  const void *image = page < read->page_count ? qkv_layer_page(read, page)->page : NULL;
  assert_null(qkv_layer_validate(read));
  qkv_session_read_done(session, layer);
  return image;
}

static void test_pages_are_taken(void **state) {
  (void)state;
  scene s;
  setup(&s);
  qkv_session *first = open_session(&s, &s.config), *second = open_session(&s, &s.config);
  assert_int_equal(append_all(&s, first, 0, 0, TOKENS), 0);
  const uint64_t before = qkv_arena_read(s.arena).bytes_used;
  // In pieces that end anywhere: what a piece leaves in the tail is taken with the next.
  const uint64_t steps[] = {64, 65, 200, 71, 300};
  uint64_t taken = 0, at = 0;
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++, at += steps[i - 1])
    taken += append_all(&s, second, 1, at, at + steps[i]);
  assert_int_equal(at, TOKENS);
  assert_int_equal(taken, LAYERS * SEALED);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    for (size_t page = 0; page < SEALED; page++)
      assert_ptr_equal(image_of(first, layer, page), image_of(second, layer, page));
  }
  // The tail, and the ids: of coded pages nothing comes on top.
  assert_true(qkv_arena_read(s.arena).bytes_used - before < before / 2);
  // Its own rows again: those of pages that were taken are not compared.
  assert_int_equal(append_all(&s, second, 1, 0, TOKENS), 0);
  close_session(&first);
  qkv_session *third = open_session(&s, &s.config);
  assert_int_equal(append_all(&s, third, 0, 0, TOKENS), LAYERS * SEALED);
  close_session(&second);
  close_session(&third);
  teardown(&s);
}

static void test_what_is_not_taken(void **state) {
  (void)state;
  scene s;
  setup(&s);
  qkv_session *holder = open_session(&s, &s.config);
  (void)append_all(&s, holder, 0, 0, TOKENS);
  qkv_session_config other = s.config;
  other.policy = test_policy(4, 3, WINDOW);
  qkv_session *session = open_session(&s, &other);
  assert_int_equal(append_all(&s, session, 1, 0, TOKENS), 0);
  close_session(&session);
  other = s.config;
  other.max_attention_error = 0.1;
  session = open_session(&s, &other);
  assert_int_equal(append_all(&s, session, 1, 0, TOKENS), 0);
  close_session(&session);
  // Pages that have lost bits: what was coded anew is better.
  qkv_retier_report report = {0};
  qkv_error error = {0};
  assert_int_equal(qkv_session_demote(holder, &(qkv_retier_scope){.end = 128}, 2, true, &report, &error), QKV_OK);
  session = open_session(&s, &s.config);
  assert_int_equal(append_all(&s, session, 1, 0, TOKENS), LAYERS * (SEALED - 2));
  close_session(&session);
  // A layer that ends earlier than its ids.
  assert_int_equal(qkv_session_truncate(holder, 128, NULL, 0, &error), QKV_OK);
  (void)append(&s, holder, 0, 0, 128, TOKENS);
  session = open_session(&s, &s.config);
  assert_int_equal(append_all(&s, session, 1, 0, TOKENS), SEALED - 2);
  close_session(&session);
  close_session(&holder);
  teardown(&s);
}

enum { COPIED = 4 };

// Appends the first pages of one session's layer to another as they are.
static qkv_status append_pages(qkv_session *from, qkv_session *to, uint32_t layer, const qkv_append_use *use,
                               qkv_error *error) {
  const qkv_layer *read;
  qkv_coded_page held[COPIED];
  qkv_incoming_page pages[COPIED];
  uint64_t appended, length;
  assert_int_equal(qkv_session_read(from, layer, &read, NULL), QKV_OK);
  assert_int_equal(qkv_layer_coded_pages(read, 0, COPIED * PAGE, UINT64_MAX, held, COPIED), COPIED);
  for (size_t i = 0; i < COPIED; i++)
    pages[i] = (qkv_incoming_page){.image = held[i].image, .bytes = held[i].bytes, .tokens = held[i].tokens};
  const qkv_status status = qkv_session_append_pages(to, layer, use, 0, pages, COPIED, &appended, &length, error);
  assert_int_equal(appended, status == QKV_OK ? COPIED * PAGE : 0);
  qkv_session_read_done(from, layer);
  return status;
}

// The same with their ids.
static void copy_pages(const scene *s, qkv_session *from, qkv_session *to, uint32_t layer) {
  qkv_error error = {0};
  if (append_pages(from, to, layer, &(qkv_append_use){0}, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_session_tokens *tokens = qkv_session_tokens_of(to);
  uint64_t reserved = qkv_session_tokens_cost(tokens, 0, COPIED * PAGE);
  assert_int_equal(qkv_arena_reserve(s->arena, reserved, &error), QKV_OK);
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), 0, s->ids, COPIED * PAGE, &reserved);
  qkv_arena_unreserve(s->arena, reserved);
}

// A client may append pages that another session had dropped planes of.
static void test_copied_pages_are_taken_whole_alone(void **state) {
  (void)state;
  scene s;
  setup(&s);
  qkv_session_config hidden = s.config;
  hidden.prefixes = NULL;
  qkv_session *source = open_session(&s, &hidden), *copy = open_session(&s, &s.config);
  (void)append_all(&s, source, 0, 0, TOKENS);
  qkv_retier_report report = {0};
  qkv_error error = {0};
  assert_int_equal(qkv_session_demote(source, &(qkv_retier_scope){.end = 64}, 2, true, &report, &error), QKV_OK);
  for (uint32_t layer = 0; layer < LAYERS; layer++) copy_pages(&s, source, copy, layer);
  qkv_session *session = open_session(&s, &s.config);
  assert_int_equal(append_all(&s, session, 0, 0, TOKENS), LAYERS * 3);
  assert_ptr_not_equal(image_of(session, 0, 0), image_of(copy, 0, 0));
  assert_ptr_equal(image_of(session, 0, 1), image_of(copy, 0, 1));
  close_session(&session);
  close_session(&copy);
  close_session(&source);
  teardown(&s);
}

// Asked for the first page of an append, which has the layer's rows meanwhile.
typedef struct asking_encoder {
  qkv_row_encoder base;
  qkv_session *from, *to;
  int asked;
  qkv_status same, other;  // of pages for this layer and for another one
  qkv_error error;
} asking_encoder;

static bool ask(const qkv_row_encoder *encoder, const qkv_row_page *page, void *image, size_t *bytes) {
  asking_encoder *own = (asking_encoder *)encoder;
  const qkv_append_use use = {.at_once = true};
  (void)page;
  (void)image;
  (void)bytes;
  if (own->asked++ > 0) return false;
  own->same = append_pages(own->from, own->to, 0, &use, &own->error);
  own->other = append_pages(own->from, own->to, 1, &use, &own->error);
  return false;
}

// An append of pages with `at_once` does not wait for another append to the layer.
static void test_pages_at_once(void **state) {
  (void)state;
  scene s;
  setup(&s);
  qkv_session_config hidden = s.config;
  hidden.prefixes = NULL;
  qkv_session *source = open_session(&s, &hidden), *session = open_session(&s, &hidden);
  (void)append_all(&s, source, 0, 0, TOKENS);
  asking_encoder asking = {.base = {.encode = ask}, .from = source, .to = session};
  row_pair pair;
  uint64_t appended, length;
  qkv_error error = {0};
  make_pair(&pair, &s.rows[0], 0, TOKENS, QKV_FP16);
  assert_int_equal(qkv_session_append_in(session, 0, &(qkv_append_use){.encoder = &asking.base}, 0, &pair.k.tensor,
                                         &pair.v.tensor, false, &appended, &length, &error),
                   QKV_OK);
  free_pair(&pair);
  assert_int_equal(asking.same, QKV_UNAVAILABLE);
  assert_int_equal(asking.other, QKV_OK);
  assert_string_equal(asking.error.text, "");
  assert_int_equal(append_pages(source, session, 2, &(qkv_append_use){.at_once = true}, &error), QKV_OK);
  close_session(&session);
  close_session(&source);
  teardown(&s);
}

static uint32_t calibration_of(qkv_session *session, uint32_t layer, size_t page) {
  return ((const qkv_page_header *)image_of(session, layer, page))->calibration;
}

// Neither from a holder nor with a block that a fork shares.
static void test_pages_of_another_calibration_are_not_taken(void **state) {
  (void)state;
  scene s;
  setup(&s);
  const qkv_calibration *calibration = test_calibration(&s.model, 5);
  s.model.calibration = qkv_calibration_slot_create();
  qkv_session *holder = open_session(&s, &s.config), *fork = NULL;
  (void)append_all(&s, holder, 0, 0, PAGE);
  const uint64_t positions[LAYERS] = {PAGE, PAGE, PAGE, PAGE};
  assert_int_equal(qkv_session_fork(holder, &s.config, positions, &fork, NULL), QKV_OK);
  (void)append_all(&s, holder, 0, PAGE, TOKENS);

  qkv_calibration_slot_set(s.model.calibration, calibration);
  assert_int_equal(append_all(&s, fork, 1, PAGE, TOKENS), 0);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    assert_int_equal(calibration_of(holder, layer, 0), 0);
    assert_int_equal(calibration_of(fork, layer, 0), qkv_calibration_version(calibration));
  }
  close_session(&fork);
  qkv_session *session = open_session(&s, &s.config);
  assert_int_equal(append_all(&s, session, 1, 0, TOKENS), 0);
  close_session(&session);
  close_session(&holder);
  qkv_calibration_slot_set(s.model.calibration, NULL);
  qkv_calibration_unref(&calibration);
  qkv_calibration_slot_destroy(&s.model.calibration);
  teardown(&s);
}

static void test_chains_are_those_that_are_kept(void **state) {
  (void)state;
  scene s;
  setup(&s);
  qkv_session *session = open_session(&s, &s.config);
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  qkv_prefix_hash expected[TOKENS / PAGE], hashes[TOKENS / PAGE], last = s.config.root;
  for (size_t i = 0; i < TOKENS / PAGE; i++) {
    last = qkv_prefix_next(&last, s.ids + i * PAGE);
    expected[i] = last;
  }
  for (uint64_t length = 0; length < TOKENS; length += 37) {
    for (uint64_t from = 0; from <= length; from += 23) {
      for (size_t count = 1; from + count <= TOKENS; count += 41) {
        const size_t pages = qkv_session_tokens_chain(tokens, from, s.ids + from, count, hashes);
        assert_int_equal(pages, qkv_session_tokens_pages(from, count));
        assert_memory_equal(hashes, expected + from / PAGE, pages * sizeof *hashes);
      }
    }
    assert_int_equal(qkv_session_tokens_chain(tokens, length + 1, s.ids, PAGE, hashes), 0);
    (void)append(&s, session, 0, 0, length, length + 37 < TOKENS ? length + 37 : TOKENS);
  }
  close_session(&session);
  teardown(&s);
}

// ---- All at once ----

typedef struct crowd {
  scene s;
  qkv_session *holder;
  _Atomic uint64_t taken;
  _Atomic int failures;
} crowd;

enum { ROUNDS = 60 };

// Sessions come, take what they can from each other, lose bits, are cut, and go.
static void *append_often(void *context) {
  crowd *c = context;
  for (int i = 0; i < ROUNDS; i++) {
    qkv_session *session = open_session(&c->s, &c->s.config);
    qkv_error error = {0};
    qkv_retier_report report = {0};
    atomic_fetch_add(&c->taken, append_all(&c->s, session, i % 2, 0, TOKENS));
    if (i % 3 == 0 && qkv_session_demote(session, &(qkv_retier_scope){0}, 2, true, &report, &error) != QKV_OK)
      atomic_fetch_add(&c->failures, 1);
    if (qkv_session_truncate(session, 100, NULL, 0, &error) != QKV_OK) atomic_fetch_add(&c->failures, 1);
    atomic_fetch_add(&c->taken, append_all(&c->s, session, i % 2, 100, TOKENS));
    close_session(&session);
  }
  return NULL;
}

// The holder is cut and grows again.
static void *change_often(void *context) {
  crowd *c = context;
  for (int i = 0; i < ROUNDS; i++) {
    qkv_error error = {0};
    if (qkv_session_truncate(c->holder, (uint64_t)(i % 5) * PAGE, NULL, 0, &error) != QKV_OK)
      atomic_fetch_add(&c->failures, 1);
    (void)append_all(&c->s, c->holder, 0, (uint64_t)(i % 5) * PAGE, TOKENS);
  }
  return NULL;
}

static void test_all_at_once(void **state) {
  (void)state;
  crowd *c = calloc(1, sizeof *c);
  assert_non_null(c);
  setup(&c->s);
  c->holder = open_session(&c->s, &c->s.config);
  (void)append_all(&c->s, c->holder, 0, 0, TOKENS);
  pthread_t threads[3];
  void *(*const bodies[])(void *) = {append_often, append_often, change_often};
  for (int i = 0; i < 3; i++) assert_int_equal(pthread_create(&threads[i], NULL, bodies[i], c), 0);
  for (int i = 0; i < 3; i++) (void)pthread_join(threads[i], NULL);
  assert_int_equal(c->failures, 0);
  assert_true(c->taken > LAYERS * ROUNDS);
  print_message("%llu pages taken\n", (unsigned long long)c->taken);
  close_session(&c->holder);
  teardown(&c->s);
  free(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pages_are_taken),
      cmocka_unit_test(test_what_is_not_taken),
      cmocka_unit_test(test_copied_pages_are_taken_whole_alone),
      cmocka_unit_test(test_pages_at_once),
      cmocka_unit_test(test_pages_of_another_calibration_are_not_taken),
      cmocka_unit_test(test_chains_are_those_that_are_kept),
      cmocka_unit_test(test_all_at_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
