// engine/base/option.h: a configuration file of any content.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  int fd = memfd_create("config", MFD_CLOEXEC);
  if (fd < 0 || write(fd, data, size) != (ssize_t)size) abort();
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  fuzz_values values;
  qkv_options *options = qkv_options_create(fuzz_options, FUZZ_OPTIONS, NULL, &values);
  qkv_error error = {0};
  if (qkv_options_read_file(options, path, &error) != QKV_OK && error.text[0] == '\0') __builtin_trap();
  fuzz_values_check(&values);
  qkv_options_destroy(&options);
  close(fd);
  return 0;
}
