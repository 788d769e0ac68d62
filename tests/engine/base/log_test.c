#include "engine/base/log.h"

#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static char *text;
static size_t text_length;
static FILE *stream;

static int open_stream(void **state) {
  (void)state;
  stream = open_memstream(&text, &text_length);
  qkv_log_setup(stream, QKV_LOG_INFO);
  return stream == NULL || fflush(stream) != 0;  // sets text_length
}

static int close_stream(void **state) {
  (void)state;
  qkv_log_setup(NULL, QKV_LOG_INFO);
  (void)fclose(stream);
  free(text);
  return 0;
}

static void test_line(void **state) {
  (void)state;
  qkv_log(QKV_LOG_INFO, "listening", "{s:s, s:i}", "address", "a\"b\nc", "port", 7580);
  assert_int_equal(text[text_length - 1], '\n');
  assert_ptr_equal(strchr(text, '\n'), text + text_length - 1);
  // The time, then the rest exactly.
  struct tm when = {0};
  const char *millis = strptime(text, "{\"time\":\"%Y-%m-%dT%H:%M:%S.", &when);
  assert_non_null(millis);
  assert_int_equal(strspn(millis, "0123456789"), 3);
  time_t now = time(NULL);
  assert_in_range(timegm(&when), now - 60, now + 1);
  assert_string_equal(millis + 3,
                      "Z\","
                      "\"level\":\"info\",\"message\":\"listening\",\"address\":\"a\\\"b\\nc\",\"port\":7580}\n");
}

static void test_levels(void **state) {
  (void)state;
  qkv_log(QKV_LOG_DEBUG, "dropped", NULL);
  assert_int_equal(text_length, 0);
  qkv_log(QKV_LOG_WARN, "kept", NULL);
  assert_non_null(strstr(text, "\"level\":\"warn\",\"message\":\"kept\"}\n"));
  qkv_log_setup(stream, QKV_LOG_ERROR);
  size_t before = text_length;
  qkv_log(QKV_LOG_WARN, "dropped", NULL);
  assert_int_equal(text_length, before);

  qkv_log_level level = QKV_LOG_INFO;
  assert_int_equal(qkv_log_level_parse("debug", &level), QKV_OK);
  assert_int_equal(level, QKV_LOG_DEBUG);
  assert_int_equal(qkv_log_level_parse("loud", &level), QKV_INVALID_ARGUMENT);
}

static void test_bad_fields_keep_the_line(void **state) {
  (void)state;
  qkv_log(QKV_LOG_ERROR, "odd", "{s:s}", "name", "\xff\xfe");
  assert_non_null(strstr(text, "\"message\":\"odd\",\"log_error\":"));
}

static void *write_lines(void *context) {
  for (int i = 0; i < 200; i++) qkv_log(QKV_LOG_INFO, "tick", "{s:i, s:i}", "writer", *(int *)context, "i", i);
  return NULL;
}

static void test_lines_are_whole(void **state) {
  (void)state;
  pthread_t threads[4];
  int ids[4] = {0, 1, 2, 3};
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, write_lines, &ids[i]), 0);
  for (int i = 0; i < 4; i++) (void)pthread_join(threads[i], NULL);
  int next[4] = {0};
  int lines = 0;
  for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1, lines++) {
    json_t *object = json_loadb(line, (size_t)(end - line), 0, NULL);
    assert_non_null(object);
    int writer = (int)json_integer_value(json_object_get(object, "writer"));
    assert_int_equal(json_integer_value(json_object_get(object, "i")), next[writer]++);
    json_decref(object);
  }
  assert_int_equal(lines, 800);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_line, open_stream, close_stream),
      cmocka_unit_test_setup_teardown(test_levels, open_stream, close_stream),
      cmocka_unit_test_setup_teardown(test_bad_fields_keep_the_line, open_stream, close_stream),
      cmocka_unit_test_setup_teardown(test_lines_are_whole, open_stream, close_stream)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
