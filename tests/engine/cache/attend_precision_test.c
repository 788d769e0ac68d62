// Attention in integers compared with attention in floats.
#include "engine/kernel/kernel.h"
#include "tests/engine/cache/attend_scene.h"

// The worst relative difference of a row's output from that in FP32, and of its LSE.
typedef struct difference {
  double out, lse;
} difference;

static difference compare(scene *s, qkv_precision precision) {
  const size_t rows = (size_t)s->queries * s->model.q_heads, dim = s->model.value_dim;
  float *out = malloc(rows * dim * sizeof *out), *lse = malloc(rows * sizeof *lse);
  assert_true(out != NULL && lse != NULL);
  s->request.options.precision = QKV_PRECISION_FP32;
  run(NULL, &s->request);
  memcpy(out, s->request.out, rows * dim * sizeof *out);
  memcpy(lse, s->request.lse, rows * sizeof *lse);
  s->request.options.precision = precision;
  run(NULL, &s->request);
  difference worst = {0};
  for (size_t row = 0; row < rows; row++) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < dim; i++) {
      error += square((double)s->request.out[row * dim + i] - (double)out[row * dim + i]);
      norm += square((double)out[row * dim + i]);
    }
    if (lse[row] == -INFINITY) {
      assert_true(s->request.lse[row] == -INFINITY && error == 0);
      continue;
    }
    worst.out = fmax(worst.out, sqrt(error / norm));
    worst.lse = fmax(worst.lse, fabs((double)s->request.lse[row] - (double)lse[row]));
  }
  free(out);
  free(lse);
  return worst;
}

static void test_integers_are_close(void **state) {
  (void)state;
  static const qkv_attend_options options[] = {
      {.scale = 0},     {.begin = 65, .end = 700}, {.sliding_window = 300}, {.causal_offset = -500},
      {.soft_cap = 10}, {.not_causal = true}};
  static const uint32_t dims[][2] = {{64, 64}, {80, 96}, {128, 128}, {192, 128}};
  static const double bits[] = {1, 2, 2.5, 3, 4, 8};
  difference worst[QKV_PRECISION_INT8 + 1] = {{0}};
  for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
    for (size_t b = 0; b < sizeof bits / sizeof *bits; b++) {
      scene s;
      qkv_model model = test_model(2, 4, dims[d][0], dims[d][1], QKV_FP32);
      setup_scene(&s, &model, test_policy(bits[b], bits[b], 20), 1000);
      for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        set_queries(&s, i % 2 == 0 ? 1 : 9, 4, 40 + i);
        for (qkv_precision precision = QKV_PRECISION_INT16; precision <= QKV_PRECISION_INT8; precision++) {
          s.request.options = options[i];
          const difference seen = compare(&s, precision);
          worst[precision].out = fmax(worst[precision].out, seen.out);
          worst[precision].lse = fmax(worst[precision].lse, seen.lse);
        }
      }
      teardown_scene(&s);
    }
  }
  print_message("worst difference of out and LSE: INT16 %.2g %.2g, INT8 %.2g %.2g\n", worst[2].out, worst[2].lse,
                worst[3].out, worst[3].lse);
  assert_true(worst[QKV_PRECISION_INT16].out <= 0.05 && worst[QKV_PRECISION_INT16].lse <= 0.01);
  assert_true(worst[QKV_PRECISION_INT8].out <= 0.1 && worst[QKV_PRECISION_INT8].lse <= 0.01);
}

// The same bits from every kernel variant, on any number of threads.
static void test_integers_are_the_same_everywhere(void **state) {
  (void)state;
  scene s;
  qkv_model model = test_model(2, 4, 128, 64, QKV_FP16);
  setup_scene(&s, &model, test_policy(3, 4, 20), 5000);
  set_queries(&s, 2, 4, 50);
  s.request.options.precision = QKV_PRECISION_INT8;
  const size_t count = 2 * (size_t)s.model.q_heads * s.model.value_dim;
  float *first = malloc(count * sizeof *first);
  assert_non_null(first);
  qkv_pool *pool;
  assert_int_equal(qkv_pool_create(3, 16, &pool, NULL), QKV_OK);
  for (size_t row = 0; qkv_kernels_at(row) != NULL; row++) {
    qkv_kernels_setup(qkv_kernels_at(row)->needs);
    run(row % 2 == 0 ? NULL : pool, &s.request);
    if (row == 0) memcpy(first, s.request.out, count * sizeof *first);
    assert_memory_equal(first, s.request.out, count * sizeof *first);
  }
  qkv_kernels_setup(UINT32_MAX);
  run(pool, &s.request);
  assert_memory_equal(first, s.request.out, count * sizeof *first);
  qkv_pool_destroy(&pool);
  free(first);
  teardown_scene(&s);
}

static void test_precision_has_limits(void **state) {
  (void)state;
  scene s;
  qkv_model model = test_model(1, 1, 16, 16, QKV_FP32);
  qkv_error error = {0};
  setup_scene(&s, &model, test_policy(4, 4, 0), 10);
  s.request.options.precision = (qkv_precision)4;
  assert_int_equal(qkv_attend_check(&s.request, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "options.precision is 4, known are 0 to 3");
  teardown_scene(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_integers_are_close),
      cmocka_unit_test(test_integers_are_the_same_everywhere),
      cmocka_unit_test(test_precision_has_limits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
