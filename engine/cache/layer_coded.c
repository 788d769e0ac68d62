#include "engine/cache/layer_coded.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "engine/cache/layer_internal.h"

// ---- Out ----

static qkv_coded_page coded_of(const qkv_page_entry *entry) {
  return (qkv_coded_page){.image = entry->page,
                          .bytes = entry->bytes,
                          .tokens = entry->tokens,
                          .position = entry->position,
                          .coder = entry->coder};
}

size_t qkv_layer_coded_pages(const qkv_layer *layer, uint64_t begin, uint64_t end, uint64_t bytes_max,
                             qkv_coded_page *out, size_t max) {
  uint64_t bytes = 0;
  size_t count = 0;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count && count < max; i++) {
    if (qkvi_layer_span(layer, i).begin >= end || qkvi_layer_image(layer, i) == NULL) break;
    const qkv_page_entry *entry = qkv_layer_page(layer, i);
    bytes += entry->bytes;
    if (count > 0 && bytes > bytes_max) break;
    out[count++] = coded_of(entry);
  }
  return count;
}

// ---- Checks of what comes in ----

// That the pages are of this layer and follow each other.
static qkv_status check_order(const qkv_layer *layer, const qkv_coded_page *pages, size_t count, qkv_error *error) {
  for (size_t i = 0; i < count; i++) {
    const qkv_coded_page *page = &pages[i];
    const qkv_page_header *header = page->image;
    assert(page->coder->layer == layer->config.layer && header->bytes == page->bytes);
    if (header->layer != layer->config.layer)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages[%zu].image is of layer %" PRIu32 ", expected %" PRIu32, i,
                      header->layer, layer->config.layer);
    if (page->tokens < 1 || page->tokens > header->tokens)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages[%zu].tokens is %" PRIu32 ", the page has 1 to %u", i,
                      page->tokens, header->tokens);
    const uint64_t expected = i == 0 ? page->position : pages[i - 1].position + pages[i - 1].tokens;
    if (header->position != page->position || page->position != expected)
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "pages[%zu].image begins at position %" PRIu64 ", expected %" PRIu64, i, header->position,
                      expected);
    if (page->position > QKV_POSITION_MAX - QKV_PAGE_TOKENS)
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "pages[%zu].image begins at position %" PRIu64 ", positions end at %" PRIu64, i, page->position,
                      QKV_POSITION_MAX);
  }
  return QKV_OK;
}

static bool same_bytes(const qkv_coded_page *page, const void *held, uint32_t bytes) {
  return held != NULL && bytes == page->bytes && memcmp(held, page->image, bytes) == 0;
}

// A page below the layer's length is the one that is held there.
static qkv_status check_held(const qkv_layer *layer, const qkv_coded_page *page, qkv_error *error) {
  if (page->position >= layer->sealed)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "position is %" PRIu64 ", rows from position %" PRIu64
                    " on are exact and pages follow pages only",
                    page->position, layer->sealed);
  const qkv_page_entry *entry = qkv_layer_page(layer, qkv_layer_page_at(layer, page->position));
  if (entry->page == NULL)
    return qkv_fail(error, QKV_UNAVAILABLE, "position %" PRIu64 " is on the SSD", page->position);
  const bool same = same_bytes(page, entry->page, entry->bytes) || same_bytes(page, entry->full, entry->full_bytes);
  if (same && entry->position == page->position && entry->tokens == page->tokens) return QKV_OK;
  return qkv_fail(error, QKV_ALREADY_EXISTS, "position %" PRIu64 " holds another page already", page->position);
}

static qkv_status check_end(const qkv_layer *layer, uint64_t position, qkv_error *error) {
  if (position != layer->length)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "position is %" PRIu64 ", the expected position is %" PRIu64,
                    position, layer->length);
  if (layer->length != layer->sealed)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "position is %" PRIu64 ", rows from position %" PRIu64
                    " on are exact and pages follow pages only",
                    position, layer->sealed);
  return QKV_OK;
}

// `*held` gets the number of pages that are held already.
static qkv_status check_places(const qkv_layer *layer, const qkv_coded_page *pages, size_t count, size_t *held,
                               qkv_error *error) {
  if (pages[0].position < layer->config.first_position)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "position is %" PRIu64 ", the session's first position is %" PRIu64, pages[0].position,
                    layer->config.first_position);
  size_t i = 0;
  for (; i < count && pages[i].position < layer->length; i++) QKV_TRY(check_held(layer, &pages[i], error));
  *held = i;
  return i < count ? check_end(layer, pages[i].position, error) : QKV_OK;
}

// ---- In ----

static void add_page(qkv_layer *layer, const qkv_coded_page *page) {
  void *image = qkv_arena_alloc(layer->config.arena, page->bytes);
  memcpy(image, page->image, page->bytes);
  const qkv_page_entry entry = {.page = image,
                                .coder = page->coder,
                                .bytes = page->bytes,
                                .tokens = page->tokens,
                                .position = page->position,
                                .serial = qkvi_serial_next()};
  qkvi_layer_add_page(layer, &entry);
  layer->sealed += page->tokens;
  layer->length = layer->sealed;
}

static uint64_t cost_of(const qkv_coded_page *pages, size_t count) {
  uint64_t cost = 0;
  for (size_t i = 0; i < count; i++) cost += qkv_arena_cost(pages[i].bytes);
  return cost;
}

qkv_status qkv_layer_append_pages(qkv_layer *layer, const qkv_coded_page *pages, size_t count, uint64_t *appended,
                                  qkv_error *error) {
  size_t held = 0;
  assert(count > 0);
  *appended = 0;
  QKV_TRY(check_order(layer, pages, count, error));
  QKV_TRY(check_places(layer, pages, count, &held, error));
  const uint64_t cost = cost_of(pages + held, count - held);
  QKV_TRY(qkv_arena_reserve_in(layer->config.arena, layer->append_headroom, cost, error));
  for (size_t i = held; i < count; i++) {
    add_page(layer, &pages[i]);
    *appended += pages[i].tokens;
  }
  return QKV_OK;
}
