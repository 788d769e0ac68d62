#include "engine/codec/precision.h"

#include <math.h>

#include "engine/codec/trial.h"
#include "engine/kernel/integer.h"

#define SHARE_MAX 0.1        // of the codes' error
#define QUERY_ERROR 0.0075   // of a coordinate, in standard deviations of the largest, in a byte
#define WEIGHT_ERROR 0.0038  // of the output

// The codes' squared error of a score, with the queries that the keys are coded for.
static double code_error_squared(const qkv_transform *keys, unsigned tier) {
  const qkv_schedule *schedule = keys->schedule;
  double sum = schedule->dim;
  if (keys->weights != NULL) {
    sum = 0;
    for (size_t c = 0; c < schedule->dim; c++) sum += (double)keys->weights[c];
  }
  return sum * qkvi_tier_distortion(schedule, tier, keys->weights);
}

unsigned qkvi_bytes_for(const qkv_transform *keys, unsigned tier, double error_squared) {
  return error_squared <= SHARE_MAX * SHARE_MAX * code_error_squared(keys, tier) ? 1 : 2;
}

float qkvi_query_limit(const qkv_transform *keys, unsigned tier) {
  const qkv_schedule *schedule = keys->schedule;
  double largest = 1;
  if (keys->weights != NULL) {
    largest = 0;
    for (size_t c = 0; c < schedule->dim; c++) largest = fmax(largest, (double)keys->weights[c]);
  }
  const double error = QUERY_ERROR * sqrt(largest * schedule->reach[tier][1]);  // in a byte
  const double allowed = SHARE_MAX * sqrt(code_error_squared(keys, tier));
  const double limit = (double)QKVI_LIMIT_1 * error / allowed;
  if (limit <= (double)QKVI_LIMIT_1) return QKVI_LIMIT_1;
  return limit < (double)QKVI_LIMIT_2 ? (float)limit : QKVI_LIMIT_2;
}

unsigned qkvi_weight_bytes(const qkv_transform *values, unsigned tier) {
  const double error = qkvi_tier_distortion(values->schedule, tier, values->weights);
  return WEIGHT_ERROR * WEIGHT_ERROR <= SHARE_MAX * SHARE_MAX * error ? 1 : 2;
}
