// The part of encoding that all kernels share: decisions about the 16 rows of a group, side by side, from sums that
// every kernel computes in its own way but in the same order.
//
// A row x is brought to units of its own: the gain byte nearest to its weighted RMS has value m, and t = |x| 64 / m,
// for coordinates of up to four bits rounded to a whole number of at most 255 (a cell of 1/64 sigma: on Gaussian rows
// of 128 at 4 bits it adds 0.2 % to the squared error, and makes a look-up of what was a search). Three scales are
// tried, m and an eighth of an octave up and down. For each one coordinates get their cells and from them centroids
// K, in steps of the codebook of 4 bits (whole numbers, too, to four bits), and the gain g is fitted:
//
//   A = sum w t K,  B = sum w K K        g = the gain byte nearest to A / B, in the row's units
//   squared error = sum w x x - r (2 A - r B), r = g's value in K per t
//
// The scale with the least error is taken. Four neighbours count alike, with the mean of their weights: their t K and
// K K add up to a whole number, then the weight multiplies. Coordinates of more than four bits have a t that is not
// rounded and a K that need not be whole; each is weighted by itself.
//
// Sums run over 16 lanes, which are then added by halves: of the squares coordinate % 16, of A and B apart those of
// up to four bits, fours % 16, and those of more, coordinate % 16. To four bits and with no weights they are whole
// numbers, so any other order gives the same.
#ifndef QKV_ENGINE_KERNEL_ENCODE_PLAIN_H
#define QKV_ENGINE_KERNEL_ENCODE_PLAIN_H

#include <stdint.h>
#include <string.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/table.h"

enum { SUM_LANES = 16, GAIN_STEPS = 8, FOURS = 4, SHALLOW_MAX = 4 };
#define T_MAX 255.0f   // of coordinates of up to four bits
#define T_PER_UNIT 64  // t of |x| = m

// One number of every row of a group; as many as a vector has are worked on at once.
typedef float each[QKV_GROUP_TOKENS];
#if defined(__AVX512F__)
#define ROWS_AT_ONCE 16
#elif defined(__AVX2__)
#define ROWS_AT_ONCE 8
#else
#define ROWS_AT_ONCE 4
#endif
typedef float some __attribute__((vector_size(4 * ROWS_AT_ONCE)));
typedef int32_t some_words __attribute__((vector_size(4 * ROWS_AT_ONCE)));

typedef struct group_scales {
  each squares;                    // sum w x x
  each inverse;                    // 64 / m
  each unit;                       // m / 64
  int32_t zero[QKV_GROUP_TOKENS];  // all ones where the row counts as zero
} group_scales;

typedef struct group_sums {
  each with_row[QKVI_SCALES], with_itself[QKVI_SCALES];            // A, B of up to four bits
  each deep_with_row[QKVI_SCALES], deep_with_itself[QKVI_SCALES];  // of more
} group_sums;

// What all rows share.
typedef struct row_weights {
  float sum;  // over all coordinates that have bits
  // Of fours and, the same, of coordinates. Behind what has bits all are 0, as far as whole vectors reach.
  float fours[QKV_DIM_MAX / FOURS + SUM_LANES];
  float weights[QKV_DIM_MAX + SUM_LANES];
} row_weights;

