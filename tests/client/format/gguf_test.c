#include "client/format/gguf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/base/tensor.h"
#include "tests/client/gguf_bytes.h"

static gguf_bytes file;

static int clear(void **state) {
  (void)state;
  gguf_free(&file);
  return 0;
}

// ---- A file as it should be ----

enum { ENTRIES = 7, TENSORS = 2 };

// Every kind of entry that is read, a matrix [2, 3] and a vector of 32 codes.
static void write_good(uint32_t version) {
  static const float matrix[6] = {1, -2, 3, 0.5f, 7, -8};
  gguf_begin(&file, version, TENSORS, ENTRIES);
  gguf_put_string(&file, "general.architecture", "llama");
  gguf_put_integer(&file, "count", 4000000000u);
  gguf_put_number(&file, "theta", 1e5f);
  gguf_put_text(&file, "small");
  gguf_put_u32(&file, QKV_GGUF_INT8);
  gguf_put(&file, "\xfd", 1);
  gguf_put_text(&file, "yes");
  gguf_put_u32(&file, QKV_GGUF_BOOL);
  gguf_put(&file, "\x01", 1);
  gguf_put_array(&file, "names", QKV_GGUF_STRING, 3);
  gguf_put_text(&file, "one");
  gguf_put_text(&file, "");
  gguf_put_text(&file, "three");
  gguf_put_array(&file, "types", QKV_GGUF_INT32, 2);
  gguf_put_u32(&file, 1);
  gguf_put_u32(&file, (uint32_t)-3);
  gguf_put_tensor(&file, "matrix", QKV_GGUF_F32, 2, (const int64_t[]){3, 2}, 0);
  gguf_put_tensor(&file, "codes", QKV_GGUF_Q8_0, 1, (const int64_t[]){32}, 32);
  gguf_align(&file, 32);
  gguf_put(&file, matrix, sizeof matrix);
  gguf_align(&file, 32);
  const float scale = 0.25f;
  uint8_t block[34];
  qkv_from_float(QKV_FP16, &scale, block, 1);
  for (int i = 0; i < 32; i++) block[2 + i] = (uint8_t)(i - 16);
  gguf_put(&file, block, sizeof block);
}

static void check_entries(const qkv_gguf *read) {
  qkv_error error = {0};
  int64_t integer = 0;
  double real = 0;
  qkv_gguf_text text;
  assert_true(qkv_gguf_has(read, "yes") && !qkv_gguf_has(read, "no"));
  assert_int_equal(qkv_gguf_string(read, "general.architecture", &text, &error), QKV_OK);
  assert_true(qkv_gguf_text_is(text, "llama") && !qkv_gguf_text_is(text, "llam") && !qkv_gguf_text_is(text, "llamb"));
  assert_int_equal(qkv_gguf_integer(read, "count", 1, INT64_MAX, &integer, &error), QKV_OK);
  assert_int_equal(integer, 4000000000);
  assert_int_equal(qkv_gguf_integer(read, "small", -3, -3, &integer, &error), QKV_OK);
  assert_int_equal(qkv_gguf_integer(read, "yes", 0, 1, &integer, &error), QKV_OK);
  assert_int_equal(integer, 1);
  assert_int_equal(qkv_gguf_number(read, "theta", &real, &error), QKV_OK);
  assert_true(real == 1e5);
  qkv_gguf_array array;
  assert_int_equal(qkv_gguf_array_of(read, "names", QKV_GGUF_STRING, &array, &error), QKV_OK);
  assert_int_equal(array.left, 3);
  assert_true(qkv_gguf_text_is(qkv_gguf_next_string(&array), "one"));
  assert_true(qkv_gguf_text_is(qkv_gguf_next_string(&array), ""));
  assert_true(qkv_gguf_text_is(qkv_gguf_next_string(&array), "three"));
  assert_int_equal(array.left, 0);
  assert_int_equal(qkv_gguf_array_of(read, "types", QKV_GGUF_INT32, &array, &error), QKV_OK);
  assert_int_equal(qkv_gguf_next_int32(&array), 1);
  assert_int_equal(qkv_gguf_next_int32(&array), -3);
}

