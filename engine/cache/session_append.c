// Appends to a session, and the lock of a layer's rows.
#include <assert.h>
#include <pthread.h>

#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_spill.h"
#include "engine/cache/session_fold.h"
#include "engine/cache/session_internal.h"
#include "engine/cache/session_share.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

void qkvi_session_lock_rows(locked_layer *layer) {
  if (pthread_mutex_trylock(&layer->rows) == 0) return;
  atomic_fetch_add_explicit(&layer->waiting, 1, memory_order_relaxed);
  const int failed = pthread_mutex_lock(&layer->rows);
  atomic_fetch_sub_explicit(&layer->waiting, 1, memory_order_relaxed);
  assert(failed == 0);
  (void)failed;
}

void qkvi_session_unlock_rows(locked_layer *layer) {
  const int failed = pthread_mutex_unlock(&layer->rows);
  assert(failed == 0);
  (void)failed;
}

static const qkvi_row_change *change_of(const qkv_layer_access *access) {
  return (const qkvi_row_change *)access;  // its first member
}

// 0: it is no use of the session.
static void note_use(const qkv_layer *layer, int64_t used_ms) {
  for (size_t i = 0; i < layer->range_count && used_ms != 0; i++)
    atomic_store(&layer->ranges[i].range->used_ms, used_ms);
}

static void enter(const qkv_layer_access *access) {
  const qkvi_row_change *change = change_of(access);
  note_use(qkvi_session_change(change->session, change->layer), change->used_ms);
}

static void leave(const qkv_layer_access *access, bool last) {
  const qkvi_row_change *change = change_of(access);
  // Pages that the backing has no headroom for are given again later (session_spill.h).
  if (last) (void)qkv_layer_save_with(&layer_at(change->session, change->layer)->layer, change->ids);
  qkvi_session_changed(change->session, change->layer);
}

static void look(const qkv_layer_access *access) {
  const qkvi_row_change *change = change_of(access);
  (void)qkvi_session_look(change->session, change->layer);
}

static void looked(const qkv_layer_access *access) {
  const qkvi_row_change *change = change_of(access);
  qkv_session_read_done(change->session, change->layer);
}

static qkv_layer *begin_locked(qkv_session *session, uint32_t layer, uint64_t *headroom, qkvi_row_change *change) {
  locked_layer *locked = layer_at(session, layer);
  *change = (qkvi_row_change){
      .access = {.enter = enter, .leave = leave, .look = look, .looked = looked}, .session = session, .layer = layer};
  locked->layer.access = &change->access;
  locked->layer.append_headroom = headroom;
  return &locked->layer;
}

qkv_layer *qkvi_session_begin_rows(qkv_session *session, uint32_t layer, uint64_t *headroom,
                                   qkvi_row_change *change) {
  qkvi_session_lock_rows(layer_at(session, layer));
  return begin_locked(session, layer, headroom, change);
}

qkv_layer *qkvi_session_begin_append(qkv_session *session, uint32_t layer, const qkv_append_use *use,
                                     qkvi_row_change *change) {
  if (!use->at_once) return qkvi_session_begin_rows(session, layer, use->headroom, change);
  if (pthread_mutex_trylock(&layer_at(session, layer)->rows) != 0) return NULL;
  return begin_locked(session, layer, use->headroom, change);
}

void qkvi_session_end_rows(const qkvi_row_change *change) {
  locked_layer *locked = layer_at(change->session, change->layer);
  locked->layer.access = NULL;
  locked->layer.append_headroom = NULL;
  qkvi_session_unlock_rows(locked);
}

// ---- Append ----

// As its layer will be when it has one.
static qkv_status check_first(qkv_session *session, uint32_t index, uint64_t position, const qkv_tensor *k,
                              const qkv_tensor *v, qkv_error *error) {
  qkv_layer layer;
  if (qkv_session_is_folded(session)) return QKV_OK;  // its layers could not be made: not known yet
  qkvi_session_init_layer(session, index, &layer);
  const qkv_status status = qkv_layer_append_check(&layer, position, k, v, error);
  qkv_layer_deinit(&layer);
  return status;
}

