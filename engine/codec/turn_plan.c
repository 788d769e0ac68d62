#include "engine/codec/turn_plan.h"

#include <assert.h>

// No frequency lies this near to a limit but one that is meant to be at it, whatever the machine's pow() rounds.
static const double SLACK = 1 + 1e-9;
// Radians in half a page, and in half a block.
static const double PLAIN_ABOVE = 4, BLOCK_MOST = 0.25;

// The first pair from `pair` on that turns by `most` or less in so many tokens.
static uint32_t first_below(const qkv_rope *rope, uint32_t pair, double tokens, double most) {
  while (pair < rope->width / 2 && tokens * qkv_rope_frequency(rope, 0, pair) > most * SLACK) pair++;
  return pair;
}

qkv_turn_plan qkv_turn_plan_of(const qkv_rope *rope, qkv_turn_rule rule) {
  assert(rope->theta != 0);
  qkv_turn_plan plan = {.rule = rule};
  const double half_page = (double)QKV_PAGE_TOKENS / 2;
  uint32_t pair = rule == QKV_TURN_BLOCKS ? first_below(rope, 0, half_page, PLAIN_ABOVE) : 0;
  plan.begins[0] = (uint16_t)pair;
  for (unsigned level = 1; level <= QKV_TURN_LEVELS; level++) {
    if (rule == QKV_TURN_PAGE || level == QKV_TURN_LEVELS) {
      pair = rope->width / 2;
    } else {
      pair = first_below(rope, pair, half_page * (double)(1u << level), BLOCK_MOST);
    }
    plan.begins[level] = (uint16_t)pair;
  }
  return plan;
}
