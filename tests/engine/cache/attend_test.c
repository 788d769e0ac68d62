#include "engine/cache/attend_internal.h"
#include "tests/engine/cache/attend_scene.h"

static void test_shapes(void **state) {
  (void)state;
  static const struct {
    uint32_t key_dim, value_dim, long_group;
  } shapes[] = {{64, 64, 8}, {80, 80, 7}, {96, 96, 4}, {128, 128, 1}, {192, 128, 1}, {256, 256, 1}};
  static const uint64_t lengths[] = {0, 1, 63, 64, 65, 1000};
  static const double bits[][2] = {{1, 1}, {2, 2.5}, {3, 3}, {4, 4}, {8, 8}, {4.375, 2}, {1.75, 4}, {8, 0.5}};
  static const int64_t windows[] = {0, 1, 64, 100};
  static const uint32_t groups[] = {1, 4, 7, 8};
  static const qkv_dtype dtypes[] = {QKV_FP16, QKV_BF16, QKV_FP32};
  size_t n = 0;
  for (size_t i = 0; i < 6; i++) {
    for (size_t j = 0; j < 6; j++, n++) {
      qkv_model model = test_model(j == 5 ? 1 : 2, 1, shapes[i].key_dim, shapes[i].value_dim, dtypes[n % 3]);
      scene s;
      setup_scene(&s, &model, test_policy(bits[n % 8][0], bits[n % 8][1], windows[(i + n) % 4]), lengths[j]);
      for (size_t g = 0; g < 4; g++) {
        set_queries(&s, 1, groups[g], n);
        check_scene(&s);
        if (j == 5 ? groups[g] != shapes[i].long_group : (g + n) % 2 != 0) continue;
        set_queries(&s, 33, groups[g], n + 100);
        check_scene(&s);
      }
      teardown_scene(&s);
    }
  }
  print_message("largest relative error %.3g, of lse %.3g\n", worst_error, worst_lse);
}

static void test_all_bits(void **state) {
  (void)state;
  qkv_model model = test_model(2, 2, 40, 24, QKV_FP16);
  for (size_t i = 0; i < 64; i++) {
    scene s;
    setup_scene(&s, &model, test_policy((double)(i + 1) / 8, (double)(i * 27 % 64 + 1) / 8, 3), 150);
    set_queries(&s, 2, 2, i);
    check_scene(&s);
    teardown_scene(&s);
  }
}

// A layer that was truncated into its pages and grown again: short pages.
static void cut_scene(scene *s) {
  static const uint64_t cuts[] = {150, 100, 97, 70, 33};
  free(s->k);
  free(s->v);
  for (size_t i = 0; i < 5; i++) {
    qkv_layer_truncate(&s->layer, cuts[i]);
    must_append(&s->layer, &s->rows, cuts[i], cuts[i] + 150);
  }
  qkv_layer_truncate(&s->layer, 170);
  must_append(&s->layer, &s->rows, 170, 300);
  assert_valid(&s->layer);
  s->k = decoded_rows(&s->layer, QKV_K);
  s->v = decoded_rows(&s->layer, QKV_V);
}

