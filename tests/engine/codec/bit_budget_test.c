// Bits by measured errors: the sum of errors falls, the average stays, limits hold, rounding carries.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "engine/codec/bit_budget.h"
#include "engine/codec/schedule.h"

enum { COUNT = 60 };

static void fill(qkv_bit_part *parts, double spread) {
  for (size_t i = 0; i < COUNT; i++) {
    parts[i] = (qkv_bit_part){.error = 0.01 * exp(spread * sin((double)i * 1.7)), .bits = 3};
  }
}

static double mean_of(const qkv_bit_part *parts) {
  double sum = 0;
  for (size_t i = 0; i < COUNT; i++) sum += parts[i].offset;
  return sum / COUNT;
}

// The sum of errors with the offsets, as a part of that without.
static double ratio_of(const qkv_bit_part *parts) {
  double with = 0, without = 0;
  for (size_t i = 0; i < COUNT; i++) {
    with += parts[i].error * pow(QKV_BIT_FALL, -parts[i].offset);
    without += parts[i].error;
  }
  return with / without;
}

static void bits_go_where_errors_are(void **state) {
  (void)state;
  qkv_bit_part parts[COUNT];
  fill(parts, 1.5);
  qkv_bit_budget(parts, COUNT, 0);
  assert_true(fabs(mean_of(parts)) < 1e-4);
  assert_true(ratio_of(parts) < 0.85);
  for (size_t i = 1; i < COUNT; i++) {
    assert_int_equal(parts[i].error > parts[0].error, parts[i].offset > parts[0].offset);
  }
}

static void limits_hold_and_the_mean_stays(void **state) {
  (void)state;
  qkv_bit_part parts[COUNT];
  fill(parts, 5);
  qkv_bit_budget(parts, COUNT, 0.25);
  assert_true(fabs(mean_of(parts) - 0.25) < 1e-4);
  for (size_t i = 0; i < COUNT; i++) {
    assert_true(parts[i].offset >= QKV_BIT_LOWER && parts[i].offset <= QKV_BIT_HIGHER);
  }
}

// An error at more bits stands for a larger one.
static void errors_at_other_bits_are_compared(void **state) {
  (void)state;
  qkv_bit_part parts[2] = {{.error = 0.01, .bits = 2}, {.error = 0.01 / QKV_BIT_FALL, .bits = 3}};
  qkv_bit_budget(parts, 2, 0);
  assert_true(fabs(parts[0].offset) < 1e-6 && fabs(parts[1].offset) < 1e-6);
}

static void parts_without_errors_get_the_mean(void **state) {
  (void)state;
  qkv_bit_part parts[3] = {{.error = 0.01, .bits = 2}, {.error = 0}, {.error = 0.04, .bits = 2}};
  qkv_bit_budget(parts, 3, -0.125);
  assert_true(parts[1].offset == -0.125);
  assert_true(parts[0].offset < -0.125 && parts[2].offset > -0.125);
  qkv_bit_part none[2] = {{0}};
  qkv_bit_budget(none, 2, 0.5);
  assert_true(none[0].offset == 0.5 && none[1].offset == 0.5);
}

static void rounding_keeps_sums(void **state) {
  (void)state;
  qkv_bit_part parts[COUNT];
  int8_t eighths[COUNT];
  fill(parts, 1.3);
  qkv_bit_budget(parts, COUNT, 0);
  qkv_bit_eighths(parts, COUNT, eighths);
  double sum = 0;
  int rounded = 0;
  for (size_t i = 0; i < COUNT; i++) {
    sum += parts[i].offset * QKV_TIER_BIT;
    rounded += eighths[i];
    assert_true(fabs(sum - rounded) <= 0.5 + 1e-6);
  }
  assert_int_equal(rounded, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bits_go_where_errors_are),
      cmocka_unit_test(limits_hold_and_the_mean_stays),
      cmocka_unit_test(errors_at_other_bits_are_compared),
      cmocka_unit_test(parts_without_errors_get_the_mean),
      cmocka_unit_test(rounding_keeps_sums),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
