#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/histogram.h"
#include "engine/base/yield.h"
#include "engine/cache/attend_internal.h"
#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_spill.h"
#include "engine/cache/session_share.h"

uint64_t qkvi_seal_cost(const qkv_layer *layer) {
  return qkv_arena_cost(layer->coder->codec->page_bytes_max(layer->coder)) + qkvi_ema_cost(layer);
}

void qkvi_seal_begin(const qkv_layer *layer, qkvi_seal_scratch *scratch) {
  const qkv_model *model = layer->config.model;
  const size_t rows = (size_t)QKV_PAGE_TOKENS * model->kv_heads;
  *scratch = (qkvi_seal_scratch){.image_bytes = qkv_arena_cost(layer->coder->codec->page_bytes_max(layer->coder)),
                                 .watch = layer->watch};
  scratch->image = aligned_alloc(QKV_ARENA_ALIGN, scratch->image_bytes);
  scratch->narrow = layer->config.quality == NULL ? NULL : aligned_alloc(QKV_ARENA_ALIGN, scratch->image_bytes);
  assert(scratch->image != NULL && (scratch->narrow != NULL || layer->config.quality == NULL));
  scratch->k = malloc(rows * (model->key_dim + model->value_dim) * sizeof *scratch->k);
  assert(scratch->k != NULL);
  scratch->v = scratch->k + rows * model->key_dim;
}

void qkvi_seal_end(qkvi_seal_scratch *scratch) {
  free(scratch->rows);
  free(scratch->image);
  free(scratch->narrow);
  free(scratch->k);
}

static float *floats(size_t count) {
  float *made = calloc(count, sizeof *made);
  assert(made != NULL);
  return made;
}

// Attends the sampled queries to all that the layer holds, the page's rows still being in the tail.
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

// False where not all of the layer is in memory: then no tiers are selected.
static bool ask_held(const qkv_layer *layer, const float *queries, size_t tokens, float *out, float *lse) {
  qkvi_layer_look(layer);
  const bool held = qkv_layer_holds(layer, layer->config.first_position, layer->sealed);
  if (held) ask_all(layer, queries, tokens, out, lse);
  qkvi_layer_looked(layer);
  return held;
}

// Codes the new page once more, at the lowest tiers within the session's quality contract, to scratch->narrow.
// Returns its bytes; 0: the page keeps its tiers.
static size_t judge(const qkv_layer *layer, qkvi_seal_scratch *scratch) {
  const qkv_model *model = layer->config.model;
  const size_t rows = (size_t)2 * QKV_QUALITY_TOKENS * model->q_heads;
  if (layer->config.quality == NULL) return 0;
  float *queries = floats(rows * (model->key_dim + model->value_dim + 1));
  float *out = queries + rows * model->key_dim, *lse = out + rows * model->value_dim;
  size_t bytes = 0;
  const size_t tokens =
      qkv_quality_gather(layer->config.quality,
                         layer->sealed + QKV_PAGE_TOKENS - 1 + (uint64_t)layer->config.policy.recent_window, queries);
  if (tokens > 0 && ask_held(layer, queries, tokens, out, lse)) {
    const qkv_quality_page page = {.coder = layer->coder,
                                   .page = scratch->image,
                                   .k = scratch->k,
                                   .v = scratch->v,
                                   .held = layer->length - layer->config.first_position,
                                   .tokens = tokens,
                                   .queries = queries,
                                   .out = out,
                                   .lse = lse};
    bytes = qkv_quality_judge(layer->config.quality, &page, scratch->narrow);
  }
  free(queries);
  return bytes;
}

// Codes the rows of a block, from `position` on, to `scratch`: to scratch->narrow where planes were dropped, then
// `*narrow` is true. Returns the image's bytes.
static size_t encode(const qkv_layer *layer, qkvi_seal_scratch *scratch, uint64_t position, void *block,
                     size_t tokens, bool *narrow) {
  const qkv_model *model = layer->config.model;
  const qkv_coder *coder = layer->coder;
  const size_t rows = tokens * model->kv_heads;
  const void *k = qkvi_block_row(model, block, QKV_K, 0, 0), *v = qkvi_block_row(model, block, QKV_V, 0, 0);
  const bool learns = model->learner != NULL && layer->config.policy.learn && coder->codec->calibrated;
  if (learns || layer->config.quality != NULL) {
    qkv_to_float(model->dtype, k, scratch->k, rows * model->key_dim);
    qkv_to_float(model->dtype, v, scratch->v, rows * model->value_dim);
  }
  // Only bulk work waits for helpers, which yield, too, and may lose their processor in the middle of a head.
  qkv_pool *pool = qkv_yield_enabled() ? layer->config.pool : NULL;
  const uint64_t began = qkv_stage_now();
  const qkv_row_page page = {coder, position, scratch->token, scratch->following, k, v};
  size_t bytes = 0;
  if (scratch->encoder == NULL || !scratch->encoder->encode(scratch->encoder, &page, scratch->image, &bytes))
    bytes = coder->codec->encode(coder, position, (uint32_t)tokens, model->dtype, k, v, pool, scratch->image);
  qkv_stage_add(QKV_STAGE_ENCODE, began);
  if (learns) {
    qkv_learner_page(model->learner, layer->config.layer, position, (uint32_t)tokens, scratch->k, scratch->v, coder,
                     scratch->image, &scratch->watch);
  }
  assert(layer->config.quality == NULL || position == layer->sealed);
  const size_t narrow_bytes = tokens == QKV_PAGE_TOKENS ? judge(layer, scratch) : 0;
  *narrow = narrow_bytes > 0;
  assert(!*narrow || scratch->narrow != NULL);
  return *narrow ? narrow_bytes : bytes;
}

