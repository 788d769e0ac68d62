#include "server/objects/objects.h"
#include "engine/base/clock.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utlist.h>

#include "engine/base/log.h"
#include "server/auth/identity.h"
#include "server/objects/internal.h"

enum { KEY_BYTES = 2 * (QKV_NAME_MAX + 1), EXPEL_IDLE_MS = 1000, EXPEL_BYTES = 16 << 20 };
_Static_assert(offsetof(qkvi_object_config, tenant) == 0 && offsetof(qkvi_object_config, name) == KEY_BYTES / 2,
               "tenant and name are the key");

void qkvi_objects_lock(qkvi_objects *objects) {
  const int failed = pthread_mutex_lock(&objects->lock);
  assert(failed == 0);
  (void)failed;
}

void qkvi_objects_unlock(qkvi_objects *objects) {
  (void)pthread_mutex_unlock(&objects->lock);
}

static int64_t unix_ms(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_REALTIME, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void update_gauges(const qkvi_objects *objects) {
  qkv_metric_set(&objects->metrics[QKV_METRIC_OBJECTS], (int64_t)HASH_COUNT(objects->table));
  qkv_metric_set(&objects->metrics[QKV_METRIC_OBJECT_BYTES], (int64_t)objects->bytes);
  qkv_metric_set(&objects->metrics[QKV_METRIC_OBJECT_MEMORY_BYTES], (int64_t)objects->memory);
  qkv_metric_set(&objects->metrics[QKV_METRIC_OBJECTS_UNDURABLE], (int64_t)objects->undurable);
}

// ---- Life ----

qkvi_objects *qkvi_objects_create(qkv_store *store, const qkv_server_options *options, qkv_metric_value *metrics) {
  qkvi_objects *objects = calloc(1, sizeof *objects);
  if (objects == NULL) abort();
  objects->store = store;
  objects->options = options;
  objects->metrics = metrics;
  const int failed = pthread_mutex_init(&objects->lock, NULL);
  assert(failed == 0);
  (void)failed;
  return objects;
}

void qkvi_objects_destroy(qkvi_objects **objects) {
  qkvi_objects *old = *objects;
  if (old == NULL) return;
  *objects = NULL;
  old->residency = NULL;  // what is on the SSD stays there
  qkvi_objects_lock(old);
  while (old->oldest != NULL) qkvi_objects_remove(old, old->oldest);
  qkvi_objects_unlock(old);
  free(old->superseded);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}

// ---- One object ----

size_t qkvi_object_parts(uint64_t bytes) {
  return (bytes + QKVI_OBJECT_PART - 1) / QKVI_OBJECT_PART;
}

static size_t struct_bytes(uint64_t bytes) {
  return sizeof(qkvi_object) + qkvi_object_parts(bytes) * sizeof(qkvi_object_part);
}

uint64_t qkvi_object_fixed_cost(uint64_t bytes) {
  return qkv_arena_cost(struct_bytes(bytes));
}

uint64_t qkvi_object_part_bytes(const qkvi_object *object, size_t part) {
  const uint64_t begin = (uint64_t)part * QKVI_OBJECT_PART, left = object->config.bytes - begin;
  return left < QKVI_OBJECT_PART ? left : QKVI_OBJECT_PART;
}

const qkvi_object_config *qkvi_object_config_of(const qkvi_object *object) {
  return &object->config;
}

qkv_arena *qkvi_object_arena(const qkvi_object *object) {
  return qkv_account_arena(object->account);
}

qkvi_object *qkvi_object_create(qkvi_objects *objects, qkv_account *account, const qkvi_object_config *config) {
  const size_t bytes = struct_bytes(config->bytes);
  qkvi_object *object = qkv_arena_alloc(qkv_account_arena(account), bytes);
  memset(object, 0, bytes);
  object->account = qkv_account_ref(account);
  object->config = *config;
  if (object->config.created_unix_ms == 0) object->config.created_unix_ms = unix_ms();
  object->parts = qkvi_object_parts(config->bytes);
  object->used_ms = qkv_now_ms();
  object->references = 2;
  qkvi_objects_lock(objects);
  if (objects->residency != NULL && config->durability > QKV_DURABILITY_MEMORY)
    object->number = qkv_storage_session_number(objects->residency->storage);
  DL_APPEND(objects->oldest, object);
  objects->memory += qkvi_object_fixed_cost(config->bytes);
  update_gauges(objects);
  qkvi_objects_unlock(objects);
  return object;
}

// ---- Those that have bytes in memory ----

// Nearly always at the end of the list.
static void add_warm(qkvi_objects *objects, qkvi_object *object) {
  qkvi_object *before = objects->warm == NULL ? NULL : objects->warm->prev_warm;
  while (before != NULL && before->used_ms > object->used_ms)
    before = before == objects->warm ? NULL : before->prev_warm;
  if (before != NULL) {
    DL_APPEND_ELEM2(objects->warm, before, object, prev_warm, next_warm);
  } else {
    DL_PREPEND2(objects->warm, object, prev_warm, next_warm);
  }
}

static void remove_warm(qkvi_objects *objects, qkvi_object *object) {
  if (object->prev_warm == NULL) return;
  for (int i = 0; i < QKVI_PASSES; i++) {
    if (objects->cursors[i] == object) objects->cursors[i] = object->next_warm;
  }
  DL_DELETE2(objects->warm, object, prev_warm, next_warm);
  object->prev_warm = object->next_warm = NULL;
}

void qkvi_objects_begin_pass(qkvi_objects *objects, qkvi_objects_pass pass) {
  if (objects == NULL) return;
  qkvi_objects_lock(objects);
  objects->cursors[pass] = objects->warm;
  qkvi_objects_unlock(objects);
}

// The next object of a pass that was last used before; NULL: there is none.
static qkvi_object *next_warm(qkvi_objects *objects, qkvi_objects_pass pass, int64_t before_ms) {
  qkvi_object *next = objects->cursors[pass];
  if (next == NULL || next->used_ms >= before_ms) return NULL;
  objects->cursors[pass] = next->next_warm;
  qkv_metric_add(&objects->metrics[QKV_METRIC_EVICTION_LOOKS], 1);
  return next;
}

static void drop_data(qkvi_objects *objects, qkvi_object *object, size_t part) {
  const uint64_t bytes = qkvi_object_part_bytes(object, part);
  qkv_arena_free(qkvi_object_arena(object), object->part[part].data, bytes);
  object->part[part].data = NULL;
  object->in_memory -= bytes;
  objects->memory -= qkv_arena_cost(bytes);
  if (object->in_memory == 0) remove_warm(objects, object);
}

void qkvi_objects_release(qkvi_objects *objects, qkvi_object *object) {
  assert(object->references > 0);
  if (--object->references > 0) return;
  if (object->removed)
    DL_DELETE(objects->removed, object);  // NOLINT(clang-analyzer-core.NullDereference): it is in it
  for (size_t i = 0; i < object->parts; i++) {
    if (object->part[i].data != NULL) drop_data(objects, object, i);
  }
  objects->memory -= qkvi_object_fixed_cost(object->config.bytes);
  qkv_account *account = object->account;
  qkv_arena_free(qkv_account_arena(account), object, struct_bytes(object->config.bytes));
  qkv_account_unref(&account);
}

// Only one that is being put can be in the list and neither published nor removed.
void qkvi_object_unref(qkvi_objects *objects, qkvi_object **object) {
  qkvi_object *old = *object;
  if (old == NULL) return;
  *object = NULL;
  qkvi_objects_lock(objects);
  if (!old->listed && old->references == 2 && !old->removed) qkvi_objects_drop(objects, old, NULL, NULL);
  qkvi_objects_release(objects, old);
  update_gauges(objects);
  qkvi_objects_unlock(objects);
}

void qkvi_object_warm(qkvi_objects *objects, qkvi_object *object, size_t part, void *data) {
  const uint64_t bytes = qkvi_object_part_bytes(object, part);
  assert(object->part[part].data == NULL);
  object->part[part].data = data;
  if (object->in_memory == 0 && !object->removed) add_warm(objects, object);
  object->in_memory += bytes;
  objects->memory += qkv_arena_cost(bytes);
  update_gauges(objects);
}

void qkvi_object_fill(qkvi_objects *objects, qkvi_object *object, size_t part, void *data) {
  qkvi_objects_lock(objects);
  qkvi_object_warm(objects, object, part, data);
  if (object->number != 0) {
    qkvi_object_unsettle(objects, object);
    (void)qkvi_object_settle_part(objects, object, part);
  }
  qkvi_objects_unlock(objects);
}

// ---- The table ----

qkvi_object *qkvi_objects_look_up(const qkvi_objects *objects, const char *tenant, const char *name) {
  struct {
    char tenant[QKV_NAME_MAX + 1], name[QKV_NAME_MAX + 1];
  } key = {0};
  qkvi_object *found;
  (void)snprintf(key.tenant, sizeof key.tenant, "%s", tenant);
  (void)snprintf(key.name, sizeof key.name, "%s", name);
  HASH_FIND(hh, objects->table, &key, KEY_BYTES, found);
  return found;
}

void qkvi_objects_publish_found(qkvi_objects *objects, qkvi_object *object) {
  object->listed = true;
  HASH_ADD(hh, objects->table, config, KEY_BYTES, object);
  qkv_account_add_object(object->account);
  objects->bytes += object->config.bytes;
  objects->mortal += object->config.ttl_ms > 0;
  update_gauges(objects);
}

// Its bytes are released with its last reader, or before where that one stalls.
void qkvi_objects_remove(qkvi_objects *objects, qkvi_object *object) {
  if (object->listed) {
    objects->undurable -= object->entry == QKVI_ENTRY_FAILED;
    for (qkvi_objects_walk *walk = objects->walks; walk != NULL; walk = walk->further) {
      if (walk->next == object) walk->next = object->hh.next;
    }
    HASH_DEL(objects->table, object);
    qkv_account_drop_object(object->account);
    objects->bytes -= object->config.bytes;
    objects->mortal -= object->config.ttl_ms > 0;
  }
  if (object->unsettled > 0) DL_DELETE2(objects->unsettled, object, prev_unsettled, next_unsettled);
  object->unsettled = 0;
  object->listed = false;
  qkvi_object_forget_records(object);
  remove_warm(objects, object);
  DL_DELETE(objects->oldest, object);
  DL_APPEND(objects->removed, object);
  object->removed = true;
  object->used_ms = qkv_now_ms();
  qkvi_objects_release(objects, object);
  update_gauges(objects);
}

void qkvi_objects_drop(qkvi_objects *objects, qkvi_object *object, qkv_storage_done_fn *done, void *context) {
  if (object->number != 0 && objects->residency != NULL)
    qkvi_closes_add(objects->residency, object->number, done, context);
  qkvi_objects_remove(objects, object);
}

void qkvi_object_use(qkvi_objects *objects, qkvi_object *object) {
  const bool warm = object->prev_warm != NULL;
  remove_warm(objects, object);
  object->used_ms = qkv_now_ms();
  if (warm) add_warm(objects, object);
  if (object->removed || object->next == NULL) return;  // or the last one anyway
  DL_DELETE(objects->oldest, object);
  DL_APPEND(objects->oldest, object);
}

qkvi_object *qkvi_objects_find(qkvi_objects *objects, const char *tenant, const char *name, bool touch) {
  qkvi_objects_lock(objects);
  qkvi_object *found = qkvi_objects_look_up(objects, tenant, name);
  if (found != NULL) found->references++;
  if (found != NULL && touch) qkvi_object_use(objects, found);
  qkvi_objects_unlock(objects);
  return found;
}

void qkvi_object_read_info(qkvi_objects *objects, const qkvi_object *object, qkvi_object_info *info) {
  qkvi_objects_lock(objects);
  *info = (qkvi_object_info){.config = object->config,
                             .last_used_unix_ms = unix_ms() - (qkv_now_ms() - object->used_ms),
                             .bytes_in_memory = object->in_memory};
  qkvi_objects_unlock(objects);
}

// ---- Becoming visible ----

// The least recently used one that may go, of the account where it is not NULL.
static bool evict_one(qkvi_objects *objects, const qkv_account *account, const qkvi_object *leaving) {
  qkvi_object *at = objects->oldest;
  while (at != NULL &&
         (!at->listed || !at->config.evictable || at == leaving || (account != NULL && at->account != account)))
    at = at->next;
  if (at == NULL) return false;
  qkvi_objects_drop(objects, at, NULL, NULL);
  qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_EVICTED], 1);
  return true;
}

