#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/moments.h"
#include "naive.h"

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 6, KEY_DIM = 24, VALUE_DIM = 16, TOKENS = 150 };

typedef struct rows {
  float k[TOKENS][KV_HEADS][KEY_DIM], v[TOKENS][KV_HEADS][VALUE_DIM], q[TOKENS][Q_HEADS][KEY_DIM];
} rows;

static const uint64_t FIRST = 1000;

static qkv_calibration_shape shape_of(bool rope) {
  qkv_calibration_shape shape = {
      .layers = LAYERS, .kv_heads = KV_HEADS, .q_heads = Q_HEADS, .key_dim = KEY_DIM, .value_dim = VALUE_DIM};
  if (rope) shape.rope = (qkv_rope){.theta = 10000, .width = 16, .interleaved = true};
  assert_int_equal(qkv_rope_resolve(&shape.rope, KEY_DIM, NULL), QKV_OK);
  return shape;
}

// Means far from 0, as keys have them.
static rows *random_rows(uint64_t seed) {
  naive_random random = {seed};
  rows *made = malloc(sizeof *made);
  assert_non_null(made);
  for (size_t t = 0; t < TOKENS; t++) {
    const double common = naive_gaussian(&random);
    for (size_t h = 0; h < KV_HEADS; h++) {
      for (size_t i = 0; i < KEY_DIM; i++)
        made->k[t][h][i] = (float)(50.0 * (double)i + common + naive_gaussian(&random));
      for (size_t i = 0; i < VALUE_DIM; i++) made->v[t][h][i] = (float)(naive_gaussian(&random) - common);
    }
    for (size_t h = 0; h < Q_HEADS; h++) {
      for (size_t i = 0; i < KEY_DIM; i++) made->q[t][h][i] = (float)((double)h + common * naive_gaussian(&random));
    }
  }
  return made;
}

static void add(qkv_moments *moments, uint32_t layer, const rows *from, size_t first, size_t tokens) {
  qkv_moments_add(moments, layer, FIRST + first, tokens, &from->k[first][0][0], &from->v[first][0][0], true);
  qkv_moments_add_queries(moments, layer, FIRST + first, tokens, &from->q[first][0][0], true);
}

// Of column-wise samples x[n], dim wide, `stride` floats apart; in two passes.
static void expect_moments(const qkv_moments *moments, uint32_t layer, uint32_t head, qkv_moments_kind kind,
                           const float *const *x, size_t n, size_t dim, double tolerance) {
  double *mean = calloc(dim, sizeof *mean), *second = calloc(dim * dim, sizeof *second);
  assert_non_null(mean);
  assert_non_null(second);
  assert_true(qkv_moments_read(moments, layer, head, kind, mean, second) == (double)n);
  double expected_mean[KEY_DIM] = {0};
  for (size_t t = 0; t < n; t++) {
    for (size_t i = 0; i < dim; i++) expected_mean[i] += (double)x[t][i] / (double)n;
  }
  for (size_t i = 0; i < dim; i++) assert_true(fabs(mean[i] - expected_mean[i]) < tolerance);
  // The second moment of queries is not centred.
  for (size_t i = 0; i < dim && kind == QKV_MOMENTS_Q; i++) expected_mean[i] = 0;
  for (size_t i = 0; i < dim; i++) {
    for (size_t j = 0; j < dim; j++) {
      double expected = 0;
      for (size_t t = 0; t < n; t++) {
        expected += ((double)x[t][i] - expected_mean[i]) * ((double)x[t][j] - expected_mean[j]) / (double)n;
      }
      assert_true(fabs(second[i * dim + j] - expected) < tolerance);
    }
  }
  free(mean);
  free(second);
}

static void expect_head(const qkv_moments *moments, uint32_t layer, uint32_t head, const rows *from, size_t tokens) {
  const float *x[TOKENS * Q_HEADS] = {0};
  for (size_t t = 0; t < tokens; t++) x[t] = from->k[t][head];
  expect_moments(moments, layer, head, QKV_MOMENTS_K, x, tokens, KEY_DIM, 1e-3);
  for (size_t t = 0; t < tokens; t++) x[t] = from->v[t][head];
  expect_moments(moments, layer, head, QKV_MOMENTS_V, x, tokens, VALUE_DIM, 1e-4);
  const size_t group = Q_HEADS / KV_HEADS;
  for (size_t t = 0; t < tokens; t++) {
    for (size_t g = 0; g < group; g++) x[t * group + g] = from->q[t][head * group + g];
  }
  expect_moments(moments, layer, head, QKV_MOMENTS_Q, x, tokens * group, KEY_DIM, 1e-3);
}

