#include "server/rpc/http2_frames.h"

#include <assert.h>
#include <string.h>

enum { DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION };
enum { ACK = 1, END_STREAM = 1, END_HEADERS = 4 };

#define MESSAGE_HEAD_BYTES 5  // that gRPC puts before a message
#define WINDOW_STEP_BYTES 1024
// Of small frames. gRPC's clients open windows by a few bytes, twice for each message that they read; those in Go
// send a PING in each round trip in which they read.
#define SMALL_OF_CALL 4
#define SMALL_OF_PING 4
#define SMALL_OF_POINT 64
#define KIB 1024

static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum { PREFACE_BYTES = sizeof(preface) - 1, WINDOW_UPDATE_BYTES = 4 };

void qkvi_http2_frames_init(qkvi_http2_frames *frames, uint64_t now_ns) {
  *frames = (qkvi_http2_frames){.ns = now_ns};
}

static uint32_t stream_of(const qkvi_http2_cursor *cursor) {
  const uint8_t *number = cursor->head + 5;
  return (uint32_t)(number[0] & 0x7f) << 24 | (uint32_t)number[1] << 16 | (uint32_t)number[2] << 8 | number[3];
}

static void charge(qkvi_http2_frames *frames, uint64_t points, uint64_t work) {
  frames->points += points;
  frames->work += work;
}

static void charge_small(qkvi_http2_frames *frames, uint32_t count) {
  frames->small += count;
  if (frames->small < SMALL_OF_POINT) return;
  frames->small = 0;
  charge(frames, 1, 0);
}

// A call's message has come. Which call's does not matter: they are taken to cost the same.
static void give_back(qkvi_http2_frames *frames) {
  frames->small -= frames->small < SMALL_OF_CALL ? frames->small : SMALL_OF_CALL;
  if (frames->lent_to == 0) return;
  const uint64_t given = frames->lent / frames->lent_to--;
  frames->lent -= given;
  frames->points -= given;
}

static void charge_headers(qkvi_http2_frames *frames, uint8_t type, uint8_t flags, uint32_t length) {
  const uint64_t points = 2 + length / KIB;
  const uint32_t stream = stream_of(&frames->cursor);
  frames->block = (type == HEADERS ? 0 : frames->block) + length;
  charge(frames, points, 20 + length / (KIB / 8));
  // gRPC ignores HEADERS of any other stream: no call begins, and no message of it comes.
  frames->begins = type == HEADERS && stream % 2 == 1 && stream > frames->newest;
  if (frames->begins) {
    frames->newest = stream;
    frames->lent += points;
    frames->lent_to++;
  }
  if ((flags & END_HEADERS) != 0 && frames->block <= QKVI_HTTP2_BLOCK_BYTES_MAX) frames->block = 0;
}

static void charge_data(qkvi_http2_frames *frames, uint8_t flags, uint32_t length) {
  charge(frames, length == 0 && (flags & END_STREAM) == 0, 1 + length / (8 * KIB));
  if (length >= MESSAGE_HEAD_BYTES) give_back(frames);
}

qkvi_http2_verdict qkvi_http2_frames_records(qkvi_http2_frames *frames, uint32_t records, uint32_t handshakes,
                                             uint64_t points_s, uint64_t now_ns) {
  enum { RECORD_WORK = 2, HANDSHAKE_WORK = 20, HANDSHAKE_POINTS = 100 };
  charge(frames, (uint64_t)handshakes * HANDSHAKE_POINTS,
         (uint64_t)records * RECORD_WORK + (uint64_t)handshakes * HANDSHAKE_WORK);
  if (handshakes == 0 || points_s == 0) return QKVI_HTTP2_GOOD;
  const uint64_t points = qkvi_http2_frames_points(frames, points_s, now_ns);
  return points > points_s * QKVI_HTTP2_BURST_S ? QKVI_HTTP2_CONTROL_FRAMES : QKVI_HTTP2_GOOD;
}

// ---- Where frames begin ----

// Takes bytes of a frame's head, as many as there are. True: it is whole.
static bool read_head(qkvi_http2_cursor *cursor, const uint8_t *bytes, size_t count, size_t *at) {
  size_t taken = sizeof(cursor->head) - cursor->have;
  if (taken > count - *at) taken = count - *at;
  memcpy(cursor->head + cursor->have, bytes + *at, taken);
  cursor->have += (uint8_t)taken;
  *at += taken;
  if (cursor->have < sizeof(cursor->head)) return false;
  cursor->have = 0;
  cursor->left = (uint32_t)cursor->head[0] << 16 | (uint32_t)cursor->head[1] << 8 | cursor->head[2];
  return true;
}

static uint32_t payload_part(const qkvi_http2_cursor *cursor, size_t count) {
  return count < cursor->left ? (uint32_t)count : cursor->left;
}

// ---- From the client ----

// The stream of a frame whose payload is over, or has none.
static void follow(qkvi_http2_frames *frames) {
  const qkvi_http2_cursor *cursor = &frames->cursor;
  const uint8_t type = cursor->head[3], flags = cursor->head[4];
  if (type == RST_STREAM || (type == DATA && (flags & END_STREAM) != 0))
    qkvi_http2_streams_end(&frames->streams, stream_of(cursor));
  if (type == HEADERS && frames->begins && (flags & END_STREAM) == 0)
    qkvi_http2_streams_begin(&frames->streams, stream_of(cursor));
}

