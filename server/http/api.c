#include "server/http/api.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "engine/base/cpu.h"
#include "engine/cache/session_retier.h"
#include "engine/kernel/kernel.h"
#include "server/daemon.h"
#include "server/handlers/contract.h"

enum { OK = 200, BAD_REQUEST = 400, NOT_FOUND = 404, FAILED = 500 };

// Numbers of the map: four digits of bits and shares are enough for a picture.
#define MAP_DIGITS 4

static void reply(json_t *value, size_t flags, qkvi_http_answer *answer) {
  answer->type = "application/json";
  answer->body = value == NULL ? NULL : json_dumps(value, JSON_COMPACT | flags);
  if (answer->body == NULL) abort();
  answer->length = strlen(answer->body);
  json_decref(value);
}

static void reply_ok(json_t *value, qkvi_http_answer *answer) {
  answer->status = OK;
  reply(value, 0, answer);
}

void qkvi_api_fail(unsigned status, const char *text, qkvi_http_answer *answer) {
  answer->status = status;
  json_t *value = json_pack("{s:s}", "error", text);
  if (value == NULL) value = json_pack("{s:s}", "error", "the error's text is no UTF-8");  // it quotes the query
  reply(value, 0, answer);
}

static json_t *number(uint64_t value) {
  return json_integer((json_int_t)value);
}

// ---- Status ----

static json_t *histogram(const qkv_histogram *from) {
  qkv_histogram_view view;
  json_t *counts = json_array();
  qkv_histogram_read(from, &view);
  for (size_t i = 0; i <= QKV_HISTOGRAM_BOUNDS; i++) json_array_append_new(counts, number(view.counts[i]));
  return json_pack("{s:o, s:f, s:o}", "count", number(view.count), "seconds", (double)view.sum_ns / 1e9, "buckets",
                   counts);
}

static json_t *bounds(void) {
  json_t *list = json_array();
  for (size_t i = 0; i < QKV_HISTOGRAM_BOUNDS; i++)
    json_array_append_new(list, json_real((double)qkv_histogram_bounds_ns[i] / 1e9));
  return list;
}

// Methods that have been called.
static json_t *calls(const qkvi_observed *observed) {
  json_t *list = json_array();
  for (size_t i = 0; i < observed->method_count; i++) {
    const qkvi_observed_method *method = &observed->methods[i];
    const uint64_t good = atomic_load_explicit(&method->ended[QKV_OK], memory_order_relaxed);
    json_t *row = histogram(&method->seconds);
    const json_int_t count = json_integer_value(json_object_get(row, "count"));
    if (count == 0) {
      json_decref(row);
      continue;
    }
    json_object_set_new(row, "service", json_stringn(method->service, method->service_bytes));
    json_object_set_new(row, "method", json_string(method->name));
    json_object_set_new(row, "failed", json_integer(count > (json_int_t)good ? count - (json_int_t)good : 0));
    json_array_append_new(list, row);
  }
  return list;
}

static json_t *stages(void) {
  static const char *const names[QKV_STAGE_COUNT] = {"queue", "encode", "attend", "restore", "gpu", "upload"};
  json_t *all = json_object();
  for (size_t i = 0; i < QKV_STAGE_COUNT; i++)
    json_object_set_new(all, names[i], histogram(qkv_stage_histogram((qkv_stage)i)));
  return all;
}

static json_t *metrics(const qkv_daemon *daemon) {
  json_t *all = json_object();
  for (size_t i = 0; i < QKV_METRIC_COUNT; i++)
    json_object_set_new(all, qkv_metric_table[i].name, json_integer(qkv_metric_read(&daemon->metrics[i])));
  return all;
}

