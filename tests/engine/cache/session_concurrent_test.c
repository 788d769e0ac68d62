// Appends concurrent with everything else: readers, forks, truncations and sealing of the whole tail run while pages
// are coded. Whatever the order, rows are those of one sequence, so a page's bytes say what they must be.
#include <pthread.h>
#include <stdatomic.h>

#include "engine/cache/session.h"
#include "engine/cache/session_retier.h"
#include "engine/cache/session_spill.h"
#include "tests/engine/cache/fixture.h"

enum { TOKENS = 1200, ROUNDS = 100, CHUNK_MAX = 400 };

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_session *session;
  _Atomic bool over;
  _Atomic int failures;
  _Atomic uint64_t attended, forked, cut, sealed;
} scene;

static void setup(scene *s, double max_attention_error) {
  *s = (scene){.model = test_model(1, 2, 16, 8, QKV_FP16)};
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 26);
  s->rows = make_sequence(&s->model, TOKENS, 1);
  const qkv_session_config config = {.name = "a",
                                     .tenant = "default",
                                     .purpose = QKV_PURPOSE_ATTEND,
                                     .policy = test_policy(4, 4, 70),
                                     .ema = {.alpha = 0.9, .sample_every = 1},
                                     .max_attention_error = max_attention_error};
  qkv_error error = {0};
  if (qkv_session_create(&config, &s->model, s->arena, &s->session, &error) != QKV_OK) fail_msg("%s", error.text);
}

static void teardown(scene *s) {
  qkv_session_unref(&s->session);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  assert_int_equal(qkv_arena_read(s->arena).bytes_reserved, 0);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

static qkv_status append(const scene *s, qkv_session *session, uint64_t begin, uint64_t end) {
  row_pair pair;
  uint64_t appended, length;
  make_pair(&pair, &s->rows, begin, end, QKV_FP16);
  const qkv_status status =
      qkv_session_append(session, 0, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL);
  free_pair(&pair);
  return status;
}

static uint64_t length_of(qkv_session *session) {
  uint64_t lengths[4];
  qkv_session_info info;
  qkv_session_read_info(session, &info, lengths);
  return lengths[0];
}

// ---- What a layer must have ----

static bool page_is_right(const scene *s, const qkv_page_entry *entry) {
  const qkv_page_header *header = entry->page;
  row_pair pair;
  make_pair(&pair, &s->rows, header->position, header->position + header->tokens, QKV_FP16);
  void *image = aligned_alloc(64, (entry->coder->codec->page_bytes_max(entry->coder) + 63) / 64 * 64);
  assert_non_null(image);
  const size_t bytes = entry->coder->codec->encode(entry->coder, header->position, header->tokens, QKV_FP16,
                                                   pair.k.segment.data, pair.v.segment.data, NULL, image);
  const bool right = bytes == entry->bytes && memcmp(image, entry->page, bytes) == 0;
  free(image);
  free_pair(&pair);
  return right;
}

static bool tail_is_right(const scene *s, const qkv_layer *layer) {
  for (uint64_t position = layer->sealed; position < layer->length; position++) {
    float row[16];
    qkv_to_float(QKV_FP16, qkv_layer_exact_row(layer, QKV_K, position, 0), row, 16);
    if (memcmp(row, s->rows.k + position * 16, sizeof row) != 0) return false;
    qkv_to_float(QKV_FP16, qkv_layer_exact_row(layer, QKV_V, position, 0), row, 8);
    if (memcmp(row, s->rows.v + position * 8, 8 * sizeof *row) != 0) return false;
  }
  return true;
}

// With a quality contract pages have the tiers that it selected.
static bool layer_is_right(const scene *s, const qkv_layer *layer) {
  bool right = qkv_layer_validate(layer) == NULL && tail_is_right(s, layer);
  for (size_t i = 0; i < layer->page_count && layer->config.quality == NULL; i++)
    right &= page_is_right(s, qkv_layer_page(layer, i));
  return right;
}

static void check(scene *s, qkv_session *session) {
  const qkv_layer *layer;
  if (qkv_session_read(session, 0, &layer, NULL) != QKV_OK) return (void)atomic_fetch_add(&s->failures, 1);
  if (!layer_is_right(s, layer)) atomic_fetch_add(&s->failures, 1);
  qkv_session_read_done(session, 0);
}

// ---- Who comes meanwhile ----

static void attend(scene *s, const qkv_layer *layer) {
  float q[32], out[18];
  uint64_t seed = atomic_load(&s->attended) + 1;
  for (int i = 0; i < 32; i++) q[i] = random_normal(&seed);
  const qkv_segment segment = {.data = (const uint8_t *)q, .length = sizeof q};
  const qkv_attend request = {.layer = layer,
                              .position = layer->length,
                              .q = qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){1, 2, 16}, &segment),
                              .options = {.not_causal = true},
                              .out = out,
                              .lse = out + 16};
  qkv_attend_run(NULL, &request, 1);
  for (int i = 0; i < 18; i++) {
    if (layer->length > 0 && !isfinite(out[i])) atomic_fetch_add(&s->failures, 1);
  }
  atomic_fetch_add(&s->attended, 1);
}

