#include "storage/gpu/device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/storage/gpu/fake_cuda.h"
#include "tests/storage/gpu/fake_kernels.h"

enum { NUMBERS = 1000, INPUT_BYTES = 4096, OUTPUT_BYTES = 65536, STAGING_BYTES = 1024, THREADS = 4, ROUNDS = 200 };

static qkv_cuda_driver driver;
static fake_cuda_fail_function *fake_fail;
static fake_cuda_read_function *fake_read;
static fake_cuda_count_function *fake_count;

static int load(void **state) {
  (void)state;
  void *library = dlopen(FAKE_CUDA, RTLD_NOW);
  if (library == NULL) return -1;
  *(void **)&fake_fail = dlsym(library, "fake_cuda_fail");
  *(void **)&fake_read = dlsym(library, "fake_cuda_read");
  *(void **)&fake_count = dlsym(library, "fake_cuda_count");
  return qkv_cuda_load(&driver, NULL) == QKV_OK ? 0 : -1;
}

static qkv_status open_named(const char *name, int64_t timeout_ms, qkv_gpu_device **device, qkv_error *error) {
  static const qkv_gpu_kernel kernels[] = {{"add", 1024}};
  const qkv_gpu_config config = {.driver = &driver,
                                 .device = name,
                                 .memory_bytes = 128 << 20,
                                 .image = "",
                                 .kernels = kernels,
                                 .kernel_count = 1,
                                 .calls = 3,
                                 .input_bytes = INPUT_BYTES,
                                 .output_bytes = OUTPUT_BYTES,
                                 .staging_bytes = STAGING_BYTES,
                                 .timeout_ms = timeout_ms};
  return qkv_gpu_open(&config, device, error);
}

static qkv_gpu_device *open_one(void) {
  qkv_gpu_device *device;
  qkv_error error = {0};
  if (open_named("0", 10000, &device, &error) != QKV_OK) fail_msg("%s", error.text);
  return device;
}

static void assert_nothing_is_left(void) {
  const fake_cuda_state left = fake_read();
  assert_int_equal(left.memory_blocks, 0);
  assert_int_equal(left.host_blocks, 0);
  assert_int_equal(left.streams, 0);
  assert_int_equal(left.events, 0);
  assert_int_equal(left.modules, 0);
  assert_int_equal(left.contexts, 0);
}

// Adds `more` to numbers on the device and compares.
static qkv_status add(qkv_gpu_device *device, qkv_cuda_memory at, const uint32_t *numbers, uint32_t more,
                      qkv_error *error) {
  qkv_gpu_call *call = qkv_gpu_begin(device);
  if (call == NULL) return qkv_fail(error, QKV_UNAVAILABLE, "no call");
  *(uint32_t *)qkv_gpu_input(call) = more;
  const add_arguments arguments = {
      .numbers = at, .input = qkv_gpu_input_address(call), .output = qkv_gpu_output_address(call)};
  qkv_status status = qkv_gpu_launch(call, 0, NUMBERS, 32, &arguments, sizeof arguments, error);
  if (status == QKV_OK) status = qkv_gpu_wait(call, error);
  const uint32_t *output = qkv_gpu_output(call);
  for (size_t i = 0; status == QKV_OK && i < NUMBERS; i++) assert_int_equal(output[i], numbers[i] + more);
  qkv_gpu_end(call);
  return status;
}

// Uploads random numbers in three copies, adds, frees.
static qkv_status upload_and_add(qkv_gpu_device *device, uint32_t seed, qkv_error *error) {
  uint32_t numbers[NUMBERS];
  for (size_t i = 0; i < NUMBERS; i++) numbers[i] = seed = seed * 1664525u + 1013904223u;
  const qkv_cuda_memory at = qkv_gpu_alloc(device, sizeof numbers);
  if (at == 0) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "no memory");
  const qkv_gpu_copy copies[] = {{at, numbers, 4}, {at + 4, numbers + 1, 2800}, {at + 2804, numbers + 701, 1196}};
  qkv_status status = qkv_gpu_upload(device, copies, 3, error);
  if (status == QKV_OK) status = add(device, at, numbers, seed, error);
  uint32_t back[NUMBERS] = {0};
  const qkv_gpu_copy_back backs[] = {{back, at, 12}, {back + 3, at + 12, 2900}, {back + 728, at + 2912, 1088}};
  if (status == QKV_OK) status = qkv_gpu_download(device, backs, 3, error);
  if (status == QKV_OK) assert_memory_equal(back, numbers, sizeof back);
  qkv_gpu_free(device, at, sizeof numbers);
  return status;
}

