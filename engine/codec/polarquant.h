// The codec "polarquant": each channel's mean and standard deviation over the page's tokens in bf16, what is left of
// a row rotated by a Hadamard transform, and its coordinates by the Lloyd-Max codebook for N(0, 1). 1 to 8 bits; the
// scheme is published for 2 to 5. With the parameter row_norms 1, the default, a row is scaled to an RMS of 1 before
// it is quantized: rows differ in size, and the codebook would clip the large ones.
//
//   block   means       [dim] bf16
//           deviations  [dim] bf16
//           rms         [64] fp16, of what is left of a row; not with row_norms 2
//           codes       [lanes][steps], a matrix (parts.h)
//
// Channels of keys differ in scale and lie far from 0: without the means and deviations they spoil each other.
#ifndef QKV_ENGINE_CODEC_POLARQUANT_H
#define QKV_ENGINE_CODEC_POLARQUANT_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_polarquant;

#endif
