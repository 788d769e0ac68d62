// An option table with a row of every kind, for the two targets that read options.
#ifndef QKV_TESTS_FUZZ_OPTIONS_H
#define QKV_TESTS_FUZZ_OPTIONS_H

#include <stddef.h>

#include "engine/base/option.h"

typedef struct fuzz_values {
  bool flag;
  int64_t integer;
  double real;
  int64_t bytes;
  int64_t duration;
  const char *string;
  qkv_option_list list;
} fuzz_values;

#define FUZZ_OPTIONS 7
static const qkv_option fuzz_options[FUZZ_OPTIONS] = {
    {"flag", QKV_OPTION_FLAG, offsetof(fuzz_values, flag), NULL, 0, 0, NULL, "a flag"},
    {"integer", QKV_OPTION_INTEGER, offsetof(fuzz_values, integer), "1", 1, 256, "N", "a number"},
    {"real", QKV_OPTION_REAL, offsetof(fuzz_values, real), "4", 1, 8, "X", "a real number"},
    {"bytes", QKV_OPTION_BYTES, offsetof(fuzz_values, bytes), "4KiB", 1024, 1e18, "BYTES", "a size"},
    {"duration", QKV_OPTION_DURATION, offsetof(fuzz_values, duration), "10s", 0, 1e12, "TIME", "a duration"},
    {"string", QKV_OPTION_STRING, offsetof(fuzz_values, string), NULL, 0, 0, "TEXT", "a text"},
    {"list", QKV_OPTION_LIST, offsetof(fuzz_values, list), NULL, 0, 0, "TEXT", "several texts"},
};

// Values that were taken lie within the rows' limits.
static inline void fuzz_values_check(const fuzz_values *values) {
  if (values->integer < 1 || values->integer > 256) __builtin_trap();
  if (!(values->real >= 1 && values->real <= 8)) __builtin_trap();
  if (values->bytes < 1024 || values->duration < 0) __builtin_trap();
  for (size_t i = 0; i < values->list.count; i++) {
    if (values->list.items[i] == NULL) __builtin_trap();
  }
}

#endif
