// Frames are counted whatever pieces they come in, ordinary clients stay below the limits, and floods do not.
#include "server/rpc/http2_frames.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION };
enum { ACK = 1, END_STREAM = 1, END_HEADERS = 4 };
enum { POINTS_S = 1000, BYTES_MAX = 1 << 20 };
#define SECOND UINT64_C(1000000000)

static uint64_t clock_ns;

static uint64_t now(void) {
  return clock_ns;
}

typedef struct sent {
  uint8_t *bytes;
  size_t count;
  uint32_t stream;  // of the frames to come
} sent;

static void put(sent *to, const void *bytes, size_t count) {
  assert_true(to->count + count <= BYTES_MAX);
  memcpy(to->bytes + to->count, bytes, count);
  to->count += count;
}

static void put_frame(sent *to, uint8_t type, uint8_t flags, uint32_t length, uint32_t number) {
  const uint32_t stream = to->stream;
  const uint8_t head[9] = {
      (uint8_t)(length >> 16), (uint8_t)(length >> 8),  (uint8_t)length,        type,           flags,
      (uint8_t)(stream >> 24), (uint8_t)(stream >> 16), (uint8_t)(stream >> 8), (uint8_t)stream};
  put(to, head, sizeof head);
  for (uint32_t i = 0; i < length; i++) {
    const uint8_t byte = i < 4 ? (uint8_t)(number >> (24 - 8 * i)) : 0x2a;
    put(to, &byte, 1);
  }
}

