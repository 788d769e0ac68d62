// Generation: a prompt is read and continued token by token, with the keys and values in a qkvi_kv.
//
// An exact cache may run on the same tokens, so that the two distributions of every generated one can
// be compared.
#ifndef QKV_CLIENT_WORKER_GENERATE_H
#define QKV_CLIENT_WORKER_GENERATE_H

#include <stdint.h>

#include "client/worker/exact.h"
#include "client/worker/figures.h"
#include "client/worker/forward.h"
#include "client/worker/kv.h"

typedef struct qkvi_generation qkvi_generation;

typedef struct qkvi_generation_options {
  int64_t positions_max;  // of the prompt and what is generated
  double temperature;     // 0: the likeliest token
  uint64_t seed;
  qkvi_exact *exact;  // the cache to compare with, borrowed; NULL: none
} qkvi_generation_options;

// `lm` and `kv` are borrowed.
qkvi_generation *qkvi_generation_create(const qkvi_lm *lm, qkvi_kv *kv, const qkvi_generation_options *options);
void qkvi_generation_destroy(qkvi_generation **generation);

// Runs tokens through the model, in batches where they are many.
qkv_status qkvi_generation_feed(qkvi_generation *generation, const int32_t *tokens, int64_t count, qkv_error *error);

// The next token, from what has been fed; feed it to go on. Adds to `quality` when there is an exact cache.
int32_t qkvi_generation_next(qkvi_generation *generation, qkvi_quality *quality);

#endif
