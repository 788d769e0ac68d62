#include "client/worker/forward.h"

#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct qkvi_forward {
  const qkvi_lm *lm;
  int64_t tokens_max, positions_max;
  float *cosines, *sines;  // [positions_max, head_dim / 2]
  float *x, *normed;       // [tokens_max, hidden]
  float *q, *attended;     // [tokens_max, q_heads * head_dim]
  float *k, *v;            // [tokens_max, kv_heads * head_dim]
  float *gate, *up;        // [tokens_max, ffn]
};

static bool threads_are_set;

void qkvi_forward_threads(int64_t threads) {
  openblas_set_num_threads(threads > 0 ? (int)threads : openblas_get_num_procs());
  threads_are_set = true;
}

static float *floats(int64_t rows, int64_t columns) {
  float *values = calloc((size_t)rows, (size_t)columns * sizeof(float));
  if (values == NULL) abort();
  return values;
}

static void fill_phases(qkvi_forward *forward) {
  int64_t half = forward->lm->head_dim / 2;
  for (int64_t position = 0; position < forward->positions_max; position++) {
    for (int64_t i = 0; i < half; i++) {
      double angle = (double)position * pow(forward->lm->rope_theta, -(double)i / (double)half);
      forward->cosines[position * half + i] = (float)cos(angle);
      forward->sines[position * half + i] = (float)sin(angle);
    }
  }
}

qkvi_forward *qkvi_forward_create(const qkvi_lm *lm, int64_t tokens_max, int64_t positions_max) {
  assert(tokens_max > 0 && positions_max > 0);
  if (!threads_are_set) qkvi_forward_threads(1);
  qkvi_forward *forward = calloc(1, sizeof(*forward));
  if (forward == NULL) abort();
  forward->lm = lm;
  forward->tokens_max = tokens_max;
  forward->positions_max = positions_max;
  forward->cosines = floats(positions_max, lm->head_dim / 2);
  forward->sines = floats(positions_max, lm->head_dim / 2);
  forward->x = floats(tokens_max, lm->hidden);
  forward->normed = floats(tokens_max, lm->hidden);
  forward->q = floats(tokens_max, lm->q_heads * lm->head_dim);
  forward->attended = floats(tokens_max, lm->q_heads * lm->head_dim);
  forward->k = floats(tokens_max, lm->kv_heads * lm->head_dim);
  forward->v = floats(tokens_max, lm->kv_heads * lm->head_dim);
  forward->gate = floats(tokens_max, lm->ffn);
  forward->up = floats(tokens_max, lm->ffn);
  fill_phases(forward);
  return forward;
}

void qkvi_forward_destroy(qkvi_forward **forward) {
  if (*forward == NULL) return;
  float *blocks[] = {(*forward)->cosines,  (*forward)->sines, (*forward)->x, (*forward)->normed, (*forward)->q,
                     (*forward)->attended, (*forward)->k,     (*forward)->v, (*forward)->gate,   (*forward)->up};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
  free(*forward);
  *forward = NULL;
}

// out[tokens, outputs] = in[tokens, inputs] weightsᵀ, or added to what is in `out`.
static void multiply(const float *in, int64_t tokens, int64_t inputs, const float *weights, int64_t outputs, bool add,
                     float *out) {
  int n = (int)tokens, i = (int)inputs, o = (int)outputs;
  float beta = add ? 1.0f : 0.0f;
  if (n == 1) {
    cblas_sgemv(CblasRowMajor, CblasNoTrans, o, i, 1.0f, weights, i, in, 1, beta, out, 1);
  } else {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, o, i, 1.0f, in, i, weights, i, beta, out, o);
  }
}

static void normalize(const qkvi_forward *forward, const float *weight, int64_t tokens) {
  int64_t width = forward->lm->hidden;
  for (int64_t t = 0; t < tokens; t++) {
    const float *in = forward->x + t * width;
    float *out = forward->normed + t * width;
    double squares = 0;
    for (int64_t i = 0; i < width; i++) squares += (double)in[i] * in[i];
    float factor = (float)(1.0 / sqrt(squares / (double)width + forward->lm->norm_epsilon));
    for (int64_t i = 0; i < width; i++) out[i] = in[i] * factor * weight[i];
  }
}

