// What the host makes for the attend kernels (attend.h): tables, queries, and which kernel takes them.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_KERNEL_SIMT_OPERANDS_H
#define QKV_ENGINE_KERNEL_SIMT_OPERANDS_H

#include <stddef.h>

#include "engine/kernel/integer.h"
#include "engine/kernel/simt/attend.h"
#include "engine/kernel/simt/calibrated.h"
#include "engine/kernel/simt/rows.h"

// A kernel of attend.c that attends. A calibrated one takes numbers of one byte and two, has a turn kernel that runs
// before it, and other queries and pages (calibrated.h).
typedef struct qkv_simt_shape {
  const char *name;
  unsigned dim, rows, query_parts, weight_parts;
  unsigned shared_bytes;  // of a block
  const char *turn;       // name of the turn kernel; NULL: not calibrated
} qkv_simt_shape;

// The n-th one; NULL beyond the last.
const qkv_simt_shape *qkv_simt_shape_at(size_t n);
// The one for so many rows, or for the first of them where there are more than it takes. NULL: there is none.
const qkv_simt_shape *qkv_simt_shape_for(unsigned dim, unsigned query_parts, unsigned weight_parts, unsigned rows);

// The calibrated one.
const qkv_simt_shape *qkv_simt_shape_calibrated(unsigned dim);
// Bytes of a block of queries of the shape.
size_t qkv_simt_query_bytes(const qkv_simt_shape *shape);

// Of the CPU's tables (kernel/table.h), which are filled.
void qkv_simt_tables_fill(qkv_simt_tables *tables);
void qkv_simt_row_tables_fill(qkv_simt_row_tables *tables);
void qkv_simt_encode_tables_fill(qkv_simt_encode_tables *tables);

// Rows [first, first + count) of a block, at most those of the shape, to `out` [QKV_SIMT_QUERY_BYTES(dim)].
// `integers` are the block's queries as `prepare` (kernel/kernel.h) makes them, rows [integers->count][dim] the
// queries as attended.
void qkv_simt_queries_fill(const qkv_simt_shape *shape, const qkv_integer_queries *integers, const float *rows,
                           size_t first, size_t count, void *out);

// Rows as attended [count][dim], `count` up to four, and `head` with what is said of them, to `out`
// [QKV_SIMT_FRAME_QUERY_BYTES(dim)]; the caller fills what is behind the rows: *behind, zeros.
void qkv_simt_frame_queries_fill(const qkv_simt_frame_queries *head, const float *rows, size_t count, size_t dim,
                                 void *out, uint8_t **behind);
// A turned block (calibrated.h) of rows [first, first + count), which is the same for all pages: `added` [count] to
// each score. `out` is zeros.
void qkv_simt_turned_fill(const qkv_integer_queries *integers, const float *added, size_t first, size_t count,
                          uint8_t *out);

// The partial result of a row of the shape, as a kernel has left it: its sums [dim].
const float *qkv_simt_partial_row(const qkv_simt_shape *shape, const void *partial, unsigned row, float *peak,
                                  double *total);

#endif
