// Rotary phases, in plain loops over independent lanes: compiled once for every rung, like plain.h, and with the same
// bits everywhere. Of what they add to scores a lane is a slot of the page; sums over pairs of coordinates run in
// their order. Of rows that turn a lane is a pair.
#ifndef QKV_ENGINE_KERNEL_PHASES_PLAIN_H
#define QKV_ENGINE_KERNEL_PHASES_PLAIN_H

#include <string.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"

#define PHASES_INLINE static inline __attribute__((always_inline))

// As wide as registers are.
#if defined(__AVX512F__)
enum { SLOTS = 16 };
#elif defined(__AVX2__)
enum { SLOTS = 8 };
#else
enum { SLOTS = 4 };
#endif
typedef float slots __attribute__((vector_size(4 * SLOTS)));

enum { SLOT_VECTORS = QKV_PAGE_TOKENS / SLOTS, SLOT_SUMS = 8 };

PHASES_INLINE void load_slots(const float *from, slots *all) {
  memcpy(all, from, sizeof *all);
}

// Of `n` queries and `count` vectors of slots, together SLOT_SUMS, constants so that sums stay in registers.
PHASES_INLINE void add_waves_to(const qkv_slot_turns *turns, const uint16_t *pairs, size_t count,
                                const float *factors, size_t n, size_t first, size_t vectors, float *scores) {
  slots sums[SLOT_SUMS];
  for (size_t i = 0; i < n; i++) {
    for (size_t g = 0; g < vectors; g++) {
      load_slots(scores + i * QKV_PAGE_TOKENS + (first + g) * SLOTS, &sums[i * vectors + g]);
    }
  }
  for (size_t p = 0; p < count; p++) {
    const size_t at = pairs[p] * (size_t)QKV_PAGE_TOKENS + first * SLOTS;
    for (size_t g = 0; g < vectors; g++) {
      slots c, s;
      load_slots(turns->cosines + at + g * SLOTS, &c);
      load_slots(turns->sines + at + g * SLOTS, &s);
      for (size_t i = 0; i < n; i++) {
        const float *factor = factors + (i * count + p) * 2;
        sums[i * vectors + g] += factor[0] * c + factor[1] * s;
      }
    }
  }
  for (size_t i = 0; i < n; i++) {
    for (size_t g = 0; g < vectors; g++) {
      memcpy(scores + i * QKV_PAGE_TOKENS + (first + g) * SLOTS, &sums[i * vectors + g], sizeof *sums);
    }
  }
}

static inline QKV_DECLARE_ADD_WAVES(add_waves_plain) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4, factors += 8 * count, scores += (size_t)4 * QKV_PAGE_TOKENS) {
    for (size_t g = 0; g < SLOT_VECTORS; g += 2) add_waves_to(turns, pairs, count, factors, 4, g, 2, scores);
  }
  for (; i < n; i++, factors += 2 * count, scores += QKV_PAGE_TOKENS) {
    for (size_t g = 0; g < SLOT_VECTORS; g += 4) add_waves_to(turns, pairs, count, factors, 1, g, 4, scores);
  }
}

// The same for columns. Coordinates behind the pairs do not turn.
PHASES_INLINE void score_columns_of(const float *columns, size_t dim, const float *means, const qkv_slot_turns *turns,
                                    const float *queries, size_t n, size_t first, size_t vectors, float *scores) {
  slots sums[SLOT_SUMS] = {0};
  for (size_t p = 0; p < turns->pairs; p++) {
    const size_t a = p * turns->step, b = a + turns->apart;
    for (size_t g = 0; g < vectors; g++) {
      slots x, y, c, s;
      const size_t at = (first + g) * SLOTS;
      load_slots(columns + a * QKV_PAGE_TOKENS + at, &x);
      load_slots(columns + b * QKV_PAGE_TOKENS + at, &y);
      load_slots(turns->cosines + p * QKV_PAGE_TOKENS + at, &c);
      load_slots(turns->sines + p * QKV_PAGE_TOKENS + at, &s);
      x += means[(first + g) * SLOTS / QKV_GROUP_TOKENS * dim + a];
      y += means[(first + g) * SLOTS / QKV_GROUP_TOKENS * dim + b];
      const slots turned_x = c * x - s * y, turned_y = s * x + c * y;
      for (size_t i = 0; i < n; i++) {
        sums[i * vectors + g] += queries[i * dim + a] * turned_x + queries[i * dim + b] * turned_y;
      }
    }
  }
  for (size_t a = 2 * turns->pairs; a < dim; a++) {
    for (size_t g = 0; g < vectors; g++) {
      slots x;
      load_slots(columns + a * QKV_PAGE_TOKENS + (first + g) * SLOTS, &x);
      x += means[(first + g) * SLOTS / QKV_GROUP_TOKENS * dim + a];
      for (size_t i = 0; i < n; i++) sums[i * vectors + g] += queries[i * dim + a] * x;
    }
  }
  for (size_t i = 0; i < n; i++) {
    for (size_t g = 0; g < vectors; g++) {
      memcpy(scores + i * QKV_PAGE_TOKENS + (first + g) * SLOTS, &sums[i * vectors + g], sizeof *sums);
    }
  }
}

