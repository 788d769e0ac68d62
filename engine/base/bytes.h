// A run of bytes that may lie in several pieces: what a network message gives us, read in place.
//
//   segments   [ 16 KiB ][ 9 KiB ][ 7 B ]      length = the sum
//
// A qkv_bytes is a view: it borrows its segments and the memory behind them, copies nothing and is passed by
// value. A place in it is found by binary search, and at once where it lies in the first segment or the next,
// so that reading forwards by slices costs a memcpy.
#ifndef QKV_ENGINE_BASE_BYTES_H
#define QKV_ENGINE_BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qkv_segment {
  const uint8_t *data;
  size_t length;  // bytes
  size_t end;     // bytes of the run up to here; qkv_bytes_of_all fills it in
} qkv_segment;

typedef struct qkv_bytes {
  const qkv_segment *segments;
  size_t segment_count;
  size_t offset;  // of the view's first byte in segments[0]; < segments[0].length unless the view is empty
  size_t length;  // bytes of the view
} qkv_bytes;

// One segment, which the caller keeps alive, as well as its data.
qkv_bytes qkv_bytes_of(const qkv_segment *segment);

// All of the segments. Empty segments are allowed. An array belongs to one run.
qkv_bytes qkv_bytes_of_all(qkv_segment *segments, size_t segment_count);

// [offset, offset + length) of a view, which must contain it (asserted).
qkv_bytes qkv_bytes_slice(qkv_bytes bytes, size_t offset, size_t length);

// Copies [offset, offset + length) to `out`. The range must lie inside (asserted).
void qkv_bytes_copy(qkv_bytes bytes, size_t offset, size_t length, void *out);

// Where [offset, offset + length) lies in one piece, a pointer to it (of no particular alignment), else NULL.
const uint8_t *qkv_bytes_contiguous(qkv_bytes bytes, size_t offset, size_t length);

#endif
