// What the journal has of models, calibrations and sessions, so that the next process finds them.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "proto/wire.h"
#include "server/contract.h"
#include "server/spill_internal.h"

// ---- The journal ----

void qkvi_spill_on_journal(void *context, qkv_status status) {
  qkvi_journal_wait *wait = context;
  qkvi_spill *spill = wait->spill;
  qkvi_spill_lock(spill);
  wait->status = status;
  wait->done = true;
  spill->steps++;
  (void)pthread_cond_broadcast(&spill->moved);
  qkvi_spill_unlock(spill);
}

qkv_status qkvi_spill_finish_wait(qkvi_journal_wait *wait, qkv_error *error) {
  qkvi_spill_lock(wait->spill);
  while (!wait->done) (void)pthread_cond_wait(&wait->spill->moved, &wait->spill->lock);
  qkvi_spill_unlock(wait->spill);
  if (wait->status == QKV_OK) return QKV_OK;
  return qkv_fail(error, wait->status, "the journal in data-dir was not written, the disk %s",
                  wait->status == QKV_RESOURCE_EXHAUSTED ? "is full" : "failed");
}

qkv_status qkvi_spill_journal(qkvi_spill *spill, qkv_journal_kind kind, uint64_t session, const void *payload,
                              uint64_t bytes, qkv_error *error) {
  qkvi_journal_wait wait = {.spill = spill};
  QKV_TRY(qkv_storage_journal(spill->storage, kind, session, payload, bytes, qkvi_spill_on_journal, &wait, error));
  return qkvi_spill_finish_wait(&wait, error);
}

// ---- Calibrations in the journal ----

static qkvi_known *find_known(qkvi_spill *spill, const char *model, uint32_t version) {
  for (qkvi_known *known = spill->known; known != NULL; known = known->next) {
    if (known->version == version && strcmp(known->model, model) == 0) return known;
  }
  return NULL;
}

void qkvi_spill_note_known(qkvi_spill *spill, const char *model, uint32_t version) {
  qkvi_known *known = calloc(1, sizeof *known);
  if (known == NULL) abort();
  *known = (qkvi_known){.version = version, .next = spill->known};
  (void)snprintf(known->model, sizeof known->model, "%s", model);
  spill->known = known;
}

// Whether pages of this calibration may be put: it is in the journal. If not, it is noted down for the thread.
bool qkvi_spill_calibration_ready(qkvi_spill *spill, const char *model, uint32_t version) {
  if (version == 0) return true;
  qkvi_spill_lock(spill);
  const bool ready = find_known(spill, model, version) != NULL;
  spill->wanted |= !ready;
  qkvi_spill_unlock(spill);
  return ready;
}

// A Model with a name and this calibration, whose bytes go to the disk from where they lie.
static qkv_status write_calibration(qkvi_spill *spill, const char *name, const qkv_calibration *calibration,
                                    qkv_error *error) {
  enum { NAME = 1, CALIBRATION = 14 };  // fields of Model
  size_t size, pieces;
  const void *bytes = qkv_calibration_bytes(calibration, &size);
  qkvi_journal_wait wait = {.spill = spill};
  qkv_wire_writer *writer = qkv_wire_writer_create();
  qkv_wire_put_string(writer, NAME, name);
  qkv_wire_put_reference(writer, CALIBRATION, bytes, size, NULL);
  const qkv_wire_piece *piece = qkv_wire_writer_pieces(writer, &pieces);
  assert(pieces == 2 && piece[1].reference);
  const qkv_journal_entry entry = {.kind = QKV_JOURNAL_CALIBRATION,
                                   .payload = piece[0].data,
                                   .bytes = piece[0].length,
                                   .rest = bytes,
                                   .rest_bytes = size};
  qkv_status status = qkv_storage_journal_long(spill->storage, &entry, qkvi_spill_on_journal, &wait, error);
  if (status == QKV_OK) status = qkvi_spill_finish_wait(&wait, error);
  qkv_wire_writer_destroy(&writer);
  return status;
}

static void journal_calibration(qkvi_spill *spill, const qkv_model *model, const qkv_calibration *calibration) {
  const uint32_t version = qkv_calibration_version(calibration);
  qkvi_spill_lock(spill);
  const bool wanted = find_known(spill, model->name, 0) != NULL && find_known(spill, model->name, version) == NULL;
  qkvi_spill_unlock(spill);
  if (!wanted) return;
  qkv_error error = {0};
  const qkv_status status = write_calibration(spill, model->name, calibration, &error);
  qkvi_spill_lock(spill);
  if (status == QKV_OK) {
    qkvi_spill_note_known(spill, model->name, version);
  } else {
    qkvi_spill_note_failure(spill, status);
  }
  qkvi_spill_unlock(spill);
}

