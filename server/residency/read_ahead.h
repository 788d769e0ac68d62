// Pages that will be asked for soon come back before they are.
//
//   attend of layer 3 ──► layers 4, 5, ...  in the background, as far as `storage-read-ahead` bytes of records, and
//   an
//                                           eighth of memory-budget, reach beyond the layer that is used
//   fetch of a run    ──► the next run of its layer
//
// One job of the disk pool for each session, a few for the daemon; where more are wanted nothing is read ahead. What
// it evicts is what the thread that asks would evict (server/residency/residency.h), but it never waits for
// that.
//
// Threads: any; never waits. Where nothing of the session is cold it costs one load.
#ifndef QKV_SERVER_RESIDENCY_READ_AHEAD_H
#define QKV_SERVER_RESIDENCY_READ_AHEAD_H

#include "engine/cache/attend.h"
#include "server/daemon.h"

// A checked request, which sees positions below `end`, has been given the layer that the session used last.
void qkvi_read_ahead(qkv_daemon *daemon, qkv_session *session, const qkv_attend *request, uint64_t end);
// Positions [begin, end) of the layer are next.
void qkvi_read_ahead_run(qkv_daemon *daemon, qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end);

#endif
