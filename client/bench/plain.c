#include "client/bench/plain.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { TILE = 64, LANES = 16, GROUP_MAX = 64 };

static void *allocate(size_t bytes) {
  enum { HUGE_PAGE = 2 << 20 };
  const size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  void *made = aligned_alloc(HUGE_PAGE, whole);
  if (made == NULL) abort();
  (void)madvise(made, whole, MADV_HUGEPAGE);
  return made;
}

// ---- The bytes alone ----

enum { READ_PAGES = 16 };

typedef struct reading {
  const qkv_bench_pages *pages;
  size_t chunks;  // of READ_PAGES pages, of a session
  _Atomic uint64_t sum;
} reading;

// Four streams at once, which the processor fetches ahead by itself.
static uint64_t read_bytes(const uint8_t *from, size_t bytes) {
  typedef uint64_t line __attribute__((vector_size(64)));
  enum { STREAMS = 4, AHEAD = 4096 };
  line sums[STREAMS] = {{0}};
  const size_t each = bytes / (STREAMS * sizeof(line)) * sizeof(line);
  for (size_t at = 0; at < each; at += sizeof(line)) {
    for (size_t stream = 0; stream < STREAMS; stream++) {
      line next;
      __builtin_prefetch(from + stream * each + at + AHEAD);
      memcpy(&next, from + stream * each + at, sizeof next);
      sums[stream] += next;
    }
  }
  sums[0] += sums[1] + sums[2] + sums[3];
  uint64_t sum = 0;
  for (size_t i = 0; i < sizeof(line) / sizeof sum; i++) sum += sums[0][i];
  return sum;
}

static void read_chunk(void *context, size_t index, size_t worker) {
  (void)worker;
  reading *r = context;
  const qkv_layer *layer = &r->pages->layers[index / r->chunks];
  uint64_t sum = 0;
  for (size_t i = index % r->chunks * READ_PAGES, n = 0; n < READ_PAGES && i < layer->page_count; i++, n++) {
    sum += read_bytes(qkv_layer_page(layer, i)->page, qkv_layer_page(layer, i)->bytes);
  }
  r->sum += sum;
}

uint64_t qkv_bench_read(qkv_pool *pool, const qkv_bench_pages *pages) {
  reading r = {.pages = pages, .chunks = (pages->layers[0].page_count + READ_PAGES - 1) / READ_PAGES};
  qkv_pool_loop(pool, r.chunks * pages->sessions, read_chunk, &r);
  return r.sum;
}

// ---- Plain rows ----

static void *plain_rows(const qkv_bench_pages *pages, qkv_dtype dtype, const float *rows, size_t dim, size_t tokens) {
  const size_t heads = pages->model.kv_heads, row = dim * qkv_dtype_size(dtype);
  uint8_t *out = allocate(heads * tokens * row);
  for (size_t h = 0; h < heads; h++) {
    for (size_t t = 0; t < tokens; t++) {
      qkv_from_float(dtype, rows + (t % QKV_BENCH_ROWS * heads + h) * dim, out + (h * tokens + t) * row, dim);
    }
  }
  return out;
}

void qkv_bench_plain_init(qkv_bench_plain *plain, const qkv_bench_pages *pages, qkv_dtype dtype, size_t tokens) {
  assert(pages->model.q_heads / pages->model.kv_heads <= GROUP_MAX);
  *plain = (qkv_bench_plain){.pages = pages,
                             .dtype = dtype,
                             .tokens = tokens,
                             .k = plain_rows(pages, dtype, pages->k, pages->model.key_dim, tokens),
                             .v = plain_rows(pages, dtype, pages->v, pages->model.value_dim, tokens),
                             .out = allocate((size_t)pages->model.q_heads * pages->model.value_dim * sizeof(float))};
}

void qkv_bench_plain_deinit(qkv_bench_plain *plain) {
  free(plain->k);
  free(plain->v);
  free(plain->out);
}

