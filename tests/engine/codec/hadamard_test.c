#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/hadamard.h"
#include "naive.h"

static const size_t dims[] = {8, 16, 24, 64, 80, 96, 128, 192, 256, 576, 1016, 1024};
enum { DIMS = sizeof dims / sizeof *dims };

static void fill(naive_random *random, float *row, size_t dim) {
  for (size_t i = 0; i < dim; i++) row[i] = (float)naive_gaussian(random);
}

static bool odd_bits(size_t x) {
  bool odd = false;
  for (; x > 0; x &= x - 1) odd = !odd;
  return odd;
}

// y = (1/sqrt(n)) H (s o x) by its definition: H[i][j] = (-1)^(bits in i & j), blocks largest first.
static void by_definition(const float *row, size_t dim, double *out) {
  naive_random signs = {dim};
  double signed_row[QKV_DIM_MAX];
  for (size_t i = 0, word = 0; i < dim; i++) {
    if (i % 64 == 0) word = naive_next(&signs);
    signed_row[i] = (word >> (i % 64) & 1) ? -row[i] : row[i];
  }
  size_t start = 0;
  while (start < dim) {
    size_t n = QKV_DIM_MAX;
    while (n > dim - start) n /= 2;
    for (size_t i = 0; i < n; i++) {
      double sum = 0;
      for (size_t j = 0; j < n; j++) sum += odd_bits(i & j) ? -signed_row[start + j] : signed_row[start + j];
      out[start + i] = sum / sqrt((double)n);
    }
    start += n;
  }
}

static void forward_is_the_definition(void **state) {
  (void)state;
  naive_random random = {3};
  for (size_t d = 0; d < DIMS; d++) {
    float row[QKV_DIM_MAX];
    double expected[QKV_DIM_MAX];
    fill(&random, row, dims[d]);
    by_definition(row, dims[d], expected);
    qkv_hadamard_forward(row, 1, dims[d]);
    for (size_t i = 0; i < dims[d]; i++) assert_true(fabs(row[i] - expected[i]) < 1e-5);
  }
}

static void inverse_takes_it_back(void **state) {
  (void)state;
  naive_random random = {4};
  for (size_t d = 0; d < DIMS; d++) {
    float row[QKV_DIM_MAX], turned[QKV_DIM_MAX];
    fill(&random, row, dims[d]);
    memcpy(turned, row, dims[d] * sizeof *row);
    qkv_hadamard_forward(turned, 1, dims[d]);
    qkv_hadamard_inverse(turned, 1, dims[d]);
    for (size_t i = 0; i < dims[d]; i++) assert_true(fabsf(row[i] - turned[i]) < 1e-5f);
  }
}

static void inner_products_are_kept(void **state) {
  (void)state;
  naive_random random = {5};
  for (size_t d = 0; d < DIMS; d++) {
    float a[QKV_DIM_MAX], b[QKV_DIM_MAX];
    double before = 0, after = 0;
    fill(&random, a, dims[d]);
    fill(&random, b, dims[d]);
    for (size_t i = 0; i < dims[d]; i++) before += (double)a[i] * b[i];
    qkv_hadamard_forward(a, 1, dims[d]);
    qkv_hadamard_forward(b, 1, dims[d]);
    for (size_t i = 0; i < dims[d]; i++) after += (double)a[i] * b[i];
    assert_true(fabs(before - after) < 1e-4 * sqrt((double)dims[d]));
  }
}

// One large coordinate is spread evenly over its block.
static void an_outlier_is_spread(void **state) {
  (void)state;
  for (size_t at = 0; at < 128; at++) {
    float row[128] = {0};
    row[at] = 100;
    qkv_hadamard_forward(row, 1, 128);
    for (size_t i = 0; i < 128; i++) assert_true(fabsf(fabsf(row[i]) - 100 / sqrtf(128)) < 1e-4f);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(forward_is_the_definition),
      cmocka_unit_test(inverse_takes_it_back),
      cmocka_unit_test(inner_products_are_kept),
      cmocka_unit_test(an_outlier_is_spread),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
