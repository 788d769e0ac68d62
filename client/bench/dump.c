#include "client/bench/dump.h"

#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

qkv_model qkvi_dump_model(const qkv_dump *dump, const qkv_calibration *calibration, double rope_theta) {
  const qkv_dump_kind queries = qkv_dump_has_queries(dump) ? QKV_DUMP_Q : QKV_DUMP_K;
  qkv_model model = {.name = "dump",
                     .kv_heads = qkv_dump_heads(dump, QKV_DUMP_K),
                     .q_heads = qkv_dump_heads(dump, queries),
                     .key_dim = qkv_dump_width(dump, QKV_DUMP_K),
                     .value_dim = qkv_dump_width(dump, QKV_DUMP_V),
                     .dtype = QKV_FP32,
                     .rope = {.theta = rope_theta},
                     .policy = QKV_POLICY_UNSET};
  for (size_t i = 0; i < qkv_dump_layers(dump); i++) {
    if (qkv_dump_number(dump, i) >= model.layers) model.layers = qkv_dump_number(dump, i) + 1;
  }
  if (calibration == NULL) return model;
  // A later check reports what disagrees.
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(calibration);
  if (shape->layers > model.layers) model.layers = shape->layers;
  if (!qkv_dump_has_queries(dump)) model.q_heads = shape->q_heads;
  if (model.rope.theta == 0) model.rope = shape->rope;
  return model;
}

// ---- Rows ----

static float *floats(int64_t rows, int64_t columns) {
  float *values = calloc((size_t)rows, (size_t)columns * sizeof(float));
  if (values == NULL) abort();
  return values;
}

// The last `tokens` of a layer's rows as fp32, [tokens, heads, dim], after RoPE where `rope` is not NULL; the first
// of them is at `position`. The caller frees.
static float *load(const qkv_dump *dump, size_t index, qkv_dump_kind kind, int64_t tokens, uint64_t position,
                   const qkv_rope *rope) {
  const int64_t heads = qkv_dump_heads(dump, kind), dim = qkv_dump_width(dump, kind);
  float *rows = floats(tokens * heads, dim);
  const uint64_t first = qkv_dump_tokens(dump, index, kind) - (uint64_t)tokens;
  qkv_dump_read(dump, index, kind, first, (uint64_t)tokens, rows);
  for (int64_t row = 0; rope != NULL && row < tokens * heads; row++) {
    qkv_rope_forward(rope, rows + row * dim, position + (uint64_t)(row / heads));
  }
  return rows;
}

// Attention of one layer's queries.
typedef struct dump_attention {
  const qkv_model *model;
  const float *q;  // [queries, q_heads, key_dim], of the last tokens
  int64_t queries, tokens;
  float *scores;  // [queries, tokens]
} dump_attention;

static void softmax(float *scores, int64_t visible, int64_t count) {
  float max = scores[0];
  double sum = 0;
  for (int64_t i = 1; i < visible; i++) max = scores[i] > max ? scores[i] : max;
  for (int64_t i = 0; i < visible; i++) {
    scores[i] = expf(scores[i] - max);
    sum += scores[i];
  }
  for (int64_t i = 0; i < visible; i++) scores[i] = (float)(scores[i] / sum);
  memset(scores + visible, 0, (size_t)(count - visible) * sizeof *scores);
}

// out [queries, q_heads, value_dim], causal.
static void attend(const dump_attention *attention, const float *k, const float *v, float *out) {
  const qkv_model *model = attention->model;
  const int n = (int)attention->queries, tokens = (int)attention->tokens;
  const int key = (int)model->key_dim, value = (int)model->value_dim;
  const int q_heads = (int)model->q_heads, kv_heads = (int)model->kv_heads;
  for (int head = 0; head < q_heads; head++) {
    const int kv_head = head / (q_heads / kv_heads);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, tokens, key, (float)model->scale,
                attention->q + (size_t)head * (size_t)key, q_heads * key, k + (size_t)kv_head * (size_t)key,
                kv_heads * key, 0, attention->scores, tokens);
    for (int i = 0; i < n; i++) softmax(attention->scores + (int64_t)i * tokens, tokens - n + i + 1, tokens);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, value, tokens, 1, attention->scores, tokens,
                v + (size_t)kv_head * (size_t)value, kv_heads * value, 0, out + (size_t)head * (size_t)value,
                q_heads * value);
  }
}

// Rows of one layer, all in fp32.
typedef struct layer_rows {
  int64_t tokens;
  uint64_t position;
  float *k, *v, *k_out, *v_out;
  float *q, *out, *coded_out;  // NULL without queries
} layer_rows;

static void measure_coding(const layer_rows *rows, const dump_attention *attention, const qkv_coder *coder,
                           qkv_dtype dtype, qkvi_probe_layer *sums) {
  qkvi_recode(coder, dtype, rows->position, (uint64_t)rows->tokens, rows->k, rows->v, rows->k_out, rows->v_out,
              &sums->rows);
  if (rows->q == NULL) return;
  attend(attention, rows->k_out, rows->v_out, rows->coded_out);
  const int64_t dim = attention->model->value_dim;
  for (int64_t row = 0; row < attention->queries * (int64_t)attention->model->q_heads; row++) {
    qkvi_probe_add_attention(rows->out + row * dim, rows->coded_out + row * dim, dim, sums);
  }
}

qkv_status qkvi_dump_measure(const qkv_dump *dump, const qkv_model *model, size_t index, qkv_dtype dtype,
                             qkv_coding *const *codings, size_t count, qkvi_probe_layer *sums, qkv_error *error) {
  const bool before_rope = qkv_dump_before_rope(dump);
  if (before_rope && model->rope.theta == 0) {
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "its rows are from before RoPE, which is not known here");
  }
  openblas_set_num_threads(1);
  const qkv_rope *rope = before_rope ? &model->rope : NULL;
  layer_rows rows = {.tokens = (int64_t)qkv_dump_tokens(dump, index, QKV_DUMP_K),
                     .position = qkv_dump_first_position(dump)};
  rows.k = load(dump, index, QKV_DUMP_K, rows.tokens, rows.position, rope);
  rows.v = load(dump, index, QKV_DUMP_V, rows.tokens, 0, NULL);
  rows.k_out = floats(rows.tokens * (int64_t)model->kv_heads, model->key_dim);
  rows.v_out = floats(rows.tokens * (int64_t)model->kv_heads, model->value_dim);
  dump_attention attention = {.model = model, .tokens = rows.tokens};
  if (qkv_dump_has_queries(dump)) {
    const int64_t all = (int64_t)qkv_dump_tokens(dump, index, QKV_DUMP_Q);
    attention.queries = all < QKVI_DUMP_QUERIES ? all : QKVI_DUMP_QUERIES;
    attention.q = rows.q = load(dump, index, QKV_DUMP_Q, attention.queries,
                                rows.position + (uint64_t)(rows.tokens - attention.queries), rope);
    attention.scores = floats(attention.queries, rows.tokens);
    rows.out = floats(attention.queries * (int64_t)model->q_heads, model->value_dim);
    rows.coded_out = floats(attention.queries * (int64_t)model->q_heads, model->value_dim);
    attend(&attention, rows.k, rows.v, rows.out);
  }
  for (size_t i = 0; i < count; i++) {
    measure_coding(&rows, &attention, qkv_coding_layer(codings[i], qkv_dump_number(dump, index)), dtype, &sums[i]);
  }
  float *blocks[] = {rows.k, rows.v, rows.k_out, rows.v_out, rows.q, rows.out, rows.coded_out, attention.scores};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
  return QKV_OK;
}
