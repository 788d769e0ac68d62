#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"

// A person at a terminal wants to know soon; a daemon that is starting up gets this long.
enum { CONNECT_TIMEOUT_MS = 3000 };

qkv_client *qkvctl_connect(const qkvctl_values *values) {
  int64_t timeout_ms = values->program.timeout_ms;
  qkv_client_options options = {
      QKV_PROGRAM_CONNECTION(values->program),
      .timeout_ms = timeout_ms,
      .connect_timeout_ms = timeout_ms < CONNECT_TIMEOUT_MS ? timeout_ms : CONNECT_TIMEOUT_MS,
  };
  qkv_client *client = NULL;
  qkv_call_error error = {0};
  if (qkv_client_connect(values->program.target, &options, &client, &error) != 0) {
    (void)qkv_program_failed("%s", error.text);
  }
  return client;
}

int qkvctl_next_page(const char *next, char token[QKVCTL_PAGE_TOKEN_BYTES]) {
  const size_t length = strlen(next);
  if (length >= QKVCTL_PAGE_TOKEN_BYTES)
    return qkv_program_failed("the daemon's page token has %zu bytes, at most %d are possible", length,
                              QKVCTL_PAGE_TOKEN_BYTES - 1);
  if (length > 0 && strcmp(next, token) == 0)
    return qkv_program_failed("the daemon gives the same page token again: the list would never end");
  memcpy(token, next, length + 1);
  return QKV_EXIT_OK;
}

qkv_status qkvctl_parse_position(const char *text, const char *what, uint64_t *position, qkv_error *error) {
  char *end = NULL;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value > INT64_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is \"%s\", a number from 0 on is needed", what, text);
  }
  *position = value;
  return QKV_OK;
}
