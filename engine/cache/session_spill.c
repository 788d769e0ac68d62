#include "engine/cache/session_spill.h"

#include <assert.h>
#include <stdatomic.h>

#include "engine/cache/session_internal.h"

bool qkv_session_settle(qkv_session *session) {
  bool all = true;
  if (!qkvi_session_any_unsettled(session)) return true;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++) {
    if (!qkvi_session_unsettled(session, i)) continue;
    qkv_layer *layer = qkvi_session_try_change(session, i);
    all &= layer != NULL;
    if (layer == NULL) continue;
    qkv_layer_settle(layer);
    (void)qkv_layer_save(layer);
    all &= qkv_layer_is_settled(layer);
    qkvi_session_changed(session, i);
  }
  return all;
}

void qkv_session_detach(qkv_session *session) {
  if (qkvi_session_detach_empty(session)) return;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++) {
    qkvi_session_change(session, i)->config.backing = NULL;
    qkvi_session_changed(session, i);
  }
}

qkv_status qkv_session_seal(qkv_session *session, qkv_error *error) {
  qkv_status status = QKV_OK;
  if (!qkvi_session_has_layers(session)) return QKV_OK;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers && status == QKV_OK; i++) {
    qkvi_row_change change;
    status = qkv_layer_seal(qkvi_session_begin_rows(session, i, NULL, &change), error);
    qkvi_session_end_rows(&change);
  }
  return status;
}

// The pins are looked at under the lock that restoring takes, so what was restored since a pin was set is safe.
uint64_t qkv_session_evict(qkv_session *session, uint64_t bytes, bool wait) {
  uint64_t freed = 0;
  if (qkv_session_config_of(session)->backing == NULL || !qkvi_session_has_layers(session)) return 0;
  const uint32_t layers = qkv_session_model(session)->layers, last = qkv_session_last_layer(session);
  const int64_t unused_since = qkv_session_last_used_ms(session);
  for (uint32_t i = 1; i <= layers && freed < bytes; i++) {
    const uint32_t at = (last + layers - i) % layers;
    if (qkvi_session_stays(session, at)) continue;
    qkv_layer *layer = wait ? qkvi_session_change(session, at) : qkvi_session_try_change(session, at);
    if (layer == NULL) continue;
    if (!qkvi_session_stays(session, at)) freed += qkv_layer_evict(layer, bytes - freed, unused_since);
    qkvi_session_changed(session, at);
  }
  return freed;
}

void qkv_session_pin(qkv_session *session, uint32_t layer) {
  (void)atomic_fetch_add(qkvi_session_pins(session, layer), 1);
  qkvi_session_keep(session, layer);
}

void qkv_session_unpin(qkv_session *session, uint32_t layer) {
  const uint16_t before = atomic_fetch_sub(qkvi_session_pins(session, layer), 1);
  assert(before > 0);
  if (before == 1) qkvi_session_keep(session, layer);
}

static uint64_t first_append_cost(qkv_session *session, uint32_t index, uint64_t end) {
  qkv_layer layer;
  qkvi_session_init_layer(session, index, NULL, &layer);
  const uint64_t cost = qkv_layer_append_cost(&layer, end);
  qkv_layer_deinit(&layer);
  return qkvi_session_layers_cost(session) + cost;
}

uint64_t qkv_session_append_cost(qkv_session *session, uint32_t layer, uint64_t end) {
  if (!qkvi_session_has_layers(session)) return first_append_cost(session, layer, end);
  const uint64_t cost = qkv_layer_append_cost(qkvi_session_look(session, layer), end);
  qkv_session_read_done(session, layer);
  return cost;
}

size_t qkv_session_missing(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full,
                           qkv_missing_page *out, size_t max) {
  if (!qkvi_session_has_layers(session)) return 0;
  const size_t count = qkv_layer_missing(qkvi_session_look(session, layer), begin, end, full, out, max);
  qkv_session_read_done(session, layer);
  return count;
}

size_t qkv_session_missing_shared(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full,
                                  const void **out, size_t max) {
  if (!qkvi_session_has_layers(session)) return 0;
  const size_t count = qkv_layer_missing_shared(qkvi_session_look(session, layer), begin, end, full, out, max);
  qkv_session_read_done(session, layer);
  return count;
}

uint64_t qkv_session_missing_bytes(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full) {
  if (!qkvi_session_has_layers(session)) return 0;
  const uint64_t bytes = qkv_layer_missing_bytes(qkvi_session_look(session, layer), begin, end, full);
  qkv_session_read_done(session, layer);
  return bytes;
}

qkv_status qkv_session_restore(qkv_session *session, uint32_t layer, uint64_t *room, const qkv_missing_page *page,
                               void *image, qkv_error *error) {
  qkv_layer *restoring = qkvi_session_change(session, layer);
  restoring->room = room;
  const qkv_status status = qkv_layer_restore(restoring, page, image, error);
  restoring->room = NULL;
  qkvi_session_changed(session, layer);
  return status;
}

qkv_status qkv_session_adopt(qkv_session *session, uint32_t layer, const qkv_calibration *calibration,
                             uint32_t tokens, uint64_t record, uint32_t bytes, qkv_error *error) {
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  qkv_layer *adopting = qkvi_session_change(session, layer);
  qkvi_session_use_codings(session);
  const qkv_coding *coding = qkvi_session_coding(session, calibration);
  qkv_layer_adopt(adopting, qkv_coding_layer(coding, layer), tokens, record, bytes);
  qkvi_session_codings_used(session);
  qkvi_session_changed(session, layer);
  return QKV_OK;
}

qkv_status qkv_session_adopt_rows(qkv_session *session, uint32_t layer, uint64_t record, uint64_t begin, bool shared,
                                  const qkv_tensor *k, const qkv_tensor *v, qkv_error *error) {
  uint64_t appended, length;
  const uint64_t end = begin + (uint64_t)k->dims[0];
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  qkv_layer_adopt_rows(qkvi_session_change(session, layer), record, begin, end, shared);
  qkvi_session_changed(session, layer);
  return qkv_session_append(session, layer, begin, k, v, false, &appended, &length, error);
}

void qkv_session_adopted(qkv_session *session, uint32_t layer) {
  if (!qkvi_session_has_layers(session)) return;
  qkv_layer_adopted(qkvi_session_change(session, layer));
  qkvi_session_changed(session, layer);
}

void qkv_session_adopt_shared(qkv_session *session, qkv_session *other, uint32_t layer) {
  if (!qkvi_session_has_layers(session) || !qkvi_session_has_layers(other)) return;  // one was cut to nothing
  qkvi_session_note_shared(session);
  qkvi_session_note_shared(other);
  qkv_layer_adopt_shared(qkvi_session_change(session, layer), qkvi_session_change(other, layer));
  qkvi_session_changed(other, layer);
  qkvi_session_changed(session, layer);
}
