// How far from their mean one head's rows usually are, learnt as rows come: a row beyond the bound is an outlier.
//
// Squared distances are counted in bins of half an octave. The bound is QKV_DISTANCE_TIMES the squared distance that
// QKV_DISTANCE_SHARE of the rows are within. So up to one row in eight may be an outlier, however far away, and
// leaves the bound where the other rows put it; what more rows than that have in common is not an outlier. Of
// Gaussian rows whose variance lies in 3 directions alike 4 in 100000 are beyond the bound, in 8 directions none.
//
// Threads: the caller's.
#ifndef QKV_ENGINE_CODEC_DISTANCE_BOUND_H
#define QKV_ENGINE_CODEC_DISTANCE_BOUND_H

#include <stdint.h>

#define QKV_DISTANCE_SHARE 0.875
#define QKV_DISTANCE_TIMES 4.0
#define QKV_DISTANCE_BINS 256  // from 2^-48 to 2^80; what is below or above is in the first or the last one

typedef struct qkv_distance_bound {
  uint64_t rows;
  uint32_t counts[QKV_DISTANCE_BINS];
} qkv_distance_bound;

// `square` >= 0 or infinite: the squared distance of one row from the mean.
void qkv_distance_bound_add(qkv_distance_bound *bound, double square);
// A squared distance; infinite where no row was added.
double qkv_distance_bound_limit(const qkv_distance_bound *bound);
void qkv_distance_bound_merge(qkv_distance_bound *into, const qkv_distance_bound *from);
// What was added so far counts `factor` times, 0 <= factor <= 1, in whole rows.
void qkv_distance_bound_fade(qkv_distance_bound *bound, double factor);

#endif
