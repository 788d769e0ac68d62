#include "engine/cache/layer_spill.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine/cache/layer_internal.h"

qkv_record_state qkvi_layer_record_state(const qkv_layer *layer, const qkv_page_entry *entry) {
  const qkv_backing *backing = layer->config.backing;
  if (backing == NULL || entry->record == 0) return QKV_RECORD_GONE;
  return backing->state(backing->context, entry->record);
}

// ---- Writing ----

bool qkv_layer_save(qkv_layer *layer) {
  const qkv_backing *backing = layer->config.backing;
  if (backing == NULL) return true;
  for (; layer->saved < layer->page_count; layer->saved++) {
    qkv_page_entry *entry = &layer->pages[layer->saved];
    if (entry->record != 0) continue;
    assert(entry->page != NULL);
    const void *most = entry->full != NULL ? entry->full : entry->page;
    const uint32_t bytes = entry->full != NULL ? entry->full_bytes : entry->bytes;
    entry->record =
        backing->put(backing->context, layer->config.session, layer->config.model->name, most, bytes, entry->tokens);
    if (entry->record == 0) return false;
    entry->record_bytes = bytes;
    entry->record_lost = entry->lost;
    layer->bytes_stored += bytes;
  }
  return true;
}

// All at once: where one has failed others have, too, and each try takes until the page is durable.
static void put_again(qkv_layer *layer) {
  for (size_t i = layer->settled; i < layer->saved; i++) {
    qkv_page_entry *entry = &layer->pages[i];
    if (entry->page == NULL || qkvi_layer_record_state(layer, entry) != QKV_RECORD_GONE) continue;
    layer->bytes_stored -= entry->record_bytes;
    layer->config.backing->drop(layer->config.backing->context, entry->record);
    entry->record = 0;
    entry->record_bytes = 0;
  }
  layer->saved = layer->settled;
}

void qkv_layer_settle(qkv_layer *layer) {
  if (layer->config.backing == NULL) return;  // it has been closed meanwhile
  for (; layer->settled < layer->saved; layer->settled++) {
    const qkv_page_entry *entry = &layer->pages[layer->settled];
    const qkv_record_state state = qkvi_layer_record_state(layer, entry);
    if (state == QKV_RECORD_DURABLE) continue;
    if (state == QKV_RECORD_GONE && entry->page != NULL) put_again(layer);
    return;
  }
}

// ---- Out of memory ----

// Serials change, so that whoever works on the image (layer_retier.h) sees that it has gone.
static uint64_t evict_page(qkv_layer *layer, qkv_page_entry *entry) {
  qkv_arena *arena = layer->config.arena;
  uint64_t freed = qkv_arena_cost(entry->bytes);
  layer->bytes_coded -= qkv_arena_cost(entry->bytes);
  qkv_arena_free(arena, (void *)entry->page, entry->bytes);
  if (entry->full != NULL) {
    freed += qkv_arena_cost(entry->full_bytes);
    layer->bytes_beside -= qkv_arena_cost(entry->full_bytes);
    qkv_arena_free(arena, (void *)entry->full, entry->full_bytes);
  }
  entry->page = entry->full = NULL;
  entry->full_bytes = 0;
  entry->bytes = entry->record_bytes;
  entry->lost = entry->record_lost;
  entry->serial = layer->next_serial++;
  layer->tokens_cold += entry->tokens;
  return freed;
}

// A page that can leave, and the attention that its tokens receive, all heads together.
typedef struct leaving {
  size_t index;
  float heat;
} leaving;

static float heat_of(const qkv_layer *layer, const qkv_page_entry *entry, uint64_t now) {
  float values[QKV_PAGE_TOKENS], sum = 0;
  if (entry->ema == NULL) return 0;
  for (uint32_t head = 0; head < layer->config.model->kv_heads; head++) {
    qkv_ema_read(entry->ema, layer->clock, head, now, values);
    for (size_t t = 0; t < entry->tokens; t++) sum += values[t];
  }
  return sum;
}

static int coldest_first(const void *a, const void *b) {
  const leaving *left = a, *right = b;
  if (left->heat != right->heat) return left->heat < right->heat ? -1 : 1;
  return (left->index > right->index) - (left->index < right->index);
}

// Pages whose records are only written stay: an fdatasync that fails may yet take those away, and then the image is
// what they are put again from.
static size_t find_leaving(const qkv_layer *layer, bool ordered, leaving *out) {
  const uint64_t now = layer->clock == NULL ? 0 : qkv_ema_clock_now(layer->clock);
  size_t count = 0;
  for (size_t i = 0; i < layer->page_count; i++) {
    const qkv_page_entry *entry = &layer->pages[i];
    if (entry->page != NULL && qkvi_layer_record_state(layer, entry) == QKV_RECORD_DURABLE)
      out[count++] = (leaving){.index = i, .heat = ordered ? heat_of(layer, entry, now) : 0};
  }
  return count;
}

uint64_t qkv_layer_evict(qkv_layer *layer, uint64_t bytes) {
  uint64_t freed = 0;
  if (layer->bytes_coded == 0) return 0;
  leaving *pages = malloc(layer->page_count * sizeof *pages);
  if (pages == NULL) abort();
  const size_t count = find_leaving(layer, bytes < layer->bytes_coded, pages);  // unless all of them go
  qsort(pages, count, sizeof *pages, coldest_first);
  for (size_t i = 0; i < count && freed < bytes; i++) freed += evict_page(layer, &layer->pages[pages[i].index]);
  free(pages);
  return freed;
}

