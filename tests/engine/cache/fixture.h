// What the tests of the cache share: models, rows from a seed, and layers made of them.
#ifndef QKV_TESTS_ENGINE_CACHE_FIXTURE_H
#define QKV_TESTS_ENGINE_CACHE_FIXTURE_H

#include <assert.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/base/arena.h"
#include "engine/base/tensor.h"
#include "engine/cache/attend.h"
#include "engine/cache/layer.h"
#include "engine/cache/model.h"
#include "engine/codec/calibrate.h"
#include "tests/engine/codec/coder.h"

#define TEST_LAYER 2

static inline uint64_t random_next(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Uniform in [0, limit).
static inline uint64_t random_below(uint64_t *state, uint64_t limit) {
  return random_next(state) % limit;
}

// About N(0, 1): the sum of four uniforms, scaled.
static inline float random_normal(uint64_t *state) {
  double sum = 0;
  for (int i = 0; i < 4; i++) sum += (double)(random_next(state) >> 11) * 0x1p-53;
  return (float)((sum - 2) * sqrt(3));
}

static inline double square(double x) {
  return x * x;
}

static inline float *random_floats(uint64_t seed, size_t count) {
  float *values = malloc(count * sizeof *values);
  assert_non_null(values);
  for (size_t i = 0; i < count; i++) values[i] = random_normal(&seed);
  return values;
}

static inline qkv_model test_model(uint32_t kv_heads, uint32_t group, uint32_t key_dim, uint32_t value_dim,
                                   qkv_dtype dtype) {
  qkv_model model = {.name = "tiny",
                     .layers = 4,
                     .kv_heads = kv_heads,
                     .q_heads = kv_heads * group,
                     .key_dim = key_dim,
                     .value_dim = value_dim,
                     .dtype = dtype,
                     .policy = QKV_POLICY_UNSET};
  qkv_error error = {0};
  if (qkv_model_resolve(&model, &error) != QKV_OK) fail_msg("%s", error.text);
  return model;
}

static inline qkv_policy test_policy(double bits_k, double bits_v, int64_t recent_window) {
  return (qkv_policy){.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED),
                      .bits_k = bits_k,
                      .bits_v = bits_v,
                      .recent_window = recent_window};
}

// Rows [tokens][kv_heads][dim] of a whole sequence, K and V, as floats that the model's dtype holds exactly.
typedef struct sequence {
  const qkv_model *model;
  uint64_t tokens;
  float *k, *v;
} sequence;

static inline void round_to(qkv_dtype dtype, float *values, size_t count) {
  uint8_t *narrow = malloc(count * qkv_dtype_size(dtype) + 1);
  assert_non_null(narrow);
  qkv_from_float(dtype, values, narrow, count);
  qkv_to_float(dtype, narrow, values, count);
  free(narrow);
}

static inline sequence make_sequence(const qkv_model *model, uint64_t tokens, uint64_t seed) {
  size_t k_count = (size_t)tokens * model->kv_heads * model->key_dim;
  size_t v_count = (size_t)tokens * model->kv_heads * model->value_dim;
  sequence made = {.model = model,
                   .tokens = tokens,
                   .k = random_floats(seed, k_count + 1),
                   .v = random_floats(seed + 1, v_count + 1)};
  round_to(model->dtype, made.k, k_count);
  round_to(model->dtype, made.v, v_count);
  return made;
}

static inline void free_sequence(sequence *rows) {
  free(rows->k);
  free(rows->v);
}

// A tensor over floats that are converted to `dtype`; owns its bytes.
typedef struct test_tensor {
  qkv_segment segment;
  qkv_tensor tensor;
} test_tensor;

static inline void make_tensor(test_tensor *made, qkv_dtype dtype, const float *values, int64_t tokens, int64_t heads,
                               int64_t dim) {
  size_t count = (size_t)(tokens * heads * dim);
  uint8_t *bytes = malloc(count * qkv_dtype_size(dtype) + 1);
  assert_non_null(bytes);
  qkv_from_float(dtype, values, bytes, count);
  made->segment = (qkv_segment){.data = bytes, .length = count * qkv_dtype_size(dtype)};
  made->tensor = qkv_tensor_dense(dtype, 3, (int64_t[]){tokens, heads, dim}, &made->segment);
}

static inline void free_tensor(test_tensor *made) {
  free((void *)made->segment.data);
}

typedef struct row_pair {
  test_tensor k, v;
} row_pair;

// Tokens [begin, end) of a sequence as tensors of `dtype`.
static inline void make_pair(row_pair *made, const sequence *rows, uint64_t begin, uint64_t end, qkv_dtype dtype) {
  const qkv_model *model = rows->model;
  make_tensor(&made->k, dtype, rows->k + begin * model->kv_heads * model->key_dim, (int64_t)(end - begin),
              model->kv_heads, model->key_dim);
  make_tensor(&made->v, dtype, rows->v + begin * model->kv_heads * model->value_dim, (int64_t)(end - begin),
              model->kv_heads, model->value_dim);
}

