// What anchors add to the scores of a page (kernel.h), in plain loops over independent lanes: compiled once for every
// rung, like plain.h, and with the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_WALK_PLAIN_H
#define QKV_ENGINE_KERNEL_WALK_PLAIN_H

#include <assert.h>
#include <math.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"

#define WALK_INLINE static inline __attribute__((always_inline))

enum { WALK_TOGETHER = 4, WALK_SUMS = 2 * QKV_WAVE_TERMS };
_Static_assert((int)WALK_SUMS == (int)PLAIN_WIDTH, "all sums of a query are one vector");

// Products, turned back: [2][stride] each.
typedef struct walk_turned {
  _Alignas(64) float of[WALK_TOGETHER][QKV_DIM_MAX + 4 * PLAIN_WIDTH];  // not 4 KB apart: loads would wait for stores
} walk_turned;

// Where wider vectors leave registers for it, all slots are taken at once, else a part of them and of the queries.
#if defined(__AVX512F__)
enum { WAVE_LANES = 16, WAVE_QUERIES = WALK_TOGETHER };
#else
enum { WAVE_LANES = 8, WAVE_QUERIES = WALK_TOGETHER / 2 };
#endif
enum { WAVE_VECTORS = 2 };
typedef float wave_floats __attribute__((vector_size(4 * WAVE_LANES)));

WALK_INLINE void load_wave(const float *from, wave_floats *all) {
  memcpy(all, from, sizeof *all);
}

// sum += a b, rounded once: half of the operations.
WALK_INLINE void add_product(plain_floats *sum, const plain_floats *a, const plain_floats *b) {
#if defined(__AVX2__)
  *sum = (plain_floats)_mm256_fmadd_ps((__m256)*a, (__m256)*b, (__m256)*sum);
#elif defined(__ARM_NEON)
  for (size_t i = 0; i < 2; i++) {
    float32x4_t of[3];
    memcpy(&of[0], (const float *)sum + 4 * i, sizeof of[0]);
    memcpy(&of[1], (const float *)a + 4 * i, sizeof of[1]);
    memcpy(&of[2], (const float *)b + 4 * i, sizeof of[2]);
    of[0] = vfmaq_f32(of[0], of[1], of[2]);
    memcpy((float *)sum + 4 * i, &of[0], sizeof of[0]);
  }
#else
  for (size_t i = 0; i < PLAIN_WIDTH; i++) (*sum)[i] = fmaf((*a)[i], (*b)[i], (*sum)[i]);
#endif
}

// add_product() for a vector of slots.
WALK_INLINE void add_wave(wave_floats *sum, const wave_floats *a, const wave_floats *b) {
#if defined(__AVX512F__)
  *sum = (wave_floats)_mm512_fmadd_ps((__m512)*a, (__m512)*b, (__m512)*sum);
#else
  add_product(sum, a, b);
#endif
}

// sum = sum x + term.
WALK_INLINE void next_power(wave_floats *sum, const wave_floats *x, float term) {
  wave_floats next = term - (wave_floats){0};
  add_wave(&next, sum, x);
  *sum = next;
}

// Turns by `base` and then by `on`, and zeros up to the stride.
WALK_INLINE void join_turns(const qkv_page_waves *waves, qkv_pair_turns base, qkv_pair_turns on, float *cosines,
                            float *sines) {
  size_t j = 0;
  for (; j + WAVE_LANES <= waves->pairs; j += WAVE_LANES) {
    wave_floats bc, bs, oc, os;
    load_wave(base.cosines + j, &bc);
    load_wave(base.sines + j, &bs);
    load_wave(on.cosines + j, &oc);
    load_wave(on.sines + j, &os);
    const wave_floats c = bc * oc - bs * os, s = bc * os + bs * oc;
    memcpy(cosines + j, &c, sizeof c);
    memcpy(sines + j, &s, sizeof s);
  }
  for (; j < waves->pairs; j++) {
    cosines[j] = base.cosines[j] * on.cosines[j] - base.sines[j] * on.sines[j];
    sines[j] = base.cosines[j] * on.sines[j] + base.sines[j] * on.cosines[j];
  }
  for (; j < waves->stride; j++) cosines[j] = sines[j] = 0;
}

