#include "client/common/durability.h"

#include <string.h>

static const char *const names[] = {"memory", "async", "sync"};
enum { NAMES = sizeof names / sizeof *names };

qkv_status qkvi_durability_parse(const char *text, int *durability, qkv_error *error) {
  *durability = 0;
  if (text == NULL) return QKV_OK;
  for (int i = 0; i < NAMES; i++) {
    if (strcmp(text, names[i]) == 0) *durability = i + 1;
  }
  if (*durability != 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "--durability is %.64s, known are memory, async and sync", text);
}

const char *qkvi_durability_name(int durability) {
  return names[durability >= 1 && durability <= NAMES ? durability - 1 : 0];
}
