// How exact attention on codes is, and how exact it needs to be.
//
// In integers (kernel/integer.h) a query is rounded to whole numbers up to a limit, and a page's weights to one byte
// or two. Less takes less time and errs more; what matters is the error relative to that of the codes:
//
//   queries   steps of top / limit, the same in every coordinate that has bits, against sum_c sigma_c^2 D_c of the
//             codes, D_c the distortion of c's depth. In a byte (127), sigma_1 0.0061 where top is about 2.7 standard
//             deviations of the largest coordinate; taken as 0.0075
//   weights   0.0038 of the output in a byte (pages of equal weights and of very unequal ones err less), against
//             sqrt(D)
//
// Each may add a tenth. Measured on tinylm, data-free and calibrated, 1 to 8 bits, both together add 0.01 to 0.08
// (tests/client/bench/precision_test.c).
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_PRECISION_H
#define QKV_ENGINE_CODEC_PRECISION_H

#include "engine/codec/transform.h"

// The arithmetic on codes. The values are those of qkv.v1.AttendOptions.Precision. In floats in any case are exact
// rows, keys whose anchors are chains, keys of the archive frame that have factors or whose columns have one byte
// where two are asked for (rebuild.h), and values whose anchors are groups or chains or that have factors.
typedef enum qkv_precision {
  QKV_PRECISION_DEFAULT = 0,  // in integers, of one byte or two, as the codes need it
  QKV_PRECISION_FP32 = 1,
  QKV_PRECISION_INT16 = 2,  // two bytes for queries and weights
  QKV_PRECISION_INT8 = 3,   // two bytes for queries, one for weights
} qkv_precision;

// 1 or 2, the bytes for what adds so much to the squared error of a score, with the queries that the keys are coded
// for, when it is done with one.
unsigned qkvi_bytes_for(const qkv_transform *keys, unsigned tier, double error_squared);
// What the largest of a query's coordinates has to become, in whole numbers, for the keys of a tier: QKVI_LIMIT_1
// where a byte is enough, up to QKVI_LIMIT_2 (kernel/integer.h).
float qkvi_query_limit(const qkv_transform *keys, unsigned tier);
// The bytes of a weight that the values need: 1 or 2.
unsigned qkvi_weight_bytes(const qkv_transform *values, unsigned tier);

#endif
