// Objects on the SSD: a session of the storage for each, with a record for each part, and its ObjectInfo in the
// journal.
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <utlist.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "qkv/v1/objects.pb-c.h"
#include "server/auth/identity.h"
#include "server/objects/internal.h"

enum { SYNC_WAIT_MS = 30000, QUOTA_WAIT_MS = 5000 };  // as of sessions (acknowledge.c)

// ---- Out ----

void qkvi_object_unsettle(qkvi_objects *objects, qkvi_object *object) {
  if (object->unsettled++ == 0) DL_APPEND2(objects->unsettled, object, prev_unsettled, next_unsettled);
}

// One of its parts, or its entry.
static void settle_one(qkvi_objects *objects, qkvi_object *object) {
  if (--object->unsettled == 0) DL_DELETE2(objects->unsettled, object, prev_unsettled, next_unsettled);
}

// The first failure is logged; the entry is tried again with what else is not durable. A caller that deletes the
// object meanwhile has journaled that behind it.
static void journaled(qkvi_objects *objects, qkvi_object *object, qkv_status status) {
  const bool failed = status != QKV_OK, was_failed = object->entry == QKVI_ENTRY_FAILED;
  object->retrying = false;
  object->entry = failed ? QKVI_ENTRY_FAILED : QKVI_ENTRY_DURABLE;
  if (!object->listed || failed == was_failed) return;
  objects->undurable += failed ? 1 : SIZE_MAX;
  qkv_metric_set(&objects->metrics[QKV_METRIC_OBJECTS_UNDURABLE], (int64_t)objects->undurable);
  if (failed) {
    qkvi_object_unsettle(objects, object);
    qkv_log(QKV_LOG_ERROR, "an object is held, but not durable: the journal in data-dir was not written",
            "{s:s, s:s*, s:s}", "object", object->config.name, "tenant", qkvi_tenant_to_log(object->config.tenant),
            "status", qkv_status_name(status));
  } else {
    settle_one(objects, object);
  }
}

// An entry that no caller waits for.
typedef struct entry_note {
  qkvi_objects *objects;
  qkvi_object *object;  // a reference
} entry_note;

static void on_entry(void *context, qkv_status status) {
  entry_note *note = context;
  qkvi_objects *objects = note->objects;
  qkvi_residency *residency = objects->residency;
  qkvi_objects_lock(objects);
  journaled(objects, note->object, status);
  qkvi_objects_release(objects, note->object);
  qkvi_objects_unlock(objects);
  free(note);
  if (status == QKV_OK) return;
  qkvi_residency_lock(residency);
  qkvi_write_back_note_failure(residency, status);
  qkvi_residency_unlock(residency);
  atomic_store_explicit(&residency->unsettled, true, memory_order_relaxed);
}

static entry_note *note_of(qkvi_objects *objects, qkvi_object *object) {
  entry_note *note = malloc(sizeof *note);
  if (note == NULL) abort();
  *note = (entry_note){.objects = objects, .object = object};
  object->references++;
  return note;
}

qkv_status qkvi_object_journal(qkvi_objects *objects, qkvi_object *object, qkvi_journal_wait *wait,
                               qkv_error *error) {
  const qkvi_object_config *config = &object->config;
  Qkv__V1__ObjectInfo message = QKV__V1__OBJECT_INFO__INIT;
  message.object = (char *)(uintptr_t)config->name;
  message.tenant = (char *)(uintptr_t)config->tenant;
  message.bytes = config->bytes;
  message.checksum = config->checksum;
  message.retention = config->evictable ? QKV__V1__RETENTION__RETENTION_EVICT : QKV__V1__RETENTION__RETENTION_KEEP;
  message.durability = (Qkv__V1__Durability)config->durability;
  message.ttl_ms = config->ttl_ms;
  message.created_unix_ms = config->created_unix_ms;
  const size_t bytes = qkv__v1__object_info__get_packed_size(&message);
  uint8_t *payload = malloc(bytes + 1);
  if (payload == NULL) abort();
  (void)qkv__v1__object_info__pack(&message, payload);
  entry_note *note = wait == NULL ? note_of(objects, object) : NULL;
  const qkv_status status = qkv_storage_journal(objects->residency->storage, QKV_JOURNAL_SESSION_OPEN, object->number,
                                                payload, bytes, note == NULL ? qkvi_catalogue_on_journal : on_entry,
                                                note == NULL ? (void *)wait : note, error);
  free(payload);
  if (status == QKV_OK || note == NULL) return status;
  qkvi_objects_release(objects, object);
  free(note);
  return status;
}

