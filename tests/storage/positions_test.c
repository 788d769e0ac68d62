#include "storage/positions.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

enum { LAYERS = 5 };

static void test_equal_ones_take_no_memory(void **unused) {
  (void)unused;
  const uint64_t equal[LAYERS] = {70, 70, 70, 70, 70};
  qkvi_positions positions;
  qkvi_positions_init(&positions, equal, LAYERS);
  assert_null(positions.each);
  qkvi_positions_set(&positions, LAYERS, 3, 70);
  assert_null(positions.each);
  for (uint32_t i = 0; i < LAYERS; i++) {
    qkvi_positions_set(&positions, LAYERS, i, 30);
    qkvi_positions_pack(&positions, LAYERS);
    assert_true((positions.each == NULL) == (i == LAYERS - 1));
    for (uint32_t k = 0; k < LAYERS; k++) assert_int_equal(qkvi_positions_at(&positions, k), k <= i ? 30 : 70);
  }
  qkvi_positions_deinit(&positions);
}

static void test_others_are_kept(void **unused) {
  (void)unused;
  const uint64_t of[LAYERS] = {70, 70, 12, 70, 0};
  qkvi_positions positions;
  qkvi_positions_init(&positions, of, LAYERS);
  qkvi_positions_pack(&positions, LAYERS);
  for (uint32_t i = 0; i < LAYERS; i++) assert_int_equal(qkvi_positions_at(&positions, i), of[i]);
  qkvi_positions_deinit(&positions);
  qkvi_positions_init(&positions, NULL, 0);
  qkvi_positions_deinit(&positions);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_equal_ones_take_no_memory),
      cmocka_unit_test(test_others_are_kept),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
