#include "engine/base/tensor.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint16_t narrow(qkv_dtype dtype, float value) {
  uint16_t out = 0;
  qkv_from_float(dtype, &value, &out, 1);
  return out;
}

static void test_dtypes(void **state) {
  (void)state;
  static const char *const names[] = {"none", "fp32", "fp16", "bf16"};
  static const size_t sizes[] = {0, 4, 2, 2};
  for (int i = 0; i < 4; i++) {
    assert_string_equal(qkv_dtype_name((qkv_dtype)i), names[i]);
    assert_int_equal(qkv_dtype_size((qkv_dtype)i), sizes[i]);
    qkv_dtype parsed = QKV_DTYPE_NONE;
    assert_int_equal(qkv_dtype_parse(names[i], &parsed), i == 0 ? QKV_INVALID_ARGUMENT : QKV_OK);
    assert_int_equal(parsed, i);
  }
  assert_int_equal(qkv_dtype_size((qkv_dtype)77), 0);
  assert_string_equal(qkv_dtype_name((qkv_dtype)-1), "none");
}

// What a half means, from the definition.
static double half_meaning(uint16_t half) {
  int exponent = half >> 10 & 31;
  int fraction = half & 1023;
  double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) magnitude = fraction == 0 ? INFINITY : NAN;
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

static void test_all_halves(void **state) {
  (void)state;
  uint16_t *halves = malloc(65536 * sizeof *halves);
  uint16_t *back = malloc(65536 * sizeof *back);
  float *floats = malloc(65536 * sizeof *floats);
  for (int i = 0; i < 65536; i++) halves[i] = (uint16_t)i;
  qkv_to_float(QKV_FP16, halves, floats, 65536);
  qkv_from_float(QKV_FP16, floats, back, 65536);
  for (int i = 0; i < 65536; i++) {
    double meaning = half_meaning((uint16_t)i);
    assert_int_equal(signbit(floats[i]) != 0, i >> 15);
    if (isnan(meaning)) {
      assert_true(isnan(floats[i]));
      assert_int_equal(back[i], i | 0x200);  // made quiet
    } else {
      assert_true(floats[i] == (float)meaning && (double)floats[i] == meaning);
      assert_int_equal(back[i], i);
    }
  }
  free(halves);
  free(back);
  free(floats);
}

static void test_all_bf16s(void **state) {
  (void)state;
  for (int i = 0; i < 65536; i++) {
    uint16_t upper = (uint16_t)i;
    float value = 0;
    qkv_to_float(QKV_BF16, &upper, &value, 1);
    assert_int_equal(bits_of(value), (uint32_t)i << 16);
    assert_int_equal(narrow(QKV_BF16, value), isnan(value) ? i | 0x40 : i);
  }
}

// Between each two neighbouring halves: the middle goes to the even one, its neighbours to theirs.
static void test_half_rounding(void **state) {
  (void)state;
  for (int i = 0; i < 0x7c00; i++) {
    double low = half_meaning((uint16_t)i);
    double high = i == 0x7bff ? 65536.0 : half_meaning((uint16_t)(i + 1));  // infinity begins at 65520
    float middle = (float)((low + high) / 2);
    assert_true((double)middle == (low + high) / 2);
    int even = (i & 1) == 0 ? i : i + 1;
    assert_int_equal(narrow(QKV_FP16, middle), even);
    assert_int_equal(narrow(QKV_FP16, nextafterf(middle, 0)), i);
    assert_int_equal(narrow(QKV_FP16, nextafterf(middle, INFINITY)), i + 1);
    assert_int_equal(narrow(QKV_FP16, -middle), 0x8000 | even);
  }
}

static void test_half_extremes(void **state) {
  (void)state;
  assert_int_equal(narrow(QKV_FP16, 65519.996F), 0x7bff);
  assert_int_equal(narrow(QKV_FP16, 65520.0F), 0x7c00);
  assert_int_equal(narrow(QKV_FP16, 3.4e38F), 0x7c00);
  assert_int_equal(narrow(QKV_FP16, -INFINITY), 0xfc00);
  assert_int_equal(narrow(QKV_FP16, 0x1p-25F), 0);
  assert_int_equal(narrow(QKV_FP16, 0x1.000002p-25F), 1);
  assert_int_equal(narrow(QKV_FP16, 0x1p-149F), 0);
  assert_int_equal(narrow(QKV_FP16, -0.0F), 0x8000);
  assert_int_equal(narrow(QKV_FP16, float_of(0x7f800001)), 0x7e00);  // a NaN whose kept bits are 0
  assert_int_equal(narrow(QKV_FP16, float_of(0xffffffff)), 0xffff);
}

