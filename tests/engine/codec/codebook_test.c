#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <float.h>
#include <stdio.h>

#include "engine/codec/codebook.h"
#include "engine/codec/codebook_table.h"
#include "naive.h"

// Lloyd-Max quantizers of N(0, 1), depths 1 to 8, and how much worse a nested one may be.
static const double optimal[] = {0, 0.36338, 0.11748, 0.03454, 0.00950, 0.002499, 0.00064, 0.000163, 0.0000412};
static const double allowed[] = {0, 1.01, 1.01, 1.01, 1.01, 1.05, 1.15, 1.06, 1.07};

static double density(double x) {
  return exp(-x * x / 2) / sqrt(2 * 3.14159265358979323846);
}

// Moments 0, 1 and 2 of N(0, 1) over a cell, by Simpson's rule.
static void moments(double from, double to, double out[3]) {
  enum { STEPS = 2000 };
  const double h = (to - from) / STEPS;
  memset(out, 0, 3 * sizeof *out);
  for (int i = 0; i <= STEPS; i++) {
    const double x = from + h * i;
    const double w = (i == 0 || i == STEPS ? 1 : i % 2 == 1 ? 4 : 2) * h / 3 * density(x);
    out[0] += w;
    out[1] += w * x;
    out[2] += w * x * x;
  }
}

// Lowest x of a full-depth code.
static double lower_end(unsigned code) {
  if (code == 0) return -12;
  if (code == 128) return 0;
  return code > 128 ? boundaries[code - 129] : -boundaries[127 - code];
}

static double upper_end(unsigned code) {
  return code == 255 ? 12 : lower_end(code + 1);
}

static void nested_quantizers_are_near_optimal(void **state) {
  (void)state;
  double fine[256][3];
  for (unsigned code = 0; code < 256; code++) moments(lower_end(code), upper_end(code), fine[code]);
  printf("depth  Lloyd-Max   nested      loss    step\n");
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    double error = 0;
    for (unsigned code = 0; code < 1u << depth; code++) {
      double m[3] = {0};
      for (unsigned i = 0; i < 256u >> depth; i++) {
        for (int k = 0; k < 3; k++) m[k] += fine[(code << (8 - depth)) + i][k];
      }
      const double value = qkv_codebook_value(depth, code);
      error += m[2] - 2 * value * m[1] + value * value * m[0];
      const double tolerance = depth <= 6 ? qkv_codebook_step(depth) / 2 + 1e-3 : 2e-4;
      assert_true(fabs(value - m[1] / m[0]) <= tolerance);
    }
    printf("%u      %.8f  %.8f  %+.2f %%  %.9g\n", depth, optimal[depth], error, (error / optimal[depth] - 1) * 100,
           (double)qkv_codebook_step(depth));
    assert_true(error <= allowed[depth] * optimal[depth]);
    assert_true(error >= 0.999 * optimal[depth]);
  }
}

static void values_are_small_integers_times_a_step(void **state) {
  (void)state;
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    for (unsigned code = 0; code < 1u << depth; code++) {
      const int16_t integer = qkv_codebook_integer(depth, code);
      assert_true(depth > 6 || abs(integer) <= 127);
      assert_true(depth < 4 || depth > 6 || qkv_codebook_step(depth) == qkv_codebook_step(4));
      assert_true(qkv_codebook_value(depth, code) == (float)integer * qkv_codebook_step(depth));
      assert_int_equal(integer, -qkv_codebook_integer(depth, (1u << depth) - 1 - code));
      if (code > 0) assert_true(integer > qkv_codebook_integer(depth, code - 1));
    }
  }
}

// Every cell of a depth is two of the next depth, with its centroid between theirs.
static void depths_are_nested(void **state) {
  (void)state;
  for (unsigned depth = 1; depth < QKV_DEPTH_MAX; depth++) {
    for (unsigned code = 0; code < 1u << depth; code++) {
      const float value = qkv_codebook_value(depth, code);
      assert_true(qkv_codebook_value(depth + 1, 2 * code) < value);
      assert_true(value < qkv_codebook_value(depth + 1, 2 * code + 1));
    }
  }
}

