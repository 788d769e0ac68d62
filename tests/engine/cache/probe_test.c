// The error of attention, compared with the same computed plainly.
#include "engine/cache/probe.h"
#include "tests/engine/cache/fixture.h"

enum { TOKENS = 100, KEY = 16, VALUE = 24, STRIDE = 50, QUERIES = 3, GROUP = 2 };

static void attend_plainly(const float *k, const float *v, const float *q, double scale, double cap, double *out) {
  double weights[TOKENS], total = 0;
  for (size_t t = 0; t < TOKENS; t++) {
    double score = 0;
    for (size_t i = 0; i < KEY; i++) score += (double)q[i] * (double)k[t * KEY + i];
    score *= scale;
    total += weights[t] = exp(cap > 0 ? cap * tanh(score / cap) : score);
  }
  for (size_t i = 0; i < VALUE; i++) {
    out[i] = 0;
    for (size_t t = 0; t < TOKENS; t++) out[i] += weights[t] / total * (double)v[t * VALUE + i];
  }
}

typedef struct rows {
  float *wide;                               // [TOKENS][STRIDE]: key, value, something else
  float k[TOKENS * KEY], v[TOKENS * VALUE];  // the same, dense
  float other_k[TOKENS * KEY], other_v[TOKENS * VALUE];
} rows;

static void make_rows(rows *made, float noise) {
  uint64_t state = 3;
  made->wide = random_floats(1, (size_t)TOKENS * STRIDE);
  for (size_t t = 0; t < TOKENS; t++) {
    memcpy(made->k + t * KEY, made->wide + t * STRIDE, KEY * sizeof(float));
    memcpy(made->v + t * VALUE, made->wide + t * STRIDE + KEY, VALUE * sizeof(float));
  }
  for (size_t i = 0; i < (size_t)TOKENS * KEY; i++) made->other_k[i] = made->k[i] + noise * random_normal(&state);
  for (size_t i = 0; i < (size_t)TOKENS * VALUE; i++) made->other_v[i] = made->v[i] + noise * random_normal(&state);
}

static void test_errors_are_those_of_attention(void **state) {
  (void)state;
  rows made;
  float *queries = random_floats(2, (size_t)QUERIES * GROUP * KEY);
  const uint64_t stands[QUERIES] = {500, 501, 502};
  make_rows(&made, 0.2f);
  for (int capped = 0; capped < 2; capped++) {
    const double scale = 0.5, cap = capped != 0 ? 2 : 0;
    const qkv_probe_rows from = {TOKENS, KEY, VALUE, TOKENS, STRIDE, STRIDE, made.wide, made.wide + KEY};
    const qkv_probe_queries asked = {QUERIES, GROUP, queries, stands, 100, &(qkv_rope){0}, scale, cap};
    qkv_probe *probe = qkv_probe_create(&from, &asked);
    double squares = 0, missed[3] = {0};
    for (size_t i = 0; i < (size_t)QUERIES * GROUP; i++) {
      const float *q = queries + i * KEY;
      double exact[VALUE], out[3][VALUE];
      attend_plainly(made.k, made.v, q, scale, cap, exact);
      attend_plainly(made.other_k, made.v, q, scale, cap, out[0]);
      attend_plainly(made.k, made.other_v, q, scale, cap, out[1]);
      attend_plainly(made.other_k, made.other_v, q, scale, cap, out[2]);
      for (size_t j = 0; j < VALUE; j++) {
        squares += square(exact[j]);
        for (size_t way = 0; way < 3; way++) missed[way] += square(out[way][j] - exact[j]);
      }
    }
    assert_float_equal(qkv_probe_error(probe, made.other_k, NULL), missed[0] / squares, 1e-4);
    assert_float_equal(qkv_probe_error(probe, NULL, made.other_v), missed[1] / squares, 1e-4);
    assert_float_equal(qkv_probe_error(probe, made.other_k, made.other_v), missed[2] / squares, 1e-4);
    assert_true(qkv_probe_error(probe, NULL, NULL) < 1e-12);
    qkv_probe_destroy(&probe);
  }
  free(queries);
  free(made.wide);
}

// Queries that stand before the rows' end are turned to it.
static void test_queries_are_turned(void **state) {
  (void)state;
  rows made;
  qkv_rope rope = {.theta = 10000};
  assert_int_equal(qkv_rope_resolve(&rope, KEY, NULL), QKV_OK);
  float *early = random_floats(2, KEY), *late = malloc(KEY * sizeof *late);
  assert_non_null(late);
  memcpy(late, early, KEY * sizeof *late);
  qkv_rope_forward(&rope, early, 7);
  qkv_rope_forward(&rope, late, 100);
  make_rows(&made, 0.2f);
  const qkv_probe_rows from = {TOKENS, KEY, VALUE, TOKENS, STRIDE, STRIDE, made.wide, made.wide + KEY};
  const qkv_probe_queries asked[] = {{1, 1, early, (uint64_t[]){7}, 100, &rope, 1, 0},
                                     {1, 1, late, (uint64_t[]){100}, 100, &rope, 1, 0}};
  double errors[2];
  for (size_t i = 0; i < 2; i++) {
    qkv_probe *probe = qkv_probe_create(&from, &asked[i]);
    errors[i] = qkv_probe_error(probe, made.other_k, made.other_v);
    qkv_probe_destroy(&probe);
  }
  assert_float_equal(errors[0], errors[1], 1e-5);
  free(early);
  free(late);
  free(made.wide);
}

