#include "engine/base/metric.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static qkv_metric_value metric;

static void *count(void *context) {
  (void)context;
  for (int i = 0; i < 10000; i++) qkv_metric_add(&metric, 3);
  return NULL;
}

static void test_sums_are_exact(void **state) {
  (void)state;
  qkv_metric_set(&metric, -5);
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, count, NULL), 0);
  for (int i = 0; i < 4; i++) (void)pthread_join(threads[i], NULL);
  assert_int_equal(qkv_metric_read(&metric), 120000 - 5);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_sums_are_exact)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
