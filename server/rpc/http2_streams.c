#include "server/rpc/http2_streams.h"

#include <assert.h>
#include <stdlib.h>

#define uthash_fatal(message) abort()
#include <uthash.h>

enum { HEAD_BYTES = 5 };

struct qkvi_http2_stream {
  uint32_t number;
  uint32_t have;  // bytes of the message's head
  uint64_t left;  // bytes of the message that are still to come, once its head is whole
  uint64_t held;  // bytes of the message and its head that have come
  UT_hash_handle hh;
};

static qkvi_http2_stream *find(const qkvi_http2_streams *streams, uint32_t number) {
  qkvi_http2_stream *found = NULL;
  HASH_FIND_INT(streams->open, &number, found);
  return found;
}

void qkvi_http2_streams_begin(qkvi_http2_streams *streams, uint32_t number) {
  if (HASH_COUNT(streams->open) >= QKVI_HTTP2_STREAMS_MAX || find(streams, number) != NULL) return;
  qkvi_http2_stream *begun = calloc(1, sizeof(*begun));
  assert(begun != NULL);
  begun->number = number;
  HASH_ADD_INT(streams->open, number, begun);
}

// Takes bytes of the message's head. Returns how many.
static size_t read_head(qkvi_http2_stream *stream, const uint8_t *bytes, size_t count) {
  size_t taken = 0;
  for (; taken < count && stream->have < HEAD_BYTES; taken++, stream->have++)
    stream->left = stream->have == 0 ? 0 : stream->left << 8 | bytes[taken];
  return taken;
}

void qkvi_http2_streams_data(qkvi_http2_streams *streams, uint32_t number, const uint8_t *bytes, size_t count) {
  qkvi_http2_stream *stream = find(streams, number);
  if (stream == NULL) return;
  streams->held -= stream->held;
  while (count > 0) {
    size_t taken = stream->have < HEAD_BYTES ? read_head(stream, bytes, count) : 0;
    if (stream->have == HEAD_BYTES) {
      const size_t more = stream->left < count - taken ? (size_t)stream->left : count - taken;
      stream->left -= more;
      taken += more;
    }
    stream->held += taken;
    bytes += taken;
    count -= taken;
    if (stream->have == HEAD_BYTES && stream->left == 0) stream->have = 0, stream->held = 0;
  }
  streams->held += stream->held;
}

static void end(qkvi_http2_streams *streams, qkvi_http2_stream *ended) {
  streams->held -= ended->held;
  HASH_DEL(streams->open, ended);
  free(ended);
}

void qkvi_http2_streams_end(qkvi_http2_streams *streams, uint32_t number) {
  qkvi_http2_stream *ended = find(streams, number);
  if (ended != NULL) end(streams, ended);
}

void qkvi_http2_streams_clear(qkvi_http2_streams *streams) {
  qkvi_http2_stream *each = streams->open, *next;
  HASH_CLEAR(hh, streams->open);
  for (; each != NULL; each = next) {
    next = each->hh.next;
    streams->held -= each->held;
    free(each);
  }
  assert(streams->held == 0);
}
