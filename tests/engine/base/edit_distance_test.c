#include "engine/base/edit_distance.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void test_distances(void **state) {
  (void)state;
  static const struct {
    const char *a, *b;
    size_t edits;
  } cases[] = {
      {"", "", 0},        {"", "load", 4},      {"load", "load", 0},      {"laod", "load", 1},
      {"lod", "load", 1}, {"loads", "load", 1}, {"lead", "load", 1},      {"fetch", "load", 5},
      {"ab", "ba", 1},    {"abc", "cab", 2},    {"kitten", "sitting", 3},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(qkv_edit_distance(cases[i].a, cases[i].b), cases[i].edits);
    assert_int_equal(qkv_edit_distance(cases[i].b, cases[i].a), cases[i].edits);
  }
}

static void test_long_words(void **state) {
  (void)state;
  char word[5000];
  memset(word, 'd', sizeof word);
  word[sizeof word - 1] = '\0';
  assert_int_equal(qkv_edit_distance(word, word), 0);
  assert_int_equal(qkv_edit_distance(word, ""), 64);
  assert_int_equal(qkv_edit_distance("d", word), 63);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_distances), cmocka_unit_test(test_long_words)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