// `ema` is the arena's block for its averages; NULL: none are kept.
static void add_page(qkv_layer *layer, const qkvi_seal_scratch *scratch, const qkv_page_entry *entry, void *ema) {
  qkvi_layer_add_page(layer, entry);
  if (ema != NULL) (void)qkvi_layer_put_ema(layer, layer->page_count - 1, ema);
  layer->sealed += entry->tokens;
  layer->watch = scratch->watch;
}

static qkv_page_entry new_entry(const qkv_layer *layer, uint64_t position, size_t tokens) {
  return (qkv_page_entry){
      .coder = layer->coder, .tokens = (uint32_t)tokens, .position = position, .serial = qkvi_serial_next()};
}

// A block coded into memory of the arena that has been reserved.
static void code_block(const qkv_layer *layer, qkvi_seal_scratch *scratch, void *block, qkv_page_entry *entry) {
  bool narrow;
  entry->bytes = (uint32_t)encode(layer, scratch, entry->position, block, QKV_PAGE_TOKENS, &narrow);
  void *page = qkv_arena_alloc(layer->config.arena, entry->bytes);
  memcpy(page, narrow ? scratch->narrow : scratch->image, entry->bytes);
  qkv_arena_unreserve(layer->config.arena, qkv_arena_cost(scratch->image_bytes) - qkv_arena_cost(entry->bytes));
  entry->page = page;
  entry->lost = narrow;
}

void qkvi_seal_page(const qkv_layer *layer, qkvi_seal_scratch *scratch, uint64_t position, qkv_tail_block *block,
                    qkv_page_entry *entry) {
  const qkvi_block_page wanted = {.calibration = layer->coder->calibration, .tokens = QKV_PAGE_TOKENS};
  *entry = new_entry(layer, position, QKV_PAGE_TOKENS);
  // A contract's pages depend on the session's own queries.
  const bool share = layer->config.quality == NULL;
  const void *made = share ? qkvi_block_sealed(block, &wanted, &entry->bytes, &entry->page_holders) : NULL;
  if (made != NULL) {
    entry->page = made;
    qkv_arena_unreserve(layer->config.arena, qkv_arena_cost(scratch->image_bytes));
    return;
  }
  if (share && qkvi_page_take(layer->offers, position, wanted.calibration, entry)) {
    qkv_arena_unreserve(layer->config.arena, qkv_arena_cost(scratch->image_bytes));
  } else {
    code_block(layer, scratch, block->rows, entry);
  }
  if (share) qkvi_block_offer(block, &wanted, entry->page, entry->bytes, &entry->page_holders);
}

void qkvi_seal_put(qkv_layer *layer, const qkvi_seal_scratch *scratch, const qkv_page_entry *entry) {
  void *ema = NULL;
  assert(entry->position == layer->sealed);
  if (layer->clock != NULL) ema = qkv_arena_alloc(layer->config.arena, qkv_ema_bytes(layer->config.model->kv_heads));
  add_page(layer, scratch, entry, ema);
}

// ---- The whole tail ----

static void encode_tail(const qkv_layer *layer, qkvi_seal_scratch *scratch, qkv_page_entry *entry) {
  bool narrow;
  entry->bytes = (uint32_t)encode(layer, scratch, layer->sealed, layer->tail[0].rows, (size_t)entry->tokens, &narrow);
  entry->lost = narrow;
}

// Codes a shared block that no other layer has coded yet. Its rows stay for the others, so the page is an overdraft.
static qkv_status code_shared(const qkv_layer *layer, qkvi_seal_scratch *scratch, qkv_page_entry *entry,
                              qkv_error *error) {
  qkv_arena *arena = layer->config.arena;
  encode_tail(layer, scratch, entry);
  QKV_TRY(qkv_arena_overdraw(arena, qkv_arena_cost(entry->bytes), error));
  void *page = qkv_arena_alloc(arena, entry->bytes);
  memcpy(page, entry->lost ? scratch->narrow : scratch->image, entry->bytes);
  entry->page = page;
  return QKV_OK;
}

