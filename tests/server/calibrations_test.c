// Calibrations of a daemon's models: given with a registration, by --calibration, and asked back.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibrate.h"
#include "tests/server/kv.h"

#include <cmocka.h>

enum { TOKENS = 64 };

static char directory[128];

static int make_directory(void **state) {
  (void)state;
  fixture_make_directory(directory, sizeof directory);
  return 0;
}

static int remove_directory(void **state) {
  (void)state;
  fixture_remove_directory(directory);
  return 0;
}

// From pseudo-random rows; `seed` makes another version.
static const qkv_calibration *calibrate(const qkv_calibration_shape *shape, uint32_t seed) {
  const size_t k_count = (size_t)TOKENS * shape->kv_heads * shape->key_dim;
  const size_t v_count = (size_t)TOKENS * shape->kv_heads * shape->value_dim;
  float *k = calloc(k_count, sizeof *k), *v = calloc(v_count, sizeof *v);
  assert_non_null(k);
  assert_non_null(v);
  for (size_t i = 0; i < k_count; i++) k[i] = (float)((i * 2654435761u + seed) >> 7 & 1023) / 1024;
  for (size_t i = 0; i < v_count; i++) v[i] = (float)((i * 2246822519u + seed) >> 9 & 1023) / 1024;
  qkv_moments *moments = qkv_moments_create(shape);
  for (uint32_t layer = 0; layer < shape->layers; layer++) qkv_moments_add(moments, layer, 0, TOKENS, k, v, true);
  qkv_calibration *calibration = NULL;
  assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &calibration, NULL), QKV_OK);
  qkv_moments_destroy(&moments);
  free(k);
  free(v);
  return calibration;
}

// Of the model that kv_register registers.
static qkv_calibration_shape kv_shape(void) {
  qkv_model model = kv_model();
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  return qkv_model_calibration_shape(&model);
}

static void write_file(const qkv_calibration *calibration, const char *name, char path[256]) {
  size_t size;
  const void *bytes = qkv_calibration_bytes(calibration, &size);
  (void)snprintf(path, 256, "%s/%s", directory, name);
  FILE *file = fopen(path, "we");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes, 1, size, file), size);
  assert_int_equal(fclose(file), 0);
}

// The status of GetCalibration. Where it is 0 the bytes must be the calibration's, and come in `messages`.
static int get(fixture_client *client, const char *model, const qkv_calibration *expected, size_t messages,
               char *text) {
  Qkv__V1__GetCalibrationRequest request = QKV__V1__GET_CALIBRATION_REQUEST__INIT;
  request.model = (char *)model;
  uint8_t packed[256];
  const size_t length = qkv__v1__get_calibration_request__pack(&request, packed);
  fixture_stream *stream = fixture_open(client, KV_METHOD("GetCalibration"), FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, packed, length));
  fixture_half_close(stream);
  size_t size = 0, at = 0, count = 0;
  const uint8_t *bytes = expected == NULL ? NULL : qkv_calibration_bytes(expected, &size);
  uint8_t *data;
  size_t arrived;
  for (; fixture_receive(stream, &data, &arrived); count++) {
    Qkv__V1__GetCalibrationResponse *part = qkv__v1__get_calibration_response__unpack(NULL, arrived, data);
    assert_non_null(part);
    assert_in_range(part->chunk.len, 1, size - at);
    assert_memory_equal(bytes + at, part->chunk.data, part->chunk.len);
    at += part->chunk.len;
    qkv__v1__get_calibration_response__free_unpacked(part, NULL);
    free(data);
  }
  fixture_result result = fixture_finish(&stream);
  const int status = result.status;
  if (text != NULL) (void)snprintf(text, FIXTURE_TEXT_MAX, "%s", result.text);
  fixture_free(&result);
  assert_int_equal(at, size);
  assert_int_equal(count, messages);
  return status;
}

static fixture_result register_model(fixture_client *client, const char *name, uint32_t dim, uint32_t layers,
                                     const qkv_calibration *calibration) {
  Qkv__V1__Model model = QKV__V1__MODEL__INIT;
  model.name = (char *)name;
  model.layers = layers;
  model.kv_heads = 2;
  model.q_heads = 2;
  model.key_dim = dim;
  model.value_dim = dim;
  model.dtype = QKV__V1__DTYPE__DTYPE_FP16;
  if (calibration != NULL)
    model.calibration.data = (uint8_t *)(uintptr_t)qkv_calibration_bytes(calibration, &model.calibration.len);
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  request.model = &model;
  return kv_call(client, KV_METHOD("RegisterModel"), &request.base);
}

static void files_are_for_models_to_come(void **state) {
  (void)state;
  fixture_daemon *daemon;
  fixture_client *client;
  char path[256], option[300], text[FIXTURE_TEXT_MAX];
  const qkv_calibration_shape shape = kv_shape();
  const qkv_calibration *ours = calibrate(&shape, 1);
  write_file(ours, "m.qkvc", path);
  (void)snprintf(option, sizeof option, "m=%s", path);
  kv_start((const char *[]){"--calibration", option, NULL}, &daemon, &client);
  assert_int_equal(get(client, "m", ours, 1, NULL), QKV_OK);
  kv_register(client);  // the same again
  assert_int_equal(get(client, "m", ours, 1, NULL), QKV_OK);
  fixture_result other = register_model(client, "other", 16, 1, NULL);
  assert_int_equal(other.status, QKV_OK);
  fixture_free(&other);
  assert_int_equal(get(client, "other", NULL, 0, text), QKV_NOT_FOUND);
  assert_string_equal(text, "the model other has no calibration, none was given and none has been learnt yet");
  assert_int_equal(get(client, "nobody", NULL, 0, text), QKV_NOT_FOUND);
  assert_string_equal(text, "no model nobody");
  assert_int_equal(get(client, "", NULL, 0, NULL), QKV_INVALID_ARGUMENT);
  kv_stop(&daemon, &client);
  qkv_calibration_unref(&ours);
}

