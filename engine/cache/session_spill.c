#include "engine/cache/session_spill.h"

#include <assert.h>
#include <stdatomic.h>

#include "engine/cache/session_fold.h"
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

// Whether there are more: then it has sealed some.
static qkv_status seal_pages(qkv_session *session, uint32_t at, size_t pages, bool *more, qkv_error *error) {
  qkvi_row_change change;
  qkv_layer *layer = qkvi_session_begin_rows(session, at, NULL, &change);
  const uint64_t before = layer->sealed;
  const qkv_status status = qkv_layer_seal_pages(layer, pages, error);
  *more = layer->sealed > before && layer->sealed < layer->length;
  qkvi_session_end_rows(&change);
  return status;
}

qkv_status qkv_session_seal(qkv_session *session, qkv_error *error) {
  bool more;
  if (!qkvi_session_has_layers(session)) return QKV_OK;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++)
    QKV_TRY(seal_pages(session, i, SIZE_MAX, &more, error));
  return QKV_OK;
}

// Whether a thread has a layer, or has had one since.
static bool is_used(qkv_session *session, uint32_t at, int64_t since_ms) {
  if (qkv_session_last_used_ms(session) != since_ms || qkvi_session_try_change(session, at) == NULL) return true;
  qkvi_session_changed(session, at);
  return false;
}

qkv_status qkv_session_seal_idle(qkv_session *session, qkv_error *error) {
  const int64_t used_ms = qkv_session_last_used_ms(session);
  if (!qkvi_session_has_layers(session)) return QKV_OK;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++) {
    for (bool more = true; more;) {
      if (is_used(session, i, used_ms)) return qkv_fail(error, QKV_UNAVAILABLE, "the session is in use");
      QKV_TRY(seal_pages(session, i, 1, &more, error));
    }
  }
  return QKV_OK;
}

// How an eviction locks a layer.
typedef enum eviction_lock {
  TRY_READ,  // not where a thread changes the layer
  READ,
  WRITE,  // waits for readers
} eviction_lock;

static const qkv_layer *begin_evict(qkv_session *session, uint32_t layer, eviction_lock how) {
  if (how == TRY_READ) return qkvi_session_try_look(session, layer);
  return how == READ ? qkvi_session_look(session, layer) : qkvi_session_change(session, layer);
}

// True where a thread that has the layer, to read or to change it, keeps pages of it in memory.
static bool evict_layer(qkv_session *session, uint32_t at, eviction_lock how, uint64_t bytes, uint64_t *freed) {
  bool in_use = false;
  if (qkvi_session_stays(session, at)) return false;
  const qkv_layer *layer = begin_evict(session, at, how);
  if (layer == NULL) return true;
  *freed += qkv_layer_evict(layer, bytes - *freed, qkv_session_last_used_ms(session), &in_use);
  if (how == WRITE) {
    qkvi_session_changed(session, at);
  } else {
    qkvi_session_looked(session, at);
  }
  return in_use;
}

uint64_t qkv_session_evict(qkv_session *session, uint64_t bytes, bool wait) {
  uint64_t freed = 0;
  bool in_use = false;
  if (qkv_session_config_of(session)->backing == NULL || !qkvi_session_has_layers(session)) return 0;
  const uint32_t layers = qkv_session_model(session)->layers, last = qkv_session_last_layer(session);
  for (uint32_t i = 1; i <= layers && freed < bytes; i++)
    in_use |= evict_layer(session, (last + layers - i) % layers, wait ? READ : TRY_READ, bytes, &freed);
  for (uint32_t i = 1; i <= layers && wait && in_use && freed < bytes; i++)
    (void)evict_layer(session, (last + layers - i) % layers, WRITE, bytes, &freed);
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

bool qkv_session_has_pins(qkv_session *session) {
  if (!qkvi_session_has_layers(session)) return false;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++) {
    if (atomic_load(qkvi_session_pins(session, i)) > 0) return true;
  }
  return false;
}

