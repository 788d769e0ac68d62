#include "client/worker/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm/"

static void test_windows(void **state) {
  (void)state;
  // floor(i (len - 1025) / 15), as the protocol has it.
  assert_int_equal(qkvi_text_window(42550, 1024, 16, 0), 0);
  assert_int_equal(qkvi_text_window(42550, 1024, 16, 1), 2768);
  assert_int_equal(qkvi_text_window(42550, 1024, 16, 7), 19378);
  assert_int_equal(qkvi_text_window(42550, 1024, 16, 15), 42550 - 1025);
  assert_int_equal(qkvi_text_window(1025, 1024, 16, 15), 0);
  assert_int_equal(qkvi_text_window(42550, 1024, 1, 0), 0);
}

static void test_files(void **state) {
  (void)state;
  uint8_t *data = NULL;
  int64_t bytes = 0;
  qkv_error error = {0};
  assert_int_equal(qkvi_text_read(DATA "prompt.txt", &data, &bytes, &error), QKV_OK);
  assert_int_equal(bytes, 512);
  free(data);
  assert_int_equal(qkvi_text_read(DATA "no.txt", &data, &bytes, &error), QKV_NOT_FOUND);
  assert_null(data);
  assert_non_null(strstr(error.text, "no.txt"));
  assert_int_equal(qkvi_text_read("/dev/null", &data, &bytes, &error), QKV_INVALID_ARGUMENT);
  assert_null(data);
}

static void test_tokens(void **state) {
  (void)state;
  qkvi_lm lm = {.tokenizer = qkvi_tokenizer_bytes()};
  int32_t *tokens = NULL;
  int64_t count = 0;
  qkv_error error = {0};
  assert_int_equal(qkvi_text_tokens(&lm, DATA "prompt.txt", &tokens, &count, &error), QKV_OK);
  assert_int_equal(count, 512);
  for (int64_t i = 0; i < count; i++) assert_true(tokens[i] >= 0 && tokens[i] < 128);
  free(tokens);
  assert_int_equal(qkvi_text_tokens(&lm, DATA "no.txt", &tokens, &count, &error), QKV_NOT_FOUND);
  assert_null(tokens);
  qkvi_tokenizer_destroy(&lm.tokenizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_windows), cmocka_unit_test(test_files),
                                     cmocka_unit_test(test_tokens)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
