// Where sessions have their pages, for watchers: finds what has moved since the last look.
//
// Threads: one at a time; waits for layers of sessions that have pages on the SSD.
#ifndef QKV_SERVER_WATCH_PLACES_H
#define QKV_SERVER_WATCH_PLACES_H

#include "engine/cache/store.h"
#include "server/watch/log.h"

typedef struct qkvi_watch_places qkvi_watch_places;

qkvi_watch_places *qkvi_watch_places_create(void);
void qkvi_watch_places_destroy(qkvi_watch_places **places);
// Forgets all places: pages on the SSD are reported again.
void qkvi_watch_places_forget(qkvi_watch_places *places);
// Puts pages that have moved into the log; some thousand at most, the rest the next time.
void qkvi_watch_places_look(qkvi_watch_places *places, qkv_store *store, qkvi_watch_log *log);

#endif
