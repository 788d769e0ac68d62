// Inspects what clients send before gRPC reads it: closes connections whose frames do harm, and makes the others take
// turns.
//
// gRPC 1.51 has no hook for this. It calls recvmsg(2), sendmsg(2), close(2), SSL_read(3) and SSL_write(3) of shared
// libraries, so the daemon has functions of these names itself. They call the real ones and inspect what these have
// read and written. Nothing is copied or changed. With a connection that is to be closed they return the error of one
// that was reset, and gRPC ends it.
//
//    socket ──► recvmsg ──► frames counted ──► gRPC ──► streams that end ──► sendmsg ──► socket
//    socket ──► recvmsg ──► gRPC ──► SSL_read ──► frames counted ──► gRPC ──► streams that end ──► SSL_write ──► ...
//
// SSL_read takes records that have no data (KeyUpdate) until one has some, so these are counted, too.
//
// Turns: gRPC reads a socket until it is empty, and parses, before it looks at another one: a client that sends
// without a pause is served alone, by as many threads as --rpc-threads says (1). So a connection has a turn of so
// much work (http2_frames.h) and so many bytes; after that recvmsg returns EAGAIN, as if the socket were empty, and
// asks epoll to report it anew. The others that are ready come first then. The bytes of a turn double while they cost
// little, and halve when they cost much: large messages are read in large pieces.
//
// Pauses: a connection that has more than half of the points that close it waits 5 ms after each turn, and one that
// is closed leaves its points to its peer's next (debts.h): at most 4/5 of those that close one, so that a client of
// the same address gets through. A new connection costs its peer 10 points, too.
//
// Messages: gRPC keeps what has come of a message until it is whole, and where its memory is full it ends streams of
// any connection, and connections that have none. So these bytes are counted (http2_streams.h). Where they are more
// than 3/4 of what they may be, connections that hold more than 1/8 of that are paused after each 32 KiB: closing one
// that holds hundreds of MiB stops all others for some 40 ms. The connection that holds the most is closed in the
// end.
//
// Threads: any. Reads of one connection are serialized by gRPC, and so are writes. Cost: some 100 ns a read or write,
// and 10 ns a frame.
#ifndef QKV_SERVER_RPC_INSPECT_H
#define QKV_SERVER_RPC_INSPECT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "server/rpc/http2_frames.h"

// Before there are connections. `control_frames_s`: points that a connection may collect in a second
// (http2_frames.h); 0: no limit. `request_bytes_max`: of messages that have begun to arrive and are not whole, on all
// connections; where they are more, the connection that holds the most of them is closed.
void qkvi_inspect_setup(uint64_t control_frames_s, uint64_t request_bytes_max);

// What comes from the connection `file` is inspected from now on, until it ends. With `tls` once it is decrypted. To
// be called before gRPC has it. `peer`: its address. Returns whether the peer has come so often, or with so many
// points, that the connection will be paused.
bool qkvi_inspect_open(int file, bool tls, const struct sockaddr *peer);

// Whether the connection has sent something, and gRPC has read nothing from it yet.
bool qkvi_inspect_waits(int file);

// How many connections have been closed for this reason.
uint64_t qkvi_inspect_closed(qkvi_http2_verdict reason);
// Bytes of messages that are not whole, on all connections.
uint64_t qkvi_inspect_held(void);
// How often a connection has been paused.
uint64_t qkvi_inspect_pauses(void);

#endif