static void test_options(void **state) {
  (void)state;
  static const struct {
    uint64_t position;
    qkv_attend_options options;
  } cases[] = {
      {295, {.scale = 0}},
      {295, {.scale = 0.5}},
      {295, {.soft_cap = 0.7}},
      {295, {.soft_cap = 50, .scale = 3}},
      {295, {.sliding_window = 1}},
      {295, {.sliding_window = 40}},
      {295, {.sliding_window = 200}},
      {295, {.sliding_window = UINT64_MAX}},
      {295, {.begin = 100}},
      {295, {.begin = 10, .end = 20}},
      {295, {.begin = 64, .end = 128}},
      {295, {.begin = 299}},
      {295, {.begin = 300}},
      {295, {.begin = 1000}},
      {295, {.begin = 50, .end = 50}},
      {295, {.end = 1}},
      {295, {.end = UINT64_MAX}},
      {295, {.begin = 100, .end = 290, .sliding_window = 60}},
      {0, {.scale = 0}},
      {30, {.scale = 0}},
      {62, {.scale = 0}},
      {100, {.causal_offset = 100}},
      {100, {.causal_offset = -98}},
      {2, {.causal_offset = -4}},
      {2, {.causal_offset = -1000}},
      {310, {.scale = 0}},
      {310, {.sliding_window = 20}},
      {1000, {.sliding_window = 20}},
      {QKV_POSITION_MAX - 23, {.scale = 0}},
      {QKV_POSITION_MAX - 23, {.sliding_window = 10}},
      {0, {.causal_offset = (int64_t)QKV_POSITION_MAX - 23}},
      {QKV_POSITION_MAX, {.causal_offset = -100}},
      {0, {.causal_offset = -(int64_t)QKV_POSITION_MAX}},
      {0, {.not_causal = true}},
      {0, {.not_causal = true, .begin = 20, .end = 250}},
      {0, {.not_causal = true, .causal_offset = -50}},
  };
  qkv_model model = test_model(2, 3, 32, 16, QKV_FP16);
  for (int cut = 0; cut < 2; cut++) {
    scene s;
    setup_scene(&s, &model, test_policy(4, 3, 20), 300);
    if (cut) cut_scene(&s);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
      set_queries(&s, i % 3 == 0 ? 23 : 5, 3, i);
      s.request.position = cases[i].position;
      s.request.options = cases[i].options;
      check_scene(&s);
    }
    teardown_scene(&s);
  }
}

static void test_the_models_window_and_cap(void **state) {
  (void)state;
  qkv_model model = test_model(1, 4, 32, 32, QKV_FP16);
  model.sliding_window = 70;
  model.soft_cap = 2;
  scene s;
  setup_scene(&s, &model, test_policy(4, 4, 0), 200);
  set_queries(&s, 33, 4, 1);
  check_scene(&s);
  s.request.options = (qkv_attend_options){.sliding_window = 20, .soft_cap = 1};
  check_scene(&s);
  teardown_scene(&s);
}

// Scores of many thousands: the softmax is one-hot, and nothing overflows.
static void test_extreme_scores(void **state) {
  (void)state;
  qkv_model model = test_model(1, 2, 64, 64, QKV_FP32);
  scene s;
  setup_scene(&s, &model, test_policy(8, 8, 10), 150);
  set_queries(&s, 4, 2, 1);
  for (size_t i = 0; i < (size_t)8 * 64; i++) s.q[i] *= 8000;
  free_tensor(&s.q_tensor);
  make_tensor(&s.q_tensor, QKV_FP32, s.q, 4, 2, 64);
  s.request.q = s.q_tensor.tensor;
  check_scene(&s);
  s.request.options.scale = QKV_FACTOR_MAX;
  run(NULL, &s.request);
  for (size_t i = 0; i < (size_t)8 * 64; i++) assert_true(isfinite(s.request.out[i]));
  for (size_t i = 0; i < 8; i++) assert_true(isfinite(s.request.lse[i]));
  s.request.options = (qkv_attend_options){.scale = QKV_FACTOR_MIN, .soft_cap = QKV_FACTOR_MIN};
  check_scene(&s);
  teardown_scene(&s);
}

static void test_queries_before_rope(void **state) {
  (void)state;
  qkv_model model = test_model(2, 2, 32, 32, QKV_FP16);
  model.rope = (qkv_rope){.theta = 10000, .width = 32};
  scene s;
  setup_scene(&s, &model, test_policy(4, 4, 0), 100);
  set_queries(&s, 5, 2, 1);
  s.request.options.causal_offset = -2;
  s.request.q_before_rope = true;
  run(NULL, &s.request);
  float *out = malloc((size_t)20 * 32 * sizeof *out);
  memcpy(out, s.request.out, (size_t)20 * 32 * sizeof *out);

  for (size_t row = 0; row < 20; row++) {
    qkv_rope_forward(&model.rope, s.q + row * 32, s.request.position - 2 + row / 4);
  }
  free_tensor(&s.q_tensor);
  make_tensor(&s.q_tensor, QKV_FP32, s.q, 5, 4, 32);
  s.request.q = s.q_tensor.tensor;
  s.request.q_before_rope = false;
  check_scene(&s);
  assert_memory_equal(out, s.request.out, (size_t)20 * 32 * sizeof *out);
  free(out);
  teardown_scene(&s);
}

// ---- Parts, threads, chunks ----

