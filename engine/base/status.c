#include "engine/base/status.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *qkv_status_text(qkv_status status) {
  switch (status) {
#define X(name, code, text) \
  case QKV_##name:          \
    return text;
    QKV_STATUS_MAP(X)
#undef X
  }
  return "unknown status";
}

const char *qkv_status_name(qkv_status status) {
  switch (status) {
#define X(name, code, text) \
  case QKV_##name:          \
    return #name;
    QKV_STATUS_MAP(X)
#undef X
  }
  return "UNKNOWN";
}

qkv_status qkv_fail(qkv_error *error, qkv_status status, const char *format, ...) {
  assert(status != QKV_OK);
  if (error == NULL || error->status != QKV_OK) return status;
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  error->status = status;
  return status;
}

qkv_status qkv_error_prefix(qkv_error *error, const char *format, ...) {
  assert(error->status != QKV_OK);
  char prefix[QKV_ERROR_TEXT_MAX];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(prefix, sizeof prefix, format, arguments);
  va_end(arguments);

  size_t prefix_length = strlen(prefix);
  size_t capacity = sizeof error->text - 1 - prefix_length;
  size_t kept = strnlen(error->text, capacity);
  memmove(error->text + prefix_length, error->text, kept);
  memcpy(error->text, prefix, prefix_length);
  error->text[prefix_length + kept] = '\0';
  return error->status;
}
