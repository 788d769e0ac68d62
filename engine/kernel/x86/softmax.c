// `peaks` and `weigh_integer` (kernel.h) in vectors, as integer_plain.h defines them. Compiled for AVX2 and twice for
// AVX-512.
#include <assert.h>

#include "engine/kernel/integer_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/interleave.h"
#include "engine/kernel/x86/variants.h"

enum { TILE_VECTORS = SIXTY_FOUR_VECTORS };

// ---- Across lanes ----

// The larger of two numbers; b where one is none.
INLINE lanes larger(lanes a, lanes b) {
#if LANES == 16
  return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return (lanes)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

typedef float four __attribute__((vector_size(16)));

// Lanes halved twice and four times: sixteen are the first eight and the others, and so on, whatever the vectors.
INLINE float sum_of(eight low, eight high) {
  const __m256 all = (__m256)(low + high);
  four sum = (four)_mm256_castps256_ps128(all) + (four)_mm256_extractf128_ps(all, 1);
  sum += (four)_mm_movehl_ps((__m128)sum, (__m128)sum);
  return sum[0] + sum[1];
}

INLINE float largest_of(eight low, eight high) {
  const __m256 all = _mm256_max_ps((__m256)low, (__m256)high);
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  most = _mm_max_ss(most, _mm_shuffle_ps(most, most, 1));
  return _mm_cvtss_f32(most);
}

#if LANES == 16
INLINE eight half_of(lanes all, int high) {
  return (eight)(high ? _mm512_extractf32x8_ps((__m512)all, 1) : _mm512_castps512_ps256((__m512)all));
}
#endif

INLINE float tile_sum(const lanes all[TILE_VECTORS]) {
#if LANES == 16
  const lanes sum = ((all[0] + all[1]) + all[2]) + all[3];
  return sum_of(half_of(sum, 0), half_of(sum, 1));
#else
  const eight low = ((all[0] + all[2]) + all[4]) + all[6];
  return sum_of(low, ((all[1] + all[3]) + all[5]) + all[7]);
#endif
}

INLINE float tile_largest(const lanes all[TILE_VECTORS]) {
#if LANES == 16
  const lanes most = larger(larger(all[0], all[1]), larger(all[2], all[3]));
  return largest_of(half_of(most, 0), half_of(most, 1));
#else
  const lanes low = larger(larger(all[0], all[2]), larger(all[4], all[6]));
  return largest_of(low, larger(larger(all[1], all[3]), larger(all[5], all[7])));
#endif
}

// ---- Weights ----

// integer_plain.h's power_of_two of (scores - peak) / ln 2, step by step for some vectors at once: the processor does
// not look ahead far enough to find what is independent of each other in one vector after the other. `count`, up to
// 8, is a constant; every TILE_VECTORS have a peak.
INLINE void powers_of(const float *scores, const float *peaks, size_t count, lanes *out) {
#define EACH(STEP)                     \
  UNROLL                               \
  for (size_t i = 0; i < count; i++) { \
    STEP;                              \
  }
  lanes x[8], magic[8], y[8];
  EACH(x[i] = (load_lanes(scores + i * LANES) - peaks[i / TILE_VECTORS]) * 1.44269504f)
  EACH(x[i] = larger(x[i], (lanes){0} + QKVI_POWER_LEAST))
  EACH(magic[i] = x[i] + QKVI_WHOLE_MAGIC)
  EACH(x[i] -= magic[i] - QKVI_WHOLE_MAGIC)
  EACH(y[i] = 0.00957010128f * x[i] + 0.0559178591f)
  EACH(y[i] = y[i] * x[i] + 0.240247443f)
  EACH(y[i] = y[i] * x[i] + 0.693121791f)
  EACH(y[i] = y[i] * x[i] + 0.999999285f)
  EACH(out[i] = (lanes)((words)y[i] + ((words)magic[i] << 23)))
#undef EACH
}

// weights [row] of one tile: the whole numbers; sets the scale.
INLINE float weigh_row(const float *scores, float peak, const lanes gains[TILE_VECTORS], float limit, float *scale,
                       sixty_four *out) {
  lanes all[TILE_VECTORS];
  UNROLL
  for (size_t i = 0; i < TILE_VECTORS; i += 4) powers_of(scores + i * LANES, &peak, 4, &all[i]);
  const float total = tile_sum(all);
  UNROLL
  for (size_t i = 0; i < TILE_VECTORS; i++) all[i] *= gains[i];
  const float top = tile_largest(all);
  const bool counts = top >= QKVI_NUMBER_LEAST;
  const float factor = counts ? limit / top : 0;
  *scale = counts ? top / limit * qkvi_integers.step : 0;
  UNROLL
  for (size_t i = 0; i < TILE_VECTORS; i++) out->whole[i] = (words)(all[i] * factor + QKVI_WHOLE_MAGIC);
  return total;
}

#if LANES == 16
// ---- Four rows at once ----

typedef struct four_rows {
  lanes rows[4];
} four_rows;

// Of each row's lanes what tile_sum or tile_largest make of them, in the row's quarter.
INLINE lanes fold_four(const four_rows *all, bool largest) {
#define FOLD(A, B) (largest ? larger(A, B) : (A) + (B))
#define CHOOSE(A, B, WHICH) ((lanes)_mm512_shuffle_f32x4((__m512)(A), (__m512)(B), WHICH))
#define WITHIN(A, WHICH) ((lanes)_mm512_permute_ps((__m512)(A), WHICH))
  const lanes *r = all->rows;
  const lanes first = FOLD(CHOOSE(r[0], r[1], 0x44), CHOOSE(r[0], r[1], 0xee));
  const lanes second = FOLD(CHOOSE(r[2], r[3], 0x44), CHOOSE(r[2], r[3], 0xee));
  const lanes fours = FOLD(CHOOSE(first, second, 0x88), CHOOSE(first, second, 0xdd));
  const lanes twos = FOLD(fours, WITHIN(fours, 0x4e));
  return FOLD(twos, WITHIN(twos, 0xb1));
#undef WITHIN
#undef CHOOSE
#undef FOLD
}

// The first lane of every quarter.
INLINE void store_quarters(lanes all, float out[4]) {
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, (__m512)all)));
}

