// Part of qkv-bench share: one call attends sessions that were forked, in turn with the same sessions made one by
// one, whose pages are as many times in memory. Results of both must have the same bits (asserted).
#ifndef QKV_CLIENT_BENCH_SHARE_ATTEND_H
#define QKV_CLIENT_BENCH_SHARE_ATTEND_H

#include "client/bench/bench.h"

typedef struct qkv_bench_shared_attend {
  const char *kernels;
  struct {
    double us_shared, us_apart;  // medians
  } groups[2];                   // with one query head a KV head, and with four
} qkv_bench_shared_attend;

// By sessions, shared_tokens, dim, kv_heads, code_k, threads and repeats of the settings. Says what is wrong on
// standard error and returns an exit status.
int qkv_bench_share_attend(const qkv_bench_settings *settings, qkv_bench_shared_attend *result);
// Adds attend_ratio_g1 and attend_ratio_g4, the times of shared over those of apart, and both in us.
void qkv_bench_share_attend_report(const qkv_bench_shared_attend *result, json_t *object);

#endif
