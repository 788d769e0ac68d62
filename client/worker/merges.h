// Byte-pair merging: which two neighbouring tokens become one, and which pair of a piece of text comes first.
//
// Threads: one at a time for each qkvi_merges.
#ifndef QKV_CLIENT_WORKER_MERGES_H
#define QKV_CLIENT_WORKER_MERGES_H

#include <stddef.h>
#include <stdint.h>

// Pairs of tokens that become one.
typedef struct qkvi_merges qkvi_merges;

// For `count` pairs at most.
qkvi_merges *qkvi_merges_create(size_t count);
void qkvi_merges_destroy(qkvi_merges **merges);
// Adds the next pair, in the order of priority; a pair that was added before keeps its place.
void qkvi_merges_add(qkvi_merges *merges, int32_t left, int32_t right, int32_t merged);

// Merges the `count` tokens of a piece in place; returns how many are left. n log n, however long the piece.
size_t qkvi_merges_apply(qkvi_merges *merges, int32_t *tokens, size_t count);

#endif