// weigh_row of four rows.
INLINE void weigh_four(const float *scores, const float *peaks, const lanes gains[TILE_VECTORS], float limit,
                       float *scales, float *totals, sixty_four out[4]) {
  lanes all[4 * TILE_VECTORS];
  four_rows sums, tops;
  powers_of(scores, peaks, 8, all);
  powers_of(scores + 8 * LANES, peaks + 2, 8, all + 8);
  UNROLL
  for (size_t row = 0; row < 4; row++) {
    lanes *w = all + row * TILE_VECTORS;
    sums.rows[row] = ((w[0] + w[1]) + w[2]) + w[3];
    UNROLL
    for (size_t i = 0; i < TILE_VECTORS; i++) w[i] *= gains[i];
    tops.rows[row] = larger(larger(w[0], w[1]), larger(w[2], w[3]));
  }
  store_quarters(fold_four(&sums, false), totals);
  const lanes top = fold_four(&tops, true);
  const words counts = (words)(top >= QKVI_NUMBER_LEAST);
  const lanes factors = (lanes)((words)(limit / top) & counts);
  store_quarters((lanes)((words)(top / limit * qkvi_integers.step) & counts), scales);
#define ROW(I)                                                                                      \
  {                                                                                                 \
    const lanes factor = (lanes)_mm512_shuffle_f32x4((__m512)factors, (__m512)factors, 0x55 * (I)); \
    UNROLL                                                                                          \
    for (size_t i = 0; i < TILE_VECTORS; i++) {                                                     \
      out[I].whole[i] = (words)(all[(I)*TILE_VECTORS + i] * factor + QKVI_WHOLE_MAGIC);             \
    }                                                                                               \
  }
  ROW(0) ROW(1) ROW(2) ROW(3)
#undef ROW
}
#endif

