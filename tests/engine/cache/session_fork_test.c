// Sessions that are forked: what a fork has, what is refused, and everything at once from several threads.
#include <pthread.h>
#include <stdatomic.h>

#include "engine/cache/session.h"
#include "engine/cache/session_retier.h"
#include "engine/cache/session_spill.h"
#include "tests/engine/cache/backing_double.h"

enum { TOKENS = 700, LAYERS = 4, RECORDS = 4096 };

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_session_config config;
  qkv_session *parent;
} scene;

static void setup(scene *s, const qkv_backing *backing) {
  s->model = test_model(1, 2, 16, 8, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 26);
  s->rows = make_sequence(&s->model, TOKENS, 1);
  s->config = (qkv_session_config){.name = "parent",
                                   .tenant = "default",
                                   .purpose = QKV_PURPOSE_ATTEND,
                                   .policy = test_policy(4, 4, 70),
                                   .ema = {.alpha = 0.9, .sample_every = 1},
                                   .durability = backing == NULL ? QKV_DURABILITY_MEMORY : QKV_DURABILITY_ASYNC,
                                   .backing = backing,
                                   .id = 1};
  qkv_error error = {0};
  if (qkv_session_create(&s->config, &s->model, s->arena, &s->parent, &error) != QKV_OK) fail_msg("%s", error.text);
}

static void teardown(scene *s) {
  qkv_session_unref(&s->parent);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  assert_int_equal(qkv_arena_read(s->arena).bytes_reserved, 0);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

static void append(const scene *s, qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end) {
  row_pair pair;
  uint64_t appended, length;
  qkv_error error = {0};
  make_pair(&pair, &s->rows, begin, end, QKV_FP16);
  if (qkv_session_append(session, layer, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, &error) !=
      QKV_OK)
    fail_msg("%s", error.text);
  free_pair(&pair);
}

static void append_all(const scene *s, qkv_session *session, uint64_t begin, uint64_t end) {
  for (uint32_t layer = 0; layer < LAYERS; layer++) append(s, session, layer, begin, end);
}

static qkv_session *fork_at(const scene *s, qkv_session *parent, uint64_t position) {
  static _Atomic uint64_t ids = 2;
  qkv_session_config config = s->config;
  qkv_session *child = NULL;
  qkv_error error = {0};
  config.id = atomic_fetch_add(&ids, 1);
  uint64_t positions[LAYERS];
  for (int i = 0; i < LAYERS; i++) positions[i] = position == 0 ? UINT64_MAX : position;
  if (qkv_session_fork(parent, &config, positions, &child, &error) != QKV_OK) fail_msg("%s", error.text);
  return child;
}

// Attention of one query over a layer, out [2][8] and lse [2].
static bool attend(qkv_session *session, uint32_t layer, uint64_t end, float out[18]) {
  const qkv_layer *read;
  float q[32];
  uint64_t seed = 5;
  for (int i = 0; i < 32; i++) q[i] = random_normal(&seed);
  const qkv_segment segment = {.data = (const uint8_t *)q, .length = sizeof q};
  if (qkv_session_read(session, layer, &read, NULL) != QKV_OK) fail();
  const bool held = qkv_layer_holds(read, 0, end);
  const qkv_attend request = {.layer = read,
                              .q = qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){1, 2, 16}, &segment),
                              .options = {.end = end, .not_causal = true},
                              .out = out,
                              .lse = out + 16};
  if (held) qkv_attend_run(NULL, &request, 1);
  qkv_session_read_done(session, layer);
  return held;
}

