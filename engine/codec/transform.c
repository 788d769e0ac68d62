#include "engine/codec/transform.h"

#include <assert.h>
#include <string.h>

#include "engine/codec/hadamard.h"
#include "engine/kernel/kernel.h"

enum { LANES = 8 };  // sums kept side by side, so that the compiler can vectorize without reordering

static float dot(const float *a, const float *b, size_t n) {
  float lanes[LANES] = {0};
  for (size_t i = 0; i < n; i += LANES) {
    for (size_t lane = 0; lane < LANES; lane++) lanes[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0;
  for (size_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

void qkv_transform_forward(const qkv_transform *transform, float *rows, size_t n, size_t coordinates) {
  const size_t dim = transform->schedule->dim;
  assert(coordinates <= dim);
  if (transform->analysis == NULL) {
    qkv_hadamard_forward(rows, n, dim);
    return;
  }
  qkv_kernels_get()->multiply_integer(transform->forward, coordinates, transform->mean, NULL, rows, n);
}

void qkv_transform_inverse(const qkv_transform *transform, float *rows, size_t n, size_t coordinates) {
  const size_t dim = transform->schedule->dim;
  assert(coordinates <= dim);
  if (transform->analysis == NULL) {
    qkv_hadamard_inverse(rows, n, dim);
    return;
  }
  for (size_t i = 0; coordinates < dim && i < n; i++)
    memset(rows + i * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
  qkv_kernels_get()->multiply_integer(transform->backward, dim, NULL, transform->mean, rows, n);
}

// What the mean adds to the scores of queries.
static void mean_shares(const qkv_transform *transform, const float *queries, size_t n, float *shares) {
  const size_t dim = transform->schedule->dim;
  for (size_t i = 0; i < n; i++) shares[i] = dot(queries + i * dim, transform->mean, dim);
}

void qkv_transform_query(const qkv_transform *transform, float *queries, size_t n, size_t coordinates,
                         float *shares) {
  const size_t dim = transform->schedule->dim;
  memset(shares, 0, n * sizeof *shares);
  if (transform->analysis == NULL) {
    qkv_hadamard_forward(queries, n, dim);
    return;
  }
  mean_shares(transform, queries, n, shares);
  qkv_kernels_get()->multiply(transform->synthesis, dim, coordinates, queries, n);
}

void qkv_transform_turned(const qkv_transform *transform, float *queries, size_t n, size_t coordinates,
                          float *shares) {
  if (transform->turning == NULL) return qkv_transform_query(transform, queries, n, coordinates, shares);
  mean_shares(transform, queries, n, shares);
  qkv_kernels_get()->multiply_integer(transform->turning, coordinates, NULL, NULL, queries, n);
}

void qkv_transform_output(const qkv_transform *transform, float *sums, const double *totals, size_t n,
                          size_t coordinates) {
  const size_t dim = transform->schedule->dim;
  if (transform->analysis == NULL) {
    qkv_hadamard_inverse(sums, n, dim);
    return;
  }
  qkv_kernels_get()->combine(transform->synthesis, dim, coordinates, sums, n);
  for (size_t i = 0; i < n; i++) {
    const float total = (float)totals[i];
    for (size_t j = 0; j < dim; j++) sums[i * dim + j] += total * transform->mean[j];
  }
}
