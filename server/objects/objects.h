// Opaque objects: bytes with a name, held in parts apart from the rows of sessions, in the same budgets
// (docs/objects.md).
//
//   PutObjects ──► create, fill part after part ──► publish: visible as a whole, or not at all
//                    │ each part that is full goes to the SSD, in records of its own (QKVI_RECORD_OBJECT)
//                    ▼
//   memory   parts [1 MiB] in blocks of the store's arena   ──► spill: durable parts leave, the longest unused first
//   SSD      a session of the storage for each object            evict, expel: whole objects are deleted
//
// An object never changes once it is visible. One that is replaced or deleted is freed by its last user.
//
// Threads: any. One lock over the table and all parts; it is never held while waiting. Lock order: this one, then the
// residency's. `objects` may be NULL where that is said: there are none.
#ifndef QKV_SERVER_OBJECTS_OBJECTS_H
#define QKV_SERVER_OBJECTS_OBJECTS_H

#include "engine/base/metric.h"
#include "engine/cache/store.h"
#include "server/options.h"
#include "server/rpc/rpc.h"
#include "storage/storage.h"

// Bytes of a part, but for an object's last one.
enum { QKVI_OBJECT_PART = 1 << 20 };
enum { QKVI_OBJECT_STALL_MS = 5000 };

typedef struct qkvi_objects qkvi_objects;
typedef struct qkvi_object qkvi_object;

// Names are padded with zeros, as the two are the table's key.
typedef struct qkvi_object_config {
  char tenant[QKV_NAME_MAX + 1], name[QKV_NAME_MAX + 1];
  uint64_t bytes;     // at least 1
  uint64_t checksum;  // XXH3-64; 0: not known yet
  uint64_t ttl_ms;    // 0: never
  qkv_durability durability;
  bool evictable;
  int64_t created_unix_ms;
} qkvi_object_config;

typedef struct qkvi_object_info {
  qkvi_object_config config;
  int64_t last_used_unix_ms;
  uint64_t bytes_in_memory;
} qkvi_object_info;

struct qkvi_residency;

// All but `options` stay the caller's for the objects' life.
qkvi_objects *qkvi_objects_create(qkv_store *store, const qkv_server_options *options, qkv_metric_value *metrics);
// When nothing uses them any more, and before the store. NULL is ignored.
void qkvi_objects_destroy(qkvi_objects **objects);

// ---- One object ----

// Bytes of memory-budget that an object of so many bytes takes by itself, without its parts.
uint64_t qkvi_object_fixed_cost(uint64_t bytes);
size_t qkvi_object_parts(uint64_t bytes);
uint64_t qkvi_object_part_bytes(const qkvi_object *object, size_t part);
const qkvi_object_config *qkvi_object_config_of(const qkvi_object *object);

// A new object that is not visible yet, with a reference. qkvi_object_fixed_cost() has been reserved for it in the
// arena of its tenant's account, and is used up.
qkvi_object *qkvi_object_create(qkvi_objects *objects, qkv_account *account, const qkvi_object_config *config);
// The arena of its account. Borrowed.
qkv_arena *qkvi_object_arena(const qkvi_object *object);
// Gives a reference back. An object that was never published is deleted, on the SSD, too.
void qkvi_object_unref(qkvi_objects *objects, qkvi_object **object);

// Takes a whole part: `data` is a block of qkvi_object_part_bytes() bytes of qkvi_object_arena(), the object's from
// here on. It goes to the SSD in the background.
void qkvi_object_fill(qkvi_objects *objects, qkvi_object *object, size_t part, void *data);

// Makes an object visible that has all its parts, or, where one of its name has the same bytes and checksum, keeps
// that (`*existing`): unless `replace` and its settings differ, or the put is SYNC and that one is perhaps not on the
// SSD. Replaces another one with `replace`; else ALREADY_EXISTS. RESOURCE_EXHAUSTED: limit-objects. Waits for the
// disk where the object is SYNC or replaces one on the SSD, which stays until then: UNAVAILABLE where the write
// fails; CANCELLED where the client of `call` goes before.
qkv_status qkvi_object_publish(qkvi_objects *objects, const qkv_rpc_call *call, qkvi_object *object,
                               uint64_t checksum, bool replace, bool *existing, qkv_error *error);

// A reference, or NULL. `touch`: it counts as a use.
qkvi_object *qkvi_objects_find(qkvi_objects *objects, const char *tenant, const char *name, bool touch);
// A snapshot of an object; NULL `info` fields cost nothing.
void qkvi_object_read_info(qkvi_objects *objects, const qkvi_object *object, qkvi_object_info *info);