static json_t *gpus(const qkv_daemon *daemon) {
  json_t *all = json_array();
  for (size_t i = 0; i < qkvi_gpus_count(daemon->gpus); i++) {
    const qkvi_gpu_stats stats = qkvi_gpu_read(qkvi_gpus_at(daemon->gpus, i));
    json_array_append_new(
        all, json_pack("{s:s, s:s, s:s, s:b, s:s, s:I, s:I, s:I, s:I}", "device", stats.device, "name", stats.name,
                       "uuid", stats.uuid, "up", !stats.down, "reason", stats.down ? stats.reason : "", "bytes",
                       (json_int_t)stats.bytes, "bytes_limit", (json_int_t)stats.bytes_limit, "ranges",
                       (json_int_t)stats.ranges, "sessions", (json_int_t)stats.sessions));
  }
  return all;
}

void qkvi_api_status(qkv_daemon *daemon, qkvi_usage_cache *usage, const qkvi_http_query *query,
                     qkvi_http_answer *answer) {
  (void)usage;
  (void)query;
  qkv_daemon_update_gauges(daemon);
  const bool draining = atomic_load(&daemon->draining);
  json_t *listen = json_array();
  for (size_t i = 0; i < daemon->options->listen.count; i++)
    json_array_append_new(listen, json_string(qkv_rpc_server_address(daemon->rpc, i)));
  json_t *value = json_pack("{s:s, s:s, s:b, s:I, s:s, s:o, s:o, s:o, s:o, s:o, s:o}", "version", QKV_VERSION,
                            "state", draining ? "draining" : "serving", "ready", qkvi_http_is_ready(daemon, NULL),
                            "uptime_ms", (json_int_t)qkv_daemon_uptime_ms(daemon), "kernels", qkv_kernels_get()->name,
                            "listen", listen, "bounds_seconds", bounds(), "calls", calls(&daemon->observed), "stages",
                            stages(), "metrics", metrics(daemon), "gpus", gpus(daemon));
  reply_ok(value, answer);
}

// ---- Tenants ----

static json_t *tenant_row(const qkvi_usage_row *row) {
  return json_pack("{s:s, s:o, s:o, s:o, s:o}", "tenant", row->name, "sessions", number(row->sessions), "tokens",
                   number(row->tokens), "memory_bytes", number(row->memory_bytes), "storage_bytes",
                   number(row->storage_bytes));
}

void qkvi_api_tenants(qkv_daemon *daemon, qkvi_usage_cache *cache, const qkvi_http_query *query,
                      qkvi_http_answer *answer) {
  qkvi_usage usage;
  json_t *list = json_array(), *value = json_object();
  qkvi_usage_read(cache, daemon->store, &usage);
  size_t at = 0;
  for (; at < usage.tenant_count && json_array_size(list) < query->limit; at++) {
    const qkvi_usage_row *row = &usage.tenants[at];
    if (strcmp(row->name, query->after) <= 0 || strcasestr(row->name, query->search) == NULL) continue;
    json_array_append_new(list, tenant_row(row));
  }
  if (at < usage.tenant_count) json_object_set_new(value, "next", json_string(usage.tenants[at - 1].name));
  json_object_set_new(value, "tenants", list);
  qkvi_usage_free(&usage);
  reply_ok(value, answer);
}

// ---- Sessions ----

static const char *durability_name(qkv_durability durability) {
  return durability == QKV_DURABILITY_SYNC ? "sync" : durability == QKV_DURABILITY_ASYNC ? "async" : "memory";
}