// A chunk of weights; `columns` and `parts` are constants.
INLINE void weigh_chunk_of(const float *scores, const float *peaks, size_t rows, const lanes gains[TILE_VECTORS],
                           size_t columns, unsigned parts, float *scales, float *totals, uint8_t *out) {
  const float limit = parts == 1 ? 255 : 65535;
#if LANES == 16
  enum { FOUR = 4 };
  bytes all[QKV_INTEGER_COLUMNS];
  UNROLL
  for (size_t row = 0; row < columns / parts; row += FOUR) {
    sixty_four whole[FOUR];
    const size_t left = rows > row ? rows - row : 0;
    if (columns / parts < FOUR || left < FOUR) {
      UNROLL
      for (size_t i = 0; i < FOUR; i++) {
        whole[i] = (sixty_four){0};
        if (i >= left) continue;
        totals[row + i] = weigh_row(scores + (row + i) * QKV_PAGE_TOKENS, peaks[row + i], gains, limit,
                                    &scales[row + i], &whole[i]);
      }
    } else {
      weigh_four(scores + row * QKV_PAGE_TOKENS, peaks + row, gains, limit, scales + row, totals + row, whole);
    }
    UNROLL
    for (size_t i = 0; i < FOUR; i++) {
      if (row + i >= columns / parts) continue;
      for (unsigned p = 0; p < parts; p++) all[(row + i) * parts + p] = pack_bytes(&whole[i], parts == 2 && p == 0);
    }
  }
  put_interleaved(all, columns, out);
#else
  if (rows * parts < columns) memset(out, 0, columns * QKV_PAGE_TOKENS);
  UNROLL
  for (size_t row = 0; row < columns / parts; row++) {
    sixty_four whole;
    if (row >= rows) break;
    totals[row] = weigh_row(scores + row * QKV_PAGE_TOKENS, peaks[row], gains, limit, &scales[row], &whole);
    for (unsigned p = 0; p < parts; p++) {
      const unsigned shift = parts == 2 && p == 0 ? 8 : 0;
      for (size_t i = 0; i < TILE_VECTORS; i += 2) {
        // Four numbers' bytes to a word.
        const words low = whole.whole[i] >> shift & 255, high = whole.whole[i + 1] >> shift & 255;
        const __m256i halves = _mm256_packus_epi32((__m256i)low, (__m256i)high);
        const __m256i four_words = _mm256_packus_epi16(halves, halves);
        // 128-bit halves hold numbers 0 to 3 and 8 to 11 first, then 4 to 7 and 12 to 15.
        uint32_t in[LANES];
        memcpy(in, &four_words, sizeof in);
        const uint32_t ordered[4] = {in[0], in[4], in[1], in[5]};
        for (size_t j = 0; j < 4; j++) {
          memcpy(out + ((i * 2 + j) * columns + row * parts + p) * 4, &ordered[j], 4);
        }
      }
    }
  }
#endif
}

static void weigh_chunk(const qkvi_chunk *chunk, const float *scores, const float *peaks,
                        const lanes gains[TILE_VECTORS], unsigned parts, float *scales, float *totals, uint8_t *out) {
#define CASE(COLUMNS, PARTS)                           \
  if (chunk->columns == (COLUMNS) && parts == (PARTS)) \
  return weigh_chunk_of(scores, peaks, chunk->rows, gains, COLUMNS, PARTS, scales, totals, out)
  CASE(1, 1);
  CASE(2, 1);
  CASE(4, 1);
  CASE(8, 1);
  CASE(2, 2);
  CASE(4, 2);
  CASE(8, 2);
#undef CASE
}

QKV_DECLARE_WEIGH_INTEGER(VARIANT(qkvi_weigh_integer)) {
  assert(n <= QKV_INTEGER_ROWS && parts >= 1 && parts <= QKV_INTEGER_PARTS);
  lanes factors[TILE_VECTORS];
  for (size_t i = 0; i < TILE_VECTORS; i++) factors[i] = gain_lanes(gains + i * LANES);
  weights->count = n;
  weights->parts = parts;
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < n;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, n, parts);
    const size_t first = chunk.first;
    weigh_chunk(&chunk, scores + first * QKV_PAGE_TOKENS, peaks + first, factors, parts, weights->scales + first,
                totals + first, weights->bytes + first * parts * QKV_PAGE_TOKENS);
  }
}

QKV_DECLARE_PEAKS(VARIANT(qkvi_peaks)) {
  size_t row = 0;
#if LANES == 16
  for (; row + 4 <= n; row += 4) {
    four_rows all;
    UNROLL
    for (size_t i = 0; i < 4; i++, scores += QKV_PAGE_TOKENS) {
      const lanes low = larger(load_lanes(scores), load_lanes(scores + LANES));
      all.rows[i] = larger(low, larger(load_lanes(scores + 2 * LANES), load_lanes(scores + 3 * LANES)));
    }
    store_quarters(fold_four(&all, true), peaks + row);
  }
#endif
  for (; row < n; row++, scores += QKV_PAGE_TOKENS) {
    lanes all[TILE_VECTORS];
    for (size_t i = 0; i < TILE_VECTORS; i++) all[i] = load_lanes(scores + i * LANES);
    peaks[row] = tile_largest(all);
  }
}
