// What option.c, option_value.c, option_file.c and option_help.c share. Private to them: see option.h.
#ifndef QKV_ENGINE_BASE_OPTION_INTERNAL_H
#define QKV_ENGINE_BASE_OPTION_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/option.h"
#include "engine/base/status.h"

struct qkv_options {
  const qkv_option *table;  // borrowed
  size_t count;             // rows
  const char *environment_prefix;
  void *values;                // the caller's struct
  qkv_option_source *sources;  // one a row: where the value in force came from
  qkv_option_list positional;  // the array is ours, the words are argv's
};

// A value without an option around it. Only the member of the row's kind is set.
typedef struct qkvi_option_value {
  bool flag;
  int64_t integer;  // INTEGER, BYTES, DURATION
  double real;
} qkvi_option_value;

// What `text` means for a row of a kind with a number or a flag. `label` is what a refusal names: "--threads".
qkv_status qkvi_option_parse(const qkv_option *row, const char *label, const char *text, qkvi_option_value *value,
                             qkv_error *error);

// A number of a kind as text: "4GiB", "60s", "0.5". `integer` counts unless the kind is REAL.
void qkvi_option_number_text(qkv_option_kind kind, int64_t integer, double real, char *text, size_t size);
// What a row allows, "1 to 256"; "" where nothing is limited.
void qkvi_option_limits_text(const qkv_option *row, char *text, size_t size);

// The row called `name`, or NULL.
const qkv_option *qkvi_option_find(const qkv_options *options, const char *name);
// The known name with the fewest edits to `name`.
const char *qkvi_option_closest(const qkv_options *options, const char *name);
// "memory-budget" as "QKVD_MEMORY_BUDGET".
void qkvi_option_variable(const qkv_options *options, const char *name, char *variable, size_t size);

// Stores `text` unless a stronger source has set the row; checks it in any case. A list grows by one item from
// a flag or a file and is replaced, split at commas, by the others.
qkv_status qkvi_option_store(qkv_options *options, const qkv_option *row, const char *label, const char *text,
                             qkv_option_source source, qkv_error *error);
// Empties a list that a file sets.
void qkvi_option_clear_list(qkv_options *options, const qkv_option *row, qkv_option_source source);

#endif
