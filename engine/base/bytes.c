#include "engine/base/bytes.h"

#include <assert.h>
#include <string.h>

// The first of segments[1..] that ends beyond `position` of the run. There is one.
static size_t find_segment(const qkv_bytes *bytes, size_t position) {
  size_t low = 1;
  size_t high = bytes->segment_count - 1;
  if (bytes->segments[low].end > position) return low;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (bytes->segments[middle].end > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Makes the first segment the one that holds the view's first byte.
static qkv_bytes skip_finished_segments(qkv_bytes bytes) {
  if (bytes.length == 0) return (qkv_bytes){0};
  const qkv_segment *first = &bytes.segments[0];
  if (bytes.offset < first->length) return bytes;
  assert(bytes.segment_count > 1);
  size_t position = first->end - first->length + bytes.offset;
  size_t skipped = find_segment(&bytes, position);
  bytes.segments += skipped;
  bytes.segment_count -= skipped;
  bytes.offset = position - (bytes.segments[0].end - bytes.segments[0].length);
  return bytes;
}

qkv_bytes qkv_bytes_of(const qkv_segment *segment) {
  if (segment->length == 0) return (qkv_bytes){0};
  return (qkv_bytes){.segments = segment, .segment_count = 1, .length = segment->length};
}

qkv_bytes qkv_bytes_of_all(qkv_segment *segments, size_t segment_count) {
  qkv_bytes bytes = {.segments = segments, .segment_count = segment_count};
  for (size_t i = 0; i < segment_count; i++) {
    bytes.length += segments[i].length;
    segments[i].end = bytes.length;
  }
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
