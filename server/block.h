// Memory of responses on their way out, counted against limit-response-bytes: results and rows lie in a block from
// when they are computed until gRPC has sent them, which a slow client may put off.
//
//   QKV_TRY(qkvi_block_create(bytes, limit, &block, error));    one reference
//   qkvi_block_hold(block);                                     one more for each piece that refers to it
//   qkv_rpc_reply(call, writer, qkvi_block_release);
//   qkvi_block_release(block);
//
// Threads: any. The count is one for the process: gRPC may drop its last references after the server is gone.
#ifndef QKV_SERVER_BLOCK_H
#define QKV_SERVER_BLOCK_H

#include <stdatomic.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef struct qkvi_response_block {
  _Atomic uint64_t references;
  uint64_t bytes;  // counted
  _Alignas(64) uint8_t data[];
} qkvi_response_block;

// RESOURCE_EXHAUSTED: "limit-response-bytes is 1048576 bytes, 1000000 are on their way, 65536 more are needed".
qkv_status qkvi_block_create(uint64_t bytes, uint64_t limit, qkvi_response_block **out, qkv_error *error);
void qkvi_block_hold(qkvi_response_block *block);
void qkvi_block_release(void *block);  // NULL is none

// Bytes of all blocks.
uint64_t qkvi_block_bytes(void);

#endif
