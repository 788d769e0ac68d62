// Watch: what prefixes come and go, to those who ask.
//
//   index of prefixes ──► log (server/watch_log.h) ──► thread ──► a message at a time to each watcher that can take
//   one residency           ◄── twice a second: what has moved ──┘
//
// A watcher begins with a snapshot, read from the index in pieces, and goes on with the changes since the snapshot
// began: some of them are in it, too, and mean the same twice. One that does not read holds one message; when it
// reads again and the log has gone on without it, it is told so and begins again.
//
// Threads: any. The hub's thread waits for layers of sessions that have pages on the SSD.
#ifndef QKV_SERVER_WATCH_H
#define QKV_SERVER_WATCH_H

#include "engine/base/metric.h"
#include "engine/cache/store.h"

typedef struct qkvi_watch_hub qkvi_watch_hub;

// Observes the store's index, which nothing is in yet. `places`: sessions have pages elsewhere than in memory.
qkvi_watch_hub *qkvi_watch_hub_create(qkv_store *store, qkv_metric_value *metrics, size_t watchers_max, bool places);
// Watch calls end (UNAVAILABLE), and new ones do at once.
void qkvi_watch_hub_drain(qkvi_watch_hub *hub);
// When no call runs any more, and before the store goes.
void qkvi_watch_hub_stop(qkvi_watch_hub *hub);
// Afterwards. NULL is let through by all three.
void qkvi_watch_hub_destroy(qkvi_watch_hub **hub);

#endif
