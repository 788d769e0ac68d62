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
  uint32_t users;   // readers of `data`
  bool durable;     // the record is
} qkvi_object_part;

// Of the entry that opens the object.
typedef enum qkvi_object_entry {
  QKVI_ENTRY_NONE,       // not visible yet, or in memory alone
  QKVI_ENTRY_UNDER_WAY,  // written, or to be written
  QKVI_ENTRY_DURABLE,
  QKVI_ENTRY_FAILED,  // the journal did not take it: it is tried again
} qkvi_object_entry;

// Guarded by the lock, except the config, which does not change once the object is published, and `data` in use.
struct qkvi_object {
  qkvi_object_config config;
  qkv_account *account;     // its tenant's, a reference: its memory is of that one's arena
  uint64_t number;          // the storage's session; 0: in memory alone
  size_t references;        // one of the list's, while it is in it
  bool listed;              // published, and neither deleted nor replaced
  bool removed;             // from the list of objects, and in that of removed ones while it is being read
  qkvi_object_entry entry;  // in the journal
  bool retrying;            // it has failed, and is under way again
  int64_t used_ms;          // monotonic; of a removed one, when it was read last
  uint64_t in_memory;
  qkvi_object *prev, *next;                      // by last use, while the object may still be put or read
  qkvi_object *prev_warm, *next_warm;            // of those in this list that have bytes in memory
  size_t unsettled;                              // filled parts that are not durable, and a journal entry to come
  qkvi_object *prev_unsettled, *next_unsettled;  // of those that have any
  UT_hash_handle hh, by_number;
  size_t parts;
  qkvi_object_part part[];
};

// A walk over the table, in the order in which objects were published, that gives the lock to others on the way.
// Those that are published meanwhile come last: it ends before them.
typedef struct qkvi_objects_walk {
  qkvi_object *next;                  // NULL: it has ended
  size_t left;                        // objects that it visits at most
  struct qkvi_objects_walk *further;  // another walk
} qkvi_objects_walk;

struct qkvi_objects {
  qkv_store *store;
  const qkv_server_options *options;
  qkv_metric_value *metrics;
  qkvi_residency *residency;  // NULL: no SSD

  pthread_mutex_t lock;               // of all below
  qkvi_object *table;                 // published ones, by tenant and name
  qkvi_objects_walk *walks;           // over the table
  qkvi_object *oldest;                // the list by last use
  qkvi_object *warm;                  // those that have bytes in memory, by last use
  qkvi_object *cursors[QKVI_PASSES];  // in this list: where a pass goes on
  qkvi_object *removed;               // deleted or replaced, and still read
  qkvi_object *unsettled;
  size_t mortal;     // with a ttl
  size_t undurable;  // listed ones whose entry has failed
  uint64_t bytes, memory;

  // Of recovery.
  qkvi_object *numbers;  // the table by number
  uint64_t *superseded;  // numbers of objects whose names were reused
  size_t superseded_count;
};

void qkvi_objects_lock(qkvi_objects *objects);
void qkvi_objects_unlock(qkvi_objects *objects);

// All of the following under the lock.

qkvi_object *qkvi_objects_look_up(const qkvi_objects *objects, const char *tenant, const char *name);
// Removes the object from the list and, where it is published, from the table; its memory is freed with the last
// reference.
void qkvi_objects_remove(qkvi_objects *objects, qkvi_object *object);
// The same, and on the SSD; `done` as of qkv_storage_session_close.
void qkvi_objects_drop(qkvi_objects *objects, qkvi_object *object, qkv_storage_done_fn *done, void *context);
void qkvi_objects_release(qkvi_objects *objects, qkvi_object *object);
// Counts as a use of it.
void qkvi_object_use(qkvi_objects *objects, qkvi_object *object);
void qkvi_objects_publish_found(qkvi_objects *objects, qkvi_object *object);
// Whether a part is durable; one that is not being written is put.
bool qkvi_object_settle_part(qkvi_objects *objects, qkvi_object *object, size_t part);
// Its records no longer count for its tenant: it is being deleted.
void qkvi_object_forget_records(qkvi_object *object);
// A part has been filled with bytes that are not durable.
void qkvi_object_unsettle(qkvi_objects *objects, qkvi_object *object);
// Journals that the object is opened. `wait` NULL: no caller waits for it, and the object records the result.
qkv_status qkvi_object_journal(qkvi_objects *objects, qkvi_object *object, qkvi_journal_wait *wait, qkv_error *error);
void qkvi_object_warm(qkvi_objects *objects, qkvi_object *object, size_t part, void *data);

// Not under the lock. Waits until all parts are durable; then, once it is published, until its journal entry is.
qkv_status qkvi_object_sync(qkvi_objects *objects, const qkv_rpc_call *call, qkvi_object *object, qkv_error *error);
qkv_status qkvi_object_await_journal(qkvi_objects *objects, qkvi_object *object, qkvi_journal_wait *wait,
                                     qkv_error *error);

#endif