WALK_INLINE void turn_products(const qkv_page_waves *waves, const float *cosines, const float *sines,
                               const float *products, size_t n, walk_turned *turned) {
  const size_t stride = waves->stride;
  size_t j = 0;
  for (; j + WAVE_LANES <= stride; j += WAVE_LANES) {
    wave_floats c, s;
    load_wave(cosines + j, &c);
    load_wave(sines + j, &s);
    for (size_t i = 0; i < n; i++) {
      wave_floats a, b;
      load_wave(products + i * 2 * stride + j, &a);
      load_wave(products + (i * 2 + 1) * stride + j, &b);
      wave_floats x = b * s, y = -(a * s);
      add_wave(&x, &a, &c);
      add_wave(&y, &b, &c);
      memcpy(turned->of[i] + j, &x, sizeof x);
      memcpy(turned->of[i] + stride + j, &y, sizeof y);
    }
  }
  for (; j < stride; j++) {
    for (size_t i = 0; i < n; i++) {
      const float a = products[i * 2 * stride + j], b = products[(i * 2 + 1) * stride + j];
      turned->of[i][j] = fmaf(a, cosines[j], b * sines[j]);
      turned->of[i][stride + j] = fmaf(b, cosines[j], -(a * sines[j]));
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
        add_product(&even[i], &e, &a);
        add_product(&odd[i], &o, &b);
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

// Adds to slots from `up` on, and to those before `down` in reverse order.
WALK_INLINE void put_wave(float *up, float *down, const wave_floats *more, const wave_floats *less) {
  wave_floats high, low;
  load_wave(up, &high);
  load_wave(down - WAVE_LANES, &low);
  high += *more;
#if defined(__AVX512F__)
  low += __builtin_shufflevector(*less, *less, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#else
  low += __builtin_shufflevector(*less, *less, 7, 6, 5, 4, 3, 2, 1, 0);
#endif
  memcpy(up, &high, sizeof high);
  memcpy(down - WAVE_LANES, &low, sizeof low);
}

// Slots at distances from 0.5 + `first` on, both ways, of `n` queries from the q-th on, a constant.
WALK_INLINE void add_slots(const qkv_page_waves *waves, const walk_turned *turned, const float *terms,
                           const float *shares, size_t q, size_t n, size_t first, float *scores) {
  static const float ways[QKV_WAVE_SLOTS] = {
      0.5f,  1.5f,  2.5f,  3.5f,  4.5f,  5.5f,  6.5f,  7.5f,  8.5f,  9.5f,  10.5f, 11.5f, 12.5f, 13.5f, 14.5f, 15.5f,
      16.5f, 17.5f, 18.5f, 19.5f, 20.5f, 21.5f, 22.5f, 23.5f, 24.5f, 25.5f, 26.5f, 27.5f, 28.5f, 29.5f, 30.5f, 31.5f};
  wave_floats even[WAVE_QUERIES][WAVE_VECTORS], odd[WAVE_QUERIES][WAVE_VECTORS];
  for (size_t k = 0; k < WAVE_VECTORS; k++) {
    wave_floats v;
    load_wave(ways + first + k * WAVE_LANES, &v);
    v *= 1.0f / QKV_WAVE_SLOTS;
    const wave_floats square = v * v;
    for (size_t i = 0; i < n; i++) {
      const float *e = terms + (q + i) * WALK_SUMS, *o = e + QKV_WAVE_TERMS;
      even[i][k] = e[3] - (wave_floats){0};
      odd[i][k] = o[3] - (wave_floats){0};
      next_power(&even[i][k], &square, e[2]);
      next_power(&even[i][k], &square, e[1]);
      next_power(&even[i][k], &square, e[0] + shares[q + i]);
      next_power(&odd[i][k], &square, o[2]);
      next_power(&odd[i][k], &square, o[1]);
      next_power(&odd[i][k], &square, o[0]);
      odd[i][k] *= v;
    }
  }
  for (size_t p = 0; p < waves->fast; p++) {
    wave_floats c[WAVE_VECTORS], s[WAVE_VECTORS];
    for (size_t k = 0; k < WAVE_VECTORS; k++) {
      load_wave(waves->cosines + p * QKV_WAVE_SLOTS + first + k * WAVE_LANES, &c[k]);
      load_wave(waves->sines + p * QKV_WAVE_SLOTS + first + k * WAVE_LANES, &s[k]);
    }
    for (size_t i = 0; i < n; i++) {
      const wave_floats a = turned->of[q + i][p] - (wave_floats){0};
      const wave_floats b = turned->of[q + i][waves->stride + p] - (wave_floats){0};
      for (size_t k = 0; k < WAVE_VECTORS; k++) {
        add_wave(&even[i][k], &a, &c[k]);
        add_wave(&odd[i][k], &b, &s[k]);
      }
    }
  }
  for (size_t i = 0; i < n; i++) {
    float *middle = scores + (q + i) * QKV_PAGE_TOKENS + QKV_WAVE_SLOTS;
    for (size_t k = 0; k < WAVE_VECTORS; k++) {
      const wave_floats more = even[i][k] + odd[i][k], less = even[i][k] - odd[i][k];
      const size_t at = first + k * WAVE_LANES;
      put_wave(middle + at, middle - at, &more, &less);
    }
  }
}

// `n` is a constant.
WALK_INLINE void add_anchors_of(const qkv_page_waves *waves, const float *cosines, const float *sines,
                                const float *products, size_t n, const float *shares, float *scores) {
  walk_turned turned;
  float terms[WALK_TOGETHER * WALK_SUMS];
  const size_t together = n < WAVE_QUERIES ? n : WAVE_QUERIES;
  turn_products(waves, cosines, sines, products, n, &turned);
  sum_terms(waves, &turned, n, terms);
  for (size_t first = 0; first < QKV_WAVE_SLOTS; first += WAVE_VECTORS * WAVE_LANES) {
    for (size_t q = 0; q < n; q += together) {
      add_slots(waves, &turned, terms, shares, q, together, first, scores);
    }
  }
}

static inline QKV_DECLARE_ADD_ANCHORS(add_anchors_plain) {
  _Alignas(64) float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  join_turns(waves, base, on, cosines, sines);
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
