// Recovery: brings the data directory's content into the store: models, calibrations, sessions with all pages cold.
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/handlers/contract.h"
#include "server/metrics.h"
#include "server/residency/rows.h"

typedef struct kept_calibration {
  const qkv_model *model;  // the store's
  const qkv_calibration *calibration;
  size_t place;  // among those of the journal
  bool used;     // by a page
  bool foreign;  // came with pages, and was never the model's
  struct kept_calibration *next;
} kept_calibration;

// The storage reports records by session, layer and position.
typedef struct recovery {
  qkvi_residency *residency;
  const qkv_server_options *options;
  kept_calibration *calibrations;    // the last one first
  size_t calibration_count, sifted;  // of these, and those that keep() was asked of
  struct found_session {
    uint64_t number;
    uint64_t parent;  // of a fork; else 0
    qkv_session *session;
    bool closed;       // another one of its name came later
    uint64_t *beyond;  // for each layer the end of its pages beyond a gap, 0 without; NULL: no layer has any
    uint64_t *limits;  // of a fork: below these it has what its parent puts, now and later; for each layer, then for
                       // the hashes of token ids; NULL: not a fork
    uint64_t *reach;   // for each layer how far its heirs have what is put for it from now on; NULL: it has none
    struct hash_cut {
      uint64_t position, watermark;  // hashes behind the position of records below the watermark do not count
      struct hash_cut *next;
    } * hash_cuts;
    UT_hash_handle hh;
  } * sessions;
  uint64_t pages;
  qkvi_found_rows *rows;
  uint64_t *folds;  // records of sessions that the process before had folded
  size_t fold_count;
  // By the first record of a layer: the first session that has it, and the last one so far. Further sessions that
  // have it share their pages.
  struct first_record {
    uint64_t record;
    qkv_session *session, *last;
    UT_hash_handle hh;
  } * firsts;
  // The layer whose records are being reported.
  struct found_session *at;
  uint64_t at_session, at_first;  // its number; its first record
  uint32_t at_layer;
  uint64_t expected;  // position
  bool broken;        // pages beyond a gap are of no use
  bool counted;       // the objects
  qkv_error refused;  // why the whole directory is refused
} recovery;

// ---- Entries ----

// Nothing of the directory is dropped because of this daemon's options: the daemon does not start instead.
static void refuse(recovery *all, const char *what, const char *name, const qkv_error *error) {
  if (all->refused.status == QKV_OK)
    (void)qkv_fail(&all->refused, QKV_FAILED_PRECONDITION, "%s %s: %s", what, name, error->text);
}

// Entries of a daemon without tenants of models have none: their models are the default tenant's.
static const char *tenant_of(const Qkv__V1__Model *message) {
  return message->tenant[0] != '\0' ? message->tenant : QKV_TENANT_DEFAULT;
}

static bool restore_model(recovery *all, const Qkv__V1__Model *message, qkv_error *error) {
  qkv_model model;
  const qkv_model *restored = NULL;
  qkv_status status = qkvi_model_read(message, &model, error);
  (void)snprintf(model.tenant, sizeof model.tenant, "%s", tenant_of(message));
  if (status == QKV_OK) status = qkv_store_restore_model(all->residency->store, &model, &restored, error);
  qkvi_model_clear(&model);
  if (status != QKV_OK) return false;
  const bool shared = message->shared && strcmp(restored->tenant, QKV_TENANT_DEFAULT) == 0;
  if (shared) qkv_store_share_model(all->residency->store, restored);
  // An entry that is not shared, behind one that is, has ended that.
  if (!shared) (void)qkv_store_unshare_model(all->residency->store, restored, NULL);
  qkvi_catalogue_note_journaled(all->residency, &(qkvi_journaled){.model = restored, .shared = shared});
  return true;
}

