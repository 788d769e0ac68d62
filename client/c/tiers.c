// Demote, Prefetch and GetAttentionStats.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <stdlib.h>

#include "client/c/client.h"
#include "client/c/message.h"
#include "client/c/place.h"
#include "qkv/v1/kv_cache.pb-c.h"

static const char stats_method[] = "/qkv.v1.KvCache/GetAttentionStats";

// protobuf-c wants no const.
static char *name_of(const qkv_client_scope *scope) {
  return (char *)(uintptr_t)(scope->session == NULL ? "" : scope->session);
}

static uint32_t *layers_of(const qkv_client_scope *scope) {
  return (uint32_t *)(uintptr_t)scope->layers;
}

static Qkv__V1__TokenRange range_of(const qkv_client_scope *scope) {
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  range.begin = scope->begin;
  range.end = scope->end;
  return range;
}

qkv_code qkv_client_demote(qkv_client *client, const qkv_client_scope *scope, double bits, bool even,
                           qkv_client_tiers *tiers, qkv_call_error *error) {
  Qkv__V1__TokenRange range = range_of(scope);
  Qkv__V1__DemoteRequest request = QKV__V1__DEMOTE_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.session = name_of(scope);
  request.range = &range;
  request.layers = layers_of(scope);
  request.n_layers = scope->layer_count;
  request.bits = bits;
  request.even = even;
  const qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/Demote", &request.base,
                                                &qkv__v1__demote_response__descriptor, &answer, error);
  if (code != QKV_OK) return code;
  const Qkv__V1__DemoteResponse *response = (const Qkv__V1__DemoteResponse *)answer;
  if (tiers != NULL) {
    *tiers = (qkv_client_tiers){
        .pages = response->pages, .bytes_freed = response->bytes_freed, .bytes_taken = response->bytes_taken};
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  return QKV_OK;
}

qkv_code qkv_client_promote(qkv_client *client, const qkv_client_scope *scope, double bits, qkv_client_tiers *tiers,
                            qkv_call_error *error) {
  Qkv__V1__TokenRange range = range_of(scope);
  Qkv__V1__PrefetchRequest request = QKV__V1__PREFETCH_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.session = name_of(scope);
  request.range = &range;
  request.layers = layers_of(scope);
  request.n_layers = scope->layer_count;
  request.bits = bits;
  const qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/Prefetch", &request.base,
                                                &qkv__v1__prefetch_response__descriptor, &answer, error);
  if (code != QKV_OK) return code;
  const Qkv__V1__PrefetchResponse *response = (const Qkv__V1__PrefetchResponse *)answer;
  if (tiers != NULL) *tiers = (qkv_client_tiers){.pages = response->pages, .bytes_taken = response->bytes};
  protobuf_c_message_free_unpacked(answer, NULL);
  return QKV_OK;
}

// ---- GetAttentionStats ----

static grpc_byte_buffer *stats_request(const qkv_client_scope *scope, uint32_t buckets) {
  Qkv__V1__GetAttentionStatsRequest request = QKV__V1__GET_ATTENTION_STATS_REQUEST__INIT;
  request.session = name_of(scope);
  request.layers = layers_of(scope);
  request.n_layers = scope->layer_count;
  request.buckets = buckets;
  const size_t bytes = qkv__v1__get_attention_stats_request__get_packed_size(&request);
  uint8_t *packed = malloc(bytes + 1);
  assert(packed != NULL);
  qkv__v1__get_attention_stats_request__pack(&request, packed);
  grpc_byte_buffer *buffer = qkvi_request_of_bytes(packed, bytes);
  free(packed);
  return buffer;
}

typedef struct receiver {
  bool (*fn)(void *context, const qkv_client_attention *head);
  void *context;
} receiver;

static bool deliver(qkv_client *client, const grpc_byte_buffer *buffer, void *context, qkv_error *reason) {
  const receiver *to = context;
  const qkv_bytes view = qkvi_view(client, buffer);
  uint8_t *flat = malloc(view.length + 1);
  assert(flat != NULL);
  qkv_bytes_copy(view, 0, view.length, flat);
  Qkv__V1__GetAttentionStatsResponse *response =
      qkv__v1__get_attention_stats_response__unpack(NULL, view.length, flat);
  free(flat);
  if (response == NULL || response->n_ema != response->n_bits ||
      (response->n_cold > 0 && response->n_cold != response->n_bits)) {
    if (response != NULL) qkv__v1__get_attention_stats_response__free_unpacked(response, NULL);
    (void)qkv_fail(reason, QKV_INTERNAL, "%zu bytes are no statistics", view.length);
    return false;
  }
  const qkv_client_attention head = {.layer = response->layer,
                                     .kv_head = response->kv_head,
                                     .counted = response->counted != 0,
                                     .queries = response->queries,
                                     .position = response->position,
                                     .tokens = response->tokens,
                                     .tokens_per_bucket = response->tokens_per_bucket,
                                     .buckets = response->n_ema,
                                     .ema = response->ema,
                                     .bits = response->bits,
                                     .cold = response->n_cold > 0 ? response->cold : NULL};
  const bool go_on = to->fn(to->context, &head);
  qkv__v1__get_attention_stats_response__free_unpacked(response, NULL);
  return go_on;
}

qkv_code qkv_client_attention_stats(qkv_client *client, const qkv_client_scope *scope, uint32_t buckets,
                                    bool (*fn)(void *context, const qkv_client_attention *head), void *context,
                                    qkv_call_error *error) {
  const qkv_code routed = qkvi_route(&client, name_of(scope), error);
  if (routed != QKV_OK) return routed;
  return qkvi_read_stream(client, stats_method, stats_request(scope, buckets), deliver, &(receiver){fn, context},
                          error);
}
