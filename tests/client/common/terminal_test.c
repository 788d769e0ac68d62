#include "client/common/terminal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_bytes(void **state) {
  (void)state;
  static const struct {
    uint64_t bytes;
    const char *text;
  } cases[] = {
      {0, "0 B"},
      {1023, "1023 B"},
      {1024, "1.0 KiB"},
      {1536, "1.5 KiB"},
      {1048575, "1.0 MiB"},
      {(uint64_t)5 << 30, "5.0 GiB"},
      {UINT64_MAX, "16.0 EiB"},
  };
  char text[QKV_HUMAN_MAX];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_string_equal(qkv_human_bytes(cases[i].bytes, text), cases[i].text);
  }
}

static void test_durations(void **state) {
  (void)state;
  static const struct {
    uint64_t ms;
    const char *text;
  } cases[] = {
      {0, "0 ms"},
      {999, "999 ms"},
      {1000, "1.0 s"},
      {59999, "59.9 s"},
      {303000, "5 min 03 s"},
      {7500000, "2 h 05 min"},
      {273600000, "3 d 04 h"},
      {UINT64_MAX, "213503982334 d 14 h"},
  };
  char text[QKV_HUMAN_MAX];
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_string_equal(qkv_human_duration(cases[i].ms, text), cases[i].text);
  }
}

// Numbers to the right, texts to the left, nothing behind the last text; a row that is not full stays out.
static void test_table(void **state) {
  (void)state;
  static const char *const cells[] = {"NAME", "ROWS", "DTYPE", "a", "100", "fp16", "longer", "7", "bf16", "half"};
  qkv_table *table = qkv_table_create(3);
  for (size_t i = 0; i < sizeof cells / sizeof *cells; i++) qkv_table_cell(table, "%s", cells[i]);
  char *printed = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&printed, &size);
  qkv_table_print(table, out);
  (void)fclose(out);
  qkv_table_destroy(&table);
  assert_null(table);
  assert_string_equal(printed,
                      "NAME    ROWS  DTYPE\n"
                      "a        100  fp16\n"
                      "longer     7  bf16\n");
  free(printed);
}

static void test_progress_is_quiet_without_a_terminal(void **state) {
  (void)state;
  qkv_progress progress;
  qkv_progress_start(&progress, "working", 10);
  progress.terminal = false;
  progress.started_ms -= 5000;
  qkv_progress_add(&progress, 4);
  qkv_progress_add(&progress, 4);
  assert_false(progress.visible);
  assert_int_equal(progress.done, 8);
  qkv_progress_end(&progress);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bytes),
      cmocka_unit_test(test_durations),
      cmocka_unit_test(test_table),
      cmocka_unit_test(test_progress_is_quiet_without_a_terminal),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
