#include "client/worker/exact.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LAYERS = 2, Q_HEADS = 6, KV_HEADS = 2, DIM = 16, POSITIONS = 150 };

static const qkvi_lm geometry = {.layers = LAYERS, .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .head_dim = DIM};

static float q[POSITIONS * Q_HEADS * DIM], k[POSITIONS * KV_HEADS * DIM], v[POSITIONS * KV_HEADS * DIM];

// Roughly normal, from a fixed seed.
static void fill(float *values, size_t count, uint32_t seed) {
  for (size_t i = 0; i < count; i++) {
    float sum = 0;
    for (int j = 0; j < 12; j++) {
      seed = seed * 1664525u + 1013904223u;
      sum += (float)(seed >> 8) / 16777216.0f;
    }
    values[i] = sum - 6;
  }
}

static int make_rows(void **state) {
  (void)state;
  fill(q, sizeof q / sizeof *q, 1);
  fill(k, sizeof k / sizeof *k, 2);
  fill(v, sizeof v / sizeof *v, 3);
  return 0;
}

// Attention of the query at `position` over [begin, position], in double.
static void reference(int64_t position, int64_t head, int64_t begin, double *out, double *lse) {
  int64_t kv_head = head / (Q_HEADS / KV_HEADS);
  const float *query = q + (position * Q_HEADS + head) * DIM;
  double scores[POSITIONS], sum = 0, max = -INFINITY;
  for (int64_t t = begin; t <= position; t++) {
    scores[t] = 0;
    for (int i = 0; i < DIM; i++) scores[t] += (double)query[i] * k[(t * KV_HEADS + kv_head) * DIM + i];
    scores[t] /= sqrt(DIM);
    max = fmax(max, scores[t]);
  }
  for (int i = 0; i < DIM; i++) out[i] = 0;
  for (int64_t t = begin; t <= position; t++) {
    double weight = exp(scores[t] - max);
    sum += weight;
    for (int i = 0; i < DIM; i++) out[i] += weight * v[(t * KV_HEADS + kv_head) * DIM + i];
  }
  for (int i = 0; i < DIM; i++) out[i] /= sum;
  *lse = max + log(sum);
}

static qkvi_kv_rows rows_at(int64_t layer, int64_t position, int64_t tokens) {
  return (qkvi_kv_rows){layer,
                        position,
                        tokens,
                        q + position * Q_HEADS * DIM,
                        k + position * KV_HEADS * DIM,
                        v + position * KV_HEADS * DIM};
}

static void compare(int64_t position, int64_t tokens, int64_t begin, const float *out, const float *lse) {
  for (int64_t i = 0; i < tokens; i++) {
    for (int64_t head = 0; head < Q_HEADS; head++) {
      double expected[DIM], expected_lse = 0;
      reference(position + i, head, begin, expected, &expected_lse);
      assert_true(fabs(lse[i * Q_HEADS + head] - expected_lse) < 1e-5);
      for (int j = 0; j < DIM; j++) {
        assert_true(fabs(out[(i * Q_HEADS + head) * DIM + j] - expected[j]) < 1e-5);
      }
    }
  }
}

static void test_attend_against_double(void **state) {
  (void)state;
  static float out[POSITIONS * Q_HEADS * DIM], lse[POSITIONS * Q_HEADS];
  qkvi_exact *exact = qkvi_exact_create(&geometry, POSITIONS);
  const qkvi_kv_rows all = rows_at(1, 0, POSITIONS);
  qkvi_exact_append(exact, &all);
  assert_memory_equal(qkvi_exact_k(exact, 1, 7), k + 7 * KV_HEADS * DIM, KV_HEADS * DIM * sizeof(float));
  assert_memory_equal(qkvi_exact_v(exact, 1, 7), v + 7 * KV_HEADS * DIM, KV_HEADS * DIM * sizeof(float));
  const struct {
    int64_t position, tokens, begin;
  } cases[] = {{0, POSITIONS, 0}, {0, 1, 0}, {100, 1, 0}, {100, 50, 100}, {70, 65, 13}, {149, 1, 149}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const qkvi_kv_rows rows = rows_at(1, cases[i].position, cases[i].tokens);
    qkvi_exact_attend(exact, &rows, cases[i].begin, out, lse);
    compare(cases[i].position, cases[i].tokens, cases[i].begin, out, lse);
  }
  qkvi_exact_destroy(&exact);
  assert_null(exact);
}