static void greet(sent *made) {
  made->count = 0;
  put(made, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
  put_frame(made, SETTINGS, 0, 6, 0);
}

static int setup(void **state) {
  sent *made = calloc(1, sizeof(*made));
  assert_non_null(made);
  made->stream = 1;
  made->bytes = malloc(BYTES_MAX);
  assert_non_null(made->bytes);
  greet(made);
  clock_ns = SECOND;
  *state = made;
  return 0;
}

static int teardown(void **state) {
  sent *made = *state;
  free(made->bytes);
  free(made);
  return 0;
}

static qkvi_http2_verdict read_all(qkvi_http2_frames *frames, sent *made, size_t piece) {
  qkvi_http2_verdict verdict = QKVI_HTTP2_GOOD;
  for (size_t at = 0; at < made->count && verdict == QKVI_HTTP2_GOOD; at += piece) {
    const size_t count = made->count - at < piece ? made->count - at : piece;
    verdict = qkvi_http2_frames_read(frames, made->bytes + at, count, POINTS_S, now);
  }
  made->count = 0;
  qkvi_http2_streams_clear(&frames->streams);  // they have a test of their own
  return verdict;
}

static qkvi_http2_verdict verdict_of(sent *made) {
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  return read_all(&frames, made, made->count);
}

static void put_call(sent *made, uint32_t headers, uint32_t message) {
  made->stream += 2;
  put_frame(made, HEADERS, END_HEADERS, headers, 0);
  put_frame(made, DATA, END_STREAM, message, 0);
  put_frame(made, WINDOW_UPDATE, 0, 4, 5);
  put_frame(made, WINDOW_UPDATE, 0, 4, 100);
}

static void pieces_of_any_size_count_the_same(void **state) {
  sent *made = *state;
  put_call(made, 3000, 20);
  made->stream += 2;
  put_frame(made, HEADERS, 0, 1500, 0);
  put_frame(made, CONTINUATION, END_HEADERS, 700, 0);
  put_frame(made, PING, 0, 8, 0);
  put_frame(made, RST_STREAM, 0, 4, 8);
  const size_t count = made->count;
  qkvi_http2_frames whole;
  qkvi_http2_frames_init(&whole, clock_ns);
  assert_int_equal(read_all(&whole, made, count), QKVI_HTTP2_GOOD);
  assert_int_equal(whole.points, 50 + (2 + 1) + 2 + 1);
  assert_int_equal(whole.lent, 3);
  for (size_t piece = 1; piece < 40; piece++) {
    qkvi_http2_frames parts;
    qkvi_http2_frames_init(&parts, clock_ns);
    made->count = count;
    assert_int_equal(read_all(&parts, made, piece), QKVI_HTTP2_GOOD);
    assert_int_equal(parts.points, whole.points);
    assert_int_equal(parts.work, whole.work);
    assert_int_equal(parts.small, whole.small);
  }
}

static void calls_may_come_at_any_rate(void **state) {
  sent *made = *state;
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  for (int i = 0; i < 1000; i++) {  // 100000 calls within no time, each with a token of 2 KiB
    for (int j = 0; j < 100; j++) put_call(made, 2100, 30);
    assert_int_equal(read_all(&frames, made, 4096), QKVI_HTTP2_GOOD);
  }
  assert_true(frames.points < 60);
}

static void large_messages_cost_no_points(void **state) {
  sent *made = *state;
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  put_frame(made, HEADERS, END_HEADERS, 100, 0);
  for (int i = 0; i < 10000; i++) {
    put_frame(made, DATA, 0, 16384, 0);
    assert_int_equal(read_all(&frames, made, 65536), QKVI_HTTP2_GOOD);
  }
  assert_true(frames.points < 60);
}

static void header_blocks_are_bounded(void **state) {
  sent *made = *state;
  for (int i = 0; i < 4; i++) put_frame(made, i == 0 ? HEADERS : CONTINUATION, i == 3 ? END_HEADERS : 0, 16384, 0);
  put_frame(made, HEADERS, END_HEADERS, 16384, 0);
  put_frame(made, HEADERS, END_HEADERS, 16384, 0);
  const size_t count = made->count;
  assert_int_equal(verdict_of(made), QKVI_HTTP2_GOOD);
  made->count = count;
  for (int i = 0; i < 4; i++) put_frame(made, i == 0 ? HEADERS : CONTINUATION, 0, 16384, 0);
  put_frame(made, CONTINUATION, END_HEADERS, 1, 0);
  assert_int_equal(verdict_of(made), QKVI_HTTP2_HEADER_BLOCK);
}

// One frame may have 16 MiB: it is judged by its length, before its payload comes.
static void a_block_of_one_frame_is_bounded(void **state) {
  sent *made = *state;
  const uint8_t head[9] = {0x01, 0x00, 0x01, HEADERS, END_HEADERS, 0, 0, 0, 1};
  put(made, head, sizeof head);
  assert_int_equal(verdict_of(made), QKVI_HTTP2_HEADER_BLOCK);
}

static void check_flood(sent *made, uint8_t type, uint8_t flags, uint32_t length, size_t most) {
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  greet(made);
  assert_int_equal(read_all(&frames, made, 4096), QKVI_HTTP2_GOOD);
  size_t count = 0;
  for (; count <= most; count++) {
    put_frame(made, type, flags, length, 1);
    if (read_all(&frames, made, 4096) != QKVI_HTTP2_GOOD) break;
  }
  assert_true(count <= most);
  assert_true(count >= most / 2);
}

static void floods_are_bounded(void **state) {
  static const struct {
    uint8_t type, flags;
    uint32_t length;
    size_t most;
  } floods[] = {{HEADERS, END_HEADERS, 30, 2500},
                {HEADERS, END_HEADERS | END_STREAM, 12288, 360},
                {CONTINUATION, 0, 0, 2500},
                {RST_STREAM, 0, 4, 5000},
                {SETTINGS, 0, 6, 100},
                {PING, 0, 8, 81000},
                {WINDOW_UPDATE, 0, 4, 330000},
                {PRIORITY, 0, 5, 5000},
                {DATA, 0, 0, 5000},
                {0x55, 0, 0, 5000},
                {HEADERS, END_HEADERS, 65536, 80}};
  for (size_t i = 0; i < sizeof floods / sizeof floods[0]; i++) {
    clock_ns += SECOND;
    check_flood(*state, floods[i].type, floods[i].flags, floods[i].length, floods[i].most);
  }
}

static void points_drain(void **state) {
  sent *made = *state;
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  for (int i = 0; i < 20; i++) {  // 900 a second
    for (int j = 0; j < 900; j++) put_frame(made, RST_STREAM, 0, 4, 8);
    assert_int_equal(read_all(&frames, made, 4096), QKVI_HTTP2_GOOD);
    clock_ns += SECOND;
  }
  clock_ns += 3600 * SECOND;  // is no credit for more than a burst
  for (int j = 0; j < 20000; j++) put_frame(made, RST_STREAM, 0, 4, 8);
  assert_int_equal(read_all(&frames, made, 4096), QKVI_HTTP2_CONTROL_FRAMES);
}

// Messages give nothing back that no HEADERS have taken.
static void messages_earn_nothing(void **state) {
  sent *made = *state;
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  for (int i = 0; i < 4000; i++) put_frame(made, RST_STREAM, 0, 4, 8);
  for (int i = 0; i < 4000; i++) put_frame(made, DATA, 0, 5, 0);
  assert_int_equal(read_all(&frames, made, 4096), QKVI_HTTP2_GOOD);
  assert_int_equal(frames.points, 4050);
}

// gRPC ignores HEADERS of streams with even numbers and of those that were: they stay in no table.
static void only_new_calls_are_followed(void **state) {
  static const uint32_t ignored[] = {2, 4, 6, 1, 3, 5, 7};
  sent *made = *state;
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  made->stream = 7;
  put_frame(made, HEADERS, END_HEADERS | END_STREAM, 10, 0);
  for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) {
    made->stream = ignored[i];
    put_frame(made, HEADERS, END_HEADERS, 10, 0);
    put_frame(made, DATA, 0, 5, 0);
  }
  assert_int_equal(qkvi_http2_frames_read(&frames, made->bytes, made->count, POINTS_S, now), QKVI_HTTP2_GOOD);
  assert_null(frames.streams.open);
  assert_int_equal(frames.points, 50 + 2 * 7);  // one message came for the call that began
  made->count = 0;
  made->stream = 9;
  put_frame(made, HEADERS, END_HEADERS, 10, 0);
  put_frame(made, DATA, 0, 4000, 0x2a2a2a2a);  // of a message of so many bytes
  assert_int_equal(qkvi_http2_frames_read(&frames, made->bytes, made->count, POINTS_S, now), QKVI_HTTP2_GOOD);
  assert_int_equal(frames.streams.held, 4000);
  qkvi_http2_streams_clear(&frames.streams);
}

