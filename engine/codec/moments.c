#include "engine/codec/moments.h"

#include <assert.h>
#include <cblas.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/page.h"
#include "engine/codec/phases.h"

enum { KINDS = 3, BLOCK = QKV_PAGE_TOKENS, FEW = 4 };

// Of rows x, with y = x - shift.
typedef struct sums {
  double count;
  double *shift;     // [dim]; set by the first block of keys and values, 0 for queries
  double *sum;       // [dim] of y
  double *products;  // of y y^T, the lower triangle row by row
} sums;

struct qkv_moments {
  qkv_calibration_shape shape;
  qkv_phases *phases;  // NULL without RoPE
  sums *sums;          // [layers][kv_heads][KINDS]
  double *numbers;     // what the sums point into
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

size_t qkv_moments_bytes(const qkv_calibration_shape *shape) {
  return sizeof(qkv_moments) + sums_of(shape) * sizeof(sums) + numbers_of(shape) * sizeof(double);
}

static sums *sums_at(const qkv_moments *moments, uint32_t layer, uint32_t kv_head, qkv_moments_kind kind) {
  assert(layer < moments->shape.layers && kv_head < moments->shape.kv_heads);
  return &moments->sums[((size_t)layer * moments->shape.kv_heads + kv_head) * KINDS + kind];
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
  free(*moments);
  *moments = NULL;
}

const qkv_calibration_shape *qkv_moments_shape(const qkv_moments *moments) {
  return &moments->shape;
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

static void set_shift(sums *to, const float *rows, size_t n, size_t dim) {
  for (size_t j = 0; j < dim; j++) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)rows[i * dim + j];
    // To float, so that rows minus the shift are as exact as they can be.
    to->shift[j] = (double)(float)(sum / (double)n);
  }
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

// The scratch's rows [n][dim], n <= BLOCK; they are overwritten.
static void add_block(sums *to, block *scratch, size_t n, size_t dim, bool centred) {
  float *rows = scratch->rows;
  if (centred && to->count == 0) set_shift(to, rows, n, dim);
  for (size_t i = 0; i < n; i++) {
    for (size_t j = 0; j < dim; j++) {
      rows[i * dim + j] -= (float)to->shift[j];
      to->sum[j] += (double)rows[i * dim + j];
    }
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

// One head of rows [tokens][heads][dim], a block at a time.
static void add_head(qkv_moments *moments, sums *to, block *scratch, uint64_t position, size_t tokens,
                     const float *rows, size_t stride, size_t dim, bool rotated, bool centred) {
  for (size_t first = 0; first < tokens; first += BLOCK) {
    const size_t n = tokens - first < BLOCK ? tokens - first : BLOCK;
    for (size_t i = 0; i < n; i++) {
      memcpy(scratch->rows + i * dim, rows + (first + i) * stride, dim * sizeof *rows);
    }
    if (rotated) qkv_phases_inverse(moments->phases, position + first, n, dim, scratch->rows);
    add_block(to, scratch, n, dim, centred);
  }
}

void qkv_moments_add(qkv_moments *moments, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                     const float *v, bool before_rope) {
  const qkv_calibration_shape *shape = &moments->shape;
  const size_t key_dim = shape->key_dim, value_dim = shape->value_dim;
  const bool rotated = moments->phases != NULL && !before_rope;
  block scratch = block_create(key_dim > value_dim ? key_dim : value_dim);
  for (uint32_t head = 0; head < shape->kv_heads; head++) {
    add_head(moments, sums_at(moments, layer, head, QKV_MOMENTS_K), &scratch, position, tokens, k + head * key_dim,
             shape->kv_heads * key_dim, key_dim, rotated, true);
    add_head(moments, sums_at(moments, layer, head, QKV_MOMENTS_V), &scratch, position, tokens, v + head * value_dim,
             shape->kv_heads * value_dim, value_dim, false, true);
  }
  free(scratch.rows);
}

void qkv_moments_add_queries(qkv_moments *moments, uint32_t layer, uint64_t position, size_t tokens, const float *q,
                             bool before_rope) {
  const qkv_calibration_shape *shape = &moments->shape;
  const size_t dim = shape->key_dim, group = shape->q_heads / shape->kv_heads;
  const bool rotated = moments->phases != NULL && !before_rope;
  block scratch = block_create(dim);
  for (uint32_t head = 0; head < shape->q_heads; head++) {
    add_head(moments, sums_at(moments, layer, (uint32_t)(head / group), QKV_MOMENTS_Q), &scratch, position, tokens,
             q + head * dim, shape->q_heads * dim, dim, rotated, false);
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
}

void qkv_moments_fade(qkv_moments *moments, double factor) {
  assert(factor >= 0 && factor <= 1);
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
    const double count = sums_at(moments, layer, 0, QKV_MOMENTS_K)->count;
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
