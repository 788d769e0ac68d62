// The codec "turboquant-ip": keys by turboquant's MSE quantizer of one bit less, and of what that leaves of a row r
// the signs of S r, where S is a Gaussian matrix (rotation.h): the inner-product quantizer. Values by turboquant.
// 2 to 8 bits; the parameter rotation is turboquant's.
//
//   block   first  sized.h, bits - 1: as turboquant's
//           signs  sized.h, 1 bit a coordinate of S r, after 0 to 63 zeros that align it; the size is the RMS of r,
//                  |r| / sqrt(dim)
//
// A score is q . first + sqrt(pi / 2) / dim * |r| * (S q) . sign(S r): over the choice of S its mean is q . k, which
// that of an MSE quantizer alone is not, and its variance is (pi / 2 |q|^2 |r|^2 - (q . r)^2) / dim. That is more
// than the bit would leave if the MSE quantizer had it.
//
// Source: Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant" (2025); Zandieh, Daliri, Han, "QJL: 1-Bit Quantized JL
// Transform for KV Cache Quantization with Zero Overhead" (2024).
#ifndef QKV_ENGINE_CODEC_TURBOQUANT_IP_H
#define QKV_ENGINE_CODEC_TURBOQUANT_IP_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_turboquant_ip;

#endif
