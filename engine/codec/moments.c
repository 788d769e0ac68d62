#include "engine/codec/moments.h"

#include <assert.h>
#include <cblas.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/distance_bound.h"
#include "engine/codec/page.h"
#include "engine/codec/phases.h"

enum { KINDS = 3, CENTRED = 2, BLOCK = QKV_PAGE_TOKENS, FEW = 4 };  // keys and values are centred

// Of rows x, with y = x - shift.
typedef struct sums {
  double count;
  double *shift;     // [dim]; set by the first block of keys and values, 0 for queries
  double *sum;       // [dim] of y
  double *products;  // of y y^T, the lower triangle row by row
} sums;

struct qkv_moments {
  qkv_calibration_shape shape;
  uint64_t first;              // position of the first row that counts
  qkv_phases *phases;          // NULL without RoPE
  sums *sums;                  // [layers][kv_heads][KINDS]
  double *numbers;             // what the sums point into
  qkv_distance_bound *bounds;  // [layers][kv_heads][CENTRED]
  double *offered;             // [layers], tokens with those that were left out
};

static size_t triangle(size_t dim) {
  return dim * (dim + 1) / 2;
}

static uint32_t dim_of(const qkv_calibration_shape *shape, qkv_moments_kind kind) {
  return kind == QKV_MOMENTS_V ? shape->value_dim : shape->key_dim;
}

static size_t numbers_of(const qkv_calibration_shape *shape) {
  size_t head = 0;
  for (unsigned kind = 0; kind < KINDS; kind++) {
    const size_t dim = dim_of(shape, kind);
    head += 2 * dim + triangle(dim);
  }
  return (size_t)shape->layers * shape->kv_heads * head;
}

static size_t sums_of(const qkv_calibration_shape *shape) {
  return (size_t)shape->layers * shape->kv_heads * KINDS;
}

static size_t bounds_of(const qkv_calibration_shape *shape) {
  return (size_t)shape->layers * shape->kv_heads * CENTRED;
}

size_t qkv_moments_bytes(const qkv_calibration_shape *shape) {
  return sizeof(qkv_moments) + sums_of(shape) * sizeof(sums) + bounds_of(shape) * sizeof(qkv_distance_bound) +
         (numbers_of(shape) + shape->layers) * sizeof(double);
}

static sums *sums_at(const qkv_moments *moments, uint32_t layer, uint32_t kv_head, qkv_moments_kind kind) {
  assert(layer < moments->shape.layers && kv_head < moments->shape.kv_heads);
  return &moments->sums[((size_t)layer * moments->shape.kv_heads + kv_head) * KINDS + kind];
}

static qkv_distance_bound *bound_at(const qkv_moments *moments, uint32_t layer, uint32_t kv_head,
                                    qkv_moments_kind kind) {
  return &moments->bounds[((size_t)layer * moments->shape.kv_heads + kv_head) * CENTRED + kind];
}

static void *zeroed(size_t count, size_t size) {
  void *block = calloc(count, size);
  if (block == NULL) abort();
  return block;
}

qkv_moments *qkv_moments_create(const qkv_calibration_shape *shape) {
  assert(shape->kv_heads > 0 && shape->q_heads % shape->kv_heads == 0);
  assert(shape->key_dim <= QKV_DIM_MAX && shape->value_dim <= QKV_DIM_MAX);
  openblas_set_num_threads(1);
  qkv_moments *moments = zeroed(1, sizeof *moments);
  moments->shape = *shape;
  if (shape->rope.theta != 0) moments->phases = qkv_phases_create(&shape->rope);
  moments->sums = zeroed(sums_of(shape), sizeof *moments->sums);
  moments->numbers = zeroed(numbers_of(shape), sizeof *moments->numbers);
  moments->bounds = zeroed(bounds_of(shape), sizeof *moments->bounds);
  moments->offered = zeroed(shape->layers, sizeof *moments->offered);
  double *next = moments->numbers;
  for (size_t i = 0; i < sums_of(shape); i++) {
    const size_t dim = dim_of(shape, i % KINDS);
    moments->sums[i] = (sums){0, next, next + dim, next + 2 * dim};
    next += 2 * dim + triangle(dim);
  }
  return moments;
}