static float dot(const float *a, const float *b, size_t n) {
  float lanes[LANES] = {0}, sum = 0;
  for (size_t i = 0; i < n; i += LANES) {
    for (size_t lane = 0; lane < LANES && i + lane < n; lane++) lanes[lane] += a[i + lane] * b[i + lane];
  }
  for (size_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

// A row as floats: in place, or converted.
static const float *row_at(qkv_dtype dtype, const void *rows, size_t row, size_t dim, float *converted) {
  const uint8_t *at = (const uint8_t *)rows + row * dim * qkv_dtype_size(dtype);
  if (dtype == QKV_FP32) return (const float *)(const void *)at;
  qkv_to_float(dtype, at, converted, dim);
  return converted;
}

typedef struct softmax {
  float peak, total, scores[TILE];
} softmax;

static void weigh_tile(softmax *s, size_t tokens, float *out, size_t dim) {
  float peak = s->peak;
  for (size_t t = 0; t < tokens; t++) peak = s->scores[t] > peak ? s->scores[t] : peak;
  const float decay = s->peak == -INFINITY ? 0 : expf(s->peak - peak);
  if (decay != 1) {
    for (size_t c = 0; c < dim; c++) out[c] *= decay;
  }
  s->total *= decay;
  s->peak = peak;
  for (size_t t = 0; t < tokens; t++) s->total += s->scores[t] = expf(s->scores[t] - peak);
}

static void attend_head(void *context, size_t head, size_t worker) {
  (void)worker;
  const qkv_bench_plain *plain = context;
  const qkv_model *model = &plain->pages->model;
  const size_t group = model->q_heads / model->kv_heads, dim = model->key_dim, value_dim = model->value_dim;
  const size_t last = (size_t)plain->pages->requests[0].q.dims[0] - 1;
  const float *q = plain->pages->q + (last * model->q_heads + head * group) * dim;
  float *out = plain->out + head * group * value_dim, converted[QKV_DIM_MAX];
  softmax s[GROUP_MAX];
  memset(out, 0, group * value_dim * sizeof *out);
  for (size_t i = 0; i < group; i++) s[i] = (softmax){.peak = -INFINITY};
  for (size_t begin = 0; begin < plain->tokens; begin += TILE) {
    const size_t tokens = plain->tokens - begin < TILE ? plain->tokens - begin : TILE;
    for (size_t t = 0; t < tokens; t++) {
      const float *row = row_at(plain->dtype, plain->k, head * plain->tokens + begin + t, dim, converted);
      for (size_t i = 0; i < group; i++) s[i].scores[t] = (float)model->scale * dot(q + i * dim, row, dim);
    }
    for (size_t i = 0; i < group; i++) weigh_tile(&s[i], tokens, out + i * value_dim, value_dim);
    for (size_t t = 0; t < tokens; t++) {
      const float *row = row_at(plain->dtype, plain->v, head * plain->tokens + begin + t, value_dim, converted);
      for (size_t i = 0; i < group; i++) {
        const float weight = s[i].scores[t];
        for (size_t c = 0; c < value_dim; c++) out[i * value_dim + c] += weight * row[c];
      }
    }
  }
  for (size_t i = 0; i < group; i++) {
    for (size_t c = 0; c < value_dim; c++) out[i * value_dim + c] /= s[i].total;
  }
}

void qkv_bench_plain_run(qkv_pool *pool, const qkv_bench_plain *plain) {
  qkv_pool_loop(pool, plain->pages->model.kv_heads, attend_head, (void *)plain);
}

// ---- Error ----

// One head's output in double precision; its running sums.
typedef struct exact {
  double peak, total, sums[QKV_DIM_MAX];
} exact;

static void add_token(exact *e, double score, const float *value, size_t dim) {
  if (score > e->peak) {
    const double decay = exp(e->peak - score);
    for (size_t c = 0; c < dim; c++) e->sums[c] *= decay;
    e->total *= decay;
    e->peak = score;
  }
  const double weight = exp(score - e->peak);
  for (size_t c = 0; c < dim; c++) e->sums[c] += weight * (double)value[c];
  e->total += weight;
}

// k [kv_heads][key_dim], v likewise, of one token.
static void add_rows(const qkv_model *model, const float *q, const float *k, const float *v, exact *heads) {
  const size_t group = model->q_heads / model->kv_heads;
  for (size_t head = 0; head < model->q_heads; head++) {
    double score = 0;
    const float *query = q + head * model->key_dim, *key = k + head / group * model->key_dim;
    for (size_t c = 0; c < model->key_dim; c++) score += (double)query[c] * (double)key[c];
    add_token(&heads[head], model->scale * score, v + head / group * model->value_dim, model->value_dim);
  }
}

static double distance(const qkv_model *model, const exact *right, const exact *other, const float *out) {
  double error = 0, norm = 0;
  for (size_t head = 0; head < model->q_heads; head++) {
    for (size_t c = 0; c < model->value_dim; c++) {
      const double value = right[head].sums[c] / right[head].total;
      const double mine =
          other != NULL ? other[head].sums[c] / other[head].total : (double)out[head * model->value_dim + c];
      error += (value - mine) * (value - mine);
      norm += value * value;
    }
  }
  return sqrt(error / norm);
}

qkv_bench_error qkv_bench_measure_error(const qkv_bench_pages *pages, size_t tokens) {
  const qkv_model *model = &pages->model;
  const qkv_layer *layer = &pages->layers[0];
  const size_t key_row = (size_t)model->kv_heads * model->key_dim,
               value_row = (size_t)model->kv_heads * model->value_dim;
  const size_t queries = (size_t)pages->requests[0].q.dims[0], out_row = (size_t)model->q_heads * model->value_dim;
  float *k = allocate(TILE * key_row * sizeof *k), *v = allocate(TILE * value_row * sizeof *v);
  float *q = allocate((size_t)model->q_heads * model->key_dim * sizeof *q);
  exact *coded = allocate(2 * (size_t)model->q_heads * sizeof *coded), *original = coded + model->q_heads;
  if (tokens > layer->length) tokens = layer->length;
  for (size_t i = 0; i < 2 * (size_t)model->q_heads; i++) coded[i] = (exact){.peak = -INFINITY};
  memcpy(q, pages->q + (queries - 1) * model->q_heads * model->key_dim, model->q_heads * model->key_dim * sizeof *q);
  for (size_t head = 0; head < model->q_heads && model->rope.theta != 0; head++) {
    qkv_rope_forward(&model->rope, q + head * model->key_dim, layer->length - 1);
  }
  for (uint64_t at = 0; at < tokens; at += TILE) {
    const size_t count = tokens - at < TILE ? (size_t)(tokens - at) : TILE, from = (size_t)(at % QKV_BENCH_ROWS);
    qkv_layer_rows(layer, QKV_K, at, count, false, k);
    qkv_layer_rows(layer, QKV_V, at, count, false, v);
    for (size_t t = 0; t < count; t++) add_rows(model, q, k + t * key_row, v + t * value_row, coded);
    memcpy(k, pages->k + from * key_row, count * key_row * sizeof *k);
    for (size_t i = 0; i < count * model->kv_heads && model->rope.theta != 0; i++) {
      qkv_rope_forward(&model->rope, k + i * model->key_dim, at + i / model->kv_heads);
    }
    for (size_t t = 0; t < count; t++) {
      add_rows(model, q, k + t * key_row, pages->v + (from + t) * value_row, original);
    }
  }
  qkv_attend request = pages->requests[0];
  request.options.end = tokens;
  qkv_attend_run(NULL, &request, 1);
  const float *out = request.out + (queries - 1) * out_row;
  const qkv_bench_error error = {distance(model, coded, NULL, out), distance(model, original, coded, NULL)};
  free(k);
  free(v);
  free(q);
  free(coded);
  return error;
}
