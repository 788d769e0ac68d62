#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/distance_bound.h"
#include "naive.h"

enum { ROWS = 4000 };

// Of independent N(0, 1) in `directions`, times `scale`.
static double distance(naive_random *random, size_t directions, double scale) {
  double sum = 0;
  for (size_t i = 0; i < directions; i++) sum += pow(scale * naive_gaussian(random), 2);
  return sum;
}

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void the_bound_is_that_of_sorted_distances(void **state) {
  (void)state;
  static const double scales[] = {1e-5, 0.01, 1, 300, 1e7};
  for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
    naive_random random = {i + 1};
    qkv_distance_bound bound = {0};
    static double all[ROWS];
    for (size_t t = 0; t < ROWS; t++) {
      all[t] = distance(&random, 8, scales[i]);
      qkv_distance_bound_add(&bound, all[t]);
    }
    qsort(all, ROWS, sizeof *all, compare);
    const double expected = QKV_DISTANCE_TIMES * all[(size_t)(QKV_DISTANCE_SHARE * ROWS)];
    assert_true(fabs(qkv_distance_bound_limit(&bound) / expected - 1) < 0.1);
    assert_true(all[ROWS - 1] < qkv_distance_bound_limit(&bound));  // of usual rows none is beyond
  }
}

// One row in nine is far away, at any distance: the limit is that of the others, to where these end.
static void outliers_leave_it_where_it_is(void **state) {
  (void)state;
  naive_random random = {9};
  static const double fars[] = {256, 1e5, 1e8, 1e12, 1e20, 1e30};
  for (size_t i = 0; i < sizeof fars / sizeof fars[0]; i++) {
    qkv_distance_bound bound = {0};
    double most = 0;
    for (size_t t = 0; t < ROWS; t++) {
      const double own = distance(&random, 8, 1);
      if (t % 9 != 0) most = fmax(most, own);
      qkv_distance_bound_add(&bound, t % 9 == 0 ? fars[i] : own);
    }
    assert_true(qkv_distance_bound_limit(&bound) < 4 * most);
    assert_true(qkv_distance_bound_limit(&bound) < fars[i]);
  }
}

static void what_is_odd_is_counted(void **state) {
  (void)state;
  qkv_distance_bound bound = {0};
  assert_true(isinf(qkv_distance_bound_limit(&bound)));
  qkv_distance_bound_add(&bound, 0);
  assert_true(qkv_distance_bound_limit(&bound) > 0 && qkv_distance_bound_limit(&bound) < 1e-12);
  for (int i = 0; i < 99; i++) qkv_distance_bound_add(&bound, INFINITY);
  assert_true(qkv_distance_bound_limit(&bound) > 1e24);
  assert_int_equal(bound.rows, 100);
}

static void halves_merge_and_fade(void **state) {
  (void)state;
  naive_random random = {4};
  qkv_distance_bound whole = {0}, halves[2] = {0};
  for (size_t t = 0; t < ROWS; t++) {
    const double own = distance(&random, 3, 2);
    qkv_distance_bound_add(&whole, own);
    qkv_distance_bound_add(&halves[t % 2], own);
  }
  qkv_distance_bound_merge(&halves[0], &halves[1]);
  assert_memory_equal(&halves[0], &whole, sizeof whole);
  const double before = qkv_distance_bound_limit(&whole);
  qkv_distance_bound_fade(&whole, 0.5);
  assert_in_range(whole.rows, ROWS / 2 - QKV_DISTANCE_BINS, ROWS / 2);
  assert_true(fabs(qkv_distance_bound_limit(&whole) / before - 1) < 0.02);
  qkv_distance_bound_fade(&whole, 0);
  assert_true(isinf(qkv_distance_bound_limit(&whole)));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_bound_is_that_of_sorted_distances),
      cmocka_unit_test(outliers_leave_it_where_it_is),
      cmocka_unit_test(what_is_odd_is_counted),
      cmocka_unit_test(halves_merge_and_fade),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
