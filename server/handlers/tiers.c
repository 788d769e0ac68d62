// Demote, Prefetch and GetAttentionStats. All wait for layers, so they are jobs of the compute pool; with an SSD tier
// Demote and Prefetch are jobs of pools that wait for the disk.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_retier.h"
#include "engine/cache/session_spill.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "server/daemon.h"
#include "server/handlers/block.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/residency/restore.h"

#define BUCKETS_MAX 262144       // of a message: 2 MiB
#define BUCKETS_ALL_MAX 2097152  // of a layer, over all heads

static qkv_status check_layers(const qkv_session *session, const uint32_t *layers, size_t count, qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  if (count > model->layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "layers has %zu entries, the model %s has %" PRIu32 " layers", count,
                    model->name, model->layers);
  for (size_t i = 0; i < count; i++) {
    if (layers[i] >= model->layers)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "layers[%zu] is %" PRIu32 ", the model %s has %" PRIu32 " layers",
                      i, layers[i], model->name, model->layers);
  }
  return QKV_OK;
}

// ---- Demote, Prefetch ----

static qkv_retier_scope scope_of(const Qkv__V1__TokenRange *range, const uint32_t *layers, size_t count) {
  qkv_retier_scope scope = {.layers = layers, .layer_count = count};
  if (range != NULL) {
    scope.begin = range->begin;
    scope.end = range->end;
  }
  return scope;
}

static void count_report(qkv_daemon *daemon, const qkv_retier_report *report) {
  qkv_metric_add(&daemon->metrics[QKV_METRIC_TIER_PAGES], (int64_t)report->pages);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_TIER_BYTES_FREED], (int64_t)report->bytes_freed);
}

static qkv_status demote(qkv_rpc_call *call, const Qkv__V1__DemoteRequest *request, qkv_retier_report *report,
                         qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session *session = NULL;
  const qkv_retier_scope scope = scope_of(request->range, request->layers, request->n_layers);
  QKV_TRY(qkvi_request_layers(call, request->session, &session, error));
  qkv_status status = check_layers(session, request->layers, request->n_layers, error);
  // Planes that are not on the disk stay: it waits for what can be there soon.
  if (status == QKV_OK && daemon->residency != NULL &&
      qkvi_write_back_sync_range(daemon->residency, call, session, scope.layers, scope.layer_count, scope.end,
                                 &(qkv_error){0}) == QKV_CANCELLED)
    status = qkv_fail(error, QKV_CANCELLED, "the client has gone");
  if (status == QKV_OK)
    status = qkv_session_demote(session, &scope, request->bits, request->even != 0, report, error);
  qkv_session_unref(&session);
  count_report(daemon, report);
  return status;
}

