// The journal entries of models, calibrations and sessions, by which the next process finds them.
#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/cache/session_spill.h"
#include "proto/wire.h"
#include "server/auth/identity.h"
#include "server/handlers/contract.h"
#include "server/residency/internal.h"

// ---- The journal ----

void qkvi_catalogue_on_journal(void *context, qkv_status status) {
  qkvi_journal_wait *wait = context;
  qkvi_residency *residency = wait->residency;
  qkvi_residency_lock(residency);
  wait->status = status;
  wait->done = true;
  residency->steps++;
  (void)pthread_cond_broadcast(&residency->moved);
  qkvi_residency_unlock(residency);
}

qkv_status qkvi_catalogue_finish_wait(qkvi_journal_wait *wait, qkv_error *error) {
  qkvi_residency_lock(wait->residency);
  while (!wait->done) (void)pthread_cond_wait(&wait->residency->moved, &wait->residency->lock);
  qkvi_residency_unlock(wait->residency);
  if (wait->status == QKV_OK) return QKV_OK;
  return qkv_fail(error, wait->status, "the journal in data-dir was not written, the disk %s",
                  wait->status == QKV_RESOURCE_EXHAUSTED ? "is full" : "failed");
}

// Writes an entry and waits until it is durable.
static qkv_status journal_entry(qkvi_residency *residency, qkv_journal_kind kind, uint64_t session,
                                const void *payload, uint64_t bytes, qkv_error *error) {
  qkvi_journal_wait wait = {.residency = residency};
  QKV_TRY(qkv_storage_journal(residency->storage, kind, session, payload, bytes, qkvi_catalogue_on_journal, &wait,
                              error));
  return qkvi_catalogue_finish_wait(&wait, error);
}

// ---- Models and calibrations in the journal ----

static qkvi_journaled *find_journaled(qkvi_residency *residency, const qkv_model *model, uint32_t version) {
  for (qkvi_journaled *known = residency->journaled; known != NULL; known = known->next) {
    if (known->version == version && known->model == model) return known;
  }
  return NULL;
}

void qkvi_catalogue_note_journaled(qkvi_residency *residency, const qkvi_journaled *what) {
  qkvi_journaled *known = find_journaled(residency, what->model, what->version);
  if (known != NULL) {
    known->shared = what->shared;
    known->kept &= what->kept;
    return;
  }
  known = calloc(1, sizeof *known);
  if (known == NULL) abort();
  *known = *what;
  known->next = residency->journaled;
  residency->journaled = known;
}

// Whether pages of this calibration may be put: it is journaled. If not, the thread is asked to journal it.
bool qkvi_catalogue_calibration_ready(qkvi_residency *residency, const qkv_model *model, uint32_t version) {
  if (version == 0) return true;
  qkvi_residency_lock(residency);
  const qkvi_journaled *known = find_journaled(residency, model, version);
  const bool ready = known != NULL && !known->unfit;
  residency->wanted |= known == NULL;
  qkvi_residency_unlock(residency);
  return ready;
}

// A Model message with tenant, name and this calibration, whose bytes are written to the disk in place.
static qkv_status write_calibration(qkvi_residency *residency, const qkv_model *model,
                                    const qkv_calibration *calibration, bool kept, qkv_error *error) {
  enum { NAME = 1, CALIBRATION = 14, CALIBRATION_KEPT = 16, TENANT = 17 };  // fields of Model
  size_t size, pieces;
  const void *bytes = qkv_calibration_bytes(calibration, &size);
  qkvi_journal_wait wait = {.residency = residency};
  qkv_wire_writer *writer = qkv_wire_writer_create();
  qkv_wire_put_string(writer, NAME, model->name);
  qkv_wire_put_string(writer, TENANT, model->tenant);
  qkv_wire_put_varint(writer, CALIBRATION_KEPT, kept);
  qkv_wire_put_reference(writer, CALIBRATION, bytes, size, NULL);
  const qkv_wire_piece *piece = qkv_wire_writer_pieces(writer, &pieces);
  assert(pieces == 2 && piece[1].reference);
  const qkv_journal_entry entry = {.kind = QKV_JOURNAL_CALIBRATION,
                                   .payload = piece[0].data,
                                   .bytes = piece[0].length,
                                   .rest = bytes,
                                   .rest_bytes = size};
  qkv_status status = QKV_INVALID_ARGUMENT;
  if (entry.bytes + entry.rest_bytes <= residency->entry_max)
    status = qkv_storage_journal_long(residency->storage, &entry, qkvi_catalogue_on_journal, &wait, error);
  if (status == QKV_OK) status = qkvi_catalogue_finish_wait(&wait, error);
  qkv_wire_writer_destroy(&writer);
  return status;
}

