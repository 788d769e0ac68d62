// What the tests of attention share: a layer with rows and queries from seeds, and attention in float64 over its
// decoded rows, straight from the definition.
#ifndef QKV_TESTS_ENGINE_CACHE_ATTEND_SCENE_H
#define QKV_TESTS_ENGINE_CACHE_ATTEND_SCENE_H

#include "tests/engine/cache/fixture.h"

#define BUDGET ((uint64_t)1 << 30)

// A layer of its own with rows and queries from seeds, and buffers for results.
typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_layer layer;
  int64_t queries;
  float *q;
  test_tensor q_tensor;
  qkv_attend request;
  float *k, *v;  // decoded
} scene;

static inline void set_queries(scene *s, int64_t queries, uint32_t group, uint64_t seed) {
  if (s->q != NULL) {
    free(s->q);
    free(s->request.out);
    free(s->request.lse);
    free_tensor(&s->q_tensor);
  }
  s->model.q_heads = s->model.kv_heads * group;
  s->queries = queries;
  size_t rows = (size_t)queries * s->model.q_heads;
  s->q = random_floats(seed, rows * s->model.key_dim);
  make_tensor(&s->q_tensor, QKV_FP32, s->q, queries, s->model.q_heads, s->model.key_dim);
  s->request = (qkv_attend){.layer = &s->layer, .q = s->q_tensor.tensor};
  s->request.position = s->layer.length > (uint64_t)queries ? s->layer.length - (uint64_t)queries : 0;
  s->request.out = calloc(rows * s->model.value_dim, sizeof(float));
  s->request.lse = calloc(rows, sizeof(float));
}

static inline void setup_scene(scene *s, const qkv_model *model, qkv_policy policy, uint64_t tokens) {
  *s = (scene){.model = *model, .arena = qkv_arena_create("memory-budget", BUDGET)};
  s->rows = make_sequence(&s->model, tokens, 21);
  init_layer(&s->layer, &s->model, policy, 0, s->arena);
  if (tokens > 0) must_append(&s->layer, &s->rows, 0, tokens);
  s->k = decoded_rows(&s->layer, QKV_K);
  s->v = decoded_rows(&s->layer, QKV_V);
  set_queries(s, 1, 1, 22);
}

