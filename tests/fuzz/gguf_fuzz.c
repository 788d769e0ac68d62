// client/format/gguf.h and client/worker/tokenizer_gguf.c: a file from a stranger; what is handed out lies inside it,
// and a tokenizer that it has takes any text.
#include <stdlib.h>
#include <string.h>

#include "client/format/gguf.h"
#include "client/worker/tokenizer.h"
#include "tests/fuzz/fuzz.h"

static void read_tensor(const qkv_gguf_tensor *tensor, const uint8_t *copy, size_t size) {
  if (tensor->data < copy || tensor->data + tensor->bytes > copy + size) __builtin_trap();
  if (tensor->rank < 1 || tensor->rank > QKV_GGUF_RANK_MAX || tensor->count < 1) __builtin_trap();
  if (tensor->count > 1 << 20) return;
  float *values = calloc((size_t)tensor->count, sizeof *values);
  if (values == NULL) abort();
  qkv_gguf_to_float(tensor, values);
  free(values);
}

static void encode(qkvi_tokenizer *tokenizer, const uint8_t *text, size_t size) {
  int32_t *tokens = NULL;
  int64_t count = 0;
  qkvi_tokenizer_encode(tokenizer, text, (int64_t)size, true, &tokens, &count);
  for (int64_t i = 0; i < count; i++) {
    size_t bytes = 0;
    if (tokens[i] < 0 || tokens[i] >= qkvi_tokenizer_vocabulary(tokenizer)) __builtin_trap();
    (void)qkvi_tokenizer_decode(tokenizer, tokens[i], &bytes);
  }
  free(tokens);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  uint8_t *copy = malloc(size > 0 ? size : 1);
  if (copy == NULL) abort();
  if (size > 0) memcpy(copy, data, size);
  qkv_gguf *file = NULL;
  qkv_error error = {0}, refused = {0};
  if (qkv_gguf_parse(copy, size, &file, &error) == QKV_OK) {
    for (size_t i = 0; i < qkv_gguf_tensors(file); i++) read_tensor(qkv_gguf_tensor_at(file, i), copy, size);
    qkvi_tokenizer *tokenizer = NULL;
    if (qkvi_tokenizer_gguf(file, &tokenizer, &refused) == QKV_OK) {
      encode(tokenizer, data, size);
    } else if (tokenizer != NULL || refused.text[0] == '\0') {
      __builtin_trap();
    }
    qkvi_tokenizer_destroy(&tokenizer);
    qkv_gguf_close(&file);
  } else if (file != NULL || error.text[0] == '\0') {
    __builtin_trap();
  }
  free(copy);
  return 0;
}
