#include "client/format/safetensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

// A file in memory, of exactly its size so that a sanitizer sees a read beyond it.
static uint8_t *file_of(const char *header, uint64_t claimed, size_t data_bytes, size_t *size) {
  size_t length = strlen(header);
  *size = 8 + length + data_bytes;
  uint8_t *bytes = calloc(1, *size);
  assert_non_null(bytes);
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(claimed >> 8 * i);
  memcpy(bytes + 8, header, length);
  for (size_t i = 0; i < data_bytes; i++) bytes[8 + length + i] = (uint8_t)i;
  return bytes;
}

static void refuse(const char *header, size_t data_bytes, const char *text) {
  size_t size = 0;
  uint8_t *bytes = file_of(header, strlen(header), data_bytes, &size);
  qkv_safetensors *file = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_safetensors_parse(bytes, size, &file, &error), QKV_INVALID_ARGUMENT);
  assert_null(file);
  if (strstr(error.text, text) == NULL) fail_msg("%s: \"%s\" has no \"%s\"", header, error.text, text);
  assert_int_equal(qkv_safetensors_parse(bytes, size, &file, NULL), QKV_INVALID_ARGUMENT);
  free(bytes);
}

static void test_reads(void **state) {
  (void)state;
  const char *header =
      "{\"__metadata__\":{\"format\":\"pt\"},"
      "\"late\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12,20]},"
      "\"early\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
      "\"empty\":{\"dtype\":\"F16\",\"shape\":[0,5],\"data_offsets\":[12,12]},"
      "\"one\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[20,22]}}  ";
  size_t size = 0;
  uint8_t *bytes = file_of(header, strlen(header), 22, &size);
  qkv_safetensors *file = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_safetensors_parse(bytes, size, &file, &error), QKV_OK);
  assert_int_equal(qkv_safetensors_count(file), 4);
  assert_string_equal(qkv_safetensors_at(file, 0)->name, "early");
  assert_string_equal(qkv_safetensors_at(file, 1)->name, "empty");
  assert_string_equal(qkv_safetensors_at(file, 2)->name, "late");
  const qkv_safetensors_tensor *early = qkv_safetensors_find(file, "early");
  assert_int_equal(early->dtype, QKV_BF16);
  assert_int_equal(early->rank, 2);
  assert_int_equal(early->dims[0], 2);
  assert_int_equal(early->dims[1], 3);
  assert_int_equal(early->bytes, 12);
  assert_ptr_equal(early->data, bytes + 8 + strlen(header));
  assert_int_equal(qkv_safetensors_find(file, "one")->rank, 0);
  assert_null(qkv_safetensors_find(file, "lat"));
  assert_null(qkv_safetensors_find(file, "__metadata__"));
  assert_string_equal(qkv_safetensors_metadata(file, "format"), "pt");
  assert_null(qkv_safetensors_metadata(file, "other"));
  qkv_safetensors_close(&file);
  assert_null(file);
  free(bytes);
}

#define TENSOR(dtype, shape, offsets) \
  "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void test_refuses_headers(void **state) {
  (void)state;
  static const struct {
    const char *header;
    size_t data_bytes;
    const char *text;
  } cases[] = {
      {"", 0, "no JSON"},
      {"[]", 0, "no JSON object"},
      {"{\"a\":", 0, "no JSON"},
      {"{} {}", 0, "no JSON"},
      {"{\"a\":1}", 0, "tensor a: is no object"},
      {"{\"a\":{},\"a\":{}}", 0, "duplicate"},
      {"{\"a\\u0000b\":{}}", 0, "no JSON"},
      {"{\"__metadata__\":1}", 0, "__metadata__ is no object"},
      {"{\"__metadata__\":{\"k\":1}}", 0, "__metadata__.k is no text"},
      {TENSOR("I64", "[1]", "[0,8]"), 8, "dtype is \"I64\""},
      {"{\"a\":{\"dtype\":5,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype"},
      {TENSOR("F32", "[1,1,1,1,1]", "[0,4]"), 4, "shape has 5 dims, at most 4"},
      {TENSOR("F32", "7", "[0,4]"), 4, "shape is no array"},
      {TENSOR("F32", "[-1]", "[0,4]"), 4, "shape[0]"},
      {TENSOR("F32", "[1.0]", "[0,4]"), 4, "shape[0]"},
      {TENSOR("F32", "[99999999999999999999]", "[0,4]"), 4, "no JSON"},
      {TENSOR("F32", "[9223372036854775807,9223372036854775807]", "[0,4]"), 4, "2^64"},
      // The product wraps to 4 bytes where it is not watched.
      {TENSOR("F32", "[4611686018427387905]", "[0,4]"), 4, "2^64"},
      {TENSOR("F32", "[2]", "[0,4]"), 4, "hold 4 bytes, the shape needs 8"},
      {TENSOR("F32", "[1]", "[0,4]"), 3, "the file has 3 bytes of data"},
      {TENSOR("F32", "[1]", "[4,0]"), 4, "data_offsets are [4, 0]"},
      {TENSOR("F32", "[1]", "[-4,0]"), 4, "data_offsets are [-4, 0]"},
      {TENSOR("F32", "[1]", "[0,9223372036854775807]"), 4, "the file has 4 bytes of data"},
      {TENSOR("F32", "[1]", "[0]"), 4, "no two integers"},
      {TENSOR("F32", "[1]", "[0,4,8]"), 4, "no two integers"},
      {TENSOR("F32", "[1]", "\"04\""), 4, "no two integers"},
      {TENSOR("F32", "[1]", "[4,8]"), 8, "bytes between tensors"},
      {TENSOR("F32", "[1]", "[0,4]"), 8, "end at 4 of 8"},
      {"{}", 1, "end at 0 of 1"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
       "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
       12, "tensors overlap"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    refuse(cases[i].header, cases[i].data_bytes, cases[i].text);
  }
}

