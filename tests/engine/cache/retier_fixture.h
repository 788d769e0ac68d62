// For the tests of averages and tiers: a layer that counts attention, and float64 attention over what it decodes to.
#ifndef QKV_TESTS_ENGINE_CACHE_RETIER_FIXTURE_H
#define QKV_TESTS_ENGINE_CACHE_RETIER_FIXTURE_H

#include "engine/cache/layer_retier.h"
#include "tests/engine/cache/fixture.h"

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_layer layer;
} scene;

static inline void setup_scene(scene *s, qkv_model model, qkv_policy policy, uint64_t tokens, qkv_ema_options ema,
                               bool keep_full) {
  *s = (scene){.model = model, .arena = qkv_arena_create("memory-budget", (uint64_t)1 << 28)};
  s->rows = make_sequence(&s->model, tokens, 31);
  qkv_layer_config config = test_layer_config(&s->model, policy, 0, s->arena);
  config.ema = ema;
  config.keep_full = keep_full;
  qkv_layer_init(&s->layer, &config, test_coder(&s->model, policy));
}

static inline void teardown_scene(scene *s) {
  deinit_layer(&s->layer);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  assert_int_equal(qkv_arena_read(s->arena).bytes_reserved, 0);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

// A request with queries from a seed, and buffers for its results. It must not move.
typedef struct question {
  test_tensor tensor;
  float *q;
  qkv_attend request;
} question;

static inline void ask(question *asked, const qkv_layer *layer, int64_t queries, uint64_t position, uint64_t seed,
                       float size) {
  const qkv_model *model = layer->config.model;
  const size_t rows = (size_t)queries * model->q_heads;
  asked->q = random_floats(seed, rows * model->key_dim);
  for (size_t i = 0; i < rows * model->key_dim; i++) asked->q[i] *= size;
  make_tensor(&asked->tensor, QKV_FP32, asked->q, queries, model->q_heads, model->key_dim);
  asked->request = (qkv_attend){.layer = layer,
                                .position = position,
                                .q = asked->tensor.tensor,
                                .out = calloc(rows * model->value_dim, sizeof(float)),
                                .lse = calloc(rows, sizeof(float))};
}

static inline void forget(question *asked) {
  free_tensor(&asked->tensor);
  free(asked->q);
  free(asked->request.out);
  free(asked->request.lse);
}

// In floats unless the request says otherwise: what is compared with float64.
static inline void run(qkv_pool *pool, const qkv_attend *request) {
  qkv_error error = {0};
  qkv_attend exact = *request;
  if (exact.options.precision == QKV_PRECISION_DEFAULT) exact.options.precision = QKV_PRECISION_FP32;
  if (qkv_attend_check(&exact, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_attend_run(pool, &exact, 1);
}

// Softmax weights of one query head over the tokens of the layer, from its decoded keys.
static inline void exact_weights(const question *asked, const float *k, int64_t query, uint32_t head,
                                 double *weights) {
  const qkv_layer *layer = asked->request.layer;
  const qkv_model *model = layer->config.model;
  const uint32_t kv_head = head / (model->q_heads / model->kv_heads);
  const float *q = asked->q + ((size_t)query * model->q_heads + head) * model->key_dim;
  const uint64_t stand = asked->request.position + (uint64_t)query;
  double peak = -INFINITY, total = 0;
  for (uint64_t t = 0; t < layer->length; t++) {
    double sum = 0;
    for (size_t i = 0; i < model->key_dim; i++) {
      sum += (double)q[i] * (double)k[(t * model->kv_heads + kv_head) * model->key_dim + i];
    }
    const bool seen = t <= stand && (model->sliding_window == 0 || t + model->sliding_window > stand);
    weights[t] = seen ? sum * model->scale : -INFINITY;
    peak = fmax(peak, weights[t]);
  }
  for (uint64_t t = 0; t < layer->length; t++) total += weights[t] = exp(weights[t] - peak);
  for (uint64_t t = 0; t < layer->length; t++) weights[t] /= total;
}

// The answers are those of float64 attention over the layer's decoded rows.
static inline void check_answers(const question *asked) {
  const qkv_layer *layer = asked->request.layer;
  const qkv_model *model = layer->config.model;
  float *k = decoded_rows(layer, QKV_K), *v = decoded_rows(layer, QKV_V);
  double *weights = calloc(layer->length + 1, sizeof *weights);
  for (int64_t query = 0; query < asked->request.q.dims[0]; query++) {
    for (uint32_t head = 0; head < model->q_heads; head++) {
      const float *out = asked->request.out + ((size_t)query * model->q_heads + head) * model->value_dim;
      const uint32_t kv_head = head / (model->q_heads / model->kv_heads);
      double error = 0, norm = 0;
      exact_weights(asked, k, query, head, weights);
      for (size_t i = 0; i < model->value_dim; i++) {
        double expected = 0;
        for (uint64_t t = 0; t < layer->length; t++) {
          expected += weights[t] * (double)v[(t * model->kv_heads + kv_head) * model->value_dim + i];
        }
        error += square((double)out[i] - expected);
        norm += square(expected);
      }
      if (!(error <= 1e-10 * norm)) fail_msg("query %d head %u: relative error %g", (int)query, head, error / norm);
    }
  }
  free(weights);
  free(k);
  free(v);
}

// Brings one page to tiers, as far as they are held.
static inline qkv_status set_tiers(qkv_layer *layer, size_t index, const qkv_head_tiers *tiers, qkv_error *error) {
  qkv_cut cut;
  qkv_status status = QKV_OK;
  if (qkv_layer_cut(layer, index, qkv_layer_page(layer, index)->serial, tiers, &cut)) {
    status = qkv_layer_exchange(layer, &cut, error);
    qkv_cut_deinit(&cut);
  }
  return status;
}

static inline void set_even_tier(qkv_layer *layer, size_t index, uint8_t tier) {
  qkv_head_tiers tiers[16];
  qkv_error error = {0};
  assert_true(layer->config.model->kv_heads <= 16);
  memset(tiers, tier, sizeof tiers);
  if (set_tiers(layer, index, tiers, &error) != QKV_OK) fail_msg("%s", error.text);
}

#endif