// One that pages came with is not the model's (`kept`).
static qkv_status give_calibration(const qkv_model *model, const qkv_calibration *calibration, bool kept,
                                   qkv_error *error) {
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  if (kept) return qkv_calibration_check(calibration, &shape, error);
  return qkv_model_calibrate(model, calibration, QKV_CALIBRATION_STORED, false, error);
}

// The last calibration that is the model's is that of pages to come.
static bool restore_calibration(recovery *all, const Qkv__V1__Model *message, qkv_error *error) {
  qkv_calibration *calibration = NULL;
  const qkv_model *model = NULL;
  qkv_status status = qkv_store_own_model(all->residency->store, tenant_of(message), message->name, &model, error);
  if (status == QKV_OK)
    status = qkv_calibration_read(message->calibration.data, message->calibration.len, &calibration, error);
  if (status == QKV_OK) status = give_calibration(model, calibration, message->calibration_kept != 0, error);
  if (status != QKV_OK) {
    const qkv_calibration *left = calibration;
    qkv_calibration_unref(&left);
    return false;
  }
  kept_calibration *kept = calloc(1, sizeof *kept);
  if (kept == NULL) abort();
  kept->model = model;
  kept->calibration = calibration;
  kept->foreign = message->calibration_kept != 0;
  kept->place = all->calibration_count++;
  kept->next = all->calibrations;
  all->calibrations = kept;
  return true;
}

static bool take_model(recovery *all, const qkv_journal_entry *entry) {
  qkv_error error = {0};
  Qkv__V1__Model *message = qkv__v1__model__unpack(NULL, entry->bytes, entry->payload);
  if (message == NULL) return false;
  const bool taken = entry->kind == QKV_JOURNAL_MODEL ? restore_model(all, message, &error)
                                                      : restore_calibration(all, message, &error);
  if (!taken) refuse(all, entry->kind == QKV_JOURNAL_MODEL ? "model" : "calibration", message->name, &error);
  qkv__v1__model__free_unpacked(message, NULL);
  return true;
}

static qkv_status session_config(const recovery *all, const Qkv__V1__SessionInfo *message, uint64_t number,
                                 qkv_session_config *config, qkv_error *error) {
  const qkv_server_options *options = all->options;
  *config =
      (qkv_session_config){.purpose = (qkv_purpose)message->purpose,
                           .first_position = message->first_position,
                           .ema = {.alpha = options->ema_alpha, .sample_every = (uint32_t)options->ema_every},
                           .keep_full = message->keep_full != 0,
                           .max_attention_error = message->max_attention_error,
                           .tier_bits = message->tier_bits,
                           .durability = (qkv_durability)message->durability,
                           .backing = qkvi_write_back_backing(all->residency, (qkv_durability)message->durability),
                           .id = number,
                           .ttl_ms = message->ttl_ms,
                           .evictable = message->retention == QKV__V1__RETENTION__RETENTION_EVICT,
                           .whole = message->whole,
                           .pinned = message->pinned != 0};
  config->name = message->session;
  config->tenant = message->tenant;
  // Sessions from before salts were introduced have none.
  if (message->prefix_root.len == sizeof config->root)
    memcpy(&config->root, message->prefix_root.data, sizeof config->root);
  QKV_TRY(qkvi_policy_read(message->policy, &config->policy, error));
  qkv_server_options_keep_out(options, config->tenant, &config->policy);
  return QKV_OK;
}

// Sessions of other tenants keep a model of the default one shared. Daemons without tenants of models have shared all
// of theirs, and such a session does not teach: its tenant was not asked.
static void find_model(const recovery *all, const Qkv__V1__SessionInfo *message, qkv_session_config *config) {
  qkv_store *store = all->residency->store;
  const qkv_model *model = NULL;
  const bool before = message->model_tenant[0] == '\0';
  if (strcmp(config->tenant, QKV_TENANT_DEFAULT) == 0) return;
  if (!before && strcmp(message->model_tenant, config->tenant) == 0) return;
  if (before && qkv_store_own_model(store, config->tenant, message->model, &model, NULL) == QKV_OK) return;
  if (qkv_store_own_model(store, QKV_TENANT_DEFAULT, message->model, &model, NULL) != QKV_OK) return;
  qkv_store_share_model(store, model);
  if (before) config->policy.learn = false;
}