static void begin_frame(qkvi_http2_frames *frames) {
  const uint8_t type = frames->cursor.head[3], flags = frames->cursor.head[4];
  const uint32_t length = frames->cursor.left;
  frames->prefix = 0;
  switch (type) {
    case DATA:
      return charge_data(frames, flags, length);
    case HEADERS:
    case CONTINUATION:
      return charge_headers(frames, type, flags, length);
    case RST_STREAM:
      return charge(frames, 1, 10);
    case SETTINGS:
      return charge(frames, (flags & ACK) != 0 ? 0 : 50, 2);
    case PING:
      if ((flags & ACK) == 0) charge_small(frames, SMALL_OF_PING);
      return charge(frames, 0, 2);
    case WINDOW_UPDATE:
      return charge(frames, 0, 1);  // points at its end
    default:
      return charge(frames, 1, 1 + length / (8 * KIB));
  }
}

static void read_payload(qkvi_http2_frames *frames, const uint8_t *bytes, uint32_t count) {
  qkvi_http2_cursor *cursor = &frames->cursor;
  const uint8_t type = cursor->head[3];
  if (type == DATA) qkvi_http2_streams_data(&frames->streams, stream_of(cursor), bytes, count);
  if (type == WINDOW_UPDATE) {
    for (uint32_t i = 0; i < count && i < WINDOW_UPDATE_BYTES; i++) frames->prefix = frames->prefix << 8 | bytes[i];
    if (count == cursor->left && frames->prefix < WINDOW_STEP_BYTES) charge_small(frames, 1);
  }
  cursor->left -= count;
  if (cursor->left == 0) follow(frames);
}

uint64_t qkvi_http2_frames_points(qkvi_http2_frames *frames, uint64_t points_s, uint64_t now_ns) {
  const uint64_t passed_ms = now_ns > frames->ns ? (now_ns - frames->ns) / 1000000 : 0;
  const uint64_t drained =
      passed_ms > 1000 * QKVI_HTTP2_BURST_S ? points_s * QKVI_HTTP2_BURST_S : passed_ms * points_s / 1000;
  if (drained > 0) frames->ns = now_ns;
  frames->points -= drained < frames->points ? drained : frames->points;
  if (frames->lent > frames->points) frames->lent = frames->points;
  return frames->points;
}

static qkvi_http2_verdict judge(qkvi_http2_frames *frames, uint64_t points_s, uint64_t (*now_ns)(void)) {
  if (frames->block > QKVI_HTTP2_BLOCK_BYTES_MAX) return QKVI_HTTP2_HEADER_BLOCK;
  const uint64_t most = points_s * QKVI_HTTP2_BURST_S;
  if (points_s == 0 || frames->points <= most) return QKVI_HTTP2_GOOD;
  return qkvi_http2_frames_points(frames, points_s, now_ns()) > most ? QKVI_HTTP2_CONTROL_FRAMES : QKVI_HTTP2_GOOD;
}

// Takes bytes of the preface. Returns how many.
static size_t read_preface(qkvi_http2_frames *frames, const uint8_t *bytes, size_t count) {
  size_t taken = PREFACE_BYTES - (size_t)frames->preface;
  if (taken > count) taken = count;
  if (memcmp(bytes, preface + frames->preface, taken) != 0) frames->foreign = true;
  frames->preface += (uint8_t)taken;
  return taken;
}

qkvi_http2_verdict qkvi_http2_frames_read(qkvi_http2_frames *frames, const uint8_t *bytes, size_t count,
                                          uint64_t points_s, uint64_t (*now_ns)(void)) {
  size_t at = frames->preface < PREFACE_BYTES && count > 0 ? read_preface(frames, bytes, count) : 0;
  while (at < count && !frames->foreign) {
    if (frames->cursor.left > 0) {
      const uint32_t taken = payload_part(&frames->cursor, count - at);
      read_payload(frames, bytes + at, taken);
      at += taken;
      continue;
    }
    if (!read_head(&frames->cursor, bytes, count, &at)) break;
    begin_frame(frames);
    if (frames->cursor.left == 0) follow(frames);
    const qkvi_http2_verdict verdict = judge(frames, points_s, now_ns);
    if (verdict != QKVI_HTTP2_GOOD) return verdict;
  }
  return QKVI_HTTP2_GOOD;
}

// ---- To the client ----

void qkvi_http2_replies_read(qkvi_http2_cursor *cursor, qkvi_http2_streams *streams, const uint8_t *bytes,
                             size_t count) {
  for (size_t at = 0; at < count;) {
    if (cursor->left > 0) {
      const uint32_t taken = payload_part(cursor, count - at);
      cursor->left -= taken;
      at += taken;
    } else if (read_head(cursor, bytes, count, &at)) {
      const uint8_t type = cursor->head[3], flags = cursor->head[4];
      const bool last = (type == HEADERS || type == DATA) && (flags & END_STREAM) != 0;
      if (last || type == RST_STREAM) qkvi_http2_streams_end(streams, stream_of(cursor));
    }
  }
}
