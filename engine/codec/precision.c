#include "engine/codec/precision.h"

#include <math.h>

#include "engine/codec/trial.h"

#define SHARE_MAX 0.1        // of the codes' error
#define QUERY_ERROR 0.0061   // of a coordinate, in standard deviations of the largest
#define WEIGHT_ERROR 0.0042  // of the output

static unsigned bytes_for(double error_squared, double code_error_squared) {
  return error_squared <= SHARE_MAX * SHARE_MAX * code_error_squared ? 1 : 2;
}

unsigned qkvi_bytes_for(const qkv_transform *keys, unsigned tier, double error_squared) {
  const qkv_schedule *schedule = keys->schedule;
  double sum = schedule->dim;
  if (keys->weights != NULL) {
    sum = 0;
    for (size_t c = 0; c < schedule->dim; c++) sum += (double)keys->weights[c];
  }
  return bytes_for(error_squared, sum * qkvi_tier_distortion(schedule, tier, keys->weights));
}

unsigned qkvi_query_bytes(const qkv_transform *keys, unsigned tier) {
  const qkv_schedule *schedule = keys->schedule;
  double largest = 1;
  if (keys->weights != NULL) {
    largest = 0;
    for (size_t c = 0; c < schedule->dim; c++) largest = fmax(largest, (double)keys->weights[c]);
  }
  const double coded = schedule->reach[tier][1];
  return qkvi_bytes_for(keys, tier, QUERY_ERROR * QUERY_ERROR * largest * coded);
}

unsigned qkvi_weight_bytes(const qkv_transform *values, unsigned tier) {
  return bytes_for(WEIGHT_ERROR * WEIGHT_ERROR, qkvi_tier_distortion(values->schedule, tier, values->weights));
}
