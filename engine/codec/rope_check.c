#include "engine/codec/rope_check.h"

#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/lapack.h"

static const double BASES[] = {1e3, 1e4, 1e5, 5e5, 1e6, 1e7};
// Directions without any variance would make all volumes 0: this part of the rows' mean square is added.
static const double FLOOR = 1e-4;

static bool same_turns(const qkv_rope *a, const qkv_rope *b) {
  return a->theta == b->theta && (a->theta == 0 || a->interleaved == b->interleaved);
}

static void add_candidate(qkv_rope_check *check, qkv_rope rope) {
  if (rope.theta != 0 && qkv_rope_resolve(&rope, check->key_dim, NULL) != QKV_OK) return;
  for (size_t i = 0; i < check->count; i++) {
    if (same_turns(&check->ropes[i], &rope)) return;
  }
  assert(check->count < QKV_ROPE_CHECK_CANDIDATES);
  check->ropes[check->count++] = rope;
}

void qkv_rope_check_init(qkv_rope_check *check, const qkv_rope *declared, uint32_t key_dim) {
  *check = (qkv_rope_check){.key_dim = key_dim};
  add_candidate(check, *declared);
  for (size_t i = 0; i < sizeof BASES / sizeof *BASES; i++) {
    for (int interleaved = 0; interleaved < 2; interleaved++) {
      qkv_rope rope = *declared;
      rope.theta = BASES[i];
      rope.interleaved = interleaved != 0;
      add_candidate(check, rope);
    }
  }
  if (declared->theta == 0) return;
  qkv_rope other = *declared;
  other.interleaved = !other.interleaved;
  add_candidate(check, other);
  add_candidate(check, (qkv_rope){0});
}

// ln det of the covariance of rows [count][dim], a coordinate, relative to their mean square; they are overwritten.
static double volume_of(float *rows, size_t count, size_t dim, double *covariance) {
  double squares = 0, volume = 0;
  for (size_t i = 0; i < count * dim; i++) squares += (double)rows[i] * (double)rows[i];
  const double mean_square = squares / (double)(count * dim);
  if (!(mean_square > 0)) return 0;
  for (size_t j = 0; j < dim; j++) {
    double mean = 0;
    for (size_t i = 0; i < count; i++) mean += (double)rows[i * dim + j];
    for (size_t i = 0; i < count; i++) rows[i * dim + j] -= (float)(mean / (double)count);
  }
  float *products = (float *)(covariance + dim * dim);
  cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)dim, (int)count, 1.0f, rows, (int)dim, 0.0f, products,
              (int)dim);
  for (size_t i = 0; i < dim; i++) {
    for (size_t j = 0; j <= i; j++) {
      covariance[i * dim + j] = (double)products[i * dim + j] / (double)count / mean_square + (i == j ? FLOOR : 0);
    }
  }
  if (qkvi_lapack_cholesky(covariance, dim) != 0) return log(FLOOR);
  for (size_t i = 0; i < dim; i++) volume += 2 * log(covariance[i * dim + i]);
  return volume / (double)dim;
}

void qkv_rope_check_add(qkv_rope_check *check, const float *k, size_t stride, const uint64_t *positions,
                        size_t rows) {
  const qkv_rope *declared = &check->ropes[0];
  const size_t dim = declared->theta != 0 ? declared->width : check->key_dim;
  float *turned = malloc((rows + 1) * check->key_dim * sizeof *turned);
  double *covariance = malloc(dim * dim * (sizeof *covariance + sizeof(float)));
  double volumes[QKV_ROPE_CHECK_CANDIDATES];
  if (turned == NULL || covariance == NULL) abort();
  for (size_t c = 0; c < check->count; c++) {
    for (size_t i = 0; i < rows; i++) {
      float *row = turned + i * dim;  // the next one's place is filled later
      memcpy(row, k + i * stride, dim * sizeof *row);
      if (check->ropes[c].theta != 0) qkv_rope_inverse(&check->ropes[c], row, positions[i]);
    }
    volumes[c] = volume_of(turned, rows, dim, covariance);
    check->volumes[c] += volumes[c];
    check->lower[c] += volumes[c] < volumes[0] - QKV_ROPE_CHECK_MARGIN;
  }
  check->heads++;
  free(turned);
  free(covariance);
}

static void name_rope(const qkv_rope *rope, char *text, size_t size) {
  if (rope->theta == 0) {
    (void)snprintf(text, size, "no RoPE");
  } else {
    (void)snprintf(text, size, "theta %.10g, pairing %s", rope->theta, rope->interleaved ? "interleaved" : "half");
  }
}

bool qkv_rope_check_doubts(const qkv_rope_check *check, char *text, size_t size) {
  char declared[64], better[64];
  size_t best = 0;
  text[0] = '\0';
  if (check->heads == 0) return false;
  for (size_t c = 1; c < check->count; c++) {
    if (check->volumes[c] < check->volumes[best]) best = c;
  }
  const double heads = (double)check->heads;
  if (check->volumes[best] > check->volumes[0] - QKV_ROPE_CHECK_MARGIN * heads) return false;
  if ((double)check->lower[best] < QKV_ROPE_CHECK_HEADS * heads) return false;
  name_rope(&check->ropes[0], declared, sizeof declared);
  name_rope(&check->ropes[best], better, sizeof better);
  (void)snprintf(text, size,
                 "the model is registered with %s, but its keys look like those of one with %s: ln det C a "
                 "coordinate before RoPE is "
                 "%.2f and %.2f, in %zu of %zu heads so",
                 declared, better, check->volumes[0] / heads, check->volumes[best] / heads, check->lower[best],
                 check->heads);
  return true;
}
