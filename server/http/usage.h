// What tenants and models hold, summed over all sessions.
//
// Threads: any. The sums come from one walk over the sessions, which takes at most a twentieth of one thread's time;
// between two walks every caller gets the last result.
#ifndef QKV_SERVER_HTTP_USAGE_H
#define QKV_SERVER_HTTP_USAGE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/store.h"
#include "server/http/labels.h"

typedef struct qkvi_usage_row {
  char name[QKVI_LABEL_NAME_MAX + 1];  // of a tenant, or of a model qkvi_label_of_model
  uint64_t sessions;
  uint64_t tokens;         // of the longest layer of each session
  uint64_t memory_bytes;   // of codes, exact rows and their metadata; shared pages count for each session
  uint64_t storage_bytes;  // of pages on the SSD, before they are packed
} qkvi_usage_row;

typedef struct qkvi_usage {
  qkvi_usage_row *tenants, *models;  // by name; models by tenant, then name
  size_t tenant_count, model_count;
} qkvi_usage;

typedef struct qkvi_usage_cache {
  pthread_mutex_t lock;
  uint64_t next_ns;  // when a walk may be made again
  qkvi_usage usage;
} qkvi_usage_cache;

void qkvi_usage_cache_init(qkvi_usage_cache *cache);
void qkvi_usage_cache_deinit(qkvi_usage_cache *cache);
// A copy, which the caller frees with qkvi_usage_free.
void qkvi_usage_read(qkvi_usage_cache *cache, qkv_store *store, qkvi_usage *out);
void qkvi_usage_free(qkvi_usage *usage);

#endif