// A place for the object, in its tenant's part and of all, perhaps by evicting others: where the part is full, the
// tenant's own.
static qkv_status make_place(qkvi_objects *objects, const qkvi_object *object, const qkvi_object *leaving,
                             qkv_error *error) {
  const int64_t limit = objects->options->limit_objects;
  const size_t leaves = leaving != NULL;
  const uint64_t part = (uint64_t)qkv_server_options_tenant_part(objects->options, limit);
  while (part < (uint64_t)limit && qkv_account_objects(object->account) - leaves >= part) {
    if (!evict_one(objects, object->account, leaving))
      return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-objects is %" PRId64 ", and one tenant may have %" PRIu64,
                      limit, part);
  }
  while (HASH_COUNT(objects->table) - leaves >= (size_t)limit) {
    if (!evict_one(objects, NULL, leaving))
      return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-objects is %" PRId64 ", that many are held", limit);
  }
  return QKV_OK;
}

static qkv_status publish(qkvi_objects *objects, qkvi_object *object, bool replace, qkvi_journal_wait *wait,
                          qkv_error *error) {
  qkvi_object *old = qkvi_objects_look_up(objects, object->config.tenant, object->config.name);
  if (old != NULL && !replace)
    return qkv_fail(error, QKV_ALREADY_EXISTS, "object %s: another one of %" PRIu64 " bytes has the name",
                    object->config.name, old->config.bytes);
  QKV_TRY(make_place(objects, object, old, error));
  if (object->number != 0) QKV_TRY(qkvi_object_journal(objects, object, wait, error));
  if (old != NULL) qkvi_objects_drop(objects, old, NULL, NULL);
  if (object->number != 0) object->entry = QKVI_ENTRY_UNDER_WAY;
  qkvi_object_use(objects, object);
  qkvi_objects_publish_found(objects, object);
  qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_PUT], 1);
  return QKV_OK;
}

