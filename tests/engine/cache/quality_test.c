// The quality contract: tiers that follow it, the error that it reports against float64, memory, threads.
#include "engine/cache/quality.h"

#include <pthread.h>
#include <time.h>

#include "engine/cache/session.h"
#include "tests/engine/cache/fixture.h"
#include "tests/engine/cache/used_session.h"

enum { PAGES = 6, TOKENS = 64 * (PAGES + 3), WINDOW = 128, STEP = 32, TAKEN = 2 * QKV_QUALITY_TOKENS };

// A layer with a contract, and the queries that it has observed.
typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_layer layer;
  void *block;
  float *queries[TAKEN];  // [q_heads][key_dim] each, as attended, without the scale
  uint64_t stands[TAKEN];
} scene;

static qkv_model roped(qkv_model model) {
  model.rope = (qkv_rope){.theta = 10000, .width = model.key_dim};
  qkv_error error = {0};
  if (qkv_model_resolve(&model, &error) != QKV_OK) fail_msg("%s", error.text);
  return model;
}

static void setup_scene(scene *s, qkv_model model, qkv_frame frame, double bits, double error_max) {
  *s = (scene){.model = model, .arena = qkv_arena_create("memory-budget", (uint64_t)1 << 28)};
  const qkv_policy policy = test_policy(bits, bits, WINDOW);
  s->rows = make_sequence(&s->model, TOKENS, 11);
  qkv_layer_config config = test_layer_config(&s->model, policy, 0, s->arena);
  s->block = calloc(1, qkv_quality_bytes(&s->model));
  assert_non_null(s->block);
  if (error_max > 0) config.quality = qkv_quality_init(s->block, &s->model, TEST_LAYER, error_max);
  qkv_coder *coder = coder_create((uint16_t)model.kv_heads, (uint16_t)model.key_dim, (uint16_t)model.value_dim, bits,
                                  bits, frame, &s->model.rope);
  coder->layer = TEST_LAYER;
  qkv_layer_init(&s->layer, &config, coder);
}

static void teardown_scene(scene *s) {
  if (s->layer.config.quality != NULL) qkv_quality_deinit(s->layer.config.quality);
  deinit_layer(&s->layer);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
  free(s->block);
  for (size_t i = 0; i < TAKEN; i++) free(s->queries[i]);
}

