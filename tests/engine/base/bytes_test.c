#include "engine/base/bytes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LENGTH 12

static void test_every_split(void **state) {
  (void)state;
  uint8_t text[LENGTH];
  for (int i = 0; i < LENGTH; i++) text[i] = (uint8_t)(i + 1);
  for (size_t a = 0; a <= LENGTH; a++) {
    for (size_t b = a; b <= LENGTH; b++) {
      qkv_segment segments[] = {{0},
                                {.data = text, .length = a},
                                {.data = text + a, .length = b - a},
                                {0},
                                {.data = text + b, .length = LENGTH - b},
                                {0}};
      qkv_bytes bytes = qkv_bytes_of_all(segments, 6);
      assert_int_equal(bytes.length, LENGTH);
      for (size_t offset = 0; offset <= LENGTH; offset++) {
        for (size_t length = 0; length <= LENGTH - offset; length++) {
          uint8_t out[LENGTH] = {0};
          qkv_bytes_copy(bytes, offset, length, out);
          assert_memory_equal(out, text + offset, length);
          qkv_bytes slice = qkv_bytes_slice(bytes, offset, length);
          assert_int_equal(slice.length, length);
          if (length > 0) assert_true(slice.offset < slice.segments[0].length);
          size_t half = length / 2;
          qkv_bytes_copy(slice, half, length - half, out);
          assert_memory_equal(out, text + offset + half, length - half);
          bool cut = (offset < a && a < offset + length) || (offset < b && b < offset + length);
          const uint8_t *direct = qkv_bytes_contiguous(bytes, offset, length);
          if (length == 0) {
            assert_non_null(direct);
          } else {
            assert_ptr_equal(direct, cut ? NULL : text + offset);
          }
        }
      }
    }
  }
}

// Many pieces of uneven size, read at random places and through slices of slices.
static void test_many_segments(void **state) {
  (void)state;
  enum { COUNT = 1000 };
  static uint8_t text[COUNT * 8];
  static qkv_segment segments[COUNT];
  size_t length = 0;
  for (size_t i = 0; i < COUNT; i++) {
    segments[i] = (qkv_segment){.data = text + length, .length = i * 5 % 8};
    length += segments[i].length;
  }
  for (size_t i = 0; i < length; i++) text[i] = (uint8_t)(i * 31 >> 3);
  qkv_bytes bytes = qkv_bytes_of_all(segments, COUNT);
  assert_int_equal(bytes.length, length);
  for (size_t i = 0; i < 20000; i++) {
    size_t begin = i * 7919 % length;
    size_t end = begin + i % (length - begin);
    qkv_bytes slice = qkv_bytes_slice(bytes, begin, end - begin);
    size_t inner = slice.length / 3;
    uint8_t out[40];
    size_t read = slice.length - inner < sizeof out ? slice.length - inner : sizeof out;
    qkv_bytes_copy(slice, inner, read, out);
    assert_memory_equal(out, text + begin + inner, read);
  }
}

static void test_empty(void **state) {
  (void)state;
  qkv_bytes none = qkv_bytes_of_all(NULL, 0);
  assert_int_equal(none.length, 0);
  qkv_segment segment = {0};
  assert_int_equal(qkv_bytes_of(&segment).length, 0);
  qkv_bytes_copy(none, 0, 0, NULL);
  assert_int_equal(qkv_bytes_slice(none, 0, 0).length, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_split), cmocka_unit_test(test_many_segments),
                                     cmocka_unit_test(test_empty)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