static void *read_often(void *context) {
  scene *s = context;
  while (!atomic_load(&s->over)) {
    const qkv_layer *layer;
    if (qkv_session_read(s->session, 0, &layer, NULL) != QKV_OK) break;
    if (layer->length % 20 != 0) atomic_fetch_add(&s->failures, 1);  // all rows of an append, or none
    attend(s, layer);
    qkv_session_read_done(s->session, 0);
    check(s, s->session);
  }
  return NULL;
}

static void *fork_often(void *context) {
  scene *s = context;
  for (uint64_t i = 0; !atomic_load(&s->over); i++) {
    qkv_session_config config = *qkv_session_config_of(s->session);
    uint64_t seed = i, position = random_below(&seed, TOKENS) / 20 * 20;
    qkv_session *child = NULL;
    config.parent_truncations = (uint32_t)qkv_session_truncations(s->session);
    config.id = 2 + i;
    const uint64_t positions[4] = {position, position, position, position};
    if (qkv_session_fork(s->session, &config, positions, &child, NULL) != QKV_OK) continue;
    check(s, child);
    const uint64_t length = length_of(child);
    if (append(s, child, length, length + 200 < TOKENS ? length + 200 : TOKENS) != QKV_OK && length < TOKENS)
      atomic_fetch_add(&s->failures, 1);
    check(s, child);
    qkv_session_unref(&child);
    atomic_fetch_add(&s->forked, 1);
  }
  return NULL;
}

