// A wrong RoPE is told from keys, a right one and rows without structure are let be.
#include "engine/codec/rope_check.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 192, DIM = 64, HEADS = 8 };

static float noise(uint64_t *state) {
  double sum = 0;
  for (int i = 0; i < 4; i++) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    sum += (double)(*state >> 11) * 0x1p-53;
  }
  return (float)((sum - 2) * 1.7320508);
}

static qkv_rope rope_of(double theta, bool interleaved) {
  qkv_rope rope = {.theta = theta, .interleaved = interleaved};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  return rope;
}

// Some positions of three pages, the first ones among them.
static void fill_positions(uint64_t positions[ROWS]) {
  for (uint64_t i = 0; i < ROWS; i++) positions[i] = i % 64 + (i / 64) * 320;
}

// A head's keys: a mean, some directions and a little of everything; turned by `rope` (NULL: not at all).
static void make_head(float *rows, uint64_t seed, const qkv_rope *rope, bool structured) {
  uint64_t state = seed, positions[ROWS];
  float mean[DIM], directions[8][DIM];
  fill_positions(positions);
  for (size_t j = 0; j < DIM; j++) {
    mean[j] = 1.5f * noise(&state);
    for (size_t d = 0; d < 8; d++) directions[d][j] = noise(&state);
  }
  for (size_t i = 0; i < ROWS; i++) {
    float *row = rows + i * DIM, along[8];
    for (size_t d = 0; d < 8; d++) along[d] = noise(&state);
    for (size_t j = 0; j < DIM; j++) {
      row[j] = (structured ? 0.3f : 1.0f) * noise(&state);
      if (!structured) continue;
      row[j] += mean[j];
      for (size_t d = 0; d < 8; d++) row[j] += 0.3f * along[d] * directions[d][j];
    }
    if (rope != NULL) qkv_rope_forward(rope, row, positions[i]);
  }
}

static bool doubts(const qkv_rope *declared, const qkv_rope *real, bool structured, char *text, size_t size) {
  static float rows[ROWS * DIM];
  uint64_t positions[ROWS];
  qkv_rope_check check;
  fill_positions(positions);
  qkv_rope_check_init(&check, declared, DIM);
  for (uint64_t head = 0; head < HEADS; head++) {
    make_head(rows, head + 1, real, structured);
    qkv_rope_check_add(&check, rows, DIM, positions, ROWS);
  }
  const bool doubtful = qkv_rope_check_doubts(&check, text, size);
  if (doubtful) print_message("%s\n", text);
  return doubtful;
}

static void test_the_right_one_is_let_be(void **state) {
  (void)state;
  static const double bases[] = {500, 1e4, 1e5, 5e5, 1e6, 12345, 8e6};
  char text[256];
  for (size_t i = 0; i < sizeof bases / sizeof *bases; i++) {
    for (int interleaved = 0; interleaved < 2; interleaved++) {
      const qkv_rope rope = rope_of(bases[i], interleaved != 0);
      assert_false(doubts(&rope, &rope, true, text, sizeof text));
      assert_string_equal(text, "");
    }
  }
  assert_false(doubts(&(qkv_rope){0}, NULL, true, text, sizeof text));
}

static void test_rows_without_structure_are_let_be(void **state) {
  (void)state;
  char text[256];
  const qkv_rope half = rope_of(1e4, false), other = rope_of(1e6, true);
  assert_false(doubts(&half, &half, false, text, sizeof text));
  assert_false(doubts(&half, &other, false, text, sizeof text));
  assert_false(doubts(&half, NULL, false, text, sizeof text));
  assert_false(doubts(&(qkv_rope){0}, &half, false, text, sizeof text));
  qkv_rope_check check;
  qkv_rope_check_init(&check, &half, DIM);
  assert_false(qkv_rope_check_doubts(&check, text, sizeof text));  // of no rows
  float zeros[ROWS * DIM] = {0};
  uint64_t positions[ROWS];
  fill_positions(positions);
  qkv_rope_check_add(&check, zeros, DIM, positions, ROWS);
  assert_false(qkv_rope_check_doubts(&check, text, sizeof text));
}

static void test_wrong_ones_are_told(void **state) {
  (void)state;
  const struct {
    double theta;
    bool interleaved;
    double real_theta;
    bool real_interleaved;
    const char *says;
  } rows[] = {{1e4, true, 1e4, false, "of one with theta 10000, pairing half"},
              {1e4, false, 1e4, true, "of one with theta 10000, pairing interleaved"},
              {1e4, false, 1e5, false, "of one with theta 100000, pairing half"},
              {1e4, false, 1e6, false, "of one with theta 1000000, pairing half"},
              {5e5, false, 1e4, false, "of one with theta 10000, pairing half"},
              {12345, true, 12345, false, "pairing half"},
              {1e6, true, 1e4, false, "of one with theta 10000, pairing half"}};
  char text[256];
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const qkv_rope declared = rope_of(rows[i].theta, rows[i].interleaved);
    const qkv_rope real = rope_of(rows[i].real_theta, rows[i].real_interleaved);
    assert_true(doubts(&declared, &real, true, text, sizeof text));
    if (strstr(text, rows[i].says) == NULL) fail_msg("expected \"%s\" in: %s", rows[i].says, text);
  }
  const qkv_rope half = rope_of(1e4, false);
  assert_true(doubts(&half, NULL, true, text, sizeof text));  // rows were not turned at all
  assert_non_null(strstr(text, "of one with no RoPE"));
  assert_true(doubts(&(qkv_rope){0}, &half, true, text, sizeof text));
  assert_non_null(strstr(text, "is registered with no RoPE"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_right_one_is_let_be),
      cmocka_unit_test(test_rows_without_structure_are_let_be),
      cmocka_unit_test(test_wrong_ones_are_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