static json_t *session_row(qkv_session *session, uint64_t *lengths) {
  qkv_session_info info;
  qkvi_session_message parts;
  qkv_session_read_info(session, &info, lengths);
  qkvi_session_write(&info, lengths, &parts);
  const Qkv__V1__SessionInfo *from = &parts.info;
  json_t *row =
      json_pack("{s:s, s:s, s:s, s:s, s:i, s:s, s:s, s:b, s:b}", "session", from->session, "tenant", from->tenant,
                "model", from->model, "model_tenant", from->model_tenant, "layers", (int)info.model->layers,
                "durability", durability_name(info.config.durability), "codec", info.config.policy.codec->name,
                "pinned", (int)info.config.pinned, "evictable", (int)info.config.evictable);
  if (row == NULL) abort();
  json_object_set_new(row, "tokens_coded", number(from->tokens_coded));
  json_object_set_new(row, "tokens_exact", number(from->tokens_exact));
  json_object_set_new(row, "tokens_cold", number(from->tokens_cold));
  json_object_set_new(row, "memory_bytes", number(from->bytes_coded + from->bytes_exact + from->bytes_overhead));
  json_object_set_new(row, "shared_bytes", number(from->bytes_shared));
  json_object_set_new(row, "storage_bytes", number(from->bytes_stored));
  json_object_set_new(row, "fp16_bytes", number(from->bytes_fp16));
  json_object_set_new(row, "bits_per_coordinate", json_real(from->bits_per_coordinate));
  json_object_set_new(row, "first_position", number(from->first_position));
  json_object_set_new(row, "length", number(qkv_session_length(session)));
  json_object_set_new(row, "created_unix_ms", json_integer(from->created_unix_ms));
  json_object_set_new(row, "last_used_unix_ms", json_integer(from->last_used_unix_ms));
  return row;
}

// "NAME,TENANT".
static qkv_status read_place(const char *after, qkv_store_place *place, qkv_error *error) {
  const char *comma = strchr(after, ',');
  *place = (qkv_store_place){.name = ""};
  if (after[0] == '\0') return QKV_OK;
  const size_t bytes = comma == NULL ? strlen(after) : (size_t)(comma - after);
  if (comma == NULL || bytes > QKV_NAME_MAX || strlen(comma + 1) > QKV_NAME_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "after is not the next of an answer: NAME,TENANT");
  memcpy(place->name, after, bytes);
  memcpy(place->tenant, comma + 1, strlen(comma + 1));
  QKV_TRY(qkv_name_check(place->name, "after", error));
  return qkv_name_check(place->tenant, "after", error);
}

static bool is_wanted(const qkv_session *session, const char *search) {
  return !qkv_session_is_staged(session) && strcasestr(qkv_session_name(session), search) != NULL;
}

static void put_next(json_t *value, const qkv_session *session) {
  char text[sizeof(qkv_store_place) + 1];
  const qkv_store_place place = qkv_store_place_of(session);
  (void)snprintf(text, sizeof text, "%s,%s", place.name, place.tenant);
  json_object_set_new(value, "next", json_string(text));
}

static json_t *session_page(qkv_store *store, const qkvi_http_query *query, const qkv_store_place *after) {
  const qkv_store_filter filter = {.tenant = query->tenant[0] == '\0' ? NULL : query->tenant, .after = after};
  const size_t max = qkv_store_sessions(store) + 64;  // some may be opened meanwhile
  qkv_session **sessions = calloc(max, sizeof *sessions);
  json_t *list = json_array(), *value = json_object();
  if (sessions == NULL) abort();
  const size_t count = qkv_store_list(store, &filter, sessions, max);
  size_t at = 0;
  for (; at < count && json_array_size(list) < query->limit; at++) {
    if (is_wanted(sessions[at], query->search)) json_array_append_new(list, session_row(sessions[at], NULL));
  }
  if (at > 0 && (at < count || count == max)) put_next(value, sessions[at - 1]);
  for (size_t i = 0; i < count; i++) qkv_session_unref(&sessions[i]);
  free(sessions);
  json_object_set_new(value, "sessions", list);
  return value;
}

void qkvi_api_sessions(qkv_daemon *daemon, qkvi_usage_cache *usage, const qkvi_http_query *query,
                       qkvi_http_answer *answer) {
  qkv_store_place after;
  qkv_error error = {0};
  (void)usage;
  if (read_place(query->after, &after, &error) != QKV_OK) return qkvi_api_fail(BAD_REQUEST, error.text, answer);
  reply_ok(session_page(daemon->store, query, &after), answer);
}