static inline QKV_DECLARE_SCORE_COLUMNS(score_columns_plain) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4, queries += 4 * dim, scores += (size_t)4 * QKV_PAGE_TOKENS) {
    for (size_t g = 0; g < SLOT_VECTORS; g += 2) {
      score_columns_of(columns, dim, means, turns, queries, 4, g, 2, scores);
    }
  }
  for (; i < n; i++, queries += dim, scores += QKV_PAGE_TOKENS) {
    for (size_t g = 0; g < SLOT_VECTORS; g += 4) {
      score_columns_of(columns, dim, means, turns, queries, 1, g, 4, scores);
    }
  }
}

// ---- Rows that turn ----

// A row's pairs (a, b) in place; `step` is a constant.
PHASES_INLINE void turn_row(const qkv_row_turns *turns, bool back, size_t t, size_t step, float *restrict a,
                            float *restrict b) {
  const size_t pairs = turns->pairs;
  const float *restrict page_c = turns->page.cosines, *restrict page_s = turns->page.sines;
  const float *restrict slot_c = turns->slots.cosines + t * pairs, *restrict slot_s = turns->slots.sines + t * pairs;
  const float direction = back ? -1 : 1;
  for (size_t i = 0; i < pairs; i++) {
    const float c = page_c[i] * slot_c[i] - page_s[i] * slot_s[i];
    const float s = direction * (page_c[i] * slot_s[i] + page_s[i] * slot_c[i]);
    const float x = a[i * step], y = b[i * step];
    a[i * step] = x * c - y * s;
    b[i * step] = x * s + y * c;
  }
}

static inline QKV_DECLARE_TURN_ROWS(turn_rows_plain) {
  for (size_t t = 0; t < n; t++, rows += dim) {
    if (turns->step == 1) {
      turn_row(turns, back, t, 1, rows, rows + turns->apart);
    } else {
      turn_row(turns, back, t, 2, rows, rows + 1);
    }
  }
}

// The same; `out` is a constant, too.
PHASES_INLINE void frame_row(const qkv_row_turns *turns, const float *restrict x, const float *restrict y, bool out,
                             size_t t, size_t step, float *restrict a, float *restrict b) {
  const size_t pairs = turns->pairs;
  const float *restrict page_c = turns->page.cosines, *restrict page_s = turns->page.sines;
  const float *restrict slot_c = turns->slots.cosines + t * pairs, *restrict slot_s = turns->slots.sines + t * pairs;
  for (size_t i = 0; i < pairs; i++) {
    const float anchor_x = x[i] * slot_c[i] - y[i] * slot_s[i], anchor_y = x[i] * slot_s[i] + y[i] * slot_c[i];
    const float c = page_c[i], s = page_s[i];
    if (out) {
      const float first = a[i * step] + anchor_x, second = b[i * step] + anchor_y;
      a[i * step] = first * c - second * s;
      b[i * step] = first * s + second * c;
    } else {
      const float first = a[i * step], second = b[i * step];
      a[i * step] = first * c + second * s - anchor_x;
      b[i * step] = second * c - first * s - anchor_y;
    }
  }
}

static inline QKV_DECLARE_FRAME_ROWS(frame_rows_plain) {
  for (size_t t = 0; t < n; t++, rows += dim) {
    if (turns->step == 1) {
      if (out) {
        frame_row(turns, x, y, true, t, 1, rows, rows + turns->apart);
      } else {
        frame_row(turns, x, y, false, t, 1, rows, rows + turns->apart);
      }
    } else {
      frame_row(turns, x, y, out, t, 2, rows, rows + 1);
    }
  }
}

#endif
