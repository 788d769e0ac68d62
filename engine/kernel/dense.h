// Dense transforms in whole numbers: matrices and rows of 16 bits, sums of 32, which come out the same in any order.
//
//   a_cj = round(A_cj / scale_c)    x_j = round(row_j / s)    out_c = (scale_c s) sum_j a_cj x_j
//
// Scales make the length of a matrix's row at most QKVI_DENSE_LENGTH and that of x at most QKVI_DENSE_ROW_LENGTH, so
// that no sum overflows (Cauchy and Schwarz), and all numbers fit. Of 128 alike coordinates each has about 12 bits; a
// sum is about 1e-5 of the product of both lengths off.
//
// Where additions are cheaper than products, two of these make one (S. Winograd, A New Algorithm for Inner Product,
// IEEE Transactions on Computers C-17, 1968):
//
//   a_i x_i + a_j x_j = (a_i + x_j) (a_j + x_i) - a_i a_j - x_i x_j
//
// i being inputs 4 f and 4 f + 1 of four f, j those two behind them. Both sums must fit in 16 bits, so the three
// quarters of all fours whose numbers a are smallest are paired so, for rows whose numbers x keep to `limits`.
#ifndef QKV_ENGINE_KERNEL_DENSE_H
#define QKV_ENGINE_KERNEL_DENSE_H

#include <stddef.h>
#include <stdint.h>

#define QKVI_DENSE_LENGTH 65000.0f
#define QKVI_DENSE_ROW_LENGTH 32600.0f
#define QKVI_DENSE_NUMBER_MAX 32767.0f
#define QKVI_DENSE_SQUARE_LEAST 1e-30f  // rows whose squares add up to less are taken for zeros
#define QKVI_DENSE_OUTPUTS 16           // side by side
#define QKVI_DENSE_FOUR 4               // inputs
#define QKVI_DENSE_GROUP 4              // fours, all but one of which are paired
#define QKVI_DENSE_MASK_INPUTS 32       // of a word of `paired`

// For rows of `dim`, a multiple of QKV_BAND.
typedef struct qkv_dense {
  size_t dim, outputs;
  const float *scales;   // [outputs up to 16s]
  const int16_t *words;  // [outputs / 16][dim / 2][16][2], 64-byte aligned
  // Fours of inputs: in groups of four, of which the first three are paired; then what is left, which is not.
  const uint16_t *order;  // [dim / 4]: first inputs
  const int16_t *limits;  // [dim]: the most that a row's numbers may be for that, 32767 of inputs that are not paired
  const uint16_t *paired;  // [dim up to 32s / 32]: a bit for every two inputs, set at the first two of a paired four
  const int32_t *shares;   // [outputs up to 16s]: sums of a_i a_j, modulo 2^32
} qkv_dense;

// Bytes that a matrix of so many outputs takes; and a matrix [outputs][dim] in memory of that size, 64-byte aligned.
size_t qkv_dense_bytes(size_t dim, size_t outputs);
qkv_dense qkv_dense_in(void *memory, const float *matrix, size_t dim, size_t outputs);

#endif
