// The command line of a client program: PROGRAM COMMAND [ARGUMENTS] [OPTIONS].
//
// A program is a table of commands; every command has its own option table (engine/base/option.h) over the
// program's one struct of values, which begins with a qkv_program. This file does what is the same everywhere:
// finding the command, --help of the program and of each command, --version, the closest name to a misspelt
// command, and usage errors (exit status 2).
#ifndef QKV_CLIENT_COMMON_PROGRAM_H
#define QKV_CLIENT_COMMON_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/option.h"

enum { QKV_EXIT_OK = 0, QKV_EXIT_FAILED = 1, QKV_EXIT_USAGE = 2 };

// The options that every command has.
typedef struct qkv_program {
  const char *target;                                    // --target, else $QKVD_TARGET, else 127.0.0.1:7580
  const char *tenant;                                    // --tenant, else $QKVD_TENANT, else NULL
  const char *placement;                                 // --placement, else $QKVD_PLACEMENT, else NULL
  const char *tls_ca, *tls_cert, *tls_key, *token_file;  // or $QKVD_TLS_CA and so on; NULL
  int64_t timeout_ms;
  bool json, help, version;
} qkv_program;

// The rows of those options, for a values struct `type` that begins with a qkv_program.
// clang-format off
#define QKV_PROGRAM_TENANT_OPTION(type)                                                                          \
  {"tenant", QKV_OPTION_STRING, offsetof(type, program.tenant), NULL, 0, 0, "NAME",                              \
   "whose sessions and prefixes are meant, \"default\" when not given (also the environment variable QKVD_TENANT)"}
#define QKV_PROGRAM_PLACEMENT_OPTION(type)                                                                       \
  {"placement", QKV_OPTION_STRING, offsetof(type, program.placement), NULL, 0, 0, "LABEL",                       \
   "of several daemons the label's is meant, and not each session's (also QKVD_PLACEMENT)"}
#define QKV_PROGRAM_SECURITY_OPTIONS(type)                                                                       \
  {"tls-ca", QKV_OPTION_STRING, offsetof(type, program.tls_ca), NULL, 0, 0, "FILE",                              \
   "authorities of the daemon's certificate: the connection is TLS (also QKVD_TLS_CA)"},                         \
  {"tls-cert", QKV_OPTION_STRING, offsetof(type, program.tls_cert), NULL, 0, 0, "FILE",                          \
   "certificate to show the daemon (also QKVD_TLS_CERT)"},                                                       \
  {"tls-key", QKV_OPTION_STRING, offsetof(type, program.tls_key), NULL, 0, 0, "FILE",                            \
   "its private key (also QKVD_TLS_KEY)"},                                                                       \
  {"token-file", QKV_OPTION_STRING, offsetof(type, program.token_file), NULL, 0, 0, "FILE",                      \
   "file with the bearer token (also QKVD_TOKEN_FILE; QKVD_TOKEN is the token itself)"}
// How they enter a qkv_client_options.
#define QKV_PROGRAM_CONNECTION(values)                                                                           \
  .tenant = (values).tenant, .placement = (values).placement, .tls_ca = (values).tls_ca, .tls_cert = (values).tls_cert,                           \
  .tls_key = (values).tls_key, .token_file = (values).token_file,                                                \
  .token = (values).token_file == NULL ? qkv_program_environment("QKVD_TOKEN") : NULL
#define QKV_PROGRAM_OPTIONS(type)                                                                                \
  {"target", QKV_OPTION_STRING, offsetof(type, program.target), "127.0.0.1:7580", 0, 0, "ADDRESS",               \
   "the daemon: unix:PATH or HOST:PORT, or several with commas (also the environment variable QKVD_TARGET)"},    \
  QKV_PROGRAM_TENANT_OPTION(type),                                                                              \
  QKV_PROGRAM_PLACEMENT_OPTION(type),                                                                            \
  QKV_PROGRAM_SECURITY_OPTIONS(type),                                                                            \
  {"timeout", QKV_OPTION_DURATION, offsetof(type, program.timeout_ms), "60s", 1, 86400000, "TIME",               \
   "how long a call to the daemon may take"},                                                                    \
  {"json", QKV_OPTION_FLAG, offsetof(type, program.json), NULL, 0, 0, NULL,                                      \
   "print one JSON object a line on standard output"},                                                           \
  {"help", QKV_OPTION_FLAG, offsetof(type, program.help), NULL, 0, 0, NULL, "show this help"},                   \
  {"version", QKV_OPTION_FLAG, offsetof(type, program.version), NULL, 0, 0, NULL, "show the version"}
// clang-format on

typedef struct qkv_command {
  const char *name;       // "fetch"
  const char *arguments;  // "SESSION", for --help; "" when there are none
  const char *summary;    // one line
  const qkv_option *options;
  size_t option_count;
  size_t arguments_min, arguments_max;
  // Returns the exit status. `values` is the program's struct, `arguments` the words that are no options.
  int (*run)(void *values, const qkv_option_list *arguments);
} qkv_command;

typedef struct qkv_command_set {
  const char *program;  // "qkvctl"
  const char *summary;  // what it is, one sentence
  const qkv_command *commands;
  size_t command_count;
  void *values;  // zeroed; begins with a qkv_program
} qkv_command_set;

// What main() returns.
int qkv_program_run(const qkv_command_set *set, int argc, char **argv);

// The variable's value; NULL where it is not set or empty, as scripts leave it that have nothing to say.
const char *qkv_program_environment(const char *variable);

// "PROGRAM: text" and a line end on standard error. Returns QKV_EXIT_FAILED.
int qkv_program_failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The same, for wrong usage. Returns QKV_EXIT_USAGE.
int qkv_program_misused(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
