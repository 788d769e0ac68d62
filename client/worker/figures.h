// What is measured while a model runs: how far one next-token distribution is from another, and how long calls
// take.
#ifndef QKV_CLIENT_WORKER_FIGURES_H
#define QKV_CLIENT_WORKER_FIGURES_H

#include <stddef.h>
#include <stdint.h>

// The likeliest token, the first of equal ones.
int32_t qkvi_likeliest(const float *logits, int64_t vocabulary);

// Sums over positions.
typedef struct qkvi_quality {
  uint64_t positions;
  double bits;        // -log2 p of the true next token, with the daemon's cache
  double bits_exact;  // the same with the exact cache
  double kl_bits;     // KL(exact || daemon)
  uint64_t agreed;    // positions where both find the same token likeliest
} qkvi_quality;

// Adds one position. Both logits are [vocabulary]; computed in double.
void qkvi_quality_add(qkvi_quality *quality, const float *exact, const float *logits, int64_t vocabulary,
                      int32_t next);
void qkvi_quality_sum(qkvi_quality *quality, const qkvi_quality *other);

// A growing list of numbers; zeroed it is empty.
typedef struct qkvi_samples {
  double *values;
  size_t count, capacity;
} qkvi_samples;

void qkvi_samples_add(qkvi_samples *samples, double value);
// The smallest sample that at least `fraction` of all do not exceed; 0 when there is none. Sorts the list.
double qkvi_samples_percentile(qkvi_samples *samples, double fraction);
void qkvi_samples_clear(qkvi_samples *samples);

// Microseconds on a clock that only goes forward.
double qkvi_now_us(void);

#endif