static void test_a_fork_is_what_its_parent_was(void **state) {
  (void)state;
  scene s;
  float of_parent[18], of_child[18];
  setup(&s, NULL);
  append_all(&s, s.parent, 0, 500);
  qkv_session *child = fork_at(&s, s.parent, 300), *all = fork_at(&s, s.parent, 0);
  uint64_t lengths[LAYERS];
  qkv_session_info info;
  qkv_session_read_info(child, &info, lengths);
  for (int i = 0; i < LAYERS; i++) assert_int_equal(lengths[i], 300);
  qkv_session_read_info(all, &info, lengths);
  for (int i = 0; i < LAYERS; i++) assert_int_equal(lengths[i], 500);
  assert_true(info.usage.bytes_shared == info.usage.bytes_coded && info.usage.bytes_coded > 0);
  append_all(&s, child, 300, 500);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    assert_true(attend(s.parent, layer, 0, of_parent) && attend(all, layer, 0, of_child));
    assert_memory_equal(of_parent, of_child, sizeof of_parent);
  }
  // The page that the fork began in is shorter in the child, so its codes are others.
  qkv_session *grandchild = fork_at(&s, child, 256);
  qkv_session_unref(&child);
  append_all(&s, grandchild, 256, 700);
  append_all(&s, s.parent, 500, 700);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    // The same rows in ranges that end elsewhere: sums are of the same numbers in another order.
    assert_true(attend(s.parent, layer, 0, of_parent) && attend(grandchild, layer, 0, of_child));
    for (size_t i = 0; i < sizeof of_parent / sizeof *of_parent; i++)
      assert_float_equal(of_parent[i], of_child[i], 1e-5);
  }
  qkv_session_unref(&all);
  qkv_session_unref(&grandchild);
  teardown(&s);
}

// Layers of different lengths, and a budget that is full.
static void test_layers_end_where_they_do(void **state) {
  (void)state;
  scene s;
  qkv_session *child = NULL;
  setup(&s, NULL);
  append_all(&s, s.parent, 0, 100);
  append(&s, s.parent, 1, 100, 130);
  child = fork_at(&s, s.parent, 120);
  uint64_t lengths[LAYERS];
  qkv_session_info info;
  qkv_session_read_info(child, &info, lengths);
  assert_int_equal(lengths[0], 100);
  assert_int_equal(lengths[1], 120);
  qkv_session_unref(&child);
  qkv_arena_set_limit(s.arena, 100);
  const uint64_t used = qkv_arena_read(s.arena).bytes_used;
  assert_int_equal(qkv_session_fork(s.parent, &s.config, lengths, &child, NULL), QKV_RESOURCE_EXHAUSTED);
  assert_null(child);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used);
  teardown(&s);
}

// ---- All at once ----

typedef struct record {
  void *page;
  uint32_t bytes;
} record;

typedef struct shared_backing {
  qkv_backing table;
  pthread_mutex_t lock;
  record records[RECORDS];
  uint64_t count;
} shared_backing;

static uint64_t put(void *context, uint64_t session, const qkv_model *model, qkv_page_hold *page, uint32_t tokens,
                    const qkv_prefix_hash *hash) {
  (void)hash;
  shared_backing *backing = context;
  (void)session;
  (void)model;
  (void)tokens;
  (void)pthread_mutex_lock(&backing->lock);
  const uint64_t number = backing->count + 1 < RECORDS ? ++backing->count : 0;
  if (number != 0) {
    backing->records[number] = (record){.page = malloc(page->bytes), .bytes = page->bytes};
    memcpy(backing->records[number].page, page->image, page->bytes);
  }
  (void)pthread_mutex_unlock(&backing->lock);
  qkv_page_let_go(page);
  return number;
}

static qkv_record_state state_of(void *context, uint64_t number) {
  (void)context;
  return number == 0 ? QKV_RECORD_GONE : QKV_RECORD_DURABLE;
}

static void drop(void *context, uint64_t number) {
  (void)context;
  (void)number;
}

static qkv_status health(void *context, uint64_t session) {
  (void)context;
  (void)session;
  return QKV_OK;
}

static void cut(void *context, uint64_t session, uint32_t layer, uint64_t position) {
  (void)context;
  (void)session;
  (void)layer;
  (void)position;
}

static void restore(const scene *s, shared_backing *backing, qkv_session *session, uint32_t layer) {
  qkv_missing_page missing[16];
  const size_t count = qkv_session_missing(session, layer, 0, 0, false, missing, 16);
  for (size_t i = 0; i < count; i++) {
    (void)pthread_mutex_lock(&backing->lock);
    const record from = backing->records[missing[i].record];
    (void)pthread_mutex_unlock(&backing->lock);
    void *image = qkv_arena_alloc_overhead(s->arena, missing[i].bytes);
    memcpy(image, from.page, from.bytes);
    qkv_error error = {0};
    size_t failed;
    if (qkv_session_restore(session, layer, NULL, &missing[i], &image, 1, &failed, &error) != QKV_OK)
      fail_msg("%s", error.text);
  }
}

