// What the subcommands of qkv-bench share: settings, samples and their statistics, and how results are shown.
//
// A benchmark alternates what it compares, keeps every sample and reports medians; the machine's own limit is
// measured in the same run (raw.h).
#ifndef QKV_CLIENT_BENCH_BENCH_H
#define QKV_CLIENT_BENCH_BENCH_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/bench/daemon.h"
#include "client/c/qkv.h"
#include "client/common/program.h"
#include "engine/base/option.h"

// All subcommands' options; each one's table says which it has.
typedef struct qkv_bench_settings {
  qkv_program program;  // its target NULL: a daemon of its own
  int64_t repeats;
  int64_t bytes;   // of one message's rows
  int64_t rounds;  // operations a repeat
  bool store;      // append and fetch: the real engine instead of a discard
  bool shared;     // rows lie in memory that the daemon maps
  bool coded;      // rows cross as pages, which the client codes and decodes
  int64_t tokens, dim, kv_heads, q_heads;
  int64_t bits_k, bits_v;
  int64_t precision;  // as of AttendOptions
  // quality
  const char *model;        // a directory or a .gguf file
  const char *calibration;  // a file; NULL: data-free
  qkv_option_list texts, ways;
  int64_t windows, prefill, length;
  double code_k, code_v;       // 0: not given
  double code_bits;            // of both; 0: not given
  const char *codec;           // a codec of the table, or "all"; NULL: not given
  const char *frame, *anchor;  // NULL: not given
  const char *dtype;           // of rows before they are coded
  const char *csv;             // a file to write
  const char *dump;            // rows of another model, in place of model and texts
  double rope_theta;           // of that model; 0: none
  // storage
  const char *directory;
  int64_t record;  // payload bytes of one
  int64_t pause;   // ms
  bool keep;       // spill: the session
  bool codes;
  // attend
  int64_t value_dim;  // 0: dim
  int64_t q_len, sessions, threads;
  double low_share, low_bits;  // of groups that are at lower bits than the others
  bool calibrated, alone;
  const char *device;             // "cpu", "gpu"
  struct qkv_device *attends_on;  // of "gpu"; borrowed
  const char *order;              // "random", "linear"
  const char *clock;              // "wall", "cpu"
  const char *huge_pages;         // "auto", "off"; NULL: auto
  qkv_option_list cpu_mask;       // and encode, decode
  // heap
  const char *allocator;
  // share
  int64_t pages;
  int64_t shared_tokens;  // of every session, by attention
} qkv_bench_settings;

extern const qkv_command qkvi_bench_rpc, qkvi_bench_append, qkvi_bench_fetch, qkvi_bench_step, qkvi_bench_attend,
    qkvi_bench_encode, qkvi_bench_decode, qkvi_bench_entropy, qkvi_bench_quality, qkvi_bench_storage,
    qkvi_bench_spill, qkvi_bench_interference, qkvi_bench_heap, qkvi_bench_share, qkvi_bench_share_append;

// Rows that every table begins with: those of all client programs, but for the target, which has no default.
// clang-format off
#define QKV_BENCH_OPTIONS                                                                                        \
  {"target", QKV_OPTION_STRING, offsetof(qkv_bench_settings, program.target), NULL, 0, 0, "ADDRESS",             \
   "unix:PATH or HOST:PORT of a running daemon; without it one is started for the run"},                         \
  QKV_PROGRAM_TENANT_OPTION(qkv_bench_settings),                                                                 \
  QKV_PROGRAM_PLACEMENT_OPTION(qkv_bench_settings),                                                              \
  QKV_PROGRAM_SECURITY_OPTIONS(qkv_bench_settings),                                                              \
  {"timeout", QKV_OPTION_DURATION, offsetof(qkv_bench_settings, program.timeout_ms), "60s", 1, 86400000, "TIME", \
   "how long a call to the daemon may take"},                                                                    \
  {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,                        \
   "print one JSON object a line on standard output"},                                                           \
  {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},     \
  {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL,                  \
   "show the version"},                                                                                          \
  {"repeats", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, repeats), "7", 1, 1000, "N",                      \
   "repeats; medians are reported"}
// clang-format on

// Samples in one unit.
typedef struct qkv_samples {
  double *values;
  size_t count, capacity;
} qkv_samples;

void qkv_samples_add(qkv_samples *samples, double value);
void qkv_samples_clear(qkv_samples *samples);
void qkv_samples_free(qkv_samples *samples);
// The p-quantile, p in [0, 1], of what was added (at least one sample); sorts.
double qkv_samples_quantile(qkv_samples *samples, double p);

// Seconds on a monotonic clock.
double qkv_bench_now(void);

// `bytes` of pseudo-random fp16 values in [-2, 2): never zeros, nothing that compresses. The caller frees.
void *qkv_bench_rows(size_t bytes, uint64_t seed);
// Likewise, as floats.
void qkv_bench_floats(float *out, size_t count, uint64_t seed);

// Prints one result: as a JSON line (with --json) or as "name value" columns. Takes the reference.
void qkv_bench_report(const qkv_bench_settings *settings, json_t *result);

// Takes the kernels that --cpu-mask allows. Returns 0, or says on standard error what the list has wrong and returns
// an exit status.
int qkv_bench_take_mask(const qkv_bench_settings *settings);

// Connects to `target`, or explains on standard error and returns NULL.
qkv_client *qkv_bench_connect(const qkv_bench_settings *settings, const char *target);
// Says why a call failed, on standard error; returns QKV_EXIT_FAILED.
int qkv_bench_failed(const char *what, const qkv_call_error *error);

#endif