// 0: the storage refuses for now, or the tenant's quota is full.
static uint64_t put_part(const qkvi_objects *objects, const qkvi_object *object, size_t part) {
  qkvi_residency *residency = objects->residency;
  const uint64_t bytes = qkvi_object_part_bytes(object, part);
  if (qkvi_write_back_refuses(residency, object->number)) return 0;
  if (!qkv_account_claim_ssd(object->account, bytes)) {
    atomic_store_explicit(&residency->unsettled, true, memory_order_relaxed);  // it is tried again
    return 0;
  }
  const qkv_record_meta meta = {.session = object->number, .position = part, .tokens = 1, .kind = QKVI_RECORD_OBJECT};
  void *copy = malloc(bytes);
  if (copy == NULL) abort();
  memcpy(copy, object->part[part].data, bytes);
  const uint64_t record = qkvi_write_back_put(&residency->backings[object->config.durability == QKV_DURABILITY_SYNC],
                                              &meta, &(qkvi_payload){.copy = copy}, bytes);
  if (record == 0) qkv_account_drop_ssd(object->account, bytes);
  return record;
}

// Bytes on the SSD, or being written there, no longer count.
static void forget_record(qkvi_object *object, size_t part) {
  if (object->part[part].record != 0) qkv_account_drop_ssd(object->account, qkvi_object_part_bytes(object, part));
  object->part[part].record = 0;
}

void qkvi_object_forget_records(qkvi_object *object) {
  for (size_t i = 0; i < object->parts; i++) forget_record(object, i);
}

bool qkvi_object_settle_part(qkvi_objects *objects, qkvi_object *object, size_t part) {
  qkvi_object_part *at = &object->part[part];
  if (at->durable) return true;
  if (at->record != 0) {
    const qkv_backing *backing = qkvi_write_back_backing(objects->residency, object->config.durability);
    const qkv_record_state state = backing->state(backing->context, at->record);
    if (state == QKV_RECORD_DURABLE) {
      at->durable = true;
      settle_one(objects, object);
    }
    if (state != QKV_RECORD_GONE) return at->durable;
    forget_record(object, part);
  }
  at->record = put_part(objects, object, part);
  return false;
}

// A failed entry is written again, unless writes pause after a failure.
static void settle_entry(qkvi_objects *objects, qkvi_object *object) {
  if (object->entry != QKVI_ENTRY_FAILED || object->retrying ||
      qkvi_write_back_refuses(objects->residency, object->number))
    return;
  object->retrying = qkvi_object_journal(objects, object, NULL, NULL) == QKV_OK;
}

// `*full`: the storage refuses for now, so that copying another part would be in vain; not set by the tenant's quota.
static bool settle(qkvi_objects *objects, qkvi_object *object, bool *full) {
  bool all = true, refused = false;
  for (size_t i = 0; i < object->parts && object->unsettled > 0 && !refused; i++) {
    if (object->part[i].data == NULL || qkvi_object_settle_part(objects, object, i)) continue;
    all = false;
    refused = object->part[i].record == 0;
  }
  *full |= refused && !qkv_account_is_full_ssd(object->account);
  settle_entry(objects, object);
  return all && object->unsettled == 0;
}

bool qkvi_objects_settle(qkvi_objects *objects) {
  bool all = true, full = false;
  if (objects == NULL) return true;
  qkvi_objects_lock(objects);
  for (qkvi_object *at = objects->unsettled, *next; at != NULL && !full; at = next) {
    next = at->next_unsettled;
    all &= settle(objects, at, &full);
  }
  qkvi_objects_unlock(objects);
  return all && !full;
}

qkv_status qkvi_object_await_journal(qkvi_objects *objects, qkvi_object *object, qkvi_journal_wait *wait,
                                     qkv_error *error) {
  const qkv_status status = qkvi_catalogue_finish_wait(wait, NULL);
  qkvi_objects_lock(objects);
  journaled(objects, object, status);
  qkvi_objects_unlock(objects);
  if (status == QKV_OK) return QKV_OK;
  atomic_store_explicit(&objects->residency->unsettled, true, memory_order_relaxed);
  return qkv_fail(error, QKV_UNAVAILABLE,
                  "object %s is held, but not durable: the journal in data-dir was not written", object->config.name);
}