// With the names of the longest entry.
qkv_status qkvi_catalogue_check_calibration(const qkvi_residency *residency, const qkv_calibration *calibration,
                                            qkv_error *error) {
  enum { NAMES = 2 * QKV_NAME_MAX + 64 };
  size_t size;
  if (residency == NULL) return QKV_OK;
  const uint64_t most = residency->entry_max > NAMES ? residency->entry_max - NAMES : 0;
  (void)qkv_calibration_bytes(calibration, &size);
  if (size <= most) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "model.calibration has %zu bytes, at most %" PRIu64 " fit into the journal of --data-dir", size,
                  most);
}

static void note_unfit(qkvi_residency *residency, const qkv_model *model, const qkv_calibration *calibration) {
  size_t size;
  (void)qkv_calibration_bytes(calibration, &size);
  qkv_log(QKV_LOG_ERROR, "a calibration is too large for the journal, pages that it codes stay in memory alone",
          "{s:s, s:s*, s:I, s:I, s:I}", "model", model->name, "tenant", qkvi_tenant_to_log(model->tenant), "version",
          (json_int_t)qkv_calibration_version(calibration), "bytes", (json_int_t)size, "at_most",
          (json_int_t)residency->entry_max);
  qkvi_residency_lock(residency);
  qkvi_catalogue_note_journaled(
      residency, &(qkvi_journaled){.model = model, .version = qkv_calibration_version(calibration), .unfit = true});
  qkvi_residency_unlock(residency);
}

static void journal_calibration(qkvi_residency *residency, const qkv_model *model,
                                const qkv_calibration *calibration) {
  const uint32_t version = qkv_calibration_version(calibration);
  const bool kept = qkv_calibration_slot_version(model->calibration) != version;
  qkvi_residency_lock(residency);
  const qkvi_journaled *known = find_journaled(residency, model, version);
  const bool wanted = find_journaled(residency, model, 0) != NULL && (known == NULL || (known->kept && !kept));
  qkvi_residency_unlock(residency);
  if (!wanted) return;
  qkv_error error = {0};
  const qkv_status status = write_calibration(residency, model, calibration, kept, &error);
  if (status == QKV_INVALID_ARGUMENT) return note_unfit(residency, model, calibration);
  qkvi_residency_lock(residency);
  if (status == QKV_OK) {
    qkvi_catalogue_note_journaled(residency, &(qkvi_journaled){.model = model, .version = version, .kept = kept});
  } else {
    qkvi_write_back_note_failure(residency, status);
  }
  qkvi_residency_unlock(residency);
}

static void journal_calibrations(qkvi_residency *residency, qkv_session *session) {
  enum { AT_ONCE = 16 };
  const qkv_calibration *calibrations[AT_ONCE];
  for (size_t first = 0, count = AT_ONCE; count == AT_ONCE; first += count) {
    count = qkv_session_calibrations(session, first, calibrations, AT_ONCE);
    for (size_t i = 0; i < count; i++) {
      journal_calibration(residency, qkv_session_model(session), calibrations[i]);
      qkv_calibration_unref(&calibrations[i]);
    }
  }
}

