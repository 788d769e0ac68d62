// What the last change of each layer has left, without waiting for a layer (session_state.h).
#include "engine/cache/session_fold.h"
#include "engine/cache/session_internal.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

bool qkv_session_has_cold(const qkv_session *session) {
  return qkv_session_tokens_cold(session) > 0;
}

uint64_t qkv_session_bytes_exact(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working == NULL ? 0 : atomic_load(&working->bytes_exact);
}

uint64_t qkv_session_bytes_kept(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working == NULL ? 0 : atomic_load_explicit(&working->bytes_kept, memory_order_relaxed);
}

uint64_t qkv_session_bytes_stored(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working == NULL ? qkvi_session_stored(session)
                         : atomic_load_explicit(&working->bytes_stored, memory_order_relaxed);
}

qkvi_trunk_held qkvi_session_read_held(const qkv_session *session, uint32_t layer) {
  const uint64_t first = session->kind->config.first_position;
  const qkvi_trunk *trunk = qkvi_session_hold_trunk(session);
  if (trunk == NULL) return (qkvi_trunk_held){.end = first};
  const qkvi_trunk_held held = qkvi_trunk_read_held(trunk, layer, session->kind->model->layers, first);
  qkvi_session_release_trunk(session);
  return held;
}

uint64_t qkv_session_tokens_cold(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  if (working == NULL)
    return (session->folded_length - session->kind->config.first_position) * session->kind->model->layers -
           qkvi_session_read_held(session, QKVI_TRUNK_LAYERS).tokens;
  return atomic_load_explicit(&working->tokens_cold, memory_order_relaxed);
}

// All of it is on the tier, and some of it in memory, for other sessions.
void qkvi_session_read_folded(const qkv_session *session, qkv_session_info *info, uint64_t *lengths) {
  const uint32_t layers = session->kind->model->layers;
  const qkvi_trunk_held held = qkvi_session_read_held(session, QKVI_TRUNK_LAYERS);
  for (uint32_t i = 0; i < layers && lengths != NULL; i++) lengths[i] = session->folded_length;
  info->usage.tokens_coded = (session->folded_length - session->kind->config.first_position) * layers;
  info->usage.tokens_cold = info->usage.tokens_coded - held.tokens;
  info->usage.bytes_coded = info->usage.bytes_shared = held.bytes;
  info->usage.bytes_stored = qkv_session_bytes_stored(session);
}

uint64_t qkv_session_folded_held(const qkv_session *session) {
  return qkvi_session_read_held(session, QKVI_TRUNK_LAYERS).end;
}

// While its layers are made again both hold, and the lengths are the same.
static bool is_folded(const qkv_session *session) {
  return !qkvi_session_has_layers(session) && qkv_session_is_folded(session);
}

uint64_t qkv_session_cold(qkv_session *session, uint32_t layer, uint64_t *bytes) {
  *bytes = 0;
  if (is_folded(session)) {  // layers differ little
    *bytes = qkv_session_bytes_stored(session) / session->kind->model->layers;
    return session->folded_length - session->kind->config.first_position -
           qkvi_session_read_held(session, layer).tokens;
  }
  if (!qkvi_session_has_layers(session)) return 0;
  qkvi_session_lock_info(layer_at(session, layer));
  const uint64_t tokens = layer_at(session, layer)->usage.tokens_cold;
  *bytes = layer_at(session, layer)->usage.bytes_stored;
  qkvi_session_unlock_info(layer_at(session, layer));
  return tokens;
}

uint64_t qkv_session_layer_length(qkv_session *session, uint32_t layer) {
  if (is_folded(session)) return session->folded_length;
  if (!qkvi_session_has_layers(session)) return session->kind->config.first_position;
  qkvi_session_lock_info(layer_at(session, layer));
  const uint64_t length = atomic_load(qkvi_length_of(layer_at(session, layer)));
  qkvi_session_unlock_info(layer_at(session, layer));
  return length;
}

bool qkvi_session_any_unsettled(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working != NULL && atomic_load(&working->unsettled) > 0;
}

bool qkvi_session_unsettled(qkv_session *session, uint32_t layer) {
  if (!qkvi_session_has_layers(session)) return false;
  qkvi_session_lock_info(layer_at(session, layer));
  const bool unsettled = layer_at(session, layer)->unsettled;
  qkvi_session_unlock_info(layer_at(session, layer));
  return unsettled;
}

uint64_t qkv_session_length(qkv_session *session) {
  uint64_t length = UINT64_MAX;
  if (is_folded(session)) return session->folded_length;
  if (!qkvi_session_has_layers(session)) return session->kind->config.first_position;
  const uint32_t layers = session->kind->model->layers;
  const _Atomic uint64_t *lengths = qkvi_session_lengths(atomic_load(&qkvi_working(session)->made), layers);
  for (uint32_t i = 0; i < layers && length > session->kind->config.first_position; i++) {
    const uint64_t of_layer = atomic_load(&lengths[i]);
    if (of_layer < length) length = of_layer;
  }
  return length;
}

// A session's working state has where its layers are, and these have their lengths behind them.
void qkv_session_prefetch_lengths(qkv_session *const *sessions, size_t count) {
  enum { LINE = 64 };
  for (size_t i = 0; i < count; i++) {
    const session_working *working = sessions[i] == NULL ? NULL : qkvi_working(sessions[i]);
    if (working != NULL) __builtin_prefetch((const void *)&working->made);
  }
  for (size_t i = 0; i < count; i++) {
    if (sessions[i] == NULL || !qkvi_session_has_layers(sessions[i])) continue;
    const uint32_t layers = sessions[i]->kind->model->layers;
    session_layers *made = atomic_load(&qkvi_working(sessions[i])->made);
    const uint8_t *lengths = (const uint8_t *)qkvi_session_lengths(made, layers);
    for (size_t at = 0; at < layers * sizeof(uint64_t); at += LINE) __builtin_prefetch(lengths + at);
  }
}

void qkv_session_read_durable(qkv_session *session, uint64_t *durable) {
  const bool folded = is_folded(session);
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    durable[i] = folded ? session->folded_length : session->kind->config.first_position;
    if (folded || !qkvi_session_has_layers(session)) continue;
    qkvi_session_lock_info(layer_at(session, i));
    durable[i] = layer_at(session, i)->durable;
    qkvi_session_unlock_info(layer_at(session, i));
  }
}

bool qkv_session_is_durable(qkv_session *session, uint32_t layer, uint64_t end) {
  if (!qkvi_session_has_layers(session)) return true;
  qkvi_session_lock_info(layer_at(session, layer));
  const bool durable = !layer_at(session, layer)->unsettled || layer_at(session, layer)->durable >= end;
  qkvi_session_unlock_info(layer_at(session, layer));
  return durable;
}