typedef struct crowd {
  scene s;
  shared_backing backing;
  qkv_session *children[2];
  float expected[LAYERS][18];
  _Atomic int failures;
  _Atomic uint64_t attended, evicted;
} crowd;

enum { PREFIX = 448, ROUNDS = 150 };

// Children and forks of them attend what all share, wherever it is meanwhile.
static void *attend_often(void *context) {
  crowd *c = context;
  float out[18];
  for (int i = 0; i < ROUNDS; i++) {
    qkv_session *child = c->children[i % 2], *fork = i % 5 == 0 ? fork_at(&c->s, child, 0) : qkv_session_ref(child);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
      while (!attend(fork, layer, PREFIX, out)) restore(&c->s, &c->backing, fork, layer);
      if (memcmp(out, c->expected[layer], sizeof out) != 0) atomic_fetch_add(&c->failures, 1);
      atomic_fetch_add(&c->attended, 1);
    }
    qkv_session_unref(&fork);
  }
  return NULL;
}

static void *evict_often(void *context) {
  crowd *c = context;
  for (int i = 0; i < ROUNDS; i++) {
    (void)qkv_session_settle(c->s.parent);
    atomic_fetch_add(&c->evicted, qkv_session_evict(c->s.parent, UINT64_MAX, i % 2 == 0));
    qkv_session_touch(c->s.parent);
  }
  return NULL;
}

// Rows of one's own: appended, cut off again, and at fewer bits.
static void *change_often(void *context) {
  crowd *c = context;
  for (int i = 0; i < ROUNDS / 3; i++) {
    qkv_session *child = fork_at(&c->s, c->children[i % 2], PREFIX);
    append_all(&c->s, child, PREFIX, TOKENS);
    qkv_retier_report report = {0};
    qkv_error error = {0};
    if (qkv_session_demote(child, &(qkv_retier_scope){0}, 2, true, &report, &error) != QKV_OK)
      atomic_fetch_add(&c->failures, 1);
    if (qkv_session_truncate(child, 100, NULL, 0, &error) != QKV_OK) atomic_fetch_add(&c->failures, 1);
    append_all(&c->s, child, 100, 300);
    qkv_session_info info;
    qkv_session_read_info(child, &info, NULL);
    qkv_session_unref(&child);
  }
  return NULL;
}

static void test_all_at_once(void **state) {
  (void)state;
  crowd *c = calloc(1, sizeof *c);
  assert_non_null(c);
  assert_int_equal(pthread_mutex_init(&c->backing.lock, NULL), 0);
  c->backing.table = (qkv_backing){
      .context = &c->backing, .put = put, .state = state_of, .drop = drop, .health = health, .cut = cut};
  setup(&c->s, &c->backing.table);
  append_all(&c->s, c->s.parent, 0, TOKENS);
  for (uint32_t layer = 0; layer < LAYERS; layer++)
    assert_true(attend(c->s.parent, layer, PREFIX, c->expected[layer]));
  for (int i = 0; i < 2; i++) c->children[i] = fork_at(&c->s, c->s.parent, PREFIX);
  pthread_t threads[4];
  void *(*const bodies[])(void *) = {attend_often, attend_often, evict_often, change_often};
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, bodies[i], c), 0);
  for (int i = 0; i < 4; i++) (void)pthread_join(threads[i], NULL);
  assert_int_equal(c->failures, 0);
  assert_int_equal(c->attended, 2 * ROUNDS * LAYERS);
  assert_true(c->evicted > 0);
  print_message("%llu bytes evicted, %llu records\n", (unsigned long long)c->evicted,
                (unsigned long long)c->backing.count);
  for (int i = 0; i < 2; i++) qkv_session_unref(&c->children[i]);
  teardown(&c->s);
  for (uint64_t i = 1; i <= c->backing.count; i++) free(c->backing.records[i].page);
  (void)pthread_mutex_destroy(&c->backing.lock);
  free(c);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_fork_is_what_its_parent_was),
      cmocka_unit_test(test_layers_end_where_they_do),
      cmocka_unit_test(test_all_at_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