static bool same_settings(const qkvi_object_config *a, const qkvi_object_config *b) {
  return a->ttl_ms == b->ttl_ms && a->durability == b->durability && a->evictable == b->evictable;
}

// Whether `held` is the same object as the put of `object` asks for.
static bool is_same(const qkvi_object *held, const qkvi_object *object, bool replace) {
  return held != NULL && held->config.bytes == object->config.bytes &&
         held->config.checksum == object->config.checksum &&
         (!replace || same_settings(&held->config, &object->config));
}

qkv_status qkvi_object_publish(qkvi_objects *objects, const qkv_rpc_call *call, qkvi_object *object,
                               uint64_t checksum, bool replace, bool *existing, qkv_error *error) {
  qkvi_journal_wait wait = {.residency = objects->residency};
  const bool sync = object->config.durability == QKV_DURABILITY_SYNC && object->number != 0;
  qkvi_object *held;
  bool same, durable = object->number == 0;  // in memory alone, it is as durable as it gets
  object->config.checksum = checksum;        // the object is not visible yet
  for (;;) {
    qkvi_objects_lock(objects);
    held = qkvi_objects_look_up(objects, object->config.tenant, object->config.name);
    same = is_same(held, object, replace);
    // An object that is perhaps not on the SSD does not satisfy a put that asks for that: the new one replaces it.
    *existing = same && (!sync || held->entry == QKVI_ENTRY_DURABLE);
    const bool gives_up = held != NULL && held->number != 0 && (replace || same);
    if (durable || *existing || (!sync && !gives_up)) break;
    // A durable object is replaced only by a durable one.
    qkvi_objects_unlock(objects);
    QKV_TRY(qkvi_object_sync(objects, call, object, error));
    durable = true;
  }
  if (!*existing) {
    const qkv_status status = publish(objects, object, replace || same, sync ? &wait : NULL, error);
    qkvi_objects_unlock(objects);
    return status == QKV_OK && sync ? qkvi_object_await_journal(objects, object, &wait, error) : status;
  }
  qkvi_object_use(objects, held);
  held->references++;
  qkvi_objects_unlock(objects);
  const qkv_status status = sync ? qkvi_object_sync(objects, call, held, error) : QKV_OK;
  qkvi_object_unref(objects, &held);
  return status;
}

