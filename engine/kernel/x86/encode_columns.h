// Encoding the 16 rows of a group side by side, a coordinate of all of them in a vector or two: the steps of a
// Hadamard transform meet whole vectors, sums over coordinates leave one number a row, and t of four coordinates
// become bytes [row][coordinate], the shape that both dot products and lines of keys want.
//
// With VBMI centroids are looked up by t, and codes by centroids; without it cells are searched, bit by bit in
// look-ups of 16 bytes, and centroids and codes are looked up by cells. Coordinates of more than four bits are
// searched in 32-bit lanes (encode_deep.h).
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_COLUMNS_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_COLUMNS_H

#include <assert.h>
#include <stdbool.h>

#include "engine/kernel/encode_plain.h"
#include "engine/kernel/x86/bytes.h"
#include "engine/kernel/x86/encode_deep.h"
#include "engine/kernel/x86/encode_pack.h"

#if defined(__AVX2__)
enum { ALIKE_MAX = 512 };  // 512 * 255 * 88 is less than 2^24

// Whether sums of t K and K K of rows without weights are whole numbers below 2^24, so that the order in which the
// reference takes them makes no difference.
static bool columns_alike(const uint16_t *reach) {
  return reach[SHALLOW_MAX + 1] == 0 && reach[1] <= ALIKE_MAX;
}

enum { QUAD = FOURS, QUADS_MAX = QKV_DIM_MAX / QUAD, BLOCK_QUADS = QKVI_BLOCK_WIDTH / QUAD, LINE = 64 };

// The operation of this width.
#if LANES == 16
#define SIMD(operation) _mm512_##operation
#else
#define SIMD(operation) _mm256_##operation
#endif

typedef struct columns {
  _Alignas(64) float x[QKV_DIM_MAX + QKV_BAND][GROUP];  // whole blocks
} columns;

// ---- Rows to columns ----

// Lane i and i + 8, then 4, 2 and 1 apart, are added; destroys them.
INLINE void add_halves(lanes sums[SUM_LANES], float *out) {
  for (size_t half = SUM_LANES / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; i++) sums[i] += sums[i + half];
  }
  store_lanes(out, sums[0]);
}

#if LANES == 16
// 16 coordinates, or the first eight of them, of LANES rows as columns, by quarters of vectors and then within them.
INLINE void columns_of_block(const float *rows, size_t dim, bool whole, lanes x[QKVI_BLOCK_WIDTH]) {
  const __mmask16 mask = whole ? 0xffff : 0x00ff;
  __m512 quarters[4][4];  // [quarter of coordinates][row % 4]: rows i, i + 4, i + 8, i + 12
  UNROLL
  for (size_t i = 0; i < 4; i++) {
    bytes v[4];
    UNROLL
    for (size_t j = 0; j < 4; j++) v[j] = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, rows + (i + 4 * j) * dim));
    const block_fields met = fields_of_quarters(v);
    UNROLL
    for (size_t q = 0; q < 4; q++) quarters[q][i] = _mm512_castsi512_ps(met.of[q]);
  }
  UNROLL
  for (size_t q = 0; q < 4; q++) {
    const __m512 *v = quarters[q];
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
    x[4 * q] = (lanes)_mm512_unpacklo_pd(a, c);
    x[4 * q + 1] = (lanes)_mm512_unpackhi_pd(a, c);
    x[4 * q + 2] = (lanes)_mm512_unpacklo_pd(b, d);
    x[4 * q + 3] = (lanes)_mm512_unpackhi_pd(b, d);
  }
}
#else
// 16 coordinates, or the first eight of them, of LANES rows as columns.
INLINE void columns_of_block(const float *rows, size_t dim, bool whole, lanes x[QKVI_BLOCK_WIDTH]) {
  transpose_eight(rows, dim, (float *)x, LANES);
  if (whole) {
    transpose_eight(rows + LANES, dim, (float *)(x + LANES), LANES);
  } else {
    memset(x + LANES, 0, LANES * sizeof *x);
  }
}
#endif