static inline void teardown_scene(scene *s) {
  free(s->k);
  free(s->v);
  free(s->q);
  free(s->request.out);
  free(s->request.lse);
  free_tensor(&s->q_tensor);
  deinit_layer(&s->layer);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

// In floats unless the request says otherwise: what is compared with float64.
static inline void run(qkv_pool *pool, const qkv_attend *request) {
  qkv_error error = {0};
  qkv_attend exact = *request;
  if (exact.options.precision == QKV_PRECISION_DEFAULT) exact.options.precision = QKV_PRECISION_FP32;
  if (qkv_attend_check(&exact, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_attend_run(pool, &exact, 1);
}

// ---- The reference: float64 attention over the decoded rows, straight from the definition ----

static inline bool sees(const qkv_attend *request, int64_t query, uint64_t position) {
  const qkv_attend_options *o = &request->options;
  uint64_t window = o->sliding_window != 0 ? o->sliding_window : request->layer->config.model->sliding_window;
  if (position < o->begin || (o->end != 0 && position >= o->end)) return false;
  if (o->not_causal) return true;
  __int128 stand = (__int128)request->position + o->causal_offset + query;
  return position <= stand && (window == 0 || position > stand - window);
}

static inline double score(const scene *s, const float *q, uint64_t position, uint32_t kv_head) {
  const qkv_attend_options *o = &s->request.options;
  double cap = o->soft_cap != 0 ? o->soft_cap : s->model.soft_cap, sum = 0;
  const float *k = s->k + (position * s->model.kv_heads + kv_head) * s->model.key_dim;
  for (size_t i = 0; i < s->model.key_dim; i++) sum += (double)q[i] * (double)k[i];
  sum *= o->scale != 0 ? o->scale : s->model.scale;
  return cap != 0 ? cap * tanh(sum / cap) : sum;
}

// One query head into out [value_dim]; returns the LSE.
static inline double reference(const scene *s, int64_t query, uint32_t head, double *out) {
  uint32_t kv_head = head / (s->model.q_heads / s->model.kv_heads);
  const float *q = s->q + ((size_t)query * s->model.q_heads + head) * s->model.key_dim;
  double *scores = calloc(s->layer.length + 1, sizeof *scores), peak = -INFINITY, total = 0;
  memset(out, 0, s->model.value_dim * sizeof *out);
  for (uint64_t t = 0; t < s->layer.length; t++) {
    scores[t] = sees(&s->request, query, t) ? score(s, q, t, kv_head) : -INFINITY;
    if (scores[t] > peak) peak = scores[t];
  }
  for (uint64_t t = 0; t < s->layer.length && peak > -INFINITY; t++) {
    double weight = exp(scores[t] - peak);
    const float *v = s->v + (t * s->model.kv_heads + kv_head) * s->model.value_dim;
    total += weight;
    for (size_t i = 0; i < s->model.value_dim && weight > 0; i++) out[i] += weight * (double)v[i];
  }
  for (size_t i = 0; i < s->model.value_dim && total > 0; i++) out[i] /= total;
  free(scores);
  return peak + log(total);
}

static double worst_error, worst_lse;
static double error_most = 1e-5;  // CODER_WHOLE_OFF of calibrated coders

// Runs the request and holds it to the reference: `error_most` of the row's norm.
static inline void check_scene(const scene *s) {
  run(NULL, &s->request);
  double *expected = calloc(s->model.value_dim, sizeof *expected);
  for (int64_t query = 0; query < s->queries; query++) {
    for (uint32_t head = 0; head < s->model.q_heads; head++) {
      size_t row = (size_t)query * s->model.q_heads + head;
      double lse = reference(s, query, head, expected), error = 0, norm = 0;
      for (size_t i = 0; i < s->model.value_dim; i++) {
        error += square((double)s->request.out[row * s->model.value_dim + i] - expected[i]);
        norm += square(expected[i]);
      }
      if (lse == -INFINITY) {
        assert_true(error == 0 && s->request.lse[row] == -INFINITY);
        continue;
      }
      double relative = sqrt(error / norm), off = fabs((double)s->request.lse[row] - lse) / fmax(1, fabs(lse));
      if (!(relative <= error_most && off <= error_most)) {
        fail_msg("query %d head %u: relative error %g, lse off by %g", (int)query, head, relative, off);
      }
      worst_error = fmax(worst_error, relative);
      worst_lse = fmax(worst_lse, off);
    }
  }
  free(expected);
}

// The same bits with any number of threads, alone and in a batch, and within the reference.
static inline void check_ranges(scene *s) {
  static const size_t threads[] = {0, 1, 2, 4};
  size_t rows = (size_t)s->queries * s->model.q_heads, floats = rows * s->model.value_dim;
  float *out = malloc(2 * floats * sizeof *out), *lse = malloc(2 * rows * sizeof *lse);
  check_scene(s);
  if (s->request.options.precision == QKV_PRECISION_DEFAULT) s->request.options.precision = QKV_PRECISION_FP32;
  qkv_attend batch[2] = {s->request, s->request};
  for (size_t i = 0; i < 2; i++) batch[i].out = out + i * floats, batch[i].lse = lse + i * rows;
  for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
    qkv_pool *pool = NULL;
    assert_int_equal(qkv_pool_create(threads[t], 4, &pool, NULL), QKV_OK);
    for (size_t count = 1; count <= (threads[t] == 2 ? 2 : 1); count++) {
      memset(out, 0xff, 2 * floats * sizeof *out);
      qkv_attend_run(pool, batch, count);
      for (size_t i = 0; i < count; i++) {
        assert_memory_equal(out + i * floats, s->request.out, floats * sizeof *out);
        assert_memory_equal(lse + i * rows, s->request.lse, rows * sizeof *lse);
      }
    }
    qkv_pool_destroy(&pool);
  }
  free(out);
  free(lse);
}

#endif