// Copies a part to `out`, from memory or from the SSD, and then brings it back where memory has headroom for it, or
// can make some at once. NOT_FOUND: it is damaged, or the object was deleted meanwhile; then the object is gone. One
// that was deleted stays readable for QKVI_OBJECT_STALL_MS after the last part that was read of it: a reader that
// stalls does not keep memory that nothing else can free. INTERNAL: the disk failed.
qkv_status qkvi_object_read(qkvi_objects *objects, qkvi_object *object, size_t part, void *out, qkv_error *error);

// Deletes one; false where there is none. The deletion is durable once qkvi_objects_deleted() has returned OK, which
// waits for all that this caller has deleted, `*waits` of them (added up); `wait` is the caller's own.
typedef struct qkvi_objects_deletion {
  qkvi_objects *objects;
  size_t waits;       // under the residency's lock
  qkv_status status;  // the first failure
} qkvi_objects_deletion;
bool qkvi_objects_delete(qkvi_objects_deletion *deletion, const char *tenant, const char *name);
qkv_status qkvi_objects_deleted(qkvi_objects_deletion *deletion, qkv_error *error);

// Of each name that has an object: its bytes, and those of them in memory; else zeros. `touch`: it counts as a use.
void qkvi_objects_look(qkvi_objects *objects, const char *tenant, char *const *names, size_t count, bool touch,
                       uint64_t *bytes, uint64_t *in_memory);
// Up to `max` of a tenant's, with a reference each, by name, behind `after` and with the prefix. Returns how many. Of
// those that are put or deleted meanwhile any may be among them. This and the one above leave the lock to others
// every some hundred objects.
size_t qkvi_objects_list(qkvi_objects *objects, const char *tenant, const char *prefix, const char *after,
                         qkvi_object **out, size_t max);

// ---- Freeing memory and disk space ----

// A pass goes once through the objects that have bytes in memory, the least recently used first, in as many calls as
// its caller likes: each call goes on where the last one stopped. One thread at a time makes passes of a kind.
typedef enum qkvi_objects_pass { QKVI_PASS_SPILL, QKVI_PASS_EVICT, QKVI_PASSES } qkvi_objects_pass;
// `objects` may be NULL.
void qkvi_objects_begin_pass(qkvi_objects *objects, qkvi_objects_pass pass);
// QKVI_PASS_SPILL: durable parts of objects last used before `before_ms` (monotonic) leave memory, until `bytes` are
// free. Returns the bytes freed. `objects` may be NULL. `account` not NULL: only objects of that account; else those
// of tenants that have more than their guaranteed part, or with `all` of any.
uint64_t qkvi_objects_spill(qkvi_objects *objects, const qkv_account *account, bool all, int64_t before_ms,
                            uint64_t bytes);
// QKVI_PASS_EVICT: the same by deleting objects that may be evicted; `*places` is how many were deleted.
uint64_t qkvi_objects_evict(qkvi_objects *objects, const qkv_account *account, bool all, int64_t before_ms,
                            uint64_t bytes, size_t *places);

typedef struct qkvi_objects_expulsion {
  const qkv_account *account;  // one object of this tenant; NULL: as many as make some headroom, of any
  bool all;                    // of tenants, too, that have no more than is guaranteed to them
  bool evictable;              // only what may be evicted, unless it was last used before `before_ms`
  int64_t before_ms;           // what may not be evicted was last used before
} qkvi_objects_expulsion;
// Deletes objects from the SSD: those that may be evicted first, else the others, but none used in the last second.
// False where none was deleted. `objects` may be NULL.
bool qkvi_objects_expel(qkvi_objects *objects, const qkvi_objects_expulsion *wanted);
// Bytes in memory that cannot be spilled: of objects in memory alone. `objects` may be NULL.
uint64_t qkvi_objects_staying(qkvi_objects *objects);
// Deletes expired objects, and takes memory from removed ones whose readers have stalled.
void qkvi_objects_expire(qkvi_objects *objects);

// ---- For the residency (server/objects/records.c) ----

// Puts the parts that the storage refused before. True where every part is durable. `objects` may be NULL.
bool qkvi_objects_settle(qkvi_objects *objects);
// During recovery, once all records are reported and before anything is changed: RESOURCE_EXHAUSTED where there are
// more whole objects than limit-objects.
qkv_status qkvi_objects_check_found(qkvi_objects *objects, qkv_error *error);
// During recovery: whether the entry opens an object, which is then added; *error where it does not fit this daemon.
bool qkvi_objects_found(qkvi_objects *objects, const qkv_journal_entry *entry, qkv_error *error);
void qkvi_objects_found_record(qkvi_objects *objects, const qkv_record_info *info);
// All have been reported: incomplete objects are dropped, and deleted unless segments are `unread`. From here on
// objects go to the SSD. `objects` may be NULL in all three.
void qkvi_objects_found_all(qkvi_objects *objects, struct qkvi_residency *residency, bool unread);

#endif