// The first `coordinates`, a multiple of 8, of 16 rows, and the sums of their squares, with `weights`, which go as
// far as whole blocks do, or without (NULL, a constant).
INLINE void columns_of_rows(const float *rows, size_t dim, size_t coordinates, const float *weights, columns *out,
                            each squares) {
  for (size_t first = 0; first < GROUP; first += LANES) {
    lanes sums[SUM_LANES] = {0};
    for (size_t c = 0; c < coordinates; c += QKVI_BLOCK_WIDTH) {
      lanes x[QKVI_BLOCK_WIDTH];
      columns_of_block(rows + first * dim + c, dim, c + QKVI_BLOCK_WIDTH <= coordinates, x);
      UNROLL_16
      for (size_t i = 0; i < QKVI_BLOCK_WIDTH; i++) {
        sums[i] += (weights != NULL ? weights[c + i] * x[i] : x[i]) * x[i];
        store_lanes(out->x[c + i] + first, x[i]);
      }
    }
    add_halves(sums, squares + first);
  }
}

// ---- t ----

// Which bytes are negative.
#if LANES == 16
typedef __mmask64 byte_signs;
#else
typedef bytes byte_signs;  // all ones where they are
#endif

INLINE byte_signs signs_of(bytes all) {
#if LANES == 16
  return _mm512_movepi8_mask(all);
#else
  return _mm256_cmpgt_epi8(_mm256_setzero_si256(), all);
#endif
}

INLINE bytes bytes_of_signs(byte_signs signs) {
#if LANES == 16
  return _mm512_movm_epi8(signs);
#else
  return signs;
#endif
}

// Bytes [i][j] of quarters become [j][i].
INLINE bytes turn_quarters(bytes all) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#if LANES == 16
  return _mm512_shuffle_epi8(all, _mm512_broadcast_i32x4(order));
#else
  return _mm256_shuffle_epi8(all, _mm256_broadcastsi128_si256(order));
#endif
}

// t of four coordinates of LANES rows, the first of which is row `first`, and which of them are negative.
INLINE bytes t_of_quad(const float (*x)[GROUP], size_t first, lanes inverse, byte_signs *negative) {
  bytes bits[QUAD], t[QUAD];
  UNROLL
  for (size_t i = 0; i < QUAD; i++) {
    const lanes column = load_lanes(x[i] + first);
    bits[i] = (bytes)column;
    t[i] = SIMD(cvtps_epi32)(column * inverse);
  }
  // What is too large becomes -32768, which has no opposite.
  const bytes least = SIMD(set1_epi16)(-32767);
  const bytes low = SIMD(abs_epi16)(SIMD(max_epi16)(SIMD(packs_epi32)(t[0], t[1]), least));
  const bytes high = SIMD(abs_epi16)(SIMD(max_epi16)(SIMD(packs_epi32)(t[2], t[3]), least));
  const bytes signs = SIMD(packs_epi16)(SIMD(packs_epi32)(bits[0], bits[1]), SIMD(packs_epi32)(bits[2], bits[3]));
  *negative = signs_of(turn_quarters(signs));
  return turn_quarters(SIMD(packus_epi16)(low, high));
}

// What is tried of a group, four coordinates after the other, [row][coordinate]: centroids or cells, of more than
// four bits codes, which need no signs.
typedef struct tried_group {
  _Alignas(64) uint8_t found[QUADS_MAX][QKVI_SCALES][LINE];
  byte_signs negative[QUADS_MAX][PARTS];
} tried_group;

// ---- Centroids of t ----

// What is tried of four coordinates: t, without VBMI 128 less, and the centroids at each scale.
typedef struct tried_quad {
  bytes t, k[QKVI_SCALES];
} tried_quad;

