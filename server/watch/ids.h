// The token ids of a snapshot: those of all sessions' pages, session by session, each page once. Ids of a session
// that is folded are read from the tier, and it stays folded.
//
// Threads: one at a time, which waits for the disk.
#ifndef QKV_SERVER_WATCH_IDS_H
#define QKV_SERVER_WATCH_IDS_H

#include "engine/cache/store.h"
#include "server/watch/log.h"

typedef struct qkvi_watch_ids qkvi_watch_ids;

// Of one tenant's sessions of one model; "": of all.
qkvi_watch_ids *qkvi_watch_ids_create(const char *tenant, const char *model);
void qkvi_watch_ids_destroy(qkvi_watch_ids **ids);
// Up to `max` pages with their ids, 64 each, as ADDED, of what some 50 ms suffice for; the caller returns the labels.
// `*ends`: there are no more.
size_t qkvi_watch_ids_next(qkvi_watch_ids *ids, qkv_store *store, qkvi_watch_event *events, uint32_t *out, size_t max,
                           bool *ends);

#endif
