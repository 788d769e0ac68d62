// Watch: reports added and removed prefixes to the clients that watch.
//
//   index of prefixes ──► log (server/watch/log.h) ──► thread ──► a message at a time to each watcher that can take
//   one residency           ◄── twice a second: what has moved ──┘
//
// A watcher begins with a snapshot, read from the index in pieces, and goes on with the changes since the snapshot
// began. Some of them are in it, too: applying them twice is harmless. A watcher that does not read holds one
// message. When it reads again and the log has overwritten changes that it has not seen, it is told so and begins
// again.
//
// Threads: any. The hub's thread waits for no layer and no disk: the snapshot's token ids are read in jobs of their
// watcher, and what has moved is looked for in a job.
#ifndef QKV_SERVER_WATCH_WATCH_H
#define QKV_SERVER_WATCH_WATCH_H

#include "engine/base/executor.h"
#include "engine/base/metric.h"
#include "engine/cache/store.h"

typedef struct qkvi_watch_hub qkvi_watch_hub;

// Observes the store's index, which is still empty. The executor outlives all calls. `watchers_max`: calls at once,
// `tenant_max`: of one tenant. `places`: sessions may have pages on the SSD.
qkvi_watch_hub *qkvi_watch_hub_create(qkv_store *store, qkv_executor *executor, qkv_metric_value *metrics,
                                      size_t watchers_max, size_t tenant_max, bool places);
// Watch calls end (UNAVAILABLE), and new ones do at once.
void qkvi_watch_hub_drain(qkvi_watch_hub *hub);
// When no call and no job runs any more, and before the store is destroyed.
void qkvi_watch_hub_stop(qkvi_watch_hub *hub);
// After stop. All three ignore NULL.
void qkvi_watch_hub_destroy(qkvi_watch_hub **hub);

#endif
