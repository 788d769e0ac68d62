// What codes of a page miss of the attention that some queries pay to it (quality.h says what is measured).
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CACHE_QUALITY_MEASURE_H
#define QKV_ENGINE_CACHE_QUALITY_MEASURE_H

#include <stddef.h>

#include "engine/cache/quality.h"

// Some queries before one page, and what its exact rows answer.
typedef struct qkvi_sample {
  const qkv_quality_page *page;
  float soft_cap;
  size_t rows;     // of each KV head, at most QKV_QUERY_BLOCK
  float *queries;  // [kv_heads][rows][key_dim]
  float *weights;  // [kv_heads][rows][64]
  float *lse;      // [kv_heads][rows]
  float *out;      // [kv_heads][rows][value_dim]
  double square;   // of all that is in `out`
} qkvi_sample;

// Room for so many rows, which the caller fills in before it has them answered.
void qkvi_sample_init(qkvi_sample *sample, const qkv_quality_page *page, float soft_cap, size_t rows);
void qkvi_sample_deinit(qkvi_sample *sample);
void qkvi_sample_answer(qkvi_sample *sample);

// Squared errors, relative to the sample's squares.
typedef struct qkvi_missed {
  double parts[2];  // by qkv_part: with only the keys' or the values' codes
  double both;
} qkvi_missed;

// What `image` misses, a page of the same coder and rows. The sample's square is above 0. `parts` are left 0 unless
// they are asked for.
qkvi_missed qkvi_sample_measure(const qkvi_sample *sample, const void *image, bool parts);

#endif
