#include "tests/fuzz/fuzz.h"

#include <stdlib.h>
#include <string.h>

void fuzz_message_init(fuzz_message *message, const uint8_t *data, size_t size) {
  size_t cut = size > 0 ? data[0] : 0;
  const uint8_t *next = size > 0 ? data + 1 : data;
  size_t left = size > 0 ? size - 1 : 0;
  for (size_t i = 0; i < FUZZ_PARTS_MAX; i++) {
    size_t length = i + 1 == FUZZ_PARTS_MAX ? left : cut * (i + 1) % (left + 1);
    uint8_t *piece = malloc(length > 0 ? length : 1);
    if (piece == NULL) abort();
    if (length > 0) memcpy(piece, next, length);
    message->segments[i] = (qkv_segment){.data = piece, .length = length};
    next += length;
    left -= length;
  }
  message->bytes = qkv_bytes_of_all(message->segments, FUZZ_PARTS_MAX);
}

void fuzz_message_deinit(fuzz_message *message) {
  for (size_t i = 0; i < FUZZ_PARTS_MAX; i++) free((void *)message->segments[i].data);
}