static void check_tensors(const qkv_gguf *read) {
  float values[32];
  assert_int_equal(qkv_gguf_tensors(read), TENSORS);
  const qkv_gguf_tensor *matrix = qkv_gguf_tensor_find(read, "matrix");
  assert_ptr_equal(matrix, qkv_gguf_tensor_at(read, 0));
  assert_int_equal(matrix->rank, 2);
  assert_int_equal(matrix->dims[0], 3);
  assert_int_equal(matrix->dims[1], 2);
  assert_int_equal(matrix->count, 6);
  qkv_gguf_to_float(matrix, values);
  assert_true(values[0] == 1 && values[5] == -8);
  qkv_gguf_to_float(qkv_gguf_tensor_find(read, "codes"), values);
  for (int i = 0; i < 32; i++) assert_true(values[i] == 0.25f * (float)(i - 16));
  assert_null(qkv_gguf_tensor_find(read, "matri"));
}

static void test_reads_what_is_there(void **state) {
  (void)state;
  for (uint32_t version = 2; version <= 3; version++) {
    write_good(version);
    qkv_gguf *read = NULL;
    qkv_error error = {0};
    if (qkv_gguf_parse(file.data, file.count, &read, &error) != QKV_OK) fail_msg("%s", error.text);
    check_entries(read);
    check_tensors(read);
    qkv_gguf_close(&read);
    assert_null(read);
  }
}

static void test_a_file(void **state) {
  (void)state;
  char path[] = "/tmp/qkv-gguf-XXXXXX";
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  write_good(3);
  assert_int_equal(write(fd, file.data, file.count), file.count);
  close(fd);
  qkv_gguf *read = NULL;
  qkv_error error = {0}, missing = {0};
  assert_int_equal(qkv_gguf_open(path, &read, &error), QKV_OK);
  check_tensors(read);
  qkv_gguf_close(&read);
  assert_int_equal(truncate(path, 40), 0);
  assert_int_equal(qkv_gguf_open(path, &read, &error), QKV_INVALID_ARGUMENT);
  assert_null(read);
  assert_ptr_equal(strstr(error.text, path), error.text);
  unlink(path);
  assert_int_equal(qkv_gguf_open(path, &read, &missing), QKV_NOT_FOUND);
}

// ---- Entries that are asked for as what they are not ----

static void test_names_what_is_wrong(void **state) {
  (void)state;
  write_good(3);
  qkv_gguf *read = NULL;
  assert_int_equal(qkv_gguf_parse(file.data, file.count, &read, NULL), QKV_OK);
  int64_t integer = 0;
  double real = 0;
  qkv_gguf_text text;
  qkv_gguf_array array;
  qkv_error errors[6] = {0};
  assert_int_equal(qkv_gguf_integer(read, "none", 0, 1, &integer, &errors[0]), QKV_NOT_FOUND);
  assert_string_equal(errors[0].text, "none is missing");
  assert_int_equal(qkv_gguf_integer(read, "count", 1, 9, &integer, &errors[1]), QKV_INVALID_ARGUMENT);
  assert_string_equal(errors[1].text, "count is 4000000000, allowed are 1 to 9");
  assert_int_equal(qkv_gguf_integer(read, "names", 1, 9, &integer, &errors[2]), QKV_INVALID_ARGUMENT);
  assert_string_equal(errors[2].text, "names is no integer");
  assert_int_equal(qkv_gguf_number(read, "count", &real, &errors[3]), QKV_INVALID_ARGUMENT);
  assert_string_equal(errors[3].text, "count is no finite number");
  assert_int_equal(qkv_gguf_string(read, "names", &text, &errors[4]), QKV_INVALID_ARGUMENT);
  assert_string_equal(errors[4].text, "names is no text");
  assert_int_equal(qkv_gguf_array_of(read, "types", QKV_GGUF_STRING, &array, &errors[5]), QKV_INVALID_ARGUMENT);
  assert_string_equal(errors[5].text, "types is no array of type 8");
  qkv_gguf_close(&read);
}

