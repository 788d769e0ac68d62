// Sessions that a stream of appends opens and that no other client sees until they are complete (AppendRequest.open).
//
//   open ──► staged ──► complete: sealed where that is asked for, published in the store, in the journal
//               └─────► drop: the stream has ended, nothing is left
//
// A session is journaled when it is complete, so that a crash before leaves nothing either. Its length is journaled,
// too, so that a session that a crash has shortened is not restored.
//
// Threads: the stream's, one at a time; any that may wait for the disk where there is an SSD tier.
#ifndef QKV_SERVER_HANDLERS_STAGE_H
#define QKV_SERVER_HANDLERS_STAGE_H

#include "server/daemon.h"
#include "server/handlers/items.h"

enum { QKVI_STAGE_MAX = 256 };  // sessions of a stream at a time

typedef struct qkvi_stage {
  qkv_session *sessions[QKVI_STAGE_MAX];  // references
  size_t count;
} qkvi_stage;

// Opens the sessions of a message's `open` fields. INVALID_ARGUMENT, and errors of qkvi_open_empty, with "open[2]: ":
// those before it are staged.
qkv_status qkvi_stage_open(const qkv_rpc_call *call, qkvi_stage *stage, qkv_bytes message, qkv_error *error);
// Borrowed; NULL: the stream has none of this name.
qkv_session *qkvi_stage_find(const qkvi_stage *stage, const char *name);
// Makes all visible, in order; `*completed` counts them. The first that fails and those behind it stay staged.
qkv_status qkvi_stage_complete(const qkv_rpc_call *call, qkvi_stage *stage, bool sealed, uint64_t *completed,
                               qkv_error *error);
// Closes those that are left.
void qkvi_stage_drop(qkv_daemon *daemon, qkvi_stage *stage);

#endif
