#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"

static bool read_number(const char **text, uint64_t *number) {
  if (**text < '0' || **text > '9') return false;
  char *end = NULL;
  *number = strtoull(*text, &end, 10);  // too large a number gives the largest, which no model has
  *text = end;
  return true;
}

// "3" or "3-7" at *text.
static bool read_range(const char **text, uint64_t *first, uint64_t *last) {
  if (!read_number(text, first)) return false;
  *last = *first;
  if (**text != '-') return true;
  (*text)++;
  return read_number(text, last) && *first <= *last;
}

qkv_status qkvctl_parse_layers(const char *text, uint32_t layers, uint32_t *chosen, size_t *count, qkv_error *error) {
  bool *wanted = calloc((size_t)layers + 1, sizeof *wanted);
  assert(wanted != NULL);
  qkv_status status = QKV_OK;
  *count = 0;
  if (text == NULL) memset(wanted, true, layers);
  for (const char *at = text; at != NULL && status == QKV_OK;) {
    uint64_t first = 0, last = 0;
    if (!read_range(&at, &first, &last) || (*at != '\0' && *at != ',')) {
      status = qkv_fail(error, QKV_INVALID_ARGUMENT, "--layers is \"%s\", a list such as 0,2-5 is needed", text);
    } else if (last >= layers) {
      status = qkv_fail(error, QKV_INVALID_ARGUMENT,
                        "--layers names layer %" PRIu64 ", the session has 0 to %" PRIu32, last, layers - 1);
    } else {
      for (uint64_t i = first; i <= last; i++) wanted[i] = true;
    }
    at = *at == ',' ? at + 1 : NULL;
  }
  for (uint32_t i = 0; i < layers && status == QKV_OK; i++) {
    if (wanted[i]) chosen[(*count)++] = i;
  }
  free(wanted);
  return status;
}