// An earlier session of this tenant and name was closed, though that is not journaled.
static void close_former(recovery *all, const qkv_session_config *config) {
  struct found_session *found;
  qkv_session *former = NULL;
  uint64_t freed;
  if (qkv_store_session(all->residency->store, config->tenant, config->name, &former, NULL) != QKV_OK) return;
  const uint64_t number = qkv_session_id(former);
  HASH_FIND(hh, all->sessions, &number, sizeof found->number, found);
  assert(found != NULL && found->session == former && !found->closed);
  (void)qkv_store_close_session(all->residency->store, former, &freed, NULL);
  found->closed = true;
  qkv_session_unref(&former);
}

static uint64_t *limits_of(const qkv_journal_entry *entry, uint32_t layers) {
  uint64_t *limits = calloc((size_t)layers + 1, sizeof *limits);
  if (limits == NULL) abort();
  limits[layers] = UINT64_MAX;  // entries from before this field existed
  const uint32_t both = entry->layers < layers + 1 ? entry->layers : layers + 1;
  memcpy(limits, entry->positions, both * sizeof *limits);
  return limits;
}

static bool take_session(recovery *all, const qkv_journal_entry *entry) {
  qkv_error error = {0};
  qkv_session_config config;
  qkv_session *session = NULL;
  if (qkvi_objects_found(all->residency->objects, entry, &error)) {
    if (error.status != QKV_OK) refuse(all, "an", "object", &error);
    return true;
  }
  Qkv__V1__SessionInfo *message = qkv__v1__session_info__unpack(NULL, entry->bytes, entry->payload);
  if (message == NULL) return false;
  qkv_status status = session_config(all, message, entry->session, &config, &error);
  if (status == QKV_OK) close_former(all, &config);
  if (status == QKV_OK) find_model(all, message, &config);
  config.found = true;
  if (status == QKV_OK) status = qkv_store_open(all->residency->store, &config, message->model, &session, &error);
  if (status != QKV_OK) refuse(all, "session", message->session, &error);
  qkv__v1__session_info__free_unpacked(message, NULL);
  if (status != QKV_OK) return true;
  struct found_session *found = calloc(1, sizeof *found);
  if (found == NULL) abort();
  found->number = entry->session;
  found->parent = entry->kind == QKV_JOURNAL_SESSION_FORK ? entry->parent : 0;
  found->session = session;
  if (found->parent != 0) found->limits = limits_of(entry, qkv_session_model(session)->layers);
  HASH_ADD(hh, all->sessions, number, sizeof found->number, found);
  return true;
}

static void cut_hashes(struct found_session *found, const qkv_journal_entry *entry) {
  struct hash_cut *cut = malloc(sizeof *cut);
  if (cut == NULL) abort();
  *cut = (struct hash_cut){.position = entry->position, .watermark = entry->watermark, .next = found->hash_cuts};
  found->hash_cuts = cut;
}

// A truncated session is shorter on purpose, and still counts as whole; the limits of a fork are lowered for good.
static bool take_cut(const recovery *all, const qkv_journal_entry *entry) {
  struct found_session *found;
  qkv_session_info info;
  HASH_FIND(hh, all->sessions, &entry->session, sizeof entry->session, found);
  if (found == NULL || found->closed) return true;
  qkv_session_read_info(found->session, &info, NULL);
  if (entry->position < info.config.whole) qkv_session_set_whole(found->session, entry->position);
  const uint32_t layers = qkv_session_model(found->session)->layers;
  if (entry->layer == layers) cut_hashes(found, entry);
  for (uint32_t i = 0; found->limits != NULL && i <= layers; i++) {
    if (entry->layer != QKV_LAYER_ALL && entry->layer != i) continue;
    if (found->limits[i] > entry->position) found->limits[i] = entry->position;
  }
  return true;
}

