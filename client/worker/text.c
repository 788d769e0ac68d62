#include "client/worker/text.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define FILE_BYTES_MAX (INT64_C(1) << 30)

static qkv_status read_all(FILE *file, const char *path, uint8_t **data, int64_t *bytes, qkv_error *error) {
  struct stat info;
  if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size > FILE_BYTES_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no file of at most %" PRId64 " bytes", path, FILE_BYTES_MAX);
  }
  *bytes = info.st_size;
  *data = malloc((size_t)*bytes + 1);
  if (*data == NULL) abort();
  if (fread(*data, 1, (size_t)*bytes, file) == (size_t)*bytes) return QKV_OK;
  free(*data);
  *data = NULL;
  return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", path, ferror(file) ? strerror(errno) : "it has become shorter");
}

qkv_status qkvi_text_read(const char *path, uint8_t **data, int64_t *bytes, qkv_error *error) {
  *data = NULL;
  FILE *file = fopen(path, "rb");
  if (file == NULL) return qkv_fail(error, QKV_NOT_FOUND, "%s: %s", path, strerror(errno));
  qkv_status status = read_all(file, path, data, bytes, error);
  fclose(file);
  return status;
}

qkv_status qkvi_text_tokens(const qkvi_lm *lm, const char *path, int32_t **tokens, int64_t *count, qkv_error *error) {
  uint8_t *text = NULL;
  int64_t bytes = 0;
  *tokens = NULL;
  QKV_TRY(qkvi_text_read(path, &text, &bytes, error));
  qkvi_tokenizer_encode(lm->tokenizer, text, bytes, false, tokens, count);
  free(text);
  return QKV_OK;
}

int64_t qkvi_text_window(int64_t tokens, int64_t length, int64_t windows, int64_t index) {
  assert(tokens > length && index >= 0 && index < windows);
  if (windows == 1) return 0;
  return index * (tokens - (length + 1)) / (windows - 1);
}
