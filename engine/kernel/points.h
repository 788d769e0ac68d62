// The nearest of 256 points, for many vectors of a few coordinates.
//
//   codes[i] = the first p with the least squares[p] - sum_j x_ij columns[j][p]
//
// with half of each point's square in `squares`. Sums over j in order, fp32 without contraction; every version gives
// the same bytes.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_KERNEL_POINTS_H
#define QKV_ENGINE_KERNEL_POINTS_H

#include <stddef.h>
#include <stdint.h>

#define QKV_POINTS 256

// columns [width][256], squares [256], x [n][width]; width <= QKV_POINT_WIDTH_MAX.
#define QKV_POINT_WIDTH_MAX 8
#define QKV_DECLARE_NEAREST_POINTS(name) \
  void name(const float *columns, const float *squares, size_t width, const float *x, size_t n, uint8_t *codes)

QKV_DECLARE_NEAREST_POINTS(qkvi_nearest_points_reference);

#endif
