// Sessions whose end may move, as the start could not read all that may be of them.
#include <stdlib.h>

#include "engine/cache/session_spill.h"
#include "server/spill_internal.h"

void qkvi_spill_note_loose(qkvi_spill *spill, uint64_t session) {
  qkvi_loose *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  made->session = session;
  HASH_ADD(hh, spill->loose, session, sizeof made->session, made);
  spill->unread = true;
}

static qkvi_loose *find_loose(qkvi_spill *spill, uint64_t session) {
  qkvi_loose *found;
  qkvi_spill_lock(spill);
  HASH_FIND(hh, spill->loose, &session, sizeof session, found);
  qkvi_spill_unlock(spill);
  return found;
}

bool qkvi_spill_is_loose(qkvi_spill *spill, const qkv_session *session) {
  return spill != NULL && spill->unread && find_loose(spill, qkv_session_config_of(session)->id) != NULL;
}

static qkv_status tie(qkvi_spill *spill, qkv_session *session, qkvi_loose *loose, qkv_error *error) {
  qkv_session_info info;
  const uint32_t layers = qkv_session_model(session)->layers;
  uint64_t *lengths = calloc(layers, sizeof *lengths);
  if (lengths == NULL) abort();
  qkv_session_read_info(session, &info, lengths);
  for (uint32_t layer = 0; layer < layers; layer++) qkvi_spill_cut(spill, loose->session, layer, lengths[layer]);
  free(lengths);
  QKV_TRY(qkvi_spill_truncated(spill, session, error));
  qkvi_spill_lock(spill);
  HASH_DEL(spill->loose, loose);
  qkvi_spill_unlock(spill);
  free(loose);
  return QKV_OK;
}

qkv_status qkvi_spill_tie(qkvi_spill *spill, qkv_session *session, qkv_error *error) {
  (void)pthread_mutex_lock(&spill->loose_lock);
  qkvi_loose *loose = find_loose(spill, qkv_session_config_of(session)->id);
  const qkv_status status = loose == NULL ? QKV_OK : tie(spill, session, loose, error);
  (void)pthread_mutex_unlock(&spill->loose_lock);
  return status;
}

void qkvi_spill_drop_loose(qkvi_spill *spill) {
  qkvi_loose *loose = spill->loose, *next;
  HASH_CLEAR(hh, spill->loose);  // the table alone; the entries stay linked
  for (; loose != NULL; loose = next) {
    next = loose->hh.next;
    free(loose);
  }
}
