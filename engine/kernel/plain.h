// Kernels in plain loops over independent lanes, compiled once for every rung: the compiler makes vectors of them,
// and as nothing is contracted or reordered they give the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_PLAIN_H
#define QKV_ENGINE_KERNEL_PLAIN_H

#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "engine/kernel/kernel.h"

// ---- Softmax of a tile ----

enum {
  PLAIN_LANES = 16,  // sums kept side by side, whatever the width of a vector
  PLAIN_WIDTH = 8,
  PLAIN_VECTORS = PLAIN_LANES / PLAIN_WIDTH,
};

// The compiler splits them where the processor has narrower ones.
typedef float plain_floats __attribute__((vector_size(4 * PLAIN_WIDTH)));
typedef int32_t plain_words __attribute__((vector_size(4 * PLAIN_WIDTH)));

// exp(x) for x <= 0, within 2 ulp, and 0 below -87. Plain arithmetic, so that every machine gets the same numbers.
// exp(x) = 2^n exp(r), |r| <= ln(2)/2; the polynomial is Taylor's to degree 7.
static inline void exp_negative(plain_floats *all) {
  const plain_floats x = *all;
  const plain_words below = x < -87.0f;
  const plain_floats least = (plain_floats){0} - 87.0f;
  const plain_floats clamped = (plain_floats)(((plain_words)x & ~below) | ((plain_words)least & below));
  const plain_floats n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to a whole number
  plain_floats r = clamped - n * 0.693359375f;  // ln 2 in two pieces, the first exact in a product with n
  r = r + n * 2.12194440e-4f;
  plain_floats y = 1.0f / 5040 * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const plain_words power = (__builtin_convertvector(n, plain_words) + 127) << 23;
  *all = (plain_floats)((plain_words)(y * (plain_floats)power) & ~below);
}

static inline QKV_DECLARE_LARGEST(largest_plain) {
  float lanes[PLAIN_LANES];
  memcpy(lanes, scores, sizeof lanes);
  for (size_t t = PLAIN_LANES; t < QKV_PAGE_TOKENS; t += PLAIN_LANES) {
    for (size_t i = 0; i < PLAIN_LANES; i++) lanes[i] = scores[t + i] > lanes[i] ? scores[t + i] : lanes[i];
  }
  float largest = lanes[0];
  for (size_t i = 1; i < PLAIN_LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
  return largest;
}

// Scores become weights exp(score - peak); returns their sum.
static inline QKV_DECLARE_WEIGH(weigh_plain) {
  plain_floats sums[PLAIN_VECTORS] = {0};
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t += PLAIN_WIDTH) {
    plain_floats all;
    memcpy(&all, scores + t, sizeof all);
    all -= peak;
    exp_negative(&all);
    memcpy(scores + t, &all, sizeof all);
    sums[t / PLAIN_WIDTH % PLAIN_VECTORS] += all;
  }
  double sum = 0;
  for (size_t i = 0; i < PLAIN_LANES; i++) sum += (double)sums[i / PLAIN_WIDTH][i % PLAIN_WIDTH];
  return sum;
}

// ---- Hadamard ----

static inline void load_plain(const float *from, plain_floats *all) {
  memcpy(all, from, sizeof *all);
}

static inline void store_plain(float *to, const plain_floats *all) {
  memcpy(to, all, sizeof *all);
}

static inline uint64_t splitmix64(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The signs of a width: bit i of word w is coordinate 64 w + i, 1 for minus. Part of the format.
static inline void flip_signs(float *row, size_t dim) {
  static const plain_words bit = {1, 2, 4, 8, 16, 32, 64, 128};
  uint64_t state = dim, word = 0;
  for (size_t i = 0; i < dim; i += PLAIN_WIDTH, word >>= PLAIN_WIDTH) {
    if (i % 64 == 0) word = splitmix64(&state);
    const plain_words minus = (((int32_t)(word & 0xff) & bit) != 0) & INT32_MIN;
    plain_floats all;
    load_plain(row + i, &all);
    all = (plain_floats)((plain_words)all ^ minus);
    store_plain(row + i, &all);
  }
}

// The three innermost steps, within a vector: each adds the neighbour to a number or takes the number from it.
static inline void butterfly_within(plain_floats *all) {
  static const plain_words minus_1 = {0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN};
  static const plain_words minus_2 = {0, 0, INT32_MIN, INT32_MIN, 0, 0, INT32_MIN, INT32_MIN};
  static const plain_words minus_4 = {0, 0, 0, 0, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
  plain_floats x = *all;
  x = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6) + (plain_floats)((plain_words)x ^ minus_1);
  x = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5) + (plain_floats)((plain_words)x ^ minus_2);
  x = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3) + (plain_floats)((plain_words)x ^ minus_4);
  *all = x;
}

