#include "engine/cache/quality_measure.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define EXPONENT_MAX 30.0f  // of a weight that is far off, so that its square stays finite

static float *floats(size_t count) {
  float *made = calloc(count + 1, sizeof *made);
  if (made == NULL) abort();
  return made;
}

void qkvi_sample_init(qkvi_sample *sample, const qkv_quality_page *page, float soft_cap, size_t rows) {
  const size_t all = page->coder->kv_heads * rows;
  assert(rows <= QKV_QUERY_BLOCK);
  *sample = (qkvi_sample){.page = page,
                          .soft_cap = soft_cap,
                          .rows = rows,
                          .queries = floats(all * page->coder->key_dim),
                          .whole = floats(all * page->coder->value_dim),
                          .shares = floats(all),
                          .weights = floats(all * QKV_PAGE_TOKENS),
                          .lse = floats(all),
                          .out = floats(all * page->coder->value_dim)};
}

void qkvi_sample_deinit(qkvi_sample *sample) {
  free(sample->queries);
  free(sample->whole);
  free(sample->shares);
  free(sample->weights);
  free(sample->lse);
  free(sample->out);
}

// ---- Exact rows ----

static float dot(const float *a, const float *b, size_t n) {
  float lanes[LANES] = {0}, sum = 0;
  size_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (size_t lane = 0; lane < LANES; lane++) lanes[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; i++) sum += a[i] * b[i];
  for (size_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

static float capped(const qkvi_sample *sample, float score) {
  return sample->soft_cap == 0 ? score : sample->soft_cap * tanhf(score / sample->soft_cap);
}

// out [value_dim] = sum_t weights[t] v_t, exact values of one head.
static void mix(const qkvi_sample *sample, uint16_t kv_head, const float *weights, float *out) {
  const qkv_coder *coder = sample->page->coder;
  memset(out, 0, coder->value_dim * sizeof *out);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const float *value = sample->page->v + (t * coder->kv_heads + kv_head) * coder->value_dim;
    for (size_t i = 0; i < coder->value_dim; i++) out[i] += weights[t] * value[i];
  }
}

static void answer_row(qkvi_sample *sample, uint16_t kv_head, size_t row, float share_least) {
  const qkv_coder *coder = sample->page->coder;
  const size_t at = kv_head * sample->rows + row, dim = coder->value_dim;
  const float *query = sample->queries + at * coder->key_dim;
  float *weights = sample->weights + at * QKV_PAGE_TOKENS, peak = -INFINITY;
  double total = 0;
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const float *key = sample->page->k + (t * coder->kv_heads + kv_head) * coder->key_dim;
    weights[t] = capped(sample, dot(query, key, coder->key_dim));
    peak = weights[t] > peak ? weights[t] : peak;
  }
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) total += (double)(weights[t] = expf(weights[t] - peak));
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) weights[t] = (float)((double)weights[t] / total);
  sample->lse[at] = (float)((double)peak + log(total));
  mix(sample, kv_head, weights, sample->out + at * dim);
  sample->shares[at] = fmaxf(expf(fminf(sample->lse[at] - sample->shares[at], 0)), share_least);
}

static double squares(const float *values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; i++) sum += (double)values[i] * (double)values[i];
  return sum;
}

void qkvi_sample_answer(qkvi_sample *sample, float share_least) {
  const size_t dim = sample->page->coder->value_dim;
  double all = 0;
  sample->square = 0;
  for (uint16_t h = 0; h < sample->page->coder->kv_heads; h++) {
    for (size_t row = 0; row < sample->rows; row++) {
      const size_t at = h * sample->rows + row;
      const double square = squares(sample->whole + at * dim, dim);
      answer_row(sample, h, row, share_least);
      sample->square += (double)sample->shares[at] * square;
      all += square;
    }
  }
  sample->share = all > 0 ? sample->square / all : 0;
}

// ---- Codes ----

