#include "engine/cache/probe.h"

#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct qkv_probe {
  size_t tokens, whole, count, key_dim, value_dim;
  double soft_cap;
  double square;     // of `out`
  float *k, *v;      // [tokens][key_dim], [tokens][value_dim]
  float *queries;    // [count][key_dim], times the scale
  float *multiples;  // [count], m of the rows behind the whole ones
  float *exact;      // [count][tokens], sqrt(m) w of the probe's keys
  float *out;        // [count][value_dim]
  float *mixed;      // [count][value_dim], sum of `exact` times values
  float *totals;     // [count], sum of `exact`
  double *norms;     // [count], logarithms of what the softmax of `exact` divides by
  float *weights;    // scratch: [count][tokens]
  float *sums;       // [count][value_dim]
  double *others;    // [count], the norms of other keys
};

static float *floats(size_t count) {
  float *made = calloc(count + 1, sizeof *made);
  if (made == NULL) abort();
  return made;
}

// ---- Queries ----

// About N(0, 1).
static float random_normal(uint64_t *state) {
  double sum = 0;
  for (int i = 0; i < 4; i++) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    sum += (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
  return (float)((sum - 2) * sqrt(3));
}

// What the scores of a query spread by.
static double spread_of(const qkv_probe *probe, const float *query) {
  double sum = 0, squares = 0;
  for (size_t t = 0; t < probe->tokens; t++) {
    const double score = (double)cblas_sdot((int)probe->key_dim, query, 1, probe->k + t * probe->key_dim, 1);
    sum += score;
    squares += score * score;
  }
  const double mean = sum / (double)probe->tokens;
  return sqrt(fmax(squares / (double)probe->tokens - mean * mean, 0));
}

static void make_queries(qkv_probe *probe) {
  uint64_t state = 1;
  for (size_t i = 0; i < probe->count; i++) {
    probe->multiples[i] = 1;
    float *query = probe->queries + i * probe->key_dim;
    for (size_t j = 0; j < probe->key_dim; j++) query[j] = random_normal(&state);
    const double spread = spread_of(probe, query);
    const float factor = spread > 0 ? (float)(QKV_PROBE_SPREAD / spread) : 1;
    for (size_t j = 0; j < probe->key_dim; j++) query[j] *= factor;
  }
}

static float multiple_of(const qkv_probe *probe, uint64_t context) {
  if (context <= probe->tokens || probe->whole >= probe->tokens) return 1;
  return (float)((double)(context - probe->whole) / (double)(probe->tokens - probe->whole));
}

static size_t heads_taken(const qkv_probe_queries *from) {
  const size_t most = QKV_PROBE_QUERIES / from->tokens > 0 ? QKV_PROBE_QUERIES / from->tokens : 1;
  return most < from->group ? most : from->group;
}

static void load_queries(qkv_probe *probe, const qkv_probe_queries *from) {
  const size_t heads = heads_taken(from);
  for (size_t i = 0; i < probe->count; i++) {
    const size_t token = i / heads, source = token * from->group + i % heads;
    const uint64_t stand = from->stands[token];
    float *query = probe->queries + i * probe->key_dim;
    memcpy(query, from->rows + source * probe->key_dim, probe->key_dim * sizeof *query);
    if (stand < from->last && from->rope->theta != 0) {
      qkv_rope_inverse(from->rope, query, stand);
      qkv_rope_forward(from->rope, query, from->last);
    }
    for (size_t j = 0; j < probe->key_dim; j++) query[j] *= (float)from->scale;
    probe->multiples[i] = multiple_of(probe, stand);
  }
}

// ---- Attention ----

// Scores become sqrt(m) w; the logarithm of what the softmax divides by.
static double soften(const qkv_probe *probe, float *scores, float multiple) {
  float peak = -INFINITY;
  double total = 0;
  for (size_t t = 0; t < probe->tokens; t++) {
    if (probe->soft_cap != 0) scores[t] = (float)(probe->soft_cap * tanh((double)scores[t] / probe->soft_cap));
    peak = fmaxf(peak, scores[t]);
  }
  for (size_t t = 0; t < probe->tokens; t++) {
    scores[t] = expf(scores[t] - peak);
    total += (double)(t < probe->whole ? scores[t] : multiple * scores[t]);
  }
  for (size_t t = 0; t < probe->tokens; t++) {
    scores[t] = (float)((double)(t < probe->whole ? scores[t] : sqrtf(multiple) * scores[t]) / total);
  }
  return (double)peak + log(total);
}

static void weigh(const qkv_probe *probe, const float *k, float *weights, double *norms) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)probe->count, (int)probe->tokens, (int)probe->key_dim, 1,
              probe->queries, (int)probe->key_dim, k, (int)probe->key_dim, 0, weights, (int)probe->tokens);
  for (size_t i = 0; i < probe->count; i++) {
    norms[i] = soften(probe, weights + i * probe->tokens, probe->multiples[i]);
  }
}

static void mix(const qkv_probe *probe, const float *weights, const float *v, float *sums) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)probe->count, (int)probe->value_dim, (int)probe->tokens,
              1, weights, (int)probe->tokens, v, (int)probe->value_dim, 0, sums, (int)probe->value_dim);
}

