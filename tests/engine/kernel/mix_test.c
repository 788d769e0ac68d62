// Products with plain codes: their bytes against the drawing in mix.h, and every version against the reference.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdlib.h>

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/mix.h"
#include "tests/engine/codec/naive.h"

// A code's bits as mix.h draws them: sections by the binary digits of `bits`, the most significant bits first.
static unsigned drawn_code(const uint8_t *matrix, size_t steps, unsigned bits, size_t lane, size_t step) {
  const uint8_t *chunk = matrix + (lane / 8 * steps / 8 + step / 8) * 8 * bits;
  unsigned code = 0;
  for (unsigned w = 8; w > 0; w /= 2) {
    if ((bits & w) == 0) continue;
    const unsigned j = (unsigned)(step % 8) / (8 / w), i = (unsigned)(step % 8) % (8 / w);
    code = code << w | (chunk[j * 8 + lane % 8] >> i * w & ((1u << w) - 1));
    chunk += (size_t)8 * w;
  }
  return code;
}

static void codes_lie_as_drawn(void **state) {
  (void)state;
  naive_random random = {1};
  for (unsigned bits = 1; bits <= 8; bits++) {
    const size_t lanes = 8 * (1 + naive_below(&random, 9)), steps = 8 * (1 + naive_below(&random, 9));
    const size_t bytes = qkv_code_matrix_bytes(lanes, steps, bits);
    uint8_t *codes = malloc(lanes * steps), *back = malloc(lanes * steps), *matrix = malloc(bytes);
    for (size_t i = 0; i < lanes * steps; i++) codes[i] = (uint8_t)naive_below(&random, 1u << bits);
    qkv_mix_pack(codes, lanes, steps, bits, matrix);
    qkv_mix_unpack(matrix, lanes, steps, bits, back);
    assert_memory_equal(codes, back, lanes * steps);
    for (size_t lane = 0; lane < lanes; lane++) {
      for (size_t step = 0; step < steps; step++) {
        assert_int_equal(drawn_code(matrix, steps, bits, lane, step), codes[lane * steps + step]);
        assert_int_equal(qkv_mix_code(matrix, steps, bits, lane, step), codes[lane * steps + step]);
      }
    }
    free(codes);
    free(back);
    free(matrix);
  }
}

typedef void mix_fn(const qkv_code_matrix *matrix, const float *factors, size_t n, float *out, size_t stride);

// One of random shape; `mix` NULL: the sums in double, within what fp32 rounds.
static void check_one(naive_random *random, unsigned bits, bool plain, mix_fn *mix) {
  const size_t lanes = 8 * (1 + naive_below(random, 9)), steps = 8 * (1 + naive_below(random, 20));
  const size_t n = 1 + naive_below(random, 9), stride = lanes + naive_below(random, 3);
  uint8_t *matrix = malloc(qkv_code_matrix_bytes(lanes, steps, bits));
  float values[256], *factors = malloc(n * steps * sizeof *factors);
  float *expected = malloc(n * stride * sizeof *expected), *got = malloc(n * stride * sizeof *got);
  for (size_t i = 0; i < qkv_code_matrix_bytes(lanes, steps, bits); i++) matrix[i] = (uint8_t)naive_next(random);
  for (size_t i = 0; i < 256; i++) values[i] = (float)naive_gaussian(random);
  for (size_t i = 0; i < n * steps; i++) factors[i] = (float)naive_gaussian(random);
  for (size_t i = 0; i < n * stride; i++) expected[i] = got[i] = (float)naive_gaussian(random);
  const qkv_code_matrix m = {
      .codes = matrix, .bits = bits, .lanes = lanes, .steps = steps, .values = plain ? NULL : values};
  if (mix != NULL) {
    qkvi_mix_reference(&m, factors, n, expected, stride);
    mix(&m, factors, n, got, stride);
    assert_memory_equal(expected, got, n * stride * sizeof *got);
  } else {
    qkv_mix(&m, factors, n, got, stride);
    for (size_t i = 0; i < n; i++) {
      for (size_t lane = 0; lane < lanes; lane++) {
        double sum = (double)expected[i * stride + lane], size = fabs(sum);
        for (size_t s = 0; s < steps; s++) {
          const unsigned code = drawn_code(matrix, steps, bits, lane, s);
          const double part = (double)factors[i * steps + s] * (plain ? code : (double)values[code]);
          sum += part;
          size += fabs(part);
        }
        assert_true(fabs(sum - (double)got[i * stride + lane]) <= 1e-5 * size);
      }
    }
  }
  free(matrix);
  free(factors);
  free(expected);
  free(got);
}

static void check_all(mix_fn *mix) {
  naive_random random = {2};
  for (unsigned i = 0; i < 200; i++) {
    for (unsigned bits = 1; bits <= 8; bits++) check_one(&random, bits, i % 2 == 0, mix);
  }
}

static void sums_are_those_of_the_codes(void **state) {
  (void)state;
  check_all(NULL);
}

static void every_version_gives_the_same_bits(void **state) {
  (void)state;
  for (size_t i = 0; qkv_kernels_at(i) != NULL; i++) {
    if ((qkv_kernels_at(i)->needs & ~qkv_cpu_flags()) == 0) check_all(qkv_kernels_at(i)->mix);
  }
}

