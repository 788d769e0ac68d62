// Reads pages from the SSD before they are asked for.
//
//   attend of layer 3 ──► layers 4, 5, ...  in the background: up to `storage-read-ahead` bytes of records, and an
//                                           eighth of memory-budget, beyond the layer in use
//   fetch of a run    ──► the next run of its layer
//
// One job of the disk pool for each session, a few for the daemon; where more are wanted nothing is read ahead. It
// evicts what the asking thread would evict (server/residency/residency.h), but never waits for that.
//
// Threads: any; never waits. Where nothing of the session is cold it costs one load.
#ifndef QKV_SERVER_RESIDENCY_READ_AHEAD_H
#define QKV_SERVER_RESIDENCY_READ_AHEAD_H

#include "engine/cache/attend.h"
#include "server/daemon.h"

// To be called when a checked request, which sees positions below `end`, uses a layer: the session's last used one.
void qkvi_read_ahead(qkv_daemon *daemon, qkv_session *session, const qkv_attend *request, uint64_t end);
// Positions [begin, end) of the layer are next.
void qkvi_read_ahead_run(qkv_daemon *daemon, qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end);

#endif