void qkv_moments_destroy(qkv_moments **moments) {
  if (*moments == NULL) return;
  qkv_phases_destroy(&(*moments)->phases);
  free((*moments)->sums);
  free((*moments)->numbers);
  free((*moments)->bounds);
  free((*moments)->offered);
  free(*moments);
  *moments = NULL;
}

const qkv_calibration_shape *qkv_moments_shape(const qkv_moments *moments) {
  return &moments->shape;
}

void qkv_moments_leave_out_before(qkv_moments *moments, uint64_t position) {
  moments->first = position;
}

// ---- Adding ----

// Scratch of one call: rows of one block, and their products.
typedef struct block {
  float *rows;      // [BLOCK][dim]
  float *products;  // [dim][dim]
} block;

static block block_create(size_t dim) {
  float *rows = malloc((BLOCK + dim) * dim * sizeof *rows);
  if (rows == NULL) abort();
  return (block){rows, rows + BLOCK * dim};
}

static int compare_floats(const void *a, const void *b) {
  const float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

// Medians, which outliers among the first rows do not move; in float, so that rows minus them are as exact as can be.
static void set_shift(sums *to, const float *rows, size_t n, size_t dim) {
  float column[BLOCK];
  for (size_t j = 0; j < dim; j++) {
    for (size_t i = 0; i < n; i++) column[i] = rows[i * dim + j];
    qsort(column, n, sizeof *column, compare_floats);
    to->shift[j] = (double)column[n / 2];
  }
}

// Of row y, which is off the shift, from the mean, whose offset from the shift is given. `space` [dim].
static double distance_from(const float *offset, const float *y, size_t dim, float *space) {
  for (size_t j = 0; j < dim; j++) space[j] = y[j] - offset[j];
  return (double)cblas_sdot((int)dim, space, 1, space, 1);
}

// Closes up the rows [n][dim], which are off the shift, where outliers are taken away; returns how many are left.
static size_t leave_out_outliers(const sums *to, qkv_distance_bound *bound, float *rows, size_t n, size_t dim) {
  float offset[QKV_DIM_MAX], space[QKV_DIM_MAX];
  double distances[BLOCK];
  size_t left = 0;
  for (size_t j = 0; j < dim; j++) offset[j] = to->count > 0 ? (float)(to->sum[j] / to->count) : 0;
  for (size_t i = 0; i < n; i++) {
    distances[i] = distance_from(offset, rows + i * dim, dim, space);
    qkv_distance_bound_add(bound, distances[i]);
  }
  const double limit = qkv_distance_bound_limit(bound);
  for (size_t i = 0; i < n; i++) {
    if (distances[i] > limit) continue;
    if (left < i) memcpy(rows + left * dim, rows + i * dim, dim * sizeof *rows);
    left++;
  }
  return left;
}

// So few rows that going through a matrix of their own would cost more than it saves.
static void add_few(sums *to, const float *rows, size_t n, size_t dim) {
  for (size_t row = 0; row < n; row++) {
    const float *y = rows + row * dim;
    double *products = to->products;
    for (size_t i = 0; i < dim; i++) {
      const double factor = (double)y[i];
      for (size_t j = 0; j <= i; j++) products[j] += factor * (double)y[j];
      products += i + 1;
    }
  }
  to->count += (double)n;
}

// The scratch's rows [n][dim], n <= BLOCK; they are overwritten. `bound` is NULL where rows are not centred.
static void add_block(sums *to, qkv_distance_bound *bound, block *scratch, size_t n, size_t dim) {
  float *rows = scratch->rows;
  if (bound != NULL && to->count == 0) set_shift(to, rows, n, dim);
  for (size_t i = 0; i < n; i++) {
    for (size_t j = 0; j < dim; j++) rows[i * dim + j] -= (float)to->shift[j];
  }
  if (bound != NULL) n = leave_out_outliers(to, bound, rows, n, dim);
  for (size_t i = 0; i < n; i++) {
    for (size_t j = 0; j < dim; j++) to->sum[j] += (double)rows[i * dim + j];
  }
  if (n < FEW) {
    add_few(to, rows, n, dim);
    return;
  }
  cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)dim, (int)n, 1.0f, rows, (int)dim, 0.0f, scratch->products,
              (int)dim);
  double *products = to->products;
  for (size_t i = 0; i < dim; i++) {
    const float *from = scratch->products + i * dim;
    for (size_t j = 0; j <= i; j++) products[j] += (double)from[j];
    products += i + 1;
  }
  to->count += (double)n;
}