static bool take_note(recovery *all, const qkv_journal_entry *entry) {
  struct found_session *found;
  Qkv__V1__SessionInfo *message = qkv__v1__session_info__unpack(NULL, entry->bytes, entry->payload);
  HASH_FIND(hh, all->sessions, &entry->session, sizeof entry->session, found);
  if (message != NULL && found != NULL && !found->closed) {
    qkv_session_set_ttl(found->session, message->ttl_ms);
    qkv_session_set_pinned(found->session, message->pinned != 0);
    qkv_session_set_whole(found->session, message->whole);
  }
  if (message != NULL) qkv__v1__session_info__free_unpacked(message, NULL);
  return true;
}

static bool on_entry(void *context, const qkv_journal_entry *entry) {
  recovery *all = context;
  switch (entry->kind) {
    case QKV_JOURNAL_MODEL:
    case QKV_JOURNAL_CALIBRATION:
      return take_model(all, entry);
    case QKV_JOURNAL_SESSION_OPEN:
    case QKV_JOURNAL_SESSION_FORK:
      return take_session(all, entry);
    case QKV_JOURNAL_SESSION_NOTE:
      return take_note(all, entry);
    case QKV_JOURNAL_SESSION_TRUNCATE:
      return take_cut(all, entry);
    case QKV_JOURNAL_SESSION_CLOSE:
      break;
  }
  return true;
}

// ---- Records ----

static kept_calibration *find_calibration(const recovery *all, const qkv_model *model, uint32_t version) {
  kept_calibration *kept = all->calibrations;
  while (kept != NULL && (qkv_calibration_version(kept->calibration) != version || kept->model != model))
    kept = kept->next;
  return kept;
}

static qkv_status adopt(const recovery *all, qkv_session *session, const qkv_record_info *info, qkv_error *error) {
  const qkv_record_meta *meta = &info->meta;
  kept_calibration *calibration = find_calibration(all, qkv_session_model(session), meta->calibration);
  if (meta->position != all->expected)
    return qkv_fail(error, QKV_DATA_LOSS, "position %" PRIu64 " is missing", all->expected);
  if (calibration == NULL && meta->calibration != 0)
    return qkv_fail(error, QKV_DATA_LOSS, "position %" PRIu64 " has a calibration that is missing", all->expected);
  if (meta->tokens < 1 || meta->tokens > QKV_PAGE_TOKENS || info->bytes > UINT32_MAX)
    return qkv_fail(error, QKV_DATA_LOSS, "position %" PRIu64 " has an impossible record", all->expected);
  if (calibration != NULL) calibration->used = true;
  return qkv_session_adopt(session, meta->layer, calibration == NULL ? NULL : calibration->calibration, meta->tokens,
                           info->record, (uint32_t)info->bytes, error);
}

// All records of a layer have been reported: inherited pages are held once.
static void share_layer(recovery *all) {
  struct found_session *parent = NULL;
  struct first_record *first = NULL;
  if (all->at == NULL || all->at_first == 0) return;
  qkv_session_adopted(all->at->session, all->at_layer);
  HASH_FIND(hh, all->sessions, &all->at->parent, sizeof all->at->parent, parent);
  if (parent != NULL && !parent->closed) qkv_session_adopt_shared(all->at->session, parent->session, all->at_layer);
  HASH_FIND(hh, all->firsts, &all->at_first, sizeof all->at_first, first);
  if (first != NULL) {
    qkv_session_adopt_shared(all->at->session, first->session, all->at_layer);
    if (first->last != first->session) qkv_session_adopt_shared(all->at->session, first->last, all->at_layer);
    first->last = all->at->session;
    return;
  }
  first = calloc(1, sizeof *first);
  if (first == NULL) abort();
  *first = (struct first_record){.record = all->at_first, .session = all->at->session, .last = all->at->session};
  HASH_ADD(hh, all->firsts, record, sizeof first->record, first);
}

