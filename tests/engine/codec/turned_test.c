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

static void little_turns_within_a_page_at_low_frequencies(void **state) {
  (void)state;
  static const qkvi_span page = {-32, 32, 1};
  qkv_rope rope = {.theta = 10000};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  qkvi_turns *turns = qkvi_turns_create(&rope, DIM, &page, 1);
  assert_true(qkvi_turns_kept(turns, 0) < 0.05);  // a radian each
  assert_true(qkvi_turns_kept(turns, DIM / 2 - 1) > 0.9999);
  for (uint32_t pair = 4; pair < DIM / 2; pair++) {
    assert_true(qkvi_turns_kept(turns, pair) > qkvi_turns_kept(turns, pair - 1));
  }
  qkvi_turns_destroy(&turns);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(averages_are_those_of_every_position),
      cmocka_unit_test(little_turns_within_a_page_at_low_frequencies),
      cmocka_unit_test(far_positions_leave_what_turns_with_them),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
