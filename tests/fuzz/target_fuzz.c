// client/c/socket.h: a target; what is taken fits the calls of the system that it goes to.
#include <stdlib.h>
#include <string.h>

#include "client/c/socket.h"
#include "tests/fuzz/fuzz.h"

static void check_target(const qkvi_target *target, const char *text) {
  if (target->is_unix) {
    if (strcmp(target->path, text + strlen("unix:")) != 0 || target->path[0] == '\0') __builtin_trap();
    return;
  }
  size_t host = strnlen(target->host, sizeof target->host);
  if (host == 0 || host == sizeof target->host || strstr(text, target->host) == NULL) __builtin_trap();
  if (memchr(target->port, '\0', sizeof target->port) == NULL) __builtin_trap();
  long port = strtol(target->port, NULL, 10);
  if (port < 1 || port > 65535) __builtin_trap();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size + 1);
  if (text == NULL) abort();
  if (size > 0) memcpy(text, data, size);
  text[size] = '\0';
  qkvi_target target;
  qkv_error error = {0};
  if (qkvi_target_parse(text, &target, &error) == QKV_OK) {
    check_target(&target, text);
  } else if (error.text[0] == '\0') {
    __builtin_trap();
  }
  free(text);
  return 0;
}
