// The error of some queries' attention to a page that its codes cause (quality.h says what is measured).
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CACHE_QUALITY_MEASURE_H
#define QKV_ENGINE_CACHE_QUALITY_MEASURE_H

#include <stddef.h>

#include "engine/cache/quality.h"

// Some queries of one page, and their attention to its exact rows.
typedef struct qkvi_sample {
  const qkv_quality_page *page;
  float soft_cap;
  size_t rows;     // of each KV head, at most QKV_QUERY_BLOCK
  float *queries;  // [kv_heads][rows][key_dim]
  float *whole;    // [kv_heads][rows][value_dim]: their outputs, of all that the layer holds
  float *shares;   // [kv_heads][rows]: log-sum-exp of that; once answered the page's share in it
  float *weights;  // [kv_heads][rows][64]
  float *lse;      // [kv_heads][rows]
  float *out;      // [kv_heads][rows][value_dim]
  double square;   // of all that is in `whole`, each row times its share
  double share;    // the mean of shares, by the squares of `whole`
} qkvi_sample;

// Allocates so many rows, whose `queries`, `whole` and `shares` the caller fills in before it has them answered.
void qkvi_sample_init(qkvi_sample *sample, const qkv_quality_page *page, float soft_cap, size_t rows);
void qkvi_sample_deinit(qkvi_sample *sample);
// Shares count as `share_least` at least.
void qkvi_sample_answer(qkvi_sample *sample, float share_least);

// Squared errors, relative to the sample's squares.
typedef struct qkvi_missed {
  double parts[2];  // by qkv_part: with only the keys' or the values' codes
  double both;
} qkvi_missed;

// The error with `image`, a page of the same coder and rows. The sample's square is above 0. `parts` are left 0
// unless they are asked for.
qkvi_missed qkvi_sample_measure(const qkvi_sample *sample, const void *image, bool parts);

#endif
