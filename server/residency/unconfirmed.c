// Sessions whose end is unconfirmed (unconfirmed): the start could not read all records that may belong to them.
// Tying one confirms its end.
#include <stdlib.h>

#include "engine/cache/session_spill.h"
#include "server/residency/internal.h"

void qkvi_catalogue_note_unconfirmed(qkvi_residency *residency, uint64_t session) {
  qkvi_unconfirmed *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  made->session = session;
  HASH_ADD(hh, residency->unconfirmed, session, sizeof made->session, made);
  residency->unread = true;
}

static qkvi_unconfirmed *find_unconfirmed(qkvi_residency *residency, uint64_t session) {
  qkvi_unconfirmed *found;
  qkvi_residency_lock(residency);
  HASH_FIND(hh, residency->unconfirmed, &session, sizeof session, found);
  qkvi_residency_unlock(residency);
  return found;
}

bool qkvi_catalogue_is_unconfirmed(qkvi_residency *residency, const qkv_session *session) {
  return residency != NULL && residency->unread && find_unconfirmed(residency, qkv_session_id(session)) != NULL;
}

static qkv_status tie(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                      qkvi_unconfirmed *unconfirmed, qkv_error *error) {
  qkv_session_info info;
  const uint32_t layers = qkv_session_model(session)->layers;
  uint64_t *lengths = calloc(layers, sizeof *lengths);
  if (lengths == NULL) abort();
  qkv_session_read_info(session, &info, lengths);
  for (uint32_t layer = 0; layer < layers; layer++)
    qkvi_write_back_cut(residency, unconfirmed->session, layer, lengths[layer]);
  free(lengths);
  QKV_TRY(qkvi_write_back_truncated(residency, call, session, error));
  qkvi_residency_lock(residency);
  HASH_DEL(residency->unconfirmed, unconfirmed);
  qkvi_residency_unlock(residency);
  free(unconfirmed);
  return QKV_OK;
}

qkv_status qkvi_catalogue_tie(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                              qkv_error *error) {
  (void)pthread_mutex_lock(&residency->unconfirmed_lock);
  qkvi_unconfirmed *unconfirmed = find_unconfirmed(residency, qkv_session_id(session));
  const qkv_status status = unconfirmed == NULL ? QKV_OK : tie(residency, call, session, unconfirmed, error);
  (void)pthread_mutex_unlock(&residency->unconfirmed_lock);
  return status;
}

void qkvi_catalogue_drop_unconfirmed(qkvi_residency *residency) {
  qkvi_unconfirmed *unconfirmed = residency->unconfirmed, *next;
  HASH_CLEAR(hh, residency->unconfirmed);  // the table alone; the entries stay linked
  for (; unconfirmed != NULL; unconfirmed = next) {
    next = unconfirmed->hh.next;
    free(unconfirmed);
  }
}