static void moments_are_those_of_the_rows(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(false);
  rows *from = random_rows(1);
  qkv_moments *moments = qkv_moments_create(&shape);
  assert_true(qkv_moments_tokens(moments) == 0);
  static const size_t steps[] = {1, 64, 3, 70, 12};
  size_t first = 0;
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; first += steps[i++]) add(moments, 1, from, first, steps[i]);
  assert_int_equal(first, TOKENS);
  for (uint32_t head = 0; head < KV_HEADS; head++) expect_head(moments, 1, head, from, TOKENS);
  double mean[KEY_DIM], second[KEY_DIM * KEY_DIM];
  assert_true(qkv_moments_read(moments, 0, 0, QKV_MOMENTS_K, mean, second) == 0);
  assert_true(mean[3] == 0 && second[3] == 0);
  assert_true(qkv_moments_tokens(moments) == TOKENS);  // layer 0 has none, and does not count
  add(moments, 0, from, 0, 7);
  assert_true(qkv_moments_tokens(moments) == 7);
  qkv_moments_destroy(&moments);
  assert_null(moments);
  free(from);
}

static void rows_after_rope_are_turned_back(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(true);
  rows *from = random_rows(2), *turned = malloc(sizeof *turned);
  assert_non_null(turned);
  *turned = *from;
  for (size_t t = 0; t < TOKENS; t++) {
    for (size_t h = 0; h < KV_HEADS; h++) qkv_rope_forward(&shape.rope, turned->k[t][h], FIRST + t);
    for (size_t h = 0; h < Q_HEADS; h++) qkv_rope_forward(&shape.rope, turned->q[t][h], FIRST + t);
  }
  qkv_moments *moments = qkv_moments_create(&shape);
  qkv_moments_add(moments, 0, FIRST, TOKENS, &turned->k[0][0][0], &turned->v[0][0][0], false);
  qkv_moments_add_queries(moments, 0, FIRST, TOKENS, &turned->q[0][0][0], false);
  const float *x[TOKENS];
  for (size_t t = 0; t < TOKENS; t++) x[t] = from->k[t][1];
  expect_moments(moments, 0, 1, QKV_MOMENTS_K, x, TOKENS, KEY_DIM, 5e-3);
  add(moments, 1, from, 0, TOKENS);
  expect_head(moments, 1, 0, from, TOKENS);
  qkv_moments_destroy(&moments);
  free(turned);
  free(from);
}

static void two_halves_are_the_whole(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(false);
  rows *from = random_rows(3);
  qkv_moments *one = qkv_moments_create(&shape), *other = qkv_moments_create(&shape);
  qkv_moments *empty = qkv_moments_create(&shape);
  add(one, 0, from, 0, 40);
  add(other, 0, from, 40, TOKENS - 40);
  add(other, 1, from, 0, TOKENS);
  qkv_moments_merge(one, other);
  qkv_moments_merge(one, empty);
  expect_head(one, 0, 1, from, TOKENS);
  expect_head(one, 1, 0, from, TOKENS);
  qkv_moments_destroy(&one);
  qkv_moments_destroy(&other);
  qkv_moments_destroy(&empty);
  free(from);
}

// Old rows that faded to nothing before new ones came, and to half.
static void old_rows_fade(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(false);
  rows *old = random_rows(14), *young = random_rows(5);
  qkv_moments *moments = qkv_moments_create(&shape);
  add(moments, 0, old, 0, TOKENS);
  double before[KEY_DIM], after[KEY_DIM], second[KEY_DIM * KEY_DIM];
  (void)qkv_moments_read(moments, 0, 0, QKV_MOMENTS_K, before, second);
  qkv_moments_fade(moments, 0.5);
  assert_true(qkv_moments_read(moments, 0, 0, QKV_MOMENTS_K, after, second) == TOKENS / 2.0);
  for (size_t i = 0; i < KEY_DIM; i++) assert_true(fabs(before[i] - after[i]) < 1e-9);
  qkv_moments_fade(moments, 0);
  add(moments, 0, young, 0, TOKENS);
  expect_head(moments, 0, 0, young, TOKENS);
  qkv_moments_destroy(&moments);
  free(old);
  free(young);
}

