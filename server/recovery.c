// What the data directory has, brought into the store: models, calibrations, sessions with all their pages cold.
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "server/contract.h"
#include "server/spill_internal.h"

typedef struct kept_calibration {
  char model[QKV_NAME_MAX + 1];
  const qkv_calibration *calibration;
  size_t place;  // among those of the journal
  bool used;     // by a page
  struct kept_calibration *next;
} kept_calibration;

// Records come by session, layer and position.
typedef struct recovery {
  qkvi_spill *spill;
  const qkv_server_options *options;
  kept_calibration *calibrations;    // the last one first
  size_t calibration_count, sifted;  // of these, and those that keep() was asked of
  struct found_session {
    uint64_t number;
    qkv_session *session;
    bool closed;  // another one of its name came later
    UT_hash_handle hh;
  } * sessions;
  uint64_t pages;
  // The layer that records come for.
  uint64_t at_session;
  uint32_t at_layer;
  uint64_t expected;  // position
  bool broken;        // pages beyond a gap are of no use
  struct broken_layer *cuts;
  size_t cut_count;
  qkv_error refused;  // why the directory as a whole is
} recovery;

// Where a layer ends now, though it has pages beyond: these must not come back behind other rows.
typedef struct broken_layer {
  uint64_t session;
  uint32_t layer;
  uint64_t position;
} broken_layer;

// ---- Entries ----

// Nothing of the directory is given up because of this daemon's options: it does not start.
static void refuse(recovery *all, const char *what, const char *name, const qkv_error *error) {
  if (all->refused.status == QKV_OK)
    (void)qkv_fail(&all->refused, QKV_FAILED_PRECONDITION, "%s %s: %s", what, name, error->text);
}

static bool restore_model(recovery *all, const Qkv__V1__Model *message, qkv_error *error) {
  qkv_model model;
  qkv_status status = qkvi_model_read(message, &model, error);
  if (status == QKV_OK) status = qkv_store_register_model(all->spill->store, &model, NULL, error);
  qkvi_model_clear(&model);
  if (status == QKV_OK) qkvi_spill_note_known(all->spill, message->name, 0);
  return status == QKV_OK;
}

// The last one is that of pages to come.
static bool restore_calibration(recovery *all, const Qkv__V1__Model *message, qkv_error *error) {
  qkv_calibration *calibration = NULL;
  qkv_status status = qkv_calibration_read(message->calibration.data, message->calibration.len, &calibration, error);
  if (status == QKV_OK)
    status = qkv_store_calibrate(all->spill->store, message->name, calibration, QKV_CALIBRATION_STORED, false, error);
  if (status != QKV_OK) {
    const qkv_calibration *left = calibration;
    qkv_calibration_unref(&left);
    return false;
  }
  kept_calibration *kept = calloc(1, sizeof *kept);
  if (kept == NULL) abort();
  (void)snprintf(kept->model, sizeof kept->model, "%s", message->name);
  kept->calibration = calibration;
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
  *config = (qkv_session_config){.purpose = (qkv_purpose)message->purpose,
                                 .first_position = message->first_position,
                                 .ema = {.alpha = options->ema_alpha, .sample_every = (uint32_t)options->ema_every},
                                 .keep_full = message->keep_full != 0,
                                 .max_attention_error = message->max_attention_error,
                                 .tier_bits = message->tier_bits,
                                 .durability = (qkv_durability)message->durability,
                                 .backing = qkvi_spill_backing(all->spill, (qkv_durability)message->durability),
                                 .id = number,
                                 .ttl_ms = message->ttl_ms,
                                 .pinned = message->pinned != 0};
  (void)snprintf(config->name, sizeof config->name, "%s", message->session);
  (void)snprintf(config->tenant, sizeof config->tenant, "%s", message->tenant);
  QKV_TRY(qkvi_policy_read(message->policy, &config->policy, error));
  qkv_server_options_keep_out(options, config->tenant, &config->policy);
  return QKV_OK;
}

