// Between the files of the store: a walk over its sessions that does not keep its lock.
//
// Threads: any.
#ifndef QKV_ENGINE_CACHE_STORE_INTERNAL_H
#define QKV_ENGINE_CACHE_STORE_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/cache/store.h"

// qkvi_session_table_next_part, with the store's lock for reading meanwhile.
bool qkvi_store_next_part(qkv_store *store, uint64_t *next, void (*fn)(void *context, qkv_session *session),
                          void *context);

#endif
