// Attention over more than fits into memory: range by range, merged.
#ifndef QKV_SERVER_HANDLERS_ATTEND_PIECES_H
#define QKV_SERVER_HANDLERS_ATTEND_PIECES_H

#include "engine/base/pool.h"
#include "engine/cache/attend.h"
#include "server/residency/residency.h"

typedef struct qkvi_pieces {
  const qkv_rpc_call *call;
  qkv_pool *pool;
  qkv_session *session;
  uint32_t layer;
  uint32_t cuts;        // of the layer (engine/cache/layer.h) when the request began
  uint64_t begin, end;  // positions
  size_t held;          // as in server/residency/restore.h
  uint64_t *turn;       // cost of a turn (engine/cache/attend.h), which adapts
} qkvi_pieces;

// Runs a checked request, whose out and lse are allocated, over positions of the session's layer: some pages are
// restored from the SSD, attended, and may be evicted before the next ones are restored. `request->layer` is ignored.
// Waits. Errors as of qkvi_restore, and qkvi_attend_was_cut. Results differ from those in one piece by rounding
// alone.
qkv_status qkvi_attend_pieces(const qkvi_pieces *wanted, const qkv_attend *request, qkv_error *error);

// FAILED_PRECONDITION: the session was truncated between two turns of an attend.
qkv_status qkvi_attend_was_cut(qkv_error *error);

#endif
