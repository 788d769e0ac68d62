// What attention is measured on: sessions of one layer, coded from random rows by way of the engine's own append, and
// queries to them.
//
// Rows are normal, each times a factor of its own, exp(0.3 z). With `calibrated` their coordinates have variances
// that fall by e every dim / 8, as those of a KLT do, in a basis that is not the coordinates'; queries likewise, so
// in code space they are as skewed as those of models. Sessions repeat the same ROWS rows, so that making them takes
// seconds.
#ifndef QKV_CLIENT_BENCH_PAGES_H
#define QKV_CLIENT_BENCH_PAGES_H

#include <stdbool.h>

#include "client/bench/bench.h"
#include "engine/cache/attend.h"
#include "engine/cache/coding.h"

enum { QKV_BENCH_ROWS = 4096 };

typedef struct qkv_bench_pages {
  qkv_model model;
  const qkv_calibration *calibration;  // or NULL
  qkv_coding *coding;
  qkv_arena *arena;
  qkv_layer *layers;  // [sessions]
  size_t sessions;
  uint64_t bytes;    // of all pages
  float *k, *v, *q;  // [QKV_BENCH_ROWS][kv_heads][dim] of tokens, as attended but for RoPE; [q_len][q_heads][key_dim]
  float *out, *lse;  // [sessions][q_len][q_heads][value_dim] and without the last
  qkv_segment segment;
  qkv_attend *requests;  // [sessions]
} qkv_bench_pages;

// From the settings; says what is wrong on standard error and returns an exit status.
int qkv_bench_pages_init(const qkv_bench_settings *settings, qkv_bench_pages *pages);
void qkv_bench_pages_deinit(qkv_bench_pages *pages);

// Appends the rows of positions [layer->length, end) to a layer of the same model, whose length is a multiple of
// QKV_BENCH_ROWS (asserted).
qkv_status qkv_bench_pages_append(const qkv_bench_pages *pages, qkv_layer *layer, uint64_t end, qkv_error *error);

#endif
