// What the host makes for the attend kernels (attend.h): tables, queries, and which kernel takes them.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_KERNEL_SIMT_OPERANDS_H
#define QKV_ENGINE_KERNEL_SIMT_OPERANDS_H

#include <stddef.h>

#include "engine/kernel/integer.h"
#include "engine/kernel/simt/attend.h"

// A kernel of attend.c.
typedef struct qkv_simt_shape {
  const char *name;
  unsigned dim, rows, query_parts, weight_parts;
} qkv_simt_shape;

// The n-th one; NULL beyond the last.
const qkv_simt_shape *qkv_simt_shape_at(size_t n);
// The one for so many rows, or for the first of them where there are more than it takes. NULL: there is none.
const qkv_simt_shape *qkv_simt_shape_for(unsigned dim, unsigned query_parts, unsigned weight_parts, unsigned rows);

// Of the CPU's tables (kernel/table.h), which are filled.
void qkv_simt_tables_fill(qkv_simt_tables *tables);

// Rows [first, first + count) of a block, at most those of the shape, to `out` [QKV_SIMT_QUERY_BYTES(dim)].
// `integers` are the block's queries as `prepare` (kernel/kernel.h) makes them, rows [integers->count][dim] the
// queries as attended.
void qkv_simt_queries_fill(const qkv_simt_shape *shape, const qkv_integer_queries *integers, const float *rows,
                           size_t first, size_t count, void *out);

// The partial result of a row of the shape, as a kernel has left it: its sums [dim].
const float *qkv_simt_partial_row(const qkv_simt_shape *shape, const void *partial, unsigned row, float *peak,
                                  double *total);

#endif
