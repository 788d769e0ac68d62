// The free ranges of a span of bytes: disjoint, never touching each other, in order of where they begin.
//
// A treap whose nodes know the largest hole of their subtree, so that the first hole of at least so many bytes is
// found on one way down, and the neighbours of a range that is given back as well: O(log n) expected. Nodes come from
// malloc.
//
// Threads: the caller's lock.
#ifndef QKV_ENGINE_BASE_HOLES_H
#define QKV_ENGINE_BASE_HOLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qkvi_hole qkvi_hole;

typedef struct qkvi_holes {
  qkvi_hole *root;
  size_t count;
  uint64_t bytes;   // of all holes
  uint64_t random;  // any state but 0
} qkvi_holes;

#define QKVI_HOLES_NONE ((qkvi_holes){.random = 1})

void qkvi_holes_deinit(qkvi_holes *holes);
// The first `bytes` (> 0) of the first hole that has them; false where none has.
bool qkvi_holes_take(qkvi_holes *holes, uint64_t bytes, uint64_t *at);
// [at, at + bytes) is free from now on; it must not have been in part (asserted).
void qkvi_holes_give(qkvi_holes *holes, uint64_t at, uint64_t bytes);
// Calls fn with every hole, the last one first, until it returns false.
bool qkvi_holes_each_back(const qkvi_holes *holes, bool (*fn)(void *context, uint64_t at, uint64_t bytes),
                          void *context);
// NULL, or the invariant that does not hold.
const char *qkvi_holes_validate(const qkvi_holes *holes);

#endif