// Samples of a longer sequence, its first rows and every so many of the others, tell the error of all of it.
static void test_samples_stand_for_all(void **state) {
  (void)state;
  enum { ALL = 2048, WHOLE = 32, EVERY = 16, SAMPLE = WHOLE + (ALL - WHOLE) / EVERY, DIM = 16, ASKED = 32 };
  float *parts[4];  // k, v, and what takes their place
  float *queries = random_floats(12, (size_t)ASKED * DIM);
  uint64_t stands[ASKED];
  for (size_t i = 0; i < ASKED; i++) stands[i] = ALL;
  for (size_t part = 0; part < 4; part++) parts[part] = random_floats(20 + part, (size_t)ALL * DIM);
  for (size_t i = 0; i < (size_t)ASKED * DIM; i++) queries[i] += 1.5f * parts[0][i % DIM];
  // Half of the attention goes to the first row, which has less of a value and of an error.
  for (size_t i = 0; i < (size_t)ALL * DIM; i++) {
    const float size = i < DIM ? 0.2f : 1;
    parts[0][i] *= i < DIM ? 3 : 1;
    parts[1][i] *= size;
    parts[2][i] = parts[0][i] + 0.1f * parts[2][i];
    parts[3][i] = parts[1][i] + 0.1f * size * parts[3][i];
  }
  const qkv_probe_queries asked = {ASKED, 1, queries, stands, ALL, &(qkv_rope){0}, 0.1, 0};
  qkv_probe *of_all = qkv_probe_create(&(qkv_probe_rows){ALL, DIM, DIM, ALL, DIM, DIM, parts[0], parts[1]}, &asked);
  const double exact[] = {qkv_probe_error(of_all, parts[2], NULL), qkv_probe_error(of_all, NULL, parts[3]),
                          qkv_probe_error(of_all, parts[2], parts[3])};
  double sampled[3] = {0};  // squares of what is missed
  for (size_t first = 0; first < EVERY; first++) {
    float *some[4];
    for (size_t part = 0; part < 4; part++) {
      some[part] = malloc((size_t)SAMPLE * DIM * sizeof *some[part]);
      assert_non_null(some[part]);
      for (size_t t = 0; t < SAMPLE; t++) {
        const size_t from = t < WHOLE ? t : WHOLE + (t - WHOLE) * EVERY + first;
        memcpy(some[part] + t * DIM, parts[part] + from * DIM, DIM * sizeof *some[part]);
      }
    }
    qkv_probe *probe =
        qkv_probe_create(&(qkv_probe_rows){SAMPLE, DIM, DIM, WHOLE, DIM, DIM, some[0], some[1]}, &asked);
    sampled[0] += qkv_probe_error(probe, some[2], NULL) * qkv_probe_square(probe) / EVERY;
    sampled[1] += qkv_probe_error(probe, NULL, some[3]) * qkv_probe_square(probe) / EVERY;
    sampled[2] += qkv_probe_error(probe, some[2], some[3]) * qkv_probe_square(probe) / EVERY;
    assert_true(qkv_probe_error(probe, NULL, NULL) < 1e-12);
    qkv_probe_destroy(&probe);
    for (size_t part = 0; part < 4; part++) free(some[part]);
  }
  for (size_t way = 0; way < 3; way++) {
    assert_true(exact[way] > 1e-4);
    assert_float_equal(sampled[way] / (exact[way] * qkv_probe_square(of_all)), 1, 0.25);
  }
  qkv_probe_destroy(&of_all);
  for (size_t part = 0; part < 4; part++) free(parts[part]);
  free(queries);
}

// Without queries some are made up; rows of nothing have no error, unless something takes their place.
static void test_without_queries(void **state) {
  (void)state;
  rows made;
  make_rows(&made, 0.2f);
  const qkv_probe_queries none = {.rope = &(qkv_rope){0}, .scale = 1};
  qkv_probe *probe = qkv_probe_create(
      &(qkv_probe_rows){TOKENS, KEY, VALUE, TOKENS, STRIDE, STRIDE, made.wide, made.wide + KEY}, &none);
  assert_true(qkv_probe_error(probe, made.other_k, made.other_v) > 1e-3);
  qkv_probe_destroy(&probe);
  const float nothing[TOKENS * VALUE] = {0};
  probe = qkv_probe_create(&(qkv_probe_rows){TOKENS, KEY, VALUE, TOKENS, KEY, VALUE, nothing, nothing}, &none);
  assert_true(qkv_probe_error(probe, NULL, NULL) == 0);
  assert_true(qkv_probe_error(probe, made.other_k, NULL) == 0);
  assert_true(qkv_probe_error(probe, NULL, made.other_v) == 1);
  qkv_probe_destroy(&probe);
  free(made.wide);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_errors_are_those_of_attention),
      cmocka_unit_test(test_queries_are_turned),
      cmocka_unit_test(test_samples_stand_for_all),
      cmocka_unit_test(test_without_queries),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
