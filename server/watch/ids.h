// The token ids of a snapshot: those of all sessions' pages, session by session, each page once.
//
// Threads: one at a time.
#ifndef QKV_SERVER_WATCH_IDS_H
#define QKV_SERVER_WATCH_IDS_H

#include "engine/cache/store.h"
#include "server/watch/log.h"

typedef struct qkvi_watch_ids qkvi_watch_ids;

qkvi_watch_ids *qkvi_watch_ids_create(void);
void qkvi_watch_ids_destroy(qkvi_watch_ids **ids);
// Up to `max` pages with their ids, 64 each, as ADDED; the caller returns the labels. 0: there are no more.
size_t qkvi_watch_ids_next(qkvi_watch_ids *ids, qkv_store *store, qkvi_watch_event *events, uint32_t *out,
                           size_t max);

#endif
