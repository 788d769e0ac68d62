// Outlier rows (engine/codec/outliers.h) against queries and weights, in plain loops over independent lanes: compiled
// once for every rung, like plain.h, and with the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_OUTLIERS_PLAIN_H
#define QKV_ENGINE_KERNEL_OUTLIERS_PLAIN_H

#include <assert.h>
#include <string.h>

#include "engine/kernel/integer.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define OUTLIERS_INLINE static inline __attribute__((always_inline))

// Else sums are not kept in registers. (With sanitizers the compiler does not unroll these loops, and warns.)
#ifdef QKV_SANITIZED
#define OUTLIERS_UNROLL
#else
#define OUTLIERS_UNROLL _Pragma("GCC unroll 4")
#endif

enum { OUTLIERS_TOGETHER = 4 };  // queries

typedef uint32_t plain_bits __attribute__((vector_size(4 * PLAIN_WIDTH)));

// A row's numbers and what they count.
typedef struct outlier_row {
  const uint8_t *numbers;
  float scale;
  bool wide;
} outlier_row;

static inline void find_outlier_rows(const qkv_outliers *outliers, outlier_row rows[QKV_OUTLIERS_MAX]) {
  const uint8_t *from = outliers->rows;
  assert(outliers->count <= QKV_OUTLIERS_MAX);
  for (size_t i = 0; i < outliers->count; i++) {
    rows[i].numbers = from;
    rows[i].wide = (outliers->slots[i] & QKV_OUTLIER_WIDE) != 0;
    memcpy(&rows[i].scale, outliers->scales + i * sizeof(float), sizeof(float));
    from += outliers->dim << rows[i].wide;
  }
}

// Numbers of one byte or two.
OUTLIERS_INLINE void widen_outlier(const uint8_t *from, bool wide, plain_words *all) {
#if defined(__AVX2__)  // gcc would take these apart
  *all = wide ? (plain_words)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from))
              : (plain_words)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
  for (size_t i = 0; i < PLAIN_WIDTH; i++) {
    int16_t number = 0;
    if (wide) memcpy(&number, from + i * sizeof number, sizeof number);
    (*all)[i] = wide ? number : (from[i] ^ 0x80) - 0x80;
  }
#endif
}

// Coordinates [c, c + PLAIN_WIDTH).
OUTLIERS_INLINE void load_outlier(const outlier_row *row, size_t c, plain_floats *all) {
  plain_words whole;
  if (row->wide) {
    widen_outlier(row->numbers + 2 * c, true, &whole);
  } else {
    widen_outlier(row->numbers + c, false, &whole);
  }
  *all = __builtin_convertvector(whole, plain_floats) * row->scale;
}

// Two halves at once, where registers are as wide; half of the numbers where only that are left in a row.
#if defined(__AVX512F__)
typedef float outlier_floats __attribute__((vector_size(8 * PLAIN_WIDTH)));
typedef int32_t outlier_words __attribute__((vector_size(8 * PLAIN_WIDTH)));

OUTLIERS_INLINE void load_both_halves(const outlier_row *row, size_t c, outlier_floats *all) {
  const uint8_t *from = row->numbers + (c << row->wide);
  const outlier_words whole = row->wide
                                  ? (outlier_words)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from))
                                  : (outlier_words)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
  *all = __builtin_convertvector(whole, outlier_floats) * row->scale;
}
#endif

// ---- Scores ----

