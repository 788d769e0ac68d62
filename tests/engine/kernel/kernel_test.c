#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <math.h>

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/codec/naive.h"

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

static void soft_caps_are_hyperbolic_tangents(void **state) {
  (void)state;
  static const float caps[] = {1e-6f, 0.7f, 30, 50, 1e6f};
  float scores[1003], given[1003];
  for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
    for (size_t n = 0; n < 1003; n++)
      given[n] = scores[n] = (n % 2 == 0 ? 1 : -1) * caps[i] * (float)exp((double)n / 1003 * 14 - 9);
    qkv_soft_cap(scores, 1003, caps[i]);
    for (size_t n = 0; n < 1003; n++) {
      const double expected = (double)caps[i] * tanh((double)given[n] / (double)caps[i]);
      assert_true(fabs((double)scores[n] - expected) <= 4 * 0x1p-23 * fabs(expected));
    }
  }
  float zeros[] = {0, -0.0f};
  qkv_soft_cap(zeros, 2, 30);
  assert_true(zeros[0] == 0 && zeros[1] == 0);
}

static void a_mask_takes_a_lower_rung(void **state) {
  (void)state;
  assert_string_equal(qkv_kernels_at(0)->name, "reference");
  assert_ptr_equal(qkv_kernels_get(), qkv_kernels_for(qkv_cpu_flags()));
  qkv_kernels_setup(0);
  assert_ptr_equal(qkv_kernels_get(), qkv_kernels_at(0));
  qkv_kernels_setup(UINT32_MAX);
  assert_ptr_equal(qkv_kernels_get(), qkv_kernels_for(qkv_cpu_flags()));
}

static void every_rung_is_reached_by_its_needs(void **state) {
  (void)state;
  for (size_t row = 0; qkv_kernels_at(row) != NULL; row++) {
    const qkv_kernels *rung = qkv_kernels_at(row);
    assert_ptr_equal(qkv_kernels_for(rung->needs), rung);
    assert_non_null(rung->scores);
    assert_non_null(rung->accumulate);
    assert_non_null(rung->encode);
    assert_non_null(rung->decode);
  }
}

// A page's four groups are found one after the other, and the layouts of all are used then.
static void layouts_found_last_stay(void **state) {
  (void)state;
  enum { GROUPS = QKV_PAGE_GROUPS, TIERS = QKV_LAYOUTS + 3, FINDS = 2000 };
  static qkv_schedule schedule;
  static qkv_layouts layouts;
  naive_random random = {5};
  qkv_schedule_uniform(&schedule, 128);
  qkvi_layouts_clear(&layouts);
  const qkvi_tier_blocks *found[GROUPS] = {0};
  unsigned tiers[GROUPS] = {0};
  for (size_t i = 0; i < FINDS; i++) {
    tiers[i % GROUPS] = QKV_TIER_BIT / 2 * naive_below(&random, TIERS);
    found[i % GROUPS] = qkvi_layouts_find(&layouts, &schedule, tiers[i % GROUPS]);
    for (size_t j = 0; j < GROUPS && j <= i; j++) {
      static qkvi_tier_blocks expected;
      memset(&expected, 0, sizeof expected);
      qkvi_blocks_find(&schedule, tiers[j], &expected);
      assert_int_equal(found[j]->coordinates, expected.coordinates);
      assert_memory_equal(found[j]->blocks, expected.blocks, expected.count * sizeof *expected.blocks);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(gains_are_eighths_of_an_octave), cmocka_unit_test(nearest_gain_is_the_nearest),
      cmocka_unit_test(a_mask_takes_a_lower_rung),      cmocka_unit_test(every_rung_is_reached_by_its_needs),
      cmocka_unit_test(layouts_found_last_stay),        cmocka_unit_test(soft_caps_are_hyperbolic_tangents),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
