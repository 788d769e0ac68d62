#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/turned.h"
#include "naive.h"

enum { DIM = 24, WIDTH = 16, RANK = 3 };

// To t, which may be negative: then backwards, and scaled as forwards.
static void turn(const qkv_rope *rope, float *row, int64_t t) {
  if (t >= 0) {
    qkv_rope_forward(rope, row, (uint64_t)t);
    return;
  }
  qkv_rope_inverse(rope, row, (uint64_t)-t);
  const float magnitude = (float)qkv_rope_magnitude(rope);
  for (uint32_t pair = 0; pair < rope->width / 2; pair++) {
    row[qkv_rope_first(rope, pair)] *= magnitude * magnitude;
    row[qkv_rope_second(rope, pair)] *= magnitude * magnitude;
  }
}

// Averages by brute force: every position of every span.
static void turn_slowly(const qkv_rope *rope, const qkvi_span *spans, size_t count, double vectors[RANK][DIM],
                        double mean[DIM], double second[DIM][DIM]) {
  double total = 0;
  for (size_t s = 0; s < count; s++) total += spans[s].weight;
  for (size_t s = 0; s < count; s++) {
    const double weight = spans[s].weight / total / (double)(spans[s].end - spans[s].begin);
    for (int64_t t = spans[s].begin; t < spans[s].end; t++) {
      for (size_t r = 0; r < RANK; r++) {
        float row[DIM];
        for (size_t i = 0; i < DIM; i++) row[i] = (float)vectors[r][i];
        turn(rope, row, t);
        for (size_t i = 0; i < DIM; i++) {
          if (r == 0) mean[i] += weight * (double)row[i];
          for (size_t j = 0; j < DIM; j++) second[i][j] += weight * (double)row[i] * (double)row[j];
        }
      }
    }
  }
}

static void expect_turned(qkv_rope rope, const qkvi_span *spans, size_t count) {
  naive_random random = {rope.scaling + 17};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  double vectors[RANK][DIM], slow_mean[DIM] = {0}, slow[DIM][DIM] = {{0}}, mean[DIM], fast[DIM][DIM] = {{0}};
  for (size_t r = 0; r < RANK; r++) {
    for (size_t i = 0; i < DIM; i++) vectors[r][i] = naive_gaussian(&random);
  }
  turn_slowly(&rope, spans, count, vectors, slow_mean, slow);
  for (size_t i = 0; i < DIM; i++) {
    mean[i] = vectors[0][i];
    for (size_t j = 0; j < DIM; j++) {
      for (size_t r = 0; r < RANK; r++) fast[i][j] += vectors[r][i] * vectors[r][j];
    }
  }
  qkvi_turns *turns = qkvi_turns_create(&rope, DIM, spans, count);
  qkvi_turn_mean(turns, mean);
  qkvi_turn_second(turns, &fast[0][0]);
  qkvi_turns_destroy(&turns);
  assert_null(turns);
  for (size_t i = 0; i < DIM; i++) {
    assert_true(fabs(mean[i] - slow_mean[i]) < 1e-5);
    for (size_t j = 0; j < DIM; j++) {
      assert_true(fabs(fast[i][j] - slow[i][j]) < 1e-5);
      assert_true(fast[i][j] == fast[j][i]);
    }
  }
}

static void averages_are_those_of_every_position(void **state) {
  (void)state;
  static const qkvi_span spans[] = {{-32, 32, 1}, {0, 1, 2}, {0, 1000, 0.5}, {3000, 4001, 7}, {-5, -1, 1}};
  static const size_t counts[] = {1, 2, 5};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    expect_turned((qkv_rope){.theta = 10000}, spans, counts[i]);
    expect_turned((qkv_rope){.theta = 10000, .width = WIDTH}, spans, counts[i]);
    expect_turned((qkv_rope){.theta = 500, .width = WIDTH, .interleaved = true}, spans, counts[i]);
    expect_turned(
        (qkv_rope){
            .theta = 10000, .width = WIDTH, .scaling = QKV_ROPE_YARN, .factor = 8, .original_max_position = 512},
        spans, counts[i]);
    expect_turned((qkv_rope){.theta = 10000, .scaling = QKV_ROPE_LLAMA3, .factor = 8, .original_max_position = 512},
                  spans, counts[i]);
  }
  // Within the trained length dynamic NTK turns as plain RoPE does.
  expect_turned((qkv_rope){.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 4, .original_max_position = 8192},
                spans, 5);
}

// Over positions without end only what a pair keeps while it turns remains: its length, and that with itself.
static void far_positions_leave_what_turns_with_them(void **state) {
  (void)state;
  static const qkvi_span far = {0, (int64_t)1 << 40, 1};
  qkv_rope rope = {.theta = 10000};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  double second[DIM][DIM], mean[DIM];
  for (size_t i = 0; i < DIM; i++) {
    mean[i] = 1;
    for (size_t j = 0; j < DIM; j++) second[i][j] = i == j ? (double)(i + 1) : 0.5;
  }
  qkvi_turns *turns = qkvi_turns_create(&rope, DIM, &far, 1);
  qkvi_turn_mean(turns, mean);
  qkvi_turn_second(turns, &second[0][0]);
  qkvi_turns_destroy(&turns);
  for (size_t i = 0; i < DIM; i++) {
    assert_true(fabs(mean[i]) < 1e-4);
    const size_t pair = i % (DIM / 2);
    const double average = ((double)(pair + 1) + (double)(pair + DIM / 2 + 1)) / 2;
    for (size_t j = 0; j < DIM; j++) assert_true(fabs(second[i][j] - (i == j ? average : 0)) < 1e-4);
  }
}