static void test_steps_equal_one_batch(void **state) {
  (void)state;
  static float out[POSITIONS * Q_HEADS * DIM], one[Q_HEADS * DIM];
  qkvi_exact *batch = qkvi_exact_create(&geometry, POSITIONS), *steps = qkvi_exact_create(&geometry, POSITIONS);
  const qkvi_kv_rows all = rows_at(0, 0, POSITIONS);
  assert_int_equal(qkvi_exact_kv(batch)->step(qkvi_exact_kv(batch), &all, out, NULL), QKV_OK);
  for (int64_t position = 0; position < POSITIONS; position++) {
    const qkvi_kv_rows row = rows_at(0, position, 1);
    assert_int_equal(qkvi_exact_kv(steps)->step(qkvi_exact_kv(steps), &row, one, NULL), QKV_OK);
    for (int i = 0; i < Q_HEADS * DIM; i++) assert_true(fabsf(one[i] - out[position * Q_HEADS * DIM + i]) < 1e-5f);
  }
  qkvi_exact_destroy(&batch);
  qkvi_exact_destroy(&steps);
}

static void test_merge_equals_joint_softmax(void **state) {
  (void)state;
  enum { POSITION = POSITIONS - 1 };
  qkvi_exact *exact = qkvi_exact_create(&geometry, POSITIONS);
  for (int64_t split = 1; split < POSITIONS; split += 37) {
    float out[Q_HEADS * DIM], lse[Q_HEADS], first_out[Q_HEADS * DIM], first_lse[Q_HEADS];
    const qkvi_kv_rows all = rows_at(0, 0, POSITIONS), last = rows_at(0, POSITION, 1);
    qkvi_exact_append(exact, &all);
    qkvi_exact_attend(exact, &last, split, out, lse);
    // The first part: the same query, as if it stood at split - 1.
    qkvi_kv_rows first = rows_at(0, split - 1, 1);
    first.q = last.q;
    qkvi_exact_attend(exact, &first, 0, first_out, first_lse);
    qkvi_merge(out, lse, first_out, first_lse, Q_HEADS, DIM);
    compare(POSITION, 1, 0, out, lse);
  }
  qkvi_exact_destroy(&exact);
}

static void test_merge_with_nothing(void **state) {
  (void)state;
  const float seen[] = {1, 2}, nothing[] = {0, 0};
  const float lse = 3.5f, none = -INFINITY;
  float out[2], out_lse = lse;
  memcpy(out, seen, sizeof out);
  qkvi_merge(out, &out_lse, nothing, &none, 1, 2);
  assert_memory_equal(out, seen, sizeof out);
  assert_true(out_lse == lse);
  memcpy(out, nothing, sizeof out);
  out_lse = none;
  qkvi_merge(out, &out_lse, nothing, &none, 1, 2);
  assert_memory_equal(out, nothing, sizeof out);
  assert_true(out_lse == none);
  qkvi_merge(out, &out_lse, seen, &lse, 1, 2);
  assert_memory_equal(out, seen, sizeof out);
  assert_true(out_lse == lse);
  // Far apart: no overflow, the greater one wins.
  const float high = 1e4f;
  qkvi_merge(out, &out_lse, nothing, &high, 1, 2);
  assert_true(out[0] == 0 && out[1] == 0 && out_lse == high);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_attend_against_double), cmocka_unit_test(test_steps_equal_one_batch),
      cmocka_unit_test(test_merge_equals_joint_softmax), cmocka_unit_test(test_merge_with_nothing)};
  return cmocka_run_group_tests(tests, make_rows, NULL);
}
