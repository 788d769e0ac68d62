#include "client/bench/tiered.h"

#include <assert.h>
#include <stdlib.h>

#include "engine/cache/attend.h"
#include "engine/cache/session_retier.h"

struct qkvi_tiered {
  const qkv_model *model;
  qkv_arena *arena;
  qkv_session *session;
};

qkvi_tiered *qkvi_tiered_create(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose) {
  const qkv_session_config config = {.name = "tiered",
                                     .tenant = "default",
                                     .purpose = purpose,
                                     .policy = *policy,
                                     .ema = {QKV_EMA_ALPHA, QKV_EMA_SAMPLE_EVERY}};
  qkvi_tiered *tiered = calloc(1, sizeof *tiered);
  if (tiered == NULL) abort();
  tiered->model = model;
  tiered->arena = qkv_arena_create("tiers", (uint64_t)1 << 40);
  const qkv_status status = qkv_session_create(&config, model, tiered->arena, &tiered->session, NULL);
  assert(status == QKV_OK);
  (void)status;
  return tiered;
}

void qkvi_tiered_destroy(qkvi_tiered **tiered) {
  if (*tiered == NULL) return;
  qkv_session_unref(&(*tiered)->session);
  qkv_arena_destroy(&(*tiered)->arena);
  free(*tiered);
  *tiered = NULL;
}

// Rows in one piece, as the engine takes them.
typedef struct dense_rows {
  qkv_segment segment;
  qkv_tensor tensor;
} dense_rows;

static void describe(const float *data, uint64_t tokens, uint32_t heads, uint32_t dim, dense_rows *rows) {
  rows->segment = (qkv_segment){.data = (const uint8_t *)data, .length = tokens * heads * dim * sizeof *data};
  rows->tensor = qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){(int64_t)tokens, heads, dim}, &rows->segment);
}

static void attend(qkvi_tiered *tiered, uint32_t layer, uint64_t position, uint64_t tokens, const float *q) {
  const qkv_model *model = tiered->model;
  const size_t rows = (size_t)tokens * model->q_heads;
  float *out = calloc(rows * (model->value_dim + 1), sizeof *out);
  if (out == NULL) abort();
  dense_rows queries;
  describe(q, tokens, model->q_heads, model->key_dim, &queries);
  qkv_attend request = {.position = position, .q = queries.tensor, .out = out, .lse = out + rows * model->value_dim};
  const qkv_status status = qkv_session_read(tiered->session, layer, &request.layer, NULL);
  assert(status == QKV_OK && qkv_attend_check(&request, NULL) == QKV_OK);
  (void)status;
  qkv_attend_run(NULL, &request, 1);
  qkv_session_read_done(tiered->session, layer);
  free(out);
}

void qkvi_tiered_add(qkvi_tiered *tiered, uint32_t layer, uint64_t position, uint64_t tokens, const float *k,
                     const float *v, const float *q) {
  const qkv_model *model = tiered->model;
  uint64_t appended, length;
  dense_rows keys, values;
  describe(k, tokens, model->kv_heads, model->key_dim, &keys);
  describe(v, tokens, model->kv_heads, model->value_dim, &values);
  const qkv_status status = qkv_session_append(tiered->session, layer, position, &keys.tensor, &values.tensor, false,
                                               &appended, &length, NULL);
  assert(status == QKV_OK && appended == tokens);
  (void)status;
  attend(tiered, layer, position, tokens, q);
}

void qkvi_tiered_demote(qkvi_tiered *tiered, double bits) {
  const qkv_retier_scope all = {0};
  qkv_retier_report report = {0};
  const qkv_status status = qkv_session_demote(tiered->session, &all, bits, false, &report, NULL);
  assert(status == QKV_OK);
  (void)status;
}

void qkvi_tiered_read(qkvi_tiered *tiered, uint32_t layer, uint64_t tokens, const float *k, const float *v,
                      float *k_out, float *v_out, qkvi_recoded *sums) {
  const qkv_model *model = tiered->model;
  const qkv_layer *read;
  const qkv_status status = qkv_session_read(tiered->session, layer, &read, NULL);
  assert(status == QKV_OK);
  (void)status;
  const qkv_layer_usage usage = qkv_layer_read_usage(read);
  assert(usage.tokens_coded == tokens);
  qkv_layer_rows(read, QKV_K, 0, tokens, false, k_out);
  qkv_layer_rows(read, QKV_V, 0, tokens, false, v_out);
  qkv_session_read_done(tiered->session, layer);
  sums->bytes += usage.bytes_coded;
  qkvi_recoded_compare(model->kv_heads, model->key_dim, model->value_dim, tokens, k, v, k_out, v_out, sums);
}
