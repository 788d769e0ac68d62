#include "engine/kernel/points.h"

#include <math.h>
#include <string.h>

#include "engine/codec/page.h"

// LANES points, or queries, at once; said to the compiler, which does not find it by itself.
enum { LANES = QKV_POINT_QUERIES, BLOCKS = QKV_POINTS / LANES };

typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t integers __attribute__((vector_size(LANES * sizeof(int32_t))));

static inline floats load(const float *from) {
  floats all;
  memcpy(&all, from, sizeof all);
  return all;
}

static inline floats choose(integers mask, floats yes, floats no) {
  return (floats)((mask & (integers)yes) | (~mask & (integers)no));
}

static uint8_t nearest(const float *columns, const float *squares, size_t width, const float *x) {
  floats least = {INFINITY, INFINITY, INFINITY, INFINITY};
  integers at = {0};
  for (int32_t block = 0; block < BLOCKS; block++) {
    const size_t first = (size_t)block * LANES;
    floats far = load(squares + first);
    for (size_t j = 0; j < width; j++) far -= x[j] * load(columns + j * QKV_POINTS + first);
    const integers nearer = far < least;
    least = choose(nearer, far, least);
    at = (nearer & block) | (~nearer & at);
  }
  int best = 0;
  for (int i = 1; i < LANES; i++) {
    if (least[i] < least[best] || (least[i] <= least[best] && at[i] < at[best])) best = i;
  }
  return (uint8_t)(at[best] * LANES + best);
}

QKV_DECLARE_NEAREST_POINTS(qkvi_nearest_points_reference) {
  for (size_t i = 0; i < n; i++) codes[i] = nearest(columns, squares, width, x + i * width);
}

QKV_DECLARE_SUM_LOOK_UPS(qkvi_sum_look_ups_reference) {
  floats all[QKV_PAGE_TOKENS] = {{0}};
  for (size_t s = 0; s < subs; s++, tables += QKV_POINTS * LANES, codes += QKV_PAGE_TOKENS) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) all[t] += load(tables + codes[t] * LANES);
  }
  memcpy(sums, all, sizeof all);
}

QKV_DECLARE_WEIGH_POINTS(qkvi_weigh_points_reference) {
  for (size_t s = 0; s < subs; s++, points += stride, codes += QKV_PAGE_TOKENS, sums += width * LANES) {
    floats found[QKV_POINT_WIDTH_MAX] = {{0}};
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      const floats weight = load(weights + t * LANES);
      for (size_t j = 0; j < width; j++) found[j] += points[codes[t] * width + j] * weight;
    }
    memcpy(sums, found, width * sizeof *found);
  }
}
