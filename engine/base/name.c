#include "engine/base/name.h"

#include <stdbool.h>
#include <string.h>

static bool name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         (c != '\0' && strchr("._:/@-", c) != NULL);
}

qkv_status qkv_name_check(const char *name, const char *field, qkv_error *error) {
  size_t length = strnlen(name, QKV_NAME_MAX + 1);
  if (length == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is empty", field);
  if (length > QKV_NAME_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is longer than %d characters", field, QKV_NAME_MAX);
  }
  for (size_t i = 0; i < length; i++) {
    if (name_character(name[i])) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has byte 0x%02x at %zu, allowed are letters, digits and ._:/@-",
                    field, (unsigned)(unsigned char)name[i], i);
  }
  return QKV_OK;
}
