#include "engine/base/holes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void assert_valid(const qkvi_holes *holes) {
  const char *reason = qkvi_holes_validate(holes);
  if (reason != NULL) fail_msg("%s", reason);
}

static void the_first_that_fits(void **state) {
  (void)state;
  qkvi_holes holes = QKVI_HOLES_NONE;
  uint64_t at;
  assert_false(qkvi_holes_take(&holes, 1, &at));
  qkvi_holes_give(&holes, 100, 10);
  qkvi_holes_give(&holes, 300, 50);
  qkvi_holes_give(&holes, 200, 20);
  assert_int_equal(holes.count, 3);
  assert_true(qkvi_holes_take(&holes, 15, &at));
  assert_int_equal(at, 200);
  assert_true(qkvi_holes_take(&holes, 10, &at));
  assert_int_equal(at, 100);
  assert_false(qkvi_holes_take(&holes, 51, &at));
  assert_true(qkvi_holes_take(&holes, 50, &at));
  assert_int_equal(at, 300);
  assert_int_equal(holes.count, 1);
  assert_int_equal(holes.bytes, 5);
  qkvi_holes_deinit(&holes);
}

static void neighbours_become_one(void **state) {
  (void)state;
  for (int order = 0; order < 6; order++) {
    static const uint64_t orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    qkvi_holes holes = QKVI_HOLES_NONE;
    uint64_t at;
    for (size_t i = 0; i < 3; i++) qkvi_holes_give(&holes, 10 + 10 * orders[order][i], 10);
    assert_valid(&holes);
    assert_int_equal(holes.count, 1);
    assert_true(qkvi_holes_take(&holes, 30, &at));
    assert_int_equal(at, 10);
    assert_null(holes.root);
    qkvi_holes_deinit(&holes);
  }
}

enum { CELLS = 4096, STEPS = 20000, BLOCKS = 512 };

static uint64_t random_below(uint64_t *seed, uint64_t bound) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (*seed >> 33) % bound;
}

// Where a map of bytes has the first run of so many free ones; CELLS: nowhere.
static size_t first_run(const uint8_t *taken, size_t length) {
  size_t run = 0;
  for (size_t i = 0; i < CELLS; i++) {
    run = taken[i] ? 0 : run + 1;
    if (run == length) return i + 1 - length;
  }
  return CELLS;
}

typedef struct block {
  uint64_t at, bytes;
} block;

static void random_steps_are_those_of_a_map(void **state) {
  (void)state;
  uint64_t seed = 7;
  uint8_t *taken = calloc(CELLS, 1);
  block *blocks = calloc(BLOCKS, sizeof *blocks);
  size_t count = 0;
  assert_true(taken != NULL && blocks != NULL);
  qkvi_holes holes = QKVI_HOLES_NONE;
  qkvi_holes_give(&holes, 0, CELLS);
  for (int step = 0; step < STEPS; step++) {
    if (count < BLOCKS && random_below(&seed, 16) < (uint64_t)(step / 2000 % 2 ? 6 : 10)) {
      const uint64_t bytes = 1 + random_below(&seed, random_below(&seed, 8) == 0 ? 300 : 20);
      const size_t expected = first_run(taken, bytes);
      uint64_t at;
      assert_int_equal(qkvi_holes_take(&holes, bytes, &at), expected < CELLS);
      if (expected == CELLS) continue;
      assert_int_equal(at, expected);
      memset(taken + at, 1, bytes);
      blocks[count++] = (block){at, bytes};
    } else if (count > 0) {
      const size_t i = random_below(&seed, count);
      qkvi_holes_give(&holes, blocks[i].at, blocks[i].bytes);
      memset(taken + blocks[i].at, 0, blocks[i].bytes);
      blocks[i] = blocks[--count];
    }
    assert_valid(&holes);
  }
  while (count-- > 0) qkvi_holes_give(&holes, blocks[count].at, blocks[count].bytes);
  assert_int_equal(holes.count, 1);
  assert_int_equal(holes.bytes, CELLS);
  qkvi_holes_deinit(&holes);
  free(taken);
  free(blocks);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(the_first_that_fits), cmocka_unit_test(neighbours_become_one),
                                     cmocka_unit_test(random_steps_are_those_of_a_map)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
