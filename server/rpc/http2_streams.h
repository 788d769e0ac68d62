// The request messages that one HTTP/2 connection has begun to send, and how many bytes of them have come.
//
// gRPC keeps these bytes until the message is whole, and does not say how many they are. So the streams of a
// connection are followed: from their HEADERS until either side ends them. A message is a byte, its length in four
// bytes, big-endian, and so many bytes, in DATA frames of any size:
//
//   +---+---------------+-----------------+---+---------------+----...
//   | 0 | length        | message         | 0 | length        | the next one
//   +---+---------------+-----------------+---+---------------+----...
//
// Threads: one at a time for each connection.
#ifndef QKV_SERVER_RPC_HTTP2_STREAMS_H
#define QKV_SERVER_RPC_HTTP2_STREAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Streams of one connection that are followed: gRPC allows no more at once.
#define QKVI_HTTP2_STREAMS_MAX 8192

typedef struct qkvi_http2_stream qkvi_http2_stream;

typedef struct qkvi_http2_streams {  // zeros: none
  qkvi_http2_stream *open;           // by number
  uint64_t held;                     // bytes of messages that are not whole yet
} qkvi_http2_streams;

// A stream begins; one that is open, or one too many, changes nothing.
void qkvi_http2_streams_begin(qkvi_http2_streams *streams, uint32_t number);
// The next bytes of a stream, or a part of them. Those of streams that are not open count nothing.
void qkvi_http2_streams_data(qkvi_http2_streams *streams, uint32_t number, const uint8_t *bytes, size_t count);
void qkvi_http2_streams_end(qkvi_http2_streams *streams, uint32_t number);
void qkvi_http2_streams_clear(qkvi_http2_streams *streams);  // ends all

#endif
