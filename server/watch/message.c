#include "server/watch/message.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// The parts of a message under construction, each with places for all events.
typedef struct building {
  Qkv__V1__PrefixEvent *events;
  Qkv__V1__PrefixEvent **list;
  uint8_t *parents;  // 16 bytes an event
  uint8_t *hashes;   // 16 bytes a page
  uint32_t *ids;     // 64 a page
  const qkvi_watch_event *last;
  size_t count, pages;
} building;

enum { HASH = sizeof(qkv_prefix_hash) };

static bool continues(const building *parts, const qkvi_watch_event *event) {
  const qkvi_watch_event *last = parts->last;
  return last != NULL && last->kind == event->kind && last->label == event->label && last->on_ssd == event->on_ssd &&
         last->has_ids == event->has_ids && qkv_prefix_hash_equal(&last->hash, &event->parent);
}

static void begin(building *parts, const qkvi_watch_event *event) {
  Qkv__V1__PrefixEvent *out = &parts->events[parts->count];
  uint8_t *parent = parts->parents + parts->count * HASH;
  qkv__v1__prefix_event__init(out);
  memcpy(parent, &event->parent, HASH);
  out->kind = (Qkv__V1__PrefixEvent__Kind)event->kind;
  out->tenant = event->label->tenant;
  out->model = event->label->model;
  out->parent = (ProtobufCBinaryData){.len = HASH, .data = parent};
  out->hashes.data = parts->hashes + parts->pages * HASH;
  out->position = event->page * QKV_PREFIX_PAGE;
  out->token_ids = event->has_ids ? parts->ids + parts->pages * QKV_PREFIX_PAGE : NULL;
  out->place = event->on_ssd ? QKV__V1__PREFIX_EVENT__PLACE__PLACE_SSD : QKV__V1__PREFIX_EVENT__PLACE__PLACE_MEMORY;
  parts->list[parts->count++] = out;
}

static void add(building *parts, const qkvi_watch_event *event, const uint32_t *ids) {
  if (!continues(parts, event)) begin(parts, event);
  Qkv__V1__PrefixEvent *out = &parts->events[parts->count - 1];
  memcpy(parts->hashes + parts->pages * HASH, &event->hash, HASH);
  out->hashes.len += HASH;
  if (event->has_ids && ids != NULL) {
    memcpy(parts->ids + parts->pages * QKV_PREFIX_PAGE, ids, QKV_PREFIX_PAGE * sizeof *ids);
    out->n_token_ids += QKV_PREFIX_PAGE;
  }
  parts->pages++;
  parts->last = event;
}

uint8_t *qkvi_watch_pack(Qkv__V1__WatchResponse *response, const qkvi_watch_event *events, const uint32_t *ids,
                         size_t count, bool (*wanted)(const void *context, const qkvi_watch_event *event),
                         const void *context, size_t *bytes, size_t *told) {
  building parts = {.events = calloc(count + 1, sizeof *parts.events),
                    .list = calloc(count + 1, sizeof *parts.list),
                    .parents = malloc((count + 1) * HASH),
                    .hashes = malloc((count + 1) * HASH),
                    .ids = malloc((ids == NULL ? 1 : count + 1) * QKV_PREFIX_PAGE * sizeof *parts.ids)};
  if (parts.events == NULL || parts.list == NULL || parts.parents == NULL || parts.hashes == NULL ||
      parts.ids == NULL)
    abort();
  for (size_t i = 0; i < count; i++) {
    if (wanted(context, &events[i])) add(&parts, &events[i], ids == NULL ? NULL : ids + i * QKV_PREFIX_PAGE);
  }
  response->events = parts.list;
  response->n_events = parts.count;
  *told = parts.pages;
  *bytes = qkv__v1__watch_response__get_packed_size(response);
  uint8_t *packed = malloc(*bytes + 1);
  if (packed == NULL) abort();
  (void)qkv__v1__watch_response__pack(response, packed);
  free(parts.events);
  free((void *)parts.list);
  free(parts.parents);
  free(parts.hashes);
  free(parts.ids);
  return packed;
}
