// A daemon for one run of a benchmark: the qkvd in the directory of this program, on a unix socket of its own.
#ifndef QKV_CLIENT_BENCH_DAEMON_H
#define QKV_CLIENT_BENCH_DAEMON_H

#include <stdbool.h>
#include <sys/types.h>

typedef struct qkv_bench_daemon {
  pid_t pid;         // 0: not ours, --target was given
  char target[160];  // for qkv_client_connect
  char directory[64];
} qkv_bench_daemon;

// Uses `target` where given; else starts a daemon, which learns no calibrations, with further arguments
// (NULL-terminated). False, and a sentence on standard error, where that fails.
bool qkv_bench_daemon_start(qkv_bench_daemon *daemon, const char *target, const char *const *arguments);
// Stops what start has started.
void qkv_bench_daemon_stop(qkv_bench_daemon *daemon);

#endif