// One attend of one token's queries.
static void ask(scene *s, uint64_t stand, const float *queries) {
  test_tensor tensor;
  make_tensor(&tensor, QKV_FP32, queries, 1, s->model.q_heads, s->model.key_dim);
  qkv_attend request = {.layer = &s->layer,
                        .position = stand,
                        .q = tensor.tensor,
                        .options.precision = QKV_PRECISION_FP32,
                        .out = calloc((size_t)s->model.q_heads * s->model.value_dim, sizeof(float)),
                        .lse = calloc(s->model.q_heads, sizeof(float))};
  qkv_error error = {0};
  if (qkv_attend_check(&request, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_attend_run(NULL, &request, 1);
  free(request.out);
  free(request.lse);
  free_tensor(&tensor);
}

// As many as a contract keeps, the first one at `stand`.
static void ask_all(scene *s, uint64_t stand, float size) {
  const size_t count = (size_t)s->model.q_heads * s->model.key_dim;
  for (size_t i = 0; i < TAKEN; i++) {
    s->queries[i] = random_floats(100 + i, count);
    for (size_t j = 0; j < count; j++) s->queries[i][j] *= size;
    s->stands[i] = stand + i;
    ask(s, s->stands[i], s->queries[i]);
  }
}

// Half a page, then the queries, then the rest.
static void play(scene *s, uint64_t stand, float size) {
  must_append(&s->layer, &s->rows, 0, 32);
  ask_all(s, stand, size);
  for (uint64_t at = 32; at < TOKENS; at += STEP) must_append(&s->layer, &s->rows, at, at + STEP);
  assert_valid(&s->layer);
}

static bool all_tiers_are(const scene *s, uint8_t tier) {
  bool same = s->layer.page_count > 0;
  for (size_t i = 0; i < s->layer.page_count; i++) {
    for (uint16_t h = 0; h < s->model.kv_heads; h++) {
      const qkv_page_directory *entry = qkv_page_entry_of(qkv_layer_page(&s->layer, i)->page, h);
      for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) same &= entry->tier_k[g] == tier && entry->tier_v[g] == tier;
    }
  }
  return same;
}

// ---- Float64 ----

// A head's sum of e^(score - lse) v over tokens [first, end) by one query; `lse` NAN: it becomes theirs.
static void attend_to(const scene *s, uint64_t first, uint64_t end, uint32_t head, const float *query, const float *k,
                      const float *v, double *lse, double *out) {
  const qkv_model *model = &s->model;
  const uint32_t kv_head = head / (model->q_heads / model->kv_heads);
  double scores[TOKENS], total = 0;
  for (uint64_t t = first; t < end; t++) {
    const float *key = k + (t * model->kv_heads + kv_head) * model->key_dim;
    scores[t] = 0;
    for (size_t i = 0; i < model->key_dim; i++) scores[t] += (double)query[i] * (double)key[i] * model->scale;
    if (model->soft_cap != 0) scores[t] = model->soft_cap * tanh(scores[t] / model->soft_cap);
    total += exp(scores[t]);
  }
  if (isnan(*lse)) *lse = log(total);
  memset(out, 0, model->value_dim * sizeof *out);
  for (uint64_t t = first; t < end; t++) {
    const float *value = v + (t * model->kv_heads + kv_head) * model->value_dim;
    for (size_t i = 0; i < model->value_dim; i++) out[i] += exp(scores[t] - *lse) * (double)value[i];
  }
}

// Sums over one page and the queries that are held out: errors[0] squared errors times squared shares, errors[1]
// outputs times shares, errors[2] outputs. `k` and `v` are the layer's decoded rows.
static void naive_error(const scene *s, uint64_t page, const float *k, const float *v, double errors[3]) {
  const uint64_t first = page * 64, end = first + 64;
  const uint64_t held = end + WINDOW - STEP;  // when the page was sealed: it goes before the rows that are appended
  const size_t before_k = first * s->model.kv_heads * s->model.key_dim;
  const size_t before_v = first * s->model.kv_heads * s->model.value_dim;
  sequence mixed = make_sequence(&s->model, TOKENS, 11);
  memcpy(mixed.k, k, before_k * sizeof *k);
  memcpy(mixed.v, v, before_v * sizeof *v);
  for (size_t i = 1; i < TAKEN; i += 2) {
    for (uint32_t head = 0; head < s->model.q_heads; head++) {
      double lse = NAN, lse_page = NAN, whole[64], exact[64], coded[64];
      float query[QKV_DIM_MAX];
      const uint64_t last = end - 1 + WINDOW;
      memcpy(query, s->queries[i] + head * s->model.key_dim, s->model.key_dim * sizeof *query);
      if (s->stands[i] < last && s->model.rope.theta != 0) {
        qkv_rope_inverse(&s->model.rope, query, s->stands[i]);
        qkv_rope_forward(&s->model.rope, query, last);
      }
      attend_to(s, 0, held, head, query, mixed.k, mixed.v, &lse, whole);
      attend_to(s, first, end, head, query, s->rows.k, s->rows.v, &lse_page, exact);
      attend_to(s, first, end, head, query, k, v, &lse_page, coded);
      const double share = exp(lse_page - lse);
      for (size_t c = 0; c < s->model.value_dim; c++) {
        errors[0] += square(share * (coded[c] - exact[c]));
        errors[1] += share * square(whole[c]);
        errors[2] += square(whole[c]);
      }
    }
  }
  free_sequence(&mixed);
}

static void check_error(const scene *s) {
  const qkv_quality_stats stats = qkv_quality_read(s->layer.config.quality);
  float *k = decoded_rows(&s->layer, QKV_K), *v = decoded_rows(&s->layer, QKV_V);
  double squares = 0, shares = 0;
  assert_true(s->model.value_dim <= 64);
  assert_int_equal(stats.pages, s->layer.page_count);
  for (uint64_t page = 0; page < stats.pages; page++) {
    double errors[3] = {0};
    naive_error(s, page, k, v, errors);
    squares += errors[0] / errors[2];
    shares += errors[1] / errors[2];
  }
  assert_true(stats.squares > 0);
  assert_float_equal(qkv_quality_error(&stats) / sqrt(squares / shares), 1, 1e-3);
  free(k);
  free(v);
}

static void the_error_is_that_of_float64(void **state) {
  (void)state;
  const qkv_model plain = test_model(2, 4, 64, 48, QKV_FP16);
  qkv_model capped = plain;
  capped.soft_cap = 3;
  const struct {
    qkv_model model;
    qkv_frame frame;
    uint64_t stand;
  } cases[] = {{plain, QKV_FRAME_PLAIN, 0},
               {capped, QKV_FRAME_PLAIN, 0},
               {roped(plain), QKV_FRAME_ATTEND, TOKENS},
               {roped(plain), QKV_FRAME_ATTEND, 31},
               {roped(plain), QKV_FRAME_ARCHIVE, TOKENS},
               {roped(plain), QKV_FRAME_ARCHIVE, 31}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    scene s;
    setup_scene(&s, cases[i].model, cases[i].frame, 4, 0.2);
    play(&s, cases[i].stand, 1);
    check_error(&s);
    teardown_scene(&s);
  }
}

// ---- Tiers ----

static void the_contract_decides_the_tiers(void **state) {
  (void)state;
  const double limits[] = {0.05, 0.1, 0.2, 0.4};
  const qkv_frame frames[] = {QKV_FRAME_PLAIN, QKV_FRAME_ATTEND, QKV_FRAME_ARCHIVE};
  for (size_t f = 0; f < 3; f++) {
    uint64_t bytes = UINT64_MAX;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
      scene s;
      setup_scene(&s, roped(test_model(2, 2, 64, 64, QKV_FP16)), frames[f], 6, limits[i]);
      play(&s, TOKENS, 1);
      const qkv_quality_stats stats = qkv_quality_read(s.layer.config.quality);
      assert_int_equal(stats.pages, s.layer.page_count);
      // The other half of the queries sees about as much.
      assert_true(qkv_quality_error(&stats) < limits[i] * 1.25);
      assert_true(qkv_layer_read_usage(&s.layer).bytes_coded < bytes);
      bytes = qkv_layer_read_usage(&s.layer).bytes_coded;
      teardown_scene(&s);
    }
  }
}

