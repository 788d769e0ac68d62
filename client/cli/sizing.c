#include "client/cli/sizing.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/clock.h"
#include "engine/codec/moments.h"
#include "storage/record.h"

enum {
  TOKENS_FIRST = 1024,  // of the two sizes that longer sessions are told from, and half of the larger one
  CHUNK = 256,
  REPEATS = 3,  // of the query that is timed
};
#define SIZING_BUDGET (UINT64_C(1) << 40)

typedef struct measured {
  double bytes;         // of the arena
  double sealed_bytes;  // of pages
  double sealed_pages;  //
  double seconds, attend_seconds;
} measured;

// Sums of uniform numbers, of about variance 1; the same ones each time.
static void fill(qkv_dtype dtype, void *out, size_t count) {
  uint64_t state = 1;
  float row[64];
  uint8_t *at = out;
  for (size_t i = 0; i < count; i += 64) {
    const size_t here = count - i < 64 ? count - i : 64;
    for (size_t j = 0; j < here; j++) {
      float sum = -6;
      for (int n = 0; n < 12; n++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(state >> 40) / (float)(1 << 24);
      }
      row[j] = sum;
    }
    qkv_from_float(dtype, row, at, here);
    at += here * qkv_dtype_size(dtype);
  }
}

// Dense rows of random numbers, to be freed by their data.
static qkv_tensor make_rows(qkv_dtype dtype, int64_t tokens, int64_t heads, int64_t dim, qkv_segment *segment) {
  const size_t count = (size_t)(tokens * heads * dim);
  void *data = malloc(count * qkv_dtype_size(dtype) + 1);
  assert(data != NULL);
  fill(dtype, data, count);
  *segment = (qkv_segment){.data = data, .length = count * qkv_dtype_size(dtype)};
  return qkv_tensor_dense(dtype, 3, (const int64_t[]){tokens, heads, dim}, segment);
}

// The same rows again and again, whose making does not count; the seconds of a layer are added.
static qkv_status append_layer(qkv_session *session, const qkv_model *model, uint32_t layer, uint64_t tokens,
                               double *seconds, qkv_error *error) {
  qkv_segment parts[2], cut[2];
  qkv_status status = QKV_OK;
  (void)make_rows(model->dtype, CHUNK, model->kv_heads, model->key_dim, &parts[QKV_K]);
  (void)make_rows(model->dtype, CHUNK, model->kv_heads, model->value_dim, &parts[QKV_V]);
  for (uint64_t at = 0; at < tokens && status == QKV_OK; at += CHUNK) {
    const int64_t here = tokens - at < CHUNK ? (int64_t)(tokens - at) : CHUNK;
    const int64_t dims[2] = {model->key_dim, model->value_dim};
    qkv_tensor rows[2];
    uint64_t appended, length;
    for (int i = 0; i < 2; i++) {
      cut[i] = (qkv_segment){.data = parts[i].data, .length = parts[i].length / CHUNK * (size_t)here};
      rows[i] = qkv_tensor_dense(model->dtype, 3, (const int64_t[]){here, model->kv_heads, dims[i]}, &cut[i]);
    }
    const double began = qkv_now_s();
    status = qkv_session_append(session, layer, at, &rows[QKV_K], &rows[QKV_V], false, &appended, &length, error);
    *seconds += qkv_now_s() - began;
  }
  for (int i = 0; i < 2; i++) free((void *)(uintptr_t)parts[i].data);
  return status;
}

// A query at the layer's end: the quickest of some.
static qkv_status attend_layer(qkv_session *session, const qkv_model *model, uint32_t layer, uint64_t tokens,
                               double *seconds, qkv_error *error) {
  const qkv_layer *read = NULL;
  qkv_segment part;
  const qkv_tensor q = make_rows(model->dtype, 1, model->q_heads, model->key_dim, &part);
  float *out = calloc((size_t)model->q_heads * (model->value_dim + 1), sizeof *out);
  assert(out != NULL);
  qkv_status status = qkv_session_read(session, layer, &read, error);
  if (status == QKV_OK) {
    const qkv_attend request = {.layer = read,
                                .position = tokens - 1,
                                .q = q,
                                .out = out,
                                .lse = out + (size_t)model->q_heads * model->value_dim};
    for (int i = 0; i < REPEATS; i++) {
      const double began = qkv_now_s();
      qkv_attend_run(NULL, &request, 1);
      const double took = qkv_now_s() - began;
      if (i == 0 || took < *seconds) *seconds = took;
    }
    qkv_session_read_done(session, layer);
  }
  free(out);
  free((void *)(uintptr_t)part.data);
  return status;
}

