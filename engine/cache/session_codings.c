// A session's codings: how its pages are coded, and those to come.
#include <stdlib.h>

#include "engine/cache/session_internal.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

const qkv_coding *qkvi_session_coding(qkv_session *session, const qkv_calibration *calibration) {
  qkv_coding *coding = qkv_coding_get(session->model, &session->config.policy, session->config.purpose, calibration);
  (void)pthread_mutex_lock(&session->codings_lock);
  size_t i = 0;
  while (i < session->coding_count && session->codings[i] != coding) i++;
  if (i < session->coding_count) {
    (void)pthread_mutex_unlock(&session->codings_lock);
    qkv_coding *extra = coding;  // the list holds one reference already
    qkv_coding_unref(&extra);
    return coding;
  }
  session->codings = realloc((void *)session->codings, (session->coding_count + 1) * sizeof *session->codings);
  if (session->codings == NULL) abort();
  session->codings[session->coding_count++] = coding;
  (void)pthread_mutex_unlock(&session->codings_lock);
  return coding;
}

size_t qkv_session_calibrations(qkv_session *session, size_t first, const qkv_calibration **out, size_t max) {
  size_t count = 0, passed = 0;
  (void)pthread_mutex_lock(&session->codings_lock);
  for (size_t i = 0; i < session->coding_count && count < max; i++) {
    const qkv_calibration *calibration = qkv_coding_calibration(session->codings[i]);
    if (calibration != NULL && passed++ >= first) out[count++] = qkv_calibration_ref(calibration);
  }
  (void)pthread_mutex_unlock(&session->codings_lock);
  return count;
}

// The coding for pages to come: another one where the model's calibration has changed.
const qkv_coding *qkvi_session_current_coding(qkv_session *session) {
  const qkv_model *model = session->model;
  const qkv_calibration *calibration =
      model->calibration != NULL ? qkv_calibration_slot_get(model->calibration) : NULL;
  const qkv_coding *coding = qkvi_session_coding(session, calibration);
  qkv_calibration_unref(&calibration);
  return coding;
}

bool qkvi_session_coder_is_old(const qkv_session *session, uint32_t layer) {
  const qkv_calibration_slot *slot = session->model->calibration;
  const qkv_coder *coder = layer_at(session, layer)->layer.coder;
  return slot != NULL && coder->codec->calibrated && qkv_calibration_slot_version(slot) != coder->calibration;
}

void qkvi_session_renew_coder(qkv_session *session, uint32_t layer) {
  qkvi_session_use_codings(session);
  layer_at(session, layer)->layer.coder = qkv_coding_layer(qkvi_session_current_coding(session), layer);
  qkvi_session_codings_used(session);
}

void qkvi_session_use_codings(qkv_session *session) {
  int failed = pthread_rwlock_rdlock(&session->codings_use);
  assert(failed == 0);
}

void qkvi_session_codings_used(qkv_session *session) {
  int failed = pthread_rwlock_unlock(&session->codings_use);
  assert(failed == 0);
}

static void mark_coder(const qkv_session *session, const qkv_coder *coder, bool *used) {
  for (size_t i = 0; i < session->coding_count; i++) used[i] |= qkv_coding_has(session->codings[i], coder);
}

// False where a layer is in use.
static bool mark_used(qkv_session *session, bool *used) {
  for (uint32_t i = 0; i < session->model->layers; i++) {
    locked_layer *locked = layer_at(session, i);
    if (pthread_rwlock_tryrdlock(&locked->lock) != 0) return false;
    const qkv_coder *last = locked->layer.coder;
    mark_coder(session, last, used);
    for (size_t r = 0; r < locked->layer.range_count; r++) {
      const qkv_coder *coder = locked->layer.ranges[r].range->coder;
      if (coder != last) mark_coder(session, coder, used);
      last = coder;
    }
    (void)pthread_rwlock_unlock(&locked->lock);
  }
  return true;
}

// Drops codings that no page is coded by any more; a calibration that has been replaced goes with the last session
// that has one of its codings. Now or at a later call: it never waits.
void qkvi_session_drop_unused(qkv_session *session) {
  if (pthread_rwlock_trywrlock(&session->codings_use) != 0) return;
  (void)pthread_mutex_lock(&session->codings_lock);
  bool *used = calloc(session->coding_count + 1, sizeof *used);
  if (used == NULL) abort();
  if (session->coding_count > 1 && qkvi_session_has_layers(session) && mark_used(session, used)) {
    size_t kept = 0;
    for (size_t i = 0; i < session->coding_count; i++) {
      if (used[i]) {
        session->codings[kept++] = session->codings[i];
      } else {
        qkv_coding_unref(&session->codings[i]);
      }
    }
    session->coding_count = kept;
  }
  free(used);
  (void)pthread_mutex_unlock(&session->codings_lock);
  qkvi_session_codings_used(session);
}

void qkvi_session_drop_codings(qkv_session *session) {
  for (size_t i = 0; i < session->coding_count; i++) qkv_coding_unref(&session->codings[i]);
  free((void *)session->codings);
  (void)pthread_mutex_destroy(&session->codings_lock);
  (void)pthread_rwlock_destroy(&session->codings_use);
}