static void test_refuses_lengths(void **state) {
  (void)state;
  static const struct {
    uint64_t claimed;
    const char *text;
  } cases[] = {{3, "the file ends after 2"},
               {QKV_SAFETENSORS_HEADER_MAX, "the file ends after 2"},
               {QKV_SAFETENSORS_HEADER_MAX + 1, "at most 16777216"},
               {UINT64_MAX, "at most 16777216"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    size_t size = 0;
    uint8_t *bytes = file_of("{}", cases[i].claimed, 0, &size);
    qkv_safetensors *file = NULL;
    qkv_error error = {0};
    assert_int_equal(qkv_safetensors_parse(bytes, size, &file, &error), QKV_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, cases[i].text));
    free(bytes);
  }
  qkv_safetensors *file = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_safetensors_parse("1234567", 7, &file, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "7 bytes are too short for a safetensors file");
}

// ---- files ----

static char directory[] = "/tmp/qkv-safetensors-XXXXXX";

static int make_directory(void **state) {
  (void)state;
  return mkdtemp(directory) == NULL ? -1 : 0;
}

static int remove_directory(void **state) {
  (void)state;
  return rmdir(directory);  // fails when a test has left a file
}

static void path_of(const char *name, char path[128]) {
  snprintf(path, 128, "%s/%s", directory, name);
}

static const qkv_safetensors_tensor shapes[] = {
    {.name = "k", .dtype = QKV_FP16, .rank = 2, .dims = {3, 2}},
    {.name = "v \"quoted\" \xc3\xa9", .dtype = QKV_FP32, .rank = 1, .dims = {2}},
    {.name = "nothing", .dtype = QKV_BF16, .rank = 1, .dims = {0}}};

static void test_round_trip(void **state) {
  (void)state;
  char path[128];
  path_of("a.safetensors", path);
  const qkv_safetensors_entry metadata[] = {{"session", "chat-7"}, {"codec", "embedded"}};
  const uint16_t k[] = {1, 2, 3, 4, 5, 6};
  const float v[] = {0.5f, -2.0f};
  qkv_safetensors_writer *writer = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_safetensors_writer_create(path, shapes, 3, metadata, 2, &writer, &error), QKV_OK);
  assert_int_equal(qkv_safetensors_write(writer, 0, k, 4, &error), QKV_OK);
  assert_int_equal(qkv_safetensors_write(writer, 1, v, 8, &error), QKV_OK);
  assert_int_equal(qkv_safetensors_write(writer, 0, k + 2, 8, &error), QKV_OK);
  assert_int_not_equal(access(path, F_OK), 0);  // not before it is whole
  assert_int_equal(qkv_safetensors_writer_finish(&writer, &error), QKV_OK);
  assert_null(writer);
  qkv_safetensors *file = NULL;
  assert_int_equal(qkv_safetensors_open(path, &file, &error), QKV_OK);
  assert_int_equal(qkv_safetensors_count(file), 3);
  for (int i = 0; i < 3; i++) {
    const qkv_safetensors_tensor *tensor = qkv_safetensors_find(file, shapes[i].name);
    assert_non_null(tensor);
    assert_int_equal(tensor->dtype, shapes[i].dtype);
    assert_int_equal(tensor->rank, shapes[i].rank);
    assert_memory_equal(tensor->dims, shapes[i].dims, sizeof shapes[i].dims);
  }
  assert_memory_equal(qkv_safetensors_find(file, "k")->data, k, sizeof k);
  assert_memory_equal(qkv_safetensors_at(file, 1)->data, v, sizeof v);
  assert_string_equal(qkv_safetensors_metadata(file, "session"), "chat-7");
  assert_string_equal(qkv_safetensors_metadata(file, "codec"), "embedded");
  qkv_safetensors_close(&file);
  assert_int_equal(unlink(path), 0);
}