#if BYTE_DOTS
// Of four coordinates at one depth, for each scale: what t below 128 gives, and t from 128 to 191. From there on it
// is the outermost centroid.
typedef struct unit_tables {
  bytes low[QKVI_SCALES][2], high[QKVI_SCALES];
} unit_tables;

INLINE unit_tables units_of_depth(unsigned depth) {
  unit_tables all;
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const uint8_t *table = qkvi_integers.units[s][depth];
    assert(table[191] == table[255]);
    all.low[s][0] = load_bytes(table);
    all.low[s][1] = load_bytes(table + 64);
    all.high[s] = load_bytes(table + 128);
  }
  return all;
}

INLINE tried_quad try_quad(unsigned depth, const unit_tables *units, size_t q, const columns *all, size_t first,
                           lanes inverse, tried_group *tried) {
  (void)depth;
  tried_quad quad = {.t = t_of_quad(all->x + q * QUAD, first, inverse, &tried->negative[q][0])};
  const bytes index = _mm512_min_epu8(quad.t, _mm512_set1_epi8((char)191));
  const __mmask64 upper = _mm512_movepi8_mask(quad.t);
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const bytes low = _mm512_permutex2var_epi8(units->low[s][0], index, units->low[s][1]);
    quad.k[s] = _mm512_mask_permutexvar_epi8(low, upper, index, units->high[s]);
    put_bytes(tried->found[q][s], quad.k[s]);
  }
  return quad;
}

INLINE bytes products_with_row(const tried_quad *quad, size_t s) {
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), quad->t, quad->k[s]);
}

INLINE bytes products_with_itself(const tried_quad *quad, size_t s) {
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), quad->k[s], quad->k[s]);
}
#else
typedef bytes unit_tables;

INLINE unit_tables units_of_depth(unsigned depth) {
  return load_table(qkvi_integers.unit_of_cell[depth]);
}

// 1 more where t - 128 is above what it is compared with.
INLINE bytes step_up(bytes cell, bytes t, bytes below) {
#if LANES == 16
  return _mm512_sub_epi8(cell, _mm512_movm_epi8(_mm512_cmpgt_epi8_mask(t, below)));
#else
  return _mm256_sub_epi8(cell, _mm256_cmpgt_epi8(t, below));
#endif
}

INLINE bytes cells_of(unsigned depth, size_t scale, bytes t) {
  bytes cell = (bytes)(words){0};
  if (depth >= 2) cell = step_up(cell, t, SIMD(set1_epi8)(qkvi_integers.below[scale][2][0]));
  UNROLL
  for (unsigned d = 3; d <= depth; d++) {
    const bytes below = load_table((const uint8_t *)qkvi_integers.below[scale][d]);
    cell = step_up(SIMD(add_epi8)(cell, cell), t, look_up_cell(below, cell));
  }
  return cell;
}

// `depth` is a constant.
INLINE tried_quad try_quad(unsigned depth, const unit_tables *units, size_t q, const columns *all, size_t first,
                           lanes inverse, tried_group *tried) {
  const bytes t = t_of_quad(all->x + q * QUAD, first, inverse, &tried->negative[q][first / LANES]);
  tried_quad quad = {.t = (bytes)((words)t ^ EACH_BYTE(0x80))};
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const bytes cell = cells_of(depth, s, quad.t);
    quad.k[s] = look_up_cell(*units, cell);
    put_bytes(tried->found[q][s] + first * QUAD, cell);
  }
  return quad;
}

INLINE bytes sum_pairs(bytes pairs, int16_t times) {
  return SIMD(madd_epi16)(pairs, SIMD(set1_epi16)(times));
}

// Products of two bytes of which one is signed are added in twos to 16 bits: that is exact, as centroids are 88 at
// most and t counts from -128. What that leaves out is 128 times the sum of the centroids.
INLINE bytes products_less(const tried_quad *quad, size_t s) {
  return sum_pairs(SIMD(maddubs_epi16)(quad->k[s], quad->t), 1);
}