static inline void butterfly(float *low, float *high, size_t half) {
  for (size_t i = 0; i < half; i += PLAIN_WIDTH) {
    plain_floats a, b;
    load_plain(low + i, &a);
    load_plain(high + i, &b);
    const plain_floats sum = a + b, difference = a - b;
    store_plain(low + i, &sum);
    store_plain(high + i, &difference);
  }
}

// Orthonormal and its own inverse; `size` is a power of two, at least 8.
static inline void transform_block(float *block, size_t size) {
  for (size_t i = 0; i < size; i += PLAIN_WIDTH) {
    plain_floats all;
    load_plain(block + i, &all);
    butterfly_within(&all);
    store_plain(block + i, &all);
  }
  for (size_t half = PLAIN_WIDTH; half < size; half *= 2) {
    for (size_t start = 0; start < size; start += 2 * half) butterfly(block + start, block + start + half, half);
  }
  const float scale = 1.0f / sqrtf((float)size);
  for (size_t i = 0; i < size; i++) block[i] *= scale;
}

static inline void transform(float *row, size_t dim) {
  size_t start = 0;
  for (size_t size = QKV_DIM_MAX; size >= QKV_BAND; size /= 2) {
    if ((dim & size) == 0) continue;
    transform_block(row + start, size);
    start += size;
  }
  assert(start == dim);
}

static inline QKV_DECLARE_HADAMARD(hadamard_forward_plain) {
  assert(dim <= QKV_DIM_MAX && dim % QKV_BAND == 0);
  for (size_t i = 0; i < n; i++) {
    flip_signs(rows + i * dim, dim);
    transform(rows + i * dim, dim);
  }
}

static inline QKV_DECLARE_HADAMARD(hadamard_inverse_plain) {
  assert(dim <= QKV_DIM_MAX && dim % QKV_BAND == 0);
  for (size_t i = 0; i < n; i++) {
    transform(rows + i * dim, dim);
    flip_signs(rows + i * dim, dim);
  }
}

// ---- Sums over a page's rows ----

// Of `vectors` times PLAIN_WIDTH columns, a constant: several vectors, as one addition waits for the other.
static inline __attribute__((always_inline)) void add_columns(const float *rows, size_t tokens, size_t dim,
                                                              const float *weights, size_t vectors, float *sums,
                                                              plain_floats *squares, plain_floats *steps) {
  plain_floats weight[PLAIN_VECTORS], before[PLAIN_VECTORS], all[PLAIN_VECTORS] = {0}, moved[PLAIN_VECTORS] = {0};
  memcpy(weight, weights, vectors * sizeof *weight);
  memcpy(before, rows, vectors * sizeof *before);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, sums += dim) {
    plain_floats sum[PLAIN_VECTORS] = {0};
    for (size_t t = g * QKV_GROUP_TOKENS; t < (g + 1) * QKV_GROUP_TOKENS && t < tokens; t++) {
      for (size_t i = 0; i < vectors; i++) {
        plain_floats x;
        load_plain(rows + t * dim + i * PLAIN_WIDTH, &x);
        const plain_floats step = x - before[i];
        sum[i] += x;
        all[i] += weight[i] * x * x;
        moved[i] += weight[i] * step * step;
        before[i] = x;
      }
    }
    memcpy(sums, sum, vectors * sizeof *sum);
  }
  for (size_t i = 0; i < vectors; i++) {
    squares[i] += all[i];
    steps[i] += moved[i];
  }
}

static inline QKV_DECLARE_SUMS(sums_plain) {
  plain_floats all[PLAIN_VECTORS] = {0}, moved[PLAIN_VECTORS] = {0};
  size_t c = 0;
  for (; c + PLAIN_LANES <= dim; c += PLAIN_LANES) {
    add_columns(rows + c, tokens, dim, weights + c, PLAIN_VECTORS, sums + c, all, moved);
  }
  if (c < dim) add_columns(rows + c, tokens, dim, weights + c, 1, sums + c, all, moved);
  *squares = *steps = 0;
  for (size_t i = 0; i < PLAIN_LANES; i++) {
    *squares += (double)all[i / PLAIN_WIDTH][i % PLAIN_WIDTH];
    *steps += (double)moved[i / PLAIN_WIDTH][i % PLAIN_WIDTH];
  }
}

static inline QKV_DECLARE_SUBTRACT(subtract_plain) {
  for (size_t i = 0; i < n; i++, rows += dim, out += dim) {
    for (size_t c = 0; c < dim; c += PLAIN_WIDTH) {
      plain_floats x, y;
      memcpy(&x, rows + c, sizeof x);
      memcpy(&y, row + c, sizeof y);
      x -= y;
      memcpy(out + c, &x, sizeof x);
    }
  }
}

#endif