// A session of this name that was opened before was closed, though the journal does not say so.
static void give_way(recovery *all, const char *name) {
  for (struct found_session *found = all->sessions; found != NULL; found = found->hh.next) {
    uint64_t freed;
    if (found->closed || strcmp(qkv_session_name(found->session), name) != 0) continue;
    (void)qkv_store_close_session(all->spill->store, found->session, &freed, NULL);
    found->closed = true;
  }
}

static bool take_session(recovery *all, const qkv_journal_entry *entry) {
  qkv_error error = {0};
  qkv_session_config config;
  qkv_session *session = NULL;
  Qkv__V1__SessionInfo *message = qkv__v1__session_info__unpack(NULL, entry->bytes, entry->payload);
  if (message == NULL) return false;
  qkv_status status = session_config(all, message, entry->session, &config, &error);
  if (status == QKV_OK) give_way(all, message->session);
  if (status == QKV_OK) status = qkv_store_open(all->spill->store, &config, message->model, &session, &error);
  if (status != QKV_OK) refuse(all, "session", message->session, &error);
  qkv__v1__session_info__free_unpacked(message, NULL);
  if (status != QKV_OK) return true;
  struct found_session *found = calloc(1, sizeof *found);
  if (found == NULL) abort();
  found->number = entry->session;
  found->session = session;
  HASH_ADD(hh, all->sessions, number, sizeof found->number, found);
  return true;
}

static bool take_note(recovery *all, const qkv_journal_entry *entry) {
  struct found_session *found;
  Qkv__V1__SessionInfo *message = qkv__v1__session_info__unpack(NULL, entry->bytes, entry->payload);
  HASH_FIND(hh, all->sessions, &entry->session, sizeof entry->session, found);
  if (message != NULL && found != NULL && !found->closed) {
    qkv_session_set_ttl(found->session, message->ttl_ms);
    qkv_session_set_pinned(found->session, message->pinned != 0);
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
      return take_session(all, entry);
    case QKV_JOURNAL_SESSION_NOTE:
      return take_note(all, entry);
    case QKV_JOURNAL_SESSION_CLOSE:
    case QKV_JOURNAL_SESSION_TRUNCATE:
      break;
  }
  return true;
}

// ---- Records ----

static kept_calibration *find_calibration(const recovery *all, const char *model, uint32_t version) {
  kept_calibration *kept = all->calibrations;
  while (kept != NULL && (qkv_calibration_version(kept->calibration) != version || strcmp(kept->model, model) != 0))
    kept = kept->next;
  return kept;
}

