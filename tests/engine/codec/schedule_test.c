#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/schedule.h"
#include "naive.h"

// A tier's whole bits are every coordinate's; what is left over makes the first ones one bit deeper.
static void uniform_has_the_tier_as_depth(void **state) {
  (void)state;
  qkv_schedule schedule;
  for (uint16_t dim = QKV_BAND; dim <= QKV_DIM_MAX; dim += QKV_BAND) {
    qkv_schedule_uniform(&schedule, dim);
    assert_null(qkv_schedule_validate(&schedule));
    for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
      // In bits of a token: as near below the tier as whole bands come.
      const unsigned asked = tier * dim, exact = tier / 8 * 8 * dim;
      const unsigned deeper = (asked - exact) / 8 / 8 * 8;
      for (unsigned c = 0; c < dim; c++) {
        assert_int_equal(naive_depth(schedule.reach[tier], c), tier / 8 + (c < deeper ? 1 : 0));
      }
      assert_int_equal(qkv_schedule_group_bytes(&schedule, tier), 16 * (exact / 8 + deeper) / 8);
      if (dim % 64 == 0) assert_int_equal(qkv_schedule_group_bytes(&schedule, tier), 16 * asked / 8 / 8);
    }
  }
}

static void fractional_tiers_by_hand(void **state) {
  (void)state;
  static const struct {
    uint16_t dim, tier, whole, deeper;
  } cases[] = {{64, 12, 1, 32}, {64, 1, 0, 8}, {64, 63, 7, 56}, {128, 19, 2, 48},
               {8, 15, 1, 0},   {24, 4, 0, 8}, {80, 33, 4, 8},  {1024, 62, 7, 768}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_schedule schedule;
    qkv_schedule_uniform(&schedule, cases[i].dim);
    const uint16_t *reach = schedule.reach[cases[i].tier];
    assert_int_equal(reach[cases[i].whole], cases[i].dim);
    assert_int_equal(reach[cases[i].whole + 1], cases[i].deeper);
    if (cases[i].whole + 2 <= QKV_DEPTH_MAX) assert_int_equal(reach[cases[i].whole + 2], 0);
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
      {24, 0, 56, "a tier does not start with all coordinates"},
      {24, 2, 60, "a depth is not reached by a multiple of 8 coordinates"},
      {24, 4, 72, "a depth is reached by more coordinates than the one before"},
      {16, 4, 8, "a depth is reached by more coordinates than the one before"},
      {24, 2, 56, "a tier is not a prefix of the next"},
      {64, 7, 0, "a tier is not a prefix of the next"},
      {17, 3, 0, NULL},
      {24, 4, 8, NULL},
      {64, 8, 56, NULL},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_schedule schedule;
    qkv_schedule_uniform(&schedule, 64);
    schedule.reach[cases[i].tier][cases[i].depth] = cases[i].value;
    qkv_schedule_finish(&schedule);
    const char *text = qkv_schedule_validate(&schedule);
    if (cases[i].text == NULL) {
      assert_null(text);
    } else {
      assert_non_null(text);
      assert_string_equal(text, cases[i].text);
    }
  }
  qkv_schedule schedule;
  qkv_schedule_uniform(&schedule, 64);
  schedule.group_bytes[13] += 16;
  assert_string_equal(qkv_schedule_validate(&schedule), "a tier's bytes are not those of its depths");
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
      cmocka_unit_test(fractional_tiers_by_hand),
      cmocka_unit_test(random_schedules_are_valid_and_sized),
      cmocka_unit_test(broken_schedules_are_named),
      cmocka_unit_test(widths_have_limits),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
