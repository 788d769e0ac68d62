#include "engine/base/bytes.h"

#include <assert.h>
#include <string.h>

// Makes the first segment the one that holds the view's first byte.
static qkv_bytes skip_finished_segments(qkv_bytes bytes) {
  if (bytes.length == 0) return (qkv_bytes){0};
  while (bytes.offset >= bytes.segments[0].length) {
    assert(bytes.segment_count > 1);
    bytes.offset -= bytes.segments[0].length;
    bytes.segments++;
    bytes.segment_count--;
  }
  return bytes;
}

qkv_bytes qkv_bytes_of(const qkv_segment *segment) {
  return qkv_bytes_of_all(segment, 1);
}

qkv_bytes qkv_bytes_of_all(const qkv_segment *segments, size_t segment_count) {
  qkv_bytes bytes = {.segments = segments, .segment_count = segment_count};
  for (size_t i = 0; i < segment_count; i++) bytes.length += segments[i].length;
  return skip_finished_segments(bytes);
}

qkv_bytes qkv_bytes_slice(qkv_bytes bytes, size_t offset, size_t length) {
  assert(offset <= bytes.length && length <= bytes.length - offset);
  bytes.offset += offset;
  bytes.length = length;
  return skip_finished_segments(bytes);
}

void qkv_bytes_copy(qkv_bytes bytes, size_t offset, size_t length, void *out) {
  qkv_bytes rest = qkv_bytes_slice(bytes, offset, length);
  uint8_t *to = out;
  const qkv_segment *segment = rest.segments;
  size_t from = rest.offset;
  while (length > 0) {
    size_t here = segment->length - from;
    if (here > length) here = length;
    if (here > 0) memcpy(to, segment->data + from, here);
    to += here;
    length -= here;
    segment++;
    from = 0;
  }
}

const uint8_t *qkv_bytes_contiguous(qkv_bytes bytes, size_t offset, size_t length) {
  static const uint8_t nothing;
  qkv_bytes view = qkv_bytes_slice(bytes, offset, length);
  if (length == 0) return &nothing;
  if (length > view.segments[0].length - view.offset) return NULL;
  return view.segments[0].data + view.offset;
}