uint64_t qkv_layer_append_cost(const qkv_layer *layer, uint64_t end) {
  if (end <= layer->length) return 0;
  const uint64_t tokens = end - layer->length;
  const uint64_t block = qkv_arena_cost(qkvi_block_bytes(layer->config.model));
  if (qkv_codec_is_exact(layer->coder->codec)) return (qkvi_blocks(tokens) + 1) * block;
  const uint64_t window = (uint64_t)layer->config.policy.recent_window;
  return (qkvi_blocks(tokens) + 1) * qkvi_seal_cost(layer) +
         (qkvi_blocks(window < tokens ? window : tokens) + 2) * block;
}

// ---- Back into memory ----

bool qkv_layer_holds(const qkv_layer *layer, uint64_t begin, uint64_t end) {
  if (layer->tokens_cold == 0) return true;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count && layer->pages[i].position < end; i++) {
    if (layer->pages[i].page == NULL) return false;
  }
  return true;
}

static bool is_missing(const qkv_layer *layer, const qkv_page_entry *entry, bool full) {
  if (entry->page == NULL) return true;
  return full && entry->lost && !entry->record_lost && qkvi_layer_record_state(layer, entry) >= QKV_RECORD_WRITTEN;
}

size_t qkv_layer_missing(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full, qkv_missing_page *out,
                         size_t max) {
  size_t count = 0;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count && count < max; i++) {
    const qkv_page_entry *entry = &layer->pages[i];
    if (end != 0 && entry->position >= end) break;
    if (!is_missing(layer, entry, full)) continue;
    out[count++] = (qkv_missing_page){.index = i,
                                      .serial = entry->serial,
                                      .record = entry->record,
                                      .position = entry->position,
                                      .bytes = entry->record_bytes};
  }
  return count;
}

uint64_t qkv_layer_missing_bytes(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full) {
  uint64_t bytes = 0;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count; i++) {
    if (end != 0 && layer->pages[i].position >= end) break;
    if (is_missing(layer, &layer->pages[i], full)) bytes += qkv_arena_cost(layer->pages[i].record_bytes);
  }
  return bytes;
}

static qkv_status check_image(const qkv_layer *layer, const qkv_page_entry *entry, const void *image,
                              qkv_error *error) {
  QKV_TRY(entry->coder->codec->validate(entry->coder, image, entry->record_bytes, error));
  const qkv_page_header *header = image;
  if (header->position == entry->position && header->layer == layer->config.layer && header->tokens >= entry->tokens)
    return QKV_OK;
  return qkv_fail(error, QKV_DATA_LOSS, "it is the page at position %" PRIu64 " of layer %" PRIu32, header->position,
                  header->layer);
}

// `*image` becomes what was there before, or NULL, and `*bytes` what that has; else they stay.
static qkv_status put_back(qkv_layer *layer, const qkv_missing_page *page, void **image, uint32_t *bytes,
                           qkv_error *error) {
  if (page->index >= layer->page_count) return QKV_OK;
  qkv_page_entry *entry = &layer->pages[page->index];
  if (entry->serial != page->serial || entry->record != page->record) return QKV_OK;
  qkv_error reason = {0};
  if (check_image(layer, entry, *image, &reason) != QKV_OK)
    return qkv_fail(error, QKV_DATA_LOSS, "layer %" PRIu32 ": position %" PRIu64 " on the SSD is damaged: %s",
                    layer->config.layer, entry->position, reason.text);
  const bool cold = entry->page == NULL;
  QKV_TRY(qkv_arena_recount(layer->config.arena, layer->room, cold ? 0 : entry->bytes, entry->record_bytes, error));
  if (cold) {
    layer->tokens_cold -= entry->tokens;
  } else {
    layer->bytes_coded -= qkv_arena_cost(entry->bytes);
  }
  layer->bytes_coded += qkv_arena_cost(entry->record_bytes);
  void *left = (void *)entry->page;
  *bytes = entry->bytes;
  entry->page = *image;
  entry->bytes = entry->record_bytes;
  entry->lost = entry->record_lost;
  entry->serial = layer->next_serial++;
  *image = left;
  return QKV_OK;
}

qkv_status qkv_layer_restore(qkv_layer *layer, const qkv_missing_page *page, void *image, qkv_error *error) {
  uint32_t bytes = page->bytes;
  const qkv_status status = put_back(layer, page, &image, &bytes, error);
  qkv_arena_free_beside(layer->config.arena, image, bytes);
  return status;
}

// ---- Found again ----

qkv_status qkv_layer_adopt(qkv_layer *layer, const qkv_coder *coder, uint32_t tokens, uint64_t record, uint32_t bytes,
                           qkv_error *error) {
  assert(layer->length == layer->sealed && tokens >= 1 && tokens <= QKV_PAGE_TOKENS && record != 0);
  QKV_TRY(qkv_arena_reserve(layer->config.arena, qkvi_ema_cost(layer), error));
  qkvi_layer_grow_pages(layer, layer->page_count + 1);
  const qkv_coder *next = layer->coder;
  layer->coder = coder;
  layer->pages[layer->page_count] = (qkv_page_entry){.coder = coder,
                                                     .bytes = bytes,
                                                     .tokens = tokens,
                                                     .position = layer->sealed,
                                                     .range = qkvi_layer_next_range(layer),
                                                     .record = record,
                                                     .record_bytes = bytes,
                                                     .ema = qkvi_layer_new_ema(layer),
                                                     .serial = layer->next_serial++};
  layer->coder = next;
  layer->page_count++;
  layer->saved = layer->settled = layer->page_count;
  layer->bytes_beside += qkvi_ema_cost(layer);
  layer->bytes_stored += bytes;
  layer->tokens_cold += tokens;
  layer->sealed += tokens;
  layer->length = layer->sealed;
  return QKV_OK;
}
