// What the frames of one HTTP/2 connection cost: read from their headers, while the bytes are on their way to gRPC.
//
// gRPC 1.51 takes header blocks of any size, and as many control frames as a client sends. So each frame has
// points, which drain with time. gRPC must not read further from a connection that has too many of them, or whose
// header block is too large. Each message (DATA of 5 bytes or more) takes back one HEADERS and four WINDOW_UPDATEs,
// so clients may make calls as fast as they can.
//
//   frame                                               points               work
//   HEADERS                                             2 + 1 for each KiB   20 + 8 for each KiB
//   CONTINUATION                                        2 + 1 for each KiB   20 + 8 for each KiB
//   SETTINGS without ACK                                50                   2
//   RST_STREAM                                          1                    10
//   PRIORITY, GOAWAY, unknown types                     1                    1
//   PING without ACK                                    1 for 16             2
//   WINDOW_UPDATE by less than 1024 bytes               1 for 64             1
//   DATA without payload that does not end its stream   1                    1
//   all others                                          0                    1 + 1 for each 8 KiB
//   (TLS) a record                                      0                    2
//   (TLS) KeyUpdate                                     100                  20
//
// `work` is about the microseconds that gRPC and the server take for them; the caller uses it to be fair
// (server/rpc/inspect.h).
//
//   +-----------------+------+-------+-----------+---------...
//   | length, 3 bytes | type | flags | stream, 4 | payload        one frame; the first follows a preface of 24 bytes
//   +-----------------+------+-------+-----------+---------...
//
// What is no HTTP/2 is left to gRPC, which closes the connection: then nothing is counted any more.
//
// Threads: one at a time for each connection. Cost: some ten nanoseconds a frame; payloads are skipped.
#ifndef QKV_SERVER_RPC_HTTP2_FRAMES_H
#define QKV_SERVER_RPC_HTTP2_FRAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/rpc/http2_streams.h"

// Bytes of a header block as it is sent, at most. gRPC refuses calls whose headers are longer than 16 KiB.
#define QKVI_HTTP2_BLOCK_BYTES_MAX (64 * 1024)
// A connection may have the points of so many seconds at once.
#define QKVI_HTTP2_BURST_S 5

typedef enum qkvi_http2_verdict {
  QKVI_HTTP2_GOOD,
  QKVI_HTTP2_HEADER_BLOCK,    // longer than QKVI_HTTP2_BLOCK_BYTES_MAX
  QKVI_HTTP2_CONTROL_FRAMES,  // too many points
  QKVI_HTTP2_REQUEST_BYTES,   // given by the caller, which compares connections
  QKVI_HTTP2_VERDICTS
} qkvi_http2_verdict;

// Where in its frames one direction of a connection is.
typedef struct qkvi_http2_cursor {  // zeros: before the first one
  uint32_t left;                    // bytes of the payload that are still to come
  uint8_t head[9];                  // of the frame
  uint8_t have;                     // bytes of the next one's head
} qkvi_http2_cursor;

typedef struct qkvi_http2_frames {
  uint64_t work;     // since the caller set it to 0
  uint64_t points;   // not drained yet
  uint64_t lent;     // of these, those of HEADERS whose message has not come
  uint64_t ns;       // when points were last drained
  uint32_t lent_to;  // so many HEADERS
  uint32_t small;    // WINDOW_UPDATEs that have no point yet; a PING is as four
  uint32_t block;    // bytes of the header block under way
  uint32_t newest;   // the largest number of a stream that a call began
  uint32_t prefix;   // the first bytes of a WINDOW_UPDATE's payload, as a number
  uint8_t preface;   // bytes of it that have come
  bool foreign;      // no HTTP/2
  bool begins;       // the last HEADERS begin a call
  qkvi_http2_cursor cursor;
  qkvi_http2_streams streams;
} qkvi_http2_frames;

// The owner clears `streams` in the end. `now_ns`: on any clock that the caller goes on to use.
void qkvi_http2_frames_init(qkvi_http2_frames *frames, uint64_t now_ns);

// The points that have not drained by `now_ns`.
uint64_t qkvi_http2_frames_points(qkvi_http2_frames *frames, uint64_t points_s, uint64_t now_ns);

// Takes the next bytes of the connection. `points_s` drain in a second; 0: points have no limit. After a verdict
// other than GOOD no more may be read.
qkvi_http2_verdict qkvi_http2_frames_read(qkvi_http2_frames *frames, const uint8_t *bytes, size_t count,
                                          uint64_t points_s, uint64_t (*now_ns)(void));

// Takes TLS records of the connection, of any content, and messages of a handshake that is over: KeyUpdate. Before
// the frames that the records held.
qkvi_http2_verdict qkvi_http2_frames_records(qkvi_http2_frames *frames, uint32_t records, uint32_t handshakes,
                                             uint64_t points_s, uint64_t now_ns);

// Takes the next bytes that gRPC has sent to the client: streams that it has ended are ended.
void qkvi_http2_replies_read(qkvi_http2_cursor *cursor, qkvi_http2_streams *streams, const uint8_t *bytes,
                             size_t count);

#endif
