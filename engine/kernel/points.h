// The nearest of 256 points, for many vectors of a few coordinates.
//
//   codes[i] = the first p with the least squares[p] - sum_j x_ij columns[j][p]
//
// with half of each point's square in `squares`. Sums over j in order, fp32 without contraction; every version gives
// the same bytes.
//
// And what attention makes of codes [subs][64] of such points, a page's sub-vector by sub-vector, for four queries:
//
//   sums[t][i] = sum over s of tables[s][codes[s][t]][i]                             s in order
//   sums[s][j][i] = sum over t of points[s][codes[s][t]][j] * weights[t][i]          t in order, two roundings each
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

#define QKV_POINT_QUERIES 4
// tables [subs][256][4], sums [64][4].
#define QKV_DECLARE_SUM_LOOK_UPS(name) void name(const float *tables, size_t subs, const uint8_t *codes, float *sums)
// points [subs][256][width], `stride` floats from one sub-vector's to the next's, 0: they share them; width 2, 4 or
// 8; weights [64][4], sums [subs][width][4].
#define QKV_DECLARE_WEIGH_POINTS(name)                                                           \
  void name(const float *points, size_t stride, size_t width, size_t subs, const uint8_t *codes, \
            const float *weights, float *sums)

QKV_DECLARE_NEAREST_POINTS(qkvi_nearest_points_reference);
QKV_DECLARE_SUM_LOOK_UPS(qkvi_sum_look_ups_reference);
QKV_DECLARE_WEIGH_POINTS(qkvi_weigh_points_reference);

#endif
