#include "engine/codec/distance_bound.h"

#include <math.h>
#include <stddef.h>

enum { OCTAVE = 2, LOWEST = -48 };  // bins of an octave; the exponent of 2 at which the first one begins

static size_t bin_of(double square) {
  const double bin = floor((log2(square) - LOWEST) * OCTAVE);
  if (!(bin > 0)) return 0;
  return bin < QKV_DISTANCE_BINS ? (size_t)bin : QKV_DISTANCE_BINS - 1;
}

void qkv_distance_bound_add(qkv_distance_bound *bound, double square) {
  uint32_t *count = &bound->counts[bin_of(square)];
  if (*count == UINT32_MAX) return;  // so many rows say enough
  (*count)++;
  bound->rows++;
}

// Within the bin, rows are taken to be spread evenly over the logarithm.
double qkv_distance_bound_limit(const qkv_distance_bound *bound) {
  double left = QKV_DISTANCE_SHARE * (double)bound->rows;
  if (bound->rows == 0) return INFINITY;
  for (size_t bin = 0; bin < QKV_DISTANCE_BINS; bin++) {
    const double count = (double)bound->counts[bin];
    if (count >= left) return QKV_DISTANCE_TIMES * exp2(((double)bin + left / count) / OCTAVE + LOWEST);
    left -= count;
  }
  return INFINITY;
}

void qkv_distance_bound_merge(qkv_distance_bound *into, const qkv_distance_bound *from) {
  into->rows += from->rows;
  for (size_t bin = 0; bin < QKV_DISTANCE_BINS; bin++) into->counts[bin] += from->counts[bin];
}

void qkv_distance_bound_fade(qkv_distance_bound *bound, double factor) {
  bound->rows = 0;
  for (size_t bin = 0; bin < QKV_DISTANCE_BINS; bin++) {
    bound->counts[bin] = (uint64_t)((double)bound->counts[bin] * factor);
    bound->rows += bound->counts[bin];
  }
}