// Token ids, and hashes of them, that came with a record of the last layer count below this position: rows of other
// layers may have been cut since, which are others now.
static uint64_t ids_end(const struct found_session *found, const qkv_record_info *info) {
  const uint32_t layers = qkv_session_model(found->session)->layers;
  uint64_t end = UINT64_MAX;
  if (found->limits != NULL && info->meta.position < found->limits[layers - 1]) end = found->limits[layers];
  for (const struct hash_cut *cut = found->hash_cuts; cut != NULL; cut = cut->next) {
    if (info->record < cut->watermark && cut->position < end) end = cut->position;
  }
  return end;
}

// The token ids of pages are gone, but the prefix is found by their hashes (docs/prefixes.md). One layer's records
// have them.
static void take_hash(const struct found_session *found, const qkv_record_info *info) {
  const qkv_record_meta *meta = &info->meta;
  const uint64_t end = meta->position + meta->tokens;
  qkv_session_tokens *tokens = qkv_session_tokens_of(found->session);
  qkv_prefix_hash hash;
  if ((meta->hash[0] == 0 && meta->hash[1] == 0) || meta->tokens != QKV_PREFIX_PAGE ||
      meta->position != qkv_session_tokens_length(tokens) || end > ids_end(found, info))
    return;
  memcpy(&hash, meta->hash, sizeof hash);
  (void)qkv_session_tokens_recover(tokens, &hash, NULL);  // without memory for it, it is not found
}

// Drops pages beyond a gap, which must not come back behind other rows unless exact rows fill it.
static void note_beyond(struct found_session *found, const qkv_record_meta *meta) {
  const uint64_t end = meta->position + meta->tokens;
  if (found->beyond == NULL) found->beyond = calloc(qkv_session_model(found->session)->layers, sizeof *found->beyond);
  if (found->beyond == NULL) abort();
  if (end > found->beyond[meta->layer]) found->beyond[meta->layer] = end;
}

static void begin_layer(recovery *all, struct found_session *found, const qkv_record_meta *meta) {
  share_layer(all);
  all->at = found;
  all->at_first = 0;
  all->at_session = meta->session;
  all->at_layer = meta->layer;
  all->expected = qkv_session_config_of(found->session)->first_position;
  all->broken = false;
}

// Records of one view that overlap have the same rows, as truncations cut them: one that begins below the present end
// was replaced, and is skipped.
static void take_page(recovery *all, struct found_session *found, const qkv_record_info *info) {
  const qkv_record_meta *meta = &info->meta;
  qkv_error error = {0};
  if (meta->position < all->expected) return;
  const qkv_status status = all->broken ? QKV_DATA_LOSS : adopt(all, found->session, info, &error);
  if (status == QKV_DATA_LOSS) note_beyond(found, meta);
  if (all->broken) return;
  if (status != QKV_OK && status != QKV_DATA_LOSS)
    return refuse(all, "session", qkv_session_name(found->session), &error);
  all->broken = status != QKV_OK;
  if (all->broken) {
    qkv_log(QKV_LOG_WARN, "pages of a session are missing", "{s:s, s:s*, s:I, s:I, s:s}", "session",
            qkv_session_name(found->session), "tenant",
            qkvi_tenant_to_log(qkv_session_config_of(found->session)->tenant), "layer", (json_int_t)meta->layer,
            "length", (json_int_t)all->expected, "reason", error.text);
    return;
  }
  if (all->at_first == 0) all->at_first = info->record;
  take_hash(found, info);
  all->expected += meta->tokens;
  all->pages++;
}

// The process before has folded the session; here its pages count.
static void note_fold(recovery *all, uint64_t record) {
  all->folds = realloc(all->folds, (all->fold_count + 1) * sizeof *all->folds);
  if (all->folds == NULL) abort();
  all->folds[all->fold_count++] = record;
}

