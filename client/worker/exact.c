#include "client/worker/exact.h"

#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Queries that share a product with the keys. More would compute more of the scores that causality hides.
enum { QUERY_BLOCK = 64 };

struct qkvi_exact {
  qkvi_kv kv;
  const qkvi_lm *lm;
  int64_t positions_max;
  float *k, *v;   // [layers, positions_max, kv_heads, head_dim]
  float *scores;  // [QUERY_BLOCK, positions_max]
  float *lse;     // [lse_rows, q_heads], scratch of step()
  int64_t lse_rows;
};

static qkv_status step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  (void)error;
  qkvi_exact *exact = (qkvi_exact *)kv;
  if (rows->tokens > exact->lse_rows) {
    free(exact->lse);
    exact->lse = calloc((size_t)(rows->tokens * exact->lm->q_heads), sizeof(float));
    if (exact->lse == NULL) abort();
    exact->lse_rows = rows->tokens;
  }
  qkvi_exact_append(exact, rows);
  qkvi_exact_attend(exact, rows, 0, out, exact->lse);
  return QKV_OK;
}

qkvi_exact *qkvi_exact_create(const qkvi_lm *lm, int64_t positions_max) {
  qkvi_exact *exact = calloc(1, sizeof(*exact));
  if (exact == NULL) abort();
  exact->kv.step = step;
  exact->lm = lm;
  exact->positions_max = positions_max;
  size_t rows = (size_t)(lm->layers * positions_max), width = (size_t)(lm->kv_heads * lm->head_dim);
  exact->k = calloc(rows, width * sizeof(float));
  exact->v = calloc(rows, width * sizeof(float));
  exact->scores = calloc((size_t)positions_max, QUERY_BLOCK * sizeof(float));
  if (exact->k == NULL || exact->v == NULL || exact->scores == NULL) abort();
  return exact;
}

void qkvi_exact_destroy(qkvi_exact **exact) {
  if (*exact == NULL) return;
  free((*exact)->k);
  free((*exact)->v);
  free((*exact)->scores);
  free((*exact)->lse);
  free(*exact);
  *exact = NULL;
}

qkvi_kv *qkvi_exact_kv(qkvi_exact *exact) {
  return &exact->kv;
}

static int64_t row_offset(const qkvi_exact *exact, int64_t layer, int64_t position) {
  assert(layer >= 0 && layer < exact->lm->layers && position >= 0 && position <= exact->positions_max);
  return (layer * exact->positions_max + position) * exact->lm->kv_heads * exact->lm->head_dim;
}

const float *qkvi_exact_k(const qkvi_exact *exact, int64_t layer, int64_t position) {
  return exact->k + row_offset(exact, layer, position);
}

const float *qkvi_exact_v(const qkvi_exact *exact, int64_t layer, int64_t position) {
  return exact->v + row_offset(exact, layer, position);
}

void qkvi_exact_append(qkvi_exact *exact, const qkvi_kv_rows *rows) {
  assert(rows->position <= exact->positions_max - rows->tokens);
  int64_t offset = row_offset(exact, rows->layer, rows->position);
  size_t bytes = (size_t)(rows->tokens * exact->lm->kv_heads * exact->lm->head_dim) * sizeof(float);
  memcpy(exact->k + offset, rows->k, bytes);
  memcpy(exact->v + offset, rows->v, bytes);
}

// In lanes: one after the other, each step would wait for the one before.
static float largest(const float *values, int64_t count) {
  enum { LANES = 8 };
  float max[LANES];
  for (int lane = 0; lane < LANES; lane++) max[lane] = values[0];
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    // fmaxf would be a call
    for (int lane = 0; lane < LANES; lane++) max[lane] = values[i + lane] > max[lane] ? values[i + lane] : max[lane];
  }
  for (; i < count; i++) max[0] = values[i] > max[0] ? values[i] : max[0];
  for (int lane = 1; lane < LANES; lane++) max[0] = max[lane] > max[0] ? max[lane] : max[0];
  return max[0];
}

static double sum_of(const float *values, int64_t count) {
  enum { LANES = 4 };
  double sum[LANES] = {0};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int lane = 0; lane < LANES; lane++) sum[lane] += (double)values[i + lane];
  }
  for (; i < count; i++) sum[0] += (double)values[i];
  return sum[0] + sum[1] + sum[2] + sum[3];
}

// Scores to weights in place; what lies beyond `visible` becomes 0. Returns the log of the denominator.
static float softmax(float *scores, int64_t visible, int64_t count) {
  const float max = largest(scores, visible);
  for (int64_t i = 0; i < visible; i++) scores[i] = expf(scores[i] - max);
  const double sum = sum_of(scores, visible);
  const float factor = (float)(1.0 / sum);
  for (int64_t i = 0; i < visible; i++) scores[i] *= factor;
  memset(scores + visible, 0, (size_t)(count - visible) * sizeof(float));
  return (float)(max + log(sum));
}

// One query head, queries [first, first + queries) of the batch.
static void attend_head(qkvi_exact *exact, const qkvi_kv_rows *rows, int64_t begin, int64_t head, int64_t first,
                        int64_t queries, float *out, float *lse) {
  const qkvi_lm *lm = exact->lm;
  int64_t dim = lm->head_dim, q_stride = lm->q_heads * dim, kv_stride = lm->kv_heads * dim;
  int64_t kv_head = head / (lm->q_heads / lm->kv_heads);
  int64_t from = rows->position + first;   // of the first query
  int64_t count = from + queries - begin;  // keys that the last query sees
  const float *q = rows->q + first * q_stride + head * dim;
  const float *k = qkvi_exact_k(exact, rows->layer, begin) + kv_head * dim;
  const float *v = qkvi_exact_v(exact, rows->layer, begin) + kv_head * dim;
  float scale = (float)(1.0 / sqrt((double)dim));
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)queries, (int)count, (int)dim, scale, q, (int)q_stride, k,
              (int)kv_stride, 0.0f, exact->scores, (int)count);
  for (int64_t i = 0; i < queries; i++) {
    lse[(first + i) * lm->q_heads + head] = softmax(exact->scores + i * count, from + i + 1 - begin, count);
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)queries, (int)dim, (int)count, 1.0f, exact->scores,
              (int)count, v, (int)kv_stride, 0.0f, out + first * q_stride + head * dim, (int)q_stride);
}

void qkvi_exact_attend(qkvi_exact *exact, const qkvi_kv_rows *rows, int64_t begin, float *out, float *lse) {
  assert(begin >= 0 && begin <= rows->position);
  for (int64_t first = 0; first < rows->tokens; first += QUERY_BLOCK) {
    int64_t queries = rows->tokens - first < QUERY_BLOCK ? rows->tokens - first : QUERY_BLOCK;
    for (int64_t head = 0; head < exact->lm->q_heads; head++) {
      attend_head(exact, rows, begin, head, first, queries, out, lse);
    }
  }
}

void qkvi_merge(float *out, float *lse, const float *other_out, const float *other_lse, int64_t heads, int64_t dim) {
  for (int64_t head = 0; head < heads; head++) {
    double max = fmaxf(lse[head], other_lse[head]);
    if (max == -INFINITY) continue;
    double a = exp(lse[head] - max), b = exp(other_lse[head] - max);
    float weight = (float)(a / (a + b)), other_weight = (float)(b / (a + b));
    for (int64_t i = head * dim; i < (head + 1) * dim; i++) out[i] = weight * out[i] + other_weight * other_out[i];
    lse[head] = (float)(max + log(a + b));
  }
}