qkv_status qkvi_object_sync(qkvi_objects *objects, const qkv_rpc_call *call, qkvi_object *object, qkv_error *error) {
  qkvi_residency *residency = objects->residency;
  const qkv_backing *tier = qkvi_write_back_backing(residency, object->config.durability);
  const int64_t until = qkv_now_ms() + SYNC_WAIT_MS;
  uint64_t seen = qkvi_progress_count(residency);
  for (;;) {
    bool full = false;
    qkvi_objects_lock(objects);
    const bool durable = settle(objects, object, &full), listed = object->listed;
    qkvi_objects_unlock(objects);
    if (durable) return QKV_OK;
    if (qkvi_client_is_gone(call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    const qkv_status failure = tier->health(tier->context, object->number);
    const char *state = listed ? "held, but not durable" : "not kept";
    if (qkv_account_is_full_ssd(object->account) && qkv_now_ms() > until - SYNC_WAIT_MS + QUOTA_WAIT_MS)
      return qkv_fail(error, QKV_UNAVAILABLE, "object %s is %s: quota ssd_bytes of tenant %s is full",
                      object->config.name, state, object->config.tenant);
    if (failure != QKV_OK || qkv_now_ms() > until)
      return qkv_fail(error, QKV_UNAVAILABLE, "object %s is %s: %s", object->config.name, state,
                      failure == QKV_RESOURCE_EXHAUSTED ? "the disk or storage-budget is full"
                      : failure != QKV_OK               ? "the disk failed"
                                                        : "the disk takes longer than 30 s");
    qkvi_write_back_hasten(residency);
    seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS);
  }
}

// ---- In ----

// Memory for a restored part, where there is headroom, or objects used longer ago can be spilled.
static void *take_block(const qkvi_objects *objects, const qkvi_object *object, uint64_t bytes) {
  qkv_arena *arena = qkvi_object_arena(object);
  const uint64_t cost = qkv_arena_cost(bytes), limit = qkvi_budget_limit(objects->residency);
  if (qkv_arena_reserve(arena, cost, NULL) != QKV_OK) {
    if (cost > limit) return NULL;
    (void)qkvi_budget_evict(objects->residency, limit - cost - (limit - cost) / 16);  // for the next parts, too
    if (qkv_arena_reserve(arena, cost, NULL) != QKV_OK) return NULL;
  }
  return qkv_arena_alloc(arena, bytes);
}

static void bring_back(qkvi_objects *objects, qkvi_object *object, size_t part, const void *bytes) {
  const uint64_t size = qkvi_object_part_bytes(object, part);
  void *data = take_block(objects, object, size);
  if (data == NULL) return;
  memcpy(data, bytes, size);
  qkvi_objects_lock(objects);
  const bool wanted = object->listed && object->part[part].data == NULL;
  if (wanted) qkvi_object_warm(objects, object, part, data);
  qkvi_objects_unlock(objects);
  if (!wanted) qkv_arena_free(qkvi_object_arena(object), data, size);
}

static qkv_status read_record(const qkvi_objects *objects, const qkvi_object *object, uint64_t record, void *out,
                              uint64_t bytes, qkv_error *error) {
  const qkv_backing *tier = qkvi_write_back_backing(objects->residency, object->config.durability);
  void *reading = tier->read_begin(tier->context, &record, 1, bytes);
  const qkv_status status = tier->read_wait(reading, 0, out, bytes, error);
  tier->read_end(reading);
  return status;
}

// A damaged part ends its object. An object that was deleted or replaced meanwhile is no longer in the table.
static qkv_status lose(qkvi_objects *objects, qkvi_object *object, qkv_error *error) {
  qkvi_objects_lock(objects);
  const bool lost = object->listed;
  if (lost) qkvi_objects_drop(objects, object, NULL, NULL);
  qkvi_objects_unlock(objects);
  qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_LOST], lost);
  return qkv_fail(error, QKV_NOT_FOUND, "no object %s", object->config.name);
}

qkv_status qkvi_object_read(qkvi_objects *objects, qkvi_object *object, size_t part, void *out, qkv_error *error) {
  const uint64_t bytes = qkvi_object_part_bytes(object, part);
  qkvi_object_part *at = &object->part[part];
  qkv_error reason = {0};
  qkvi_objects_lock(objects);
  const void *data = at->data;
  const uint64_t record = at->record;
  const bool gone = data == NULL && (object->removed || record == 0);
  if (object->removed) object->used_ms = qkv_now_ms();
  at->users++;
  qkvi_objects_unlock(objects);
  qkv_status status = QKV_OK;
  if (data != NULL) {
    memcpy(out, data, bytes);
  } else if (gone) {
    status = QKV_NOT_FOUND;
  } else {
    status = read_record(objects, object, record, out, bytes, &reason);
  }
  qkvi_objects_lock(objects);
  at->users--;
  qkvi_objects_unlock(objects);
  if (status == QKV_NOT_FOUND || status == QKV_DATA_LOSS) return lose(objects, object, error);
  if (status != QKV_OK) return qkv_fail(error, status, "object %s: %s", object->config.name, reason.text);
  if (data == NULL) bring_back(objects, object, part, out);
  return QKV_OK;
}

// ---- Recovery ----

