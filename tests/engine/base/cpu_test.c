#include "engine/base/cpu.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void test_text(void **state) {
  (void)state;
  char text[128];
  qkv_cpu_text(0, text, sizeof text);
  assert_string_equal(text, "none");
  qkv_cpu_text(QKV_CPU_AVX2 | QKV_CPU_FMA | QKV_CPU_F16C, text, sizeof text);
  assert_string_equal(text, "avx2,fma,f16c");
  qkv_cpu_text(UINT32_MAX, text, sizeof text);
  assert_string_equal(text, "avx2,fma,f16c,avx512,avx512-vnni,avx512-vbmi,neon,neon-dotprod,amx-int8");
  memset(text, 'x', sizeof text);
  qkv_cpu_text(UINT32_MAX, text, 8);
  assert_string_equal(text, "avx2,fm");
  assert_int_equal(text[8], 'x');
}

static void test_flags_are_consistent(void **state) {
  (void)state;
  uint32_t flags = qkv_cpu_flags();
  assert_int_equal(flags, qkv_cpu_flags());
  if ((flags & (QKV_CPU_VNNI | QKV_CPU_VBMI)) != 0) assert_true((flags & QKV_CPU_AVX512) != 0);
  if ((flags & QKV_CPU_AMX) != 0) assert_true((flags & QKV_CPU_AVX512) != 0);
  if ((flags & QKV_CPU_AVX512) != 0) assert_true((flags & QKV_CPU_AVX2) != 0);
  if ((flags & QKV_CPU_DOTPROD) != 0) assert_true((flags & QKV_CPU_NEON) != 0);
  if ((flags & QKV_CPU_NEON) != 0) assert_int_equal(flags & ~(QKV_CPU_NEON | QKV_CPU_DOTPROD), 0);
}

static void names_make_flags(void **state) {
  (void)state;
  uint32_t flags = 1;
  assert_int_equal(qkv_cpu_parse("none", &flags), QKV_OK);
  assert_int_equal(flags, 0);
  assert_int_equal(qkv_cpu_parse("avx2,f16c", &flags), QKV_OK);
  assert_int_equal(flags, QKV_CPU_AVX2 | QKV_CPU_F16C);
  assert_int_equal(qkv_cpu_parse("avx512-vnni", &flags), QKV_OK);
  assert_int_equal(flags, QKV_CPU_VNNI);
  assert_int_equal(qkv_cpu_parse("", &flags), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_cpu_parse("avx", &flags), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_cpu_parse("avx2,", &flags), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_cpu_parse("avx2,none", &flags), QKV_INVALID_ARGUMENT);
}

// Those that are left to it, by taskset or a container's cpuset.
static void test_count(void **state) {
  (void)state;
  cpu_set_t all, one;
  assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
  assert_int_equal(qkv_cpu_count(), CPU_COUNT(&all));
  int cpu = 0;
  while (!CPU_ISSET(cpu, &all)) cpu++;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  assert_int_equal(qkv_cpu_count(), 1);
  assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
}

static void *pin(void *context) {
  cpu_set_t *set = context;
  const bool pinned = qkv_cpu_pin(1) && qkv_cpu_pin((size_t)qkv_cpu_count());
  return pinned && sched_getaffinity(0, sizeof *set, set) == 0 ? context : NULL;
}

// One thread alone, on the first one again where the number is beyond the last.
static void test_pin(void **state) {
  (void)state;
  cpu_set_t before, after, one;
  pthread_t thread;
  void *result = NULL;
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  assert_int_equal(pthread_create(&thread, NULL, pin, &one), 0);
  assert_int_equal(pthread_join(thread, &result), 0);
  assert_non_null(result);
  int first = 0;
  while (!CPU_ISSET(first, &before)) first++;
  assert_int_equal(CPU_COUNT(&one), 1);
  assert_true(CPU_ISSET(first, &one));
  assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
  assert_true(CPU_EQUAL(&before, &after));
  assert_int_equal(qkv_cpu_count(), CPU_COUNT(&before));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_text),        cmocka_unit_test(test_flags_are_consistent),
      cmocka_unit_test(names_make_flags), cmocka_unit_test(test_count),
      cmocka_unit_test(test_pin),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
