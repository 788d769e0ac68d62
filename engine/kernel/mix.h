// Products with a matrix of plain codes: what attention on scalar codes comes down to. Scores are sums over
// coordinates for every token, sums of values are sums over tokens for every coordinate; either is
//
//   out[i][lane] += sum over steps of factors[i][step] * value(code[step][lane])      lane by lane, steps in order
//
// Codes have 1 to 8 bits, the same for all, and lie in blocks of eight lanes, a block in chunks of eight steps, a
// chunk of 8 * bits bytes. Its bits come in sections, the binary digits of `bits` from the largest on (7 = 4 + 2 +
// 1), the most significant bits first. A section of w bits has w times eight bytes, one a lane:
//
//   byte j of a lane   steps 8 / w * j + i, in bits [i * w, i * w + w)          i = 0 ... 8 / w - 1
//
// so that eight bytes become eight lanes of 32 bits, and a step's part of the code is a shift and a mask away.
//
// The scalar reference defines the numbers: fp32, a step is multiplied and added with one rounding; every other
// version gives the same bits.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_KERNEL_MIX_H
#define QKV_ENGINE_KERNEL_MIX_H

#include <stddef.h>
#include <stdint.h>

#define QKV_MIX_LANES 8  // of a block; steps of a chunk

typedef struct qkv_code_matrix {
  const uint8_t *codes;  // [lanes / 8][steps / 8][8 * bits]
  unsigned bits;         // 1 to 8
  size_t lanes, steps;   // multiples of 8
  const float *values;   // [1 << bits] of codes; NULL: a code's value is its number
} qkv_code_matrix;

static inline size_t qkv_code_matrix_bytes(size_t lane_count, size_t steps, unsigned bits) {
  return lane_count * steps * bits / 8;
}

// factors [n][steps], out [n] rows of `lanes`, `stride` floats apart.
#define QKV_DECLARE_MIX(name) \
  void name(const qkv_code_matrix *matrix, const float *factors, size_t n, float *out, size_t stride)

// That of the kernels in use (kernel.h).
QKV_DECLARE_MIX(qkv_mix);

QKV_DECLARE_MIX(qkvi_mix_reference);
QKV_DECLARE_MIX(qkvi_mix_avx512);
QKV_DECLARE_MIX(qkvi_mix_avx2);  // which has what is left of wider vectors

// The same in whole numbers, of codes of up to four bits: a row's factors are rounded to multiples of its largest
// magnitude / 127, the values of a table to multiples of their largest magnitude / 63, and codes without a table
// count from their middle,
//
//   out[i][lane] += sum over steps of factors[i][step] * (code[step][lane] - (2^bits - 1) / 2)
//
// Sums are exact, so that the order does not matter. What rounding adds to the squared error of the codes themselves,
// of Gaussian factors: 1 to 2 % at four bits, less at fewer (tests/engine/kernel/mix_test.c). `steps` is at most
// QKV_DIM_MAX.
#define QKV_MIX_INTEGER_BITS 4
#define QKVI_MIX_VALUE_MOST 63.0f  // two products of such a value plus 64 with factors fit 16 bits
QKV_DECLARE_MIX(qkv_mix_integer);

QKV_DECLARE_MIX(qkvi_mix_integer_reference);

// Of codes whose values are zero + scale * code, with scales and zeros [steps] of the steps: scaled [n][steps], the
// factors [n][steps] times the scales, for the matrix of plain codes, and shares [n], sums of factors times zeros:
// over eight lanes, step % 8, which are then added in order. `steps` is a multiple of 8.
#define QKV_DECLARE_SCALE_FACTORS(name)                                                                           \
  void name(const float *factors, const float *scales, const float *zeros, size_t n, size_t steps, float *scaled, \
            float *shares)

// codes [lanes][steps] to a matrix and back.
void qkv_mix_pack(const uint8_t *codes, size_t lanes, size_t steps, unsigned bits, uint8_t *matrix);
void qkv_mix_unpack(const uint8_t *matrix, size_t lanes, size_t steps, unsigned bits, uint8_t *codes);
// One code of a matrix.
uint8_t qkv_mix_code(const uint8_t *matrix, size_t steps, unsigned bits, size_t lane, size_t step);

#endif