static uint64_t first_append_cost(qkv_session *session, uint32_t index, uint64_t end) {
  qkv_layer layer;
  if (qkv_session_is_folded(session)) return qkv_session_unfold_cost(session);  // its layers could not be made
  qkvi_session_init_layer(session, index, &layer);
  const uint64_t cost = qkv_layer_append_cost(&layer, end);
  qkv_layer_deinit(&layer);
  return qkvi_session_layers_cost(session) + cost;
}

uint64_t qkv_session_append_cost(qkv_session *session, uint32_t layer, uint64_t end) {
  if (!qkvi_session_needs_layers(session)) return first_append_cost(session, layer, end);
  const uint64_t cost = qkv_layer_append_cost(qkvi_session_look(session, layer), end);
  qkv_session_read_done(session, layer);
  return cost;
}

size_t qkv_session_missing(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full,
                           qkv_missing_page *out, size_t max) {
  if (!qkvi_session_needs_layers(session)) return 0;
  const size_t count = qkv_layer_missing(qkvi_session_look(session, layer), begin, end, full, out, max);
  qkv_session_read_done(session, layer);
  return count;
}

size_t qkv_session_missing_shared(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full,
                                  const void **out, size_t max) {
  if (!qkvi_session_needs_layers(session)) return 0;
  const size_t count = qkv_layer_missing_shared(qkvi_session_look(session, layer), begin, end, full, out, max);
  qkv_session_read_done(session, layer);
  return count;
}

uint64_t qkv_session_missing_bytes(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full) {
  if (!qkvi_session_needs_layers(session)) return 0;
  const uint64_t bytes = qkv_layer_missing_bytes(qkvi_session_look(session, layer), begin, end, full);
  qkv_session_read_done(session, layer);
  return bytes;
}

static qkv_status restore_cold(qkv_session *session, uint32_t layer, uint64_t *reservation,
                               const qkv_missing_page *pages, void **images, size_t count, size_t *failed,
                               qkv_error *error) {
  qkv_status status = QKV_OK;
  const qkv_layer *reading = qkvi_session_look(session, layer);
  for (size_t i = 0; i < count && status == QKV_OK; i++) {
    *failed = i;
    status = qkv_layer_restore(reading, reservation, &pages[i], &images[i], error);
  }
  qkvi_session_looked(session, layer);
  return status;
}

// Readers may have the image that is to be replaced, so they are waited for, once for all pages.
static qkv_status restore_full(qkv_session *session, uint32_t layer, uint64_t *reservation,
                               const qkv_missing_page *pages, void **images, uint32_t *bytes, size_t count,
                               size_t *failed, qkv_error *error) {
  qkv_status status = QKV_OK;
  qkv_layer *changing = qkvi_session_change(session, layer);
  for (size_t i = 0; i < count && status == QKV_OK; i++) {
    *failed = i;
    if (!qkv_page_is_cold(&pages[i]))
      status = qkv_layer_restore_full(changing, reservation, &pages[i], &images[i], &bytes[i], error);
  }
  qkvi_session_changed(session, layer);
  return status;
}

qkv_status qkv_session_restore(qkv_session *session, uint32_t layer, uint64_t *reservation,
                               const qkv_missing_page *pages, void **images, size_t count, size_t *failed,
                               qkv_error *error) {
  uint32_t bytes[QKV_RESTORE_PAGES];
  bool all_cold = true;
  assert(count >= 1 && count <= QKV_RESTORE_PAGES);
  for (size_t i = 0; i < count; i++) {
    bytes[i] = pages[i].bytes;
    all_cold &= qkv_page_is_cold(&pages[i]);
  }
  qkv_status status = restore_cold(session, layer, reservation, pages, images, count, failed, error);
  if (status == QKV_OK && !all_cold)
    status = restore_full(session, layer, reservation, pages, images, bytes, count, failed, error);
  for (size_t i = 0; i < count; i++) {
    qkv_arena_free_overhead(qkvi_session_arena(session), images[i], bytes[i]);
    images[i] = NULL;
  }
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
