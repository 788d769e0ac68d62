#include "storage/gpu/device.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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
  const qkv_cuda_memory other = qkv_gpu_alloc(device, sizeof numbers);
  if (status == QKV_OK && other == 0) status = qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "no memory");
  if (status == QKV_OK) status = qkv_gpu_copy_within(device, other, at, sizeof numbers, error);
  const qkv_gpu_copy_back backs[] = {{back, at, 12}, {back + 3, other + 12, 2900}, {back + 728, at + 2912, 1088}};
  if (status == QKV_OK) status = qkv_gpu_download(device, backs, 3, error);
  if (status == QKV_OK) assert_memory_equal(back, numbers, sizeof back);
  qkv_gpu_free(device, at, sizeof numbers);
  if (other != 0) qkv_gpu_free(device, other, sizeof numbers);
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
  static const char *const functions[] = {"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync",
                                          "cuEventRecord", "cuEventQuery"};
  for (size_t i = 0; i < 5; i++) {
    qkv_gpu_device *device = open_one();
    qkv_error error = {0};
    fake_fail(functions[i], 2, QKV_CUDA_OUT_OF_MEMORY);
    for (int n = 0; n < 4 && qkv_gpu_is_up(device); n++) (void)upload_and_add(device, 1, &error);
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
  const qkv_cuda_memory other = qkv_gpu_alloc(device, sizeof back);
  assert_int_equal(qkv_gpu_copy_within(device, other, copy.from, sizeof back, &error), QKV_OK);
  const unsigned of_copy = fake_count("cuEventQuery") - before - questions - of_download;
  qkv_gpu_close(&device);
  assert_given_up(1, "an upload: did not end in time");
  assert_given_up(questions - of_download - of_copy, "a call: did not end in time");
  assert_given_up(questions - of_download, "a copy: did not end in time");
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

// ---- Memory of other processes ----

enum { LENT_BYTES = 1 << 18 };

static qkv_cuda_ipc handle_of(const char *key) {
  qkv_cuda_ipc handle = {0};
  snprintf((char *)handle.bytes, sizeof handle.bytes, "ekaf%s", key);
  return handle;
}

// Numbers go there and come back, more than staging holds, from an odd place on.
static void cross(qkv_gpu_device *device, qkv_cuda_memory at, uint8_t *seen) {
  uint8_t sent[5000], back[5000];
  qkv_error error = {0};
  for (size_t i = 0; i < sizeof sent; i++) sent[i] = (uint8_t)(i * 7 + i / 256);
  const qkv_gpu_copy copy = {.to = at + 3, .from = sent, .bytes = sizeof sent};
  assert_int_equal(qkv_gpu_upload(device, &copy, 1, &error), QKV_OK);
  assert_memory_equal(seen + 3, sent, sizeof sent);
  memset(seen + 100, 0x77, 50);
  memset(sent + 97, 0x77, 50);
  const qkv_gpu_copy_back copy_back = {.to = back, .from = at + 3, .bytes = sizeof back};
  assert_int_equal(qkv_gpu_download(device, &copy_back, 1, &error), QKV_OK);
  assert_memory_equal(back, sent, sizeof back);
}

static void memory_is_opened_by_a_handle(void **state) {
  (void)state;
  qkv_gpu_device *device = open_one();
  qkv_error error = {0};
  qkv_gpu_lent lent[2];
  char key[40];
  snprintf(key, sizeof key, "/qkv-device-test-%d", (int)getpid());
  const int fd = shm_open(key, O_CREAT | O_EXCL | O_RDWR, 0600);
  assert_true(fd >= 0 && ftruncate(fd, LENT_BYTES) == 0);
  uint8_t *seen = mmap(NULL, LENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_ptr_not_equal(seen, MAP_FAILED);
  qkv_cuda_ipc handle = handle_of(key);
  for (size_t i = 0; i < 2; i++) assert_int_equal(qkv_gpu_open_handle(device, &handle, &lent[i], &error), QKV_OK);
  assert_int_equal(lent[0].bytes, LENT_BYTES);
  assert_int_equal(lent[0].at, lent[1].at);
  cross(device, lent[0].at, seen);
  qkv_gpu_close_lent(device, &lent[0]);
  cross(device, lent[1].at, seen);
  qkv_gpu_close_lent(device, &lent[1]);
  handle.bytes[0]++;
  assert_int_equal(qkv_gpu_open_handle(device, &handle, &lent[0], &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "GPU fake 0: cuIpcOpenMemHandle: FAKE_ERROR (1)");
  handle.bytes[0]--;
  fake_fail("cuMemGetAddressRange", 1, 1);
  assert_int_equal(qkv_gpu_open_handle(device, &handle, &lent[0], &error), QKV_INVALID_ARGUMENT);
  assert_true(qkv_gpu_is_up(device));
  fake_fail("cuIpcOpenMemHandle", 1, 700);  // of the device itself
  assert_int_equal(qkv_gpu_open_handle(device, &handle, &lent[0], &error), QKV_UNAVAILABLE);
  assert_false(qkv_gpu_is_up(device));
  qkv_gpu_close(&device);
  assert_nothing_is_left();
  assert_int_equal(shm_unlink(key), 0);
  munmap(seen, LENT_BYTES);
  close(fd);
}

static void memory_is_opened_by_descriptors(void **state) {
  (void)state;
  enum { COUNT = 3, EACH = LENT_BYTES / 2 };
  qkv_gpu_device *device = open_one();
  qkv_error error = {0};
  qkv_gpu_lent lent;
  int fds[COUNT];
  uint8_t *seen[COUNT];
  for (int i = 0; i < COUNT; i++) {
    fds[i] = memfd_create("lent", MFD_CLOEXEC);
    assert_true(fds[i] >= 0 && ftruncate(fds[i], EACH) == 0);
    seen[i] = mmap(NULL, EACH, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0);
    assert_ptr_not_equal(seen[i], MAP_FAILED);
  }
  assert_int_equal(qkv_gpu_open_descriptors(device, fds, COUNT, EACH, &lent, &error), QKV_OK);
  assert_int_equal(lent.bytes, COUNT * EACH);
  for (size_t i = 0; i < COUNT; i++) cross(device, lent.at + i * EACH, seen[i]);
  qkv_gpu_close_lent(device, &lent);

  assert_int_equal(qkv_gpu_open_descriptors(device, fds, COUNT, 2 * EACH, &lent, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "GPU fake 0: cuMemMap: FAKE_ERROR (1)");
  const int folder = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), kept = fds[2];
  fds[2] = folder;
  error = (qkv_error){0};
  assert_int_equal(qkv_gpu_open_descriptors(device, fds, COUNT, EACH, &lent, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "GPU fake 0: cuMemImportFromShareableHandle: FAKE_ERROR (1)");
  fds[2] = kept;
  close(folder);
  static const char *const functions[] = {"cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap",
                                          "cuMemSetAccess"};
  for (size_t i = 0; i < 4; i++) {
    for (unsigned nth = 1; nth <= (i == 1 || i == 2 ? COUNT : 1); nth++) {
      fake_fail(functions[i], nth, nth % 2 == 1 ? QKV_CUDA_INVALID_VALUE : QKV_CUDA_OUT_OF_MEMORY);
      assert_int_equal(qkv_gpu_open_descriptors(device, fds, COUNT, EACH, &lent, &error),
                       nth % 2 == 1 ? QKV_INVALID_ARGUMENT : QKV_RESOURCE_EXHAUSTED);
    }
  }
  assert_true(qkv_gpu_is_up(device));
  assert_int_equal(qkv_gpu_open_descriptors(device, fds, COUNT, EACH, &lent, &error), QKV_OK);
  cross(device, lent.at, seen[0]);
  fake_fail("cuMemcpyDtoHAsync", 1, 719);  // the reset ends mappings
  uint8_t byte;
  assert_int_equal(qkv_gpu_download(device, &(qkv_gpu_copy_back){&byte, lent.at, 1}, 1, &error), QKV_UNAVAILABLE);
  qkv_gpu_close_lent(device, &lent);
  qkv_gpu_close(&device);
  assert_nothing_is_left();
  for (int i = 0; i < COUNT; i++) {
    munmap(seen[i], EACH);
    close(fds[i]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(uploads_and_calls),
                                     cmocka_unit_test(devices_have_names),
                                     cmocka_unit_test(calls_have_a_limit),
                                     cmocka_unit_test(memory_that_runs_out_is_no_failure),
                                     cmocka_unit_test(memory_is_opened_by_a_handle),
                                     cmocka_unit_test(memory_is_opened_by_descriptors),
                                     cmocka_unit_test(memory_that_runs_out_meanwhile_is_one),
                                     cmocka_unit_test(every_function_may_fail),
                                     cmocka_unit_test(many_threads),
                                     cmocka_unit_test(what_does_not_end_is_given_up)};
  return cmocka_run_group_tests(tests, load, NULL);
}
