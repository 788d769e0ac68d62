// Dense transforms in whole numbers (kernel/dense.h). Compiled once for each family.
#include "engine/kernel/dense.h"

#include <assert.h>
#include <stdbool.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/dense_words.h"
#include "engine/kernel/x86/products.h"
#include "engine/kernel/x86/variants.h"

enum {
  STEP = LANES == 16 ? 2 : QKV_BAND,  // coordinates at once: of more gcc would spill sums of AVX-512
  BATCH = 4 * ROWS,  // rows that meet a tile of the matrix one after the other, while it is in the cache
  MASK_INPUTS = QKVI_DENSE_MASK_INPUTS,
};

// Rows in whole numbers.
typedef struct dense_rows {
  _Alignas(64) int16_t words[BATCH * QKV_DIM_MAX + 2 * LANES];  // [rows][dim]
  float scales[BATCH];
  int32_t shares[BATCH];
  const float *added;  // [dim], to outputs
} dense_rows;

// out [dim], and up to 2 * LANES more, of a row less the mean.
static void words_of_row(const float *row, const float *mean, size_t dim, float factor, int16_t *out) {
  for (size_t j = 0; j < dim; j += 2 * LANES) {
    const bytes low = whole_numbers(row, mean, j, dim, factor);
    const bytes high = whole_numbers(row, mean, j + LANES, dim, factor);
#if LANES == 16
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    put_bytes(out + j, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(low, high)));
#else
    put_bytes(out + j, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
#endif
  }
}

// Sums of `count` rows from row `first` on become outputs, vectors [v, v + across); both are constants.
INLINE void put_tile(const qkv_dense *matrix, const dense_rows *x, size_t first, size_t count, size_t v,
                     size_t across, const bytes *sums, float *rows) {
  lanes added[ACROSS];
  rows += first * matrix->dim;
  UNROLL
  for (size_t k = 0; k < across; k++) added[k] = load_within(x->added, (v + k) * LANES, matrix->dim);
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t k = 0; k < across; k++) {
      const lanes scale = load_lanes(matrix->scales + (v + k) * LANES) * x->scales[first + i];
      const lanes output = to_lanes(sums[i * across + k]) * scale + added[k];
      put_outputs(output, (v + k) * LANES, matrix->dim, rows + i * matrix->dim);
    }
  }
}

// Two inputs' products; `numbers` [rows][dim] and `from` [vectors] begin with them.
INLINE void add_two(const int16_t *numbers, size_t dim, size_t count, const int16_t *const *from, size_t across,
                    size_t at, bytes *sums) {
  bytes y[ACROSS];
  UNROLL
  for (size_t k = 0; k < across; k++) y[k] = load_bytes(from[k] + at * QKVI_DENSE_OUTPUTS);
  UNROLL
  for (size_t i = 0; i < count; i++) {
    const bytes pair = repeat_word(numbers + i * dim + at);
    UNROLL
    for (size_t k = 0; k < across; k++) sums[i * across + k] = add_products_at_once(sums[i * across + k], y[k], pair);
  }
}

// Vectors [v, v + across) of outputs of `count` rows from row `first` on; both are constants.
INLINE void multiply_tile(const qkv_dense *matrix, const dense_rows *x, size_t first, size_t count, size_t v,
                          size_t across, float *rows) {
  const size_t dim = matrix->dim;
  const int16_t *from[ACROSS], *numbers = x->words + first * dim;
  bytes sums[ROWS * ACROSS];
  UNROLL
  for (size_t k = 0; k < across; k++) from[k] = words_of(matrix, v + k);
  UNROLL_16
  for (size_t i = 0; i < count * across; i++) sums[i] = (bytes)(words){0};
  for (size_t j = 0; j < dim; j += STEP) {
    UNROLL
    for (size_t p = j; p < j + STEP; p += 2) add_two(numbers, dim, count, from, across, p, sums);
  }
  put_tile(matrix, x, first, count, v, across, sums, rows);
}

// Vectors [v, v + across) of all rows.
INLINE void multiply_vectors(const qkv_dense *matrix, const dense_rows *x, size_t count, size_t v, size_t across,
                             float *rows) {
  size_t i = 0;
  for (; i + ROWS <= count; i += ROWS) multiply_tile(matrix, x, i, ROWS, v, across, rows);
  for (; i < count; i++) multiply_tile(matrix, x, i, 1, v, across, rows);
}

#if BYTE_DOTS
// ---- Pairs of inputs that make one product ----
//
// Where VNNI begins one product in a cycle and additions run on other units (qkvi_tables.dots_alone). On a Zen 4, 64
// rows of 128 take 9.2 us with VNNI's products alone, 7.0 with all fours paired, 6.5 with three of four.

