// Nested scalar quantizers for N(0, 1): one set of boundaries, eight depths.
//
// The boundaries of the b-bit quantizer are every other boundary of the (b+1)-bit one, so the first b bits of
// a code are the b-bit code: dropping the lowest bit *is* the next smaller quantizer. Centroids are derived
// again for every depth (conditional means). Depths 1 to 6 are defined as small integers times a step, which is one
// for 4 to 6, so that 8-bit integer kernels compute with exactly the codebook's values; depths 7 and 8 as 16-bit
// integers. Calibrated schedules have up to 6 bits a coordinate where they can (calibrate.h).
//
// Boundaries were chosen to spread the cost of nesting over the depths (tests/engine/codec/codebook_test.c
// prints this table):
//   depth                1        2        3        4        5         6         7         8
//   optimal Lloyd-Max    0.36338  0.11748  0.03454  0.00950  0.002499  0.000640  0.000163  0.0000412
//   nested               0.36338  0.11821  0.03475  0.00957  0.002610  0.000732  0.000171  0.0000437
//   loss                 0        0.6 %    0.6 %    0.8 %    4.4 %     14 %      5.2 %     6.0 %
// (Of that, 4, 5 and 6 bits lose 0.62, 2.4 and 4.3 % by nesting, the rest by rounding to integers below 128.)
#ifndef QKV_ENGINE_CODEC_CODEBOOK_H
#define QKV_ENGINE_CODEC_CODEBOOK_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/schedule.h"

// The code of `x` at QKV_DEPTH_MAX bits, 0 for the lowest cell to 255 for the highest; the code at depth b is
// its top b bits. A value on a boundary belongs to the upper cell.
uint8_t qkv_codebook_code(float x);

// Centroid of a code (its `depth` most significant bits, 0 .. 2^depth - 1); depth 1 .. QKV_DEPTH_MAX.
float qkv_codebook_value(unsigned depth, unsigned code);

// The integers and the step behind them: value = integer * step.
int16_t qkv_codebook_integer(unsigned depth, unsigned code);
float qkv_codebook_step(unsigned depth);

// Expected squared error of a N(0, 1) coordinate at a depth of 0 to QKV_DEPTH_MAX bits.
extern const double qkv_codebook_distortion[QKV_DEPTH_MAX + 1];

#endif
