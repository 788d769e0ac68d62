#include "client/format/npy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char path[] = "/tmp/qkv-npy-XXXXXX";

static int make_path(void **state) {
  (void)state;
  int fd = mkstemp(path);
  return fd < 0 ? -1 : close(fd);
}

static int remove_path(void **state) {
  (void)state;
  return unlink(path);
}

// The header as numpy.save writes it, byte for byte.
static void check_header(qkv_dtype dtype, int rank, const int64_t *dims, const char *dict) {
  FILE *file = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_npy_create(path, dtype, rank, dims, &file, &error), QKV_OK);
  assert_int_equal(fputs("data", file), 1);
  assert_int_equal(fclose(file), 0);

  char bytes[512];
  file = fopen(path, "rb");
  assert_non_null(file);
  size_t size = fread(bytes, 1, sizeof bytes, file);
  assert_int_equal(fclose(file), 0);
  size_t header = size - 4;
  assert_memory_equal(bytes + header, "data", 4);
  assert_int_equal(header % 64, 0);
  assert_memory_equal(bytes, "\x93NUMPY\x01\x00", 8);
  assert_int_equal((uint8_t)bytes[8] + 256 * (uint8_t)bytes[9], header - 10);
  assert_memory_equal(bytes + 10, dict, strlen(dict));
  for (size_t i = 10 + strlen(dict); i + 1 < header; i++) assert_int_equal(bytes[i], ' ');
  assert_int_equal(bytes[header - 1], '\n');
}

static void test_headers(void **state) {
  (void)state;
  check_header(QKV_FP16, 3, (int64_t[]){100, 2, 64},
               "{'descr': '<f2', 'fortran_order': False, 'shape': (100, 2, 64), }");
  check_header(QKV_FP32, 1, (int64_t[]){7}, "{'descr': '<f4', 'fortran_order': False, 'shape': (7,), }");
  check_header(QKV_FP32, 4, (int64_t[]){INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX},
               "{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 9223372036854775807, "
               "9223372036854775807, 9223372036854775807), }");
}

static void test_refused(void **state) {
  (void)state;
  FILE *file = stdin;
  qkv_error error = {0};
  assert_int_equal(qkv_npy_create("x.npy", QKV_BF16, 1, (int64_t[]){1}, &file, &error), QKV_INVALID_ARGUMENT);
  assert_null(file);
  assert_string_equal(error.text, "x.npy: NumPy has no bf16; write fp32 or fp16");
  qkv_error gone = {0};
  assert_int_equal(qkv_npy_create("/no/such/place/x.npy", QKV_FP16, 1, (int64_t[]){1}, &file, &gone),
                   QKV_UNAVAILABLE);
  assert_string_equal(gone.text, "/no/such/place/x.npy: No such file or directory");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_headers),
      cmocka_unit_test(test_refused),
  };
  return cmocka_run_group_tests(tests, make_path, remove_path);
}
