#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/rope.h"
#include "naive.h"

enum { WIDTH = 16, PAIRS = WIDTH / 2, DIM = 24 };

typedef struct rope_case {
  qkv_rope rope;
  uint64_t position;
  double frequency[PAIRS];  // from the published formulas, computed elsewhere
  double factor;            // on cosines and sines
} rope_case;

static const rope_case cases[] = {
    {{.theta = 10000},
     100000,
     {1, 0.31622776601683794, 0.10000000000000001, 0.031622776601683791, 0.01, 0.0031622776601683794, 0.001,
      0.00031622776601683794},
     1},
    {{.theta = 10000, .scaling = QKV_ROPE_LINEAR, .factor = 4},
     100000,
     {0.25, 0.079056941504209485, 0.025000000000000001, 0.0079056941504209478, 0.0025000000000000001,
      0.00079056941504209485, 0.00025000000000000001, 7.9056941504209485e-05},
     1},
    {{.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 4, .original_max_position = 2048},
     100,
     {1, 0.31622776601683794, 0.10000000000000001, 0.031622776601683791, 0.01, 0.0031622776601683794, 0.001,
      0.00031622776601683794},
     1},
    {{.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 4, .original_max_position = 2048},
     8191,
     {1, 0.21921245982043139, 0.048054102540524245, 0.01053405802237156, 0.0023091967709752185,
      0.00050620470437487495, 0.00011096637841869062, 2.4325212770526002e-05},
     1},
    {{.theta = 10000, .scaling = QKV_ROPE_YARN, .factor = 8, .original_max_position = 4096},
     100000,
     {1, 0.31622776601683794, 0.10000000000000001, 0.024705294220065462, 0.0056249999999999998, 0.0010870329456828805,
      0.000125, 3.9528470752104742e-05},
     1.2079441541679836},
    {{.theta = 1000000,
      .scaling = QKV_ROPE_YARN,
      .factor = 16,
      .original_max_position = 32768,
      .beta_fast = 16,
      .beta_slow = 2,
      .attention_factor = 0.5},
     1000000,
     {1, 0.17782794100389229, 0.031622776601683791, 0.005623413251903491, 0.00053125000000000004,
      1.1114246312743267e-05, 1.9764235376052372e-06, 3.514633282439682e-07},
     0.5},
    {{.theta = 500000, .scaling = QKV_ROPE_LLAMA3, .factor = 8, .original_max_position = 8192},
     1000000,
     {1, 0.19392274474868576, 0.037606030930863933, 0.0072926647372171093, 0.00052484616099295468,
      3.4281021959525912e-05, 6.6478698711812354e-06, 1.2891731721515574e-06},
     1},
    {{.theta = 500000,
      .scaling = QKV_ROPE_LLAMA3,
      .factor = 32,
      .original_max_position = 100,
      .low_freq_factor = 1,
      .high_freq_factor = 4},
     1000000,
     {1, 0.13671082142134672, 0.0011751884665894979, 0.00022789577303803467, 4.419417382415922e-05,
      8.5702554898814781e-06, 1.6619674677953088e-06, 3.2229329303788936e-07},
     1},
};
enum { CASES = sizeof cases / sizeof *cases };

static qkv_rope resolved(const qkv_rope *rope, bool interleaved) {
  qkv_rope copy = *rope;
  copy.width = WIDTH;
  copy.interleaved = interleaved;
  assert_int_equal(qkv_rope_resolve(&copy, DIM, NULL), QKV_OK);
  return copy;
}

