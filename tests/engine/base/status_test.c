#include "engine/base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void test_names(void **state) {
  (void)state;
  assert_int_equal(QKV_OK, 0);
  assert_int_equal(QKV_UNAUTHENTICATED, 16);
  assert_string_equal(qkv_status_text(QKV_INVALID_ARGUMENT), "invalid argument");
  assert_string_equal(qkv_status_name(QKV_RESOURCE_EXHAUSTED), "RESOURCE_EXHAUSTED");
  assert_string_equal(qkv_status_text((qkv_status)99), "unknown status");
  assert_string_equal(qkv_status_name((qkv_status)2), "UNKNOWN");
}

static void test_first_error_is_kept(void **state) {
  (void)state;
  qkv_error error = {0};
  assert_int_equal(qkv_fail(&error, QKV_NOT_FOUND, "no session %s", "a"), QKV_NOT_FOUND);
  assert_int_equal(qkv_fail(&error, QKV_INTERNAL, "later"), QKV_INTERNAL);
  assert_int_equal(error.status, QKV_NOT_FOUND);
  assert_string_equal(error.text, "no session a");
  assert_int_equal(qkv_fail(NULL, QKV_INTERNAL, "nobody listens"), QKV_INTERNAL);
}

static void test_long_text_is_cut(void **state) {
  (void)state;
  char text[2 * QKV_ERROR_TEXT_MAX];
  memset(text, 'x', sizeof text);
  text[sizeof text - 1] = '\0';
  qkv_error error = {0};
  (void)qkv_fail(&error, QKV_INTERNAL, "%s", text);
  assert_int_equal(strlen(error.text), QKV_ERROR_TEXT_MAX - 1);
  assert_int_equal(qkv_error_prefix(&error, "items[%d].", 3), QKV_INTERNAL);
  assert_int_equal(strlen(error.text), QKV_ERROR_TEXT_MAX - 1);
  assert_memory_equal(error.text, "items[3].xxx", 12);
  (void)qkv_error_prefix(&error, "%s", text);
  assert_int_equal(strlen(error.text), QKV_ERROR_TEXT_MAX - 1);
  assert_null(strchr(error.text, 'i'));
}

static void test_prefix(void **state) {
  (void)state;
  qkv_error error = {0};
  (void)qkv_fail(&error, QKV_INVALID_ARGUMENT, "k.dims[1] is 3");
  assert_int_equal(qkv_error_prefix(&error, "items[%d].", 0), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_error_prefix(&error, "message 2: "), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "message 2: items[0].k.dims[1] is 3");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_names), cmocka_unit_test(test_first_error_is_kept),
                                     cmocka_unit_test(test_long_text_is_cut), cmocka_unit_test(test_prefix)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