INLINE bytes pairs_of_centroids(const tried_quad *quad, size_t s) {
  return SIMD(maddubs_epi16)(quad->k[s], SIMD(set1_epi8)(1));
}

INLINE bytes products_with_row(const tried_quad *quad, size_t s) {
  return SIMD(add_epi32)(products_less(quad, s), sum_pairs(pairs_of_centroids(quad, s), 128));
}

INLINE bytes products_with_itself(const tried_quad *quad, size_t s) {
  return sum_pairs(SIMD(maddubs_epi16)(quad->k[s], quad->k[s]), 1);
}
#endif

// ---- Sums of what counts alike ----

// Whole numbers, for each scale.
typedef struct alike_sums {
  bytes with_row[QKVI_SCALES], with_itself[QKVI_SCALES];
} alike_sums;

// Quads [begin, end), all of one depth, a constant.
INLINE void try_alike_of(unsigned depth, size_t begin, size_t end, const columns *all, size_t first, lanes inverse,
                         tried_group *tried, alike_sums *sums) {
  const unit_tables units = units_of_depth(depth);
#if BYTE_DOTS
  for (size_t q = begin; q < end; q++) {
    const tried_quad quad = try_quad(depth, &units, q, all, first, inverse, tried);
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      sums->with_row[s] = _mm512_dpbusd_epi32(sums->with_row[s], quad.t, quad.k[s]);
      sums->with_itself[s] = _mm512_dpbusd_epi32(sums->with_itself[s], quad.k[s], quad.k[s]);
    }
  }
#else
  bytes centroids[QKVI_SCALES];  // in 16 bits: at most 2 * 88 for each of 128 quads
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) centroids[s] = (bytes)(words){0};
  for (size_t q = begin; q < end; q++) {
    const tried_quad quad = try_quad(depth, &units, q, all, first, inverse, tried);
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      sums->with_row[s] = SIMD(add_epi32)(sums->with_row[s], products_less(&quad, s));
      sums->with_itself[s] = SIMD(add_epi32)(sums->with_itself[s], products_with_itself(&quad, s));
      centroids[s] = SIMD(add_epi16)(centroids[s], pairs_of_centroids(&quad, s));
    }
  }
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    sums->with_row[s] = SIMD(add_epi32)(sums->with_row[s], sum_pairs(centroids[s], 128));
  }
#endif
}

// From and to which quad coordinates of a depth go.
#define QUADS(depth) reach[(depth) + 1] / QUAD, reach[depth] / QUAD

static void try_alike(const uint16_t *reach, const columns *all, const each inverse, tried_group *tried,
                      group_sums *out) {
  for (size_t first = 0; first < GROUP; first += LANES) {
    const lanes scale = load_lanes(inverse + first);
    alike_sums sums = {0};
    try_alike_of(4, QUADS(4), all, first, scale, tried, &sums);
    try_alike_of(3, QUADS(3), all, first, scale, tried, &sums);
    try_alike_of(2, QUADS(2), all, first, scale, tried, &sums);
    try_alike_of(1, QUADS(1), all, first, scale, tried, &sums);
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      store_lanes(out->with_row[s] + first, (lanes)SIMD(cvtepi32_ps)(sums.with_row[s]));
      store_lanes(out->with_itself[s] + first, (lanes)SIMD(cvtepi32_ps)(sums.with_itself[s]));
    }
  }
}

// ---- Sums with weights ----

// In the order of the reference's: of fours % 16, or of coordinate % 16.
typedef struct weighed_sums {
  lanes with_row[QKVI_SCALES][SUM_LANES], with_itself[QKVI_SCALES][SUM_LANES];
} weighed_sums;