static void rotates_by_the_published_frequencies(void **state) {
  (void)state;
  for (size_t i = 0; i < 2 * CASES; i++) {
    const rope_case *test = &cases[i / 2];
    const bool interleaved = i % 2;
    const qkv_rope rope = resolved(&test->rope, interleaved);
    float row[DIM];
    for (size_t c = 0; c < DIM; c++) row[c] = (float)c + 1;
    qkv_rope_forward(&rope, row, test->position);
    for (size_t pair = 0; pair < PAIRS; pair++) {
      const size_t first = interleaved ? 2 * pair : pair, second = interleaved ? first + 1 : pair + PAIRS;
      const double angle = (double)test->position * test->frequency[pair];
      const double a = (double)first + 1, b = (double)second + 1;
      assert_true(fabs(row[first] - test->factor * (a * cos(angle) - b * sin(angle))) < 1e-5);
      assert_true(fabs(row[second] - test->factor * (a * sin(angle) + b * cos(angle))) < 1e-5);
    }
    for (size_t c = WIDTH; c < DIM; c++) assert_true(row[c] == (float)c + 1);
  }
}

static void inverse_takes_it_back(void **state) {
  (void)state;
  naive_random random = {1};
  for (size_t i = 0; i < 2 * CASES; i++) {
    const qkv_rope rope = resolved(&cases[i / 2].rope, i % 2);
    for (int round = 0; round < 50; round++) {
      float row[DIM], turned[DIM];
      for (size_t c = 0; c < DIM; c++) row[c] = turned[c] = (float)naive_gaussian(&random);
      const uint64_t position = naive_next(&random) >> (24 + round % 32);
      qkv_rope_forward(&rope, turned, position);
      qkv_rope_inverse(&rope, turned, position);
      for (size_t c = 0; c < DIM; c++) assert_true(fabsf(row[c] - turned[c]) < 2e-6f);
    }
  }
}

static double norm(const float *row) {
  double sum = 0;
  for (size_t c = 0; c < WIDTH; c++) sum += (double)row[c] * row[c];
  return sqrt(sum);
}

// Lengths are kept (times the attention factor), and q.k depends on the distance alone. Not so for dynamic NTK
// beyond the trained length, whose base depends on the position.
static void products_depend_on_the_distance(void **state) {
  (void)state;
  naive_random random = {2};
  for (size_t i = 0; i < 2 * CASES; i++) {
    const rope_case *test = &cases[i / 2];
    const qkv_rope rope = resolved(&test->rope, i % 2);
    float q[DIM], k[DIM];
    for (size_t c = 0; c < DIM; c++) q[c] = (float)naive_gaussian(&random), k[c] = (float)naive_gaussian(&random);
    double first = 0;
    for (uint64_t at = 0; at < 1900; at += 190) {
      float turned_q[DIM], turned_k[DIM];
      memcpy(turned_q, q, sizeof q);
      memcpy(turned_k, k, sizeof k);
      qkv_rope_forward(&rope, turned_q, at + 131);
      qkv_rope_forward(&rope, turned_k, at);
      assert_true(fabs(norm(turned_k) - test->factor * norm(k)) < 1e-5);
      double product = 0;
      for (size_t c = 0; c < WIDTH; c++) product += (double)turned_q[c] * turned_k[c];
      if (at == 0) first = product;
      assert_true(fabs(product - first) < 1e-5);
    }
  }
}

static void without_rope_rows_stay(void **state) {
  (void)state;
  qkv_rope rope = {.theta = 0, .width = 7, .factor = -1};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  rope.width = 0;
  float row[DIM], same[DIM];
  for (size_t c = 0; c < DIM; c++) row[c] = same[c] = (float)c - 5;
  qkv_rope_forward(&rope, row, 12345);
  assert_memory_equal(row, same, sizeof row);
  qkv_rope_inverse(&rope, row, 12345);
  assert_memory_equal(row, same, sizeof row);
}

static void defaults_are_filled_in(void **state) {
  (void)state;
  qkv_rope rope = {.theta = 10000, .scaling = QKV_ROPE_YARN, .factor = 8, .original_max_position = 4096};
  assert_int_equal(qkv_rope_resolve(&rope, 128, NULL), QKV_OK);
  assert_int_equal(rope.width, 128);
  assert_true(rope.beta_fast == 32 && rope.beta_slow == 1);
  assert_true(fabs(rope.attention_factor - 1.2079441541679836) < 1e-15);
  rope = (qkv_rope){.theta = 10000, .scaling = QKV_ROPE_LLAMA3, .factor = 8, .original_max_position = 4096};
  assert_int_equal(qkv_rope_resolve(&rope, 64, NULL), QKV_OK);
  assert_true(rope.low_freq_factor == 1 && rope.high_freq_factor == 4);
}