static void test_bf16_rounding(void **state) {
  (void)state;
  for (uint32_t i = 0; i < 0x7f80; i++) {
    uint32_t even = (i & 1) == 0 ? i : i + 1;
    assert_int_equal(narrow(QKV_BF16, float_of(i << 16 | 0x7fff)), i);
    assert_int_equal(narrow(QKV_BF16, float_of(i << 16 | 0x8000)), even);
    assert_int_equal(narrow(QKV_BF16, float_of(i << 16 | 0x8001)), i + 1);
    assert_int_equal(narrow(QKV_BF16, float_of(0x80000000 | i << 16 | 0x8000)), 0x8000 | even);
  }
  assert_int_equal(narrow(QKV_BF16, float_of(0x7f7fffff)), 0x7f80);
  assert_int_equal(narrow(QKV_BF16, float_of(0x7f800001)), 0x7fc0);
  assert_int_equal(narrow(QKV_BF16, float_of(0xffffffff)), 0xffff);
}

// Odd counts at odd addresses, with guard bytes behind.
static void test_any_alignment(void **state) {
  (void)state;
  for (size_t n = 0; n < 40; n++) {
    for (int type = QKV_FP32; type <= QKV_BF16; type++) {
      uint8_t from[4 * 40 + 1];
      uint8_t to[4 * 40 + 2];
      uint8_t again[4 * 40 + 2];
      memset(to, 0xee, sizeof to);
      memset(again, 0xee, sizeof again);
      float values[40];
      for (size_t i = 0; i < n; i++) values[i] = (float)i - 7.5F;
      size_t size = n * qkv_dtype_size((qkv_dtype)type);
      memcpy(from + 1, values, n * sizeof values[0]);
      qkv_from_float((qkv_dtype)type, (const float *)(const void *)(from + 1), to + 1, n);
      assert_int_equal(to[1 + size], 0xee);
      qkv_to_float((qkv_dtype)type, to + 1, (float *)(void *)(again + 1), n);
      assert_memory_equal(again + 1, values, n * sizeof values[0]);
      assert_int_equal(again[1 + 4 * n], 0xee);
    }
  }
}

static void test_bytes_and_strides(void **state) {
  (void)state;
  int64_t dims[] = {5, 2, 8};
  int64_t strides[3];
  qkv_tensor_strides(QKV_FP16, 3, dims, strides);
  assert_int_equal(strides[0], 32);
  assert_int_equal(strides[1], 16);
  assert_int_equal(strides[2], 2);
  int64_t bytes = 0;
  assert_int_equal(qkv_tensor_bytes(QKV_FP16, 3, dims, &bytes), QKV_OK);
  assert_int_equal(bytes, 160);
  int64_t huge[] = {INT64_C(1) << 31, INT64_C(1) << 31, 1};
  assert_int_equal(qkv_tensor_bytes(QKV_FP32, 3, huge, &bytes), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_tensor_bytes(QKV_FP16, 3, huge, &bytes), QKV_INVALID_ARGUMENT);
  huge[2] = 0;
  assert_int_equal(qkv_tensor_bytes(QKV_DTYPE_NONE, 1, dims, &bytes), QKV_INVALID_ARGUMENT);
  dims[1] = -1;
  assert_int_equal(qkv_tensor_bytes(QKV_FP32, 2, dims, &bytes), QKV_INVALID_ARGUMENT);
}

