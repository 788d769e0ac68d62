// Sessions that a stream of appends opens and that nobody else sees until they are complete (AppendRequest.open).
//
//   open ──► staged ──► complete: sealed where that is asked for, published in the store, in the journal
//               └─────► drop: the stream has ended, nothing is left
//
// The journal learns of a session when it is complete, so that a crash before leaves nothing either; and it learns
// how long the session was then, so that one that a crash leaves shorter is not found again.
//
// Threads: the stream's, one at a time; any that may wait for the disk where there is an SSD tier.
#ifndef QKV_SERVER_STAGE_H
#define QKV_SERVER_STAGE_H

#include "server/daemon.h"
#include "server/items.h"

enum { QKVI_STAGE_MAX = 256 };  // sessions of a stream at a time

typedef struct qkvi_stage {
  qkv_session *sessions[QKVI_STAGE_MAX];  // references
  size_t count;
} qkvi_stage;

// Opens what the `open` of a message ask for. INVALID_ARGUMENT, and errors of qkvi_open_empty, with "open[2]: ":
// those before it are staged.
qkv_status qkvi_stage_open(const qkv_rpc_call *call, qkvi_stage *stage, qkv_bytes message, qkv_error *error);
// Borrowed; NULL: the stream has none of this name.
qkv_session *qkvi_stage_find(const qkvi_stage *stage, const char *name);
// All become visible, in order; `*completed` counts them. The first that cannot and those behind it stay staged.
qkv_status qkvi_stage_complete(const qkv_rpc_call *call, qkvi_stage *stage, bool sealed, uint64_t *completed,
                               qkv_error *error);
// Those that are left end.
void qkvi_stage_drop(qkv_daemon *daemon, qkvi_stage *stage);

#endif