static void much_is_allowed_or_nothing(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(2, 2, 64, 64, QKV_FP16), QKV_FRAME_PLAIN, 4, 1);
  play(&s, 0, 0.5f);
  assert_true(all_tiers_are(&s, QKV_QUALITY_TIER_LEAST));
  assert_true(qkv_layer_page(&s.layer, 0)->lost);
  assert_int_equal(qkv_quality_read(s.layer.config.quality).missed, 0);
  // Rows that are held already match at the tiers that they have now.
  must_append(&s.layer, &s.rows, 0, TOKENS);
  qkv_error error = {0};
  for (size_t i = 0; i < 64; i++) s.rows.k[70 * 2 * 64 + i] *= -1;
  assert_int_equal(append_range(&s.layer, &s.rows, 64, 128, &error), QKV_ALREADY_EXISTS);
  teardown_scene(&s);

  setup_scene(&s, test_model(2, 2, 64, 64, QKV_FP16), QKV_FRAME_PLAIN, 4, 0.001);
  play(&s, 0, 1);
  assert_true(all_tiers_are(&s, 32));
  assert_false(qkv_layer_page(&s.layer, 0)->lost);
  assert_int_equal(qkv_quality_read(s.layer.config.quality).missed, s.layer.page_count);
  check_error(&s);
  teardown_scene(&s);
}

