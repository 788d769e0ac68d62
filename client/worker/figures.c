#include "client/worker/figures.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "client/worker/lm.h"

// Natural logs of the softmax.
static void log_softmax(const float *logits, double *out) {
  double max = logits[0], sum = 0;
  for (int i = 1; i < QKVI_LM_VOCABULARY; i++) max = fmax(max, logits[i]);
  for (int i = 0; i < QKVI_LM_VOCABULARY; i++) sum += exp(logits[i] - max);
  for (int i = 0; i < QKVI_LM_VOCABULARY; i++) out[i] = logits[i] - max - log(sum);
}

void qkvi_quality_add(qkvi_quality *quality, const float *exact, const float *logits, uint8_t next) {
  double p[QKVI_LM_VOCABULARY], q[QKVI_LM_VOCABULARY];
  log_softmax(exact, p);
  log_softmax(logits, q);
  double kl = 0;
  for (int i = 0; i < QKVI_LM_VOCABULARY; i++) kl += exp(p[i]) * (p[i] - q[i]);
  quality->positions++;
  quality->bits -= q[next] / M_LN2;
  quality->bits_exact -= p[next] / M_LN2;
  quality->kl_bits += kl / M_LN2;
}

void qkvi_quality_sum(qkvi_quality *quality, const qkvi_quality *other) {
  quality->positions += other->positions;
  quality->bits += other->bits;
  quality->bits_exact += other->bits_exact;
  quality->kl_bits += other->kl_bits;
}

void qkvi_samples_add(qkvi_samples *samples, double value) {
  if (samples->count == samples->room) {
    samples->room = samples->room == 0 ? 1024 : samples->room * 2;
    samples->values = realloc(samples->values, samples->room * sizeof(double));
    if (samples->values == NULL) abort();
  }
  samples->values[samples->count++] = value;
}

static int ascending(const void *left, const void *right) {
  double a = *(const double *)left, b = *(const double *)right;
  return (a > b) - (a < b);
}

double qkvi_samples_percentile(qkvi_samples *samples, double fraction) {
  assert(fraction > 0 && fraction <= 1);
  if (samples->count == 0) return 0;
  qsort(samples->values, samples->count, sizeof(double), ascending);
  return samples->values[(size_t)ceil(fraction * (double)samples->count) - 1];
}

void qkvi_samples_clear(qkvi_samples *samples) {
  free(samples->values);
  *samples = (qkvi_samples){0};
}

double qkvi_now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}