// One head of rows [tokens][heads][dim], a block at a time. `phases` turns them back; NULL: they are as before RoPE.
typedef struct head_rows {
  const float *rows;
  uint64_t position;
  size_t tokens, stride, dim;
  const qkv_phases *phases;
} head_rows;

static void add_head(const head_rows *from, sums *to, qkv_distance_bound *bound, block *scratch) {
  const size_t dim = from->dim;
  for (size_t first = 0; first < from->tokens; first += BLOCK) {
    const size_t n = from->tokens - first < BLOCK ? from->tokens - first : BLOCK;
    for (size_t i = 0; i < n; i++) {
      memcpy(scratch->rows + i * dim, from->rows + (first + i) * from->stride, dim * sizeof *from->rows);
    }
    if (from->phases != NULL) qkv_phases_inverse(from->phases, from->position + first, n, dim, scratch->rows);
    add_block(to, bound, scratch, n, dim);
  }
}

void qkv_moments_add(qkv_moments *moments, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                     const float *v, bool before_rope) {
  const qkv_calibration_shape *shape = &moments->shape;
  const size_t key_dim = shape->key_dim, value_dim = shape->value_dim;
  const uint64_t before = position < moments->first ? moments->first - position : 0;
  const size_t skipped = before < tokens ? (size_t)before : tokens;
  head_rows keys = {.position = position + skipped,
                    .tokens = tokens - skipped,
                    .stride = shape->kv_heads * key_dim,
                    .dim = key_dim,
                    .phases = before_rope ? NULL : moments->phases};
  head_rows values = {.tokens = tokens - skipped, .stride = shape->kv_heads * value_dim, .dim = value_dim};
  block scratch = block_create(key_dim > value_dim ? key_dim : value_dim);
  for (uint32_t head = 0; head < shape->kv_heads; head++) {
    keys.rows = k + skipped * keys.stride + head * key_dim;
    values.rows = v + skipped * values.stride + head * value_dim;
    add_head(&keys, sums_at(moments, layer, head, QKV_MOMENTS_K), bound_at(moments, layer, head, QKV_MOMENTS_K),
             &scratch);
    add_head(&values, sums_at(moments, layer, head, QKV_MOMENTS_V), bound_at(moments, layer, head, QKV_MOMENTS_V),
             &scratch);
  }
  moments->offered[layer] += (double)tokens;
  free(scratch.rows);
}

void qkv_moments_add_queries(qkv_moments *moments, uint32_t layer, uint64_t position, size_t tokens, const float *q,
                             bool before_rope) {
  const qkv_calibration_shape *shape = &moments->shape;
  const size_t dim = shape->key_dim, group = shape->q_heads / shape->kv_heads;
  head_rows from = {.position = position,
                    .tokens = tokens,
                    .stride = shape->q_heads * dim,
                    .dim = dim,
                    .phases = before_rope ? NULL : moments->phases};
  block scratch = block_create(dim);
  for (uint32_t head = 0; head < shape->q_heads; head++) {
    from.rows = q + head * dim;
    add_head(&from, sums_at(moments, layer, (uint32_t)(head / group), QKV_MOMENTS_Q), NULL, &scratch);
  }
  free(scratch.rows);
}

