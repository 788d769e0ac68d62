#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "client/cli/cli.h"

static void expect(const char *text, size_t count, const uint32_t *layers) {
  uint32_t chosen[8];
  size_t found = 0;
  qkv_error error = {0};
  assert_int_equal(qkvctl_parse_layers(text, 8, chosen, &found, &error), QKV_OK);
  assert_int_equal(found, count);
  assert_memory_equal(chosen, layers, count * sizeof *layers);
}

static void refuse(const char *text, const char *reason) {
  uint32_t chosen[8];
  size_t found = 0;
  qkv_error error = {0};
  assert_int_equal(qkvctl_parse_layers(text, 8, chosen, &found, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, reason);
}

static void test_lists(void **state) {
  (void)state;
  expect(NULL, 8, (uint32_t[]){0, 1, 2, 3, 4, 5, 6, 7});
  expect("3", 1, (uint32_t[]){3});
  expect("0,2-5", 5, (uint32_t[]){0, 2, 3, 4, 5});
  expect("7,1,1-2", 3, (uint32_t[]){1, 2, 7});
  expect("4-4", 1, (uint32_t[]){4});
}

static void test_refused(void **state) {
  (void)state;
  refuse("", "--layers is \"\", a list such as 0,2-5 is needed");
  refuse("1,", "--layers is \"1,\", a list such as 0,2-5 is needed");
  refuse("a", "--layers is \"a\", a list such as 0,2-5 is needed");
  refuse("3-1", "--layers is \"3-1\", a list such as 0,2-5 is needed");
  refuse("-1", "--layers is \"-1\", a list such as 0,2-5 is needed");
  refuse("1-2-3", "--layers is \"1-2-3\", a list such as 0,2-5 is needed");
  refuse("0-8", "--layers names layer 8, the session has 0 to 7");
  refuse("99999999999999999999999", "--layers names layer 18446744073709551615, the session has 0 to 7");
}

static void test_positions(void **state) {
  (void)state;
  uint64_t position = 0;
  qkv_error error = {0};
  assert_int_equal(qkvctl_parse_position("9223372036854775807", "POSITION", &position, &error), QKV_OK);
  assert_int_equal(position, INT64_MAX);
  static const char *const refused[] = {"", "-1", "+1", " 1", "1x", "9223372036854775808", "99999999999999999999"};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    qkv_error each = {0};
    assert_int_equal(qkvctl_parse_position(refused[i], "POSITION", &position, &each), QKV_INVALID_ARGUMENT);
  }
  assert_int_equal(qkvctl_parse_position("x", "POSITION", &position, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "POSITION is \"x\", a number from 0 on is needed");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_lists),
      cmocka_unit_test(test_refused),
      cmocka_unit_test(test_positions),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