qkv_status qkvi_objects_deleted(qkvi_objects_deletion *deletion, qkv_error *error) {
  qkvi_residency *residency = deletion->objects->residency;
  if (residency == NULL) return QKV_OK;
  qkvi_residency_lock(residency);
  while (deletion->waits > 0) (void)pthread_cond_wait(&residency->moved, &residency->lock);
  qkvi_residency_unlock(residency);
  if (deletion->status == QKV_OK) return QKV_OK;
  return qkv_fail(error, deletion->status, "objects that were deleted may come back, the disk %s",
                  deletion->status == QKV_RESOURCE_EXHAUSTED ? "is full" : "failed");
}

static void on_deleted(void *context, qkv_status status) {
  qkvi_objects_deletion *deletion = context;
  qkvi_residency *residency = deletion->objects->residency;
  qkvi_residency_lock(residency);
  if (deletion->status == QKV_OK) deletion->status = status;
  deletion->waits--;
  residency->steps++;
  (void)pthread_cond_broadcast(&residency->moved);
  qkvi_residency_unlock(residency);
}

bool qkvi_objects_delete(qkvi_objects_deletion *deletion, const char *tenant, const char *name) {
  qkvi_objects *objects = deletion->objects;
  qkvi_objects_lock(objects);
  qkvi_object *found = qkvi_objects_look_up(objects, tenant, name);
  const bool stored = found != NULL && found->number != 0;
  if (stored) {
    qkvi_residency_lock(objects->residency);
    deletion->waits++;
    qkvi_residency_unlock(objects->residency);
  }
  if (found != NULL) qkvi_objects_drop(objects, found, stored ? on_deleted : NULL, deletion);
  qkvi_objects_unlock(objects);
  return found != NULL;
}

