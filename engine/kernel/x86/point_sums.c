// Attention on codes of points: points.h says what. Tables and points of some sub-vectors at a time stay in the first
// cache while all tokens are looked up. Compiled once for each family; vectors are of four queries, or of these times
// two coordinates, in either.
#include "engine/kernel/points.h"

#include "engine/codec/page.h"
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/variants.h"

#define INLINE static inline __attribute__((always_inline))

enum { QUERIES = QKV_POINT_QUERIES, TABLE = QKV_POINTS * QUERIES, TOGETHER = 4, SUMS = 8 };

typedef float four __attribute__((vector_size(16)));

INLINE four load_four(const float *from) {
  four all;
  memcpy(&all, from, sizeof all);
  return all;
}

// Adds the look-ups of `count` sub-vectors to sums [64][4].
INLINE void look_up_some(const float *tables, size_t count, const uint8_t *codes, float *sums) {
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    four all = load_four(sums + t * QUERIES);
    UNROLL
    for (size_t s = 0; s < count; s++)
      all += load_four(tables + s * TABLE + (size_t)codes[s * QKV_PAGE_TOKENS + t] * QUERIES);
    memcpy(sums + t * QUERIES, &all, sizeof all);
  }
}

QKV_DECLARE_SUM_LOOK_UPS(VARIANT(qkvi_sum_look_ups)) {
  size_t s = 0;
  memset(sums, 0, QKV_PAGE_TOKENS * QUERIES * sizeof *sums);
  for (; s + TOGETHER <= subs; s += TOGETHER)
    look_up_some(tables + s * TABLE, TOGETHER, codes + s * QKV_PAGE_TOKENS, sums);
  for (; s < subs; s++) look_up_some(tables + s * TABLE, 1, codes + s * QKV_PAGE_TOKENS, sums);
}

// Two coordinates of a point, each for four queries.
INLINE eight spread_pair(const float *pair) {
  double both;
  memcpy(&both, pair, sizeof both);
  return (eight)_mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)),
                                     _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

// `subs` sub-vectors whose coordinates make SUMS pairs, or one.
INLINE void weigh_some(const float *points, size_t stride, size_t width, size_t subs, const uint8_t *codes,
                       const float *weights, float *sums) {
  const size_t pairs = width / 2;
  eight found[SUMS] = {{0}};
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const eight weight = (eight)_mm256_broadcast_ps((const __m128 *)(weights + t * QUERIES));
    UNROLL
    for (size_t s = 0; s < subs; s++) {
      const float *point = points + s * stride + codes[s * QKV_PAGE_TOKENS + t] * width;
      UNROLL
      for (size_t pair = 0; pair < pairs; pair++) found[s * pairs + pair] += spread_pair(point + 2 * pair) * weight;
    }
  }
  UNROLL
  for (size_t i = 0; i < subs * pairs; i++) store_eight(sums + i * 2 * QUERIES, found[i]);
}

INLINE void weigh_all(const float *points, size_t stride, size_t width, size_t subs, const uint8_t *codes,
                      const float *weights, float *sums) {
  const size_t some = 2 * SUMS / width;
  size_t s = 0;
  for (; s + some <= subs; s += some)
    weigh_some(points + s * stride, stride, width, some, codes + s * QKV_PAGE_TOKENS, weights,
               sums + s * width * QUERIES);
  for (; s < subs; s++)
    weigh_some(points + s * stride, stride, width, 1, codes + s * QKV_PAGE_TOKENS, weights,
               sums + s * width * QUERIES);
}

QKV_DECLARE_WEIGH_POINTS(VARIANT(qkvi_weigh_points)) {
  if (width == 2) return weigh_all(points, stride, 2, subs, codes, weights, sums);
  if (width == 4) return weigh_all(points, stride, 4, subs, codes, weights, sums);
  if (width == 8) return weigh_all(points, stride, 8, subs, codes, weights, sums);
  qkvi_weigh_points_reference(points, stride, width, subs, codes, weights, sums);
}