// ---- Files that are none ----

static void refuse(const char *text) {
  qkv_gguf *read = NULL;
  qkv_error error = {0};
  // On memory of its own, so that a sanitizer sees what is read beyond it.
  uint8_t *copy = malloc(file.count > 0 ? file.count : 1);
  assert_non_null(copy);
  memcpy(copy, file.data, file.count);
  assert_int_equal(qkv_gguf_parse(copy, file.count, &read, &error), QKV_INVALID_ARGUMENT);
  assert_null(read);
  if (strstr(error.text, text) == NULL) fail_msg("\"%s\" has no \"%s\"", error.text, text);
  free(copy);
}

static void test_refuses_every_shorter_file(void **state) {
  (void)state;
  write_good(3);
  while (file.count > 0) {
    file.count--;
    refuse(file.count < 4 ? "no GGUF file" : file.count < 24 ? "ends in the header" : "");
  }
}

static void test_refuses_headers(void **state) {
  (void)state;
  gguf_begin(&file, 1, 0, 0);
  refuse("its version is 1, known are 2 and 3");
  gguf_begin(&file, 3, UINT64_C(1) << 40, 0);
  refuse("there are 1099511627776 tensors, at most 16384");
  gguf_begin(&file, 3, 0, UINT64_MAX);
  refuse("entries, at most 16384");
}

static void test_refuses_entries(void **state) {
  (void)state;
  gguf_begin(&file, 3, 0, 1);
  gguf_put_u64(&file, UINT64_MAX);  // a key's length
  refuse("the file ends in a key");
  gguf_begin(&file, 3, 0, 1);
  gguf_put_string(&file, "", "x");
  refuse("a key has 0 bytes");
  gguf_begin(&file, 3, 0, 2);
  gguf_put_integer(&file, "a", 1);
  gguf_put_integer(&file, "a", 1);
  refuse("there are two entries a");
  gguf_begin(&file, 3, 0, 1);
  gguf_put_text(&file, "a");
  gguf_put_u32(&file, 13);
  refuse("a: values of type 13 are not known");
  gguf_begin(&file, 3, 0, 1);
  gguf_put_array(&file, "a", QKV_GGUF_ARRAY, 1);
  refuse("a: arrays of type 9 are not known");
  gguf_begin(&file, 3, 0, 1);
  gguf_put_array(&file, "a", QKV_GGUF_UINT64, UINT64_MAX / 8 + 2);
  gguf_put_u64(&file, 0);
  refuse("a: the file ends in an array");
  gguf_begin(&file, 3, 0, 1);
  gguf_put_array(&file, "a", QKV_GGUF_STRING, UINT64_MAX);
  gguf_put_text(&file, "one");
  refuse("a: the file ends in a text");
  gguf_begin(&file, 3, 0, 1);
  gguf_put_integer(&file, "general.alignment", 48);
  refuse("general.alignment is 48, no power of two");
}

static void refuse_tensor(uint32_t type, int rank, const int64_t *dims, uint64_t offset, const char *text) {
  gguf_begin(&file, 3, 1, 0);
  gguf_put_tensor(&file, "t", type, rank, dims, offset);
  gguf_align(&file, 32);
  for (int i = 0; i < 64; i++) gguf_put(&file, "", 1);
  refuse(text);
}