typedef struct scratch {
  qkv_query_block block;
  float weights[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  float sums[QKV_QUERY_BLOCK * QKV_DIM_MAX];
  double totals[QKV_QUERY_BLOCK];
} scratch;

// scratch->weights: e^score over the exact denominator. They add up to about 1.
static void weigh(const qkvi_sample *sample, const void *image, uint16_t kv_head, scratch *work) {
  const qkv_coder *coder = sample->page->coder;
  const size_t rows = sample->rows, first = kv_head * rows;
  work->block.count = rows;
  work->block.precision = QKV_PRECISION_FP32;
  memcpy(work->block.rows, sample->queries + first * coder->key_dim, rows * coder->key_dim * sizeof(float));
  coder->codec->query(coder, kv_head, &work->block);
  coder->codec->scores(coder, image, kv_head, &work->block, work->weights);
  for (size_t row = 0; row < rows; row++) {
    float *weights = work->weights + row * QKV_PAGE_TOKENS;
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      weights[t] = expf(fminf(capped(sample, weights[t]) - sample->lse[first + row], EXPONENT_MAX));
    }
  }
}

// What a head's sums [rows][value_dim], over the exact denominator, do to the output.
static double missed_by(const qkvi_sample *sample, uint16_t kv_head, const float *sums) {
  const size_t dim = sample->page->coder->value_dim;
  double missed = 0;
  for (size_t row = 0; row < sample->rows; row++) {
    const size_t at = kv_head * sample->rows + row;
    const float *out = sample->out + at * dim;
    const double share = (double)sample->shares[at];
    double sum = 0;
    for (size_t i = 0; i < dim; i++) {
      const double difference = (double)sums[row * dim + i] - (double)out[i];
      sum += difference * difference;
    }
    missed += share * share * sum;
  }
  return missed;
}

// Weights [rows][64] with the values' codes.
static double missed_by_values(const qkvi_sample *sample, const void *image, uint16_t kv_head, const float *weights,
                               scratch *work) {
  const qkv_coder *coder = sample->page->coder;
  memset(work->sums, 0, sample->rows * coder->value_dim * sizeof *work->sums);
  for (size_t row = 0; row < sample->rows; row++) {
    work->totals[row] = 0;
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) work->totals[row] += (double)weights[row * QKV_PAGE_TOKENS + t];
  }
  coder->codec->accumulate(coder, image, kv_head, weights, sample->rows, work->sums);
  coder->codec->output(coder, kv_head, work->sums, work->totals, sample->rows);
  return missed_by(sample, kv_head, work->sums);
}

// Weights [rows][64], made of the keys' codes, with exact values.
static double missed_by_keys(const qkvi_sample *sample, uint16_t kv_head, const float *weights, scratch *work) {
  const size_t dim = sample->page->coder->value_dim;
  for (size_t row = 0; row < sample->rows; row++) {
    mix(sample, kv_head, weights + row * QKV_PAGE_TOKENS, work->sums + row * dim);
  }
  return missed_by(sample, kv_head, work->sums);
}

qkvi_missed qkvi_sample_measure(const qkvi_sample *sample, const void *image, bool parts) {
  qkvi_missed missed = {0};
  scratch *work = aligned_alloc(64, (sizeof *work + 63) / 64 * 64);
  assert(work != NULL && sample->square > 0);
  for (uint16_t h = 0; h < sample->page->coder->kv_heads; h++) {
    weigh(sample, image, h, work);
    missed.both += missed_by_values(sample, image, h, work->weights, work);
    if (!parts) continue;
    const float *exact = sample->weights + h * sample->rows * QKV_PAGE_TOKENS;
    missed.parts[QKV_K] += missed_by_keys(sample, h, work->weights, work);
    missed.parts[QKV_V] += missed_by_values(sample, image, h, exact, work);
  }
  free(work);
  missed.both /= sample->square;
  missed.parts[QKV_K] /= sample->square;
  missed.parts[QKV_V] /= sample->square;
  return missed;
}