static float total_of(const qkv_probe *probe, const float *weights) {
  double total = 0;
  for (size_t t = 0; t < probe->tokens; t++) total += (double)weights[t];
  return (float)total;
}

// `weights` become m w for a moment: only the rows behind the whole ones change.
static void scale_others(const qkv_probe *probe, float *weights, size_t query, float factor) {
  for (size_t t = probe->whole; t < probe->tokens; t++) weights[query * probe->tokens + t] *= factor;
}

static void attend_exactly(qkv_probe *probe) {
  weigh(probe, probe->k, probe->exact, probe->norms);
  mix(probe, probe->exact, probe->v, probe->mixed);
  for (size_t i = 0; i < probe->count; i++) {
    probe->totals[i] = total_of(probe, probe->exact + i * probe->tokens);
    scale_others(probe, probe->exact, i, sqrtf(probe->multiples[i]));
  }
  mix(probe, probe->exact, probe->v, probe->out);
  for (size_t i = 0; i < probe->count; i++) scale_others(probe, probe->exact, i, 1 / sqrtf(probe->multiples[i]));
  for (size_t i = 0; i < probe->count * probe->value_dim; i++) {
    probe->square += (double)probe->out[i] * (double)probe->out[i];
  }
}

qkv_probe *qkv_probe_create(const qkv_probe_rows *rows, const qkv_probe_queries *queries) {
  enum { MADE = 8 };  // queries, where there are none
  qkv_probe *probe = calloc(1, sizeof *probe);
  if (probe == NULL) abort();
  *probe = (qkv_probe){.tokens = rows->tokens,
                       .whole = rows->whole,
                       .count = queries->tokens > 0 ? queries->tokens * heads_taken(queries) : MADE,
                       .key_dim = rows->key_dim,
                       .value_dim = rows->value_dim,
                       .soft_cap = queries->soft_cap};
  assert(rows->tokens > 0 && rows->whole <= rows->tokens);
  probe->k = floats(rows->tokens * rows->key_dim);
  probe->v = floats(rows->tokens * rows->value_dim);
  probe->queries = floats(probe->count * rows->key_dim);
  probe->multiples = floats(probe->count);
  for (size_t t = 0; t < rows->tokens; t++) {
    memcpy(probe->k + t * rows->key_dim, rows->k + t * rows->k_stride, rows->key_dim * sizeof(float));
    memcpy(probe->v + t * rows->value_dim, rows->v + t * rows->v_stride, rows->value_dim * sizeof(float));
  }
  if (queries->tokens > 0) {
    load_queries(probe, queries);
  } else {
    make_queries(probe);
  }
  probe->exact = floats(probe->count * probe->tokens);
  probe->weights = floats(probe->count * probe->tokens);
  probe->out = floats(probe->count * probe->value_dim);
  probe->mixed = floats(probe->count * probe->value_dim);
  probe->sums = floats(probe->count * probe->value_dim);
  probe->totals = floats(probe->count);
  probe->norms = calloc(2 * probe->count, sizeof *probe->norms);
  if (probe->norms == NULL) abort();
  probe->others = probe->norms + probe->count;
  attend_exactly(probe);
  return probe;
}

void qkv_probe_destroy(qkv_probe **probe) {
  qkv_probe *old = *probe;
  if (old == NULL) return;
  *probe = NULL;
  free(old->k);
  free(old->v);
  free(old->queries);
  free(old->multiples);
  free(old->exact);
  free(old->out);
  free(old->mixed);
  free(old->totals);
  free(old->norms);
  free(old->weights);
  free(old->sums);
  free(old);
}

// Where m is not 1, w of the probe's own keys counts as much as under the other keys' softmax: so a row that alone
// has another score is alone in the difference.
static float share_of(const qkv_probe *probe, size_t query) {
  const double most = log(16);  // beyond that everything is lost
  return (float)exp(fmin(fmax(probe->norms[query] - probe->others[query], -most), most));
}

double qkv_probe_error(qkv_probe *probe, const float *k, const float *v) {
  const float *weights = k != NULL ? probe->weights : probe->exact;
  double missed = 0;
  if (k != NULL) weigh(probe, k, probe->weights, probe->others);
  mix(probe, weights, v != NULL ? v : probe->v, probe->sums);
  for (size_t i = 0; i < probe->count; i++) {
    const float share = k != NULL ? share_of(probe, i) : 1;
    const float more = total_of(probe, weights + i * probe->tokens) - share * probe->totals[i];
    for (size_t j = i * probe->value_dim; j < (i + 1) * probe->value_dim; j++) {
      const double difference = (double)(probe->sums[j] - share * probe->mixed[j] - more * probe->out[j]);
      missed += difference * difference;
    }
  }
  if (probe->square > 0) return missed / probe->square;
  return missed > 0 ? 1 : 0;
}

double qkv_probe_square(const qkv_probe *probe) {
  return probe->square;
}

double qkv_probe_share(const qkv_probe *probe, const bool *rows, size_t without) {
  double some = 0, all = 0;
  for (size_t i = 0; i < probe->count; i++) {
    const float *weights = probe->exact + i * probe->tokens;
    for (size_t t = without; t < probe->tokens; t++) {
      const double square = (double)weights[t] * (double)weights[t];
      all += square;
      if (rows[t]) some += square;
    }
  }
  return all > 0 ? some / all : 0;
}
