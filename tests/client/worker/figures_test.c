#include "client/worker/figures.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static void test_uniform_against_one_half(void **state) {
  (void)state;
  // p: two bytes with 1/2 each, q: all 256 alike.
  static float exact[256], logits[256];
  for (int i = 0; i < 256; i++) exact[i] = i < 2 ? 40 : -1000;
  qkvi_quality quality = {0};
  qkvi_quality_add(&quality, exact, logits, 256, 1);
  assert_int_equal(quality.positions, 1);
  assert_true(fabs(quality.bits - 8) < 1e-12);
  assert_true(fabs(quality.bits_exact - 1) < 1e-12);
  assert_true(fabs(quality.kl_bits - 7) < 1e-9);
  assert_int_equal(quality.agreed, 1);  // of equal ones the first
  qkvi_quality total = {.positions = 2, .bits = 1, .bits_exact = 2, .kl_bits = 3, .agreed = 1};
  qkvi_quality_sum(&total, &quality);
  assert_int_equal(total.positions, 3);
  assert_int_equal(total.agreed, 2);
  assert_true(fabs(total.bits - 9) < 1e-9 && fabs(total.bits_exact - 3) < 1e-9 && fabs(total.kl_bits - 10) < 1e-9);
}

static void test_equal_logits_have_no_divergence(void **state) {
  (void)state;
  float exact[256], shifted[256];
  for (int i = 0; i < 256; i++) {
    exact[i] = (float)(i % 17) - 8;
    shifted[i] = exact[i] + 64;  // the same distribution
  }
  qkvi_quality quality = {0};
  qkvi_quality_add(&quality, exact, shifted, 256, 200);
  assert_true(fabs(quality.kl_bits) < 1e-12);
  assert_true(fabs(quality.bits - quality.bits_exact) < 1e-12);
}

static void test_a_large_vocabulary(void **state) {
  (void)state;
  enum { VOCABULARY = 49152 };
  static float exact[VOCABULARY], logits[VOCABULARY];
  exact[40000] = logits[40001] = 12;  // each 0.77 of all
  qkvi_quality quality = {0};
  qkvi_quality_add(&quality, exact, logits, VOCABULARY, 40000);
  const double sum = exp(12) + VOCABULARY - 1, p = exp(12) / sum, q = 1 / sum;
  assert_true(fabs(quality.bits + log2(q)) < 1e-9);
  assert_true(fabs(quality.bits_exact + log2(p)) < 1e-9);
  assert_true(fabs(quality.kl_bits - (p - q) * 12 / M_LN2) < 1e-9);
  assert_int_equal(quality.agreed, 0);
  assert_int_equal(qkvi_likeliest(exact, VOCABULARY), 40000);
}

static void test_percentiles(void **state) {
  (void)state;
  qkvi_samples samples = {0};
  assert_true(qkvi_samples_percentile(&samples, 0.5) == 0);
  for (int i = 0; i < 2000; i++) qkvi_samples_add(&samples, (i * 7919) % 2000 + 1);
  assert_int_equal(samples.count, 2000);
  assert_true(qkvi_samples_percentile(&samples, 0.5) == 1000);
  assert_true(qkvi_samples_percentile(&samples, 0.99) == 1980);
  assert_true(qkvi_samples_percentile(&samples, 1) == 2000);
  assert_true(qkvi_samples_percentile(&samples, 1e-9) == 1);
  qkvi_samples_clear(&samples);
  assert_int_equal(samples.count, 0);
  qkvi_samples_add(&samples, 42);
  assert_true(qkvi_samples_percentile(&samples, 0.99) == 42);
  qkvi_samples_clear(&samples);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_uniform_against_one_half),
                                     cmocka_unit_test(test_equal_logits_have_no_divergence),
                                     cmocka_unit_test(test_a_large_vocabulary), cmocka_unit_test(test_percentiles)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