static void no_limit_of_points(void **state) {
  sent *made = *state;
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, clock_ns);
  for (int i = 0; i < 50000; i++) put_frame(made, RST_STREAM, 0, 4, 8);
  assert_int_equal(qkvi_http2_frames_read(&frames, made->bytes, made->count, 0, now), QKVI_HTTP2_GOOD);
  assert_int_equal(frames.points, 50050);
}

static void what_is_no_http2_is_not_counted(void **state) {
  sent *made = *state;
  made->bytes[23] = 'x';
  for (int i = 0; i < 20000; i++) put_frame(made, RST_STREAM, 0, 4, 8);
  assert_int_equal(verdict_of(made), QKVI_HTTP2_GOOD);
}

// TLS records have work, and messages of the handshake points, which drain as those of frames.
static void records_of_tls_count(void **state) {
  (void)state;
  enum { MOST = POINTS_S * QKVI_HTTP2_BURST_S / 100 };
  const uint64_t second = UINT64_C(1000000000);
  qkvi_http2_frames frames;
  qkvi_http2_frames_init(&frames, 0);
  assert_int_equal(qkvi_http2_frames_records(&frames, 7, 0, POINTS_S, 0), QKVI_HTTP2_GOOD);
  assert_int_equal(frames.work, 14);
  assert_int_equal(qkvi_http2_frames_records(&frames, MOST, MOST, POINTS_S, 0), QKVI_HTTP2_GOOD);
  assert_true(frames.work > 14 + 10 * MOST);
  assert_int_equal(qkvi_http2_frames_records(&frames, 1000, 0, POINTS_S, 0), QKVI_HTTP2_GOOD);
  assert_int_equal(qkvi_http2_frames_records(&frames, 10, 10, POINTS_S, second), QKVI_HTTP2_GOOD);
  assert_int_equal(qkvi_http2_frames_records(&frames, 1, 1, POINTS_S, second), QKVI_HTTP2_CONTROL_FRAMES);
  assert_int_equal(qkvi_http2_frames_records(&frames, 1000, 1000, 0, second), QKVI_HTTP2_GOOD);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
  const struct CMUnitTest tests[] = {
      TEST(pieces_of_any_size_count_the_same),
      TEST(calls_may_come_at_any_rate),
      TEST(large_messages_cost_no_points),
      TEST(header_blocks_are_bounded),
      TEST(a_block_of_one_frame_is_bounded),
      TEST(floods_are_bounded),
      TEST(points_drain),
      TEST(messages_earn_nothing),
      TEST(only_new_calls_are_followed),
      TEST(no_limit_of_points),
      TEST(what_is_no_http2_is_not_counted),
      cmocka_unit_test(records_of_tls_count),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
