// WatchResponse: changes of pages as a message; consecutive ones of one prefix are merged.
#ifndef QKV_SERVER_WATCH_MESSAGE_H
#define QKV_SERVER_WATCH_MESSAGE_H

#include "qkv/v1/kv_cache.pb-c.h"
#include "server/watch/log.h"

// The events that are `wanted`, packed behind the other fields of `response`; malloc'd. `ids` has 64 for each event
// that has_ids; may be NULL. *told gets how many of the events are in it.
uint8_t *qkvi_watch_pack(Qkv__V1__WatchResponse *response, const qkvi_watch_event *events, const uint32_t *ids,
                         size_t count, bool (*wanted)(const void *context, const qkvi_watch_event *event),
                         const void *context, size_t *bytes, size_t *told);

#endif
