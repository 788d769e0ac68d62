#include "engine/kernel/dense.h"

#include <assert.h>
#include <math.h>

#include "engine/kernel/dense_plain.h"
#include "engine/kernel/kernel.h"

enum { ALIGN = 64 };

static size_t padded(size_t outputs) {
  return (outputs + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
}

// Scales, then words.
static size_t scale_bytes(size_t outputs) {
  return padded(outputs) * sizeof(float);
}

size_t qkv_dense_bytes(size_t dim, size_t outputs) {
  return scale_bytes(outputs) + padded(outputs) * dim * sizeof(int16_t);
}

// What a row of the matrix is divided by; 0 for a row of nothing.
static float scale_of(const float *row, size_t dim) {
  double squares = 0, top = 0;
  for (size_t j = 0; j < dim; j++) {
    squares += (double)row[j] * (double)row[j];
    top = fmax(top, fabs((double)row[j]));
  }
  const double scale = fmax(sqrt(squares) / (double)QKVI_DENSE_LENGTH, top / (double)QKVI_DENSE_NUMBER_MAX);
  return scale >= (double)QKVI_NUMBER_LEAST ? (float)scale : 0;
}

qkv_dense qkv_dense_in(void *memory, const float *matrix, size_t dim, size_t outputs) {
  assert((uintptr_t)memory % ALIGN == 0 && dim % QKV_BAND == 0);
  float *scales = memory;
  int16_t *words = (int16_t *)(scales + padded(outputs));
  memset(memory, 0, qkv_dense_bytes(dim, outputs));
  for (size_t c = 0; c < outputs; c++) {
    const float *row = matrix + c * dim;
    int16_t *block = words + c / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS * dim;
    scales[c] = scale_of(row, dim);
    for (size_t j = 0; scales[c] > 0 && j < dim; j++) {
      // A scale that was rounded down would make 32768 of the largest.
      const double number = nearbyint((double)row[j] / (double)scales[c]);
      const double most = (double)QKVI_DENSE_NUMBER_MAX;
      block[(j / 2 * QKVI_DENSE_OUTPUTS + c % QKVI_DENSE_OUTPUTS) * 2 + j % 2] =
          (int16_t)fmin(fmax(number, -most), most);
    }
  }
  return (qkv_dense){.dim = dim, .outputs = outputs, .scales = scales, .words = words};
}

QKV_DECLARE_MULTIPLY_INTEGER(qkvi_multiply_integer_reference) {
  assert(coordinates <= matrix->outputs && matrix->outputs <= matrix->dim);
  const size_t dim = matrix->dim;
  int16_t x[QKV_DIM_MAX];
  for (size_t i = 0; i < n; i++, rows += dim) {
    const float scale = dense_words(rows, mean, dim, x);
    memset(rows, 0, dim * sizeof *rows);
    for (size_t c = 0; c < coordinates; c++) {
      const int16_t *block = matrix->words + c / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS * dim;
      int32_t sum = 0;
      for (size_t j = 0; j < dim; j++) {
        sum += block[(j / 2 * QKVI_DENSE_OUTPUTS + c % QKVI_DENSE_OUTPUTS) * 2 + j % 2] * (int32_t)x[j];
      }
      rows[c] = (float)sum * (matrix->scales[c] * scale);
    }
  }
}

QKV_DECLARE_ADD_PRODUCTS(qkvi_add_products_reference) {
  assert(coordinates <= matrix->outputs && first % 2 == 0 && count % 2 == 0 && first + count <= matrix->dim);
  const size_t stride = padded(coordinates);
  for (size_t i = 0; i < n; i++, numbers += count) {
    for (size_t c = 0; c < stride; c++) {
      const int16_t *block = matrix->words + c / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS * matrix->dim;
      int32_t sum = before == NULL ? 0 : before[i * stride + c];
      for (size_t j = 0; j < count; j++) {
        const size_t at = first + j;
        sum += block[(at / 2 * QKVI_DENSE_OUTPUTS + c % QKVI_DENSE_OUTPUTS) * 2 + at % 2] * (int32_t)numbers[j];
      }
      after[i * stride + c] = sum;
    }
  }
}