// sums [half][query] of products with `n` queries.
OUTLIERS_INLINE void sum_outlier(const outlier_row *row, const float *queries, size_t n, size_t dim,
                                 plain_floats sums[2][OUTLIERS_TOGETHER]) {
  size_t c = 0;
#if defined(__AVX512F__)
  outlier_floats both[OUTLIERS_TOGETHER] = {0};
  for (; c + 2 * PLAIN_WIDTH <= dim; c += 2 * PLAIN_WIDTH) {
    outlier_floats x, y;
    load_both_halves(row, c, &x);
    OUTLIERS_UNROLL
    for (size_t i = 0; i < n; i++) {
      memcpy(&y, queries + i * dim + c, sizeof y);
      both[i] += y * x;
    }
  }
  OUTLIERS_UNROLL
  for (size_t i = 0; i < n; i++) {
    sums[0][i] = __builtin_shufflevector(both[i], both[i], 0, 1, 2, 3, 4, 5, 6, 7);
    sums[1][i] = __builtin_shufflevector(both[i], both[i], 8, 9, 10, 11, 12, 13, 14, 15);
  }
#endif
  for (; c < dim; c += 2 * PLAIN_WIDTH) {
    for (size_t half = 0; half < 2 && c + half * PLAIN_WIDTH < dim; half++) {
      plain_floats x, y;
      load_outlier(row, c + half * PLAIN_WIDTH, &x);
      OUTLIERS_UNROLL
      for (size_t i = 0; i < n; i++) {
        load_plain(queries + i * dim + c + half * PLAIN_WIDTH, &y);
        sums[half][i] += y * x;
      }
    }
  }
}

