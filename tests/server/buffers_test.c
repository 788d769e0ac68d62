// Buffers that are kept for copies of clients' rows.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "server/shared_memory/buffers.h"

enum { MIB = 1 << 20 };

static void the_smallest_that_fits_is_used_again(void **state) {
  (void)state;
  qkvi_buffers *buffers = qkvi_buffers_create(64 * MIB);
  qkvi_buffer small = qkvi_buffers_borrow(buffers, 1000), large = qkvi_buffers_borrow(buffers, 5 * MIB);
  uint8_t *const place = small.data, *const other = large.data;
  assert_true(small.bytes >= 1000 && large.bytes >= 5 * MIB);
  assert_int_equal((uintptr_t)place % 64, 0);
  memset(small.data, 1, small.bytes);
  memset(large.data, 1, large.bytes);
  qkvi_buffers_return(buffers, &large);
  qkvi_buffers_return(buffers, &small);
  assert_null(small.data);
  qkvi_buffers_return(buffers, &small);
  assert_true(qkvi_buffers_kept(buffers) >= 5 * MIB + 1000);
  small = qkvi_buffers_borrow(buffers, 500);
  assert_ptr_equal(small.data, place);
  large = qkvi_buffers_borrow(buffers, 600);
  assert_ptr_equal(large.data, other);
  assert_int_equal(qkvi_buffers_kept(buffers), 0);
  qkvi_buffers_return(buffers, &small);
  qkvi_buffers_return(buffers, &large);
  qkvi_buffers_destroy(&buffers);
  assert_null(buffers);
}

static void no_more_is_kept_than_may_be(void **state) {
  (void)state;
  enum { COUNT = 40 };
  qkvi_buffers *buffers = qkvi_buffers_create(3 * MIB);
  qkvi_buffer all[COUNT];
  for (size_t i = 0; i < COUNT; i++) all[i] = qkvi_buffers_borrow(buffers, i % 2 ? 1000 : MIB);
  for (size_t i = 0; i < COUNT; i++) {
    qkvi_buffers_return(buffers, &all[i]);
    assert_true(qkvi_buffers_kept(buffers) <= 3 * MIB);
  }
  assert_true(qkvi_buffers_kept(buffers) > 2 * MIB);
  qkvi_buffers_destroy(&buffers);
}

static void what_nobody_uses_goes(void **state) {
  (void)state;
  qkvi_buffers *buffers = qkvi_buffers_create(64 * MIB);
  qkvi_buffer a = qkvi_buffers_borrow(buffers, MIB), b = qkvi_buffers_borrow(buffers, MIB);
  qkvi_buffers_return(buffers, &a);
  qkvi_buffers_return(buffers, &b);
  qkvi_buffers_tend(buffers, 1000);
  qkvi_buffers_tend(buffers, 5999);
  assert_int_equal(qkvi_buffers_kept(buffers), 2 * MIB);
  a = qkvi_buffers_borrow(buffers, MIB);  // used: its time starts again
  qkvi_buffers_return(buffers, &a);
  qkvi_buffers_tend(buffers, 6000);
  qkvi_buffers_tend(buffers, 6001);
  assert_int_equal(qkvi_buffers_kept(buffers), MIB);
  qkvi_buffers_tend(buffers, 11000);
  assert_int_equal(qkvi_buffers_kept(buffers), 0);
  qkvi_buffers_destroy(&buffers);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_smallest_that_fits_is_used_again),
      cmocka_unit_test(no_more_is_kept_than_may_be),
      cmocka_unit_test(what_nobody_uses_goes),
  };
  return cmocka_run_group_tests_name("server/buffers", tests, NULL, NULL);
}
