// Attention over more than fits into memory: range by range, merged.
#ifndef QKV_SERVER_HANDLERS_ATTEND_PIECES_H
#define QKV_SERVER_HANDLERS_ATTEND_PIECES_H

#include "engine/base/pool.h"
#include "engine/cache/attend.h"
#include "server/residency/residency.h"

typedef struct qkvi_pieces_config {
  const qkv_rpc_call *call;
  qkv_pool *pool;
  qkv_session *session;
  uint32_t layer;
  uint32_t cuts;        // of the layer (engine/cache/layer.h) when the request began
  uint64_t begin, end;  // positions; not empty
  uint64_t *turn;       // cost of a turn (engine/cache/attend.h), which adapts
} qkvi_pieces_config;

// A checked request, whose out and lse are allocated, over positions of the session's layer: some pages are restored
// from the SSD, attended, and may be evicted before the next ones are restored. `request->layer` is ignored. What
// `config` and `request` point to outlives it.
typedef struct qkvi_pieces qkvi_pieces;
qkvi_pieces *qkvi_pieces_create(const qkvi_pieces_config *config, const qkv_attend *request);
void qkvi_pieces_destroy(qkvi_pieces **pieces);  // NULL inside: nothing
const qkv_attend *qkvi_pieces_request(const qkvi_pieces *pieces);

// Attends some more of it, for as long as a turn takes or pages are kept; holds nothing afterwards. Waits. `*done`:
// out and lse are complete. Errors as of qkvi_restore, and qkvi_attend_was_cut. Results differ from those in one
// piece by rounding alone.
qkv_status qkvi_pieces_go_on(qkvi_pieces *all, bool *done, qkv_error *error);

// Whether pages that took `back_ns` to come back, and have been attended for `ran_ns` since, are kept for another
// turn. Attends that need each other's memory would else do little but read their pages again for each turn; others
// wait for it some seconds at most.
static inline bool qkvi_attend_keeps(uint64_t back_ns, uint64_t ran_ns) {
  const uint64_t most_ns = 2000000000;
  return ran_ns < (back_ns < most_ns ? back_ns : most_ns);
}

// FAILED_PRECONDITION: the session was truncated between two turns of an attend.
qkv_status qkvi_attend_was_cut(qkv_error *error);

#endif
