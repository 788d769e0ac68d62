// Transforms against float64: there and back, queries and weighted sums in code space.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/hadamard.h"
#include "engine/codec/transform.h"
#include "tests/engine/codec/coder.h"

enum { ROWS = 5 };

static const uint16_t dims[] = {8, 16, 24, 64, 80, 128, 200};
enum { DIMS = sizeof dims / sizeof *dims };

typedef struct transform_case {
  size_t dim, coordinates;
  owned_transform owned;
  float *rows, *turned;  // [ROWS][dim]
} transform_case;

static float *random_rows(naive_random *random, size_t dim) {
  float *rows = coder_allocate(ROWS * dim, sizeof *rows);
  for (size_t i = 0; i < ROWS * dim; i++) rows[i] = (float)naive_gaussian(random);
  return rows;
}

static float *copy_of(const float *rows, size_t dim) {
  float *copy = coder_allocate(ROWS * dim, sizeof *copy);
  memcpy(copy, rows, ROWS * dim * sizeof *copy);
  return copy;
}

static void case_init(transform_case *c, naive_random *random, size_t dim, double skew, size_t coordinates) {
  c->dim = dim;
  c->coordinates = coordinates;
  transform_init(&c->owned, random, (uint16_t)dim, false, skew, NULL);
  c->rows = random_rows(random, dim);
  c->turned = copy_of(c->rows, dim);
  qkv_transform_forward(&c->owned.transform, c->turned, ROWS, coordinates);
}

static void case_deinit(transform_case *c) {
  transform_deinit(&c->owned);
  free(c->rows);
  free(c->turned);
}

// What code space says a row is: mean + sum_c z_c synthesis_c, in double.
static double value_of(const transform_case *c, size_t row, size_t coordinate) {
  const qkv_transform *transform = &c->owned.transform;
  double sum = transform->mean[coordinate];
  for (size_t z = 0; z < c->coordinates; z++) {
    sum += (double)c->turned[row * c->dim + z] * transform->synthesis[z * c->dim + coordinate];
  }
  return sum;
}

static void check_case(naive_random *random, const transform_case *c) {
  const qkv_transform *transform = &c->owned.transform;
  const size_t dim = c->dim;
  for (size_t i = 0; i < ROWS; i++) {
    for (size_t z = 0; z < dim; z++) {
      double expected = 0, row2 = 0, matrix2 = 0;
      for (size_t j = 0; j < dim; j++) {
        const double entry = transform->analysis[z * dim + j];
        const double left = (double)c->rows[i * dim + j] - transform->mean[j];
        expected += entry * left, row2 += left * left, matrix2 += entry * entry;
      }
      if (z >= c->coordinates) expected = 0;
      assert_true(fabs(c->turned[i * dim + z] - expected) <= 6e-5 * sqrt(row2 * matrix2));  // kernel/dense.h
      if (z >= c->coordinates) assert_true(c->turned[i * dim + z] == 0);
    }
  }

  float *back = copy_of(c->turned, dim), *queries = random_rows(random, dim), *folded = copy_of(queries, dim);
  float *sums = coder_allocate(ROWS * dim, sizeof *sums);
  float shares[ROWS], weights[ROWS][ROWS];
  double totals[ROWS] = {0};
  qkv_transform_inverse(transform, back, ROWS, c->coordinates);
  qkv_transform_query(transform, folded, ROWS, c->coordinates, shares);
  for (size_t i = 0; i < ROWS; i++) {
    for (size_t t = 0; t < ROWS; t++) {
      totals[i] += weights[i][t] = (float)naive_uniform(random);
      for (size_t z = 0; z < dim; z++) sums[i * dim + z] += weights[i][t] * c->turned[t * dim + z];
    }
  }
  qkv_transform_output(transform, sums, totals, ROWS, c->coordinates);
  for (size_t i = 0; i < ROWS; i++) {
    for (size_t j = 0; j < dim; j++) {
      double weighted = 0, row2 = 0, matrix2 = 0;
      for (size_t t = 0; t < ROWS; t++) weighted += weights[i][t] * value_of(c, t, j);
      for (size_t z = 0; z < c->coordinates; z++) {
        const double entry = transform->synthesis[z * dim + j];
        row2 += (double)c->turned[i * dim + z] * c->turned[i * dim + z], matrix2 += entry * entry;
      }
      const double allowed = 6e-5 * sqrt(row2 * matrix2);  // kernel/dense.h
      assert_true(fabs(back[i * dim + j] - value_of(c, i, j)) <= allowed + 1e-6);
      assert_true(fabs(sums[i * dim + j] - weighted) <= 1e-4);
    }
    for (size_t t = 0; t < ROWS; t++) {
      double expected = 0, got = shares[i];
      for (size_t j = 0; j < dim; j++) expected += (double)queries[i * dim + j] * value_of(c, t, j);
      for (size_t z = 0; z < dim; z++) got += (double)folded[i * dim + z] * c->turned[t * dim + z];
      assert_true(fabs(got - expected) <= 1e-3);
    }
  }
  free(back), free(queries), free(folded), free(sums);
}

