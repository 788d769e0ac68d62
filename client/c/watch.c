// Watch: what prefixes come and go.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <stdlib.h>

#include "client/c/place.h"
#include "qkv/v1/kv_cache.pb-c.h"

typedef struct receiver {
  bool (*fn)(void *context, const qkv_client_changes *changes);
  void *context;
} receiver;

enum { HASH = 16, PAGE = 64 };  // bytes, tokens

static bool read_event(const Qkv__V1__PrefixEvent *from, qkv_client_prefix_event *event) {
  *event = (qkv_client_prefix_event){.kind = (int)from->kind,
                                     .tenant = from->tenant,
                                     .model = from->model,
                                     .parent = from->parent.data,
                                     .hashes = from->hashes.data,
                                     .pages = from->hashes.len / HASH,
                                     .position = from->position,
                                     .token_ids = from->n_token_ids > 0 ? from->token_ids : NULL,
                                     .on_ssd = from->place == QKV__V1__PREFIX_EVENT__PLACE__PLACE_SSD};
  return from->parent.len == HASH && from->hashes.len % HASH == 0 &&
         (from->n_token_ids == 0 || from->n_token_ids == PAGE * event->pages);
}

static bool give(const Qkv__V1__WatchResponse *response, const receiver *to, qkv_error *reason) {
  qkv_client_prefix_event *events = calloc(response->n_events + 1, sizeof *events);
  assert(events != NULL);
  bool sound = true;
  for (size_t i = 0; i < response->n_events && sound; i++) sound = read_event(response->events[i], &events[i]);
  if (!sound) (void)qkv_fail(reason, QKV_INTERNAL, "an event has hashes or ids of a length that does not fit");
  const qkv_client_changes changes = {.reset = response->reset,
                                      .missed = response->missed,
                                      .complete = response->complete,
                                      .instance = response->instance,
                                      .sequence = response->sequence,
                                      .events = events,
                                      .event_count = response->n_events};
  const bool go_on = sound && to->fn(to->context, &changes);
  free(events);
  return go_on;
}

static bool deliver(qkv_client *client, const grpc_byte_buffer *buffer, void *context, qkv_error *reason) {
  const qkv_bytes view = qkvi_view(client, buffer);
  uint8_t *flat = malloc(view.length + 1);
  assert(flat != NULL);
  qkv_bytes_copy(view, 0, view.length, flat);
  Qkv__V1__WatchResponse *response = qkv__v1__watch_response__unpack(NULL, view.length, flat);
  free(flat);
  if (response == NULL) {
    (void)qkv_fail(reason, QKV_INTERNAL, "it is no WatchResponse");
    return false;
  }
  const bool go_on = give(response, context, reason);
  qkv__v1__watch_response__free_unpacked(response, NULL);
  return go_on;
}

qkv_code qkv_client_watch_prefixes(qkv_client *client, const qkv_client_watch *options,
                                   bool (*fn)(void *context, const qkv_client_changes *changes), void *context,
                                   qkv_call_error *error) {
  enum { TENANT = 1, MODEL, TOKEN_IDS, INSTANCE, AFTER };
  const qkv_code routed = qkvi_route(&client, NULL, error);
  if (routed != QKV_OK) return routed;
  qkv_wire_writer *writer = qkvi_begin_request(client);
  if (options->tenant != NULL) qkv_wire_put_string(writer, TENANT, options->tenant);
  if (options->model != NULL) qkv_wire_put_string(writer, MODEL, options->model);
  qkv_wire_put_varint(writer, TOKEN_IDS, options->token_ids);
  qkv_wire_put_fixed64(writer, INSTANCE, options->instance);
  qkv_wire_put_varint(writer, AFTER, options->after);
  receiver to = {fn, context};
  return qkvi_read_stream(client, "/qkv.v1.KvCache/Watch", qkvi_request(client), deliver, &to, error);
}