static void uploads_and_calls(void **state) {
  (void)state;
  qkv_gpu_device *device = open_one();
  qkv_error error = {0};
  for (uint32_t i = 0; i < 5; i++) assert_int_equal(upload_and_add(device, i, &error), QKV_OK);
  const qkv_gpu_info info = qkv_gpu_read(device);
  assert_string_equal(info.name, "fake 0");
  assert_string_equal(info.uuid, "a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
  assert_int_equal(info.major, 9);
  assert_int_equal(info.calls, 5);
  assert_int_equal(info.uploaded_bytes, 5 * 4 * NUMBERS);
  assert_int_equal(info.heap.bytes_used, 0);
  assert_true(info.up);
  qkv_gpu_close(&device);
  assert_nothing_is_left();
}

static void devices_have_names(void **state) {
  (void)state;
  qkv_gpu_device *device;
  qkv_error error = {0};
  assert_int_equal(open_named("GPU-b0b1b2b3-b4b5-b6b7-b8b9-babbbcbdbebf", 1000, &device, &error), QKV_OK);
  assert_string_equal(qkv_gpu_read(device).name, "fake 1");
  qkv_gpu_close(&device);
  assert_int_equal(open_named("2", 1000, &device, &error), QKV_NOT_FOUND);
  assert_null(device);
  assert_string_equal(error.text, "no GPU 2; the driver has 2");
  assert_nothing_is_left();
}

static void calls_have_a_limit(void **state) {
  (void)state;
  qkv_gpu_device *device = open_one();
  qkv_gpu_call *calls[3];
  for (size_t i = 0; i < 3; i++) assert_non_null(calls[i] = qkv_gpu_begin(device));
  assert_null(qkv_gpu_begin(device));
  qkv_gpu_end(calls[1]);
  assert_non_null(calls[1] = qkv_gpu_begin(device));
  for (size_t i = 0; i < 3; i++) qkv_gpu_end(calls[i]);
  qkv_gpu_close(&device);
  assert_nothing_is_left();
}

static void memory_that_runs_out_is_no_failure(void **state) {
  (void)state;
  qkv_gpu_device *device = open_one();
  fake_fail("cuMemAlloc", 1, QKV_CUDA_OUT_OF_MEMORY);
  assert_int_equal(qkv_gpu_alloc(device, 1000), 0);
  assert_true(qkv_gpu_is_up(device));
  const qkv_cuda_memory at = qkv_gpu_alloc(device, 1000);
  assert_int_not_equal(at, 0);
  qkv_gpu_free(device, at, 1000);
  qkv_gpu_close(&device);
  assert_nothing_is_left();
}

// What runs would read memory that others are given next.
static void memory_that_runs_out_meanwhile_is_one(void **state) {
  (void)state;
  static const char *const functions[] = {"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventQuery"};
  for (size_t i = 0; i < 4; i++) {
    qkv_gpu_device *device = open_one();
    qkv_error error = {0};
    fake_fail(functions[i], 2, QKV_CUDA_OUT_OF_MEMORY);
    for (int n = 0; n < 3 && qkv_gpu_is_up(device); n++) (void)upload_and_add(device, 1, &error);
    assert_false(qkv_gpu_is_up(device));
    qkv_gpu_close(&device);
    assert_nothing_is_left();
  }
}

// Any function fails, at any call: an error, never a wrong number, and nothing is leaked.
static void every_function_may_fail(void **state) {
  (void)state;
  static const char *const functions[] = {
#define X(name, version, parameters) "cu" #name,
      QKV_CUDA_FUNCTIONS(X)
#undef X
  };
  size_t failed = 0;
  for (size_t f = 0; f < sizeof functions / sizeof *functions; f++) {
    for (unsigned nth = 1; nth <= 12; nth++) {
      qkv_gpu_device *device;
      qkv_error error = {0};
      const unsigned before = fake_count(functions[f]);
      fake_fail(functions[f], nth, 719);
      qkv_status status = open_named("0", 10000, &device, &error);
      for (uint32_t i = 0; status == QKV_OK && i < 2; i++) status = upload_and_add(device, i, &error);
      const bool hit = fake_count(functions[f]) - before >= nth;
      if (status != QKV_OK) {
        failed++;
        assert_true(hit);
        assert_true(error.text[0] != 0);
        if (device != NULL) assert_false(qkv_gpu_is_up(device));
        if (device != NULL) assert_null(qkv_gpu_begin(device));
      }
      qkv_gpu_close(&device);
      fake_fail("", 1, 0);
      driver.DevicePrimaryCtxReset(0);  // where it failed before there was a context to close
      assert_nothing_is_left();
    }
  }
  assert_true(failed > 60);
}

// A device whose events never complete, from the nth query on: the wait reports it.
static void assert_given_up(unsigned nth, const char *reason) {
  qkv_gpu_device *device;
  qkv_error error = {0};
  assert_int_equal(open_named("0", 30, &device, &error), QKV_OK);
  fake_fail("cuEventQuery", nth, FAKE_CUDA_HANG);
  assert_int_equal(upload_and_add(device, 2, &error), QKV_UNAVAILABLE);
  assert_false(qkv_gpu_is_up(device));
  assert_string_equal(qkv_gpu_read(device).reason, reason);
  qkv_gpu_close(&device);
  assert_nothing_is_left();
}

static void what_does_not_end_is_given_up(void **state) {
  (void)state;
  qkv_gpu_device *device = open_one();
  qkv_error error = {0};
  const unsigned before = fake_count("cuEventQuery");
  assert_int_equal(upload_and_add(device, 1, &error), QKV_OK);
  const unsigned questions = fake_count("cuEventQuery") - before;
  uint32_t back[NUMBERS];
  const qkv_gpu_copy_back copy = {back, qkv_gpu_alloc(device, sizeof back), sizeof back};
  assert_int_equal(qkv_gpu_download(device, &copy, 1, &error), QKV_OK);
  const unsigned of_download = fake_count("cuEventQuery") - before - questions;
  qkv_gpu_close(&device);
  assert_given_up(1, "an upload: did not end in time");
  assert_given_up(questions - of_download, "a call: did not end in time");
  assert_given_up(questions, "a download: did not end in time");
  device = open_one();
  assert_int_equal(upload_and_add(device, 3, &error), QKV_OK);
  qkv_gpu_close(&device);
  assert_nothing_is_left();
}

static void *use(void *context) {
  qkv_gpu_device *device = context;
  uintptr_t good = 0;
  for (uint32_t i = 0; i < ROUNDS; i++) {
    qkv_error error = {0};
    const qkv_status status = upload_and_add(device, i, &error);
    if (status == QKV_OK) good++;
  }
  return (void *)good;
}

static void many_threads(void **state) {
  (void)state;
  qkv_gpu_device *device = open_one();
  pthread_t threads[THREADS];
  uintptr_t good = 0;
  for (size_t i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, use, device), 0);
  for (size_t i = 0; i < THREADS; i++) {
    void *result;
    pthread_join(threads[i], &result);
    good += (uintptr_t)result;
  }
  assert_true(good > ROUNDS);  // a thread that finds no call computes without
  assert_int_equal(qkv_gpu_read(device).calls, good);
  qkv_gpu_close(&device);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(uploads_and_calls),
                                     cmocka_unit_test(devices_have_names),
                                     cmocka_unit_test(calls_have_a_limit),
                                     cmocka_unit_test(memory_that_runs_out_is_no_failure),
                                     cmocka_unit_test(memory_that_runs_out_meanwhile_is_one),
                                     cmocka_unit_test(every_function_may_fail),
                                     cmocka_unit_test(many_threads),
                                     cmocka_unit_test(what_does_not_end_is_given_up)};
  return cmocka_run_group_tests(tests, load, NULL);
}