// ---- All of it ----

// The products of two sums off different shifts are brought to one: with y = x - a and y' = x - b = y + e, e = a - b,
// sum y' y'^T = sum y y^T + s e^T + e s^T + n e e^T.
static void merge(sums *into, const sums *from, size_t dim) {
  if (from->count == 0) return;
  if (into->count == 0) memcpy(into->shift, from->shift, dim * sizeof *into->shift);
  const double *others = from->products;
  double *products = into->products;
  for (size_t i = 0; i < dim; i++) {
    const double e = from->shift[i] - into->shift[i];
    for (size_t j = 0; j <= i; j++) {
      const double f = from->shift[j] - into->shift[j];
      *products++ += *others++ + from->sum[i] * f + e * from->sum[j] + from->count * e * f;
    }
  }
  for (size_t i = 0; i < dim; i++) {
    into->sum[i] += from->sum[i] + from->count * (from->shift[i] - into->shift[i]);
  }
  into->count += from->count;
}

void qkv_moments_merge(qkv_moments *into, const qkv_moments *from) {
  const qkv_calibration_shape *shape = &into->shape;
  assert(shape->layers == from->shape.layers && shape->kv_heads == from->shape.kv_heads);
  assert(shape->key_dim == from->shape.key_dim && shape->value_dim == from->shape.value_dim);
  for (size_t i = 0; i < sums_of(shape); i++) merge(&into->sums[i], &from->sums[i], dim_of(shape, i % KINDS));
  for (size_t i = 0; i < bounds_of(shape); i++) qkv_distance_bound_merge(&into->bounds[i], &from->bounds[i]);
  for (size_t i = 0; i < shape->layers; i++) into->offered[i] += from->offered[i];
}

void qkv_moments_fade(qkv_moments *moments, double factor) {
  assert(factor >= 0 && factor <= 1);
  for (size_t i = 0; i < bounds_of(&moments->shape); i++) qkv_distance_bound_fade(&moments->bounds[i], factor);
  for (size_t i = 0; i < moments->shape.layers; i++) moments->offered[i] *= factor;
  for (size_t i = 0; i < sums_of(&moments->shape); i++) {
    sums *faded = &moments->sums[i];
    const size_t dim = dim_of(&moments->shape, i % KINDS);
    faded->count *= factor;
    for (size_t j = 0; j < dim; j++) faded->sum[j] *= factor;
    for (size_t j = 0; j < triangle(dim); j++) faded->products[j] *= factor;
  }
}

double qkv_moments_tokens(const qkv_moments *moments) {
  double least = 0;
  for (uint32_t layer = 0; layer < moments->shape.layers; layer++) {
    const double count = moments->offered[layer];
    if (count > 0 && (least == 0 || count < least)) least = count;
  }
  return least;
}

double qkv_moments_read(const qkv_moments *moments, uint32_t layer, uint32_t kv_head, qkv_moments_kind kind,
                        double *mean, double *second) {
  const sums *from = sums_at(moments, layer, kv_head, kind);
  const size_t dim = dim_of(&moments->shape, kind);
  const double each = from->count > 0 ? 1 / from->count : 0;
  double offset[QKV_DIM_MAX];  // of what second moments are about from the shift
  for (size_t i = 0; i < dim; i++) offset[i] = kind == QKV_MOMENTS_Q ? 0 : from->sum[i] * each;
  for (size_t i = 0; i < dim; i++) mean[i] = from->shift[i] + from->sum[i] * each;
  const double *products = from->products;
  for (size_t i = 0; i < dim; i++) {
    for (size_t j = 0; j <= i; j++) {
      second[i * dim + j] = second[j * dim + i] = *products++ * each - offset[i] * offset[j];
    }
  }
  return from->count;
}