static void test_writer_refuses(void **state) {
  (void)state;
  char path[128];
  path_of("b.safetensors", path);
  const uint8_t bytes[16] = {0};
  qkv_safetensors_writer *writer = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_safetensors_writer_create(path, shapes, 3, NULL, 0, &writer, &error), QKV_OK);
  assert_int_equal(qkv_safetensors_write(writer, 0, bytes, 4, &error), QKV_OK);
  assert_int_equal(qkv_safetensors_write(writer, 0, bytes, 9, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "tensor k: 9 bytes where 8 are missing");
  qkv_error missing = {0};
  assert_int_equal(qkv_safetensors_writer_finish(&writer, &missing), QKV_FAILED_PRECONDITION);
  assert_string_equal(missing.text, "tensor k: 8 bytes are missing");
  assert_null(writer);
  const qkv_safetensors_tensor twice[] = {shapes[0], shapes[0]};
  assert_int_equal(qkv_safetensors_writer_create(path, twice, 2, NULL, 0, &writer, NULL), QKV_INVALID_ARGUMENT);
  assert_null(writer);
  const qkv_safetensors_tensor latin = {.name = "\xe9", .dtype = QKV_FP16};
  assert_int_equal(qkv_safetensors_writer_create(path, &latin, 1, NULL, 0, &writer, NULL), QKV_INVALID_ARGUMENT);
  qkv_error nowhere = {0};
  assert_int_equal(qkv_safetensors_writer_create("/nowhere/x", shapes, 1, NULL, 0, &writer, &nowhere),
                   QKV_UNAVAILABLE);
  assert_string_equal(nowhere.text, "/nowhere/x.partial: No such file or directory");
}

static void test_a_pipe_is_not_replaced(void **state) {
  (void)state;
  char pipe[128];
  qkv_safetensors_writer *writer = NULL;
  qkv_error error = {0};
  struct stat there;
  path_of("pipe", pipe);
  assert_int_equal(mkfifo(pipe, 0600), 0);
  assert_int_equal(qkv_safetensors_writer_create(pipe, shapes, 3, NULL, 0, &writer, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "is there and not a regular file"));
  assert_int_equal(stat(pipe, &there), 0);
  assert_true(S_ISFIFO(there.st_mode));
  unlink(pipe);
}

static void test_open_names_the_file(void **state) {
  (void)state;
  char path[128], text[256];
  path_of("c.safetensors", path);
  qkv_safetensors *file = NULL;
  qkv_error missing = {0};
  assert_int_equal(qkv_safetensors_open(path, &file, &missing), QKV_NOT_FOUND);
  snprintf(text, sizeof text, "%s: No such file or directory", path);
  assert_string_equal(missing.text, text);
  qkv_error folder = {0};
  assert_int_equal(qkv_safetensors_open(directory, &file, &folder), QKV_INVALID_ARGUMENT);
  FILE *out = fopen(path, "wb");
  assert_non_null(out);
  fputs("no tensors here", out);
  fclose(out);
  qkv_error garbage = {0};
  assert_int_equal(qkv_safetensors_open(path, &file, &garbage), QKV_INVALID_ARGUMENT);
  assert_ptr_equal(strstr(garbage.text, path), garbage.text);
  assert_null(file);
  unlink(path);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_reads),
                                     cmocka_unit_test(test_refuses_headers),
                                     cmocka_unit_test(test_refuses_lengths),
                                     cmocka_unit_test(test_round_trip),
                                     cmocka_unit_test(test_writer_refuses),
                                     cmocka_unit_test(test_open_names_the_file),
                                     cmocka_unit_test(test_a_pipe_is_not_replaced)};
  return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