// The calibrations that sessions on the SSD are coded with and that are not journaled.
void qkvi_catalogue_journal_calibrations(qkvi_residency *residency) {
  size_t count;
  qkv_session **sessions = qkvi_residency_sessions(residency, &count);
  for (size_t i = 0; i < count; i++) journal_calibrations(residency, sessions[i]);
  qkvi_residency_drop_sessions(sessions, count);
}

// ---- Models and sessions ----

// The model as it was requested: for its defaults the next daemon applies its own. With models_lock.
static qkv_status journal_model(qkvi_residency *residency, const qkv_model *model, bool shared, qkv_error *error) {
  qkv_model asked = *model;
  asked.policy = model->asked;
  qkvi_model_message message;
  qkvi_model_write(&asked, &message);
  message.model.tenant = (char *)model->tenant;
  message.model.shared = shared;
  const size_t bytes = qkv__v1__model__get_packed_size(&message.model);
  uint8_t *payload = malloc(bytes + 1);
  if (payload == NULL) abort();
  (void)qkv__v1__model__pack(&message.model, payload);
  const qkv_status status = journal_entry(residency, QKV_JOURNAL_MODEL, 0, payload, bytes, error);
  free(payload);
  qkvi_model_message_clear(&message);
  if (status != QKV_OK) return status;
  qkvi_residency_lock(residency);
  qkvi_catalogue_note_journaled(residency, &(qkvi_journaled){.model = model, .shared = shared});
  qkvi_residency_unlock(residency);
  return QKV_OK;
}

// Whether the model is journaled, and as one that is shared.
static bool is_journaled(qkvi_residency *residency, const qkv_model *model, bool *shared) {
  qkvi_residency_lock(residency);
  const qkvi_journaled *known = find_journaled(residency, model, 0);
  *shared = known != NULL && known->shared;
  qkvi_residency_unlock(residency);
  return known != NULL;
}

// One at a time, so that a model is written once.
static qkv_status journal_model_once(qkvi_residency *residency, const qkv_model *model, qkv_error *error) {
  qkv_status status = QKV_OK;
  bool shared;
  (void)pthread_mutex_lock(&residency->models_lock);
  if (!is_journaled(residency, model, &shared))
    status = journal_model(residency, model, qkv_store_is_shared(residency->store, model), error);
  (void)pthread_mutex_unlock(&residency->models_lock);
  return status;
}

// A model that is not journaled yet is journaled as shared with the first session on the SSD.
qkv_status qkvi_catalogue_share_model(qkvi_residency *residency, qkv_store *store, const qkv_model *model,
                                      qkv_error *error) {
  qkv_status status = QKV_OK;
  bool shared;
  if (residency != NULL) (void)pthread_mutex_lock(&residency->models_lock);
  if (residency != NULL && is_journaled(residency, model, &shared) && !shared)
    status = journal_model(residency, model, true, error);
  if (status == QKV_OK) qkv_store_share_model(store, model);
  if (residency != NULL) (void)pthread_mutex_unlock(&residency->models_lock);
  return status;
}

qkv_status qkvi_catalogue_unshare_model(qkvi_residency *residency, qkv_store *store, const qkv_model *model,
                                        qkv_error *error) {
  bool shared;
  if (residency != NULL) (void)pthread_mutex_lock(&residency->models_lock);
  qkv_status status = qkv_store_unshare_model(store, model, error);
  if (status == QKV_OK && residency != NULL && is_journaled(residency, model, &shared) && shared) {
    status = journal_model(residency, model, false, error);
    if (status != QKV_OK) qkv_store_share_model(store, model);
  }
  if (residency != NULL) (void)pthread_mutex_unlock(&residency->models_lock);
  return status;
}

static uint8_t *pack_info(const qkv_session_info *info, size_t *bytes) {
  qkvi_session_message message;
  qkvi_session_write(info, NULL, &message);
  *bytes = qkv__v1__session_info__get_packed_size(&message.info);
  uint8_t *payload = malloc(*bytes + 1);
  if (payload == NULL) abort();
  (void)qkv__v1__session_info__pack(&message.info, payload);
  return payload;
}

