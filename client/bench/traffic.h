// Sessions of pseudo-random rows on the SSD tier of a running daemon, for spill and interference.
#ifndef QKV_CLIENT_BENCH_TRAFFIC_H
#define QKV_CLIENT_BENCH_TRAFFIC_H

#include "client/bench/bench.h"

enum { QKV_BENCH_CHUNK_TOKENS = 512 };  // of an append

typedef struct qkv_bench_traffic {
  const qkv_bench_settings *settings;  // rounds: layers
  char model[96];
  uint16_t *k, *v;  // rows of one chunk
  float *q;         // one query
} qkv_bench_traffic;

// `name`: of the model, its shape is added.
void qkv_bench_traffic_init(qkv_bench_traffic *traffic, const qkv_bench_settings *settings, const char *name);
void qkv_bench_traffic_deinit(qkv_bench_traffic *traffic);

// These return 0, or say on standard error why not.
int qkv_bench_traffic_register(const qkv_bench_traffic *traffic, qkv_client *client);  // again is no error
// ASYNC, without predictions; one of this name, of a run before, is closed.
int qkv_bench_traffic_open(const qkv_bench_traffic *traffic, qkv_client *client, const char *session);
// The chunk at `position`, to settings->tokens at most.
int qkv_bench_traffic_append(const qkv_bench_traffic *traffic, qkv_client *client, const char *session, int64_t layer,
                             int64_t position);
// The query at the last position.
int qkv_bench_traffic_attend(const qkv_bench_traffic *traffic, qkv_client *client, const char *session,
                             int64_t layer);
// Brings a layer back into memory.
int qkv_bench_traffic_prefetch(const qkv_bench_traffic *traffic, qkv_client *client, const char *session,
                               int64_t layer);

#endif
