#include "storage/gpu/driver.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

// In a separate process, with the library at `path` as libcuda.so.1: the error of loading begins with `text`.
static int load_with(const char *path, const char *variable, const char *value, qkv_status expected,
                     const char *text) {
  const pid_t child = fork();
  if (child == 0) {
    qkv_cuda_driver driver;
    qkv_error error = {0};
    if (variable != NULL) setenv(variable, value, 1);
    if (path != NULL && dlopen(path, RTLD_NOW) == NULL) _exit(2);
    const qkv_status status = qkv_cuda_load(&driver, &error);
    const bool good = status == expected && strstr(error.text, text) == error.text;
    if (!good) print_message("%s: %s\n", qkv_status_name(status), error.text);
    _exit(good ? 0 : 1);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void each_reason_is_a_sentence(void **state) {
  (void)state;
  assert_int_equal(load_with(FAKE_CUDA, NULL, NULL, QKV_OK, ""), 0);
  assert_int_equal(load_with(STUB_CUDA, NULL, NULL, QKV_UNAVAILABLE, "the CUDA driver is older than CUDA 12"), 0);
  assert_int_equal(load_with(FAKE_CUDA, "FAKE_CUDA_WITHOUT", "cuLaunchKernel", QKV_UNAVAILABLE,
                             "the CUDA driver has no cuLaunchKernel"),
                   0);
  assert_int_equal(load_with(FAKE_CUDA, "FAKE_CUDA_FAIL", "cuInit:1:100", QKV_UNAVAILABLE,
                             "the CUDA driver does not start: FAKE_ERROR (100)"),
                   0);
}

static void no_library(void **state) {
  (void)state;
  void *real = dlopen("libcuda.so.1", RTLD_NOW);
  if (real != NULL) {
    print_message("skipped: this machine has a CUDA driver\n");
    skip();
  }
  assert_int_equal(load_with(NULL, NULL, NULL, QKV_UNAVAILABLE, "no CUDA driver: libcuda.so.1"), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(each_reason_is_a_sentence), cmocka_unit_test(no_library)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
