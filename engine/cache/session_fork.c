// Forks of a session.
#include <pthread.h>
#include <stdatomic.h>

#include "engine/cache/session_internal.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

static void share_codings(qkv_session *parent, qkv_session *child) {
  session_working *working = qkvi_working(parent);
  (void)pthread_mutex_lock(&working->codings_lock);
  for (size_t i = 0; i < working->coding_count; i++)
    (void)qkvi_session_coding(child, qkv_coding_calibration(working->codings[i]));
  (void)pthread_mutex_unlock(&working->codings_lock);
}

// The parent has used them, and keeps those that stay.
static void note_use(qkv_session *parent, uint32_t layer, const qkv_layer *from) {
  for (size_t i = 0; i < from->range_count; i++)
    atomic_store(&from->ranges[i].range->used_ms, qkv_session_last_used_ms(parent));
  qkvi_session_keep_ranges(parent, layer);
}

static void fork_layer(qkv_session *parent, qkv_session *child, uint32_t layer, uint64_t position) {
  qkvi_session_lock_rows(layer_at(parent, layer));
  const qkv_layer *from = qkvi_session_look(parent, layer);
  // The coders of what is there now are among the codings until the layer is given back.
  share_codings(parent, child);
  qkv_layer *to = qkvi_session_change(child, layer);
  qkv_layer_fork(to, from, position);
  uint64_t *forked_to = &layer_at(parent, layer)->layer.forked_to;  // truncations wait for `making`
  if (*forked_to < to->forked_to) *forked_to = to->forked_to;
  note_use(parent, layer, from);
  qkvi_session_changed(child, layer);
  qkv_session_read_done(parent, layer);
  qkvi_session_unlock_rows(layer_at(parent, layer));
}

qkv_status qkv_session_fork(qkv_session *parent, const qkv_session_config *config, const uint64_t *positions,
                            qkv_session **out, qkv_error *error) {
  qkv_session_touch(parent);
  const bool is_new = qkvi_session_is_new(parent);
  if (!is_new) QKV_TRY(qkvi_session_make_layers(parent, NULL, error));
  qkv_session_config own = *config;
  own.root = qkv_session_root(parent);
  QKV_TRY(qkv_session_create(&own, parent->kind->model, parent->kind->arena, out, error));
  if (is_new) return QKV_OK;
  const qkv_status status = qkvi_session_make_layers(*out, config->headroom, error);
  if (status != QKV_OK) {
    qkv_session_unref(out);
    return status;
  }
  qkvi_session_lock_making(parent);
  if (qkv_session_truncations(parent) != config->parent_truncations) {
    qkvi_session_unlock_making(parent);
    qkv_session_close_tokens(*out);
    qkv_session_unref(out);
    return qkv_fail(error, QKV_UNAVAILABLE, "session %s is being truncated", parent->name);
  }
  qkvi_session_note_shared(parent);
  qkvi_session_note_shared(*out);
  uint64_t end = 0;
  for (uint32_t i = 0; i < parent->kind->model->layers; i++) {
    fork_layer(parent, *out, i, positions[i]);
    if (positions[i] > end) end = positions[i];
  }
  qkv_session_tokens_fork(&qkvi_working(parent)->tokens, end, &qkvi_working(*out)->tokens);
  qkvi_session_unlock_making(parent);
  return QKV_OK;
}
