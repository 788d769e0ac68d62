// Keys of the archive frame on their way to scores, page by page and never as rows.
//
// Before RoPE a key is x_t = mean + sum_c z_tc synthesis_c. So coordinate j of all 64 rows is what the integer
// kernels call scores: of the codes and a query that is column j of the synthesis. All columns together make one
// block of queries, rounded to one byte or two as the codes need it; the result lies [coordinate][slot], as the next
// steps need it: RoPE turns pairs of coordinates by an angle a slot, and the products with the real queries are sums
// over coordinates. Queries are turned back by the page's centre before, as in the attend frame (phases.h).
//
// One byte errs by the step of a column's largest number; that is compared to the codes' error with the second
// moments of queries that the calibration was made for: with A the analysis, w its weights, they are A^T w A.
//
// Threads: immutable once created.
#ifndef QKV_ENGINE_CODEC_REBUILD_H
#define QKV_ENGINE_CODEC_REBUILD_H

#include <stddef.h>

#include "engine/codec/transform.h"
#include "engine/kernel/integer.h"

typedef struct qkv_rebuild {
  qkv_integer_queries columns;  // [dim]
  size_t bytes;                 // of memory, all in all
} qkv_rebuild;

// The most bytes that one for keys of a width has.
size_t qkv_rebuild_cost(size_t dim);
// For keys of a tier and those below. The transform is needed no longer than the call.
qkv_rebuild *qkv_rebuild_create(const qkv_transform *keys, unsigned tier);
void qkv_rebuild_destroy(qkv_rebuild **rebuild);

#endif