static void *cut_often(void *context) {
  scene *s = context;
  for (uint64_t i = 0; !atomic_load(&s->over); i++) {
    uint64_t seed = i;
    const uint64_t length = length_of(s->session), back = random_below(&seed, 30) * 20;
    if (qkv_session_truncate(s->session, length > back ? length - back : 0, NULL, 0, NULL) != QKV_OK)
      atomic_fetch_add(&s->failures, 1);
    atomic_fetch_add(&s->cut, 1);
    if (i % 8 == 0) {
      if (qkv_session_seal(s->session, NULL) != QKV_OK) atomic_fetch_add(&s->failures, 1);
      atomic_fetch_add(&s->sealed, 1);
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
  }
  return NULL;
}

static void *demote_often(void *context) {
  scene *s = context;
  while (!atomic_load(&s->over)) {
    qkv_retier_report report = {0};
    qkv_error error = {0};
    if (qkv_session_demote(s->session, &(qkv_retier_scope){0}, 2, true, &report, &error) != QKV_OK)
      atomic_fetch_add(&s->failures, 1);
    (void)nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
  }
  return NULL;
}

// Where the layer was cut since its length was read, another thread says so.
static void append_often(scene *s) {
  uint64_t seed = 7;
  for (int i = 0; i < ROUNDS; i++) {
    const uint64_t length = length_of(s->session);
    uint64_t end = length + (1 + random_below(&seed, CHUNK_MAX / 20)) * 20;
    if (length == TOKENS && qkv_session_truncate(s->session, random_below(&seed, 10) * 20, NULL, 0, NULL) != QKV_OK)
      atomic_fetch_add(&s->failures, 1);
    if (end > TOKENS) end = TOKENS;
    const qkv_status status = length == TOKENS ? QKV_OK : append(s, s->session, length, end);
    if (status != QKV_OK && status != QKV_FAILED_PRECONDITION) atomic_fetch_add(&s->failures, 1);
  }
}

static void run(scene *s, void *(*const bodies[])(void *), size_t count) {
  pthread_t threads[8];
  for (size_t i = 0; i < count; i++) assert_int_equal(pthread_create(&threads[i], NULL, bodies[i], s), 0);
  append_often(s);
  while (atomic_load(&s->attended) < 20) append_often(s);
  atomic_store(&s->over, true);
  for (size_t i = 0; i < count; i++) (void)pthread_join(threads[i], NULL);
  print_message("%llu attends, %llu forks, %llu truncations, %llu times all sealed\n",
                (unsigned long long)s->attended, (unsigned long long)s->forked, (unsigned long long)s->cut,
                (unsigned long long)s->sealed);
  assert_int_equal(s->failures, 0);
}

static void test_pages_are_those_of_the_rows(void **state) {
  (void)state;
  scene s;
  setup(&s, 0);
  run(&s, (void *(*const[])(void *)){read_often, read_often, fork_often, cut_often}, 4);
  check(&s, s.session);
  assert_int_equal(s.failures, 0);
  assert_true(s.forked > 0 && s.cut > 0 && s.sealed > 0);
  teardown(&s);
}

// Tier selection reads the layer while other threads do; its measurements stay in the sums.
static void *ask_often(void *context) {
  scene *s = context;
  while (!atomic_load(&s->over)) {
    const qkv_layer *layer;
    qkv_session_info info;
    if (qkv_session_read(s->session, 0, &layer, NULL) != QKV_OK) break;
    attend(s, layer);
    if (qkv_layer_validate(layer) != NULL) atomic_fetch_add(&s->failures, 1);
    qkv_session_read_done(s->session, 0);
    qkv_session_read_info(s->session, &info, NULL);
  }
  return NULL;
}

static void test_contracts(void **state) {
  (void)state;
  scene s;
  setup(&s, 0.2);
  assert_int_equal(append(&s, s.session, 0, 200), QKV_OK);
  run(&s, (void *(*const[])(void *)){ask_often, ask_often, cut_often, demote_often}, 4);
  check(&s, s.session);
  qkv_session_info info;
  qkv_session_read_info(s.session, &info, NULL);
  assert_true(info.usage.quality.pages > 0);
  assert_int_equal(s.failures, 0);
  teardown(&s);
}

// A reader that waited for the whole append would never see the layer as it was before it with memory reserved.
typedef struct appending {
  scene *scene;
  _Atomic bool begun, over;
} appending;

static void *append_all(void *context) {
  appending *a = context;
  atomic_store(&a->begun, true);
  (void)append(a->scene, a->scene->session, 100, TOKENS);
  atomic_store(&a->over, true);
  return NULL;
}

static void test_readers_do_not_wait_for_pages(void **state) {
  (void)state;
  int concurrent = 0;
  for (int i = 0; i < 200 && concurrent == 0; i++) {
    scene s;
    pthread_t thread;
    setup(&s, 0);
    assert_int_equal(append(&s, s.session, 0, 100), QKV_OK);
    const uint64_t idle = qkv_arena_read(s.arena).bytes_reserved;
    appending a = {.scene = &s};
    assert_int_equal(pthread_create(&thread, NULL, append_all, &a), 0);
    while (!atomic_load(&a.over)) {
      const qkv_layer *layer;
      assert_int_equal(qkv_session_read(s.session, 0, &layer, NULL), QKV_OK);
      concurrent += layer->length == 100 && qkv_arena_read(s.arena).bytes_reserved > idle;  // pages are coded
      qkv_session_read_done(s.session, 0);
    }
    (void)pthread_join(thread, NULL);
    assert_int_equal(length_of(s.session), TOKENS);
    teardown(&s);
  }
  assert_true(concurrent > 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pages_are_those_of_the_rows),
      cmocka_unit_test(test_contracts),
      cmocka_unit_test(test_readers_do_not_wait_for_pages),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
