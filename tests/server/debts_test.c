// What a peer owes drains with time, is not less for a smaller debt, and is its own.
#include "server/rpc/debts.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/un.h>

#include <cmocka.h>

enum { POINTS_S = 1000 };
#define SECOND UINT64_C(1000000000)

static int32_t place_of(const char *text) {
  struct sockaddr_in old = {.sin_family = AF_INET};
  struct sockaddr_in6 address = {.sin6_family = AF_INET6};
  if (inet_pton(AF_INET, text, &old.sin_addr) == 1) return qkvi_debts_place((const struct sockaddr *)&old);
  assert_int_equal(inet_pton(AF_INET6, text, &address.sin6_addr), 1);
  return qkvi_debts_place((const struct sockaddr *)&address);
}

static void test_places(void **state) {
  (void)state;
  const struct sockaddr_un local = {.sun_family = AF_UNIX};
  assert_int_equal(qkvi_debts_place((const struct sockaddr *)&local), -1);
  assert_int_equal(place_of("192.0.2.1"), place_of("::ffff:192.0.2.1"));
  assert_int_equal(place_of("2001:db8::1"), place_of("2001:db8::ffff:1"));
  int others = 0;  // a hash may make some of them one
  for (int i = 1; i < 100; i++) {
    char text[32];
    (void)snprintf(text, sizeof text, "192.0.2.%d", i + 1);
    others += place_of(text) != place_of("192.0.2.1");
  }
  assert_true(others > 90);
}

static void test_draining(void **state) {
  (void)state;
  const int32_t place = place_of("198.51.100.1");
  assert_int_equal(qkvi_debts_owed(place, POINTS_S, SECOND), 0);
  qkvi_debts_raise(place, 4000, POINTS_S, SECOND);
  assert_int_equal(qkvi_debts_owed(place, POINTS_S, SECOND), 4000);
  qkvi_debts_raise(place, 100, POINTS_S, SECOND);
  assert_int_equal(qkvi_debts_owed(place, POINTS_S, SECOND), 4000);
  assert_int_equal(qkvi_debts_owed(place, POINTS_S, 2 * SECOND), 3000);
  qkvi_debts_raise(place, 3500, POINTS_S, 2 * SECOND);
  assert_int_equal(qkvi_debts_owed(place, POINTS_S, 2 * SECOND), 3500);
  assert_int_equal(qkvi_debts_owed(place, POINTS_S, 5 * SECOND), 500);
  assert_int_equal(qkvi_debts_owed(place, POINTS_S, 6 * SECOND), 0);
  assert_int_equal(qkvi_debts_owed(place, 0, 2 * SECOND), 0);  // no limit
}

static void test_unix(void **state) {
  (void)state;
  qkvi_debts_raise(-1, 4000, POINTS_S, SECOND);
  assert_int_equal(qkvi_debts_owed(-1, POINTS_S, SECOND), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_places), cmocka_unit_test(test_draining),
                                     cmocka_unit_test(test_unix)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