// Quads [begin, end), all of one depth, a constant.
INLINE void try_weighed_of(unsigned depth, size_t begin, size_t end, const float *fours, const columns *all,
                           size_t first, lanes inverse, tried_group *tried, weighed_sums *sums) {
  const unit_tables units = units_of_depth(depth);
  for (size_t q = begin; q < end; q++) {
    const tried_quad quad = try_quad(depth, &units, q, all, first, inverse, tried);
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      sums->with_row[s][q % SUM_LANES] += fours[q] * (lanes)SIMD(cvtepi32_ps)(products_with_row(&quad, s));
      sums->with_itself[s][q % SUM_LANES] += fours[q] * (lanes)SIMD(cvtepi32_ps)(products_with_itself(&quad, s));
    }
  }
}

// The low bytes of four coordinates' words as [row][coordinate].
INLINE bytes quad_of_words(const words all[QUAD]) {
  const words mask = (words){0} + 0xff;
  const bytes low = SIMD(packus_epi32)((bytes)(all[0] & mask), (bytes)(all[1] & mask));
  const bytes high = SIMD(packus_epi32)((bytes)(all[2] & mask), (bytes)(all[3] & mask));
  return turn_quarters(SIMD(packus_epi16)(low, high));
}

// Tries scales for coordinates of more than four bits; what is found are codes.
INLINE void try_deep_of(unsigned depth, size_t begin, size_t end, const float *weights, const columns *all,
                        size_t first, lanes inverse, tried_group *tried, weighed_sums *sums) {
  for (size_t q = begin; q < end; q++) {
    words codes[QKVI_SCALES][QUAD];
    UNROLL
    for (size_t i = 0; i < QUAD; i++) {
      const size_t c = q * QUAD + i;
      const lanes y = load_lanes(all->x[c] + first) * inverse, t = (lanes)((words)y & 0x7fffffff);
      UNROLL
      for (size_t s = 0; s < QKVI_SCALES; s++) {
        lanes units;
        const words cell = quantize_deep(depth, y * (1.0f / T_PER_UNIT) * qkvi_tables.scales[s], &units);
        const lanes weighed = weights[c] * units;
        sums->with_row[s][c % SUM_LANES] += weighed * t;
        sums->with_itself[s][c % SUM_LANES] += weighed * units;
        codes[s][i] = (cell + (1u << (depth - 1))) << (QKV_DEPTH_MAX - depth);
      }
    }
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) put_bytes(tried->found[q][s] + first * QUAD, quad_of_words(codes[s]));
  }
}

static void try_weighed(const uint16_t *reach, const row_weights *weights, const columns *all, const each inverse,
                        tried_group *tried, group_sums *out) {
  for (size_t first = 0; first < GROUP; first += LANES) {
    const lanes scale = load_lanes(inverse + first);
    weighed_sums deep, sums;
    memset(&deep, 0, sizeof deep);
    memset(&sums, 0, sizeof sums);
    try_deep_of(8, 0, reach[8] / QUAD, weights->weights, all, first, scale, tried, &deep);
    try_deep_of(7, QUADS(7), weights->weights, all, first, scale, tried, &deep);
    try_deep_of(6, QUADS(6), weights->weights, all, first, scale, tried, &deep);
    try_deep_of(5, QUADS(5), weights->weights, all, first, scale, tried, &deep);
    try_weighed_of(4, QUADS(4), weights->fours, all, first, scale, tried, &sums);
    try_weighed_of(3, QUADS(3), weights->fours, all, first, scale, tried, &sums);
    try_weighed_of(2, QUADS(2), weights->fours, all, first, scale, tried, &sums);
    try_weighed_of(1, QUADS(1), weights->fours, all, first, scale, tried, &sums);
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      add_halves(deep.with_row[s], out->deep_with_row[s] + first);
      add_halves(deep.with_itself[s], out->deep_with_itself[s] + first);
      add_halves(sums.with_row[s], out->with_row[s] + first);
      add_halves(sums.with_itself[s], out->with_itself[s] + first);
    }
  }
}
#undef QUADS
#endif
#endif