static inline float halves_sum(float lanes[SUM_LANES]) {
  for (size_t half = SUM_LANES / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

static inline void weigh_coordinates(const uint16_t *reach, const float *weights, row_weights *out) {
  float lanes[SUM_LANES] = {0};
  unsigned c = 0;
  for (; c < reach[1]; c++) {
    if (c % FOURS == 0) {
      const float *four = weights + c;
      out->fours[c / FOURS] = ((four[0] + four[1]) + (four[2] + four[3])) / FOURS;
    }
    out->weights[c] = out->fours[c / FOURS];
    lanes[c % SUM_LANES] += out->weights[c];
  }
  out->sum = halves_sum(lanes);
  memset(out->weights + c, 0, SUM_LANES * sizeof *out->weights);
  memset(out->fours + c / FOURS, 0, SUM_LANES * sizeof *out->fours);
}

// Of coordinates [first, end), in the order of all sums here.
static inline float lanes_squares(const float *row, size_t first, size_t end) {
  float lanes[SUM_LANES] = {0};
  for (size_t c = first; c < end; c++) lanes[c % SUM_LANES] += row[c] * row[c];
  return halves_sum(lanes);
}

// encode_rows by way of a transform and a kernel that take floats.
static inline void encode_rows_plain(QKV_DECLARE_HADAMARD((*forward)), QKV_DECLARE_ENCODE((*encode)), qkv_part part,
                                     const qkv_schedule *schedule, unsigned tier, const qkv_rows *rows, size_t tokens,
                                     uint8_t *gains, uint8_t *codes, float *errors, float *squares) {
  _Alignas(64) float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  const size_t dim = schedule->dim;
  for (size_t t = 0; t < tokens; t++) {
    if (rows->next != NULL) qkvi_fetch_row(rows->next, t);
    qkv_to_float(rows->dtype, rows->data + t * rows->stride, turned + t * dim, dim);
  }
  memset(turned + tokens * dim, 0, (QKV_PAGE_TOKENS - tokens) * dim * sizeof *turned);
  forward(turned, tokens, dim);
  encode(part, schedule, tier, NULL, turned, gains, codes, errors);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const float *row = turned + t * dim;
    squares[t] = lanes_squares(row, 0, dim);
    if (schedule->reach[tier][1] < dim) errors[t] += lanes_squares(row, schedule->reach[tier][1], dim);
  }
}

typedef struct group_choice {
  uint8_t gains[QKV_GROUP_TOKENS], scales[QKV_GROUP_TOKENS];
  uint8_t zero[QKV_GROUP_TOKENS];  // not 0 where the row counts as zero
  float errors[QKV_GROUP_TOKENS];
} group_choice;

static inline some load_some_rows(const float *from) {
  some all;
  memcpy(&all, from, sizeof all);
  return all;
}

static inline void store_some_rows(float *to, some all) {
  memcpy(to, &all, sizeof all);
}

// qkv_gain_value of gains that are not 0.
static inline some values_of_gains(some_words gains) {
  some_words bits = {0};
  for (int32_t i = 0; i < GAIN_STEPS; i++) {
    int32_t root;
    memcpy(&root, &qkvi_tables.roots[i], sizeof root);
    bits |= ((gains & (GAIN_STEPS - 1)) == i) & root;
  }
  return (some)(bits + (((gains >> 3) - 16) << 23));
}

static inline some_words clamp_gains(some_words gains) {
  const some_words low = gains<1, high = gains> UINT8_MAX;
  return (gains & ~low & ~high) | (low & 1) | (high & UINT8_MAX);
}

// qkvi_gain_nearest of every number.
static inline some_words nearest_gains(some factors) {
  const some_words bits = (some_words)factors;
  const some mantissa = (some)((bits & 0x7fffff) | 0x3f800000);
  some_words g = 128 + GAIN_STEPS * ((bits >> 23) - 127);
  for (size_t i = 0; i < GAIN_STEPS; i++) g -= mantissa > qkvi_tables.gain_middles[i];  // true is -1
  return clamp_gains(g);
}

// nearest_gains of the square roots of numbers.
static inline some_words nearest_gains_of_squares(some squares) {
  const some_words bits = (some_words)squares, exponent = (bits >> 23) - 127;
  const some mantissa = (some)((bits & 0x7fffff) | ((127 + (exponent & 1)) << 23));  // [1, 4)
  some_words g = 128 + GAIN_STEPS * (exponent >> 1);
  for (size_t i = 0; i < GAIN_STEPS; i++) {
    g -= mantissa > qkvi_tables.gain_middles[i] * qkvi_tables.gain_middles[i];
  }
  return clamp_gains(g);
}

// From `squares`; `weight` is the sum of the weights.
static inline void choose_scales(float weight, group_scales *s) {
  const float least = qkvi_integers.gains[1] / 2;
  for (size_t r = 0; r < QKV_GROUP_TOKENS; r += ROWS_AT_ONCE) {
    const some mean = load_some_rows(s->squares + r) / (weight > 0 ? weight : 1);
    const some_words zero = mean < least * least;
    const some value = values_of_gains(nearest_gains_of_squares(mean));
    memcpy(s->zero + r, &zero, sizeof zero);
    store_some_rows(s->inverse + r, T_PER_UNIT / value);
    store_some_rows(s->unit + r, value / T_PER_UNIT);
  }
}

static inline void narrow_words(some_words all, uint8_t *out) {
  typedef uint8_t some_bytes __attribute__((vector_size(ROWS_AT_ONCE)));
  const some_bytes narrow = __builtin_convertvector(all, some_bytes);
  memcpy(out, &narrow, sizeof narrow);
}

// Of rows [r, r + ROWS_AT_ONCE).
static inline void choose_some_attempts(const group_scales *s, const group_sums *sums, size_t r,
                                        group_choice *choice) {
  const float step = qkvi_integers.step;
  const some unit = load_some_rows(s->unit + r), inverse = load_some_rows(s->inverse + r);
  some_words best = {0}, gains = {0}, zero;
  some most = {0};
  memcpy(&zero, s->zero + r, sizeof zero);
  for (int32_t i = 0; i < QKVI_SCALES; i++) {
    const some a = load_some_rows(sums->with_row[i] + r) + load_some_rows(sums->deep_with_row[i] + r);
    const some b = load_some_rows(sums->with_itself[i] + r) + load_some_rows(sums->deep_with_itself[i] + r);
    const some_words fitted = nearest_gains(a / b * (unit / step));
    const some ratio = values_of_gains(fitted) * (inverse * step);
    const some gained = ratio * (a + a - ratio * b);
    const some_words better = i == 0 ? ~(some_words){0} : gained > most;
    most = (some)(((some_words)gained & better) | ((some_words)most & ~better));
    gains = (fitted & better) | (gains & ~better);
    best = (better & i) | (best & ~better);
  }
  gains &= ~zero;
  const some missed = load_some_rows(s->squares + r) - (some)((some_words)(most * (unit * unit)) & ~zero);
  const some errors = (some)((some_words)missed & (missed > 0));
  narrow_words(gains, choice->gains + r);
  narrow_words(best, choice->scales + r);
  narrow_words(zero, choice->zero + r);
  store_some_rows(choice->errors + r, errors);
}

static inline void choose_attempts(const group_scales *s, const group_sums *sums, group_choice *choice) {
  for (size_t r = 0; r < QKV_GROUP_TOKENS; r += ROWS_AT_ONCE) choose_some_attempts(s, sums, r, choice);
}

#endif
