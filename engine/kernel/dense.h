// Dense transforms in whole numbers: matrices and rows of 16 bits, sums of 32, which come out the same in any order.
//
//   a_cj = round(A_cj / scale_c)    x_j = round(row_j / s)    out_c = (scale_c s) sum_j a_cj x_j
//
// Scales make the length of a matrix's row at most QKVI_DENSE_LENGTH and that of x at most QKVI_DENSE_ROW_LENGTH, so
// that no sum overflows (Cauchy and Schwarz), and all numbers fit. Of 128 alike coordinates each has about 12 bits; a
// sum is about 1e-5 of the product of both lengths off.
#ifndef QKV_ENGINE_KERNEL_DENSE_H
#define QKV_ENGINE_KERNEL_DENSE_H

#include <stddef.h>
#include <stdint.h>

#define QKVI_DENSE_LENGTH 65000.0f
#define QKVI_DENSE_ROW_LENGTH 32600.0f
#define QKVI_DENSE_NUMBER_MAX 32767.0f
#define QKVI_DENSE_SQUARE_LEAST 1e-30f  // rows whose squares add up to less are taken for zeros
#define QKVI_DENSE_OUTPUTS 16           // side by side

// For rows of `dim`, a multiple of QKV_BAND.
typedef struct qkv_dense {
  size_t dim, outputs;
  const float *scales;   // [outputs up to 16s]
  const int16_t *words;  // [outputs / 16][dim / 2][16][2], 64-byte aligned
} qkv_dense;

// Bytes that a matrix of so many outputs takes; and a matrix [outputs][dim] in such memory, 64-byte aligned.
size_t qkv_dense_bytes(size_t dim, size_t outputs);
qkv_dense qkv_dense_in(void *memory, const float *matrix, size_t dim, size_t outputs);

#endif
