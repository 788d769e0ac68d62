// Items by number: against a simple model, and their memory.
#include "storage/numbered.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>

#include <cmocka.h>

enum { NUMBERS = 3000 };

typedef struct item {
  uint64_t number, value;
} item;

static uint64_t number_of(size_t i) {
  return (1 + i % 3) << 40 | i;
}

static void check(const qkvi_numbered *all, item *const *model) {
  size_t count = 0, seen = 0;
  for (size_t i = 0; i < NUMBERS; i++) {
    item *found = qkvi_numbered_find(all, number_of(i));
    assert_ptr_equal(found, model[i]);
    if (found == NULL) continue;
    assert_true(found->number == number_of(i) && found->value == 7 * i);
    count++;
  }
  for (uint32_t place = 0; qkvi_numbered_next(all, &place) != NULL;) seen++;
  assert_int_equal(seen, count);
  assert_int_equal(all->count, count);
}

static void items_are_found(void **state) {
  (void)state;
  static item *model[NUMBERS];
  qkvi_numbered all;
  uint32_t x = 5;
  qkvi_numbered_init(&all, sizeof(item));
  assert_null(qkvi_numbered_find(&all, 1));
  for (int i = 0; i < 100000; i++) {
    x = x * 1664525u + 1013904223u;
    const size_t at = (x >> 8) % NUMBERS;
    // More of them, then fewer.
    if (model[at] == NULL && (i < 50000 || x >> 30 == 0)) {
      model[at] = qkvi_numbered_add(&all, number_of(at));
      assert_true(model[at]->value == 0);
      model[at]->value = 7 * at;
    } else if (model[at] != NULL && (i >= 50000 || x >> 30 == 0)) {
      qkvi_numbered_remove(&all, model[at]);
      model[at] = NULL;
    }
    if (i % 5000 == 0) check(&all, model);
  }
  check(&all, model);
  // Each is given once, though it is removed then.
  size_t given = 0, count = all.count;
  const item *next;
  for (uint32_t place = 0; (next = qkvi_numbered_next(&all, &place)) != NULL; given++)
    qkvi_numbered_remove(&all, next);
  assert_int_equal(given, count);
  assert_true(all.count == 0 && all.chunks_used == 0);
  qkvi_numbered_deinit(&all);
}

static void an_item_takes_its_size_and_few_bytes(void **state) {
  (void)state;
  enum { MANY = 100000, FEW = 1000 };
  qkvi_numbered all;
  qkvi_numbered_init(&all, 40);
  for (uint64_t i = 1; i <= MANY; i++) {
    (void)qkvi_numbered_add(&all, i);
    if (i > 10000) assert_in_range(qkvi_numbered_bytes(&all), 40 * i, 48 * i);
  }
  for (uint64_t i = FEW + 1; i <= MANY; i++) qkvi_numbered_remove(&all, qkvi_numbered_find(&all, i));
  assert_in_range(qkvi_numbered_bytes(&all), 0, 50 * FEW + 16 * (MANY / QKVI_NUMBERED_CHUNK) * 5 / 4 + 16384);
  qkvi_numbered_deinit(&all);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(items_are_found),
      cmocka_unit_test(an_item_takes_its_size_and_few_bytes),
  };
  return cmocka_run_group_tests_name("numbered", tests, NULL, NULL);
}
