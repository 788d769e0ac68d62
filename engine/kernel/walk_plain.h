// What queries of the attend frame need from page to page (kernel.h), in plain loops over independent lanes: compiled
// once for every rung, like plain.h, and with the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_WALK_PLAIN_H
#define QKV_ENGINE_KERNEL_WALK_PLAIN_H

#include <assert.h>
#include <string.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"

#define WALK_INLINE static inline __attribute__((always_inline))

// ---- Words ----

// A whole number, in the lowest 16 bits of a sum with the magic number.
WALK_INLINE int16_t walk_word(float number) {
  const float sum = number + QKVI_WHOLE_MAGIC;
  uint32_t bits;
  memcpy(&bits, &sum, sizeof bits);
  return (int16_t)(uint16_t)bits;
}

static inline QKV_DECLARE_TURN_WORDS(turn_words_plain) {
  for (size_t i = 0; i < n; i++, rows += stride, numbers += 2 * count) {
    const float factor = factors[i];
    size_t j = 0;
    for (; j + PLAIN_WIDTH <= count; j += PLAIN_WIDTH) {
      plain_floats a, b, c, s;
      load_plain(rows + j, &a);
      load_plain(rows + apart + j, &b);
      load_plain(cosines + j, &c);
      load_plain(sines + j, &s);
      const plain_floats x = (a * c + b * s) * factor + QKVI_WHOLE_MAGIC;
      const plain_floats y = (b * c - a * s) * factor + QKVI_WHOLE_MAGIC;
      const plain_words both = ((plain_words)x & 0xffff) | ((plain_words)y << 16);  // little-endian
      memcpy(numbers + 2 * j, &both, sizeof both);
    }
    for (; j < count; j++) {
      const float a = rows[j], b = rows[apart + j], c = cosines[j], s = sines[j];
      numbers[2 * j] = walk_word((a * c + b * s) * factor);
      numbers[2 * j + 1] = walk_word((b * c - a * s) * factor);
    }
  }
}