static void on_record(void *context, const qkv_record_info *info) {
  recovery *all = context;
  const qkv_record_meta *meta = &info->meta;
  struct found_session *found;
  if (meta->kind == QKVI_RECORD_FOLD) return note_fold(all, info->record);
  if (meta->kind == QKVI_RECORD_OBJECT) return qkvi_objects_found_record(all->residency->objects, info);
  HASH_FIND(hh, all->sessions, &meta->session, sizeof meta->session, found);
  if (found == NULL || found->closed || meta->layer >= qkv_session_model(found->session)->layers) return;
  if (meta->session != all->at_session || meta->layer != all->at_layer) begin_layer(all, found, meta);
  if (meta->kind == QKVI_RECORD_PAGE) take_page(all, found, info);
  if (meta->kind == QKVI_RECORD_ROWS) qkvi_found_rows_add(all->rows, info, ids_end(found, info));
}

static void on_reach(void *context, uint64_t session, const uint64_t *reach, uint32_t layers) {
  recovery *all = context;
  struct found_session *found;
  HASH_FIND(hh, all->sessions, &session, sizeof session, found);
  if (found == NULL || found->closed) return;
  const uint32_t own = qkv_session_model(found->session)->layers;
  found->reach = calloc(own, sizeof *found->reach);
  if (found->reach == NULL) abort();
  memcpy(found->reach, reach, (layers < own ? layers : own) * sizeof *reach);
}

// ---- What stays in the journal ----

// A calibration that a page is coded with, or that pages to come will be: the last one of its model.
static bool keep_calibration(const recovery *all, size_t place) {
  const kept_calibration *kept = all->calibrations;
  while (kept != NULL && kept->place != place) kept = kept->next;
  assert(kept != NULL);
  const kept_calibration *last = all->calibrations;
  while (last != NULL && (last->foreign || last->model != kept->model)) last = last->next;
  if (!kept->used && kept != last) return false;
  qkvi_catalogue_note_journaled(
      all->residency,
      &(qkvi_journaled){
          .model = kept->model, .version = qkv_calibration_version(kept->calibration), .kept = kept->foreign});
  return true;
}

// Once all records have been reported, and before anything is dropped.
static void check_objects(recovery *all) {
  qkv_error error = {0};
  if (all->counted) return;
  all->counted = true;
  if (qkvi_objects_check_found(all->residency->objects, &error) != QKV_OK) refuse(all, "an", "object", &error);
}

// Nothing is deleted of a directory that is refused.
static bool on_keep(void *context, const qkv_journal_entry *entry) {
  recovery *all = context;
  check_objects(all);
  return all->refused.status != QKV_OK || entry->kind != QKV_JOURNAL_CALIBRATION ||
         keep_calibration(all, all->sifted++);
}

// ---- All ----

static void drop(recovery *all) {
  qkvi_found_rows_destroy(&all->rows);
  free(all->folds);
  for (kept_calibration *kept = all->calibrations, *next; kept != NULL; kept = next) {
    next = kept->next;
    qkv_calibration_unref(&kept->calibration);
    free(kept);
  }
  struct first_record *first = all->firsts, *next_first;
  HASH_CLEAR(hh, all->firsts);
  for (; first != NULL; first = next_first) {
    next_first = first->hh.next;
    free(first);
  }
  // Clearing frees the table alone; the entries stay linked.
  struct found_session *found = all->sessions, *after;
  HASH_CLEAR(hh, all->sessions);
  for (; found != NULL; found = after) {
    after = found->hh.next;
    qkv_session_unref(&found->session);
    free(found->beyond);
    free(found->limits);
    free(found->reach);
    for (struct hash_cut *cut = found->hash_cuts, *next_cut; cut != NULL; cut = next_cut) {
      next_cut = cut->next;
      free(cut);
    }
    free(found);
  }
}

