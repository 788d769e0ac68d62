// Dense transforms of rows in vectors. Compiled with and without dot product instructions.
#include <string.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/neon/variants.h"
#include "engine/kernel/neon/vectors.h"

// Rows that are taken at once, and rows of the matrix or vectors of it: their products fill the registers.
enum { ROWS = 4, ACROSS = 4, PRODUCT_ROWS = 2, PRODUCTS_ACROSS = 2 };

// out[i * dim + c] = rows[i] . matrix[c], for i < count and c < across, constants.
INLINE void multiply_tile(const float *matrix, size_t dim, const float *rows, size_t count, size_t across,
                          float *out) {
  float32x4_t sums[PRODUCT_ROWS * PRODUCTS_ACROSS][SUM_QUADS] = {0};
  for (size_t j = 0; j < dim; j += SUM_STEP) {
    // A row may end with eight.
    const size_t quads = dim - j >= SUM_STEP ? SUM_QUADS : SUM_QUADS / 2;
    UNROLL
    for (size_t q = 0; q < SUM_QUADS; q++) {
      if (q >= quads) break;
      UNROLL
      for (size_t i = 0; i < count; i++) {
        const float32x4_t x = vld1q_f32(rows + i * dim + j + 4 * q);
        UNROLL
        for (size_t c = 0; c < across; c++) sums[i * across + c][q] += vld1q_f32(matrix + c * dim + j + 4 * q) * x;
      }
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t c = 0; c < across; c++) out[i * dim + c] = add_lanes(sums[i * across + c]);
  }
}

INLINE void multiply_rows(const float *matrix, size_t dim, size_t coordinates, float *rows, size_t count) {
  float out[PRODUCT_ROWS * QKV_DIM_MAX];
  size_t c = 0;
  for (; c + PRODUCTS_ACROSS <= coordinates; c += PRODUCTS_ACROSS) {
    multiply_tile(matrix + c * dim, dim, rows, count, PRODUCTS_ACROSS, out + c);
  }
  for (; c < coordinates; c++) multiply_tile(matrix + c * dim, dim, rows, count, 1, out + c);
  for (size_t i = 0; i < count; i++) {
    memcpy(rows + i * dim, out + i * dim, coordinates * sizeof *rows);
    memset(rows + i * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
  }
}

QKV_DECLARE_DENSE(VARIANT(qkvi_multiply)) {
  size_t i = 0;
  for (; i + PRODUCT_ROWS <= n; i += PRODUCT_ROWS) {
    multiply_rows(matrix, dim, coordinates, rows + i * dim, PRODUCT_ROWS);
  }
  for (; i < n; i++) multiply_rows(matrix, dim, coordinates, rows + i * dim, 1);
}

// out[i * dim + j] for i < count rows and `across` vectors of j.
INLINE void combine_tile(const float *matrix, size_t dim, size_t coordinates, const float *rows, size_t count,
                         size_t across, float *out) {
  float32x4_t sums[ROWS][ACROSS] = {0};
  for (size_t c = 0; c < coordinates; c++) {
    UNROLL
    for (size_t v = 0; v < across; v++) {
      const float32x4_t y = vld1q_f32(matrix + c * dim + 4 * v);
      UNROLL
      for (size_t i = 0; i < count; i++) sums[i][v] += rows[i * dim + c] * y;
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t v = 0; v < across; v++) vst1q_f32(out + i * dim + 4 * v, sums[i][v]);
  }
}

INLINE void combine_rows(const float *matrix, size_t dim, size_t coordinates, float *rows, size_t count) {
  float out[ROWS * QKV_DIM_MAX];
  size_t j = 0;
  for (; j + 4 * ACROSS <= dim; j += 4 * ACROSS) {
    combine_tile(matrix + j, dim, coordinates, rows, count, ACROSS, out + j);
  }
  for (; j < dim; j += 4) combine_tile(matrix + j, dim, coordinates, rows, count, 1, out + j);
  memcpy(rows, out, count * dim * sizeof *rows);
}

QKV_DECLARE_DENSE(VARIANT(qkvi_combine)) {
  size_t i = 0;
  for (; i + ROWS <= n; i += ROWS) combine_rows(matrix, dim, coordinates, rows + i * dim, ROWS);
  for (; i < n; i++) combine_rows(matrix, dim, coordinates, rows + i * dim, 1);
}