static inline void free_pair(row_pair *made) {
  free_tensor(&made->k);
  free_tensor(&made->v);
}

// A coder for all of a model's layers, data-free, in the plain frame. Owned by the caller.
static inline qkv_coder *test_coder(const qkv_model *model, qkv_policy policy) {
  qkv_coder *coder = coder_create((uint16_t)model->kv_heads, (uint16_t)model->key_dim, (uint16_t)model->value_dim,
                                  policy.bits_k, policy.bits_v, QKV_FRAME_PLAIN, &model->rope);
  coder->layer = TEST_LAYER;
  return coder;
}

static inline qkv_layer_config test_layer_config(const qkv_model *model, qkv_policy policy, uint64_t first_position,
                                                 qkv_arena *arena) {
  return (qkv_layer_config){
      .model = model, .policy = policy, .layer = TEST_LAYER, .first_position = first_position, .arena = arena};
}

// A layer with a coder of its own, which goes with it in deinit_layer.
static inline void init_layer(qkv_layer *layer, const qkv_model *model, qkv_policy policy, uint64_t first_position,
                              qkv_arena *arena) {
  const qkv_layer_config config = test_layer_config(model, policy, first_position, arena);
  qkv_layer_init(layer, &config, test_coder(model, policy));
}

static inline void deinit_layer(qkv_layer *layer) {
  const qkv_coder *coder = layer->coder;
  qkv_layer_deinit(layer);
  coder_destroy(coder);
}

// Appends tokens [begin, end) of a sequence whose token 0 stands at the layer's first position.
static inline qkv_status append_range(qkv_layer *layer, const sequence *rows, uint64_t begin, uint64_t end,
                                      qkv_error *error) {
  row_pair pair;
  make_pair(&pair, rows, begin, end, layer->config.model->dtype);
  uint64_t appended, before = layer->length;
  qkv_status status = qkv_layer_append(layer, layer->config.first_position + begin, &pair.k.tensor, &pair.v.tensor,
                                       false, &appended, error);
  assert_int_equal(appended, layer->length - before);
  free_pair(&pair);
  return status;
}

static inline void must_append(qkv_layer *layer, const sequence *rows, uint64_t begin, uint64_t end) {
  qkv_error error = {0};
  if (append_range(layer, rows, begin, end, &error) != QKV_OK) fail_msg("%s", error.text);
}

static inline void assert_valid(const qkv_layer *layer) {
  const char *reason = qkv_layer_validate(layer);
  if (reason != NULL) fail_msg("%s", reason);
}

// All decoded rows of one part.
static inline float *decoded_rows(const qkv_layer *layer, qkv_part part) {
  const qkv_model *model = layer->config.model;
  uint64_t tokens = layer->length - layer->config.first_position;
  size_t dim = part == QKV_K ? model->key_dim : model->value_dim;
  float *rows = malloc((tokens + 1) * model->kv_heads * dim * sizeof *rows);
  assert_non_null(rows);
  qkv_layer_rows(layer, part, layer->config.first_position, tokens, false, rows);
  return rows;
}

// Two layers hold the same: lengths, pages byte for byte, exact rows.
static inline void assert_same_state(const qkv_layer *a, const qkv_layer *b) {
  assert_int_equal(a->length, b->length);
  assert_int_equal(a->sealed, b->sealed);
  assert_int_equal(a->page_count, b->page_count);
  assert_int_equal(a->tail_count, b->tail_count);
  for (size_t i = 0; i < a->page_count; i++) {
    assert_int_equal(qkv_layer_page(a, i)->tokens, qkv_layer_page(b, i)->tokens);
    assert_int_equal(qkv_layer_page(a, i)->bytes, qkv_layer_page(b, i)->bytes);
    assert_memory_equal(qkv_layer_page(a, i)->page, qkv_layer_page(b, i)->page, qkv_layer_page(a, i)->bytes);
  }
  for (int part = QKV_K; part <= QKV_V; part++) {
    const qkv_model *model = a->config.model;
    size_t dim = part == QKV_K ? model->key_dim : model->value_dim;
    float *rows_a = decoded_rows(a, (qkv_part)part), *rows_b = decoded_rows(b, (qkv_part)part);
    assert_memory_equal(rows_a, rows_b,
                        (a->length - a->config.first_position) * model->kv_heads * dim * sizeof *rows_a);
    free(rows_a);
    free(rows_b);
  }
}

// From random rows: another one for each seed. The caller gives it back.
static inline const qkv_calibration *test_calibration(const qkv_model *model, uint64_t seed) {
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  sequence rows = make_sequence(model, 128, seed);
  qkv_moments *moments = qkv_moments_create(&shape);
  for (uint32_t layer = 0; layer < model->layers; layer++)
    qkv_moments_add(moments, layer, 0, 128, rows.k, rows.v, false);
  qkv_calibration *calibration = NULL;
  assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &calibration, NULL), QKV_OK);
  qkv_moments_destroy(&moments);
  free_sequence(&rows);
  return calibration;
}

#endif