static void test_ranges_merge_to_the_whole(void **state) {
  (void)state;
  qkv_model model = test_model(2, 2, 32, 16, QKV_FP16);
  scene s;
  setup_scene(&s, &model, test_policy(4, 4, 30), 250);
  set_queries(&s, 3, 2, 5);
  run(NULL, &s.request);
  float whole[12 * 16], whole_lse[12], first[12 * 16], first_lse[12];
  memcpy(whole, s.request.out, sizeof whole);
  memcpy(whole_lse, s.request.lse, sizeof whole_lse);
  for (uint64_t cut = 1; cut < 251; cut += 31) {
    s.request.options = (qkv_attend_options){.end = cut};
    run(NULL, &s.request);
    memcpy(first, s.request.out, sizeof first);
    memcpy(first_lse, s.request.lse, sizeof first_lse);
    s.request.options = (qkv_attend_options){.begin = cut};
    run(NULL, &s.request);
    for (size_t row = 0; row < 12; row++) {
      double a = exp((double)first_lse[row]), b = exp((double)s.request.lse[row]);
      assert_true(fabs(log(a + b) - (double)whole_lse[row]) < 1e-5);
      for (size_t i = row * 16; i < (row + 1) * 16; i++) {
        double merged = (a * (double)first[i] + b * (double)s.request.out[i]) / (a + b);
        assert_true(fabs(merged - (double)whole[i]) < 1e-5);
      }
    }
  }
  teardown_scene(&s);
}

static void test_threads_do_not_matter(void **state) {
  (void)state;
  enum { REQUESTS = 9, FLOATS = 7 * 12 * 16 };
  qkv_model wide = test_model(4, 3, 16, 16, QKV_FP16), narrow = test_model(1, 2, 24, 8, QKV_FP16);
  scene a, b;
  setup_scene(&a, &wide, test_policy(4, 4, 10), 300);
  setup_scene(&b, &narrow, test_policy(4, 4, 10), 200);
  set_queries(&a, 7, 3, 1);
  set_queries(&b, 3, 2, 2);
  float *out = calloc((size_t)REQUESTS * FLOATS * 2, sizeof *out),
        *lse = calloc((size_t)REQUESTS * 84 * 2, sizeof *lse);
  for (int threads = -1; threads <= 2; threads++) {
    qkv_pool *pool = NULL;
    if (threads >= 0) assert_int_equal(qkv_pool_create((size_t)threads, 4, &pool, NULL), QKV_OK);
    size_t set = threads < 0 ? 0 : 1;
    qkv_attend requests[REQUESTS];
    for (size_t i = 0; i < REQUESTS; i++) {
      requests[i] = i % 2 == 0 ? a.request : b.request;
      requests[i].position += i;
      requests[i].out = out + (set * REQUESTS + i) * FLOATS;
      requests[i].lse = lse + (set * REQUESTS + i) * 84;
    }
    qkv_attend_run(pool, requests, REQUESTS);
    if (set == 1) {
      assert_memory_equal(out, out + (size_t)REQUESTS * FLOATS, (size_t)REQUESTS * FLOATS * sizeof *out);
      assert_memory_equal(lse, lse + (size_t)REQUESTS * 84, (size_t)REQUESTS * 84 * sizeof *lse);
    }
    qkv_pool_destroy(&pool);
  }
  assert_true(lse[0] != 0);
  qkv_attend_run(NULL, NULL, 0);
  free(out);
  free(lse);
  teardown_scene(&a);
  teardown_scene(&b);
}

static void test_a_long_layer_is_split(void **state) {
  (void)state;
  static const qkv_attend_options options[] = {{.scale = 0},
                                               {.begin = 5000, .end = 12300},
                                               {.begin = 8192, .end = 16384},
                                               {.sliding_window = 9000},
                                               {.end = 4096},
                                               {.begin = 19990},
                                               {.causal_offset = -12000},
                                               {.scale = 5, .soft_cap = 30}};
  for (uint32_t heads = 1; heads <= 2; heads++) {
    qkv_model model = test_model(heads, 4, 16, 8, QKV_FP16);
    scene s;
    setup_scene(&s, &model, test_policy(4, 4, 100), 20000);
    for (size_t i = 0; i < (heads == 1 ? sizeof options / sizeof options[0] : 2); i++) {
      set_queries(&s, i == 1 ? 9 : 1, 4, i);  // 36 rows are two blocks, and not split
      s.request.options = options[i];
      check_ranges(&s);
    }
    teardown_scene(&s);
  }
}

