// GGUF files made for tests, byte by byte, so that they can be wrong, too.
//
//   gguf_bytes file = {0};
//   gguf_begin(&file, 3, tensors, entries);
//   gguf_put_string(&file, "general.architecture", "llama"); ...
//   gguf_put_tensor(&file, "output_norm.weight", QKV_GGUF_F32, 1, (int64_t[]){8}, 0); ...
//   gguf_align(&file, 32); gguf_put(&file, data, bytes);
#ifndef QKV_TESTS_CLIENT_GGUF_BYTES_H
#define QKV_TESTS_CLIENT_GGUF_BYTES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "client/format/gguf.h"

typedef struct gguf_bytes {
  uint8_t *data;
  size_t count, capacity;
} gguf_bytes;

static inline void gguf_put(gguf_bytes *file, const void *data, size_t bytes) {
  if (file->count + bytes > file->capacity) {
    file->capacity = 2 * (file->count + bytes);
    file->data = realloc(file->data, file->capacity);
    if (file->data == NULL) abort();
  }
  if (bytes > 0) memcpy(file->data + file->count, data, bytes);
  file->count += bytes;
}

static inline void gguf_put_u32(gguf_bytes *file, uint32_t value) {
  gguf_put(file, &value, sizeof value);
}

static inline void gguf_put_u64(gguf_bytes *file, uint64_t value) {
  gguf_put(file, &value, sizeof value);
}

static inline void gguf_put_text(gguf_bytes *file, const char *text) {
  gguf_put_u64(file, strlen(text));
  gguf_put(file, text, strlen(text));
}

static inline void gguf_begin(gguf_bytes *file, uint32_t version, uint64_t tensors, uint64_t entries) {
  file->count = 0;
  gguf_put(file, "GGUF", 4);
  gguf_put_u32(file, version);
  gguf_put_u64(file, tensors);
  gguf_put_u64(file, entries);
}

static inline void gguf_put_string(gguf_bytes *file, const char *key, const char *value) {
  gguf_put_text(file, key);
  gguf_put_u32(file, QKV_GGUF_STRING);
  gguf_put_text(file, value);
}

static inline void gguf_put_integer(gguf_bytes *file, const char *key, uint32_t value) {
  gguf_put_text(file, key);
  gguf_put_u32(file, QKV_GGUF_UINT32);
  gguf_put_u32(file, value);
}

static inline void gguf_put_number(gguf_bytes *file, const char *key, float value) {
  gguf_put_text(file, key);
  gguf_put_u32(file, QKV_GGUF_FLOAT32);
  gguf_put(file, &value, sizeof value);
}

// The elements follow: gguf_put_text or gguf_put_u32 each.
static inline void gguf_put_array(gguf_bytes *file, const char *key, uint32_t kind, uint64_t count) {
  gguf_put_text(file, key);
  gguf_put_u32(file, QKV_GGUF_ARRAY);
  gguf_put_u32(file, kind);
  gguf_put_u64(file, count);
}

static inline void gguf_put_tensor(gguf_bytes *file, const char *name, uint32_t type, int rank, const int64_t *dims,
                                   uint64_t offset) {
  gguf_put_text(file, name);
  gguf_put_u32(file, (uint32_t)rank);
  for (int i = 0; i < rank; i++) gguf_put_u64(file, (uint64_t)dims[i]);
  gguf_put_u32(file, type);
  gguf_put_u64(file, offset);
}

static inline void gguf_align(gguf_bytes *file, size_t alignment) {
  while (file->count % alignment != 0) gguf_put(file, "", 1);
}

// ---- A tokenizer ----
//
// Tokens 0 to 255 are the bytes, then those of the merges below, then <|im_start|> and <|im_end|>.

enum { GGUF_MERGES = 6, GGUF_START = 256 + GGUF_MERGES, GGUF_END, GGUF_VOCABULARY, GGUF_TOKENIZER_ENTRIES = 6 };

// What a byte is called: a character of its own, in UTF-8 and terminated.
static inline void gguf_byte_name(int byte, char name[3]) {
  int character = 256;
  for (int i = 0; i <= byte; i++) {
    const int itself = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
    if (i == byte && itself) character = i;
    if (i < byte && !itself) character++;
  }
  name[0] = (char)(character < 128 ? character : 0xc0 | character >> 6);
  name[1] = (char)(character < 128 ? 0 : 0x80 | (character & 63));
  name[2] = 0;
}

static inline void gguf_put_tokenizer(gguf_bytes *file, const char *pre) {
  // "\xc4\xa0" is the blank. What each gives is the token 256, 257, ...
  static const char *const merges[GGUF_MERGES] = {"h e", "l l", "he ll", "hell o", "\xc4\xa0 hello", "a a"};
  gguf_put_string(file, "tokenizer.ggml.model", "gpt2");
  gguf_put_string(file, "tokenizer.ggml.pre", pre);
  gguf_put_array(file, "tokenizer.ggml.tokens", QKV_GGUF_STRING, GGUF_VOCABULARY);
  for (int i = 0; i < 256; i++) {
    char name[3];
    gguf_byte_name(i, name);
    gguf_put_text(file, name);
  }
  for (int i = 0; i < GGUF_MERGES; i++) {
    const char *blank = strchr(merges[i], ' ');
    gguf_put_u64(file, strlen(merges[i]) - 1);
    gguf_put(file, merges[i], (size_t)(blank - merges[i]));
    gguf_put(file, blank + 1, strlen(blank + 1));
  }
  gguf_put_text(file, "<|im_start|>");
  gguf_put_text(file, "<|im_end|>");
  gguf_put_array(file, "tokenizer.ggml.token_type", QKV_GGUF_INT32, GGUF_VOCABULARY);
  for (int i = 0; i < GGUF_VOCABULARY; i++) gguf_put_u32(file, i < GGUF_START ? 1 : 3);
  gguf_put_array(file, "tokenizer.ggml.merges", QKV_GGUF_STRING, GGUF_MERGES);
  for (int i = 0; i < GGUF_MERGES; i++) gguf_put_text(file, merges[i]);
  gguf_put_string(file, "tokenizer.chat_template",
                  "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{{ '<|im_start|>' + message['role'] }}");
}

static inline void gguf_free(gguf_bytes *file) {
  free(file->data);
  *file = (gguf_bytes){0};
}

#endif