static qkv_status adopt(const recovery *all, qkv_session *session, const qkv_record_info *info, qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  const qkv_record_meta *meta = &info->meta;
  kept_calibration *calibration = find_calibration(all, model->name, meta->calibration);
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

static void note_cut(recovery *all) {
  all->cuts = realloc(all->cuts, (all->cut_count + 1) * sizeof *all->cuts);
  if (all->cuts == NULL) abort();
  all->cuts[all->cut_count++] =
      (broken_layer){.session = all->at_session, .layer = all->at_layer, .position = all->expected};
}

static void on_record(void *context, const qkv_record_info *info) {
  recovery *all = context;
  const qkv_record_meta *meta = &info->meta;
  struct found_session *found;
  HASH_FIND(hh, all->sessions, &meta->session, sizeof meta->session, found);
  if (found == NULL || found->closed || meta->layer >= qkv_session_model(found->session)->layers) return;
  if (meta->session != all->at_session || meta->layer != all->at_layer) {
    all->at_session = meta->session;
    all->at_layer = meta->layer;
    all->expected = qkv_session_config_of(found->session)->first_position;
    all->broken = false;
  }
  qkv_error error = {0};
  if (all->broken) return;
  const qkv_status status = adopt(all, found->session, info, &error);
  if (status != QKV_OK && status != QKV_DATA_LOSS)
    return refuse(all, "session", qkv_session_name(found->session), &error);
  all->broken = status != QKV_OK;
  if (all->broken) {
    note_cut(all);
    qkv_log(QKV_LOG_WARN, "a session ends earlier than it did", "{s:s, s:I, s:I, s:s}", "session",
            qkv_session_name(found->session), "layer", (json_int_t)meta->layer, "length", (json_int_t)all->expected,
            "reason", error.text);
    return;
  }
  all->expected += meta->tokens;
  all->pages++;
}

// ---- What stays in the journal ----

// A calibration that a page is coded with, or that pages to come will be: the last one of its model.
static bool keep_calibration(const recovery *all, size_t place) {
  const kept_calibration *kept = all->calibrations;
  while (kept != NULL && kept->place != place) kept = kept->next;
  assert(kept != NULL);
  const kept_calibration *last = all->calibrations;
  while (strcmp(last->model, kept->model) != 0) last = last->next;
  if (!kept->used && kept != last) return false;
  qkvi_spill_note_known(all->spill, kept->model, qkv_calibration_version(kept->calibration));
  return true;
}

// Of a directory that is refused nothing goes.
static bool on_keep(void *context, const qkv_journal_entry *entry) {
  recovery *all = context;
  return all->refused.status != QKV_OK || entry->kind != QKV_JOURNAL_CALIBRATION ||
         keep_calibration(all, all->sifted++);
}

// ---- All ----

static void drop(recovery *all) {
  free(all->cuts);
  for (kept_calibration *kept = all->calibrations, *next; kept != NULL; kept = next) {
    next = kept->next;
    qkv_calibration_unref(&kept->calibration);
    free(kept);
  }
  // Clearing frees the table alone; the entries stay linked.
  struct found_session *found = all->sessions, *after;
  HASH_CLEAR(hh, all->sessions);
  for (; found != NULL; found = after) {
    after = found->hh.next;
    qkv_session_unref(&found->session);
    free(found);
  }
}

// Where everything was read they end for ever where they do now. Where not, nothing is cut of them yet: what is
// missing may be there for the next start.
static void end_sessions(const recovery *all) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(all->spill->storage, &stats);
  for (size_t i = 0; i < all->cut_count && stats.unread_segments == 0; i++)
    qkvi_spill_cut(all->spill, all->cuts[i].session, all->cuts[i].layer, all->cuts[i].position);
  for (struct found_session *at = all->sessions; at != NULL && stats.unread_segments > 0; at = at->hh.next)
    if (!at->closed) qkvi_spill_note_loose(all->spill, at->number);
}

static void report(const recovery *all) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(all->spill->storage, &stats);
  qkv_log(QKV_LOG_INFO, "data directory opened", "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:f}", "directory",
          all->options->data_dir, "io", stats.io, "sessions", (json_int_t)HASH_COUNT(all->sessions), "pages",
          (json_int_t)all->pages, "unread_segments", (json_int_t)stats.unread_segments, "bad_records",
          (json_int_t)stats.bad_records, "sessions_given_up", (json_int_t)stats.sessions_given_up, "seconds",
          stats.recovery_s);
}

qkv_status qkvi_spill_recover(qkvi_spill *spill, const qkv_server_options *options, uint64_t dirty_bytes,
                              qkv_error *error) {
  recovery all = {.spill = spill, .options = options, .at_session = UINT64_MAX};
  const qkv_storage_restore restore = {.context = &all, .entry = on_entry, .record = on_record, .keep = on_keep};
  qkv_storage_config config;
  qkv_storage_config_init(&config);
  config.directory = options->data_dir;
  config.io = options->storage_io;
  config.bytes_max = (uint64_t)options->storage_budget;
  config.segment_bytes = (uint64_t)options->storage_segment;
  config.dirty_bytes_max = dirty_bytes;
  config.compact_bytes_per_s = (uint64_t)options->storage_compact_rate;
  qkv_status status = qkv_storage_open(&config, &restore, &spill->storage, error);
  if (status == QKV_OK && all.refused.status != QKV_OK) {
    status = qkv_fail(error, all.refused.status, "%s", all.refused.text);
  }
  if (status == QKV_OK) {
    for (const struct found_session *at = all.sessions; at != NULL; at = at->hh.next) {
      if (at->closed) qkv_storage_session_close(spill->storage, at->number, NULL, NULL);
    }
    end_sessions(&all);
    report(&all);
  } else {
    status = qkv_error_prefix(error, "--data-dir %s: ", options->data_dir);
  }
  drop(&all);
  return status;
}
