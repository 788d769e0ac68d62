// Queries of the attend frame from page to page: all levels of a walk (engine/codec/walk.h) in one pass over the
// sums. Compiled once for each family.
#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/walk_plain.h"
#include "engine/kernel/x86/products.h"
#include "engine/kernel/x86/variants.h"

// Numbers of pairs, side by side; vectors may reach beyond the last.
typedef struct walk_words {
  int16_t of[ROWS][QKV_DIM_MAX + 2 * LANES];
} walk_words;

// The first lanes of a vector.
#if LANES == 16
typedef __mmask16 lane_mask;

INLINE lane_mask first_lanes(size_t count) {
  return (__mmask16)((1u << count) - 1);
}
#else
typedef __m256i lane_mask;

INLINE lane_mask first_lanes(size_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// All of them, or those of the mask.
INLINE lanes load_some(const float *from, bool all, lane_mask mask) {
  if (all) return load_lanes(from);
#if LANES == 16
  return (lanes)_mm512_maskz_loadu_ps(mask, from);
#else
  return (lanes)_mm256_maskload_ps(from, mask);
#endif
}

// Pairs from the j-th on of `count` queries, from the row-th on; `all` and `count` are constants.
INLINE void turn_pairs(const qkv_walk_queries *queries, const qkv_walk_level *level, size_t row, size_t count,
                       size_t j, bool all, lane_mask mask, int16_t *numbers) {
  const float *rows = queries->rows + row * queries->stride + j;
  const lanes bc = load_some(level->base.cosines + j, all, mask), bs = load_some(level->base.sines + j, all, mask);
  const lanes oc = load_some(level->on.cosines + j, all, mask), os = load_some(level->on.sines + j, all, mask);
  const lanes c = bc * oc - bs * os, s = bc * os + bs * oc;
  UNROLL
  for (size_t i = 0; i < count; i++, rows += queries->stride) {
    const lanes a = load_some(rows, all, mask), b = load_some(rows + queries->apart, all, mask);
    const float factor = queries->factors[row + i];
    const words x = (words)((a * c + b * s) * factor + QKVI_WHOLE_MAGIC);
    const words y = (words)((b * c - a * s) * factor + QKVI_WHOLE_MAGIC);
    put_bytes(numbers + i * (sizeof(walk_words) / sizeof(int16_t) / ROWS), (bytes)((x & 0xffff) | y << 16));
  }
}

// The pairs of a level of `count` queries, a constant, from the row-th on; those before it begin with pair `begin`.
INLINE void turn_level(const qkv_walk_queries *queries, const qkv_walk_level *level, size_t row, size_t count,
                       size_t begin, walk_words *words_out) {
  size_t j = level->first;
  int16_t *numbers = words_out->of[0] + 2 * (j - begin);
  const size_t rest = (level->end - j) % LANES;
  const lane_mask mask = first_lanes(rest);
  for (; j < level->end - rest; j += LANES, numbers += 2 * LANES) {
    turn_pairs(queries, level, row, count, j, true, mask, numbers);
  }
  if (rest > 0) turn_pairs(queries, level, row, count, j, false, mask, numbers);
}

// What a tile is summed from and becomes.
typedef struct walk_tile {
  const qkv_dense *matrix;
  const qkv_walk_level *levels;
  size_t level_count, row, stride;
  size_t begin;  // pair that the numbers begin with
  const int32_t *before;
  const float *scales;
  float *rows;
} walk_tile;

// Where vector v + k of the outputs lies behind vector v, a multiple of `across`.
INLINE size_t words_apart(const qkv_dense *matrix, size_t k) {
  return k / HALVES * QKVI_DENSE_OUTPUTS * matrix->dim + k % HALVES * LANES * 2;
}

// sums += products with the p-th pair of numbers.
INLINE void add_pair(const qkv_dense *matrix, const int16_t *from, const int16_t *numbers, size_t count,
                     size_t across, bytes *sums) {
  bytes y[ACROSS];
  UNROLL
  for (size_t k = 0; k < across; k++) y[k] = load_bytes(from + words_apart(matrix, k));
  UNROLL
  for (size_t i = 0; i < count; i++) {
    const bytes pair = repeat_word(numbers + i * (sizeof(walk_words) / sizeof(int16_t) / ROWS));
    UNROLL
    for (size_t k = 0; k < across; k++) {
      bytes *sum = &sums[i * across + k];
      *sum = k % 2 == 0 ? add_products_at_once(*sum, y[k], pair) : add_products(*sum, y[k], pair);
    }
  }
}

// sums += products with the pairs of a level, whose numbers are `x` on.
INLINE void add_level(const walk_tile *tile, const qkv_walk_level *level, const walk_words *x, size_t count, size_t v,
                      size_t across, bytes *sums) {
  enum { NEXT = 2 * QKVI_DENSE_OUTPUTS };  // words of a pair
  const int16_t *from = words_of(tile->matrix, v) + level->first * NEXT;
  const int16_t *numbers = &x->of[0][2 * (level->first - tile->begin)];
  const int16_t *const end = numbers + 2 * (level->end - level->first);
  if ((level->end - level->first) % 2 != 0) {
    add_pair(tile->matrix, from, numbers, count, across, sums);
    from += NEXT;
    numbers += 2;
  }
  for (; numbers != end; numbers += 4, from += (size_t)2 * NEXT) {
    add_pair(tile->matrix, from, numbers, count, across, sums);
    add_pair(tile->matrix, from + NEXT, numbers + 2, count, across, sums);
  }
}

// Vectors [v, v + across) of outputs of `count` queries; both are constants.
INLINE void sum_tile(const walk_tile *tile, const walk_words *x, size_t count, size_t v, size_t across) {
  // Copies, which stores cannot alias.
  const size_t stride = tile->stride, first = tile->row * stride + v * LANES, dim = tile->matrix->dim;
  const qkv_walk_level *level = tile->levels, *const end = level + tile->level_count;
  bytes sums[ROWS * ACROSS];
  const int32_t *before = tile->before + first;
  UNROLL
  for (size_t i = 0; i < count; i++, before += stride) {
    UNROLL
    for (size_t k = 0; k < across; k++) sums[i * across + k] = load_bytes(before + k * LANES);
  }
  for (; level != end; level++) {
    add_level(tile, level, x, count, v, across, sums);
    if (level->sums == NULL) continue;
    int32_t *after = level->sums + first;
    UNROLL
    for (size_t i = 0; i < count; i++, after += stride) {
      UNROLL
      for (size_t k = 0; k < across; k++) put_bytes(after + k * LANES, sums[i * across + k]);
    }
  }
  const float *scales = tile->scales + tile->row, *outputs = tile->matrix->scales + v * LANES;
  UNROLL
  for (size_t k = 0; k < across; k++, outputs += LANES) {
    if ((v + k) * LANES >= dim) break;
    const lanes scale = load_lanes(outputs);
    float *row = tile->rows + tile->row * dim;
    UNROLL
    for (size_t i = 0; i < count; i++, row += dim) {
      put_outputs(to_lanes(sums[i * across + k]) * (scale * scales[i]), (v + k) * LANES, dim, row);
    }
  }
}

// `count` is a constant.
INLINE void sum_rows(const walk_tile *all, const qkv_walk_queries *queries, size_t count) {
  const walk_tile copy = *all, *tile = &copy;
  const size_t vectors = tile->stride / LANES;
  walk_words x;
  for (size_t l = tile->level_count; l-- > 0;) {  // what reaches beyond a level is written over
    turn_level(queries, &tile->levels[l], tile->row, count, tile->begin, &x);
  }
  size_t v = 0;
  for (; v + ACROSS <= vectors; v += ACROSS) sum_tile(tile, &x, count, v, ACROSS);
  for (; v + 2 <= vectors; v += 2) sum_tile(tile, &x, count, v, 2);
  for (; v < vectors; v++) sum_tile(tile, &x, count, v, 1);
}

QKV_DECLARE_SUM_LEVELS(VARIANT(qkvi_sum_levels)) {
  const size_t dim = matrix->dim, n = queries->n;
  assert(coordinates <= matrix->outputs);
  walk_tile tile = {.matrix = matrix,
                    .levels = levels,
                    .level_count = count,
                    .begin = count > 0 ? levels[count - 1].first : 0,
                    .stride = (coordinates + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS,
                    .before = before,
                    .scales = queries->scales,
                    .rows = rows};
  for (; tile.row + ROWS <= n; tile.row += ROWS) sum_rows(&tile, queries, ROWS);
  for (; tile.row < n; tile.row++) sum_rows(&tile, queries, 1);
  for (size_t i = 0; coordinates < dim && i < n; i++) {
    memset(rows + i * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
  }
}

QKV_DECLARE_ADD_ANCHORS(VARIANT(qkvi_add_anchors)) {
  add_anchors_plain(waves, base, on, products, n, shares, scores);
}
