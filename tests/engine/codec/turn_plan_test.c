#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/turn_plan.h"

static const qkv_rope ropes[] = {
    {.theta = 10000},
    {.theta = 500000, .interleaved = true},
    {.theta = 1e12},
    {.theta = 2, .width = 16},
    {.theta = 10000, .width = 2},
    {.theta = 10000, .scaling = QKV_ROPE_LINEAR, .factor = 16},
    {.theta = 10000, .scaling = QKV_ROPE_YARN, .factor = 16, .original_max_position = 4096},
    {.theta = 500000, .scaling = QKV_ROPE_LLAMA3, .factor = 8, .original_max_position = 8192},
    {.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 4, .original_max_position = 2048},
};
enum { ROPES = sizeof ropes / sizeof *ropes, DIM = 128 };

static qkv_rope resolved(size_t i) {
  qkv_rope rope = ropes[i];
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  return rope;
}

// Every pair is where its frequency says.
static void pairs_are_of_the_longest_blocks_that_they_stand_still_in(void **state) {
  (void)state;
  for (size_t i = 0; i < ROPES; i++) {
    const qkv_rope rope = resolved(i);
    const qkv_turn_plan plan = qkv_turn_plan_of(&rope, QKV_TURN_BLOCKS);
    assert_int_equal(plan.begins[QKV_TURN_LEVELS], rope.width / 2);
    for (uint32_t pair = 0; pair < rope.width / 2; pair++) {
      const double half_page = 32 * qkv_rope_frequency(&rope, 0, pair);
      assert_int_equal(pair<plan.begins[0], half_page> 4.000001);
      for (unsigned level = 1; level < QKV_TURN_LEVELS; level++) {
        if (pair < plan.begins[0]) continue;
        const bool still = half_page * (double)(1 << level) <= 0.2500001;
        assert_int_equal(pair >= plan.begins[level], still);
      }
    }
  }
}

static void pages_have_one_level(void **state) {
  (void)state;
  for (size_t i = 0; i < ROPES; i++) {
    const qkv_rope rope = resolved(i);
    const qkv_turn_plan plan = qkv_turn_plan_of(&rope, QKV_TURN_PAGE);
    assert_int_equal(plan.begins[0], 0);
    for (unsigned level = 1; level <= QKV_TURN_LEVELS; level++) assert_int_equal(plan.begins[level], rope.width / 2);
  }
}

// A longer block changes only where all shorter ones do, and its middle is in it.
static void blocks_nest(void **state) {
  (void)state;
  for (uint64_t position = 0; position < 20000; position += 7) {
    for (unsigned level = 0; level < QKV_TURN_LEVELS; level++) {
      const uint64_t block = qkv_turn_block(position, level), middle = qkv_turn_middle(block, level);
      const uint64_t tokens = (uint64_t)QKV_PAGE_TOKENS << level;
      assert_int_equal(middle / tokens, block);
      assert_int_equal(middle % tokens, tokens / 2);
      assert_int_equal((position + 32) / tokens, block);
      if (level > 0) assert_int_equal(qkv_turn_block(position, level - 1) / 2, block);
    }
  }
}

static void inputs_are_all_coordinates_once(void **state) {
  (void)state;
  for (size_t i = 0; i < ROPES; i++) {
    const qkv_rope rope = resolved(i);
    bool seen[DIM] = {false};
    for (size_t j = 0; j < DIM; j++) {
      const size_t at = qkv_turn_input(&rope, j);
      assert_true(at < DIM && !seen[at]);
      seen[at] = true;
      if (j >= rope.width) assert_int_equal(at, j);
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(pairs_are_of_the_longest_blocks_that_they_stand_still_in),
      cmocka_unit_test(pages_have_one_level),
      cmocka_unit_test(blocks_nest),
      cmocka_unit_test(inputs_are_all_coordinates_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