static void limits_are_named(void **state) {
  (void)state;
  static const struct {
    qkv_rope rope;
    const char *text;
  } bad[] = {
      {{.theta = 10000, .width = 130}, "rope.width is 130, at most key_dim 128"},
      {{.theta = 10000, .width = 63}, "rope.width is 63, must be even"},
      {{.theta = 1}, "rope.theta is 1, must be above 1 and at most 1e+12"},
      {{.theta = -3}, "rope.theta is -3, must be above 1 and at most 1e+12"},
      {{.theta = INFINITY}, "rope.theta is inf, must be above 1 and at most 1e+12"},
      {{.theta = NAN}, "rope.theta is nan, must be above 1 and at most 1e+12"},
      {{.theta = 1e300}, "rope.theta is 1e+300, must be above 1 and at most 1e+12"},
      {{.theta = 100, .scaling = QKV_ROPE_LINEAR}, "rope.factor is 0, allowed are 1 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_LINEAR, .factor = 0.5}, "rope.factor is 0.5, allowed are 1 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_LINEAR, .factor = 1e300}, "rope.factor is 1e+300, allowed are 1 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_LINEAR, .factor = NAN}, "rope.factor is nan, allowed are 1 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_DYNAMIC, .factor = 2},
       "rope.original_max_position is 0, allowed are 1 to 9007199254740992"},
      {{.theta = 100, .scaling = QKV_ROPE_DYNAMIC, .factor = 2, .original_max_position = UINT64_MAX},
       "rope.original_max_position is 18446744073709551615, allowed are 1 to 9007199254740992"},
      {{.theta = 100, .scaling = QKV_ROPE_YARN, .factor = 2, .original_max_position = 9, .beta_slow = -1},
       "rope.beta_slow is -1, allowed are 1e-06 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_YARN, .factor = 2, .original_max_position = 9, .beta_fast = 0.5},
       "rope.beta_fast is 0.5, allowed are 1 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_YARN, .factor = 2, .original_max_position = 9, .attention_factor = -1},
       "rope.attention_factor is -1, allowed are 1e-06 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_YARN, .factor = 2, .original_max_position = 9, .attention_factor = 1e-320},
       "rope.attention_factor is 9.99989e-321, allowed are 1e-06 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_LLAMA3, .factor = 2, .original_max_position = 9, .low_freq_factor = 4},
       "rope.high_freq_factor is 4, must be above low_freq_factor 4"},
      {{.theta = 100, .scaling = QKV_ROPE_LLAMA3, .factor = 2, .original_max_position = 9, .low_freq_factor = 1e-9},
       "rope.low_freq_factor is 1e-09, allowed are 1e-06 to 1e+06"},
      {{.theta = 100, .scaling = QKV_ROPE_LLAMA3, .factor = 2, .original_max_position = 9, .high_freq_factor = 1e7},
       "rope.high_freq_factor is 1e+07, allowed are 1e-06 to 1e+06"},
      {{.theta = 100, .scaling = (qkv_rope_scaling)9}, "rope.scaling is 9, known are 0 to 4"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    qkv_rope rope = bad[i].rope;
    qkv_error error = {0};
    assert_int_equal(qkv_rope_resolve(&rope, 128, &error), QKV_INVALID_ARGUMENT);
    assert_string_equal(error.text, bad[i].text);
  }
}