// ---- Freeing memory and disk space ----

static uint64_t spill_object(qkvi_objects *objects, qkvi_object *object, uint64_t bytes) {
  uint64_t freed = 0;
  for (size_t i = 0; i < object->parts && freed < bytes; i++) {
    const qkvi_object_part *part = &object->part[i];
    if (part->data == NULL || part->users > 0 || (!part->durable && part->record == 0) ||
        !qkvi_object_settle_part(objects, object, i))
      continue;
    freed += qkv_arena_cost(qkvi_object_part_bytes(object, i));
    drop_data(objects, object, i);
  }
  return freed;
}

// The bytes of memory that may be taken from an object's tenant.
static uint64_t may_take(const qkvi_object *object, const qkv_account *account, bool all) {
  if (account != NULL) return object->account == account ? UINT64_MAX : 0;
  return all ? UINT64_MAX : qkv_account_excess(object->account);
}

uint64_t qkvi_objects_spill(qkvi_objects *objects, const qkv_account *account, bool all, int64_t before_ms,
                            uint64_t bytes) {
  uint64_t freed = 0;
  if (objects == NULL) return 0;
  qkvi_objects_lock(objects);
  while (freed < bytes) {
    qkvi_object *at = next_warm(objects, QKVI_PASS_SPILL, before_ms);
    if (at == NULL) break;
    const uint64_t most = may_take(at, account, all), wanted = bytes - freed;
    if (at->number == 0 || most == 0) continue;
    freed += spill_object(objects, at, wanted < most ? wanted : most);
    if (freed >= bytes && at->prev_warm != NULL) objects->cursors[QKVI_PASS_SPILL] = at;  // some of it is left
  }
  update_gauges(objects);
  qkvi_objects_unlock(objects);
  return freed;
}

uint64_t qkvi_objects_evict(qkvi_objects *objects, const qkv_account *account, bool all, int64_t before_ms,
                            uint64_t bytes, size_t *places) {
  uint64_t freed = 0;
  *places = 0;
  qkvi_objects_lock(objects);
  while (freed < bytes) {
    qkvi_object *at = next_warm(objects, QKVI_PASS_EVICT, before_ms);
    if (at == NULL) break;
    if (!at->listed || !at->config.evictable || may_take(at, account, all) == 0) continue;
    freed += at->in_memory;
    qkvi_objects_drop(objects, at, NULL, NULL);
    ++*places;
  }
  qkvi_objects_unlock(objects);
  qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_EVICTED], (int64_t)*places);
  return freed;
}