qkv_status qkv_session_append_check(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                                    const qkv_tensor *v, qkv_error *error) {
  QKV_TRY(qkvi_session_check_layer(session, layer, error));
  if (!qkvi_session_needs_layers(session)) return check_first(session, layer, position, k, v, error);
  const qkv_status status = qkv_layer_append_check(qkvi_session_look(session, layer), position, k, v, error);
  qkv_session_read_done(session, layer);
  return status;
}

// Another coder for pages to come, where the model's calibration has changed. Readers need the coder unchanged.
static bool renew_coder(qkv_session *session, uint32_t layer) {
  if (!qkvi_session_coder_is_old(session, layer)) return false;
  (void)qkvi_session_change(session, layer);
  qkvi_session_renew_coder(session, layer);
  qkvi_session_changed(session, layer);
  return true;
}

// An append whose rows have no shape is refused.
static qkv_row_ids row_ids(const uint32_t *ids, uint64_t position, const qkv_tensor *k) {
  return (qkv_row_ids){
      .position = position, .count = ids != NULL && k->rank == 3 ? (size_t)k->dims[0] : 0, .ids = ids};
}

qkv_status qkv_session_append(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                              const qkv_tensor *v, bool before_rope, uint64_t *appended, uint64_t *length,
                              qkv_error *error) {
  return qkv_session_append_in(session, layer, &(qkv_append_use){0}, position, k, v, before_rope, appended, length,
                               error);
}

qkv_status qkv_session_append_in(qkv_session *session, uint32_t layer, qkv_append_use *use, uint64_t position,
                                 const qkv_tensor *k, const qkv_tensor *v, bool before_rope, uint64_t *appended,
                                 uint64_t *length, qkv_error *error) {
  qkvi_row_change change;
  *appended = *length = 0;
  QKV_TRY(qkvi_session_check_layer(session, layer, error));
  QKV_TRY(qkvi_session_make_layers(session, use->headroom, error));
  qkvi_session_touch_layer(session, layer);
  qkv_layer *appending = qkvi_session_begin_append(session, layer, use, &change);
  if (appending == NULL) return QKV_UNAVAILABLE;
  change.used_ms = qkv_session_last_used_ms(session);
  const bool renewed = renew_coder(session, layer);
  const qkv_row_ids ids = row_ids(use->ids, position, k);
  change.ids = &ids;
  if (ids.count > 0 && !use->separate)
    appending->offers = qkvi_session_offers(session, appending, position, ids.ids, ids.count);
  change.access.encoder = use->encoder;
  const qkv_status status = qkv_layer_append(appending, position, k, v, before_rope, appended, error);
  *length = appending->length;
  use->pages_shared = qkvi_page_offers_free(&appending->offers, session->kind->arena);
  qkvi_session_end_rows(&change);
  if (renewed) qkvi_session_drop_unused(session);
  return status;
}

// Coding pages is no work for a thread that must not wait.
qkv_status qkv_session_try_append(qkv_session *session, uint32_t layer, const uint32_t *ids, uint64_t position,
                                  const qkv_tensor *k, const qkv_tensor *v, bool before_rope, uint64_t *appended,
                                  uint64_t *length, qkv_error *error) {
  qkv_status status = QKV_UNAVAILABLE;
  *appended = *length = 0;
  QKV_TRY(qkvi_session_check_layer(session, layer, error));
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  qkvi_session_touch_layer(session, layer);
  locked_layer *locked = layer_at(session, layer);
  if (pthread_mutex_trylock(&locked->rows) != 0) return status;
  qkv_layer *appending =
      qkvi_layer_would_seal(&locked->layer, position, k) ? NULL : qkvi_session_try_change(session, layer);
  if (appending != NULL) {
    const qkv_row_ids known = row_ids(ids, position, k);
    note_use(appending, qkv_session_last_used_ms(session));
    status = qkv_layer_append(appending, position, k, v, before_rope, appended, error);
    *length = appending->length;
    (void)qkv_layer_save_with(appending, &known);
    qkvi_session_changed(session, layer);
  }
  qkvi_session_unlock_rows(locked);
  return status;
}