// Beyond so many ranges they are taken in turn by all heads, with threads or without, and numbers are those of
// requests of many rows, which are not split.
static void test_a_far_layer_is_split(void **state) {
  (void)state;
  enum { ROWS = 40, HEADS = 2, DIM = 8 };
  const qkv_model model = test_model(HEADS, 1, DIM, DIM, QKV_FP16);
  scene s;
  setup_scene(&s, &model, test_policy(4, 4, 100), 64 * 64 * 33 + 300);
  assert_true(s.layer.range_count > 32);
  set_queries(&s, ROWS, 1, 1);
  run(NULL, &s.request);
  for (size_t threads = 0; threads < 3; threads++) {
    float alone[HEADS * DIM], alone_lse[HEADS];
    test_tensor q;
    qkv_pool *pool = NULL;
    make_tensor(&q, QKV_FP32, s.q + (size_t)(ROWS - 1) * HEADS * DIM, 1, HEADS, DIM);
    if (threads > 0) assert_int_equal(qkv_pool_create(threads, 4, &pool, NULL), QKV_OK);
    qkv_attend request = s.request;
    request.q = q.tensor;
    request.position += ROWS - 1;
    request.out = alone;
    request.lse = alone_lse;
    run(pool, &request);
    assert_memory_equal(alone, s.request.out + (size_t)(ROWS - 1) * HEADS * DIM, sizeof alone);
    assert_memory_equal(alone_lse, s.request.lse + (size_t)(ROWS - 1) * HEADS, sizeof alone_lse);
    qkv_pool_destroy(&pool);
    free_tensor(&q);
  }
  teardown_scene(&s);
}

// Ranges are of pages, however few tokens these hold.
static void test_short_pages_are_split(void **state) {
  (void)state;
  qkv_model model = test_model(1, 4, 16, 8, QKV_FP16);
  scene s;
  setup_scene(&s, &model, test_policy(3, 2, 0), 0);
  free(s.k);
  free(s.v);
  free_sequence(&s.rows);
  s.rows = make_sequence(&s.model, 2000, 23);
  for (uint64_t length = 0; length < 1500; length += 7) {
    must_append(&s.layer, &s.rows, length, length + QKV_PAGE_TOKENS);
    qkv_layer_truncate(&s.layer, length + 7);
  }
  assert_true(s.layer.page_count > 200);
  s.k = decoded_rows(&s.layer, QKV_K);
  s.v = decoded_rows(&s.layer, QKV_V);
  set_queries(&s, 3, 4, 1);
  check_ranges(&s);
  s.request.options = (qkv_attend_options){.begin = 445, .end = 900};
  check_ranges(&s);
  teardown_scene(&s);
}

// A row's result does not depend on the other queries of its request.
static void check_queries_are_independent(uint64_t sliding_window) {
  qkv_model model = test_model(2, 4, 32, 32, QKV_FP16);
  scene s;
  setup_scene(&s, &model, test_policy(4, 2, 10), 200);
  set_queries(&s, 20, 4, 3);
  s.request.options.sliding_window = sliding_window;
  run(NULL, &s.request);
  float alone[8 * 32], alone_lse[8];
  for (int64_t query = 0; query < 20; query++) {
    test_tensor q;
    make_tensor(&q, QKV_FP32, s.q + query * 8 * 32, 1, 8, 32);
    qkv_attend request = s.request;
    request.q = q.tensor;
    request.position += (uint64_t)query;
    request.out = alone;
    request.lse = alone_lse;
    run(NULL, &request);
    assert_memory_equal(alone, s.request.out + query * 8 * 32, sizeof alone);
    assert_memory_equal(alone_lse, s.request.lse + query * 8, sizeof alone_lse);
    free_tensor(&q);
  }
  teardown_scene(&s);
}

static void test_queries_are_independent(void **state) {
  (void)state;
  check_queries_are_independent(0);
  check_queries_are_independent(60);
  check_queries_are_independent(90);
}

// ---- Checks and cost ----