// Products with `n` queries, a constant, summed over 16 lanes as qkvi_row_dot does; `wide` is a constant.
OUTLIERS_INLINE void score_outlier(const outlier_row *from, bool wide, const float *queries, size_t n, size_t dim,
                                   float *scores) {
  const outlier_row row = {from->numbers, from->scale, wide};
  plain_floats sums[2][OUTLIERS_TOGETHER] = {0};
  sum_outlier(&row, queries, n, dim, sums);
  plain_floats pairs[OUTLIERS_TOGETHER / 2];  // of queries, four sums each
  for (size_t i = 0; i < OUTLIERS_TOGETHER / 2; i++) {
    plain_floats halves[2];
    for (size_t half = 0; half < 2; half++) {
      const plain_floats a = sums[half][2 * i], b = sums[half][2 * i + 1];
      halves[half] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                     __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    pairs[i] = halves[0] + halves[1];
  }
  plain_floats all = __builtin_shufflevector(pairs[0], pairs[1], 0, 2, 4, 6, 8, 10, 12, 14) +
                     __builtin_shufflevector(pairs[0], pairs[1], 1, 3, 5, 7, 9, 11, 13, 15);
  for (size_t i = 0; i < n; i++) scores[i * QKV_PAGE_TOKENS] = all[2 * i] + all[2 * i + 1];
}

static inline QKV_DECLARE_SCORE_OUTLIERS(score_outliers_plain) {
  const size_t dim = keys->dim;
  outlier_row rows[QKV_OUTLIERS_MAX];
  find_outlier_rows(keys, rows);
  for (size_t r = 0; r < keys->count; r++) {
    float *at = scores + (keys->slots[r] & QKV_OUTLIER_SLOT);
    size_t i = 0;
    for (; i + OUTLIERS_TOGETHER <= n; i += OUTLIERS_TOGETHER) {
      const float *some_queries = queries + i * dim;
      if (rows[r].wide) {
        score_outlier(&rows[r], true, some_queries, OUTLIERS_TOGETHER, dim, at + i * QKV_PAGE_TOKENS);
      } else {
        score_outlier(&rows[r], false, some_queries, OUTLIERS_TOGETHER, dim, at + i * QKV_PAGE_TOKENS);
      }
    }
    for (; i < n; i++) score_outlier(&rows[r], rows[r].wide, queries + i * dim, 1, dim, at + i * QKV_PAGE_TOKENS);
  }
}

// ---- Sums ----

// 2^x, as power_of_two (integer_plain.h) has it.
OUTLIERS_INLINE void powers_of_two(plain_floats *all) {
  const plain_floats x = *all, least = (plain_floats){0} + QKVI_POWER_LEAST;
  const plain_words above = x > least;
  const plain_floats clamped = (plain_floats)(((plain_words)x & above) | ((plain_words)least & ~above));
  const plain_floats magic = clamped + QKVI_WHOLE_MAGIC, r = clamped - (magic - QKVI_WHOLE_MAGIC);
  plain_floats y = 0.00957010128f * r + 0.0559178591f;
  y = y * r + 0.240247443f;
  y = y * r + 0.693121791f;
  y = y * r + 0.999999285f;
  *all = (plain_floats)((plain_bits)y + ((plain_bits)magic << 23));
}

// weights [row][n], in whole vectors.
static inline void outlier_weights(const qkv_outliers *values, const float *scores, const float *peaks, size_t n,
                                   float *weights) {
  const size_t count = values->count * n;
  for (size_t r = 0; r < values->count; r++) {
    const float *at = scores + (values->slots[r] & QKV_OUTLIER_SLOT);
    for (size_t i = 0; i < n; i++) weights[r * n + i] = at[i * QKV_PAGE_TOKENS] - (peaks != NULL ? peaks[i] : 0);
  }
  if (peaks == NULL) return;
  for (size_t i = count; i % PLAIN_WIDTH != 0; i++) weights[i] = 0;
  for (size_t i = 0; i < count; i += PLAIN_WIDTH) {
    plain_floats all;
    load_plain(weights + i, &all);
    all *= 1.44269504f;
    powers_of_two(&all);
    store_plain(weights + i, &all);
  }
}

// A row times weights [n] to sums [n][dim]; `n`, `wide` and `stepped` are constants.
OUTLIERS_INLINE void add_outlier(const outlier_row *from, bool wide, bool stepped, const float *steps,
                                 const float *weights, size_t n, size_t dim, float *sums) {
  const outlier_row row = {from->numbers, from->scale, wide};
  plain_floats factors[OUTLIERS_TOGETHER];
  OUTLIERS_UNROLL
  for (size_t i = 0; i < n; i++) factors[i] = weights[i] - (plain_floats){0};
  size_t c = 0;
#if defined(__AVX512F__)
  for (; c + 2 * PLAIN_WIDTH <= dim; c += 2 * PLAIN_WIDTH) {
    outlier_floats x, step, sum;
    load_both_halves(&row, c, &x);
    if (stepped) {
      memcpy(&step, steps + c, sizeof step);
      x *= step;
    }
    OUTLIERS_UNROLL
    for (size_t i = 0; i < n; i++) {
      memcpy(&sum, sums + i * dim + c, sizeof sum);
      sum += weights[i] * x;
      memcpy(sums + i * dim + c, &sum, sizeof sum);
    }
  }
#endif
  for (; c < dim; c += PLAIN_WIDTH) {
    plain_floats x, step, sum;
    load_outlier(&row, c, &x);
    if (stepped) {
      load_plain(steps + c, &step);
      x *= step;
    }
    OUTLIERS_UNROLL
    for (size_t i = 0; i < n; i++) {
      load_plain(sums + i * dim + c, &sum);
      sum += factors[i] * x;
      store_plain(sums + i * dim + c, &sum);
    }
  }
}

// Rows times weights [row][stride] of `n` queries, a constant, to sums [n][dim].
OUTLIERS_INLINE void add_outliers(const outlier_row *rows, size_t count, const float *steps, const float *weights,
                                  size_t stride, size_t n, size_t dim, float *sums) {
  for (size_t r = 0; r < count; r++, weights += stride) {
    if (steps == NULL) {
      add_outlier(&rows[r], rows[r].wide, false, NULL, weights, n, dim, sums);
    } else if (rows[r].wide) {
      add_outlier(&rows[r], true, true, steps, weights, n, dim, sums);
    } else {
      add_outlier(&rows[r], false, true, steps, weights, n, dim, sums);
    }
  }
}

static inline QKV_DECLARE_WEIGH_OUTLIERS(weigh_outliers_plain) {
  const size_t dim = values->dim, count = values->count;
  outlier_row rows[QKV_OUTLIERS_MAX];
  float weights[QKV_OUTLIERS_MAX * QKV_INTEGER_ROWS];
  assert(n <= QKV_INTEGER_ROWS);
  find_outlier_rows(values, rows);
  outlier_weights(values, scores, peaks, n, weights);
  size_t i = 0;
  for (; i + OUTLIERS_TOGETHER <= n; i += OUTLIERS_TOGETHER) {
    add_outliers(rows, count, steps, weights + i, n, OUTLIERS_TOGETHER, dim, sums + i * dim);
  }
  for (; i < n; i++) add_outliers(rows, count, steps, weights + i, n, 1, dim, sums + i * dim);
}

#endif