// A calibration of a registration replaces that of the daemon's file, and stays where a later registration has none.
static void registrations_bring_their_own(void **state) {
  (void)state;
  fixture_daemon *daemon;
  fixture_client *client;
  char path[256], option[300];
  const qkv_calibration_shape shape = {.layers = 4, .kv_heads = 2, .q_heads = 2, .key_dim = 128, .value_dim = 128};
  const qkv_calibration *file = calibrate(&shape, 1), *own = calibrate(&shape, 2), *next = calibrate(&shape, 3);
  write_file(file, "big.qkvc", path);
  (void)snprintf(option, sizeof option, "big=%s", path);
  kv_start((const char *[]){"--calibration", option, NULL}, &daemon, &client);
  size_t size;
  (void)qkv_calibration_bytes(own, &size);
  const size_t messages = (size + (1 << 20) - 1) >> 20;
  assert_in_range(messages, 2, 9);
  const struct {
    const qkv_calibration *given, *had;
  } steps[] = {{own, own}, {NULL, own}, {next, next}, {NULL, next}, {next, next}};
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
    fixture_result result = register_model(client, "big", 128, 4, steps[i].given);
    assert_int_equal(result.status, QKV_OK);
    fixture_free(&result);
    assert_int_equal(get(client, "big", steps[i].had, messages, NULL), QKV_OK);
  }
  kv_stop(&daemon, &client);
  qkv_calibration_unref(&file);
  qkv_calibration_unref(&own);
  qkv_calibration_unref(&next);
}

static void misfits_are_refused_and_nothing_is_registered(void **state) {
  (void)state;
  fixture_daemon *daemon;
  fixture_client *client;
  char path[256], option[300];
  const qkv_calibration_shape shape = {.layers = 1, .kv_heads = 2, .q_heads = 2, .key_dim = 16, .value_dim = 16};
  const qkv_calibration *ours = calibrate(&shape, 1);
  write_file(ours, "x.qkvc", path);
  (void)snprintf(option, sizeof option, "x=%s", path);
  kv_start((const char *[]){"--calibration", option, NULL}, &daemon, &client);
  static const char *const names[] = {"x", "y"};
  for (size_t i = 0; i < 2; i++) {
    fixture_result result = register_model(client, names[i], 24, 1, i == 0 ? NULL : ours);
    assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
    assert_string_equal(result.text, "calibration.key_dim is 16, the model has 24");
    fixture_free(&result);
    assert_int_equal(get(client, names[i], NULL, 0, NULL), QKV_NOT_FOUND);
    Qkv__V1__GetModelRequest request = QKV__V1__GET_MODEL_REQUEST__INIT;
    request.name = (char *)names[i];
    result = kv_call(client, KV_METHOD("GetModel"), &request.base);
    assert_int_equal(result.status, QKV_NOT_FOUND);
    fixture_free(&result);
  }
  kv_stop(&daemon, &client);
  qkv_calibration_unref(&ours);
}

static void expect_no_start(const char *first, const char *second, const char *text) {
  char output[4096];
  const char *arguments[] = {"--listen", "127.0.0.1:0", "--calibration", first, "--calibration", second, NULL};
  if (second == NULL) arguments[4] = NULL;
  assert_int_not_equal(fixture_run(arguments, output, sizeof output), 0);
  if (strstr(output, text) == NULL) fail_msg("expected \"%s\" in: %s", text, output);
}

static void files_that_are_none_keep_the_daemon_from_starting(void **state) {
  (void)state;
  char path[256], option[300], text[400];
  const qkv_calibration_shape shape = kv_shape();
  const qkv_calibration *ours = calibrate(&shape, 1);
  write_file(ours, "good.qkvc", path);
  (void)snprintf(option, sizeof option, "m=%s", path);
  expect_no_start(path, NULL, "expected MODEL=FILE");
  expect_no_start("m=", NULL, "--calibration is m=, expected MODEL=FILE");
  expect_no_start("m=/nonexistent", NULL, "--calibration m=/nonexistent: No such file or directory");
  expect_no_start("m=/dev/null", NULL, "--calibration m=/dev/null: it is no ordinary file");
  expect_no_start("a b=x", NULL, "--calibration: model has byte 0x20 at 1");
  expect_no_start(option, option, "--calibration names the model m twice");
  FILE *file = fopen(path, "r+e");
  assert_non_null(file);
  assert_int_equal(fseek(file, 1000, SEEK_SET), 0);
  assert_int_equal(fputc('x', file), 'x');
  assert_int_equal(fclose(file), 0);
  (void)snprintf(text, sizeof text, "--calibration %s: calibration.checksum is ", option);
  expect_no_start(option, NULL, text);
  qkv_calibration_unref(&ours);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(files_are_for_models_to_come),
      cmocka_unit_test(registrations_bring_their_own),
      cmocka_unit_test(misfits_are_refused_and_nothing_is_registered),
      cmocka_unit_test(files_that_are_none_keep_the_daemon_from_starting),
  };
  return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
