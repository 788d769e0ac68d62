// client/format/safetensors.h: a file from a stranger; what is handed out lies inside it.
#include <stdlib.h>
#include <string.h>

#include "client/format/safetensors.h"
#include "tests/fuzz/fuzz.h"

static void read_tensor(const qkv_safetensors_tensor *tensor, const uint8_t *copy, size_t size) {
  const uint8_t *begin = tensor->data;
  if (begin < copy || begin + tensor->bytes > copy + size) __builtin_trap();
  if (tensor->name == NULL || tensor->rank < 0 || tensor->rank > QKV_TENSOR_RANK_MAX) __builtin_trap();
  uint8_t sum = 0;
  for (size_t i = 0; i < tensor->bytes; i++) sum ^= begin[i];
  volatile uint8_t sink = sum;
  (void)sink;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  uint8_t *copy = malloc(size > 0 ? size : 1);
  if (copy == NULL) abort();
  if (size > 0) memcpy(copy, data, size);
  qkv_safetensors *file = NULL;
  qkv_error error = {0};
  if (qkv_safetensors_parse(copy, size, &file, &error) == QKV_OK) {
    for (size_t i = 0; i < qkv_safetensors_count(file); i++) {
      const qkv_safetensors_tensor *tensor = qkv_safetensors_at(file, i);
      read_tensor(tensor, copy, size);
      if (qkv_safetensors_find(file, tensor->name) == NULL) __builtin_trap();
    }
    qkv_safetensors_metadata(file, "format");
    qkv_safetensors_close(&file);
  } else if (file != NULL || error.text[0] == '\0') {
    __builtin_trap();
  }
  free(copy);
  return 0;
}
