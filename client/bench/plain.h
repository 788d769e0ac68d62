// What attention on codes is compared with: the same bytes read and nothing else, attention on plain rows as one
// would write it without codes, and the error, against double precision.
#ifndef QKV_CLIENT_BENCH_PLAIN_H
#define QKV_CLIENT_BENCH_PLAIN_H

#include "client/bench/pages.h"
#include "engine/base/pool.h"

// Reads the bytes of all pages, in the order that they are attended in, a share for each thread; returns something
// that depends on them all.
uint64_t qkv_bench_read(qkv_pool *pool, const qkv_bench_pages *pages);

// Dense K and V of one session, [kv_heads][tokens][dim] in `dtype`, on 2 MiB pages where these are to be had.
typedef struct qkv_bench_plain {
  const qkv_bench_pages *pages;
  qkv_dtype dtype;
  size_t tokens;
  void *k, *v;
  float *out;
} qkv_bench_plain;

void qkv_bench_plain_init(qkv_bench_plain *plain, const qkv_bench_pages *pages, qkv_dtype dtype, size_t tokens);
void qkv_bench_plain_deinit(qkv_bench_plain *plain);
// The last query token of all heads, in tiles of 64 tokens, all query heads of a KV head at once.
void qkv_bench_plain_run(qkv_pool *pool, const qkv_bench_plain *plain);

// Relative to the norm of the right outputs, over all heads of session 0's last query, within its first `tokens`
// tokens at most: of attention on codes as it was asked for, and of the codes themselves.
typedef struct qkv_bench_error {
  double arithmetic, code;
} qkv_bench_error;
qkv_bench_error qkv_bench_measure_error(const qkv_bench_pages *pages, size_t tokens);

#endif