// Whether all numbers of a batch's rows keep to the limits.
static bool within_limits(const qkv_dense *matrix, const dense_rows *x, size_t count) {
  __mmask32 beyond = 0;
  for (size_t j = 0; j < matrix->dim; j += MASK_INPUTS) {
    const __mmask32 mask = matrix->dim - j >= MASK_INPUTS ? UINT32_MAX : (1u << (matrix->dim - j)) - 1;
    const bytes limits = _mm512_maskz_loadu_epi16(mask, matrix->limits + j);
    bytes most = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i++) {
      const bytes numbers = _mm512_maskz_loadu_epi16(mask, x->words + i * matrix->dim + j);
      most = _mm512_max_epi16(most, _mm512_abs_epi16(numbers));
    }
    beyond |= _mm512_cmpgt_epi16_mask(most, limits);
  }
  return beyond == 0;
}

// What rows' own products add to every sum, modulo 2^32.
static void share_rows(const qkv_dense *matrix, dense_rows *x, size_t count) {
  for (size_t first = 0; first < count; first += LANES) {
    __m512 sums[LANES];
    for (size_t i = 0; i < LANES; i++) {
      const int16_t *numbers = x->words + (first + i) * matrix->dim;
      bytes sum = _mm512_setzero_si512();
      for (size_t j = 0; first + i < count && j < matrix->dim; j += MASK_INPUTS) {
        const bytes firsts = _mm512_maskz_loadu_epi32(matrix->paired[j / MASK_INPUTS], numbers + j);
        sum = _mm512_dpwssd_epi32(sum, firsts, load_bytes(numbers + j + 2));
      }
      sums[i] = _mm512_castsi512_ps(sum);
    }
    put_bytes(x->shares + first, _mm512_castps_si512(add_lanes_of_16(sums, true)));
  }
}

// As multiply_tile.
INLINE void multiply_paired(const qkv_dense *matrix, const dense_rows *x, size_t first, size_t count, size_t v,
                            size_t across, float *rows) {
  const size_t dim = matrix->dim, fours = dim / QKVI_DENSE_FOUR;
  const int16_t *from[ACROSS], *numbers = x->words + first * dim;
  bytes sums[ROWS * ACROSS];
  UNROLL
  for (size_t k = 0; k < across; k++) {
    from[k] = words_of(matrix, v + k);
    const bytes share = load_bytes(matrix->shares + (v + k) * LANES);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      const bytes all = _mm512_add_epi32(share, repeat_word(x->shares + first + i));
      sums[i * across + k] = _mm512_sub_epi32(_mm512_setzero_si512(), all);
    }
  }
  size_t f = 0;
  for (; f + QKVI_DENSE_GROUP <= fours; f += QKVI_DENSE_GROUP) {
    UNROLL
    for (size_t p = 0; p + 1 < QKVI_DENSE_GROUP; p++) {
      const size_t at = matrix->order[f + p];
      bytes y[2][ACROSS];
      UNROLL
      for (size_t k = 0; k < across; k++) {
        y[0][k] = load_bytes(from[k] + at * QKVI_DENSE_OUTPUTS);
        y[1][k] = load_bytes(from[k] + (at + 2) * QKVI_DENSE_OUTPUTS);
      }
      UNROLL
      for (size_t i = 0; i < count; i++) {
        const bytes a = repeat_word(numbers + i * dim + at), b = repeat_word(numbers + i * dim + at + 2);
        UNROLL
        for (size_t k = 0; k < across; k++) {
          bytes *sum = &sums[i * across + k];
          *sum = _mm512_dpwssd_epi32(*sum, _mm512_add_epi16(y[0][k], b), _mm512_add_epi16(y[1][k], a));
        }
      }
    }
    const size_t alone = matrix->order[f + QKVI_DENSE_GROUP - 1];
    add_two(numbers, dim, count, from, across, alone, sums);
    add_two(numbers, dim, count, from, across, alone + 2, sums);
  }
  for (; f < fours; f++) {
    add_two(numbers, dim, count, from, across, matrix->order[f], sums);
    add_two(numbers, dim, count, from, across, matrix->order[f] + 2u, sums);
  }
  put_tile(matrix, x, first, count, v, across, sums, rows);
}

// Two vectors [v, v + 2) of all rows.
static void multiply_vectors_paired(const qkv_dense *matrix, const dense_rows *x, size_t count, size_t v,
                                    float *rows) {
  size_t i = 0;
  for (; i + ROWS <= count; i += ROWS) multiply_paired(matrix, x, i, ROWS, v, 2, rows);
  for (; i < count; i++) multiply_paired(matrix, x, i, 1, v, 2, rows);
}
#endif

