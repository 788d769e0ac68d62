#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/precedence.h"
#include "engine/cache/attend_internal.h"
#include "engine/cache/layer_internal.h"

uint64_t qkvi_seal_cost(const qkv_layer *layer) {
  return qkv_arena_cost(layer->coder->codec->page_bytes_max(layer->coder)) + qkvi_ema_cost(layer);
}

void qkvi_seal_begin(const qkv_layer *layer, qkvi_seal_room *room) {
  const qkv_model *model = layer->config.model;
  const size_t rows = (size_t)QKV_PAGE_TOKENS * model->kv_heads;
  room->image_bytes = qkv_arena_cost(layer->coder->codec->page_bytes_max(layer->coder));
  room->image = aligned_alloc(QKV_ARENA_ALIGN, room->image_bytes);
  room->narrow = layer->config.quality == NULL ? NULL : aligned_alloc(QKV_ARENA_ALIGN, room->image_bytes);
  assert(room->image != NULL && (room->narrow != NULL || layer->config.quality == NULL));
  room->k = malloc(rows * (model->key_dim + model->value_dim) * sizeof *room->k);
  assert(room->k != NULL);
  room->v = room->k + rows * model->key_dim;
}

void qkvi_seal_end(qkvi_seal_room *room) {
  free(room->image);
  free(room->narrow);
  free(room->k);
}

// A range is full, or the page is of another coder than the last one.
uint32_t qkvi_layer_next_range(const qkv_layer *layer) {
  if (layer->page_count == 0) return 0;
  const qkv_page_entry *last = &layer->pages[layer->page_count - 1];
  size_t first = layer->page_count - 1;
  while (first > 0 && layer->pages[first - 1].range == last->range) first--;
  bool fits = layer->page_count - first < QKV_RANGE_PAGES && last->coder == layer->coder;
  return last->range + (fits ? 0 : 1);
}

qkv_ema *qkvi_layer_new_ema(const qkv_layer *layer) {
  if (layer->clock == NULL) return NULL;
  const uint32_t heads = layer->config.model->kv_heads;
  qkv_ema *ema = qkv_arena_alloc(layer->config.arena, qkv_ema_bytes(heads));
  qkv_ema_init(ema, heads, qkv_ema_clock_now(layer->clock));
  return ema;
}

static float *floats(size_t count) {
  float *made = calloc(count, sizeof *made);
  assert(made != NULL);
  return made;
}

// What the judge's queries get from all that the layer holds, the page's rows still being in the tail.
static void ask_all(const qkv_layer *layer, const float *queries, size_t tokens, float *out, float *lse) {
  const qkv_model *model = layer->config.model;
  const uint64_t window = qkv_model_window(model, layer->config.layer);
  const uint64_t end = layer->sealed + QKV_PAGE_TOKENS;
  const qkv_segment segment = {.data = (const uint8_t *)queries,
                               .length = tokens * model->q_heads * model->key_dim * sizeof *queries};
  const qkv_attend request = {
      .layer = layer,
      .q = qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){(int64_t)tokens, model->q_heads, model->key_dim}, &segment),
      .options = {.scale = 1,
                  .begin = window != 0 && end > window ? end - window : 0,
                  .not_causal = true,
                  .precision = QKV_PRECISION_FP32},
      .out = out,
      .lse = lse};
  qkvi_attend_quietly(&request);
}

// The page that has just been coded, at the lower tiers that the session's contract allows. The bytes of it; 0: it
// stays as it is.
static size_t judge(const qkv_layer *layer, qkvi_seal_room *room) {
  const qkv_model *model = layer->config.model;
  const size_t rows = (size_t)2 * QKV_QUALITY_TOKENS * model->q_heads;
  // Without the whole layer in memory there is nothing to judge by.
  if (layer->config.quality == NULL || layer->tokens_cold > 0) return 0;
  float *queries = floats(rows * (model->key_dim + model->value_dim + 1));
  float *out = queries + rows * model->key_dim, *lse = out + rows * model->value_dim;
  size_t bytes = 0;
  const size_t tokens =
      qkv_quality_gather(layer->config.quality,
                         layer->sealed + QKV_PAGE_TOKENS - 1 + (uint64_t)layer->config.policy.recent_window, queries);
  if (tokens > 0) {
    ask_all(layer, queries, tokens, out, lse);
    const qkv_quality_page page = {.coder = layer->coder,
                                   .page = room->image,
                                   .k = room->k,
                                   .v = room->v,
                                   .held = layer->length - layer->config.first_position,
                                   .tokens = tokens,
                                   .queries = queries,
                                   .out = out,
                                   .lse = lse};
    bytes = qkv_quality_judge(layer->config.quality, &page, room->narrow);
  }
  free(queries);
  return bytes;
}

