// Options: one table for command line, environment and file.
//
// A program declares its options as rows of a const table. Each has a name (`memory-budget`), which gives the
// flag (`--memory-budget 4GB` or `--memory-budget=4GB`), the environment variable (`QKVD_MEMORY_BUDGET`: the
// program's prefix, upper case, '-' becomes '_') and the key in the YAML file (`memory-budget: 4GB`). Later
// sources win: default, file, environment, flag. An unknown key is an error that names the closest known one.
//
// Values live in the caller's struct at the row's offset. Strings and lists are owned by the option set.
//
// Threads: set up by one thread before others start; read-only afterwards.
#ifndef QKV_ENGINE_BASE_OPTION_H
#define QKV_ENGINE_BASE_OPTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "engine/base/status.h"

typedef enum qkv_option_kind {
  QKV_OPTION_FLAG,      // bool; no value on the command line, true/false elsewhere
  QKV_OPTION_INTEGER,   // int64_t within [min, max]
  QKV_OPTION_REAL,      // double within [min, max]
  QKV_OPTION_BYTES,     // int64_t bytes within [min, max]; "4096", "64KiB", "1.5GB" (KB, MB, GB, TB and KiB ..)
  QKV_OPTION_DURATION,  // int64_t milliseconds within [min, max]; "250ms", "60s", "5m", "1h"
  QKV_OPTION_STRING,    // const char *, NULL when unset and without a default
  QKV_OPTION_LIST,      // qkv_option_list; repeatable on the command line, a sequence in the file, "a,b" elsewhere
} qkv_option_kind;

typedef struct qkv_option_list {
  const char **items;
  size_t count;
} qkv_option_list;

typedef struct qkv_option {
  const char *name;  // "memory-budget"
  qkv_option_kind kind;
  size_t offset;              // of the value in the caller's struct
  const char *default_value;  // as text, or NULL: false, 0, NULL, empty
  double min, max;            // numbers; both 0: not limited
  const char *value_name;     // for --help: "BYTES", "FILE"
  const char *help;           // one sentence; says the unit
} qkv_option;

typedef enum qkv_option_source {
  QKV_FROM_DEFAULT,
  QKV_FROM_FILE,
  QKV_FROM_ENVIRONMENT,
  QKV_FROM_FLAG
} qkv_option_source;

typedef struct qkv_options qkv_options;

// A set over `table` (borrowed, `count` rows) that stores into `values` and has the defaults now.
// `environment_prefix` is "QKVD_", or NULL for a program without environment variables. Aborts on a table
// whose own defaults do not parse (ours).
qkv_options *qkv_options_create(const qkv_option *table, size_t count, const char *environment_prefix, void *values);
void qkv_options_destroy(qkv_options **options);

// Each reads one source and keeps what a stronger source has set; what it keeps out is checked all the same. A list
// grows by one item for each flag. Environment variables that match no row are ignored: others have the prefix too
// (the clients' QKVD_TARGET, the links that Kubernetes sets for a service of our name).
// NOT_FOUND: the file does not exist. INVALID_ARGUMENT texts:
//   unknown option --memry-budget; did you mean --memory-budget?
//   --threads is 0, allowed are 1 to 256
//   qkvd.yaml: line 3: unknown key "memry-budget"; did you mean "memory-budget"?
qkv_status qkv_options_read_environment(qkv_options *options, qkv_error *error);
qkv_status qkv_options_read_file(qkv_options *options, const char *path, qkv_error *error);
// From argv[1] on; words that are no options are collected in *positional (pointers into argv, the array owned
// by the set). "--" ends the options. `argv` must outlive the set.
qkv_status qkv_options_read_arguments(qkv_options *options, int argc, char **argv, qkv_option_list *positional,
                                      qkv_error *error);

// One value by name, as the sources would give it. For tests and for programs that set things themselves.
qkv_status qkv_options_set(qkv_options *options, const char *name, const char *text, qkv_option_source source,
                           qkv_error *error);

qkv_option_source qkv_options_source(const qkv_options *options, const char *name);
// The value in force, as text, into `text`.
void qkv_options_text(const qkv_options *options, size_t row, char *text, size_t size);

// The table as help: flag, value name, environment variable, default, limits, help text.
void qkv_options_help(const qkv_options *options, FILE *out);

#endif
