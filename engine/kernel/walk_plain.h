// What anchors add to the scores of a page (kernel.h), in plain loops over independent lanes: compiled once for every
// rung, like plain.h, and with the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_WALK_PLAIN_H
#define QKV_ENGINE_KERNEL_WALK_PLAIN_H

#include <assert.h>
#include <string.h>

#include "engine/kernel/integer.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define WALK_INLINE static inline __attribute__((always_inline))

// Else sums are not kept in registers. (Sanitizers leave such loops alone, and the compiler says so.)
#ifdef QKV_SANITIZED
#define WALK_UNROLL
#else
#define WALK_UNROLL _Pragma("GCC unroll 4")
#endif

enum { WALK_TOGETHER = 4, WALK_SUMS = 2 * QKV_WAVE_TERMS };
_Static_assert((int)WALK_SUMS == (int)PLAIN_WIDTH, "all sums of a query are one vector");

// Products, turned back: [2][stride] each.
typedef struct walk_turned {
  _Alignas(64) float of[WALK_TOGETHER][QKV_DIM_MAX + 4 * PLAIN_WIDTH];  // not 4 KB apart: loads would wait for stores
  int16_t fast[WALK_TOGETHER][2][QKV_DIM_MAX / 2 + PLAIN_WIDTH];        // those of the fast pairs as whole numbers
} walk_turned;

#if defined(__AVX512F__)
enum { WAVE_LANES = 16 };
#else
enum { WAVE_LANES = 8 };
#endif
enum { WAVE_VECTORS = QKV_WAVE_SLOTS / WAVE_LANES };
typedef float wave_floats __attribute__((vector_size(4 * WAVE_LANES)));
typedef uint32_t wave_words __attribute__((vector_size(4 * WAVE_LANES)));
typedef int32_t signed_waves __attribute__((vector_size(4 * WAVE_LANES)));
typedef int16_t walk_shorts __attribute__((vector_size(2 * PLAIN_WIDTH)));

// A query's sums over the fast pairs: with cosines, with sines.
typedef struct wave_sums {
  wave_words of[2][WAVE_VECTORS];
} wave_sums;

// Turns by `base` and then by `on`, and zeros up to the stride.
WALK_INLINE void join_turns(const qkv_page_waves *waves, qkv_pair_turns base, qkv_pair_turns on, float *cosines,
                            float *sines) {
  size_t j = 0;
  for (; j + PLAIN_WIDTH <= waves->pairs; j += PLAIN_WIDTH) {
    plain_floats bc, bs, oc, os;
    load_plain(base.cosines + j, &bc);
    load_plain(base.sines + j, &bs);
    load_plain(on.cosines + j, &oc);
    load_plain(on.sines + j, &os);
    const plain_floats c = bc * oc - bs * os, s = bc * os + bs * oc;
    store_plain(cosines + j, &c);
    store_plain(sines + j, &s);
  }
  for (; j < waves->pairs; j++) {
    cosines[j] = base.cosines[j] * on.cosines[j] - base.sines[j] * on.sines[j];
    sines[j] = base.cosines[j] * on.sines[j] + base.sines[j] * on.cosines[j];
  }
  for (; j < waves->stride; j++) cosines[j] = sines[j] = 0;
}

// Rounds, and keeps the lowest 16 bits.
WALK_INLINE void put_whole(const plain_floats *all, float factor, int16_t *out) {
  const plain_floats magic = *all * factor + QKVI_WHOLE_MAGIC;
  const walk_shorts whole = __builtin_convertvector((plain_words)magic, walk_shorts);
  memcpy(out, &whole, sizeof whole);
}