// A reference, or NULL and an answer.
static qkv_session *find(qkv_daemon *daemon, const qkvi_http_query *query, qkvi_http_answer *answer) {
  qkv_session *session = NULL;
  qkv_error error = {0};
  const char *tenant = query->tenant[0] == '\0' ? QKV_TENANT_DEFAULT : query->tenant;
  if (query->session[0] == '\0') {
    qkvi_api_fail(BAD_REQUEST, "session is empty", answer);
  } else if (qkv_store_session(daemon->store, tenant, query->session, &session, &error) != QKV_OK) {
    qkvi_api_fail(NOT_FOUND, error.text, answer);
  }
  return session;
}

void qkvi_api_session(qkv_daemon *daemon, qkvi_usage_cache *usage, const qkvi_http_query *query,
                      qkvi_http_answer *answer) {
  (void)usage;
  qkv_session *session = find(daemon, query, answer);
  if (session == NULL) return;
  const uint32_t layers = qkv_session_model(session)->layers;
  uint64_t *lengths = calloc(layers, sizeof *lengths);
  json_t *list = json_array();
  if (lengths == NULL) abort();
  json_t *value = session_row(session, lengths);
  for (uint32_t i = 0; i < layers; i++) json_array_append_new(list, number(lengths[i]));
  json_object_set_new(value, "lengths", list);
  json_object_set_new(value, "kv_heads", number(qkv_session_model(session)->kv_heads));
  free(lengths);
  qkv_session_unref(&session);
  reply_ok(value, answer);
}

// ---- The map ----

static json_t *rows_of(const float *values, size_t rows, size_t buckets) {
  json_t *all = json_array();
  for (size_t row = 0; row < rows; row++) {
    json_t *list = json_array();
    for (size_t i = 0; i < buckets; i++) json_array_append_new(list, json_real((double)values[row * buckets + i]));
    json_array_append_new(all, list);
  }
  return all;
}

static size_t buckets_max(const qkv_model *model) {
  const size_t share = (size_t)QKVI_API_BUCKETS_MAX * 64 / model->kv_heads;
  return share < QKVI_API_BUCKETS_MAX ? share : QKVI_API_BUCKETS_MAX;
}

static json_t *map(const qkv_attention_stats *stats, uint32_t layer) {
  static const char *const places[QKV_PLACES] = {"exact", "memory", "shared", "ssd", "gpu"};
  json_t *names = json_array();
  for (size_t i = 0; i < QKV_PLACES; i++) json_array_append_new(names, json_string(places[i]));
  return json_pack("{s:o, s:o, s:o, s:o, s:o, s:b, s:o, s:o, s:o, s:o, s:o}", "layer", number(layer), "position",
                   number(stats->position), "tokens", number(stats->tokens), "tokens_per_bucket",
                   number(stats->tokens_per_bucket), "kv_heads", number(stats->kv_heads), "counted",
                   (int)stats->counted, "queries", number(stats->queries), "bits",
                   rows_of(stats->bits, stats->kv_heads, stats->buckets), "attention",
                   rows_of(stats->ema, stats->kv_heads, stats->buckets), "place_names", names, "places",
                   rows_of(stats->places, QKV_PLACES, stats->buckets));
}

void qkvi_api_map(qkv_daemon *daemon, qkvi_usage_cache *usage, const qkvi_http_query *query,
                  qkvi_http_answer *answer) {
  (void)usage;
  qkv_session *session = find(daemon, query, answer);
  if (session == NULL) return;
  qkv_attention_stats stats = {0};
  qkv_error error = {0};
  const size_t most = buckets_max(qkv_session_model(session));
  const size_t wanted = query->buckets != 0 ? query->buckets : most < QKVI_API_BUCKETS ? most : QKVI_API_BUCKETS;
  qkv_status status = wanted <= most ? QKV_OK
                                     : qkv_fail(&error, QKV_INVALID_ARGUMENT,
                                                "buckets is %zu, at most %zu for this model", wanted, most);
  if (status == QKV_OK) status = qkv_session_read_attention(session, query->layer, wanted, &stats, &error);
  qkv_session_unref(&session);
  if (status != QKV_OK)
    return qkvi_api_fail(status == QKV_INVALID_ARGUMENT ? BAD_REQUEST : FAILED, error.text, answer);
  answer->status = OK;
  reply(map(&stats, query->layer), JSON_REAL_PRECISION(MAP_DIGITS), answer);
  qkv_attention_stats_deinit(&stats);
}