// Bytes of the pages whose tiers were selected, of a layer whose first page has rows times `size` and keeps its
// tiers.
static uint64_t judged_bytes(uint64_t window, float size) {
  scene s;
  uint64_t bytes = 0;
  qkv_model model = test_model(2, 2, 64, 64, QKV_FP16);
  model.sliding_window = window;
  setup_scene(&s, model, QKV_FRAME_PLAIN, 6, 0.1);
  for (size_t i = 0; i < (size_t)QKV_PAGE_TOKENS * 2 * 64; i++) s.rows.k[i] *= size;
  must_append(&s.layer, &s.rows, 0, TOKENS - 2 * QKV_PAGE_TOKENS);
  const size_t before = s.layer.page_count;
  assert_true(before > 2);
  ask_all(&s, TOKENS - 2 * QKV_PAGE_TOKENS, 1);
  must_append(&s.layer, &s.rows, TOKENS - 2 * QKV_PAGE_TOKENS, TOKENS);
  assert_int_equal(qkv_quality_read(s.layer.config.quality).pages, s.layer.page_count - before);
  for (size_t i = before; i < s.layer.page_count; i++) bytes += qkv_layer_page(&s.layer, i)->bytes;
  teardown_scene(&s);
  return bytes;
}

// Rows that no query sees any more take no share of the attention that selects tiers.
static void what_the_window_has_passed_does_not_count(void **state) {
  (void)state;
  assert_int_equal(judged_bytes(96, 1), judged_bytes(96, 8));
  assert_true(judged_bytes(0, 1) > judged_bytes(0, 8));  // without a window they do
}

static void pages_before_any_query_are_left_alone(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(2, 2, 64, 64, QKV_FP16), QKV_FRAME_PLAIN, 4, 1);
  must_append(&s.layer, &s.rows, 0, TOKENS - 64);
  assert_true(all_tiers_are(&s, 32));
  const qkv_quality_stats stats = qkv_quality_read(s.layer.config.quality);
  assert_true(stats.pages == 0 && qkv_quality_error(&stats) == 0);
  // One token's queries are those of one half only.
  float *queries = random_floats(5, 4 * 64);
  ask(&s, TOKENS, queries);
  must_append(&s.layer, &s.rows, TOKENS - 64, TOKENS - 1);
  assert_int_equal(qkv_quality_read(s.layer.config.quality).pages, 0);
  ask(&s, TOKENS, queries);
  must_append(&s.layer, &s.rows, TOKENS - 1, TOKENS);
  assert_int_equal(qkv_quality_read(s.layer.config.quality).pages, 1);
  assert_int_equal(qkv_page_entry_of(qkv_layer_page(&s.layer, s.layer.page_count - 1)->page, 1)->tier_v[3], 8);
  free(queries);
  teardown_scene(&s);
}

// Queries of a batch are taken from its end, at most a page's tokens of it, for both halves.
static void batches_show_their_last_queries(void **state) {
  (void)state;
  scene a, b;
  const size_t queries = 200, row = 4 * 64;
  float *q = random_floats(9, queries * row);
  setup_scene(&a, test_model(2, 2, 64, 64, QKV_FP16), QKV_FRAME_PLAIN, 4, 0.2);
  setup_scene(&b, test_model(2, 2, 64, 64, QKV_FP16), QKV_FRAME_PLAIN, 4, 0.2);
  test_tensor tensor;
  make_tensor(&tensor, QKV_FP32, q, (int64_t)queries, 4, 64);
  qkv_attend request = {.layer = &a.layer,
                        .position = 10,
                        .q = tensor.tensor,
                        .out = calloc(queries * row, sizeof(float)),
                        .lse = calloc(queries * 4, sizeof(float))};
  must_append(&a.layer, &a.rows, 0, 32);
  must_append(&b.layer, &b.rows, 0, 32);
  qkv_attend_run(NULL, &request, 1);
  for (size_t i = TAKEN; i-- > 0;) ask(&b, 10 + queries - 1 - i * 8, q + (queries - 1 - i * 8) * row);
  must_append(&a.layer, &a.rows, 32, TOKENS);
  must_append(&b.layer, &b.rows, 32, TOKENS);
  assert_same_state(&a.layer, &b.layer);
  assert_true(qkv_quality_read(a.layer.config.quality).squares == qkv_quality_read(b.layer.config.quality).squares);
  free(request.out);
  free(request.lse);
  free_tensor(&tensor);
  free(q);
  teardown_scene(&a);
  teardown_scene(&b);
}