static void demote_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_retier_report report = {0};
  qkv_error error = {0};
  Qkv__V1__DemoteResponse response = QKV__V1__DEMOTE_RESPONSE__INIT;
  if (!qkvi_job_wanted(call)) return;
  if (demote(call, qkv_rpc_state(call), &report, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  response.bytes_freed = report.bytes_freed;
  response.bytes_taken = report.bytes_taken;
  response.pages = report.pages;
  qkvi_control_reply(call, &response.base);
}

static uint32_t scope_layer(const qkv_retier_scope *scope, size_t i) {
  return scope->layer_count > 0 ? scope->layers[i] : (uint32_t)i;
}

// What is on the SSD, in full.
static qkv_status restore(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                          const qkv_retier_scope *scope, uint32_t layer, size_t held, qkv_retier_report *report,
                          qkv_error *error) {
  const qkvi_wanted wanted = {.call = call,
                              .session = session,
                              .layer = layer,
                              .begin = scope->begin,
                              .end = scope->end,
                              .full = true,
                              .held = held};
  qkv_session_info before, after;
  qkv_session_read_info(session, &before, NULL);
  const qkv_status status = qkvi_restore(residency, &wanted, NULL, error);
  qkv_session_read_info(session, &after, NULL);
  if (after.usage.bytes_coded > before.usage.bytes_coded)
    report->bytes_taken += after.usage.bytes_coded - before.usage.bytes_coded;
  if (after.usage.tokens_cold < before.usage.tokens_cold)
    report->pages += (before.usage.tokens_cold - after.usage.tokens_cold) / QKV_PAGE_TOKENS;
  return status;
}

static qkv_status promote_session(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                  const qkv_retier_scope *scope, double bits, qkv_retier_report *report,
                                  qkv_error *error) {
  const size_t layers = scope->layer_count > 0 ? scope->layer_count : qkv_session_model(session)->layers;
  qkv_status status = QKV_OK;
  size_t held = 0;  // the layers that have come back
  for (; held < layers && residency != NULL && status == QKV_OK; held += status == QKV_OK)
    status = restore(residency, call, session, scope, scope_layer(scope, held), held, report, error);
  if (status == QKV_OK) status = qkv_session_promote(session, scope, bits, report, error);
  for (size_t i = 0; i < held; i++) qkvi_budget_release(residency, session, scope_layer(scope, i));
  return status;
}

static qkv_status promote(qkv_rpc_call *call, const Qkv__V1__PrefetchRequest *request, qkv_retier_report *report,
                          qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session *session = NULL;
  const qkv_retier_scope scope = scope_of(request->range, request->layers, request->n_layers);
  QKV_TRY(qkvi_request_layers(call, request->session, &session, error));
  qkv_status status = check_layers(session, request->layers, request->n_layers, error);
  if (status == QKV_OK)
    status = promote_session(daemon->residency, call, session, &scope, request->bits, report, error);
  qkv_session_unref(&session);
  count_report(daemon, report);
  return status;
}

static void promote_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_retier_report report = {0};
  qkv_error error = {0};
  Qkv__V1__PrefetchResponse response = QKV__V1__PREFETCH_RESPONSE__INIT;
  if (!qkvi_job_wanted(call)) return;
  if (promote(call, qkv_rpc_state(call), &report, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  response.bytes = report.bytes_taken;
  response.pages = report.pages;
  qkvi_control_reply(call, &response.base);
}

static void on_demote(qkv_rpc_call *call, qkv_bytes message) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  // It waits for the disk, and nothing waits for it.
  const qkv_work work = daemon->residency != NULL ? QKV_WORK_BULK_BLOCKING : QKV_WORK_INTERACTIVE;
  qkvi_request_work(call, message, &qkv__v1__demote_request__descriptor, work, demote_job);
}

static void on_prefetch(qkv_rpc_call *call, qkv_bytes message) {
  // An attend of the same layer waits for this: it must not yield.
  qkvi_request_job(call, message, &qkv__v1__prefetch_request__descriptor, qkvi_session_waits(call), promote_job);
}

// ---- GetAttentionStats ----

// One layer's figures at a time, sent head by head. The session is not held in between: a client that does not read
// blocks nothing of it.
typedef struct stats_stream {
  Qkv__V1__GetAttentionStatsRequest *request;
  const qkv_model *model;      // NULL before the first layer; the store's, which outlives all calls
  uint64_t serial;             // of the session
  size_t at;                   // of the layers
  uint32_t head;               // the next one of `stats`
  bool loaded;                 // whether `stats` are those of the layer
  qkv_attention_stats stats;   // their arrays are the block's
  float *cold;                 // likewise: the part of each bucket's tokens on the SSD alone; NULL: none
  qkvi_response_block *block;  // a reference
  qkv_wire_writer *writer;
} stats_stream;

static size_t stream_layers(const stats_stream *stream) {
  return stream->request->n_layers > 0 ? stream->request->n_layers : stream->model->layers;
}

static uint32_t stream_layer(const stats_stream *stream) {
  return stream->request->n_layers > 0 ? stream->request->layers[stream->at] : (uint32_t)stream->at;
}

static size_t buckets_max(const qkv_model *model) {
  const size_t share = BUCKETS_ALL_MAX / model->kv_heads;
  return share < BUCKETS_MAX ? share : BUCKETS_MAX;
}

static qkv_status begin_stats(const qkv_session *session, stats_stream *stream, qkv_error *error) {
  const Qkv__V1__GetAttentionStatsRequest *request = stream->request;
  if (stream->model != NULL) {
    if (qkv_session_serial(session) == stream->serial) return QKV_OK;
    return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", request->session);
  }
  stream->model = qkv_session_model(session);
  stream->serial = qkv_session_serial(session);
  QKV_TRY(check_layers(session, request->layers, request->n_layers, error));
  const size_t most = buckets_max(stream->model);
  if (request->buckets <= most) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "buckets is %" PRIu32 ", at most %zu", request->buckets, most);
}

static void put_floats(const stats_stream *stream, uint32_t field, const float *values) {
  const size_t buckets = stream->stats.buckets;
  if (buckets == 0) return;
  qkvi_block_hold(stream->block);
  qkv_wire_put_reference(stream->writer, field, values, buckets * sizeof *values, stream->block);
}

