// What objects.c and records.c share.
#ifndef QKV_SERVER_OBJECTS_INTERNAL_H
#define QKV_SERVER_OBJECTS_INTERNAL_H

#include <pthread.h>

#include "server/metrics.h"
#include "server/objects/objects.h"
#include "server/residency/internal.h"

typedef struct qkvi_object_part {
  void *data;       // in the arena; NULL: on the SSD alone, or not filled yet
  uint64_t record;  // on the SSD; 0: none yet
  uint32_t users;   // who read `data`
  bool durable;     // the record is
} qkvi_object_part;

// Under the lock, but for the config, which does not change once the object is published, and `data` that is used.
struct qkvi_object {
  qkvi_object_config config;
  uint64_t number;    // the storage's session; 0: in memory alone
  size_t references;  // one of the list's, while it is there
  bool listed;        // published, and neither deleted nor replaced
  bool journaled;     // that it is open is known to be in the journal
  int64_t used_ms;    // monotonic
  uint64_t in_memory;
  qkvi_object *prev, *next;                      // by last use, while the object may still be put or read
  size_t unsettled;                              // filled parts that are not durable
  qkvi_object *prev_unsettled, *next_unsettled;  // of those that have any
  UT_hash_handle hh, by_number;
  size_t parts;
  qkvi_object_part part[];
};

struct qkvi_objects {
  qkv_store *store;
  qkv_arena *arena;
  const qkv_server_options *options;
  qkv_metric_value *metrics;
  qkvi_residency *residency;  // NULL: no SSD

  pthread_mutex_t lock;  // of all below
  qkvi_object *table;    // published ones, by tenant and name
  qkvi_object *oldest;   // the list by last use
  qkvi_object *unsettled;
  size_t mortal;  // with a ttl
  uint64_t bytes, memory;

  // Of recovery.
  qkvi_object *numbers;  // the table by number
  uint64_t *superseded;  // numbers of objects whose names were given anew
  size_t superseded_count;
};

void qkvi_objects_lock(qkvi_objects *objects);
void qkvi_objects_unlock(qkvi_objects *objects);

// All of the following under the lock.

qkvi_object *qkvi_objects_look_up(const qkvi_objects *objects, const char *tenant, const char *name);
// Takes the object out of the list and, where it is published, out of the table; memory goes with the last reference.
void qkvi_objects_remove(qkvi_objects *objects, qkvi_object *object);
// The same, and on the SSD; `done` as of qkv_storage_session_close.
void qkvi_objects_drop(qkvi_objects *objects, qkvi_object *object, qkv_storage_done_fn *done, void *context);
void qkvi_objects_use(qkvi_objects *objects, qkvi_object *object);
void qkvi_objects_release(qkvi_objects *objects, qkvi_object *object);
void qkvi_objects_publish_found(qkvi_objects *objects, qkvi_object *object);
// Whether a part is durable; one that is not on its way is put.
bool qkvi_object_settle_part(qkvi_objects *objects, qkvi_object *object, size_t part);
// A part that has been filled with bytes that are not durable.
void qkvi_object_unsettle(qkvi_objects *objects, qkvi_object *object);
// That it is opened, into the journal; `wait` NULL: nobody waits for it.
qkv_status qkvi_object_journal(qkvi_objects *objects, const qkvi_object *object, qkvi_journal_wait *wait,
                               qkv_error *error);
void qkvi_object_warm(qkvi_objects *objects, qkvi_object *object, size_t part, void *data);

// Not under the lock. Waits until all parts are durable; then, once it is published, until its journal entry is.
qkv_status qkvi_object_sync(qkvi_objects *objects, const qkv_rpc_call *call, qkvi_object *object, qkv_error *error);
qkv_status qkvi_object_await_journal(qkvi_objects *objects, qkvi_object *object, qkvi_journal_wait *wait,
                                     qkv_error *error);

#endif
