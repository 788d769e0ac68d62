#include "client/bench/recode.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/engine/codec/coder.h"

enum { HEADS = 2, KEY_DIM = 64, VALUE_DIM = 32, TOKENS = 150 };

static float k[TOKENS * HEADS * KEY_DIM], k_out[TOKENS * HEADS * KEY_DIM];
static float v[TOKENS * HEADS * VALUE_DIM], v_out[TOKENS * HEADS * VALUE_DIM];

// About N(0, 1).
static void fill(float *rows, size_t count, uint64_t seed) {
  for (size_t i = 0; i < count; i++) {
    float sum = 0;
    for (int j = 0; j < 12; j++) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      sum += (float)(seed >> 40) * 0x1p-24f;
    }
    rows[i] = sum - 6;
  }
}

static int setup(void **state) {
  (void)state;
  fill(k, sizeof k / sizeof *k, 1);
  fill(v, sizeof v / sizeof *v, 2);
  return 0;
}

static void test_bytes_and_errors(void **state) {
  (void)state;
  qkv_coder *coder = coder_create(HEADS, KEY_DIM, VALUE_DIM, 4, 2, QKV_FRAME_PLAIN, NULL);
  qkvi_recoded sums = {0};
  qkvi_recode(coder, QKV_FP32, 0, TOKENS, k, v, k_out, v_out, &sums);
  // Three pages, the last one of 22 tokens but as long as the others: header and directory, then per head gains and
  // codes (docs/page-format.md).
  const size_t page = 128 + HEADS * (2 * 64 + 64 * KEY_DIM * 4 / 8 + 64 * VALUE_DIM * 2 / 8);
  assert_int_equal(sums.bytes, 3 * page);
  assert_int_equal(sums.coordinates, TOKENS * HEADS * (KEY_DIM + VALUE_DIM));
  assert_int_equal(sums.rows[QKV_K], TOKENS * HEADS);
  // Lloyd-Max at 4 and at 2 bits, 0.0095 and 0.1175, within some percent; and the cosine that goes with it.
  const double error_k = qkvi_recoded_error(&sums, QKV_K), error_v = qkvi_recoded_error(&sums, QKV_V);
  assert_true(error_k > 0.007 && error_k < 0.0105);
  assert_true(error_v > 0.09 && error_v < 0.13);
  assert_true(fabs(qkvi_recoded_cosine(&sums, QKV_K) - sqrt(1 - error_k)) < 0.001);
  assert_true(fabs(qkvi_recoded_cosine(&sums, QKV_V) - sqrt(1 - error_v)) < 0.01);
  // The sums are over what came out, every row at its place.
  double error = 0, square = 0;
  for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
    error += ((double)k[i] - (double)k_out[i]) * ((double)k[i] - (double)k_out[i]);
    square += (double)k[i] * (double)k[i];
  }
  assert_true(fabs(error / square - error_k) < 1e-12);
  coder_destroy(coder);
}

static void test_rows_are_rounded_before_they_are_coded(void **state) {
  (void)state;
  qkv_coder *coder = coder_create(HEADS, KEY_DIM, VALUE_DIM, 8, 8, QKV_FRAME_PLAIN, NULL);
  static float half_k[TOKENS * HEADS * KEY_DIM], half_v[TOKENS * HEADS * VALUE_DIM];
  static float k_again[TOKENS * HEADS * KEY_DIM], v_again[TOKENS * HEADS * VALUE_DIM];
  static uint16_t bits[TOKENS * HEADS * KEY_DIM];
  qkv_from_float(QKV_BF16, k, bits, sizeof k / sizeof *k);
  qkv_to_float(QKV_BF16, bits, half_k, sizeof k / sizeof *k);
  qkv_from_float(QKV_BF16, v, bits, sizeof v / sizeof *v);
  qkv_to_float(QKV_BF16, bits, half_v, sizeof v / sizeof *v);
  qkvi_recoded rounded = {0}, before = {0}, exact = {0};
  qkvi_recode(coder, QKV_BF16, 0, TOKENS, k, v, k_out, v_out, &rounded);
  qkvi_recode(coder, QKV_FP32, 0, TOKENS, half_k, half_v, k_again, v_again, &before);
  assert_memory_equal(k_out, k_again, sizeof k_out);
  assert_memory_equal(v_out, v_again, sizeof v_out);
  // Compared with the rows as they were.
  assert_true(rounded.square[QKV_K] != before.square[QKV_K]);
  qkvi_recode(coder, QKV_FP32, 0, TOKENS, k, v, k_out, v_out, &exact);
  assert_true(rounded.square[QKV_K] == exact.square[QKV_K]);
  assert_true(rounded.error[QKV_K] > exact.error[QKV_K]);
  coder_destroy(coder);
}

static void test_exact_rows_are_rounded_alone(void **state) {
  (void)state;
  const qkv_coder coder = {
      .codec = qkv_codec_by_name("exact"), .kv_heads = HEADS, .key_dim = KEY_DIM, .value_dim = VALUE_DIM};
  qkvi_recoded exact = {0}, rounded = {0};
  qkvi_recode(&coder, QKV_FP32, 0, TOKENS, k, v, k_out, v_out, &exact);
  assert_memory_equal(k_out, k, sizeof k);
  assert_memory_equal(v_out, v, sizeof v);
  assert_int_equal(exact.bytes, sizeof k + sizeof v);
  qkvi_recode(&coder, QKV_BF16, 0, TOKENS, k, v, k_out, v_out, &rounded);
  assert_int_equal(rounded.bytes, (sizeof k + sizeof v) / 2);
  const double error = qkvi_recoded_error(&rounded, QKV_K);
  assert_true(error > 0 && error < 1e-5);
}

static void test_zero_rows(void **state) {
  (void)state;
  qkv_coder *coder = coder_create(HEADS, KEY_DIM, VALUE_DIM, 2, 2, QKV_FRAME_PLAIN, NULL);
  float *zeros = calloc(sizeof k / sizeof *k, sizeof *zeros);
  assert_non_null(zeros);
  qkvi_recoded sums = {0};
  qkvi_recode(coder, QKV_FP32, 0, TOKENS, zeros, zeros, k_out, v_out, &sums);
  assert_int_equal(sums.rows[QKV_K] + sums.rows[QKV_V], 0);
  assert_true(qkvi_recoded_error(&sums, QKV_K) == 0 && qkvi_recoded_cosine(&sums, QKV_V) == 0);
  free(zeros);
  coder_destroy(coder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bytes_and_errors), cmocka_unit_test(test_rows_are_rounded_before_they_are_coded),
      cmocka_unit_test(test_exact_rows_are_rounded_alone), cmocka_unit_test(test_zero_rows)};
  return cmocka_run_group_tests(tests, setup, NULL);
}