// The tail's first rows as an image in `room`, the narrow one where it is `*narrow`. Returns its bytes.
static size_t encode(qkv_layer *layer, qkvi_seal_room *room, size_t tokens, bool *narrow) {
  const qkv_model *model = layer->config.model;
  const qkv_coder *coder = layer->coder;
  const size_t rows = tokens * model->kv_heads;
  void *block = layer->tail[0];
  const void *k = qkvi_block_row(model, block, QKV_K, 0, 0), *v = qkvi_block_row(model, block, QKV_V, 0, 0);
  const bool learns = model->learner != NULL && layer->config.policy.learn;
  if (learns || layer->config.quality != NULL) {
    qkv_to_float(model->dtype, k, room->k, rows * model->key_dim);
    qkv_to_float(model->dtype, v, room->v, rows * model->value_dim);
  }
  // Only bulk work waits for helpers, who stand back, too, and may lose their processor in the middle of a head.
  qkv_pool *pool = qkv_precedence_stands_back() ? layer->config.pool : NULL;
  const size_t bytes =
      coder->codec->encode(coder, layer->sealed, (uint32_t)tokens, model->dtype, k, v, pool, room->image);
  if (learns) {
    qkv_learner_page(model->learner, layer->config.layer, layer->sealed, (uint32_t)tokens, room->k, room->v, coder,
                     room->image, &layer->watch);
  }
  const size_t narrow_bytes = tokens == QKV_PAGE_TOKENS ? judge(layer, room) : 0;
  *narrow = narrow_bytes > 0;
  assert(!*narrow || room->narrow != NULL);
  return *narrow ? narrow_bytes : bytes;
}

static void add_page(qkv_layer *layer, const void *page, size_t bytes, size_t tokens, bool narrow, qkv_ema *ema) {
  layer->pages[layer->page_count] = (qkv_page_entry){.page = page,
                                                     .coder = layer->coder,
                                                     .bytes = (uint32_t)bytes,
                                                     .tokens = (uint32_t)tokens,
                                                     .position = layer->sealed,
                                                     .range = qkvi_layer_next_range(layer),
                                                     .lost = narrow,
                                                     .ema = ema,
                                                     .serial = layer->next_serial++};
  layer->page_count++;
  layer->bytes_beside += qkvi_ema_cost(layer);
  layer->bytes_coded += qkv_arena_cost(bytes);
  layer->sealed += tokens;
}

void qkvi_seal_page(qkv_layer *layer, qkvi_seal_room *room) {
  bool narrow;
  const size_t bytes = encode(layer, room, QKV_PAGE_TOKENS, &narrow);
  void *page = qkv_arena_alloc(layer->config.arena, bytes);
  memcpy(page, narrow ? room->narrow : room->image, bytes);
  qkv_arena_unreserve(layer->config.arena, qkv_arena_cost(room->image_bytes) - qkv_arena_cost(bytes));
  add_page(layer, page, bytes, QKV_PAGE_TOKENS, narrow, qkvi_layer_new_ema(layer));
}

// ---- The whole tail ----

static qkv_ema *ema_beside(const qkv_layer *layer) {
  if (layer->clock == NULL) return NULL;
  const uint32_t heads = layer->config.model->kv_heads;
  qkv_ema *ema = qkv_arena_alloc_beside(layer->config.arena, qkv_ema_bytes(heads));
  qkv_ema_init(ema, heads, qkv_ema_clock_now(layer->clock));
  return ema;
}

// The first block's rows become a page that takes its place in the budget, which is full as a rule when this is
// wanted.
static qkv_status seal_block(qkv_layer *layer, qkvi_seal_room *room, size_t tokens, qkv_error *error) {
  const size_t block_bytes = qkvi_block_bytes(layer->config.model);
  bool narrow;
  const size_t bytes = encode(layer, room, tokens, &narrow);
  QKV_TRY(
      qkv_arena_recount(layer->config.arena, NULL, block_bytes, qkv_arena_cost(bytes) + qkvi_ema_cost(layer), error));
  void *page = qkv_arena_alloc_beside(layer->config.arena, bytes);
  memcpy(page, narrow ? room->narrow : room->image, bytes);
  qkv_arena_free_beside(layer->config.arena, layer->tail[0], block_bytes);
  layer->tail_count--;
  memmove((void *)layer->tail, (void *)(layer->tail + 1), layer->tail_count * sizeof *layer->tail);
  qkvi_layer_grow_pages(layer, layer->page_count + 1);
  add_page(layer, page, bytes, tokens, narrow, ema_beside(layer));
  return QKV_OK;
}

qkv_status qkv_layer_seal(qkv_layer *layer, qkv_error *error) {
  qkv_status status = QKV_OK;
  if (layer->sealed == layer->length || qkv_codec_is_exact(layer->coder->codec)) return QKV_OK;
  qkvi_seal_room room;
  qkvi_seal_begin(layer, &room);
  while (layer->sealed < layer->length && status == QKV_OK) {
    const uint64_t left = layer->length - layer->sealed;
    status = seal_block(layer, &room, left < QKV_PAGE_TOKENS ? (size_t)left : QKV_PAGE_TOKENS, error);
  }
  qkvi_seal_end(&room);
  return status;
}