// What a plan leaves of rows at all positions, by brute force: each pair back by the middle of its own block.
static void turn_planned_slowly(const qkv_rope *rope, const qkv_turn_plan *plan, double vectors[RANK][DIM],
                                double mean[DIM], double second[DIM][DIM]) {
  enum { POSITIONS = 1 << 13 };
  const double magnitude = qkv_rope_magnitude(rope);
  for (int64_t t = 0; t < POSITIONS; t++) {
    double angles[DIM / 2];
    for (uint32_t pair = 0; pair < rope->width / 2; pair++) {
      const double frequency = qkv_rope_frequency(rope, 0, pair);
      int64_t tokens = 64;
      while (plan->rule == QKV_TURN_BLOCKS && tokens < 4096 && (double)tokens * frequency <= 0.25) tokens *= 2;
      angles[pair] = (double)(t - (t / tokens * tokens + tokens / 2)) * frequency;
    }
    for (size_t r = 0; r < RANK; r++) {
      double row[DIM];
      memcpy(row, vectors[r], sizeof row);
      for (uint32_t pair = 0; pair < rope->width / 2; pair++) {
        const size_t i = qkv_rope_first(rope, pair), j = qkv_rope_second(rope, pair);
        const double a = row[i], b = row[j], c = cos(angles[pair]) * magnitude, s = sin(angles[pair]) * magnitude;
        row[i] = a * c - b * s;
        row[j] = a * s + b * c;
      }
      for (size_t i = 0; i < DIM; i++) {
        if (r == 0) mean[i] += row[i] / POSITIONS;
        for (size_t j = 0; j < DIM; j++) second[i][j] += row[i] * row[j] / POSITIONS;
      }
    }
  }
}

static void expect_planned(qkv_rope rope, qkv_turn_rule rule) {
  naive_random random = {29};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  const qkv_turn_plan plan = qkv_turn_plan_of(&rope, rule);
  double vectors[RANK][DIM], slow_mean[DIM] = {0}, slow[DIM][DIM] = {{0}}, mean[DIM], fast[DIM][DIM] = {{0}};
  for (size_t r = 0; r < RANK; r++) {
    for (size_t i = 0; i < DIM; i++) vectors[r][i] = naive_gaussian(&random);
  }
  turn_planned_slowly(&rope, &plan, vectors, slow_mean, slow);
  for (size_t i = 0; i < DIM; i++) {
    mean[i] = vectors[0][i];
    for (size_t j = 0; j < DIM; j++) {
      for (size_t r = 0; r < RANK; r++) fast[i][j] += vectors[r][i] * vectors[r][j];
    }
  }
  qkvi_turns *turns = qkvi_turns_create_planned(&rope, DIM, &plan);
  qkvi_turn_mean(turns, mean);
  qkvi_turn_second(turns, &fast[0][0]);
  qkvi_turns_destroy(&turns);
  bool plain[DIM] = {false};
  for (uint32_t pair = 0; pair < plan.begins[0]; pair++) {
    plain[qkv_rope_first(&rope, pair)] = plain[qkv_rope_second(&rope, pair)] = true;
  }
  for (size_t i = 0; i < DIM; i++) {
    assert_true(plain[i] ? mean[i] == 0 : fabs(mean[i] - slow_mean[i]) < 1e-9);
    for (size_t j = 0; j < DIM; j++) {
      if (plain[i] || plain[j]) continue;
      assert_true(fabs(fast[i][j] - slow[i][j]) < 1e-9);
    }
  }
  // A plain pair has the same variance twice, and nothing in common with others.
  for (uint32_t pair = 0; pair < plan.begins[0]; pair++) {
    const size_t i = qkv_rope_first(&rope, pair), j = qkv_rope_second(&rope, pair);
    assert_true(fast[i][i] > 0 && fast[i][i] == fast[j][j]);
    for (size_t k = 0; k < DIM; k++) assert_true((k == i || fast[i][k] == 0) && (k == j || fast[j][k] == 0));
  }
}

static void plans_leave_what_blocks_do(void **state) {
  (void)state;
  for (qkv_turn_rule rule = QKV_TURN_PAGE; rule <= QKV_TURN_BLOCKS; rule++) {
    expect_planned((qkv_rope){.theta = 10000}, rule);
    expect_planned((qkv_rope){.theta = 1e6, .width = WIDTH}, rule);
    expect_planned((qkv_rope){.theta = 50000, .width = WIDTH, .interleaved = true}, rule);
    expect_planned(
        (qkv_rope){
            .theta = 10000, .width = WIDTH, .scaling = QKV_ROPE_YARN, .factor = 8, .original_max_position = 512},
        rule);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(averages_are_those_of_every_position),
      cmocka_unit_test(plans_leave_what_blocks_do),
      cmocka_unit_test(far_positions_leave_what_turns_with_them),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
