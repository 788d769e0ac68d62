// The codec "turboquant": each row's RMS in fp16, and its direction, rotated, by the Lloyd-Max codebook for one
// coordinate of a point on the sphere (sphere.h). 1 to 8 bits. The rotation is a randomized Hadamard transform
// (hadamard.h) or, with the parameter rotation 2, a dense random one.
//
//   block   sized.h; a row's size is its RMS, |row| / sqrt(dim)
//
// A row is rms * R^T values[codes]. Its error is that of the codebook, relative to its squared length; the sphere's
// bound is sqrt(3) pi / 2 * 4^-bits.
//
// Source: Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant: Online Vector Quantization with Near-optimal Distortion
// Rate" (2025), the MSE quantizer.
#ifndef QKV_ENGINE_CODEC_TURBOQUANT_H
#define QKV_ENGINE_CODEC_TURBOQUANT_H

#include "engine/codec/parts.h"

extern const qkv_codec qkvi_codec_turboquant;

// For the codecs that have it in them:
#define QKVI_TURBOQUANT_PARAMETERS 1
extern const qkv_part_codec qkvi_part_turboquant;
extern const qkv_parameter qkvi_turboquant_parameters[QKVI_TURBOQUANT_PARAMETERS];
// A row's codes [dim] and what they were found from: the row over its RMS, rotated. Returns the RMS; 0, and zeros
// turned, of a row of zeros or nearly.
float qkvi_turboquant_code(const qkv_part_coder *coder, const float *row, float *turned, uint8_t *codes);

#endif