// The page of a block that other layers have or had, made or found, and a reservation for its averages. All layers
// get the same page, unless it depends on a session's own queries.
static qkv_status prepare_shared(qkv_layer *layer, qkvi_seal_scratch *scratch, qkv_page_entry *entry,
                                 qkv_error *error) {
  qkv_arena *arena = layer->config.arena;
  qkv_tail_block *block = &layer->tail[0];
  const bool share = layer->config.quality == NULL;
  const qkvi_block_page wanted = {.calibration = layer->coder->calibration, .tokens = entry->tokens};
  qkv_status status = QKV_OK;
  QKV_TRY(qkv_arena_overdraw(arena, qkvi_ema_cost(layer), error));
  entry->page = share ? qkvi_block_sealed(block, &wanted, &entry->bytes, &entry->page_holders) : NULL;
  if (entry->page != NULL) return QKV_OK;
  status = code_shared(layer, scratch, entry, error);
  if (share) qkvi_block_offer(block, &wanted, entry->page, entry->bytes, &entry->page_holders);
  if (status != QKV_OK) qkv_arena_unreserve(arena, qkvi_ema_cost(layer));
  return status;
}

// The budget is usually full here, so the page takes its rows' place in it.
static qkv_status replace_own(qkv_layer *layer, const qkvi_seal_scratch *scratch, qkv_page_entry *entry, void **ema,
                              qkv_error *error) {
  qkv_arena *arena = layer->config.arena;
  const size_t block_bytes = qkvi_block_bytes(layer->config.model);
  QKV_TRY(qkv_arena_recount(arena, NULL, block_bytes, qkv_arena_cost(entry->bytes) + qkvi_ema_cost(layer), error));
  void *page = qkv_arena_alloc_overhead(arena, entry->bytes);
  memcpy(page, entry->lost ? scratch->narrow : scratch->image, entry->bytes);
  entry->page = page;
  if (layer->clock != NULL) *ema = qkv_arena_alloc_overhead(arena, qkv_ema_bytes(layer->config.model->kv_heads));
  qkv_arena_free_overhead(arena, layer->tail[0].rows, block_bytes);
  return QKV_OK;
}

static void replace_shared(qkv_layer *layer, void **ema) {
  if (layer->clock != NULL) *ema = qkv_arena_alloc(layer->config.arena, qkv_ema_bytes(layer->config.model->kv_heads));
  qkvi_block_leave(layer, &layer->tail[0]);
}

// With the layer locked for writing: replaces the first block's rows by their page.
static qkv_status replace_block(qkv_layer *layer, const qkvi_seal_scratch *scratch, bool shared,
                                qkv_page_entry *entry, qkv_error *error) {
  void *ema = NULL;
  if (shared)
    replace_shared(layer, &ema);
  else
    QKV_TRY(replace_own(layer, scratch, entry, &ema, error));
  layer->tail_count--;
  memmove(layer->tail, layer->tail + 1, layer->tail_count * sizeof *layer->tail);
  add_page(layer, scratch, entry, ema);
  return QKV_OK;
}

// `last`: no other one follows at once.
static qkv_status seal_block(qkv_layer *layer, qkvi_seal_scratch *scratch, size_t tokens, bool last,
                             qkv_error *error) {
  const bool shared = layer->tail[0].share != NULL;  // or was: there may be a page
  qkv_page_entry entry = new_entry(layer, layer->sealed, tokens);
  qkv_status status = QKV_OK;
  if (shared)
    status = prepare_shared(layer, scratch, &entry, error);
  else
    encode_tail(layer, scratch, &entry);
  qkvi_layer_enter(layer);
  if (status == QKV_OK) status = replace_block(layer, scratch, shared, &entry, error);
  qkvi_layer_leave(layer, status != QKV_OK || last);
  return status;
}

qkv_status qkv_layer_seal(qkv_layer *layer, qkv_error *error) {
  return qkv_layer_seal_pages(layer, SIZE_MAX, error);
}

qkv_status qkv_layer_seal_pages(qkv_layer *layer, size_t pages, qkv_error *error) {
  qkv_status status = QKV_OK;
  if (layer->sealed == layer->length || qkv_codec_is_exact(layer->coder->codec)) return QKV_OK;
  qkvi_seal_scratch scratch;
  qkvi_seal_begin(layer, &scratch);
  for (; layer->sealed < layer->length && pages > 0 && status == QKV_OK; pages--) {
    const uint64_t left = layer->length - layer->sealed;
    const size_t tokens = left < QKV_PAGE_TOKENS ? (size_t)left : QKV_PAGE_TOKENS;
    status = seal_block(layer, &scratch, tokens, tokens == left || pages == 1, error);
  }
  qkvi_seal_end(&scratch);
  return status;
}