static void test_refuses_tensors(void **state) {
  (void)state;
  refuse_tensor(QKV_GGUF_F32, 1, (const int64_t[]){17}, 0,
                "tensor t: its offset is 0 and it has 68 bytes; the file has 64");
  refuse_tensor(QKV_GGUF_F32, 1, (const int64_t[]){16}, 32, "its offset is 32");
  refuse_tensor(QKV_GGUF_F32, 1, (const int64_t[]){1}, 4, "its offset is 4");
  refuse_tensor(QKV_GGUF_F32, 1, (const int64_t[]){1}, UINT64_MAX - 31, "its offset is 18446744073709551584");
  refuse_tensor(QKV_GGUF_F32, 0, NULL, 0, "tensor t: the rank is 0, allowed are 1 to 4");
  refuse_tensor(QKV_GGUF_F32, 5, (const int64_t[]){1, 1, 1, 1, 1}, 0, "the rank is 5");
  refuse_tensor(QKV_GGUF_F32, 2, (const int64_t[]){4, 0}, 0, "dims[1] is 0");
  refuse_tensor(QKV_GGUF_F32, 1, (const int64_t[]){-1}, 0, "dims[0] is 18446744073709551615");
  refuse_tensor(QKV_GGUF_F32, 2, (const int64_t[]){INT64_MAX, 3}, 0, "dims[1] is 3");
  refuse_tensor(QKV_GGUF_F32, 1, (const int64_t[]){INT64_MAX}, 0, "more than 2^64 bytes");
  refuse_tensor(QKV_GGUF_Q4_1, 1, (const int64_t[]){33}, 0,
                "dims[0] is 33, no multiple of the 32 of a block of Q4_1");
  refuse_tensor(14, 1, (const int64_t[]){256}, 0, "its type is 14, known are 0 (F32)");
  gguf_begin(&file, 3, 2, 0);
  for (int i = 0; i < 2; i++) gguf_put_tensor(&file, "t", QKV_GGUF_F32, 1, (const int64_t[]){1}, 0);
  refuse("there are two tensors t");
}

// ---- Types ----

static void test_types(void **state) {
  (void)state;
  size_t elements = 0, bytes = 0;
  assert_true(qkv_gguf_type_block(QKV_GGUF_Q4_1, &elements, &bytes) && elements == 32 && bytes == 20);
  assert_true(qkv_gguf_type_block(QKV_GGUF_BF16, &elements, &bytes) && elements == 1 && bytes == 2);
  assert_false(qkv_gguf_type_block(14, &elements, &bytes));
  assert_string_equal(qkv_gguf_type_name(QKV_GGUF_Q8_0), "Q8_0");
  assert_null(qkv_gguf_type_name(7));
}

static void test_blocks_of_four_bits(void **state) {
  (void)state;
  const float scale[2] = {0.5f, -3};  // of the codes, and what Q4_1 adds
  uint8_t block[20];
  float out[64];
  qkv_from_float(QKV_FP16, scale, block, 2);
  for (int i = 0; i < 16; i++) block[4 + i] = (uint8_t)(i | (15 - i) << 4);
  qkv_gguf_tensor tensor = {.type = QKV_GGUF_Q4_1, .rank = 1, .dims = {32}, .count = 32, .data = block, .bytes = 20};
  qkv_gguf_to_float(&tensor, out);
  for (int i = 0; i < 16; i++) {
    assert_true(out[i] == 0.5f * (float)i - 3);
    assert_true(out[16 + i] == 0.5f * (float)(15 - i) - 3);
  }
  memmove(block + 2, block + 4, 16);
  tensor.type = QKV_GGUF_Q4_0;
  tensor.bytes = 18;
  qkv_gguf_to_float(&tensor, out);
  for (int i = 0; i < 16; i++) {
    assert_true(out[i] == 0.5f * (float)(i - 8));
    assert_true(out[16 + i] == 0.5f * (float)(7 - i));
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_reads_what_is_there), cmocka_unit_test(test_a_file),
      cmocka_unit_test(test_names_what_is_wrong), cmocka_unit_test(test_refuses_every_shorter_file),
      cmocka_unit_test(test_refuses_headers),     cmocka_unit_test(test_refuses_entries),
      cmocka_unit_test(test_refuses_tensors),     cmocka_unit_test(test_types),
      cmocka_unit_test(test_blocks_of_four_bits)};
  return cmocka_run_group_tests(tests, NULL, clear);
}