static qkv_status journal_info(qkvi_residency *residency, qkv_journal_kind kind, const qkv_session_info *info,
                               qkv_error *error) {
  size_t bytes;
  uint8_t *payload = pack_info(info, &bytes);
  const qkv_status status = journal_entry(residency, kind, info->config.id, payload, bytes, error);
  free(payload);
  return status;
}

// ---- Forks ----

// How far the hashes of token ids go, as position of an extra layer, model->layers.
static uint64_t *all_limits(const qkvi_catalogue_fork *fork, uint32_t layers) {
  uint64_t *limits = calloc((size_t)layers + 1, sizeof *limits);
  if (limits == NULL) abort();
  memcpy(limits, fork->positions, layers * sizeof *limits);
  limits[layers] = fork->ids;
  return limits;
}

qkv_status qkvi_catalogue_fork_begin(qkvi_residency *residency, qkv_session *parent, const qkv_session_config *config,
                                     const uint64_t *positions, qkvi_catalogue_fork *fork, qkv_error *error) {
  const qkv_model *model = qkv_session_model(parent);
  const uint64_t number = qkv_session_id(parent);
  *fork = (qkvi_catalogue_fork){.residency = residency, .child = config->id, .positions = positions};
  fork->ids = qkv_session_tokens_length(qkv_session_tokens_of(parent));
  if (config->backing == NULL) return QKV_OK;
  if (qkvi_write_back_lost_truncation(residency, number))
    return qkv_fail(error, QKV_UNAVAILABLE, "session %s: the disk did not take a truncation, close the session",
                    qkv_session_name(parent));
  fork->wait = calloc(1, sizeof *fork->wait);
  if (fork->wait == NULL) abort();
  fork->wait->residency = residency;
  const qkv_session_info info = {.config = *config, .model = model};
  size_t bytes;
  uint8_t *payload = pack_info(&info, &bytes);
  uint64_t *limits = all_limits(fork, model->layers);
  const qkv_status status =
      qkv_storage_session_fork(residency->storage, config->id, number, limits, model->layers + 1, payload, bytes,
                               qkvi_catalogue_on_journal, fork->wait, error);
  free(limits);
  free(payload);
  if (status != QKV_OK) {
    free(fork->wait);
    fork->wait = NULL;
  }
  return status;
}

// A truncation of the parent between the two makes it shorter than journaled.
static void cut_fork(const qkvi_catalogue_fork *fork, qkv_session *child) {
  const uint32_t layers = qkv_session_model(child)->layers;
  qkv_session_info info;
  uint64_t *lengths = calloc(layers, sizeof *lengths);
  if (lengths == NULL) abort();
  qkv_session_read_info(child, &info, lengths);
  for (uint32_t i = 0; i < layers; i++) {
    if (lengths[i] < fork->positions[i]) qkvi_write_back_cut(fork->residency, fork->child, i, lengths[i]);
  }
  free(lengths);
  const uint64_t ids = qkv_session_tokens_length(qkv_session_tokens_of(child));
  if (ids < fork->ids) qkvi_write_back_cut(fork->residency, fork->child, layers, ids);
}

qkv_status qkvi_catalogue_fork_done(qkvi_catalogue_fork *fork, qkv_session *child, qkv_error *error) {
  if (fork->wait == NULL) return QKV_OK;
  if (child != NULL) cut_fork(fork, child);
  const qkv_status status = qkvi_catalogue_finish_wait(fork->wait, error);
  free(fork->wait);
  fork->wait = NULL;
  if (status == QKV_OK && child != NULL) return QKV_OK;
  qkvi_journal_wait wait = {.residency = fork->residency};
  qkvi_closes_add(fork->residency, fork->child, qkvi_catalogue_on_journal, &wait);
  const qkv_status closed = qkvi_catalogue_finish_wait(&wait, status == QKV_OK ? error : NULL);
  return status == QKV_OK ? closed : status;
}