static unsigned scan(float x) {
  unsigned code = x >= 0 ? 128 : 0;
  for (int i = 0; i < QKVI_BOUNDARIES; i++) code += x >= 0 ? boundaries[i] <= x : -boundaries[i] <= x;
  return code;
}

static void lookup_is_the_linear_scan(void **state) {
  (void)state;
  naive_random random = {7};
  for (int i = 0; i < 200000; i++) {
    const float x = (float)(naive_gaussian(&random) * (i % 2 ? 1 : 3));
    assert_int_equal(qkv_codebook_code(x), scan(x));
  }
  for (int cell = 0; cell < QKVI_CELLS + 2; cell++) {
    const float edge = (float)cell / QKVI_CELLS_PER_UNIT;
    const float near[] = {nextafterf(edge, -1), edge, nextafterf(edge, 99)};
    for (int i = 0; i < 3; i++) {
      assert_int_equal(qkv_codebook_code(near[i]), scan(near[i]));
      assert_int_equal(qkv_codebook_code(-near[i]), scan(-near[i]));
    }
  }
  static const float odd[] = {0.0f, -0.0f, FLT_TRUE_MIN, -FLT_TRUE_MIN, FLT_MIN, -FLT_MIN,
                              4,    5,     1e9f,         FLT_MAX,       -FLT_MAX};
  for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) assert_int_equal(qkv_codebook_code(odd[i]), scan(odd[i]));
}

static void boundaries_belong_to_the_upper_cell(void **state) {
  (void)state;
  assert_int_equal(qkv_codebook_code(0.0f), 128);
  assert_int_equal(qkv_codebook_code(-0.0f), 128);
  assert_int_equal(qkv_codebook_code(-FLT_TRUE_MIN), 127);
  assert_int_equal(qkv_codebook_code(FLT_MAX), 255);
  assert_int_equal(qkv_codebook_code(-FLT_MAX), 0);
  for (unsigned i = 0; i < QKVI_BOUNDARIES; i++) {
    const float b = boundaries[i];
    if (i > 0) assert_true(b > boundaries[i - 1]);
    assert_int_equal(qkv_codebook_code(b), 129 + i);
    assert_int_equal(qkv_codebook_code(nextafterf(b, 0)), 128 + i);
    assert_int_equal(qkv_codebook_code(-b), 127 - i);
    assert_int_equal(qkv_codebook_code(nextafterf(-b, -99)), 126 - i);
  }
}

static void codes_are_antisymmetric(void **state) {
  (void)state;
  naive_random random = {8};
  for (int i = 0; i < 100000; i++) {
    const float x = (float)naive_gaussian(&random);
    bool on_boundary = x == 0;
    for (int j = 0; j < QKVI_BOUNDARIES; j++) on_boundary = on_boundary || fabsf(x) == boundaries[j];
    if (!on_boundary) assert_int_equal(qkv_codebook_code(-x), 255 - qkv_codebook_code(x));
  }
}

static void a_cell_has_at_most_two_boundaries(void **state) {
  (void)state;
  assert_int_equal(cell_start[0], 0);
  assert_int_equal(cell_start[QKVI_CELLS - 1], QKVI_BOUNDARIES);
  for (int cell = 1; cell < QKVI_CELLS; cell++) assert_in_range(cell_start[cell] - cell_start[cell - 1], 0, 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(nested_quantizers_are_near_optimal),
      cmocka_unit_test(values_are_small_integers_times_a_step),
      cmocka_unit_test(depths_are_nested),
      cmocka_unit_test(lookup_is_the_linear_scan),
      cmocka_unit_test(boundaries_belong_to_the_upper_cell),
      cmocka_unit_test(codes_are_antisymmetric),
      cmocka_unit_test(a_cell_has_at_most_two_boundaries),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