static qkv_status run(qkv_store *store, const qkvctl_sizing *sizing, const qkv_model *model, uint64_t tokens,
                      measured *found, qkv_error *error) {
  qkv_session *session = NULL;
  qkv_session_config config = {.name = "s",
                               .tenant = "default",
                               .purpose = sizing->purpose,
                               .policy = QKV_POLICY_UNSET,
                               .ema = {.alpha = 0.996, .sample_every = 1}};
  const uint64_t before = qkv_arena_read(qkv_store_arena(store)).bytes_used;
  QKV_TRY(qkv_store_register_model(store, model, NULL, error));
  QKV_TRY(qkv_store_open(store, &config, model->name, &session, error));
  qkv_status status = QKV_OK;
  for (uint32_t layer = 0; layer < model->layers && status == QKV_OK; layer++)
    status = append_layer(session, model, layer, tokens, &found->seconds, error);
  for (uint32_t layer = 0; layer < model->layers && status == QKV_OK && tokens > 0; layer++)
    status = attend_layer(session, model, layer, tokens, &found->attend_seconds, error);
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  found->bytes = (double)(qkv_arena_read(qkv_store_arena(store)).bytes_used - before);
  found->sealed_bytes = (double)info.usage.bytes_coded;
  found->sealed_pages = (double)info.usage.tokens_coded / QKV_PAGE_TOKENS;
  qkv_session_unref(&session);
  return status;
}

// So many tokens in so many layers.
static qkv_status measure(const qkvctl_sizing *sizing, uint32_t layers, uint64_t tokens, measured *found,
                          qkv_error *error) {
  *found = (measured){0};
  qkv_model model = *sizing->model;
  model.layers = layers;
  model.policy = QKV_POLICY_UNSET;
  model.overrides = NULL;
  model.override_count = 0;
  qkv_store *store = qkv_store_create(&(qkv_store_config){
      .memory_budget = SIZING_BUDGET, .models_max = 1, .sessions_max = 1, .policy = *sizing->policy});
  const qkv_status status = run(store, sizing, &model, tokens, found, error);
  qkv_store_destroy(&store);
  return status;
}

// What a session of so many tokens has in all layers.
static qkv_status all_layers(const qkvctl_sizing *sizing, uint64_t tokens, measured *found, qkv_error *error) {
  measured one, two;
  QKV_TRY(measure(sizing, 1, tokens, &one, error));
  QKV_TRY(measure(sizing, 2, tokens, &two, error));
  const double more = (double)sizing->model->layers - 1, layers = (double)sizing->model->layers;
  *found = (measured){.bytes = one.bytes + more * (two.bytes - one.bytes),
                      .sealed_bytes = layers * one.sealed_bytes,
                      .sealed_pages = layers * one.sealed_pages,
                      .seconds = layers / 2 * two.seconds,
                      .attend_seconds = layers * one.attend_seconds};
  return QKV_OK;
}

static double between(double a, double b, double times) {
  return b + (b - a) * times;
}

qkv_status qkvctl_size_session(const qkvctl_sizing *sizing, qkvctl_need *need, qkv_error *error) {
  measured found, longer;
  qkv_model resolved = *sizing->model;
  QKV_TRY(qkv_model_resolve(&resolved, error));
  // Of long sessions two sizes that end in their pages as it does.
  const uint64_t rest = sizing->tokens % QKV_PAGE_TOKENS;
  const bool extrapolated = sizing->tokens > 2 * TOKENS_FIRST + rest;
  QKV_TRY(all_layers(sizing, extrapolated ? TOKENS_FIRST + rest : sizing->tokens, &found, error));
  uint64_t timed = sizing->tokens;
  if (extrapolated) {
    QKV_TRY(all_layers(sizing, 2 * TOKENS_FIRST + rest, &longer, error));
    const double times = (double)(sizing->tokens - rest - 2 * TOKENS_FIRST) / TOKENS_FIRST;
    timed = 2 * TOKENS_FIRST + rest;
    found = (measured){.bytes = between(found.bytes, longer.bytes, times),
                       .sealed_bytes = between(found.sealed_bytes, longer.sealed_bytes, times),
                       .sealed_pages = between(found.sealed_pages, longer.sealed_pages, times),
                       .seconds = longer.seconds,
                       .attend_seconds = between(found.attend_seconds, longer.attend_seconds, times)};
  }
  const qkv_calibration_shape shape = qkv_model_calibration_shape(&resolved);
  const double page = found.sealed_pages > 0 ? found.sealed_bytes / found.sealed_pages : 0;
  const double blocks = ceil((sizeof(qkv_record_header) + page) / QKV_STORAGE_BLOCK);
  *need = (qkvctl_need){.memory = found.bytes,
                        .stored = found.sealed_pages * blocks * QKV_STORAGE_BLOCK,
                        .append_seconds = timed > 0 ? found.seconds / (double)timed : 0,
                        .attend_seconds = found.attend_seconds > 0 ? found.attend_seconds : 0,
                        .learning = (double)qkv_moments_bytes(&shape)};
  return QKV_OK;
}