typedef struct layer_end {
  uint64_t length;
  bool cut;  // there, or beyond it, may be what must not come back
} layer_end;

// One entry of the journal where all layers end alike.
static void cut_ends(qkvi_residency *residency, uint64_t session, const layer_end *ends, uint32_t layers) {
  uint32_t cuts = 0, alike = 0;
  for (uint32_t i = 0; i < layers; i++) {
    cuts += ends[i].cut ? 1 : 0;
    alike += ends[i].cut && ends[i].length == ends[0].length ? 1 : 0;
  }
  if (cuts == layers && alike == layers)
    return qkvi_write_back_cut(residency, session, QKV_LAYER_ALL, ends[0].length);
  for (uint32_t i = 0; i < layers; i++) {
    if (ends[i].cut) qkvi_write_back_cut(residency, session, i, ends[i].length);
  }
}

// Takes the rows behind a layer's pages.
static qkv_status end_layer(const recovery *all, const struct found_session *found, uint32_t layer, bool unread,
                            layer_end *end, bool *readable, qkv_error *error) {
  const qkv_policy *own = &qkv_session_config_of(found->session)->policy;
  const uint64_t window = (uint64_t)qkv_model_policy(qkv_session_model(found->session), layer, own).recent_window;
  uint64_t beyond = found->beyond == NULL ? 0 : found->beyond[layer];
  // Rows that the parent puts there from now on differ from those that were lost.
  if (found->limits != NULL && found->limits[layer] > beyond) beyond = found->limits[layer];
  // Its heirs may have what is lost here, and must not get what is put in its place.
  if (found->reach != NULL && found->reach[layer] > beyond) beyond = found->reach[layer];
  QKV_TRY(qkvi_found_rows_take(all->rows, all->residency->storage, found->session, found->number, layer,
                               unread ? window + QKV_PAGE_TOKENS - 1 : UINT64_MAX, &end->length, &beyond, readable,
                               error));
  end->cut = beyond > end->length && *readable && !unread;
  return QKV_OK;
}

// Appends rows behind the pages, then truncates what lies beyond them. Where segments were not read (`unread`), or
// rows could not be read, nothing is truncated yet: the next start may find it. Then nothing may be put for the
// session either, so no more rows are taken than fit without sealing a page.
static qkv_status end_session(const recovery *all, const struct found_session *found, bool unread, qkv_error *error) {
  const uint32_t layers = qkv_session_model(found->session)->layers;
  layer_end *ends = calloc(layers, sizeof *ends);
  if (ends == NULL) abort();
  qkv_status status = QKV_OK;
  bool whole = !unread;
  for (uint32_t i = 0; i < layers && status == QKV_OK; i++) {
    bool readable = false;
    status = end_layer(all, found, i, unread, &ends[i], &readable, error);
    whole &= readable;
  }
  if (status == QKV_OK) cut_ends(all->residency, found->number, ends, layers);
  if (status == QKV_OK && !whole) qkvi_catalogue_note_unconfirmed(all->residency, found->number);
  free(ends);
  return status;
}

// A session that was to be restored whole, and of which a crash has left less, is dropped. While segments are not
// read the rest may come back with the next start.
static void drop_incomplete(const recovery *all, struct found_session *found, bool unread) {
  qkv_session_info info;
  uint64_t freed;
  qkv_session_read_info(found->session, &info, NULL);
  if (qkv_session_length(found->session) >= info.config.whole) return;
  (void)qkv_store_close_session(all->residency->store, found->session, &freed, NULL);
  found->closed = true;
  if (!unread) qkvi_catalogue_drop(all->residency, found->session);
  qkv_metric_add(&all->residency->metrics[QKV_METRIC_SESSIONS_INCOMPLETE], 1);
}

