#include "client/bench/probe.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/worker/exact.h"
#include "client/worker/forward.h"

enum { BATCH = 256 };  // tokens of a forward pass

struct qkvi_probe {
  qkvi_kv kv;  // of the exact pass: the exact cache, and notes of what passes through it
  const qkvi_lm *lm;
  int64_t prefill, length;
  qkv_dtype dtype;
  const int32_t *window;
  qkvi_forward *forward;
  qkvi_exact *exact, *coded;
  float *logits, *coded_logits;  // [length - prefill, vocabulary]
  float *q;                      // of the exact pass: [layers, length, q_heads, head_dim]
  float *out;                    // of the exact pass: [layers, length - prefill, q_heads, head_dim]
  float *k_rows, *v_rows;        // of a layer's prefix, coded: [prefill, kv_heads, head_dim]
  float *attended, *lse;         // [length - prefill, q_heads (, head_dim)]
};

static float *floats(int64_t rows, int64_t columns) {
  float *values = calloc((size_t)rows, (size_t)columns * sizeof(float));
  if (values == NULL) abort();
  return values;
}

static int64_t later(const qkvi_probe *probe) {
  return probe->length - probe->prefill;
}

static int64_t q_width(const qkvi_probe *probe) {
  return probe->lm->q_heads * probe->lm->head_dim;
}

// A layer's queries from `position` on, and its outputs behind the prefix.
static float *noted_q(const qkvi_probe *probe, int64_t layer, int64_t position) {
  return probe->q + (layer * probe->length + position) * q_width(probe);
}

static float *noted_out(const qkvi_probe *probe, int64_t layer, int64_t position) {
  return probe->out + (layer * later(probe) + position - probe->prefill) * q_width(probe);
}

static qkv_status exact_step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  qkvi_probe *probe = (qkvi_probe *)kv;
  qkvi_kv *exact = qkvi_exact_kv(probe->exact);
  QKV_TRY(exact->step(exact, rows, out, error));
  const size_t bytes = (size_t)(rows->tokens * q_width(probe)) * sizeof(float);
  memcpy(noted_q(probe, rows->layer, rows->position), rows->q, bytes);
  if (rows->position < probe->prefill) return QKV_OK;
  memcpy(noted_out(probe, rows->layer, rows->position), out, bytes);
  return QKV_OK;
}

qkvi_probe *qkvi_probe_create(const qkvi_lm *lm, int64_t prefill, int64_t length, qkv_dtype dtype) {
  assert(prefill >= 1 && prefill < length);
  qkvi_probe *probe = calloc(1, sizeof *probe);
  if (probe == NULL) abort();
  const int64_t scored = length - prefill, kv_width = lm->kv_heads * lm->head_dim;
  *probe = (qkvi_probe){.kv.step = exact_step,
                        .lm = lm,
                        .prefill = prefill,
                        .length = length,
                        .dtype = dtype,
                        .forward = qkvi_forward_create(lm, BATCH, length),
                        .exact = qkvi_exact_create(lm, length),
                        .coded = qkvi_exact_create(lm, length),
                        .logits = floats(scored, lm->vocabulary),
                        .coded_logits = floats(scored, lm->vocabulary),
                        .q = floats(lm->layers * length, lm->q_heads * lm->head_dim),
                        .out = floats(lm->layers * scored, lm->q_heads * lm->head_dim),
                        .k_rows = floats(prefill, kv_width),
                        .v_rows = floats(prefill, kv_width),
                        .attended = floats(scored, lm->q_heads * lm->head_dim),
                        .lse = floats(scored, lm->q_heads)};
  return probe;
}

void qkvi_probe_destroy(qkvi_probe **probe) {
  qkvi_probe *left = *probe;
  if (left == NULL) return;
  *probe = NULL;
  qkvi_forward_destroy(&left->forward);
  qkvi_exact_destroy(&left->exact);
  qkvi_exact_destroy(&left->coded);
  float *blocks[] = {left->logits, left->coded_logits, left->q,        left->out,
                     left->k_rows, left->v_rows,       left->attended, left->lse};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
  free(left);
}

// Runs positions [begin, length); logits of those behind the prefix go to `keep`. Caches of ours do not fail.
static void run_pass(qkvi_probe *probe, int64_t begin, qkvi_kv *kv, float *keep) {
  int64_t tokens = 0;
  for (int64_t position = begin; position < probe->length; position += tokens) {
    // A batch ends at the prefix, so that it lies on one side of it.
    const int64_t end = position < probe->prefill ? probe->prefill : probe->length;
    tokens = end - position < BATCH ? end - position : BATCH;
    const int64_t scored = position - probe->prefill;
    float *out = scored >= 0 ? keep + scored * probe->lm->vocabulary : NULL;
    const qkv_status status = qkvi_forward_run(probe->forward, probe->window + position, tokens, position, kv,
                                               scored >= 0 ? tokens : 0, out, NULL);
    assert(status == QKV_OK);
    (void)status;
  }
}