static void limits_are_named(void **state) {
  (void)state;
  const double wrong[] = {-0.1, 1.5, INFINITY, NAN};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    qkv_error error = {0};
    assert_int_equal(qkv_quality_check(wrong[i], &error), QKV_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "max_attention_error is "));
    assert_non_null(strstr(error.text, ", allowed are 0 to 1"));
  }
  assert_int_equal(qkv_quality_check(0, NULL), QKV_OK);
  assert_int_equal(qkv_quality_check(1, NULL), QKV_OK);
}

// ---- Sessions ----

static qkv_status open_session(qkv_arena *arena, const qkv_model *model, double error_max, qkv_session **session,
                               qkv_error *error) {
  const qkv_session_config config = {.name = "a",
                                     .tenant = "default",
                                     .purpose = QKV_PURPOSE_ATTEND,
                                     .policy = test_policy(4, 4, 64),
                                     .max_attention_error = error_max};
  return qkv_session_create(&config, model, arena, session, error);
}

static void queries_are_counted_as_memory(void **state) {
  (void)state;
  const qkv_model model = test_model(2, 2, 64, 64, QKV_FP16);
  qkv_session *session;
  qkv_error error = {0};
  qkv_arena *arena = qkv_arena_create("memory-budget", (uint64_t)1 << 20);
  assert_int_equal(open_session(arena, &model, 0, &session, NULL), QKV_OK);
  use_session(session);
  const uint64_t plain = qkv_arena_read(arena).bytes_used;
  qkv_session_unref(&session);
  assert_int_equal(open_session(arena, &model, 0.1, &session, NULL), QKV_OK);
  use_session(session);
  const uint64_t all = qkv_arena_read(arena).bytes_used;
  assert_int_equal(all, plain + model.layers * qkv_arena_cost(qkv_quality_bytes(&model)));
  assert_true(qkv_quality_bytes(&model) >= (size_t)TAKEN * 4 * 64 * sizeof(float));
  qkv_session_unref(&session);
  assert_int_equal(qkv_arena_read(arena).bytes_used, 0);
  qkv_arena_destroy(&arena);

  arena = qkv_arena_create("memory-budget", all - 1);
  const qkv_layer *layer;
  assert_int_equal(open_session(arena, &model, 0.1, &session, &error), QKV_OK);
  assert_int_equal(qkv_session_read(session, 0, &layer, &error), QKV_RESOURCE_EXHAUSTED);
  qkv_session_unref(&session);
  assert_int_equal(qkv_arena_read(arena).bytes_reserved, 0);
  qkv_arena_destroy(&arena);
}

enum { JOB_LAYERS = 2, JOB_TOKENS = 64 * 20 };

typedef struct crowd {
  qkv_model model;
  sequence rows;
  qkv_session *session;
  _Atomic bool done;
} crowd;

static void *append_on(void *context) {
  crowd *c = context;
  for (uint64_t position = 0; position < JOB_TOKENS; position += 20) {
    for (uint32_t layer = 0; layer < JOB_LAYERS; layer++) {
      row_pair pair;
      uint64_t appended, length;
      make_pair(&pair, &c->rows, position, position + 20, c->model.dtype);
      assert_int_equal(qkv_session_append(c->session, layer, position, &pair.k.tensor, &pair.v.tensor, false,
                                          &appended, &length, NULL),
                       QKV_OK);
      free_pair(&pair);
    }
  }
  atomic_store(&c->done, true);
  return NULL;
}