static void end_sessions(recovery *all) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(all->residency->storage, &stats);
  for (struct found_session *at = all->sessions; at != NULL; at = at->hh.next) {
    qkv_error error = {0};
    if (!at->closed && end_session(all, at, stats.unread_segments > 0, &error) != QKV_OK)
      refuse(all, "exact rows of session", qkv_session_name(at->session), &error);
    if (!at->closed) drop_incomplete(all, at, stats.unread_segments > 0);
  }
  if (stats.unread_segments == 0 && all->refused.status == QKV_OK)
    qkvi_found_rows_drop(all->rows, all->residency->storage);
}

// Now that they have pages.
static void keep_pinned(const recovery *all) {
  for (struct found_session *at = all->sessions; at != NULL; at = at->hh.next) {
    qkv_session_info info;
    qkv_session_read_info(at->session, &info, NULL);
    if (!at->closed && info.config.pinned) qkv_session_set_pinned(at->session, true);
  }
}

static void report(const recovery *all) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(all->residency->storage, &stats);
  qkv_log(QKV_LOG_INFO, "data directory opened", "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:f}", "directory",
          all->options->data_dir, "io", stats.io, "sessions", (json_int_t)HASH_COUNT(all->sessions), "pages",
          (json_int_t)all->pages, "unread_segments", (json_int_t)stats.unread_segments, "bad_records",
          (json_int_t)stats.bad_records, "sessions_given_up", (json_int_t)stats.sessions_given_up, "seconds",
          stats.recovery_s);
}

static void take_budget(qkvi_residency *residency, uint64_t segment_bytes) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(residency->storage, &stats);
  // The last segment is reserved for compaction.
  residency->expel_above = stats.budget_bytes > 0 ? stats.budget_bytes - 2 * segment_bytes : UINT64_MAX;
  qkv_metric_set(&residency->metrics[QKV_METRIC_STORAGE_BUDGET_BYTES], (int64_t)stats.budget_bytes);
}

qkv_status qkvi_residency_recover(qkvi_residency *residency, const qkv_server_options *options, uint64_t dirty_bytes,
                                  qkv_error *error) {
  recovery all = {
      .residency = residency, .options = options, .at_session = UINT64_MAX, .rows = qkvi_found_rows_create()};
  const qkv_storage_restore restore = {
      .context = &all, .entry = on_entry, .record = on_record, .keep = on_keep, .reach = on_reach};
  qkv_storage_config config;
  qkv_storage_config_init(&config);
  config.directory = options->data_dir;
  config.io = options->storage_io;
  config.bytes_max = (uint64_t)options->storage_budget;
  config.segment_bytes = (uint64_t)options->storage_segment;
  config.dirty_bytes_max = dirty_bytes;
  config.compact_bytes_per_s = (uint64_t)options->storage_compact_rate;
  qkv_status status = qkv_storage_open(&config, &restore, &residency->storage, error);
  if (status == QKV_OK) {
    take_budget(residency, config.segment_bytes);
    check_objects(&all);
  }
  if (status == QKV_OK && all.refused.status == QKV_OK) {
    for (const struct found_session *at = all.sessions; at != NULL; at = at->hh.next) {
      if (at->closed) qkvi_closes_add(residency, at->number, NULL, NULL);
    }
    share_layer(&all);
    keep_pinned(&all);
    end_sessions(&all);
    for (size_t i = 0; i < all.fold_count; i++) qkv_storage_drop(residency->storage, all.folds[i]);
    qkv_storage_stats stats;
    qkv_storage_read_stats(residency->storage, &stats);
    qkvi_objects_found_all(residency->objects, residency, stats.unread_segments > 0);
  }
  if (status == QKV_OK && all.refused.status != QKV_OK)
    status = qkv_fail(error, all.refused.status, "%s", all.refused.text);
  if (status == QKV_OK) {
    report(&all);
  } else {
    status = qkv_error_prefix(error, "--data-dir %s: ", options->data_dir);
  }
  drop(&all);
  return status;
}
