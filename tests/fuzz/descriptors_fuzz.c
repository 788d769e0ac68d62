// server/handlers/descriptors.h: names of files and symbols that reflection is asked for.
#include "server/handlers/descriptors.h"

#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"

static void check_imports(size_t file) {
  qkv_segment files[QKVI_DESCRIPTOR_FILES_MAX];
  size_t count = qkvi_descriptors_with_imports(file, files);
  if (count == 0 || count > QKVI_DESCRIPTOR_FILES_MAX) __builtin_trap();
  for (size_t i = 0; i < count; i++) {
    if (files[i].length == 0) __builtin_trap();
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size + 1);
  if (text == NULL) abort();
  if (size > 0) memcpy(text, data, size);
  text[size] = '\0';
  size_t file = 0;
  if (qkvi_descriptors_file(text, &file)) check_imports(file);
  if (qkvi_descriptors_symbol(text, &file)) check_imports(file);
  free(text);
  return 0;
}
