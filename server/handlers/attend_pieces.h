// Attention over more than fits into memory: range by range, merged.
#ifndef QKV_SERVER_HANDLERS_ATTEND_PIECES_H
#define QKV_SERVER_HANDLERS_ATTEND_PIECES_H

#include "engine/base/pool.h"
#include "engine/cache/attend.h"
#include "server/residency/residency.h"

// Runs a checked request, whose out and lse are allocated, over the positions [begin, end) of the session's layer:
// some pages are restored from the SSD, attended, and may be evicted before the next ones are restored.
// `request->layer` is ignored; `held` as in server/residency/restore.h. Waits. `*length` gets the layer's length.
// Errors as of qkvi_restore. Results differ from those in one piece by rounding alone.
qkv_status qkvi_attend_pieces(const qkv_rpc_call *call, qkv_pool *pool, qkv_session *session, uint32_t layer,
                              const qkv_attend *request, uint64_t begin, uint64_t end, size_t held, uint64_t *length,
                              qkv_error *error);

#endif
