// Truncation of a session: ids first, then rows.
#include <stdatomic.h>

#include "engine/cache/backing.h"
#include "engine/cache/layer.h"
#include "engine/cache/session_internal.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

static void truncate_layer(qkv_session *session, uint32_t layer, uint64_t position) {
  qkvi_session_lock_rows(layer_at(session, layer));
  qkv_layer_truncate(qkvi_session_change(session, layer), position);
  qkvi_session_changed(session, layer);
  qkvi_session_unlock_rows(layer_at(session, layer));
}

// With the locks of all layers' rows. Nothing is put between the cut and the truncation of a layer, which needs the
// layer to be locked for writing; so rows of before and after never mix.
static void truncate_locked(qkv_session *session, uint64_t position) {
  const qkvi_session_kind *kind = session->kind;
  const qkv_backing *backing = kind->config.backing;
  const uint64_t first = kind->config.first_position;
  bool needed = false;
  for (uint32_t i = 0; i < kind->model->layers; i++)
    needed |= qkv_layer_cut_is_needed(qkvi_session_change(session, i), position);
  if (needed) backing->cut(backing->context, session->id, QKV_BACKING_LAYERS, position < first ? first : position);
  for (uint32_t i = 0; i < kind->model->layers; i++) {
    qkv_layer_truncate_untold(&layer_at(session, i)->layer, position);
    qkvi_session_changed(session, i);
  }
}

// One entry in the journal, however many layers there are. Locks are taken in ascending order, as by attends; readers
// are excluded only once no append is under way.
static void truncate_layers(qkv_session *session, uint64_t position) {
  const uint32_t layers = session->kind->model->layers;
  for (uint32_t i = 0; i < layers; i++) qkvi_session_lock_rows(layer_at(session, i));
  truncate_locked(session, position);
  for (uint32_t i = 0; i < layers; i++) qkvi_session_unlock_rows(layer_at(session, i));
}

// Whether hashes of ids go without the records that have them, those of the last layer.
static bool hashes_go(qkv_session *session, uint64_t position, const uint32_t *layers, size_t layer_count) {
  if (session->detached || session->kind->config.backing == NULL || layer_count == 0 ||
      position >= qkv_session_tokens_length(&qkvi_working(session)->tokens))
    return false;
  for (size_t i = 0; i < layer_count; i++) {
    if (layers[i] == session->kind->model->layers - 1) return false;
  }
  return true;
}

// Ids go first: what is put for the last layer behind the cut has none.
static void cut_ids(qkv_session *session, uint64_t position, const uint32_t *layers, size_t layer_count) {
  const bool cut = hashes_go(session, position, layers, layer_count);
  qkv_session_tokens_truncate(&qkvi_working(session)->tokens, position);
  const qkv_backing *backing = session->kind->config.backing;
  if (cut) backing->cut(backing->context, session->id, session->kind->model->layers, position);
}

qkv_status qkv_session_truncate(qkv_session *session, uint64_t position, const uint32_t *layers, size_t layer_count,
                                qkv_error *error) {
  for (size_t i = 0; i < layer_count; i++) QKV_TRY(qkvi_session_check_layer(session, layers[i], error));
  qkv_session_touch(session);
  if (qkvi_session_is_new(session)) return QKV_OK;
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  qkvi_session_lock_making(session);
  atomic_fetch_add(&qkvi_working(session)->truncations, 1);
  if (position < atomic_load(&session->whole)) qkv_session_set_whole(session, position);
  cut_ids(session, position, layers, layer_count);
  if (layer_count == 0) truncate_layers(session, position);
  for (size_t i = 0; i < layer_count; i++) truncate_layer(session, layers[i], position);
  qkv_session_tokens_truncate(&qkvi_working(session)->tokens, position);
  qkvi_session_unlock_making(session);
  qkvi_session_drop_unused(session);
  return QKV_OK;
}