static void *attend_on(void *context) {
  crowd *c = context;
  float out[4 * 32], lse[4];
  for (uint64_t n = 0; !atomic_load(&c->done); n++) {
    const qkv_layer *layer;
    float *q = random_floats(n, (size_t)4 * 32);
    test_tensor tensor;
    qkv_session_info info;
    make_tensor(&tensor, QKV_FP32, q, 1, 4, 32);
    assert_int_equal(qkv_session_read(c->session, (uint32_t)(n % JOB_LAYERS), &layer, NULL), QKV_OK);
    const qkv_attend request = {
        .layer = layer, .position = layer->length, .q = tensor.tensor, .out = out, .lse = lse};
    qkv_attend_run(NULL, &request, 1);
    qkv_session_read_done(c->session, (uint32_t)(n % JOB_LAYERS));
    qkv_session_read_info(c->session, &info, NULL);
    assert_true(info.usage.quality.missed <= info.usage.quality.pages);
    free_tensor(&tensor);
    free(q);
  }
  return NULL;
}

static void attends_and_appends_run_together(void **state) {
  (void)state;
  crowd c = {.model = test_model(2, 2, 32, 32, QKV_FP16)};
  qkv_arena *arena = qkv_arena_create("memory-budget", (uint64_t)1 << 26);
  const uint64_t before = qkv_quality_totals().pages;
  pthread_t threads[4];
  c.rows = make_sequence(&c.model, JOB_TOKENS, 3);
  atomic_init(&c.done, false);
  assert_int_equal(open_session(arena, &c.model, 0.5, &c.session, NULL), QKV_OK);
  for (size_t i = 0; i < 4; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, i == 0 ? append_on : attend_on, &c), 0);
  for (size_t i = 0; i < 4; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  qkv_session_info info;
  qkv_session_read_info(c.session, &info, NULL);
  assert_int_equal(qkv_quality_totals().pages - before, info.usage.quality.pages);
  qkv_session_unref(&c.session);
  assert_int_equal(qkv_arena_read(arena).bytes_used, 0);
  qkv_arena_destroy(&arena);
  free_sequence(&c.rows);
}

// ---- Cost ----

static double now_us(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static double page_us(double error_max) {
  scene s;
  setup_scene(&s, roped(test_model(8, 4, 128, 128, QKV_FP16)), QKV_FRAME_ATTEND, 4, error_max);
  must_append(&s.layer, &s.rows, 0, 32);
  ask_all(&s, TOKENS, 1);
  must_append(&s.layer, &s.rows, 32, WINDOW);
  const double begin = now_us();
  must_append(&s.layer, &s.rows, WINDOW, TOKENS);
  const double us = (now_us() - begin) / (double)s.layer.page_count;
  teardown_scene(&s);
  return us;
}

static void cost_is_printed(void **state) {
  (void)state;
  const double plain = page_us(0), judged = page_us(0.1);
  printf(
      "a page of 8 heads, 128 + 128, 4 query heads each: appended and sealed in %.0f us, with a contract %.0f us\n",
      plain, judged);
  assert_true(plain > 0 && judged > 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_error_is_that_of_float64),
      cmocka_unit_test(the_contract_decides_the_tiers),
      cmocka_unit_test(much_is_allowed_or_nothing),
      cmocka_unit_test(what_the_window_has_passed_does_not_count),
      cmocka_unit_test(pages_before_any_query_are_left_alone),
      cmocka_unit_test(batches_show_their_last_queries),
      cmocka_unit_test(limits_are_named),
      cmocka_unit_test(queries_are_counted_as_memory),
      cmocka_unit_test(attends_and_appends_run_together),
      cmocka_unit_test(cost_is_printed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