// ---- In whole numbers ----

static void check_all_integer(mix_fn *mix) {
  naive_random random = {3};
  for (unsigned i = 0; i < 400; i++) {
    for (unsigned bits = 1; bits <= QKV_MIX_INTEGER_BITS; bits++) {
      const size_t lanes = 8 * (1 + naive_below(&random, 9)), steps = 8 * (1 + naive_below(&random, 20));
      const size_t n = 1 + naive_below(&random, 9), stride = lanes + naive_below(&random, 3);
      uint8_t *matrix = malloc(qkv_code_matrix_bytes(lanes, steps, bits));
      float values[16], *factors = malloc(n * steps * sizeof *factors);
      float *expected = malloc(n * stride * sizeof *expected), *got = malloc(n * stride * sizeof *got);
      for (size_t j = 0; j < qkv_code_matrix_bytes(lanes, steps, bits); j++) matrix[j] = (uint8_t)naive_next(&random);
      for (size_t j = 0; j < 16; j++) values[j] = (float)naive_gaussian(&random);
      for (size_t j = 0; j < n * steps; j++) factors[j] = i % 7 == 0 ? 0 : (float)naive_gaussian(&random);
      for (size_t j = 0; j < n * stride; j++) expected[j] = got[j] = (float)naive_gaussian(&random);
      const qkv_code_matrix m = {
          .codes = matrix, .bits = bits, .lanes = lanes, .steps = steps, .values = i % 2 == 0 ? NULL : values};
      qkvi_mix_integer_reference(&m, factors, n, expected, stride);
      mix(&m, factors, n, got, stride);
      assert_memory_equal(expected, got, n * stride * sizeof *got);
      free(matrix);
      free(factors);
      free(expected);
      free(got);
    }
  }
}

static void every_version_in_whole_numbers_gives_the_same_bits(void **state) {
  (void)state;
  for (size_t i = 0; qkv_kernels_at(i) != NULL; i++) {
    if ((qkv_kernels_at(i)->needs & ~qkv_cpu_flags()) == 0) check_all_integer(qkv_kernels_at(i)->mix_integer);
  }
}

// The squared error of Gaussian factors' products with codes drawn by a codebook's own frequencies, relative to the
// products with what the codes miss of a coordinate, `distortion`.
static double rounding_error(naive_random *random, unsigned bits, const float *values, double distortion) {
  enum { LANES = 64, STEPS = 128, ROWS = 8 };
  static uint8_t codes[LANES * STEPS], matrix[LANES * STEPS];
  static float factors[ROWS * STEPS], got[ROWS * LANES];
  const double middle = ((1u << bits) - 1) / 2.0;
  double missed = 0, factor_squares = 0;
  for (size_t i = 0; i < LANES * STEPS; i++) codes[i] = (uint8_t)naive_below(random, 1u << bits);
  for (size_t i = 0; i < ROWS * STEPS; i++) {
    factors[i] = (float)naive_gaussian(random);
    factor_squares += (double)factors[i] * (double)factors[i];
  }
  qkv_mix_pack(codes, LANES, STEPS, bits, matrix);
  memset(got, 0, sizeof got);
  const qkv_code_matrix m = {.codes = matrix, .bits = bits, .lanes = LANES, .steps = STEPS, .values = values};
  qkv_mix_integer(&m, factors, ROWS, got, LANES);
  for (size_t i = 0; i < (size_t)ROWS * LANES; i++) {
    double sum = 0;
    for (size_t s = 0; s < STEPS; s++) {
      const uint8_t code = codes[i % LANES * STEPS + s];
      sum += (double)factors[i / LANES * STEPS + s] * (values == NULL ? code - middle : (double)values[code]);
    }
    missed += ((double)got[i] - sum) * ((double)got[i] - sum);
  }
  return missed / (factor_squares * LANES * distortion);
}

// Of evenly spaced levels, whose codes miss a twelfth; and of the codebook for N(0, 1) of four bits.
static void rounding_adds_little_to_the_codes_error(void **state) {
  (void)state;
  static const float values[] = {-2.7326f, -2.0690f, -1.6181f, -1.2562f, -0.9424f, -0.6568f, -0.3881f, -0.1284f,
                                 0.1284f,  0.3881f,  0.6568f,  0.9424f,  1.2562f,  1.6181f,  2.0690f,  2.7326f};
  naive_random random = {4};
  for (unsigned bits = 1; bits <= QKV_MIX_INTEGER_BITS; bits++) {
    const double even = rounding_error(&random, bits, NULL, 1.0 / 12);
    if (even > 0.02) fail_msg("%u bits: rounding adds %g of the codes' error", bits, even);
  }
  const double table = rounding_error(&random, 4, values, 0.0095);
  if (table > 0.025 || table < 0.001) fail_msg("rounding adds %g of the codes' error", table);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(codes_lie_as_drawn),
      cmocka_unit_test(sums_are_those_of_the_codes),
      cmocka_unit_test(every_version_gives_the_same_bits),
      cmocka_unit_test(every_version_in_whole_numbers_gives_the_same_bits),
      cmocka_unit_test(rounding_adds_little_to_the_codes_error),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
