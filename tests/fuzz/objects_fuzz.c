// server/objects/pieces.h: PutObjectsRequest; the bytes of every piece may be read, and its strings are whole.
#include "server/objects/pieces.h"

#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"

typedef struct seen {
  size_t pieces, bytes, most;
} seen;

static void read_string(const char *string) {
  if (string == NULL || strlen(string) > 1 << 20) __builtin_trap();
}

static qkv_status see_piece(void *context, const qkvi_put_piece *piece, qkv_error *error) {
  seen *all = context;
  all->pieces++;
  all->bytes += piece->data.length;
  if (all->bytes > all->most) __builtin_trap();
  uint8_t *copy = malloc(piece->data.length + 1);
  if (copy == NULL) abort();
  qkv_bytes_copy(piece->data, 0, piece->data.length, copy);
  free(copy);
  if (piece->begin != NULL) {
    read_string(piece->begin->object);
    read_string(piece->begin->tenant);
  }
  // As a handler that refuses one piece in sixteen.
  if (all->pieces % 16 == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "refused");
  return QKV_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz_message message;
  fuzz_message_init(&message, data, size);
  qkv_error error = {0};
  seen all = {.most = size};
  qkv_status status = QKV_OK;
  qkvi_put_pieces pieces;
  qkvi_put_pieces_init(&pieces, message.bytes);
  for (bool more = true; more && status == QKV_OK;)
    status = qkvi_put_pieces_next(&pieces, see_piece, &all, &more, &error);
  if (status != error.status || (status != QKV_OK) != (error.text[0] != '\0')) __builtin_trap();
  if (all.pieces >= 16 && status == QKV_OK) __builtin_trap();
  fuzz_message_deinit(&message);
  return 0;
}
