// From moments to a calibration.
//
// Per layer and KV head, with everything in double and eigenvectors from LAPACK:
//
//   keys     the KLT of M^{1/2} x, with M a power of S, the second moment of the queries that x meets. M = S would
//            minimize the mean error of q . x; the square root of it lies between that and the plain KLT, and
//            measures best. With M^{1/2} C M^{1/2} = E diag(sigma^2) E^T, ordered by variance,
//            analysis = diag(1 / sigma) E^T M^{1/2},  synthesis = diag(sigma) E^T M^{-1/2},  weights = sigma^2
//     attend frame    x = R_(t - c) (k - mu), c where the plan turns a pair back to (turn_plan.h), any position for
//                     plain pairs. C is that before RoPE, turned (turned.h), and so is S. Plain pairs are coded
//                     coordinate by coordinate; all others are mixed.
//     archive frame   x = k - mu.
//                     In both, an error of x meets R_d q, d the distance of query and key (or page), so S is turned
//                     by distances: log-uniform, every octave up to 2^17 alike.
//   values   the plain KLT: S = 1.
//   bits     bands of coordinates get them one at a time, where the next one lowers the error most, going by the
//            distortions of the nested codebook (codebook.h): reverse water-filling for every tier at once. Bands
//            are of 16 coordinates in rows of 128 and more, and of 8 in others.
//
// Both matrices are regularized by a part of their mean eigenvalue, C by more where it is of few rows. Without
// queries (no attend calls) S = 1.
//
// Measured on tinylm, KL in bits of keys at 1 and 2 bits a coordinate, values exact (the figures have errors of 6 to
// 12 %, as 32 windows give them):
//                                attend frame     archive frame
//   M = 1, the plain KLT         0.0054 0.00086   0.0020 0.00034
//   S^{1/4}                      0.0045 0.00094   0.0016 0.00030
//   S^{1/2}                      0.0049 0.00086   0.0016 0.00034
//   S^{3/4}                      0.0062 0.00111   0.0016 0.00035
//   S                            0.0050 0.00104   0.0016 0.00034
//   S averaged over each pair instead of distances   0.0024 0.00042
//   in bands of 16 instead of 8                      0.0020 0.00041
// (The attend frame's are those of format 1.) Distances up to 1024 or up to 131072, the regularization of S from 1e-4
// to 0.05 and that of C from 0 to 0.01 make no difference.
#ifndef QKV_ENGINE_CODEC_CALIBRATE_H
#define QKV_ENGINE_CODEC_CALIBRATE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "engine/codec/calibration.h"
#include "engine/codec/moments.h"

typedef struct qkv_calibrate_options {
  uint8_t band_k, band_v;  // coordinates that share a depth: 8, or 16 where it divides the width; 0: by the width
  double metric_power;     // how much queries count: M = S^metric_power; 0: not at all
  double ridge_queries;    // what is added to S, as a part of its mean eigenvalue
  double ridge_rows;       // the same for C
  // Checked before each head, borrowed; where it is set, CANCELLED. NULL: no cancelling.
  const _Atomic bool *cancelled;
  // Called with `holds` true before a layer's moments are read, which takes microseconds, and with false after it.
  // NULL: no other thread adds to them meanwhile.
  void (*hold)(void *context, uint32_t layer, bool holds);
  void *context;
} qkv_calibrate_options;

#define QKV_CALIBRATE_DEFAULTS ((qkv_calibrate_options){0, 0, 0.5, 0.01, 1e-5, NULL, NULL, NULL})

// A layer that the moments have no rows of gets the data-free code's transforms: layers that stay exact need none.
// FAILED_PRECONDITION where they have no rows at all; INVALID_ARGUMENT for options out of their limits and for
// moments that are not finite; DATA_LOSS where what comes out is beyond a calibration's limits. On success one
// reference in *out, else NULL. Takes about 10 eigen-decompositions of width d per layer and KV head.
qkv_status qkv_calibrate(const qkv_moments *moments, const qkv_calibrate_options *options, qkv_calibration **out,
                         qkv_error *error);

#endif