static void assert_refused(const qkv_tensor *tensor, int rank, const char *text) {
  qkv_error error = {0};
  assert_int_equal(qkv_tensor_check(tensor, "k", rank, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, text);
}

static void test_check(void **state) {
  (void)state;
  uint8_t data[160];
  qkv_segment segment = {.data = data, .length = sizeof data};
  int64_t dims[] = {5, 2, 8};
  const qkv_tensor good = qkv_tensor_dense(QKV_FP16, 3, dims, &segment);
  assert_int_equal(qkv_tensor_check(&good, "k", 3, NULL), QKV_OK);

  qkv_tensor bad = good;
  bad.dtype = (qkv_dtype)7;
  assert_refused(&bad, 3, "k.dtype is 7, allowed are 1 (fp32), 2 (fp16) and 3 (bf16)");
  assert_refused(&good, 2, "k.dims has 3 entries, 2 are needed");
  bad = good;
  bad.dims[1] = 0;
  assert_refused(&bad, 3, "k.dims[1] is 0, at least 1");
  bad = good;
  bad.strides[0] = -4;
  assert_refused(&bad, 3, "k.strides[0] is -4, at least 0");
  bad = good;
  bad.strides[1] = 3;
  assert_refused(&bad, 3, "k.strides[1] is 3, a multiple of 2 (fp16) is needed");
  bad = good;
  bad.strides[2] = 4;
  assert_refused(&bad, 3, "k.strides[2] is 4, rows are contiguous: 2 is needed");
  bad = good;
  bad.data.length = 159;
  assert_refused(&bad, 3, "k.data is 159 bytes, its dims and strides reach 160");
  bad = good;
  bad.dims[0] = INT64_MAX / 2;
  assert_refused(&bad, 3, "k.dims are more than 9223372036854775807 bytes");
  bad = good;
  bad.strides[0] = INT64_MAX - 1;
  assert_refused(&bad, 3, "k.dims and strides reach beyond 9223372036854775807 bytes");
  bad.dims[0] = 2;
  assert_refused(&bad, 3, "k.dims and strides reach beyond 9223372036854775807 bytes");

  qkv_tensor repeated = good;  // a stride of 0 repeats a row
  repeated.strides[0] = 0;
  repeated.dims[0] = 1000;
  assert_int_equal(qkv_tensor_check(&repeated, "k", 3, NULL), QKV_OK);
}

// Rows of a strided tensor that lies in pieces, at every cut.
static void test_rows_across_segments(void **state) {
  (void)state;
  enum { TOKENS = 3, HEADS = 2, DIM = 4, PITCH = 2 * DIM + 2 };
  uint16_t halves[TOKENS * HEADS * PITCH / 2];
  float expected[sizeof halves / sizeof halves[0]];
  for (size_t i = 0; i < sizeof halves / sizeof halves[0]; i++) {
    expected[i] = (float)i + 0.5F;
    halves[i] = narrow(QKV_FP16, expected[i]);
  }
  uint8_t *bytes = (uint8_t *)halves;
  for (size_t cut = 0; cut <= sizeof halves; cut++) {
    qkv_segment segments[] = {{.data = bytes, .length = cut}, {.data = bytes + cut, .length = sizeof halves - cut}};
    qkv_tensor tensor = {.dtype = QKV_FP16,
                         .rank = 3,
                         .dims = {TOKENS, HEADS, DIM},
                         .strides = {(int64_t)HEADS * PITCH, PITCH, 2},
                         .data = qkv_bytes_of_all(segments, 2)};
    assert_int_equal(qkv_tensor_check(&tensor, "k", 3, NULL), QKV_OK);
    for (int64_t i = 0; i < TOKENS; i++) {
      for (int64_t j = 0; j < HEADS; j++) {
        size_t first = (size_t)(i * HEADS + j) * PITCH / 2;
        float row[DIM];
        uint16_t raw[DIM];
        qkv_tensor_row(&tensor, i, j, row);
        assert_memory_equal(row, expected + first, sizeof row);
        qkv_tensor_row_raw(&tensor, i, j, raw);
        assert_memory_equal(raw, halves + first, sizeof raw);
      }
    }
  }
}

static void test_long_row_in_pieces(void **state) {
  (void)state;
  enum { DIM = 3001 };
  static float values[2 * DIM];
  static float row[DIM];
  for (int i = 0; i < 2 * DIM; i++) values[i] = (float)i;
  uint8_t *bytes = (uint8_t *)values;
  qkv_segment segments[] = {{.data = bytes, .length = 4 * DIM + 4097},
                            {.data = bytes + 4 * DIM + 4097, .length = sizeof values - 4 * DIM - 4097}};
  qkv_tensor tensor = {
      .dtype = QKV_FP32, .rank = 2, .dims = {2, DIM}, .strides = {4 * DIM, 4}, .data = qkv_bytes_of_all(segments, 2)};
  qkv_tensor_row(&tensor, 1, 99, row);
  assert_memory_equal(row, values + DIM, sizeof row);
}

// With the processor's own conversions and without: the same bits, of any numbers and lengths.
// Each value alone, at each place of a row of rows.
static void test_within(void **state) {
  (void)state;
  enum { HEADS = 3, DIM = 7, ELEMENTS = HEADS * DIM };
  const qkv_dtype types[] = {QKV_FP16, QKV_BF16, QKV_FP32};
  for (size_t t = 0; t < 3; t++) {
    const size_t element = qkv_dtype_size(types[t]);
    uint8_t bytes[2 * ELEMENTS * 4 + 1];
    const qkv_segment segment = {.data = bytes + 1, .length = 2 * ELEMENTS * element};
    qkv_tensor tensor = qkv_tensor_dense(types[t], 3, (const int64_t[]){2, HEADS, DIM}, &segment);
    for (uint32_t pattern = 0; pattern < 65536; pattern++) {
      const uint32_t value = element == 2 ? pattern : pattern << 16 | (pattern & 1);
      float as_float;
      qkv_to_float(types[t], &value, &as_float, 1);
      const bool inside = fabsf(as_float) <= 32768;
      memset(bytes, 0, sizeof bytes);
      memcpy(bytes + 1 + (ELEMENTS + pattern % ELEMENTS) * element, &value, element);
      assert_true(qkv_tensor_within(&tensor, 0, 32768));
      assert_int_equal(qkv_tensor_within(&tensor, 1, 32768), inside);
    }
    // What does not lie in one piece is not looked at.
    memset(bytes, 0, sizeof bytes);
    assert_true(qkv_tensor_within(&tensor, 1, 32768));
    qkv_segment halves[] = {{.data = bytes + 1, .length = 2 * ELEMENTS * element - 3},
                            {.data = bytes + 2 * ELEMENTS * element - 2, .length = 3}};
    tensor.data = qkv_bytes_of_all(halves, 2);
    assert_true(qkv_tensor_within(&tensor, 0, 32768));
    assert_false(qkv_tensor_within(&tensor, 1, 32768));
    tensor.data = qkv_bytes_of(&segment);
    tensor.dims[0] = 1;
    tensor.strides[1] += (int64_t)element;
    assert_false(qkv_tensor_within(&tensor, 0, 32768));
  }
}

static void test_any_processor(void **state) {
  (void)state;
  enum { COUNT = 40000, ALL = 65536 };
  static uint16_t halves[ALL], narrowed[2][COUNT];
  static float widened[2][ALL];
  static uint32_t numbers[COUNT];
  uint64_t random = 1;
  for (int i = 0; i < ALL; i++) halves[i] = (uint16_t)i;
  for (int i = 0; i < COUNT; i++) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    numbers[i] = (uint32_t)(random >> 32);
    if (i % 3 == 0) numbers[i] = (numbers[i] & 0x8fffffff) | 0x38000000;  // about the limits of halves
  }
  for (size_t length = COUNT - 9; length <= COUNT; length++) {
    for (int i = 0; i < 2; i++) {
      qkv_tensor_setup(i == 0 ? 0 : UINT32_MAX);
      qkv_to_float(QKV_FP16, halves, widened[i], ALL);
      qkv_from_float(QKV_FP16, (const float *)numbers, narrowed[i], length);
    }
    assert_memory_equal(widened[0], widened[1], sizeof widened[0]);
    assert_memory_equal(narrowed[0], narrowed[1], length * sizeof *narrowed[0]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_dtypes),
                                     cmocka_unit_test(test_all_halves),
                                     cmocka_unit_test(test_all_bf16s),
                                     cmocka_unit_test(test_half_rounding),
                                     cmocka_unit_test(test_half_extremes),
                                     cmocka_unit_test(test_bf16_rounding),
                                     cmocka_unit_test(test_any_processor),
                                     cmocka_unit_test(test_within),
                                     cmocka_unit_test(test_any_alignment),
                                     cmocka_unit_test(test_bytes_and_strides),
                                     cmocka_unit_test(test_check),
                                     cmocka_unit_test(test_rows_across_segments),
                                     cmocka_unit_test(test_long_row_in_pieces)};
  qkv_tensor_setup(0);
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  qkv_tensor_setup(UINT32_MAX);
  return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