// Sequences begin at position 0; their first tokens, and rows that are far longer than others, have no part in
// moments, in one head's keys, in its values or in both. The rows that outliers replace are not counted.
static void outliers_are_left_out(void **state) {
  (void)state;
  enum { FIRST_TOKENS = 4 };
  const qkv_calibration_shape shape = shape_of(false);
  rows *from = random_rows(6);
  naive_random random = {7};
  const float *k[TOKENS], *v[TOKENS];
  size_t ks = 0, vs = 0;
  for (size_t t = 0; t < TOKENS; t++) {
    const unsigned what = t < FIRST_TOKENS ? 0 : naive_below(&random, 32);
    const float times = (float)pow(10, 1 + 2 * naive_uniform(&random));
    if ((what & 1) != 0 && what < 4) {
      for (size_t i = 0; i < KEY_DIM; i++) from->k[t][1][i] *= times;
    } else if (t >= FIRST_TOKENS) {
      k[ks++] = from->k[t][1];
    }
    if ((what & 2) != 0 && what < 4) {
      for (size_t i = 0; i < VALUE_DIM; i++) from->v[t][1][i] = times * 30;
    } else if (t >= FIRST_TOKENS) {
      v[vs++] = from->v[t][1];
    }
  }
  assert_in_range(ks, TOKENS * 7 / 8, TOKENS - FIRST_TOKENS - 4);
  assert_in_range(vs, TOKENS * 7 / 8, TOKENS - FIRST_TOKENS - 4);
  qkv_moments *moments = qkv_moments_create(&shape);
  qkv_moments_leave_out_before(moments, FIRST_TOKENS);
  // In parts: of the first tokens, of more, and of none.
  static const size_t steps[] = {2, 64, 84};
  size_t first = 0;
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; first += steps[i++]) {
    qkv_moments_add(moments, 0, first, steps[i], &from->k[first][0][0], &from->v[first][0][0], true);
  }
  assert_int_equal(first, TOKENS);
  expect_moments(moments, 0, 1, QKV_MOMENTS_K, k, ks, KEY_DIM, 1e-3);
  expect_moments(moments, 0, 1, QKV_MOMENTS_V, v, vs, VALUE_DIM, 1e-4);
  const float *others[TOKENS];
  for (size_t t = FIRST_TOKENS; t < TOKENS; t++) others[t - FIRST_TOKENS] = from->k[t][0];
  expect_moments(moments, 0, 0, QKV_MOMENTS_K, others, TOKENS - FIRST_TOKENS, KEY_DIM, 1e-3);
  assert_true(qkv_moments_tokens(moments) == TOKENS);
  qkv_moments_destroy(&moments);
  free(from);
}

// Long rows that are more than one in eight are what a model's rows are like.
static void what_many_rows_have_is_no_outlier(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(false);
  rows *from = random_rows(8);
  naive_random random = {9};
  const float *v[TOKENS];
  for (size_t t = 0; t < TOKENS; t++) {
    for (size_t i = 0; i < VALUE_DIM && t % 6 == 0; i++) from->v[t][0][i] = naive_below(&random, 2) == 0 ? 300 : -300;
    v[t] = from->v[t][0];
  }
  qkv_moments *moments = qkv_moments_create(&shape);
  add(moments, 0, from, 0, TOKENS);
  expect_moments(moments, 0, 0, QKV_MOMENTS_V, v, TOKENS, VALUE_DIM, 0.1);
  qkv_moments_destroy(&moments);
  free(from);
}

static void memory_is_as_told(void **state) {
  (void)state;
  const qkv_calibration_shape large = {.layers = 32, .kv_heads = 8, .q_heads = 32, .key_dim = 128, .value_dim = 128};
  const size_t square = 128 * 128 * 4;
  assert_in_range(qkv_moments_bytes(&large), 32 * 8 * 3 * square, 32 * 8 * 3 * square * 11 / 10);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(moments_are_those_of_the_rows),
      cmocka_unit_test(rows_after_rope_are_turned_back),
      cmocka_unit_test(two_halves_are_the_whole),
      cmocka_unit_test(old_rows_fade),
      cmocka_unit_test(outliers_are_left_out),
      cmocka_unit_test(what_many_rows_have_is_no_outlier),
      cmocka_unit_test(memory_is_as_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