static void multiply_batch(const qkv_dense *matrix, size_t coordinates, size_t count, const float *mean,
                           const float *added, float *rows) {
  const size_t dim = matrix->dim, vectors = (coordinates + LANES - 1) / LANES;
  dense_rows x;
  x.added = added;
  size_t v = 0;
  float factors[BATCH];
  find_scales(rows, mean, dim, count, factors, x.scales);
  for (size_t i = 0; i < count; i++) words_of_row(rows + i * dim, mean, dim, factors[i], x.words + i * dim);
#if BYTE_DOTS
  if (!qkvi_tables.dots_alone && within_limits(matrix, &x, count)) {
    share_rows(matrix, &x, count);
    for (; v + 2 <= vectors; v += 2) multiply_vectors_paired(matrix, &x, count, v, rows);
  }
#endif
  for (; v + ACROSS <= vectors; v += ACROSS) multiply_vectors(matrix, &x, count, v, ACROSS, rows);
  for (; v + 2 <= vectors; v += 2) multiply_vectors(matrix, &x, count, v, 2, rows);
  for (; v < vectors; v++) multiply_vectors(matrix, &x, count, v, 1, rows);
  for (size_t i = 0; coordinates < dim && i < count; i++) {
    memset(rows + i * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
  }
}

QKV_DECLARE_MULTIPLY_INTEGER(VARIANT(qkvi_multiply_integer)) {
  static const float zeros[QKV_DIM_MAX];
  assert(coordinates <= matrix->outputs && matrix->outputs <= matrix->dim);
  if (mean == NULL) mean = zeros;
  if (added == NULL) added = zeros;
  for (size_t i = 0; i < n; i += BATCH, rows += BATCH * matrix->dim) {
    const size_t count = n - i < BATCH ? n - i : BATCH;
    multiply_batch(matrix, coordinates, count, mean, added, rows);
  }
}

// ---- Sums that are kept ----

// Vectors [v, v + across) of the sums of `count` rows; both are constants.
INLINE void add_tile(const qkv_dense *matrix, size_t first, size_t inputs, const int16_t *x, size_t count, size_t v,
                     size_t across, size_t stride, const int32_t *before, int32_t *after) {
  const int16_t *from[ACROSS];
  bytes sums[ROWS * ACROSS];
  UNROLL
  for (size_t k = 0; k < across; k++) from[k] = words_of(matrix, v + k) + first * QKVI_DENSE_OUTPUTS;
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t k = 0; k < across; k++) {
      sums[i * across + k] = before == NULL ? (bytes)(words){0} : load_bytes(before + i * stride + (v + k) * LANES);
    }
  }
  for (size_t p = 0; p < inputs; p += 2) {
    bytes y[ACROSS];
    UNROLL
    for (size_t k = 0; k < across; k++) y[k] = load_bytes(from[k] + p * QKVI_DENSE_OUTPUTS);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      const bytes pair = repeat_word(x + i * inputs + p);
      UNROLL
      for (size_t k = 0; k < across; k++) sums[i * across + k] = add_products(sums[i * across + k], y[k], pair);
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t k = 0; k < across; k++) put_bytes(after + i * stride + (v + k) * LANES, sums[i * across + k]);
  }
}

INLINE void add_some(const qkv_dense *matrix, size_t first, size_t inputs, const int16_t *x, size_t count,
                     size_t stride, const int32_t *before, int32_t *after) {
  const size_t vectors = stride / LANES;
  size_t v = 0;
  for (; v + ACROSS <= vectors; v += ACROSS)
    add_tile(matrix, first, inputs, x, count, v, ACROSS, stride, before, after);
  for (; v < vectors; v++) add_tile(matrix, first, inputs, x, count, v, 1, stride, before, after);
}

QKV_DECLARE_ADD_PRODUCTS(VARIANT(qkvi_add_products)) {
  const size_t stride = (coordinates + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
  assert(coordinates <= matrix->outputs && first % 2 == 0 && count % 2 == 0 && first + count <= matrix->dim);
  for (size_t i = 0, some; i < n; i += some, numbers += some * count) {
    const int32_t *from = before == NULL ? NULL : before + i * stride;
    some = i + ROWS <= n ? ROWS : 1;
    if (some == ROWS) {
      add_some(matrix, first, count, numbers, ROWS, stride, from, after + i * stride);
    } else {
      add_some(matrix, first, count, numbers, 1, stride, from, after + i * stride);
    }
  }
}
