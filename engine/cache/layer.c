#include "engine/cache/layer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_internal.h"

void qkv_layer_init(qkv_layer *layer, const qkv_layer_config *config, const qkv_coder *coder) {
  assert(config->first_position <= QKV_POSITION_MAX && config->policy.recent_window >= 0);
  *layer = (qkv_layer){
      .config = *config, .coder = coder, .sealed = config->first_position, .length = config->first_position};
  layer->clock = qkv_ema_clock_create(&config->ema, config->model->kv_heads);
}

static void cut(qkv_layer *layer, uint64_t position);

void qkv_layer_deinit(qkv_layer *layer) {
  layer->config.backing = NULL;  // which keeps what it has
  cut(layer, layer->config.first_position);
  assert(layer->bytes_coded == 0 && layer->bytes_beside == 0);
  qkv_ema_clock_destroy(&layer->clock);
  free(layer->pages);
  free((void *)layer->tail);
  *layer = (qkv_layer){0};
}

size_t qkv_layer_page_at(const qkv_layer *layer, uint64_t position) {
  size_t low = 0, high = layer->page_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    const qkv_page_entry *entry = &layer->pages[middle];
    if (entry->position + entry->tokens > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The first page whose range is `range` or a later one.
static size_t range_begin(const qkv_layer *layer, size_t range) {
  size_t low = 0, high = layer->page_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (layer->pages[middle].range >= range) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void qkv_layer_range(const qkv_layer *layer, size_t range, size_t *first, size_t *end) {
  *first = range_begin(layer, range);
  *end = range_begin(layer, range + 1);
  assert(*first < *end);
}

const void *qkv_layer_exact_row(const qkv_layer *layer, qkv_part part, uint64_t position, uint32_t kv_head) {
  assert(position >= layer->sealed && position < layer->length);
  uint64_t offset = position - layer->sealed;
  return qkvi_block_row(layer->config.model, layer->tail[offset / QKV_PAGE_TOKENS], part, offset % QKV_PAGE_TOKENS,
                        kv_head);
}

// ---- Truncation ----

static void drop_blocks(qkv_layer *layer, uint64_t kept) {
  while (layer->tail_count > kept) {
    void *block = layer->tail[--layer->tail_count];
    qkv_arena_free(layer->config.arena, block, qkvi_block_bytes(layer->config.model));
  }
}

static void drop_beside(qkv_layer *layer, const qkv_page_entry *entry) {
  qkv_arena *arena = layer->config.arena;
  layer->bytes_beside -= qkvi_beside_bytes(layer, entry);
  if (entry->full != NULL) qkv_arena_free(arena, (void *)entry->full, entry->full_bytes);
  if (entry->ema != NULL) qkv_arena_free(arena, entry->ema, qkv_ema_bytes(layer->config.model->kv_heads));
}

static void drop_page(qkv_layer *layer, const qkv_page_entry *entry) {
  const qkv_backing *backing = layer->config.backing;
  drop_beside(layer, entry);
  layer->bytes_stored -= entry->record_bytes;
  if (backing != NULL && entry->record != 0) backing->drop(backing->context, entry->record);
  if (entry->page == NULL) {
    layer->tokens_cold -= entry->tokens;
    return;
  }
  layer->bytes_coded -= qkv_arena_cost(entry->bytes);
  qkv_arena_free(layer->config.arena, (void *)entry->page, entry->bytes);
}

static void drop_pages(qkv_layer *layer, uint64_t position) {
  while (layer->page_count > 0) {
    qkv_page_entry *last = &layer->pages[layer->page_count - 1];
    if (last->position < position) {
      const uint32_t tokens = (uint32_t)(position - last->position);
      if (last->page == NULL) layer->tokens_cold -= last->tokens - tokens;
      last->tokens = tokens;
      break;
    }
    drop_page(layer, last);
    layer->page_count--;
  }
  if (layer->saved > layer->page_count) layer->saved = layer->page_count;
  if (layer->settled > layer->saved) layer->settled = layer->saved;
}

void qkv_layer_truncate(qkv_layer *layer, uint64_t position) {
  const qkv_backing *backing = layer->config.backing;
  if (position >= layer->length) return;
  if (position < layer->config.first_position) position = layer->config.first_position;
  if (backing != NULL && position < layer->sealed)
    backing->cut(backing->context, layer->config.session, layer->config.layer, position);
  cut(layer, position);
}

// What is behind `position`, which is not beyond the length.
static void cut(qkv_layer *layer, uint64_t position) {
  layer->length = position;
  if (position < layer->sealed) {
    drop_pages(layer, position);
    layer->sealed = position;
  }
  drop_blocks(layer, qkvi_blocks(layer->length - layer->sealed));
}

// ---- Rows ----

typedef struct row_copy {
  const qkv_layer *layer;
  qkv_part part;
  uint32_t dim;
  uint64_t begin, end;  // positions
  bool before_rope;
  float *out;  // [end - begin][kv_heads][dim]
} row_copy;

static float *out_row(const row_copy *copy, uint64_t position, uint32_t kv_head) {
  size_t row = (size_t)(position - copy->begin) * copy->layer->config.model->kv_heads + kv_head;
  return copy->out + row * copy->dim;
}

static void copy_page(const row_copy *copy, const qkv_page_entry *entry, float *rows) {
  const qkv_layer *layer = copy->layer;
  assert(entry->page != NULL);
  uint64_t begin = copy->begin > entry->position ? copy->begin : entry->position;
  uint64_t end = entry->position + entry->tokens;
  if (end > copy->end) end = copy->end;
  for (uint32_t head = 0; head < layer->config.model->kv_heads; head++) {
    entry->coder->codec->decode(entry->coder, entry->page, (uint16_t)head, copy->part, copy->before_rope, rows);
    for (uint64_t position = begin; position < end; position++) {
      memcpy(out_row(copy, position, head), rows + (position - entry->position) * copy->dim,
             copy->dim * sizeof *rows);
    }
  }
}

static void copy_pages(const row_copy *copy) {
  const qkv_layer *layer = copy->layer;
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  for (size_t i = qkv_layer_page_at(layer, copy->begin); i < layer->page_count; i++) {
    if (layer->pages[i].position >= copy->end) break;
    copy_page(copy, &layer->pages[i], rows);
  }
}

static void copy_tail(const row_copy *copy) {
  const qkv_layer *layer = copy->layer;
  const qkv_model *model = layer->config.model;
  uint64_t position = copy->begin > layer->sealed ? copy->begin : layer->sealed;
  for (; position < copy->end; position++) {
    for (uint32_t head = 0; head < model->kv_heads; head++) {
      float *row = out_row(copy, position, head);
      qkv_to_float(model->dtype, qkv_layer_exact_row(layer, copy->part, position, head), row, copy->dim);
      if (copy->before_rope) qkv_rope_inverse(&model->rope, row, position);
    }
  }
}

void qkv_layer_rows(const qkv_layer *layer, qkv_part part, uint64_t begin, uint64_t tokens, bool before_rope,
                    float *out) {
  assert(begin >= layer->config.first_position && begin <= layer->length && tokens <= layer->length - begin);
  const qkv_model *model = layer->config.model;
  row_copy copy = {.layer = layer,
                   .part = part,
                   .dim = qkvi_part_dim(model, part),
                   .begin = begin,
                   .end = begin + tokens,
                   .before_rope = before_rope && part == QKV_K && model->rope.theta != 0,
                   .out = out};
  if (begin < layer->sealed) copy_pages(&copy);
  copy_tail(&copy);
}

// ---- Usage and invariants ----

qkv_layer_usage qkv_layer_read_usage(const qkv_layer *layer) {
  const qkv_quality *quality = layer->config.quality;
  return (qkv_layer_usage){.watch = layer->watch,
                           .quality = quality == NULL ? (qkv_quality_stats){0} : qkv_quality_read(quality),
                           .tokens_coded = layer->sealed - layer->config.first_position,
                           .tokens_exact = layer->length - layer->sealed,
                           .bytes_coded = layer->bytes_coded,
                           .bytes_beside = layer->bytes_beside,
                           .tokens_cold = layer->tokens_cold,
                           .bytes_stored = layer->bytes_stored,
                           .bytes_exact = layer->tail_count * qkv_arena_cost(qkvi_block_bytes(layer->config.model))};
}

uint64_t qkv_layer_durable(const qkv_layer *layer) {
  if (layer->settled == 0) return layer->config.first_position;
  const qkv_page_entry *last = &layer->pages[layer->settled - 1];
  return last->position + last->tokens;
}

static const char *validate_cold(const qkv_page_entry *entry) {
  if (entry->tokens < 1 || entry->tokens > QKV_PAGE_TOKENS) return "a page has no tokens, or too many";
  if (entry->record == 0) return "a page has neither an image nor a record";
  if (entry->full != NULL) return "a cold page has a full image";
  return entry->bytes == entry->record_bytes ? NULL : "a cold page's bytes are not its record's";
}

static const char *validate_page(const qkv_layer *layer, const qkv_page_entry *entry, uint64_t position) {
  if (entry->position != position) return "a page does not begin where the one before ends";
  if (entry->record == 0 && entry->record_bytes != 0) return "a page without a record has bytes of one";
  if (entry->page == NULL) return validate_cold(entry);
  if (entry->coder->codec->validate(entry->coder, entry->page, entry->bytes, NULL) != QKV_OK)
    return "a page's image is damaged";
  const qkv_page_header *header = entry->page;
  if (header->position != entry->position) return "a page's image has another position";
  if (header->layer != layer->config.layer) return "a page's image has another layer";
  if (entry->tokens < 1 || entry->tokens > header->tokens) return "a page holds fewer tokens than are valid";
  if ((entry->ema != NULL) != (layer->clock != NULL)) return "a page has averages where attention is not counted";
  if (entry->serial >= layer->next_serial) return "a page's serial is one of the future";
  if (entry->full == NULL) return NULL;
  if (!layer->config.keep_full) return "a page is kept in full, which is not wanted";
  if (entry->coder->codec->validate(entry->coder, entry->full, entry->full_bytes, NULL) != QKV_OK)
    return "a full page's image is damaged";
  return NULL;
}

static const char *validate_tail(const qkv_layer *layer) {
  if (layer->length < layer->sealed) return "length is below sealed";
  uint64_t exact = layer->length - layer->sealed;
  if (layer->tail_count != qkvi_blocks(exact)) return "the tail has not as many blocks as its tokens need";
  if (layer->tail_count > layer->tail_capacity) return "the tail is longer than its array";
  if (!qkv_codec_is_exact(layer->coder->codec) &&
      exact >= QKV_PAGE_TOKENS + (uint64_t)layer->config.policy.recent_window) {
    return "a page was not sealed";
  }
  for (size_t i = 0; i < layer->tail_count; i++) {
    if (layer->tail[i] == NULL) return "a block of the tail is missing";
  }
  return NULL;
}

const char *qkv_layer_validate(const qkv_layer *layer) {
  uint64_t position = layer->config.first_position, bytes = 0, beside = 0, stored = 0, cold = 0;
  size_t next_range = 0, in_range = 0;
  if (layer->page_count > layer->page_capacity) return "the page table is longer than its array";
  for (size_t i = 0; i < layer->page_count; i++) {
    const char *reason = validate_page(layer, &layer->pages[i], position);
    if (reason != NULL) return reason;
    if (layer->pages[i].range != next_range) {
      if (layer->pages[i].range != ++next_range) return "a page's range is not the one that follows";
      in_range = 0;
    }
    if (++in_range > QKV_RANGE_PAGES) return "a range has too many pages";
    if (in_range > 1 && layer->pages[i].coder != layer->pages[i - 1].coder) return "a range has two coders";
    position += layer->pages[i].tokens;
    bytes += layer->pages[i].page != NULL ? qkv_arena_cost(layer->pages[i].bytes) : 0;
    cold += layer->pages[i].page != NULL ? 0 : layer->pages[i].tokens;
    stored += layer->pages[i].record_bytes;
    beside += qkvi_beside_bytes(layer, &layer->pages[i]);
  }
  if (position != layer->sealed) return "the pages do not end at sealed";
  if (bytes != layer->bytes_coded) return "bytes_coded is not the sum of the pages";
  if (beside != layer->bytes_beside) return "bytes_beside is not the sum of what the pages have beside them";
  if (stored != layer->bytes_stored) return "bytes_stored is not the sum of the records";
  if (cold != layer->tokens_cold) return "tokens_cold is not the sum of the cold pages' tokens";
  if (layer->settled > layer->saved || layer->saved > layer->page_count) return "more is saved than there is";
  return validate_tail(layer);
}
