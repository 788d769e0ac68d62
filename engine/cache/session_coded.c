#include "engine/cache/session_coded.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_spill.h"
#include "engine/cache/session_fold.h"
#include "engine/cache/session_internal.h"

// Pages on their way into a layer, with the codings that keep their coders alive until the session does.
typedef struct incoming {
  qkv_session *session;
  uint32_t layer;
  const qkv_incoming_page *pages;
  size_t count;
  const qkv_append_use *use;
  qkv_coding **codings;   // [count], a reference each
  qkv_coded_page *coded;  // [count]
} incoming;

static qkv_status validate(const incoming *all, size_t i, qkv_error *error) {
  const qkv_incoming_page *page = &all->pages[i];
  qkv_coded_page *coded = &all->coded[i];
  const qkv_session_config *config = qkv_session_config_of(all->session);
  assert((uintptr_t)page->image % QKV_ARENA_ALIGN == 0);
  all->codings[i] =
      qkv_coding_get(qkv_session_model(all->session), &config->policy, config->purpose, page->calibration);
  const qkv_calibration *known = qkv_coding_calibration(all->codings[i]);  // by its version
  if (known != NULL && qkv_calibration_hash(known) != qkv_calibration_hash(page->calibration))
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "pages[%zu].image has calibration %" PRIu32 ", which the session has with other content", i,
                    qkv_calibration_version(known));
  const qkv_coder *coder = qkv_coding_layer(all->codings[i], all->layer);
  if (qkv_codec_is_exact(coder->codec))
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "pages is set, layer %" PRIu32 " keeps exact rows", all->layer);
  qkv_error reason = {0};
  if (coder->codec->validate(coder, page->image, page->bytes, &reason) != QKV_OK)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages[%zu].image is refused: %s", i, reason.text);
  const qkv_page_header *header = page->image;
  *coded = (qkv_coded_page){.image = page->image,
                            .bytes = header->bytes,
                            .tokens = page->tokens,
                            .position = header->position,
                            .coder = coder};
  return QKV_OK;
}

static qkv_status validate_all(const incoming *all, uint64_t position, qkv_error *error) {
  for (size_t i = 0; i < all->count; i++) QKV_TRY(validate(all, i, error));
  if (all->coded[0].position == position) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages[0].image begins at position %" PRIu64 ", position is %" PRIu64,
                  all->coded[0].position, position);
}

static qkv_row_ids row_ids(const incoming *all) {
  qkv_row_ids ids = {.position = all->coded[0].position, .ids = all->use->ids};
  for (size_t i = 0; i < all->count && all->use->ids != NULL; i++) ids.count += all->coded[i].tokens;
  return ids;
}

// The session gets the codings before its layer has pages of them.
static qkv_status append(const incoming *all, uint64_t *appended, uint64_t *length, qkv_error *error) {
  qkvi_row_change change;
  if (qkvi_session_begin_append(all->session, all->layer, all->use, &change) == NULL) return QKV_UNAVAILABLE;
  qkv_layer *layer = qkvi_session_change(all->session, all->layer);
  qkvi_session_use_codings(all->session);
  for (size_t i = 0; i < all->count; i++) (void)qkvi_session_coding(all->session, all->pages[i].calibration);
  const qkv_status status = qkv_layer_append_pages(layer, all->coded, all->count, appended, error);
  *length = layer->length;
  qkvi_session_codings_used(all->session);
  // Pages that do not fit there now are given again later (session_spill.h).
  const qkv_row_ids ids = row_ids(all);
  (void)qkv_layer_save_with(layer, &ids);
  qkvi_session_changed(all->session, all->layer);
  qkvi_session_end_rows(&change);
  return status;
}

qkv_status qkv_session_append_pages(qkv_session *session, uint32_t layer, const qkv_append_use *use,
                                    uint64_t position, const qkv_incoming_page *pages, size_t count,
                                    uint64_t *appended, uint64_t *length, qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  assert(count > 0);
  *appended = *length = 0;
  if (layer >= model->layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers", layer,
                    model->name, model->layers);
  QKV_TRY(qkvi_session_make_layers(session, use->headroom, error));
  qkv_session_touch(session);
  const incoming all = {.session = session,
                        .layer = layer,
                        .pages = pages,
                        .count = count,
                        .use = use,
                        .codings = calloc(count, sizeof(qkv_coding *)),
                        .coded = calloc(count, sizeof(qkv_coded_page))};
  if (all.codings == NULL || all.coded == NULL) abort();
  qkv_status status = validate_all(&all, position, error);
  if (status == QKV_OK) status = append(&all, appended, length, error);
  for (size_t i = 0; i < count; i++) qkv_coding_unref(&all.codings[i]);
  free((void *)all.codings);
  free(all.coded);
  return status;
}

uint64_t qkv_session_pages_cost(qkv_session *session, uint32_t layer, const qkv_incoming_page *pages, size_t count) {
  (void)layer;
  uint64_t cost = qkvi_session_is_new(session) ? qkvi_session_layers_cost(session) : qkv_session_unfold_cost(session);
  for (size_t i = 0; i < count; i++) cost += qkv_arena_cost(pages[i].bytes);
  return cost;
}
