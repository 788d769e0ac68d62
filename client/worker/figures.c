#include "client/worker/figures.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <time.h>

int32_t qkvi_likeliest(const float *logits, int64_t vocabulary) {
  int64_t best = 0;
  for (int64_t i = 1; i < vocabulary; i++) {
    if (logits[i] > logits[best]) best = i;
  }
  return (int32_t)best;
}

// With weights w = e^(exact - max) and their sum s, KL = sum w (exact - logits) / s - log s_exact + log s_logits: one
// walk, and no log of a probability that has become 0.
void qkvi_quality_add(qkvi_quality *quality, const float *exact, const float *logits, int64_t vocabulary,
                      int32_t next) {
  const int32_t best = qkvi_likeliest(exact, vocabulary), best_coded = qkvi_likeliest(logits, vocabulary);
  const double max = exact[best], max_coded = logits[best_coded];
  double sum = 0, sum_coded = 0, apart = 0;
  for (int64_t i = 0; i < vocabulary; i++) {
    const double p = exact[i] - max, q = logits[i] - max_coded, weight = exp(p);
    sum += weight;
    sum_coded += exp(q);
    apart += weight * (p - q);
  }
  quality->positions++;
  quality->bits -= (logits[next] - max_coded - log(sum_coded)) / M_LN2;
  quality->bits_exact -= (exact[next] - max - log(sum)) / M_LN2;
  quality->kl_bits += (apart / sum - log(sum) + log(sum_coded)) / M_LN2;
  quality->agreed += best == best_coded;
}

void qkvi_quality_sum(qkvi_quality *quality, const qkvi_quality *other) {
  quality->positions += other->positions;
  quality->bits += other->bits;
  quality->bits_exact += other->bits_exact;
  quality->kl_bits += other->kl_bits;
  quality->agreed += other->agreed;
}

void qkvi_samples_add(qkvi_samples *samples, double value) {
  if (samples->count == samples->capacity) {
    samples->capacity = samples->capacity == 0 ? 1024 : samples->capacity * 2;
    samples->values = realloc(samples->values, samples->capacity * sizeof(double));
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