bool qkvi_catalogue_is_open(qkvi_residency *residency, const qkv_session *session) {
  qkv_session *named = NULL;
  const char *tenant = qkv_session_config_of(session)->tenant;
  if (qkv_store_session(residency->store, tenant, qkv_session_name(session), &named, NULL) != QKV_OK) return false;
  const bool same = named == session;
  qkv_session_unref(&named);
  return same;
}

qkv_status qkvi_catalogue_opened(qkvi_residency *residency, qkv_session *session, qkv_error *error) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  if (info.config.backing == NULL) return QKV_OK;
  QKV_TRY(journal_model_once(residency, info.model, error));
  const qkv_status status = journal_info(residency, QKV_JOURNAL_SESSION_OPEN, &info, error);
  // The entry may be on the disk nevertheless.
  if (status != QKV_OK) qkvi_closes_add(residency, info.config.id, NULL, NULL);
  if (status != QKV_OK || qkvi_catalogue_is_open(residency, session)) return status;
  // A call that closed it meanwhile journaled that before it was open.
  QKV_TRY(qkvi_catalogue_closed(residency, session, error));
  return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", info.config.name);
}

// The last journal entry matches memory, as it is written before memory changes, by one thread at a time.
static qkv_status journal_note(qkvi_residency *residency, qkv_session *session, const qkvi_note *note,
                               qkv_error *error) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  if (note->pinned != NULL) info.config.pinned = *note->pinned;
  if (note->ttl_ms != NULL) info.config.ttl_ms = *note->ttl_ms;
  return journal_info(residency, QKV_JOURNAL_SESSION_NOTE, &info, error);
}

qkv_status qkvi_catalogue_note(qkvi_residency *residency, qkv_session *session, const qkvi_note *note,
                               qkv_error *error) {
  const bool backed = residency != NULL && qkv_session_config_of(session)->backing != NULL;
  pthread_mutex_t *lock = backed ? &residency->notes_locks[qkv_session_id(session) % QKVI_NOTES_LOCKS] : NULL;
  if (backed) (void)pthread_mutex_lock(lock);
  const qkv_status status = backed ? journal_note(residency, session, note, error) : QKV_OK;
  if (status == QKV_OK && note->pinned != NULL) qkv_session_set_pinned(session, *note->pinned);
  if (status == QKV_OK && note->ttl_ms != NULL) qkv_session_set_ttl(session, *note->ttl_ms);
  if (backed) (void)pthread_mutex_unlock(lock);
  return status;
}

qkv_status qkvi_catalogue_enlist(qkvi_residency *residency, qkv_session_config *config, qkv_error *error) {
  if (config->durability <= QKV_DURABILITY_MEMORY) return QKV_OK;
  if (residency == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "durability is %s, the daemon has no data-dir",
                    config->durability == QKV_DURABILITY_SYNC ? "SYNC" : "ASYNC");
  config->backing = &residency->backings[config->durability == QKV_DURABILITY_SYNC].table;
  config->id = qkv_storage_session_number(residency->storage);
  return QKV_OK;
}

qkv_status qkvi_catalogue_closed(qkvi_residency *residency, qkv_session *session, qkv_error *error) {
  qkvi_journal_wait wait = {.residency = residency};
  if (qkv_session_config_of(session)->backing == NULL) return QKV_OK;
  qkv_session_detach(session);  // threads that still have it put nothing behind its end
  qkvi_closes_add(residency, qkv_session_id(session), qkvi_catalogue_on_journal, &wait);
  return qkvi_catalogue_finish_wait(&wait, error);
}

void qkvi_catalogue_drop(qkvi_residency *residency, qkv_session *session) {
  if (residency == NULL || qkv_session_config_of(session)->backing == NULL) return;
  qkv_session_detach(session);
  qkvi_closes_add(residency, qkv_session_id(session), NULL, NULL);
}