WALK_INLINE void turn_products(const qkv_page_waves *waves, const float *cosines, const float *sines,
                               const float *products, const float *factors, size_t n, walk_turned *turned) {
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
      if (j >= waves->fast) continue;
      put_whole(&x, factors[2 * i], turned->fast[i][0] + j);
      put_whole(&y, factors[2 * i], turned->fast[i][1] + j);
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

WALK_INLINE void load_wave(const float *from, wave_floats *all) {
  memcpy(all, from, sizeof *all);
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

// sum += the products of two numbers with a vector of pairs of others.
WALK_INLINE void add_two(const int16_t *numbers, const int16_t *from, wave_words *sum) {
  uint32_t two;
  memcpy(&two, numbers, sizeof two);
#if defined(__AVX512F__)
  const __m512i all = _mm512_madd_epi16(_mm512_set1_epi32((int32_t)two), _mm512_loadu_si512(from));
  *sum += (wave_words)all;
#elif defined(__AVX2__)
  const __m256i all = _mm256_madd_epi16(_mm256_set1_epi32((int32_t)two), _mm256_loadu_si256((const __m256i *)from));
  *sum += (wave_words)all;
  __asm__("" : "+x"(*sum));  // else gcc adds products up first, and spills
#else
  wave_words all;
  memcpy(&all, from, sizeof all);
  const uint32_t low = (uint32_t)(int16_t)(two & 0xffff), high = (uint32_t)(int16_t)(two >> 16);
  const signed_waves lower = (signed_waves)(all << 16) >> 16, upper = (signed_waves)all >> 16;
  *sum += (wave_words)lower * low + (wave_words)upper * high;
#endif
}

// Of the q-th query.
WALK_INLINE void sum_fast(const qkv_page_waves *waves, const walk_turned *turned, size_t q, wave_sums *out) {
  const size_t fast = waves->fast;
  const int16_t *from = waves->waves, *numbers[2] = {turned->fast[q][0], turned->fast[q][1]};
  wave_words sums[2][WAVE_VECTORS];
  WALK_UNROLL
  for (size_t k = 0; k < WAVE_VECTORS; k++) sums[0][k] = sums[1][k] = (wave_words){0};
  for (size_t p = 0; p < fast; p += 2, from += 4 * QKV_WAVE_SLOTS) {
    WALK_UNROLL
    for (size_t k = 0; k < WAVE_VECTORS; k++) add_two(numbers[0] + p, from + 2 * k * WAVE_LANES, &sums[0][k]);
    WALK_UNROLL
    for (size_t k = 0; k < WAVE_VECTORS; k++) {
      add_two(numbers[1] + p, from + 2 * (QKV_WAVE_SLOTS + k * WAVE_LANES), &sums[1][k]);
    }
  }
  WALK_UNROLL
  for (size_t k = 0; k < WAVE_VECTORS; k++) {
    out->of[0][k] = sums[0][k];
    out->of[1][k] = sums[1][k];
  }
}

// The k-th vector of slots' distances, both ways, of `n` queries.
WALK_INLINE void add_slots(size_t k, const float *terms, const wave_sums *fast, const float *factors,
                           const float *shares, size_t n, float *scores) {
  static const float ways[QKV_WAVE_SLOTS] = {
      0.5f,  1.5f,  2.5f,  3.5f,  4.5f,  5.5f,  6.5f,  7.5f,  8.5f,  9.5f,  10.5f, 11.5f, 12.5f, 13.5f, 14.5f, 15.5f,
      16.5f, 17.5f, 18.5f, 19.5f, 20.5f, 21.5f, 22.5f, 23.5f, 24.5f, 25.5f, 26.5f, 27.5f, 28.5f, 29.5f, 30.5f, 31.5f};
  wave_floats v;
  load_wave(ways + k * WAVE_LANES, &v);
  v *= 1.0f / QKV_WAVE_SLOTS;
  const wave_floats square = v * v;
  for (size_t i = 0; i < n; i++) {
    const float *e = terms + i * WALK_SUMS, *o = e + QKV_WAVE_TERMS, factor = factors[2 * i + 1];
    wave_floats even = ((e[3] * square + e[2]) * square + e[1]) * square + (e[0] + shares[i]);
    wave_floats odd = (((o[3] * square + o[2]) * square + o[1]) * square + o[0]) * v;
    even += __builtin_convertvector((signed_waves)fast[i].of[0][k], wave_floats) * factor;
    odd += __builtin_convertvector((signed_waves)fast[i].of[1][k], wave_floats) * factor;
    const wave_floats more = even + odd, less = even - odd;
    float *middle = scores + i * QKV_PAGE_TOKENS + QKV_WAVE_SLOTS;
    put_wave(middle + k * WAVE_LANES, middle - k * WAVE_LANES, &more, &less);
  }
}

// `n` is a constant.
WALK_INLINE void add_anchors_of(const qkv_page_waves *waves, const float *cosines, const float *sines,
                                const float *products, const float *factors, size_t n, const float *shares,
                                float *scores) {
  walk_turned turned;
  wave_sums fast[WALK_TOGETHER];
  float terms[WALK_TOGETHER * WALK_SUMS];
  turn_products(waves, cosines, sines, products, factors, n, &turned);
  sum_terms(waves, &turned, n, terms);
  for (size_t i = 0; i < n; i++) sum_fast(waves, &turned, i, &fast[i]);
  for (size_t k = 0; k < WAVE_VECTORS; k++) add_slots(k, terms, fast, factors, shares, n, scores);
}

static inline QKV_DECLARE_ADD_ANCHORS(add_anchors_plain) {
  _Alignas(64) float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  join_turns(waves, base, on, cosines, sines);
  size_t i = 0;
  for (; i + WALK_TOGETHER <= n; i += WALK_TOGETHER) {
    add_anchors_of(waves, cosines, sines, products + i * 2 * waves->stride, factors + 2 * i, WALK_TOGETHER,
                   shares + i, scores + i * QKV_PAGE_TOKENS);
  }
  for (; i < n; i++) {
    add_anchors_of(waves, cosines, sines, products + i * 2 * waves->stride, factors + 2 * i, 1, shares + i,
                   scores + i * QKV_PAGE_TOKENS);
  }
}

#endif