static inline QKV_DECLARE_SCALE_SUMS(scale_sums_plain) {
  const size_t dim = matrix->dim,
               stride = (coordinates + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
  for (size_t i = 0; i < n; i++, rows += dim, sums += stride) {
    size_t c = 0;
    for (; c + PLAIN_WIDTH <= coordinates; c += PLAIN_WIDTH) {
      plain_words whole;
      plain_floats scale;
      memcpy(&whole, sums + c, sizeof whole);
      load_plain(matrix->scales + c, &scale);
      const plain_floats row = __builtin_convertvector(whole, plain_floats) * (scale * scales[i]);
      store_plain(rows + c, &row);
    }
    for (; c < coordinates; c++) rows[c] = (float)sums[c] * (matrix->scales[c] * scales[i]);
    memset(rows + c, 0, (dim - c) * sizeof *rows);
  }
}

// ---- Anchors ----

enum { WALK_TOGETHER = 4, WALK_SUMS = 2 * QKV_WAVE_TERMS };
_Static_assert((int)WALK_SUMS == (int)PLAIN_WIDTH, "all sums of a query are one vector");

// Products, turned back: [2][stride] each.
typedef struct walk_turned {
  float of[WALK_TOGETHER][QKV_DIM_MAX];
} walk_turned;

WALK_INLINE void turn_products(const qkv_page_waves *waves, const float *cosines, const float *sines,
                               const float *products, size_t n, walk_turned *turned) {
  const size_t stride = waves->stride;
  for (size_t j = 0; j < stride; j += PLAIN_WIDTH) {
    plain_floats c, s;
    load_plain(cosines + j, &c);
    load_plain(sines + j, &s);
    for (size_t i = 0; i < n; i++) {
      plain_floats a, b;
      load_plain(products + i * 2 * stride + j, &a);
      load_plain(products + (i * 2 + 1) * stride + j, &b);
      const plain_floats x = a * c + b * s, y = b * c - a * s;
      store_plain(turned->of[i] + j, &x);
      store_plain(turned->of[i] + stride + j, &y);
    }
  }
}

// The lanes of 8 vectors, added by halves.
WALK_INLINE void add_by_halves(plain_floats *v, plain_floats *out) {
  for (size_t i = 0; i < 4; i++) {
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (size_t i = 0; i < 2; i++) {
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15);
  }
  *out = __builtin_shufflevector(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15);
}

// terms [n][WALK_SUMS]: a query's even ones, then its odd ones.
WALK_INLINE void sum_terms(const qkv_page_waves *waves, const walk_turned *turned, size_t n, float *terms) {
  const size_t stride = waves->stride;
  plain_floats sums[WALK_TOGETHER][WALK_SUMS];
  for (size_t k = 0; k < QKV_WAVE_TERMS; k++) {
    plain_floats even[WALK_TOGETHER] = {0}, odd[WALK_TOGETHER] = {0};
    for (size_t j = waves->fast / PLAIN_WIDTH * PLAIN_WIDTH; j < waves->ends[k]; j += PLAIN_WIDTH) {
      plain_floats e, o;
      load_plain(waves->even + k * stride + j, &e);
      load_plain(waves->odd + k * stride + j, &o);
      for (size_t i = 0; i < n; i++) {
        plain_floats a, b;
        load_plain(turned->of[i] + j, &a);
        load_plain(turned->of[i] + stride + j, &b);
        even[i] += e * a;
        odd[i] += o * b;
      }
    }
    for (size_t i = 0; i < n; i++) {
      sums[i][k] = even[i];
      sums[i][QKV_WAVE_TERMS + k] = odd[i];
    }
  }
  for (size_t i = 0; i < n; i++) {
    plain_floats all;
    add_by_halves(sums[i], &all);
    store_plain(terms + i * WALK_SUMS, &all);
  }
}

// Slots at distances from 0.5 + `first` on, both ways, of `n` queries, a constant.
WALK_INLINE void add_slots(const qkv_page_waves *waves, const walk_turned *turned, const float *terms,
                           const float *shares, size_t n, size_t first, float *scores) {
  static const plain_floats ways = {0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f};
  const plain_floats v = (ways + (float)first) * (1.0f / QKV_WAVE_SLOTS), square = v * v;
  plain_floats even[WALK_TOGETHER], odd[WALK_TOGETHER];
  for (size_t i = 0; i < n; i++) {
    const float *e = terms + i * WALK_SUMS, *o = e + QKV_WAVE_TERMS;
    even[i] = ((e[3] * square + e[2]) * square + e[1]) * square + (e[0] + shares[i]);
    odd[i] = (((o[3] * square + o[2]) * square + o[1]) * square + o[0]) * v;
  }
  for (size_t p = 0; p < waves->fast; p++) {
    plain_floats c, s;
    load_plain(waves->cosines + p * QKV_WAVE_SLOTS + first, &c);
    load_plain(waves->sines + p * QKV_WAVE_SLOTS + first, &s);
    for (size_t i = 0; i < n; i++) {
      even[i] += turned->of[i][p] * c;
      odd[i] += turned->of[i][waves->stride + p] * s;
    }
  }
  for (size_t i = 0; i < n; i++) {
    float *row = scores + i * QKV_PAGE_TOKENS + QKV_WAVE_SLOTS;
    plain_floats up, down;
    load_plain(row + first, &up);
    load_plain(row - first - PLAIN_WIDTH, &down);
    const plain_floats low = even[i] - odd[i];
    up += even[i] + odd[i];
    down += __builtin_shufflevector(low, low, 7, 6, 5, 4, 3, 2, 1, 0);
    store_plain(row + first, &up);
    store_plain(row - first - PLAIN_WIDTH, &down);
  }
}

// `n` is a constant.
WALK_INLINE void add_anchors_of(const qkv_page_waves *waves, const float *cosines, const float *sines,
                                const float *products, size_t n, const float *shares, float *scores) {
  walk_turned turned;
  float terms[WALK_TOGETHER * WALK_SUMS];
  turn_products(waves, cosines, sines, products, n, &turned);
  sum_terms(waves, &turned, n, terms);
  for (size_t first = 0; first < QKV_WAVE_SLOTS; first += PLAIN_WIDTH) {
    add_slots(waves, &turned, terms, shares, n, first, scores);
  }
}

static inline QKV_DECLARE_ADD_ANCHORS(add_anchors_plain) {
  size_t i = 0;
  for (; i + WALK_TOGETHER <= n; i += WALK_TOGETHER) {
    add_anchors_of(waves, cosines, sines, products + i * 2 * waves->stride, WALK_TOGETHER, shares + i,
                   scores + i * QKV_PAGE_TOKENS);
  }
  for (; i < n; i++) {
    add_anchors_of(waves, cosines, sines, products + i * 2 * waves->stride, 1, shares + i,
                   scores + i * QKV_PAGE_TOKENS);
  }
}

#endif
