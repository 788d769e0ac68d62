// Inspects what clients send before gRPC reads it: closes connections whose frames do harm, and makes the others take
// turns.
//
// gRPC 1.51 has no hook for this. It reads sockets by recvmsg(2) and TLS by SSL_read(3), both from shared libraries,
// so the daemon has functions of these names itself (rpc_interpose.c). They call the real ones, and show what these
// have read to the functions below. Nothing is copied or changed. With a connection that is to be closed they return
// the error of one that was reset, and gRPC ends it.
//
//    socket ──► recvmsg ──► frames counted ──► gRPC                    HTTP/2 without TLS
//    socket ──► recvmsg ──► gRPC ──► SSL_read ──► frames counted ──► gRPC
//
// Turns: gRPC reads a socket until it is empty, and parses, before it looks at another one: a client that sends
// without a pause is served alone, by as many threads as --rpc-threads says (1). So a connection has a turn of so
// much work (http2_frames.h) and so many bytes; after that recvmsg returns EAGAIN, as if the socket were empty, and
// asks epoll to report it anew. The others that are ready come first then. The bytes of a turn double while they cost
// little, and halve when they cost much: large messages are read in large pieces.
//
// Threads: any. Reads of one connection are serialized by gRPC. Cost: 40 ns a read, and 10 ns a frame.
#ifndef QKV_SERVER_RPC_INSPECT_H
#define QKV_SERVER_RPC_INSPECT_H

#include <stdbool.h>
#include <stdint.h>

#include "server/http2_frames.h"

// Points that a connection may collect in a second (http2_frames.h), from now on; 0: no limit. Before connections.
void qkvi_inspect_setup(uint64_t limit);

// What comes from `connection` is inspected from now on, until it ends. With `tls` once it is decrypted. To be called
// before gRPC has it.
void qkvi_inspect_open(int connection, bool tls);

// How many connections have been closed for this reason.
uint64_t qkvi_inspect_closed(qkvi_http2_verdict reason);

#endif
