#include "client/worker/merges.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void apply(qkvi_merges *merges, const int32_t *tokens, size_t count, const int32_t *expected, size_t left) {
  int32_t piece[16];
  assert_true(count <= sizeof piece / sizeof *piece);
  if (count > 0) memcpy(piece, tokens, count * sizeof *piece);
  assert_int_equal(qkvi_merges_apply(merges, piece, count), left);
  assert_memory_equal(piece, expected, left * sizeof *piece);
}

static void test_the_first_pair_before_others(void **state) {
  (void)state;
  // 2 3 is merged first, so that 1 2 finds no 2 any more.
  qkvi_merges *merges = qkvi_merges_create(3);
  qkvi_merges_add(merges, 2, 3, 10);
  qkvi_merges_add(merges, 1, 2, 11);
  qkvi_merges_add(merges, 1, 10, 12);
  apply(merges, (const int32_t[]){1, 2, 3}, 3, (const int32_t[]){12}, 1);
  apply(merges, (const int32_t[]){1, 2, 1, 2, 3}, 5, (const int32_t[]){11, 12}, 2);
  apply(merges, (const int32_t[]){3, 2, 1}, 3, (const int32_t[]){3, 2, 1}, 3);
  apply(merges, (const int32_t[]){2}, 1, (const int32_t[]){2}, 1);
  apply(merges, NULL, 0, NULL, 0);
  qkvi_merges_destroy(&merges);
  assert_null(merges);
}

static void test_of_equal_pairs_the_left_one(void **state) {
  (void)state;
  qkvi_merges *merges = qkvi_merges_create(2);
  qkvi_merges_add(merges, 1, 1, 10);
  qkvi_merges_add(merges, 1, 1, 11);  // is there already
  apply(merges, (const int32_t[]){1, 1, 1}, 3, (const int32_t[]){10, 1}, 2);
  apply(merges, (const int32_t[]){1, 1, 1, 1}, 4, (const int32_t[]){10, 10}, 2);
  qkvi_merges_destroy(&merges);
}

// Pairs of one token, of two of those, and so on: a long piece takes no longer than its length and its log.
static void test_a_long_piece(void **state) {
  (void)state;
  enum { LEVELS = 16, COUNT = 1 << LEVELS };
  qkvi_merges *merges = qkvi_merges_create(LEVELS);
  for (int32_t i = 0; i < LEVELS; i++) qkvi_merges_add(merges, i, i, i + 1);
  int32_t *piece = calloc(COUNT + 1, sizeof *piece);
  assert_non_null(piece);
  assert_int_equal(qkvi_merges_apply(merges, piece, COUNT + 1), 2);
  assert_int_equal(piece[0], LEVELS);
  assert_int_equal(piece[1], 0);
  free(piece);
  qkvi_merges_destroy(&merges);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_first_pair_before_others),
                                     cmocka_unit_test(test_of_equal_pairs_the_left_one),
                                     cmocka_unit_test(test_a_long_piece)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