static void add_quality(const qkvi_probe *probe, const float *logits, qkvi_quality *quality) {
  const int64_t vocabulary = probe->lm->vocabulary;
  for (int64_t i = 0; i < later(probe); i++) {
    qkvi_quality_add(quality, probe->logits + i * vocabulary, logits + i * vocabulary, vocabulary,
                     probe->window[probe->prefill + i + 1]);
  }
}

void qkvi_probe_exact(qkvi_probe *probe, const int32_t *window, qkvi_probe_sums *sums) {
  probe->window = window;
  run_pass(probe, 0, &probe->kv, probe->logits);
  add_quality(probe, probe->logits, &sums->quality);
}

void qkvi_probe_add_attention(const float *exact, const float *coded, int64_t dim, qkvi_probe_layer *sums) {
  double error = 0, xx = 0, yy = 0, xy = 0;
  for (int64_t i = 0; i < dim; i++) {
    const double x = exact[i], y = coded[i];
    error += (x - y) * (x - y);
    xx += x * x;
    yy += y * y;
    xy += x * y;
  }
  sums->attention_error += error;
  sums->attention_square += xx;
  sums->attention_rows++;
  if (xx > 0 && yy > 0) sums->attention_cosine += xy / sqrt(xx * yy);
}

// Puts the coded rows of a layer's prefix into the cache of the coded pass, the exact ones behind it, and attends
// with the exact queries.
static void attend_layer(qkvi_probe *probe, int64_t layer, qkvi_probe_layer *sums) {
  const qkvi_lm *lm = probe->lm;
  const qkvi_kv_rows prefix = {
      .layer = layer, .position = 0, .tokens = probe->prefill, .k = probe->k_rows, .v = probe->v_rows};
  const qkvi_kv_rows rest = {.layer = layer,
                             .position = probe->prefill,
                             .tokens = later(probe),
                             .q = noted_q(probe, layer, probe->prefill),
                             .k = qkvi_exact_k(probe->exact, layer, probe->prefill),
                             .v = qkvi_exact_v(probe->exact, layer, probe->prefill)};
  qkvi_exact_append(probe->coded, &prefix);
  qkvi_exact_append(probe->coded, &rest);
  qkvi_exact_attend(probe->coded, &rest, 0, probe->attended, probe->lse);
  const float *out = noted_out(probe, layer, probe->prefill);
  for (int64_t row = 0; row < later(probe) * lm->q_heads; row++) {
    qkvi_probe_add_attention(out + row * lm->head_dim, probe->attended + row * lm->head_dim, lm->head_dim, sums);
  }
}

// The coded pass itself, once the cache is filled.
static void score(qkvi_probe *probe, qkvi_probe_sums *sums) {
  run_pass(probe, probe->prefill, qkvi_exact_kv(probe->coded), probe->coded_logits);
  add_quality(probe, probe->coded_logits, &sums->quality);
}

void qkvi_probe_coded(qkvi_probe *probe, const qkv_coding *coding, qkvi_probe_sums *sums) {
  for (int64_t layer = 0; layer < probe->lm->layers; layer++) {
    qkvi_recode(qkv_coding_layer(coding, (uint32_t)layer), probe->dtype, 0, (uint64_t)probe->prefill,
                qkvi_exact_k(probe->exact, layer, 0), qkvi_exact_v(probe->exact, layer, 0), probe->k_rows,
                probe->v_rows, &sums->layers[layer].rows);
    attend_layer(probe, layer, &sums->layers[layer]);
  }
  score(probe, sums);
}

// As a worker does: so many rows of a layer at a time, with their queries.
static void fill_session(const qkvi_probe *probe, qkvi_tiered *session, int64_t layer) {
  int64_t tokens = 0;
  for (int64_t at = 0; at < probe->prefill; at += tokens) {
    tokens = probe->prefill - at < BATCH ? probe->prefill - at : BATCH;
    qkvi_tiered_add(session, (uint32_t)layer, (uint64_t)at, (uint64_t)tokens, qkvi_exact_k(probe->exact, layer, at),
                    qkvi_exact_v(probe->exact, layer, at), noted_q(probe, layer, at));
  }
}

void qkvi_probe_tiered(qkvi_probe *probe, qkvi_tiered *session, double bits, qkvi_probe_sums *sums) {
  const int64_t layers = probe->lm->layers;
  for (int64_t layer = 0; layer < layers; layer++) fill_session(probe, session, layer);
  qkvi_tiered_demote(session, bits);
  for (int64_t layer = 0; layer < layers; layer++) {
    qkvi_tiered_read(session, (uint32_t)layer, (uint64_t)probe->prefill, qkvi_exact_k(probe->exact, layer, 0),
                     qkvi_exact_v(probe->exact, layer, 0), probe->k_rows, probe->v_rows, &sums->layers[layer].rows);
    attend_layer(probe, layer, &sums->layers[layer]);
  }
  score(probe, sums);
}
