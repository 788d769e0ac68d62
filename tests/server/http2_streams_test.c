// Bytes of messages are held until the message is whole or its stream ends, whatever pieces they come in.
#include "server/rpc/http2_streams.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/rpc/http2_frames.h"

enum { DATA, HEADERS, RST_STREAM = 3, SETTINGS };
enum { END_STREAM = 1, END_HEADERS = 4 };

static const uint8_t two[] = {0, 0, 0, 0, 3, 'a', 'b', 'c', 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 'd', 'e'};

static void messages_are_held_until_they_are_whole(void **state) {
  (void)state;
  qkvi_http2_streams streams = {0};
  qkvi_http2_streams_begin(&streams, 1);
  static const uint64_t held[] = {1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0};
  for (size_t i = 0; i < sizeof two; i++) {
    qkvi_http2_streams_data(&streams, 1, two + i, 1);
    assert_int_equal(streams.held, held[i]);
  }
  for (size_t cut = 0; cut <= sizeof two; cut++) {
    qkvi_http2_streams_data(&streams, 1, two, cut);
    assert_int_equal(streams.held, cut == 0 ? 0 : held[cut - 1]);
    qkvi_http2_streams_data(&streams, 1, two + cut, sizeof two - cut);
    assert_int_equal(streams.held, 0);
  }
  qkvi_http2_streams_clear(&streams);
}

static void a_large_message_is_counted(void **state) {
  (void)state;
  qkvi_http2_streams streams = {0};
  uint8_t *piece = calloc(1, 1 << 20);
  assert_non_null(piece);
  const uint8_t head[] = {0, 0xff, 0xff, 0xff, 0xff};
  qkvi_http2_streams_begin(&streams, 1);
  qkvi_http2_streams_data(&streams, 1, head, sizeof head);
  for (uint64_t i = 1; i < 4096; i++) {
    qkvi_http2_streams_data(&streams, 1, piece, 1 << 20);
    assert_int_equal(streams.held, sizeof head + (i << 20));
  }
  qkvi_http2_streams_data(&streams, 1, piece, (1 << 20) - 1);
  assert_int_equal(streams.held, 0);
  qkvi_http2_streams_clear(&streams);
  free(piece);
}

static void ended_streams_hold_nothing(void **state) {
  (void)state;
  qkvi_http2_streams streams = {0};
  for (uint32_t i = 1; i < 2000; i += 2) {
    qkvi_http2_streams_begin(&streams, i);
    qkvi_http2_streams_data(&streams, i, two, 7);
  }
  assert_int_equal(streams.held, 7 * 1000);
  qkvi_http2_streams_begin(&streams, 1);  // is open
  assert_int_equal(streams.held, 7 * 1000);
  for (uint32_t i = 1; i < 1000; i += 2) qkvi_http2_streams_end(&streams, i);
  assert_int_equal(streams.held, 7 * 500);
  qkvi_http2_streams_end(&streams, 1);
  qkvi_http2_streams_data(&streams, 1, two, 7);  // was on its way
  assert_int_equal(streams.held, 7 * 500);
  qkvi_http2_streams_clear(&streams);
  assert_int_equal(streams.held, 0);
}

static void streams_are_bounded(void **state) {
  (void)state;
  qkvi_http2_streams streams = {0};
  for (uint32_t i = 0; i < QKVI_HTTP2_STREAMS_MAX + 100; i++) {
    qkvi_http2_streams_begin(&streams, i);
    qkvi_http2_streams_data(&streams, i, two, 1);
  }
  assert_int_equal(streams.held, QKVI_HTTP2_STREAMS_MAX);
  qkvi_http2_streams_clear(&streams);
}

// ---- With frames around ----

static uint64_t now(void) {
  return 1;
}

static size_t put_frame(uint8_t *to, uint8_t type, uint8_t flags, uint8_t stream, const void *payload,
                        uint8_t count) {
  const uint8_t head[9] = {0, 0, count, type, flags, 0, 0, 0, stream};
  memcpy(to, head, sizeof head);
  if (count > 0) memcpy(to + sizeof head, payload, count);
  return sizeof head + count;
}

static uint64_t read_frame(qkvi_http2_frames *frames, uint8_t type, uint8_t flags, uint8_t stream, uint8_t count) {
  uint8_t bytes[64];
  const size_t length = put_frame(bytes, type, flags, stream, two, count);
  for (size_t i = 0; i < length; i++)
    assert_int_equal(qkvi_http2_frames_read(frames, bytes + i, 1, 0, now), QKVI_HTTP2_GOOD);
  return frames->streams.held;
}

static uint64_t reply(qkvi_http2_frames *frames, uint8_t type, uint8_t flags, uint8_t stream, uint8_t count) {
  static qkvi_http2_cursor cursor;
  uint8_t bytes[64];
  const size_t length = put_frame(bytes, type, flags, stream, two, count);
  for (size_t i = 0; i < length; i++) qkvi_http2_replies_read(&cursor, &frames->streams, bytes + i, 1);
  return frames->streams.held;
}

static void frames_begin_and_end_streams(void **state) {
  (void)state;
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, 1);
  (void)qkvi_http2_frames_read(&frames, (const uint8_t *)"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24, 0, now);
  for (uint8_t stream = 1; stream < 20; stream += 2) (void)read_frame(&frames, HEADERS, END_HEADERS, stream, 5);
  assert_int_equal(read_frame(&frames, HEADERS, END_HEADERS | END_STREAM, 21, 5), 0);
  assert_int_equal(read_frame(&frames, DATA, 0, 21, 7), 0);  // has ended with its headers
  for (uint8_t stream = 1; stream < 20; stream += 2) (void)read_frame(&frames, DATA, 0, stream, 7);
  assert_int_equal(frames.streams.held, 70);
  assert_int_equal(read_frame(&frames, DATA, END_STREAM, 1, 0), 63);
  assert_int_equal(read_frame(&frames, RST_STREAM, 0, 3, 4), 56);
  assert_int_equal(reply(&frames, SETTINGS, 0, 0, 12), 56);
  assert_int_equal(reply(&frames, HEADERS, END_HEADERS, 5, 9), 56);
  assert_int_equal(reply(&frames, DATA, 0, 5, 9), 56);
  assert_int_equal(reply(&frames, HEADERS, END_HEADERS | END_STREAM, 5, 9), 49);
  assert_int_equal(reply(&frames, RST_STREAM, 0, 7, 4), 42);
  assert_int_equal(reply(&frames, DATA, END_STREAM, 9, 0), 35);
  assert_int_equal(read_frame(&frames, DATA, 0, 5, 7), 35);
  qkvi_http2_streams_clear(&frames.streams);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(messages_are_held_until_they_are_whole),
      cmocka_unit_test(a_large_message_is_counted),
      cmocka_unit_test(ended_streams_hold_nothing),
      cmocka_unit_test(streams_are_bounded),
      cmocka_unit_test(frames_begin_and_end_streams),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