static void journal_calibrations(qkvi_spill *spill, qkv_session *session) {
  enum { AT_ONCE = 16 };
  const qkv_calibration *calibrations[AT_ONCE];
  for (size_t first = 0, count = AT_ONCE; count == AT_ONCE; first += count) {
    count = qkv_session_calibrations(session, first, calibrations, AT_ONCE);
    for (size_t i = 0; i < count; i++) {
      journal_calibration(spill, qkv_session_model(session), calibrations[i]);
      qkv_calibration_unref(&calibrations[i]);
    }
  }
}

// Those that sessions on the SSD are coded with and the journal does not have.
void qkvi_spill_journal_calibrations(qkvi_spill *spill) {
  size_t count;
  qkvi_spilled *sessions = qkvi_spill_sessions(spill, &count);
  for (size_t i = 0; i < count; i++) journal_calibrations(spill, sessions[i].session);
  qkvi_spill_drop_sessions(sessions, count);
}

// ---- Models and sessions ----

static qkv_status journal_model(qkvi_spill *spill, const Qkv__V1__Model *message, qkv_error *error) {
  const size_t bytes = qkv__v1__model__get_packed_size(message);
  uint8_t *payload = malloc(bytes + 1);
  if (payload == NULL) abort();
  (void)qkv__v1__model__pack(message, payload);
  const qkv_status status = qkvi_spill_journal(spill, QKV_JOURNAL_MODEL, 0, payload, bytes, error);
  free(payload);
  return status;
}

// One at a time, so that a model is written once.
static qkv_status journal_model_once(qkvi_spill *spill, const qkv_model *model, qkv_error *error) {
  qkv_status status = QKV_OK;
  (void)pthread_mutex_lock(&spill->models_lock);
  qkvi_spill_lock(spill);
  const bool known = find_known(spill, model->name, 0) != NULL;
  qkvi_spill_unlock(spill);
  if (!known) {
    // What was asked for: what it left to the daemon is the next daemon's to say.
    qkv_model asked = *model;
    asked.policy = model->asked;
    qkvi_model_message message;
    qkvi_model_write(&asked, &message);
    status = journal_model(spill, &message.model, error);
    qkvi_model_message_clear(&message);
    qkvi_spill_lock(spill);
    if (status == QKV_OK) qkvi_spill_note_known(spill, model->name, 0);
    qkvi_spill_unlock(spill);
  }
  (void)pthread_mutex_unlock(&spill->models_lock);
  return status;
}

static qkv_status journal_info(qkvi_spill *spill, qkv_journal_kind kind, const qkv_session_info *info,
                               qkv_error *error) {
  qkvi_session_message message;
  qkvi_session_write(info, NULL, &message);
  const size_t bytes = qkv__v1__session_info__get_packed_size(&message.info);
  uint8_t *payload = malloc(bytes + 1);
  if (payload == NULL) abort();
  (void)qkv__v1__session_info__pack(&message.info, payload);
  const qkv_status status = qkvi_spill_journal(spill, kind, info->config.id, payload, bytes, error);
  free(payload);
  return status;
}

bool qkvi_spill_is_open(qkvi_spill *spill, const qkv_session *session) {
  qkv_session *named = NULL;
  if (qkv_store_session(spill->store, qkv_session_name(session), &named, NULL) != QKV_OK) return false;
  const bool same = named == session;
  qkv_session_unref(&named);
  return same;
}

qkv_status qkvi_spill_opened(qkvi_spill *spill, qkv_session *session, qkv_error *error) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  if (info.config.backing == NULL) return QKV_OK;
  QKV_TRY(journal_model_once(spill, info.model, error));
  const qkv_status status = journal_info(spill, QKV_JOURNAL_SESSION_OPEN, &info, error);
  // It may be there nevertheless.
  if (status != QKV_OK) qkv_storage_session_close(spill->storage, info.config.id, NULL, NULL);
  if (status != QKV_OK || qkvi_spill_is_open(spill, session)) return status;
  // Who closed it meanwhile wrote that before it was open.
  QKV_TRY(qkvi_spill_closed(spill, session, error));
  return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", info.config.name);
}

qkv_status qkvi_spill_noted(qkvi_spill *spill, qkv_session *session, qkv_error *error) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  return info.config.backing == NULL ? QKV_OK : journal_info(spill, QKV_JOURNAL_SESSION_NOTE, &info, error);
}
