#include "engine/codec/svd.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { PLAIN_BELOW = 64, OVERSAMPLES = 10, POWER_ITERATIONS = 2, SWEEPS_MAX = 12 };

static double dot(const double *a, const double *b, size_t n) {
  double lanes[4] = {0}, rest = 0;
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (size_t j = 0; j < 4; j++) lanes[j] += a[i + j] * b[i + j];
  }
  for (; i < n; i++) rest += a[i] * b[i];
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]) + rest;
}

static void add(double *restrict to, const double *restrict from, double factor, size_t n) {
  for (size_t i = 0; i < n; i++) to[i] += factor * from[i];
}

static void scale(double *row, double factor, size_t n) {
  for (size_t i = 0; i < n; i++) row[i] *= factor;
}

// Vectors [k][n] become orthonormal; those that depend on the ones before become 0. Gram-Schmidt, twice.
static void orthonormalize(double *vectors, size_t k, size_t n) {
  for (size_t i = 0; i < k; i++) {
    double *v = vectors + i * n;
    const double before = dot(v, v, n);
    for (size_t pass = 0; pass < 2; pass++) {
      for (size_t j = 0; j < i; j++) add(v, vectors + j * n, -dot(v, vectors + j * n, n), n);
    }
    const double after = dot(v, v, n);
    scale(v, after > 1e-20 * before ? 1 / sqrt(after) : 0, n);
  }
}

// to [k][count] = rows . from [k][dim]
static void project(const double *rows, size_t count, size_t dim, const double *from, size_t k, double *to) {
  for (size_t i = 0; i < k; i++) {
    for (size_t t = 0; t < count; t++) to[i * count + t] = dot(rows + t * dim, from + i * dim, dim);
  }
}

// to [k][dim] = from [k][count] . rows
static void combine(const double *rows, size_t count, size_t dim, const double *from, size_t k, double *to) {
  memset(to, 0, k * dim * sizeof *to);
  for (size_t i = 0; i < k; i++) {
    for (size_t t = 0; t < count; t++) add(to + i * dim, rows + t * dim, from[i * count + t], dim);
  }
}

// Random signs, always the same.
static void fill_signs(double *vectors, size_t n) {
  uint64_t state = 0;
  for (size_t i = 0; i < n; i++) {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    vectors[i] = z >> 63 ? 1 : -1;
  }
}

// Turns rows and columns p and q of the symmetric `a` [k][k] so that a[p][q] becomes 0, and the rows of `turns`
// alike.
static void rotate(double *a, double *turns, size_t k, size_t p, size_t q) {
  const double theta = (a[q * k + q] - a[p * k + p]) / (2 * a[p * k + q]);
  const double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1));
  const double c = 1 / sqrt(t * t + 1), s = t * c;
  for (size_t i = 0; i < k; i++) {
    const double x = a[i * k + p], y = a[i * k + q];
    a[i * k + p] = c * x - s * y;
    a[i * k + q] = s * x + c * y;
  }
  double *const matrices[] = {a, turns};
  for (size_t m = 0; m < 2; m++) {
    double *rp = matrices[m] + p * k, *rq = matrices[m] + q * k;
    for (size_t i = 0; i < k; i++) {
      const double x = rp[i], y = rq[i];
      rp[i] = c * x - s * y;
      rq[i] = s * x + c * y;
    }
  }
}

// Jacobi: the diagonal of `a` [k][k] becomes its eigenvalues, the rows of `turns` the eigenvectors.
static void diagonalize(double *a, double *turns, size_t k) {
  memset(turns, 0, k * k * sizeof *turns);
  for (size_t i = 0; i < k; i++) turns[i * k + i] = 1;
  double trace = 0;
  for (size_t i = 0; i < k; i++) trace += a[i * k + i];
  for (size_t sweep = 0; sweep < SWEEPS_MAX; sweep++) {
    bool rotated = false;
    for (size_t p = 0; p < k; p++) {
      for (size_t q = p + 1; q < k; q++) {
        if (fabs(a[p * k + q]) <= 1e-12 * trace) continue;
        rotate(a, turns, k, p, q);
        rotated = true;
      }
    }
    if (!rotated) return;
  }
}

static size_t subspace(size_t count, size_t dim, size_t rank) {
  if (count < PLAIN_BELOW) return count;
  const size_t least = count < dim ? count : dim;
  return rank + OVERSAMPLES < least ? rank + OVERSAMPLES : least;
}

size_t qkvi_svd_scratch_bytes(size_t count, size_t dim, size_t rank) {
  const size_t k = subspace(count, dim, rank);
  return (k * (count + dim) + 2 * k * k) * sizeof(double);
}

void qkvi_svd(const double *rows, size_t count, size_t dim, size_t rank, void *scratch, double *left, double *right) {
  assert(rank <= QKVI_SVD_RANK_MAX);
  const size_t k = subspace(count, dim, rank);
  double *basis = scratch, *small = basis + k * count, *gram = small + k * dim, *turns = gram + k * k;
  if (count < PLAIN_BELOW) {
    memset(basis, 0, k * count * sizeof *basis);
    for (size_t i = 0; i < k; i++) basis[i * count + i] = 1;
  } else {
    fill_signs(small, k * dim);
    project(rows, count, dim, small, k, basis);
    orthonormalize(basis, k, count);
    for (size_t i = 0; i < POWER_ITERATIONS; i++) {
      combine(rows, count, dim, basis, k, small);
      orthonormalize(small, k, dim);
      project(rows, count, dim, small, k, basis);
      orthonormalize(basis, k, count);
    }
  }
  combine(rows, count, dim, basis, k, small);
  for (size_t i = 0; i < k; i++) {
    for (size_t j = 0; j < k; j++) gram[i * k + j] = dot(small + i * dim, small + j * dim, dim);
  }
  diagonalize(gram, turns, k);
  memset(left, 0, rank * count * sizeof *left);
  memset(right, 0, rank * dim * sizeof *right);
  const double largest = dot(rows, rows, count * dim);
  for (size_t r = 0; r < rank && r < k; r++) {
    size_t best = 0;
    for (size_t i = 1; i < k; i++) best = gram[i * k + i] > gram[best * k + best] ? i : best;
    const double value = gram[best * k + best];
    if (!(value > 1e-14 * largest)) return;
    gram[best * k + best] = -1;
    for (size_t i = 0; i < k; i++) {
      add(left + r * count, basis + i * count, turns[best * k + i] * sqrt(value), count);
      add(right + r * dim, small + i * dim, turns[best * k + i] / sqrt(value), dim);
    }
  }
}