static void code_space_agrees_with_float64(void **state) {
  (void)state;
  naive_random random = {61};
  static const double skews[] = {1, 1.5, 4};
  for (size_t d = 0; d < DIMS; d++) {
    for (size_t s = 0; s < 3; s++) {
      transform_case c;
      const size_t bands = naive_below(&random, dims[d] / 8 + 1);
      case_init(&c, &random, dims[d], skews[s], s == 2 ? bands * 8 : dims[d]);
      check_case(&random, &c);
      case_deinit(&c);
    }
  }
}

static void all_coordinates_come_back(void **state) {
  (void)state;
  naive_random random = {62};
  for (size_t d = 0; d < DIMS; d++) {
    transform_case c;
    case_init(&c, &random, dims[d], 3, dims[d]);
    qkv_transform_inverse(&c.owned.transform, c.turned, ROWS, dims[d]);
    for (size_t i = 0; i < ROWS * dims[d]; i++) assert_true(fabsf(c.turned[i] - c.rows[i]) <= 4e-3f);
    case_deinit(&c);
  }
}

static void without_matrices_it_is_the_hadamard(void **state) {
  (void)state;
  naive_random random = {63};
  for (size_t d = 0; d < DIMS; d++) {
    const qkv_transform *transform = qkv_transform_uniform(dims[d]);
    assert_int_equal(transform->schedule->dim, dims[d]);
    assert_null(transform->mean);
    float *rows = random_rows(&random, dims[d]), *expected = copy_of(rows, dims[d]), shares[ROWS];
    const double totals[ROWS] = {1, 2, 3, 4, 5};
    for (size_t i = 0; i < ROWS; i++) qkv_hadamard_forward(expected + i * dims[d], 1, dims[d]);
    float *queries = copy_of(rows, dims[d]);
    qkv_transform_forward(transform, rows, ROWS, dims[d]);
    qkv_transform_query(transform, queries, ROWS, dims[d], shares);
    assert_memory_equal(rows, expected, ROWS * dims[d] * sizeof *rows);
    assert_memory_equal(queries, expected, ROWS * dims[d] * sizeof *rows);
    for (size_t i = 0; i < ROWS; i++) assert_true(shares[i] == 0);
    for (size_t i = 0; i < ROWS; i++) qkv_hadamard_inverse(expected + i * dims[d], 1, dims[d]);
    qkv_transform_inverse(transform, rows, ROWS, dims[d]);
    qkv_transform_output(transform, queries, totals, ROWS, dims[d]);
    assert_memory_equal(rows, expected, ROWS * dims[d] * sizeof *rows);
    assert_memory_equal(queries, expected, ROWS * dims[d] * sizeof *rows);
    free(rows), free(expected), free(queries);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(code_space_agrees_with_float64),
      cmocka_unit_test(all_coordinates_come_back),
      cmocka_unit_test(without_matrices_it_is_the_hadamard),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