static void refused(const scene *s, const char *text) {
  qkv_error error = {0};
  assert_int_equal(qkv_attend_check(&s->request, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, text);
}

static void option_refused(scene *s, qkv_attend_options options, const char *text) {
  qkv_attend kept = s->request;
  s->request.options = options;
  refused(s, text);
  s->request = kept;
}

static void test_bad_options(void **state) {
  (void)state;
  qkv_model model = test_model(2, 4, 64, 32, QKV_FP16);
  model.rope = (qkv_rope){.theta = 10000, .width = 64};
  scene s;
  setup_scene(&s, &model, test_policy(4, 4, 0), 10);
  set_queries(&s, 4, 4, 1);
  option_refused(&s, (qkv_attend_options){.scale = NAN}, "options.scale is nan");
  option_refused(&s, (qkv_attend_options){.scale = -1}, "options.scale is -1, allowed are 0 and 1e-06 to 1e+06");
  option_refused(&s, (qkv_attend_options){.soft_cap = INFINITY},
                 "options.soft_cap is inf, allowed are 0 and 1e-06 to 1e+06");
  option_refused(&s, (qkv_attend_options){.begin = 4, .end = 3}, "options.range.begin is 4, at most range.end 3");
  option_refused(&s, (qkv_attend_options){.not_causal = true, .sliding_window = 3},
                 "options.not_causal excludes a sliding window");
  option_refused(&s, (qkv_attend_options){.causal_offset = INT64_MIN},
                 "options.causal_offset is -9223372036854775808, allowed are -9007199254740992 to 9007199254740992");
  s.request.q_before_rope = true;
  option_refused(&s, (qkv_attend_options){.causal_offset = -10},
                 "options.causal_offset is -10, which rotates query 0 to a position below 0");
  s.request.q_before_rope = false;
  s.model.sliding_window = 5;
  option_refused(&s, (qkv_attend_options){.not_causal = true}, "options.not_causal excludes a sliding window");
  s.request.position = UINT64_MAX;
  refused(&s, "position is 18446744073709551615, positions end at 9007199254740992");
  // The last query's stand counts too.
  s.request.position = QKV_POSITION_MAX - 4;
  assert_int_equal(qkv_attend_check(&s.request, NULL), QKV_OK);
  s.request.position = QKV_POSITION_MAX - 3;
  refused(&s, "position is 9007199254740989, with causal_offset 0 for 4 queries, positions end at 9007199254740992");
  s.request.position = 10;
  option_refused(&s, (qkv_attend_options){.causal_offset = (int64_t)QKV_POSITION_MAX - 13},
                 "position is 10, with causal_offset 9007199254740979 for 4 queries, positions end at "
                 "9007199254740992");
  teardown_scene(&s);
}

static void test_bad_queries(void **state) {
  (void)state;
  static const struct {
    float value;
    const char *text;
  } cases[] = {{NAN, "q[3, 5, 7] is nan"},
               {INFINITY, "q[3, 5, 7] is inf"},
               {40000, "q[3, 5, 7] is 40000, allowed are -32768 to 32768"}};
  qkv_model model = test_model(2, 4, 64, 32, QKV_FP16);
  scene s;
  setup_scene(&s, &model, test_policy(4, 4, 0), 10);
  set_queries(&s, 4, 4, 1);
  for (size_t i = 0; i < 3; i++) {
    s.q[(3 * 8 + 5) * 64 + 7] = cases[i].value;
    free_tensor(&s.q_tensor);
    make_tensor(&s.q_tensor, QKV_FP32, s.q, 4, 8, 64);
    s.request.q = s.q_tensor.tensor;
    refused(&s, cases[i].text);
  }
  free_tensor(&s.q_tensor);
  make_tensor(&s.q_tensor, QKV_FP32, s.q, 2, 3, 64);
  s.request.q = s.q_tensor.tensor;
  refused(&s, "q.dims[1] is 3, the model tiny has 8 q_heads");
  free_tensor(&s.q_tensor);
  make_tensor(&s.q_tensor, QKV_FP32, s.q, 2, 8, 32);
  s.request.q = s.q_tensor.tensor;
  refused(&s, "q.dims[2] is 32, the model tiny has key_dim 64");
  teardown_scene(&s);
}

static void test_cost(void **state) {
  (void)state;
  qkv_model model = test_model(2, 4, 64, 32, QKV_FP16);
  scene s;
  setup_scene(&s, &model, test_policy(4, 4, 0), 200);
  set_queries(&s, 1, 4, 1);
  uint64_t page = qkv_layer_page(&s.layer, 0)->bytes, exact = 2 * (64 + 32) * 2;
  assert_int_equal(qkv_attend_cost(&s.request), 3 * page + 8 * exact);
  s.request.options.begin = 64;
  assert_int_equal(qkv_attend_cost(&s.request), 2 * page + 8 * exact);
  s.request.options.sliding_window = 3;
  assert_int_equal(qkv_attend_cost(&s.request), 3 * exact);
  s.request.options = (qkv_attend_options){.end = 60};
  assert_int_equal(qkv_attend_cost(&s.request), page);
  s.request.options = (qkv_attend_options){.begin = 300};
  assert_int_equal(qkv_attend_cost(&s.request), 0);
  set_queries(&s, 9, 4, 1);  // 36 rows of a KV head: two blocks
  assert_int_equal(qkv_attend_cost(&s.request), 2 * (3 * page + 8 * exact));
  teardown_scene(&s);
}

// The partial result of pages [begin, end) of range 0 and KV head 0.
static void partial_of_pages(const scene *s, uint64_t begin, uint64_t end, float *sums, qkvi_partial *partial) {
  static _Alignas(64) qkvi_row_block block;
  qkv_attend request = s->request;
  request.options.begin = begin * QKV_PAGE_TOKENS;
  request.options.end = end * QKV_PAGE_TOKENS;
  const qkvi_head_task task = qkvi_attend_task(&request, 0);
  qkvi_attend_load(&task, &block, 0, qkvi_attend_rows(&request));
  s->layer.coder->codec->query(s->layer.coder, 0, &block.queries);
  qkvi_attend_range(&task, &block, 0, sums, partial);
}

// A range's partial result is that of its runs of 8 pages, merged in order: bit for bit, wherever it begins and ends.
static void test_runs(void **unused) {
  (void)unused;
  enum { PAGES = 21, GROUP = 4, DIM = 64 };
  static const uint64_t ends[][2] = {{0, PAGES}, {3, 20}, {8, 16}, {0, 17}};
  const qkv_model model = test_model(1, 1, DIM, DIM, QKV_FP32);
  scene s;
  setup_scene(&s, &model, test_policy(2, 2, 0), (uint64_t)PAGES * QKV_PAGE_TOKENS);
  set_queries(&s, 1, GROUP, 23);
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    float whole_sums[GROUP * DIM], sums[GROUP * DIM], run_sums[GROUP * DIM];
    qkvi_partial whole, merged, run;
    partial_of_pages(&s, ends[i][0], ends[i][1], whole_sums, &whole);
    qkvi_attend_start(&merged, GROUP, sums, DIM);
    for (uint64_t page = ends[i][0], next; page < ends[i][1]; page = next) {
      next = page / 8 * 8 + 8 < ends[i][1] ? page / 8 * 8 + 8 : ends[i][1];
      partial_of_pages(&s, page, next, run_sums, &run);
      qkvi_attend_merge(&merged, &run, DIM);
    }
    assert_memory_equal(whole_sums, sums, sizeof sums);
    assert_memory_equal(whole.peak, merged.peak, GROUP * sizeof *merged.peak);
    assert_memory_equal(whole.total, merged.total, GROUP * sizeof *merged.total);
  }
  teardown_scene(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_shapes),
      cmocka_unit_test(test_all_bits),
      cmocka_unit_test(test_options),
      cmocka_unit_test(test_the_models_window_and_cap),
      cmocka_unit_test(test_extreme_scores),
      cmocka_unit_test(test_queries_before_rope),
      cmocka_unit_test(test_ranges_merge_to_the_whole),
      cmocka_unit_test(test_threads_do_not_matter),
      cmocka_unit_test(test_a_long_layer_is_split),
      cmocka_unit_test(test_a_far_layer_is_split),
      cmocka_unit_test(test_short_pages_are_split),
      cmocka_unit_test(test_queries_are_independent),
      cmocka_unit_test(test_bad_options),
      cmocka_unit_test(test_bad_queries),
      cmocka_unit_test(test_cost),
      cmocka_unit_test(test_runs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
