// engine/codec/page.h: an image that passes validation may be read by every function of its codec.
#include <stdlib.h>
#include <string.h>

#include "engine/codec/codec.h"
#include "tests/fuzz/fuzz.h"

// Pages of more coordinates are refused here to keep one run short.
#define COORDINATES_MAX 4096

static void read_head(const qkv_codec *codec, const void *page, const qkv_page_header *header, uint16_t head) {
  const size_t width_max = header->key_dim > header->value_dim ? header->key_dim : header->value_dim;
  float *rows = calloc(QKV_PAGE_TOKENS * width_max, sizeof(float));
  float *scores = calloc(QKV_PAGE_TOKENS, sizeof(float));
  float *vector = calloc(width_max, sizeof(float));
  if (rows == NULL || scores == NULL || vector == NULL) abort();
  codec->decode(page, head, QKV_K, rows);
  codec->rows_match(page, head, QKV_K, 0, header->tokens, rows);
  codec->decode(page, head, QKV_V, rows);
  codec->rows_match(page, head, QKV_V, 0, header->tokens, rows);
  for (size_t i = 0; i < width_max; i++) vector[i] = (float)(i % 7) - 3.0f;
  codec->scores(page, head, vector, 1, scores);
  codec->accumulate(page, head, scores, 1, vector);
  free(rows);
  free(scores);
  free(vector);
}

static void read_page(const qkv_codec *codec, const void *image) {
  qkv_page_header header;
  memcpy(&header, image, sizeof header);
  if ((size_t)header.kv_heads * (header.key_dim + header.value_dim) > COORDINATES_MAX) return;
  for (uint16_t head = 0; head < header.kv_heads; head++) read_head(codec, image, &header, head);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const qkv_codec *codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  uint8_t *image = aligned_alloc(64, (size + 64) / 64 * 64);
  if (image == NULL) abort();
  if (size > 0) memcpy(image, data, size);
  // Bytes behind `size` belong to the allocation only.
  __builtin_memset(image + size, 0xa5, (size + 64) / 64 * 64 - size);
  qkv_error error = {0};
  if (codec->validate(image, size, &error) == QKV_OK) read_page(codec, image);
  // A fuzzer does not guess checksums: the same image again with length and checksum put right.
  if (size >= sizeof(qkv_page_header) && size <= UINT32_MAX) {
    uint32_t bytes = (uint32_t)size;
    memcpy(image + offsetof(qkv_page_header, bytes), &bytes, sizeof bytes);
    qkv_page_seal(image);
    error = (qkv_error){0};
    if (codec->validate(image, size, &error) == QKV_OK) {
      read_page(codec, image);
    } else if (error.text[0] == '\0') {
      __builtin_trap();
    }
  }
  free(image);
  return 0;
}
