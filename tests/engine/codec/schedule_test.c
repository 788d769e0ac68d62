#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/schedule.h"
#include "naive.h"

static void uniform_has_the_tier_as_depth(void **state) {
  (void)state;
  qkv_schedule schedule;
  for (uint16_t dim = QKV_BAND; dim <= QKV_DIM_MAX; dim += QKV_BAND) {
    qkv_schedule_uniform(&schedule, dim);
    assert_null(qkv_schedule_validate(&schedule));
    for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
      for (unsigned depth = 0; depth <= QKV_DEPTH_MAX; depth++) {
        assert_int_equal(schedule.reach[tier][depth], depth <= tier ? dim : 0);
      }
      assert_int_equal(qkv_schedule_group_bytes(&schedule, tier), 2 * tier * dim);
    }
  }
}

static void random_schedules_are_valid_and_sized(void **state) {
  (void)state;
  naive_random random = {1};
  for (int round = 0; round < 500; round++) {
    qkv_schedule schedule;
    naive_schedule(&random, (uint16_t)(8 * (1 + naive_below(&random, 128))), &schedule);
    assert_null(qkv_schedule_validate(&schedule));
    for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
      size_t bits = 0;
      for (unsigned c = 0; c < schedule.dim; c++) bits += 16 * naive_depth(schedule.reach[tier], c);
      assert_int_equal(qkv_schedule_group_bytes(&schedule, tier), bits / 8);
    }
  }
}

static void broken_schedules_are_named(void **state) {
  (void)state;
  static const struct {
    uint16_t tier, depth, value;
    const char *text;
  } cases[] = {
      {3, 0, 56, "a tier does not start with all coordinates"},
      {3, 2, 60, "a depth is not reached by a multiple of 8 coordinates"},
      {3, 4, 72, "a depth is reached by more coordinates than the one before"},
      {2, 4, 8, "a depth is reached by more coordinates than the one before"},
      {3, 2, 56, "a tier is not a prefix of the next"},
      {8, 7, 0, "a tier is not a prefix of the next"},
      {3, 4, 8, NULL},
      {8, 8, 56, NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_schedule schedule;
    qkv_schedule_uniform(&schedule, 64);
    schedule.reach[cases[i].tier][cases[i].depth] = cases[i].value;
    const char *text = qkv_schedule_validate(&schedule);
    if (cases[i].text == NULL) {
      assert_null(text);
    } else {
      assert_non_null(text);
      assert_string_equal(text, cases[i].text);
    }
  }
}

static void widths_have_limits(void **state) {
  (void)state;
  qkv_schedule schedule;
  qkv_schedule_uniform(&schedule, 0);
  assert_string_equal(qkv_schedule_validate(&schedule), "the row width is not within 1 to 1024");
  qkv_schedule_uniform(&schedule, 1032);
  assert_string_equal(qkv_schedule_validate(&schedule), "the row width is not within 1 to 1024");
  qkv_schedule_uniform(&schedule, 100);
  assert_string_equal(qkv_schedule_validate(&schedule), "the row width is not a multiple of 8");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(uniform_has_the_tier_as_depth),
      cmocka_unit_test(random_schedules_are_valid_and_sized),
      cmocka_unit_test(broken_schedules_are_named),
      cmocka_unit_test(widths_have_limits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