static qkv_status take_found(qkvi_objects *objects, const Qkv__V1__ObjectInfo *message, uint64_t number,
                             qkv_error *error) {
  qkvi_object_config config = {.bytes = message->bytes,
                               .checksum = message->checksum,
                               .ttl_ms = message->ttl_ms,
                               .durability = (qkv_durability)message->durability,
                               .evictable = message->retention == QKV__V1__RETENTION__RETENTION_EVICT,
                               .created_unix_ms = message->created_unix_ms};
  QKV_TRY(qkv_name_check(message->object, "object", error));
  QKV_TRY(qkv_name_check(message->tenant, "tenant", error));
  (void)snprintf(config.name, sizeof config.name, "%s", message->object);
  (void)snprintf(config.tenant, sizeof config.tenant, "%s", message->tenant);
  qkvi_objects_lock(objects);
  qkvi_object *old = qkvi_objects_look_up(objects, config.tenant, config.name);
  if (old != NULL && old->number == number) {  // the entry was written again, as the first time was in doubt
    qkvi_objects_unlock(objects);
    return QKV_OK;
  }
  if (old != NULL) {
    uint64_t *more = realloc(objects->superseded, (objects->superseded_count + 1) * sizeof *more);
    if (more == NULL) abort();
    objects->superseded = more;
    more[objects->superseded_count++] = old->number;
    HASH_DELETE(by_number, objects->numbers, old);
    qkvi_objects_remove(objects, old);
  }
  qkvi_objects_unlock(objects);
  qkv_account *account = qkv_accounts_join(qkv_store_accounts(objects->store), config.tenant);
  const qkv_status status =
      qkv_arena_reserve(qkv_account_arena(account), qkvi_object_fixed_cost(config.bytes), error);
  qkvi_object *object = status == QKV_OK ? qkvi_object_create(objects, account, &config) : NULL;
  qkv_account_unref(&account);
  QKV_TRY(status);
  qkvi_objects_lock(objects);
  object->number = number;
  object->entry = QKVI_ENTRY_DURABLE;
  qkvi_objects_publish_found(objects, object);
  HASH_ADD(by_number, objects->numbers, number, sizeof object->number, object);
  qkvi_objects_release(objects, object);
  qkvi_objects_unlock(objects);
  return QKV_OK;
}

bool qkvi_objects_found(qkvi_objects *objects, const qkv_journal_entry *entry, qkv_error *error) {
  if (objects == NULL) return false;
  Qkv__V1__ObjectInfo *message = qkv__v1__object_info__unpack(NULL, entry->bytes, entry->payload);
  const bool is_object = message != NULL && message->object[0] != '\0' && message->bytes > 0;
  if (is_object) (void)take_found(objects, message, entry->session, error);
  if (message != NULL) qkv__v1__object_info__free_unpacked(message, NULL);
  return is_object;
}

void qkvi_objects_found_record(qkvi_objects *objects, const qkv_record_info *info) {
  const qkv_record_meta *meta = &info->meta;
  qkvi_object *object = NULL;
  if (objects == NULL) return;
  HASH_FIND(by_number, objects->numbers, &meta->session, sizeof meta->session, object);
  if (object == NULL || meta->position >= object->parts ||
      info->bytes != qkvi_object_part_bytes(object, meta->position))
    return;
  qkvi_object_part *part = &object->part[meta->position];
  if (part->record == 0) qkv_account_add_ssd(object->account, info->bytes);
  part->record = info->record;
  part->durable = true;
}

static bool is_whole(const qkvi_object *object) {
  bool whole = true;
  for (size_t i = 0; i < object->parts; i++) whole &= object->part[i].durable;
  return whole;
}

// Objects that a crash has left without some of their records are dropped, and need no place.
qkv_status qkvi_objects_check_found(qkvi_objects *objects, qkv_error *error) {
  size_t whole = 0;
  if (objects == NULL) return QKV_OK;
  qkvi_objects_lock(objects);
  for (const qkvi_object *at = objects->oldest; at != NULL; at = at->next) whole += is_whole(at);
  qkvi_objects_unlock(objects);
  if (whole <= (size_t)objects->options->limit_objects) return QKV_OK;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-objects is %" PRId64 ", more are there",
                  objects->options->limit_objects);
}

void qkvi_objects_found_all(qkvi_objects *objects, qkvi_residency *residency, bool unread) {
  if (objects == NULL) return;
  qkvi_objects_lock(objects);
  objects->residency = residency;
  HASH_CLEAR(by_number, objects->numbers);
  for (size_t i = 0; i < objects->superseded_count; i++)
    qkvi_closes_add(residency, objects->superseded[i], NULL, NULL);
  for (qkvi_object *at = objects->oldest, *next; at != NULL; at = next) {
    next = at->next;
    if (is_whole(at)) continue;
    if (unread) {
      qkvi_objects_remove(objects, at);
    } else {
      qkvi_objects_drop(objects, at, NULL, NULL);
    }
    qkv_metric_add(&objects->metrics[QKV_METRIC_OBJECTS_INCOMPLETE], 1);
  }
  qkvi_objects_unlock(objects);
}
