#include "client/bench/traffic.h"

#include <stdio.h>
#include <stdlib.h>

void qkv_bench_traffic_init(qkv_bench_traffic *traffic, const qkv_bench_settings *settings, const char *name) {
  const size_t row_bytes = (size_t)(settings->kv_heads * settings->dim) * sizeof(uint16_t);
  const size_t query = (size_t)(settings->q_heads * settings->dim);
  *traffic = (qkv_bench_traffic){.settings = settings};
  snprintf(traffic->model, sizeof traffic->model, "%s-%lldx%lldx%lldx%lld", name, (long long)settings->rounds,
           (long long)settings->dim, (long long)settings->kv_heads, (long long)settings->q_heads);
  traffic->k = qkv_bench_rows(QKV_BENCH_CHUNK_TOKENS * row_bytes, 1);
  traffic->v = qkv_bench_rows(QKV_BENCH_CHUNK_TOKENS * row_bytes, 2);
  traffic->q = calloc(query, sizeof *traffic->q);
  if (traffic->q == NULL) abort();
  qkv_bench_floats(traffic->q, query, 3);
}

void qkv_bench_traffic_deinit(qkv_bench_traffic *traffic) {
  free(traffic->k);
  free(traffic->v);
  free(traffic->q);
}

int qkv_bench_traffic_register(const qkv_bench_traffic *traffic, qkv_client *client) {
  const qkv_bench_settings *settings = traffic->settings;
  qkv_call_error error = {0};
  const qkv_client_model model = {.name = traffic->model,
                                  .layers = (uint32_t)settings->rounds,
                                  .kv_heads = (uint32_t)settings->kv_heads,
                                  .q_heads = (uint32_t)settings->q_heads,
                                  .key_dim = (uint32_t)settings->dim,
                                  .value_dim = (uint32_t)settings->dim,
                                  .dtype = QKV_CLIENT_FP16};
  return qkv_client_register_model(client, &model, &error) == 0 ? 0 : qkv_bench_failed("register the model", &error);
}

int qkv_bench_traffic_open(const qkv_bench_traffic *traffic, qkv_client *client, const char *session) {
  const qkv_bench_settings *settings = traffic->settings;
  qkv_call_error error = {0};
  const qkv_client_policy policy = {
      .bits_k = (double)settings->bits_k, .bits_v = (double)settings->bits_v, .recent_window = 64, .anchor = "none"};
  const qkv_session_options opened = {
      .session = session, .model = traffic->model, .policy = &policy, .durability = 2};
  qkv_client_close_session(client, session, NULL, &(qkv_call_error){0});
  return qkv_client_open_session(client, &opened, &error) == 0 ? 0 : qkv_bench_failed("open a session", &error);
}

static qkv_client_tensor tensor_of(int dtype, int64_t tokens, int64_t heads, int64_t dim, const void *data) {
  const size_t element = dtype == QKV_CLIENT_FP32 ? sizeof(float) : sizeof(uint16_t);
  return (qkv_client_tensor){.dtype = dtype,
                             .rank = 3,
                             .dims = {tokens, heads, dim},
                             .data = data,
                             .bytes = (size_t)(tokens * heads * dim) * element};
}

int qkv_bench_traffic_append(const qkv_bench_traffic *traffic, qkv_client *client, const char *session, int64_t layer,
                             int64_t position) {
  const qkv_bench_settings *settings = traffic->settings;
  const int64_t left = settings->tokens - position;
  const int64_t tokens = left < QKV_BENCH_CHUNK_TOKENS ? left : QKV_BENCH_CHUNK_TOKENS;
  qkv_call_error error = {0};
  const qkv_client_item item = {
      .session = session,
      .layer = (uint32_t)layer,
      .position = (uint64_t)position,
      .k = tensor_of(QKV_CLIENT_FP16, tokens, settings->kv_heads, settings->dim, traffic->k),
      .v = tensor_of(QKV_CLIENT_FP16, tokens, settings->kv_heads, settings->dim, traffic->v)};
  return qkv_client_append(client, &item, 1, NULL, &error) == 0 ? 0 : qkv_bench_failed("append", &error);
}

int qkv_bench_traffic_attend(const qkv_bench_traffic *traffic, qkv_client *client, const char *session,
                             int64_t layer) {
  const qkv_bench_settings *settings = traffic->settings;
  qkv_call_error error = {0};
  qkv_client_result result;
  const qkv_client_item item = {.session = session,
                                .layer = (uint32_t)layer,
                                .position = (uint64_t)settings->tokens - 1,
                                .q = tensor_of(QKV_CLIENT_FP32, 1, settings->q_heads, settings->dim, traffic->q)};
  if (qkv_client_attend(client, &item, 1, &result, &error) != 0) return qkv_bench_failed("attend", &error);
  qkv_client_results_free(&result, 1);
  return 0;
}

int qkv_bench_traffic_prefetch(const qkv_bench_traffic *traffic, qkv_client *client, const char *session,
                               int64_t layer) {
  (void)traffic;
  const uint32_t of = (uint32_t)layer;
  const qkv_client_scope scope = {.session = session, .layers = &of, .layer_count = 1};
  qkv_call_error error = {0};
  return qkv_client_promote(client, &scope, 0, NULL, &error) == 0 ? 0 : qkv_bench_failed("prefetch", &error);
}