// Objects that may not be evicted are logged by name, as sessions are, the first few of a pass; all are counted.
static void log_expelled(const qkvi_object *object, size_t before, bool quota) {
  enum { NAMED = 16 };
  const qkvi_object_config *config = &object->config;
  if (config->evictable || before >= NAMED) return;
  qkv_log(QKV_LOG_WARN,
          quota                ? "quota ssd_bytes is full, an object was deleted"
          : before + 1 < NAMED ? "storage-budget is full, an object was deleted"
                               : "storage-budget is full, this object and perhaps more were deleted",
          "{s:s, s:s*, s:I}", "object", config->name, "tenant", qkvi_tenant_to_log(config->tenant), "bytes",
          (json_int_t)config->bytes);
}

static bool may_expel(const qkvi_objects_expulsion *wanted, const qkvi_object *object, bool kept) {
  if (!object->listed || object->number == 0 || object->config.evictable == kept) return false;
  if (wanted->account != NULL) return object->account == wanted->account;
  return wanted->all || qkv_account_is_over_ssd(object->account);
}

bool qkvi_objects_expel(qkvi_objects *objects, const qkvi_objects_expulsion *wanted) {
  const uint64_t most = wanted->account != NULL ? 1 : EXPEL_BYTES;  // of a tenant one
  uint64_t freed = 0;
  size_t count = 0;
  if (objects == NULL) return false;
  qkvi_objects_lock(objects);
  const int64_t idle = qkv_now_ms() - EXPEL_IDLE_MS;
  for (int kept = 0; kept < 2 && freed == 0; kept++) {
    // Evictable objects go first.
    const int64_t until = kept == wanted->evictable || wanted->before_ms > idle ? idle : wanted->before_ms;
    if (kept == 1 && wanted->evictable) break;
    for (qkvi_object *at = objects->oldest, *next; at != NULL && at->used_ms < until && freed < most; at = next) {
      next = at->next;
      if (!may_expel(wanted, at, kept == 1)) continue;
      freed += at->config.bytes;
      log_expelled(at, count++, wanted->account != NULL);
      qkvi_objects_drop(objects, at, NULL, NULL);
      qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_EXPELLED], 1);
    }
  }
  qkvi_objects_unlock(objects);
  return freed > 0;
}

uint64_t qkvi_objects_staying(qkvi_objects *objects) {
  uint64_t bytes = 0;
  if (objects == NULL) return 0;
  qkvi_objects_lock(objects);
  for (const qkvi_object *at = objects->warm; at != NULL; at = at->next_warm) {
    if (at->number == 0) bytes += at->in_memory;
  }
  qkvi_objects_unlock(objects);
  return bytes;
}

// A reader that stalls in the middle of an object misses the rest.
static void take_from_stalled(qkvi_objects *objects, int64_t now) {
  for (qkvi_object *at = objects->removed; at != NULL; at = at->next) {
    if (at->in_memory == 0 || now - at->used_ms < QKVI_OBJECT_STALL_MS) continue;
    for (size_t i = 0; i < at->parts; i++) {
      if (at->part[i].data != NULL && at->part[i].users == 0) drop_data(objects, at, i);
    }
    qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_STALLED], 1);
  }
}

void qkvi_objects_expire(qkvi_objects *objects) {
  qkvi_objects_lock(objects);
  const int64_t now = qkv_now_ms();
  take_from_stalled(objects, now);
  qkvi_object *next = objects->mortal > 0 ? objects->oldest : NULL;
  for (qkvi_object *at; (at = next) != NULL;) {
    next = at->next;
    if (!at->listed || at->config.ttl_ms == 0 || now < at->used_ms ||
        (uint64_t)(now - at->used_ms) < at->config.ttl_ms)
      continue;
    qkvi_objects_drop(objects, at, NULL, NULL);
    qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_EXPIRED], 1);
  }
  update_gauges(objects);
  qkvi_objects_unlock(objects);
}
