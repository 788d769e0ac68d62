#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <math.h>

#include "engine/kernel/kernel.h"

static void gains_are_eighths_of_an_octave(void **state) {
  (void)state;
  assert_true(qkv_gain_value(0) == 0);
  assert_true(qkv_gain_value(128) == 1);
  assert_true(qkv_gain_value(136) == 2);
  assert_true(qkv_gain_value(8) == 0x1p-15f);
  for (int g = 1; g < 256; g++) {
    const double expected = exp2((g - 128) / 8.0);
    assert_true(fabs(qkv_gain_value((uint8_t)g) / expected - 1) < 6e-8);
  }
}

static void nearest_gain_is_the_nearest(void **state) {
  (void)state;
  for (int g = 1; g < 256; g++) assert_int_equal(qkvi_gain_nearest(qkv_gain_value((uint8_t)g)), g);
  for (int g = 1; g < 255; g++) {
    const float low = qkv_gain_value((uint8_t)g), high = qkv_gain_value((uint8_t)(g + 1));
    const float middle = (low + high) / 2;
    assert_int_equal(qkvi_gain_nearest(middle), g);
    assert_int_equal(qkvi_gain_nearest(nextafterf(middle, high)), g + 1);
    assert_int_equal(qkvi_gain_nearest(nextafterf(high, low)), g + 1);
  }
  assert_int_equal(qkvi_gain_nearest(1e-30f), 1);
  assert_int_equal(qkvi_gain_nearest(1e30f), 255);
}

static void a_table_is_in_use(void **state) {
  (void)state;
  const qkv_kernels *kernels = qkv_kernels_get();
  assert_non_null(kernels);
  assert_string_equal(kernels->name, "reference");
  assert_ptr_equal(kernels, qkv_kernels_get());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gains_are_eighths_of_an_octave),
      cmocka_unit_test(nearest_gain_is_the_nearest),
      cmocka_unit_test(a_table_is_in_use),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
