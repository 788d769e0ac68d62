// Memory of responses that are being sent, counted against limit-response-bytes: results and rows lie in a block from
// when they are computed until gRPC has sent them, which a slow client may delay.
//
//   QKV_TRY(qkvi_block_create(call, bytes, limit, &block, error));    one reference
//   qkvi_block_hold(block);                                     one more for each piece that refers to it
//   qkv_rpc_reply(call, writer, qkvi_block_release);
//   qkvi_block_release(block);
//
// One client that does not read cannot take all of it: a connection may hold at most as much as is left, a tenant at
// most twice that. So one connection gets half of the limit, one tenant two thirds, and the holder with the most
// bytes is refused first.
//
// Messages of clients that have arrived as a whole are counted in the same way, until they have been served.
//
// Threads: any. The counts live as long as the blocks: gRPC may drop its last references after the server is gone.
#ifndef QKV_SERVER_HANDLERS_BLOCK_H
#define QKV_SERVER_HANDLERS_BLOCK_H

#include <stdatomic.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef struct qkv_rpc_call qkv_rpc_call;  // rpc.h

// Counts the bytes of a connection or a tenant, of responses and of requests. Opaque.
typedef struct qkvi_holder qkvi_holder;

// The holders that a call's blocks are counted for.
typedef struct qkvi_holders {
  qkvi_holder *connection, *tenant;
} qkvi_holders;

typedef struct qkvi_response_block {
  _Atomic uint64_t references;
  uint64_t bytes;        // counted
  qkvi_holders holders;  // references
  _Alignas(64) uint8_t data[];
} qkvi_response_block;

qkvi_holder *qkvi_holder_create(void);  // one reference
void qkvi_holder_unref(qkvi_holder *holder);

// RESOURCE_EXHAUSTED: "limit-response-bytes is 1048576 bytes, 1000000 are on their way, 65536 more are needed", or
// how many of these are of the call's connection or tenant. A holder without bytes gets all that is left.
qkv_status qkvi_block_create(const qkv_rpc_call *call, uint64_t bytes, uint64_t limit, qkvi_response_block **out,
                             qkv_error *error);
void qkvi_block_hold(qkvi_response_block *block);
void qkvi_block_release(void *block);  // NULL is none

// Counts a message of so many bytes that has arrived, until it is given back. RESOURCE_EXHAUSTED as above.
qkv_status qkvi_request_take(const qkvi_holders *holders, uint64_t bytes, uint64_t limit, qkv_error *error);
void qkvi_request_give(const qkvi_holders *holders, uint64_t bytes);

// Bytes of all blocks.
uint64_t qkvi_block_bytes(void);

#endif
