// Dense transforms in whole numbers (kernel/dense.h). Compiled once for each family.
#include "engine/kernel/dense_plain.h"

#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/products.h"
#include "engine/kernel/x86/twins.h"

enum { STEP = LANES == 16 ? 2 : QKV_BAND };  // coordinates at once: of more gcc would spill sums of AVX-512

// Rows in whole numbers.
typedef struct dense_rows {
  int16_t words[ROWS][QKV_DIM_MAX];
  float scales[ROWS];
} dense_rows;

// Vectors [v, v + across) of outputs of `count` rows; both are constants.
INLINE void multiply_tile(const qkv_dense *matrix, const dense_rows *x, size_t count, size_t v, size_t across,
                          float *rows) {
  const size_t dim = matrix->dim;
  const int16_t *from[ACROSS];
  bytes sums[ROWS * ACROSS];
  UNROLL
  for (size_t k = 0; k < across; k++) from[k] = words_of(matrix, v + k);
  UNROLL
  for (size_t i = 0; i < count * across; i++) sums[i] = (bytes)(words){0};
  for (size_t j = 0; j < dim; j += STEP) {
    UNROLL
    for (size_t p = j; p < j + STEP; p += 2) {
      bytes y[ACROSS];
      UNROLL
      for (size_t k = 0; k < across; k++) y[k] = load_bytes(from[k] + p * QKVI_DENSE_OUTPUTS);
      UNROLL
      for (size_t i = 0; i < count; i++) {
        const bytes pair = repeat_word(&x->words[i][p]);
        UNROLL
        for (size_t k = 0; k < across; k++) {
          bytes *sum = &sums[i * across + k];
          *sum = k % 2 == 0 ? add_products_at_once(*sum, y[k], pair) : add_products(*sum, y[k], pair);
        }
      }
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t k = 0; k < across; k++) {
      const lanes scale = load_lanes(matrix->scales + (v + k) * LANES) * x->scales[i];
      put_outputs(to_lanes(sums[i * across + k]) * scale, (v + k) * LANES, dim, rows + i * dim);
    }
  }
}

INLINE void multiply_some(const qkv_dense *matrix, size_t coordinates, size_t count, const float *mean, float *rows) {
  const size_t dim = matrix->dim, vectors = (coordinates + LANES - 1) / LANES;
  dense_rows x;
  for (size_t i = 0; i < count; i++) x.scales[i] = dense_words(rows + i * dim, mean, dim, x.words[i]);
  size_t v = 0;
  for (; v + ACROSS <= vectors; v += ACROSS) multiply_tile(matrix, &x, count, v, ACROSS, rows);
  for (; v + 2 <= vectors; v += 2) multiply_tile(matrix, &x, count, v, 2, rows);
  for (; v < vectors; v++) multiply_tile(matrix, &x, count, v, 1, rows);
  for (size_t i = 0; coordinates < dim && i < count; i++) {
    memset(rows + i * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
  }
}

QKV_DECLARE_MULTIPLY_INTEGER(TWIN(qkvi_multiply_integer)) {
  assert(coordinates <= matrix->outputs && matrix->outputs <= matrix->dim);
  size_t i = 0;
  for (; i + ROWS <= n; i += ROWS) multiply_some(matrix, coordinates, ROWS, mean, rows + i * matrix->dim);
  for (; i < n; i++) multiply_some(matrix, coordinates, 1, mean, rows + i * matrix->dim);
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

QKV_DECLARE_ADD_PRODUCTS(TWIN(qkvi_add_products)) {
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
