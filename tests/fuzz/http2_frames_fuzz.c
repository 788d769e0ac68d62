// server/rpc/http2_frames.h: bytes of a connection, in two pieces and as a whole, count the same.
#include "server/rpc/http2_frames.h"

#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"

enum { POINTS_S = 100 };
#define PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

static uint64_t now(void) {
  return 1;
}

static void start(qkvi_http2_frames *frames) {
  qkvi_http2_frames_init(frames, 1);
  const qkvi_http2_verdict verdict =
      qkvi_http2_frames_read(frames, (const uint8_t *)PREFACE, strlen(PREFACE), POINTS_S, now);
  if (verdict != QKVI_HTTP2_GOOD || frames->foreign) __builtin_trap();
}

static void check(const qkvi_http2_frames *frames, qkvi_http2_verdict verdict) {
  if (frames->lent > frames->points || frames->cursor.have >= sizeof frames->cursor.head) __builtin_trap();
  if (verdict == QKVI_HTTP2_GOOD && frames->block > QKVI_HTTP2_BLOCK_BYTES_MAX) __builtin_trap();
  if (verdict == QKVI_HTTP2_GOOD && frames->points > POINTS_S * QKVI_HTTP2_BURST_S + 1) __builtin_trap();
}

// The first byte says where the others are cut.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  const size_t count = size - 1, cut = data[0] % (count + 1);
  qkvi_http2_frames whole, parts;
  start(&whole);
  start(&parts);
  uint8_t *bytes = malloc(count > 0 ? count : 1);  // of its own size, so that a read past its end is seen
  if (bytes == NULL) abort();
  memcpy(bytes, data + 1, count);
  const qkvi_http2_verdict one = qkvi_http2_frames_read(&whole, bytes, count, POINTS_S, now);
  qkvi_http2_verdict two = qkvi_http2_frames_read(&parts, bytes, cut, POINTS_S, now);
  if (two == QKVI_HTTP2_GOOD) two = qkvi_http2_frames_read(&parts, bytes + cut, count - cut, POINTS_S, now);
  check(&whole, one);
  if (one != two || whole.points != parts.points || whole.work != parts.work ||
      whole.cursor.left != parts.cursor.left || whole.streams.held != parts.streams.held)
    __builtin_trap();
  // The same bytes as replies: streams end.
  qkvi_http2_cursor cursor = {0};
  qkvi_http2_replies_read(&cursor, &whole.streams, bytes, count);
  if (whole.streams.held > parts.streams.held) __builtin_trap();
  free(bytes);
  qkvi_http2_streams_clear(&whole.streams);
  qkvi_http2_streams_clear(&parts.streams);
  if (whole.streams.held != 0 || parts.streams.held != 0) __builtin_trap();
  return 0;
}
