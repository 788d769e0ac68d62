#include "engine/codec/rotation.h"

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/random.h"
#include "engine/codec/schedule.h"
#include "engine/kernel/kernel.h"

enum { WIDTHS = QKV_DIM_MAX / QKV_BAND };

static void orthogonalize(double *rows, size_t dim, size_t i) {
  double *row = rows + i * dim, size = 0;
  for (int twice = 0; twice < 2; twice++) {
    for (size_t j = 0; j < i; j++) {
      double along = 0;
      for (size_t c = 0; c < dim; c++) along += row[c] * rows[j * dim + c];
      for (size_t c = 0; c < dim; c++) row[c] -= along * rows[j * dim + c];
    }
  }
  for (size_t c = 0; c < dim; c++) size += row[c] * row[c];
  for (size_t c = 0; c < dim; c++) row[c] /= sqrt(size);
}

// Whether the determinant is below 0, by elimination; `m` is used up.
static int is_reflection(double *m, size_t dim) {
  int sign = 0;
  for (size_t i = 0; i < dim; i++) {
    size_t best = i;
    for (size_t r = i + 1; r < dim; r++) best = fabs(m[r * dim + i]) > fabs(m[best * dim + i]) ? r : best;
    for (size_t c = 0; best != i && c < dim; c++) {
      const double kept = m[i * dim + c];
      m[i * dim + c] = m[best * dim + c];
      m[best * dim + c] = kept;
    }
    sign ^= (best != i) ^ (m[i * dim + i] < 0);
    for (size_t r = i + 1; r < dim; r++) {
      const double factor = m[r * dim + i] / m[i * dim + i];
      for (size_t c = i; c < dim; c++) m[r * dim + c] -= factor * m[i * dim + c];
    }
  }
  return sign;
}

static void fill(double *rows, size_t count, uint64_t seed) {
  for (size_t i = 0; i < count; i++) rows[i] = qkvi_random_gaussian(&seed);
}

static void rotate(double *rows, size_t dim) {
  double *copy = calloc(dim * dim, sizeof *copy);
  if (copy == NULL) abort();
  for (size_t i = 0; i < dim; i++) orthogonalize(rows, dim, i);
  memcpy(copy, rows, dim * dim * sizeof *rows);
  const double sign = is_reflection(copy, dim) ? -1 : 1;
  for (size_t c = 0; c < dim; c++) rows[c] *= sign;
  free(copy);
}

typedef enum kind { ROTATION, SKETCH, KINDS } kind;

static float *make(kind as, size_t dim) {
  static const uint64_t seeds[KINDS] = {[ROTATION] = 0x716b7664, [SKETCH] = 0x71a3b1c5};
  double *rows = calloc(dim * dim, sizeof *rows);
  float *made = malloc(dim * dim * sizeof *made);
  if (rows == NULL || made == NULL) abort();
  fill(rows, dim * dim, seeds[as] + dim);
  if (as == ROTATION) rotate(rows, dim);
  for (size_t i = 0; i < dim * dim; i++) made[i] = (float)rows[i];
  free(rows);
  return made;
}

static const float *matrix_of(kind as, size_t dim) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static float *made[KINDS][WIDTHS];
  (void)pthread_mutex_lock(&lock);
  float **found = &made[as][dim / QKV_BAND - 1];
  if (*found == NULL) *found = make(as, dim);
  const float *matrix = *found;
  (void)pthread_mutex_unlock(&lock);
  return matrix;
}

void qkv_rotation_forward(float *rows, size_t n, size_t dim) {
  qkv_kernels_get()->multiply(matrix_of(ROTATION, dim), dim, dim, rows, n);
}

void qkv_rotation_inverse(float *rows, size_t n, size_t dim) {
  qkv_kernels_get()->combine(matrix_of(ROTATION, dim), dim, dim, rows, n);
}

void qkv_sketch_forward(float *rows, size_t n, size_t dim) {
  qkv_kernels_get()->multiply(matrix_of(SKETCH, dim), dim, dim, rows, n);
}

void qkv_sketch_back(float *rows, size_t n, size_t dim) {
  qkv_kernels_get()->combine(matrix_of(SKETCH, dim), dim, dim, rows, n);
}
