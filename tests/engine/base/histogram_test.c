#include "engine/base/histogram.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static qkv_histogram shared;

static void test_bounds_are_inclusive(void **state) {
  (void)state;
  qkv_histogram histogram = {0};
  qkv_histogram_view view;
  qkv_histogram_add(&histogram, 0);
  qkv_histogram_add(&histogram, qkv_histogram_bounds_ns[0]);
  qkv_histogram_add(&histogram, qkv_histogram_bounds_ns[0] + 1);
  qkv_histogram_add(&histogram, qkv_histogram_bounds_ns[QKV_HISTOGRAM_BOUNDS - 1]);
  qkv_histogram_add(&histogram, qkv_histogram_bounds_ns[QKV_HISTOGRAM_BOUNDS - 1] + 1);
  qkv_histogram_read(&histogram, &view);
  assert_int_equal(view.counts[0], 2);
  assert_int_equal(view.counts[1], 1);
  assert_int_equal(view.counts[QKV_HISTOGRAM_BOUNDS - 1], 1);
  assert_int_equal(view.counts[QKV_HISTOGRAM_BOUNDS], 1);
  assert_int_equal(view.count, 5);
  assert_int_equal(view.sum_ns,
                   2 * qkv_histogram_bounds_ns[0] + 2 * qkv_histogram_bounds_ns[QKV_HISTOGRAM_BOUNDS - 1] + 2);
}

static void test_bounds_ascend(void **state) {
  (void)state;
  for (size_t i = 1; i < QKV_HISTOGRAM_BOUNDS; i++)
    assert_true(qkv_histogram_bounds_ns[i] > qkv_histogram_bounds_ns[i - 1]);
}

static void *add(void *context) {
  (void)context;
  for (uint64_t i = 0; i < 10000; i++) qkv_histogram_add(&shared, i * 1000);
  return NULL;
}

static void test_sums_are_exact(void **state) {
  (void)state;
  pthread_t threads[4];
  qkv_histogram_view view;
  for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, add, NULL), 0);
  for (int i = 0; i < 4; i++) (void)pthread_join(threads[i], NULL);
  qkv_histogram_read(&shared, &view);
  assert_int_equal(view.count, 40000);
  assert_int_equal(view.sum_ns, UINT64_C(4) * 9999 * 10000 / 2 * 1000);
}

static void test_stages(void **state) {
  (void)state;
  qkv_histogram_view view;
  qkv_stage_add(QKV_STAGE_ENCODE, qkv_stage_now());
  qkv_histogram_read(qkv_stage_histogram(QKV_STAGE_ENCODE), &view);
  assert_int_equal(view.count, 1);
  qkv_histogram_read(qkv_stage_histogram(QKV_STAGE_ATTEND), &view);
  assert_int_equal(view.count, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_bounds_are_inclusive),
                                     cmocka_unit_test(test_bounds_ascend), cmocka_unit_test(test_sums_are_exact),
                                     cmocka_unit_test(test_stages)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