static void rotate(const qkvi_forward *forward, float *rows, int64_t tokens, int64_t heads, int64_t position) {
  int64_t dim = forward->lm->head_dim, half = dim / 2;
  for (int64_t t = 0; t < tokens; t++) {
    const float *cosines = forward->cosines + (position + t) * half;
    const float *sines = forward->sines + (position + t) * half;
    for (int64_t head = 0; head < heads; head++) {
      float *row = rows + (t * heads + head) * dim;
      for (int64_t i = 0; i < half; i++) {
        float low = row[i], high = row[i + half];
        row[i] = low * cosines[i] - high * sines[i];
        row[i + half] = high * cosines[i] + low * sines[i];
      }
    }
  }
}

static qkv_status attention_block(qkvi_forward *forward, int64_t layer, int64_t tokens, int64_t position, qkvi_kv *kv,
                                  qkv_error *error) {
  const qkvi_lm *lm = forward->lm;
  const qkvi_lm_layer *weights = &lm->layer[layer];
  int64_t q_width = lm->q_heads * lm->head_dim, kv_width = lm->kv_heads * lm->head_dim;
  normalize(forward, weights->attention_norm, tokens);
  multiply(forward->normed, tokens, lm->hidden, weights->wq, q_width, false, forward->q);
  multiply(forward->normed, tokens, lm->hidden, weights->wk, kv_width, false, forward->k);
  multiply(forward->normed, tokens, lm->hidden, weights->wv, kv_width, false, forward->v);
  rotate(forward, forward->q, tokens, lm->q_heads, position);
  rotate(forward, forward->k, tokens, lm->kv_heads, position);
  const qkvi_kv_rows rows = {layer, position, tokens, forward->q, forward->k, forward->v};
  QKV_TRY(kv->step(kv, &rows, forward->attended, error));
  multiply(forward->attended, tokens, q_width, weights->wo, lm->hidden, true, forward->x);
  return QKV_OK;
}

static void mlp_block(qkvi_forward *forward, int64_t layer, int64_t tokens) {
  const qkvi_lm *lm = forward->lm;
  const qkvi_lm_layer *weights = &lm->layer[layer];
  normalize(forward, weights->mlp_norm, tokens);
  multiply(forward->normed, tokens, lm->hidden, weights->gate, lm->ffn, false, forward->gate);
  multiply(forward->normed, tokens, lm->hidden, weights->up, lm->ffn, false, forward->up);
  for (int64_t i = 0; i < tokens * lm->ffn; i++) {
    float gate = forward->gate[i];
    forward->gate[i] = gate / (1.0f + expf(-gate)) * forward->up[i];
  }
  multiply(forward->gate, tokens, lm->ffn, weights->down, lm->hidden, true, forward->x);
}

qkv_status qkvi_forward_run(qkvi_forward *forward, const int32_t *tokens, int64_t count, int64_t position,
                            qkvi_kv *kv, int64_t wanted, float *logits, qkv_error *error) {
  const qkvi_lm *lm = forward->lm;
  assert(count > 0 && count <= forward->tokens_max && wanted >= 0 && wanted <= count);
  assert(position >= 0 && position <= forward->positions_max - count);
  for (int64_t t = 0; t < count; t++) {
    assert(tokens[t] >= 0 && tokens[t] < lm->vocabulary);
    memcpy(forward->x + t * lm->hidden, lm->embedding + tokens[t] * lm->hidden, (size_t)lm->hidden * sizeof(float));
  }
  for (int64_t layer = 0; layer < lm->layers; layer++) {
    QKV_TRY(attention_block(forward, layer, count, position, kv, error));
    mlp_block(forward, layer, count);
  }
  if (wanted == 0) return QKV_OK;
  normalize(forward, lm->norm, count);
  multiply(forward->normed + (count - wanted) * lm->hidden, wanted, lm->hidden, lm->head, lm->vocabulary, false,
           logits);
  return QKV_OK;
}