// Field numbers are those of kv_cache.proto.
static void send_head(qkv_rpc_call *call, stats_stream *stream) {
  const qkv_attention_stats *stats = &stream->stats;
  qkv_wire_writer_clear(stream->writer);
  qkv_wire_put_varint(stream->writer, 1, stream_layer(stream));
  qkv_wire_put_varint(stream->writer, 2, stream->head);
  qkv_wire_put_varint(stream->writer, 3, stats->position);
  qkv_wire_put_varint(stream->writer, 4, stats->tokens_per_bucket);
  put_floats(stream, 5, stats->ema + stream->head * stats->buckets);
  put_floats(stream, 6, stats->bits + stream->head * stats->buckets);
  qkv_wire_put_varint(stream->writer, 7, stats->tokens);
  qkv_wire_put_varint(stream->writer, 8, stats->counted);
  qkv_wire_put_varint(stream->writer, 9, stats->queries);
  if (stream->cold != NULL) put_floats(stream, 10, stream->cold);
  if (++stream->head == stats->kv_heads) {
    stream->head = 0;
    stream->loaded = false;
    stream->at++;
  }
  const bool last = stream->at == stream_layers(stream);
  (last ? qkv_rpc_reply : qkv_rpc_send)(call, stream->writer, qkvi_block_release);
}

// NULL: nothing is on the SSD alone.
static const float *find_cold(const qkv_attention_stats *stats) {
  const float *cold = stats->places + (size_t)QKV_PLACE_SSD * stats->buckets;
  for (size_t i = 0; i < stats->buckets; i++) {
    if (cold[i] > 0) return cold;
  }
  return NULL;
}

// Bytes that wait to be sent are counted, as those of other responses are.
static qkv_status keep_stats(const qkv_rpc_call *call, stats_stream *stream, const qkv_attention_stats *stats,
                             qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const size_t count = stats->kv_heads * stats->buckets;
  const float *cold = find_cold(stats);
  const size_t cold_count = cold == NULL ? 0 : stats->buckets;
  QKV_TRY(qkvi_block_create(call, (2 * count + cold_count) * sizeof(float),
                            (uint64_t)daemon->options->limit_response_bytes, &stream->block, error));
  stream->stats = *stats;
  stream->stats.ema = (float *)stream->block->data;
  stream->stats.bits = stream->stats.ema + count;
  stream->stats.places = NULL;
  stream->cold = cold == NULL ? NULL : stream->stats.bits + count;
  if (count == 0) return QKV_OK;
  memcpy(stream->stats.ema, stats->ema, count * sizeof(float));
  memcpy(stream->stats.bits, stats->bits, count * sizeof(float));
  if (cold != NULL) memcpy(stream->cold, cold, cold_count * sizeof(float));
  return QKV_OK;
}

static qkv_status load_layer(qkv_rpc_call *call, stats_stream *stream, qkv_error *error) {
  qkv_session *session = NULL;
  const size_t buckets = stream->request->buckets;
  QKV_TRY(qkvi_request_layers(call, stream->request->session, &session, error));
  qkv_status status = begin_stats(session, stream, error);
  qkv_attention_stats stats = {0};
  qkvi_block_release(stream->block);
  stream->block = NULL;
  if (status == QKV_OK)
    status = qkv_session_read_attention(session, stream_layer(stream),
                                        buckets == 0 ? buckets_max(stream->model) : buckets, &stats, error);
  if (status == QKV_OK) status = keep_stats(call, stream, &stats, error);
  qkv_attention_stats_deinit(&stats);
  stream->loaded = status == QKV_OK;
  qkv_session_unref(&session);
  return status;
}

static void stats_job(void *context) {
  qkv_rpc_call *call = context;
  stats_stream *stream = qkv_rpc_state(call);
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (load_layer(call, stream, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  send_head(call, stream);
}

static void on_stats_sent(qkv_rpc_call *call) {
  stats_stream *stream = qkv_rpc_state(call);
  if (stream->loaded) return send_head(call, stream);
  qkvi_job_submit(call, qkvi_session_waits(call), stats_job, call);
}

static void on_get_attention_stats(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  Qkv__V1__GetAttentionStatsRequest *request =
      qkvi_control_unpack_here(message, &qkv__v1__get_attention_stats_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  stats_stream *stream = calloc(1, sizeof *stream);
  if (stream == NULL) abort();
  stream->request = request;
  stream->writer = qkv_wire_writer_create();
  qkv_rpc_set_state(call, stream);
  qkvi_job_submit(call, qkvi_session_waits(call), stats_job, call);
}

static void destroy_stats(void *state) {
  stats_stream *stream = state;
  if (stream == NULL) return;
  qkvi_block_release(stream->block);
  qkv_wire_writer_destroy(&stream->writer);
  qkvi_control_free(stream->request);
  free(stream);
}

const qkv_rpc_method qkvi_tiers_methods[] = {
    {.path = "/qkv.v1.KvCache/Demote", .message = on_demote, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/Prefetch", .message = on_prefetch, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/GetAttentionStats",
     .message = on_get_attention_stats,
     .sent = on_stats_sent,
     .destroy = destroy_stats},
    {0}};
