// Codecs compared on a session's own rows: bytes, and error of attention. Nothing of the session changes.
//
// The sample is up to QKV_COMPARE_PAGES times 64 tokens of up to QKV_COMPARE_LAYERS layers, evenly spread, and up to
// QKV_COMPARE_HEADS heads of each: exact rows where a layer has as many, else rows as they are in memory, so that a
// codec's error then comes on top of what the session's own code has missed. Every codec of the table codes it at
// 1, 2, 3, 4 and 8 bits where it has them; the error is that of random queries (probe.h).
//
// Takes 64 MiB at most, or one page of each layer where that is more; in all seconds of one processor, a codec at a
// time.
//
// Threads: one at a time, any. create holds one layer at a time, for reading, while its rows are copied; all of it
// yields (base/yield.h).
#ifndef QKV_ENGINE_CACHE_COMPARE_H
#define QKV_ENGINE_CACHE_COMPARE_H

#include "engine/cache/session.h"

#define QKV_COMPARE_LAYERS 4
#define QKV_COMPARE_PAGES 4
#define QKV_COMPARE_HEADS 8
#define QKV_COMPARE_BYTES ((size_t)64 << 20)  // of exact and of decoded rows
#define QKV_COMPARE_ROWS_MAX 128

typedef struct qkv_compared {
  const qkv_codec *codec;
  double bits;        // of codes
  bool calibrated;    // with the calibration in force
  double bytes;       // a token, of all layers, everything counted
  double coordinate;  // `bytes` as bits a coordinate
  double error;       // of attention's outputs, relative: root of the mean square over layers and heads
} qkv_compared;

typedef struct qkv_comparison {
  uint32_t layers;         // that were sampled
  uint64_t tokens, exact;  // of all these layers: sampled, and those of them whose rows were exact
  size_t count;
  qkv_compared rows[QKV_COMPARE_ROWS_MAX];
} qkv_comparison;

typedef struct qkv_comparer qkv_comparer;

// Takes the sample, and a reference to the session. FAILED_PRECONDITION: no layer has 64 tokens in memory.
qkv_status qkv_comparer_create(qkv_session *session, qkv_comparer **out, qkv_error *error);
void qkv_comparer_destroy(qkv_comparer **comparer);
// Measures the next codec; false: all have been.
bool qkv_comparer_step(qkv_comparer *comparer);
// So far; as long as the comparer.
const qkv_comparison *qkv_comparer_found(const qkv_comparer *comparer);

#endif