// Whatever the limits let through, rows stay finite at every position.
static void extremes_stay_finite(void **state) {
  (void)state;
  static const double thetas[] = {1 + 1e-15, QKV_ROPE_THETA_MAX}, factors[] = {1, QKV_ROPE_FACTOR_MAX};
  static const double small_or_large[] = {QKV_ROPE_FACTOR_MIN, QKV_ROPE_FACTOR_MAX};
  static const uint64_t trained[] = {1, QKV_ROPE_TRAINED_MAX}, positions[] = {0, 1, 2048, QKV_ROPE_TRAINED_MAX};
  for (unsigned i = 0; i < 5 << 5; i++) {
    const double edge = small_or_large[i >> 4 & 1];
    qkv_rope rope = {.theta = thetas[i & 1],
                     .width = i & 8 ? 2 : WIDTH,
                     .scaling = (qkv_rope_scaling)(i >> 5),
                     .factor = factors[i >> 1 & 1],
                     .original_max_position = trained[i >> 2 & 1],
                     .low_freq_factor = QKV_ROPE_FACTOR_MIN,
                     .high_freq_factor = edge * 2 < QKV_ROPE_FACTOR_MAX ? edge * 2 : edge,
                     .beta_fast = edge,
                     .beta_slow = QKV_ROPE_FACTOR_MIN,
                     .attention_factor = edge};
    assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
    for (size_t p = 0; p < sizeof positions / sizeof *positions; p++) {
      float row[DIM];
      for (size_t c = 0; c < DIM; c++) row[c] = c % 2 ? -32768 : 32768;
      qkv_rope_forward(&rope, row, positions[p]);
      for (size_t c = 0; c < DIM; c++) assert_true(isfinite(row[c]));
      qkv_rope_inverse(&rope, row, positions[p]);
      for (size_t c = 0; c < DIM; c++) assert_true(isfinite(row[c]));
    }
  }
}

// Up to the trained length the base is theta itself, whatever the factor.
static void dynamic_ntk_starts_at_theta(void **state) {
  (void)state;
  qkv_rope rope = {.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 1e6, .original_max_position = 3000001};
  qkv_rope plain = {.theta = 10000};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  assert_int_equal(qkv_rope_resolve(&plain, DIM, NULL), QKV_OK);
  float row[DIM], expected[DIM];
  for (size_t c = 0; c < DIM; c++) row[c] = expected[c] = (float)c + 1;
  qkv_rope_forward(&rope, row, 3000000);
  qkv_rope_forward(&plain, expected, 3000000);
  assert_memory_equal(row, expected, sizeof row);
}

static void what_a_scaling_does_not_use_is_cleared(void **state) {
  (void)state;
  for (qkv_rope_scaling scaling = QKV_ROPE_NONE; scaling <= QKV_ROPE_LLAMA3; scaling++) {
    const bool scaled = scaling != QKV_ROPE_NONE, trained = scaling >= QKV_ROPE_DYNAMIC;
    const bool yarn = scaling == QKV_ROPE_YARN, llama3 = scaling == QKV_ROPE_LLAMA3;
    qkv_rope rope = {.theta = 100,
                     .scaling = scaling,
                     .factor = scaled ? 2 : NAN,
                     .original_max_position = 9,
                     .low_freq_factor = llama3 ? 2 : NAN,
                     .high_freq_factor = llama3 ? 8 : NAN,
                     .beta_fast = yarn ? 8 : NAN,
                     .beta_slow = yarn ? 2 : NAN,
                     .attention_factor = yarn ? 2 : NAN};
    assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
    assert_true(rope.factor == (scaled ? 2 : 0) && rope.original_max_position == (trained ? 9 : 0));
    assert_true(rope.low_freq_factor == (llama3 ? 2 : 0) && rope.high_freq_factor == (llama3 ? 8 : 0));
    assert_true(rope.beta_fast == (yarn ? 8 : 0) && rope.beta_slow == (yarn ? 2 : 0));
    assert_true(rope.attention_factor == (yarn ? 2 : 0));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rotates_by_the_published_frequencies),
      cmocka_unit_test(inverse_takes_it_back),
      cmocka_unit_test(products_depend_on_the_distance),
      cmocka_unit_test(without_rope_rows_stay),
      cmocka_unit_test(defaults_are_filled_in),
      cmocka_unit_test(limits_are_named),
      cmocka_unit_test(extremes_stay_finite),
      cmocka_unit_test(dynamic_ntk_starts_at_theta),
      cmocka_unit_test(what_a_scaling_does_not_use_is_cleared),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