// ---- Storage ----

static json_t *segment_row(const qkv_storage_segment *segment) {
  return json_pack("{s:o, s:o, s:o, s:o, s:b, s:b}", "segment", number(segment->segment), "file_bytes",
                   number(segment->file_bytes), "live_bytes", number(segment->live_bytes), "records",
                   number(segment->records), "sealed", (int)segment->sealed, "unread", (int)segment->unread);
}

static int by_number(const void *a, const void *b) {
  const uint64_t x = ((const qkv_storage_segment *)a)->segment, y = ((const qkv_storage_segment *)b)->segment;
  return (x > y) - (x < y);
}

static void put_segments(qkv_storage *storage, const qkvi_http_query *query, json_t *value) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(storage, &stats);
  const size_t max = (size_t)stats.segments + 16;  // some may be created meanwhile
  const uint64_t after = strtoull(query->after, NULL, 10);
  qkv_storage_segment *segments = calloc(max, sizeof *segments);
  json_t *list = json_array();
  if (segments == NULL) abort();
  size_t count = qkv_storage_list_segments(storage, segments, max), at = 0;
  if (count > max) count = max;
  qsort(segments, count, sizeof *segments, by_number);
  for (; at < count && json_array_size(list) < query->limit; at++) {
    if (query->after[0] == '\0' || segments[at].segment > after)
      json_array_append_new(list, segment_row(&segments[at]));
  }
  if (at > 0 && at < count) {
    char next[24];
    (void)snprintf(next, sizeof next, "%" PRIu64, segments[at - 1].segment);
    json_object_set_new(value, "next", json_string(next));
  }
  json_object_set_new(value, "segments", list);
  free(segments);
}

static json_t *storage_totals(const qkv_daemon *daemon, const qkv_storage_stats *stats) {
  json_t *value = json_pack("{s:b, s:s, s:b}", "enabled", 1, "io", stats->io, "degraded",
                            (int)qkv_metric_read(&daemon->metrics[QKV_METRIC_SPILL_DEGRADED]));
  if (value == NULL) abort();
  (void)json_object_set_new(value, "directory",
                            json_string(daemon->options->data_dir));  // none where it is not UTF-8
  json_object_set_new(value, "records", number(stats->records));
  json_object_set_new(value, "disk_bytes", number(stats->disk_bytes));
  json_object_set_new(value, "budget_bytes", number(stats->budget_bytes));
  json_object_set_new(value, "live_bytes", number(stats->live_bytes));
  json_object_set_new(value, "dead_bytes", number(stats->dead_bytes));
  json_object_set_new(value, "dirty_bytes", number(stats->dirty_bytes));
  json_object_set_new(value, "journal_bytes", number(stats->journal_bytes));
  json_object_set_new(value, "put_bytes", number(stats->put_bytes));
  json_object_set_new(value, "put_stored_bytes", number(stats->put_stored_bytes));
  json_object_set_new(value, "read_bytes", number(stats->read_bytes));
  json_object_set_new(value, "bad_records", number(stats->bad_records + stats->read_errors));
  json_object_set_new(value, "failed", number(stats->full_errors + stats->device_errors));
  return value;
}

void qkvi_api_storage(qkv_daemon *daemon, qkvi_usage_cache *usage, const qkvi_http_query *query,
                      qkvi_http_answer *answer) {
  (void)usage;
  if (daemon->residency == NULL) return reply_ok(json_pack("{s:b, s:[]}", "enabled", 0, "segments"), answer);
  qkv_storage *storage = qkvi_residency_storage(daemon->residency);
  qkv_storage_stats stats;
  qkv_storage_read_stats(storage, &stats);
  json_t *value = storage_totals(daemon, &stats);
  put_segments(storage, query, value);
  reply_ok(value, answer);
}
