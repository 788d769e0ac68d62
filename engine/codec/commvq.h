// The codec "commvq", additive quantization of keys before RoPE and of values. 1 and 2 bits.
//
// Keys: each row less the head's mean, its RMS in fp16; of its direction, groups of four pairs by codebooks of
// entries that commute with RoPE, a round for each bit (commvq_book.h). What attends turns the queries back to the
// page, and each pair's product by the slot.
//
//   block of keys     sizes  [64] fp16
//                     codes  [dim / 8][bits][64], u8: by group and round, index a in the low four bits, b in the high
//
// Values: v = mean + size (s C), s of bits * dim zeros and ones, C fixed for the head, and a mean. Rows of C are
// along the axes of the values' moments (the Hadamard transform without a calibration), as many for each axis as the
// calibration gives it bits: each twice the one before it, and a constant that is left out of the codes. So the
// nearest s is found axis by axis, sums of weights (a S) are products with a matrix of plain codes (kernel/mix.h),
// and C is applied once for all tokens.
//
//   block of values   sizes  [64] fp16
//                     codes  of the axes with 8 bits, of those with 7, ..., 1: a matrix each
//
// Codebooks come from the calibration of the model. Until there is one, those for rows without structure are used,
// and pages say so. A model has to declare its RoPE.
//
// Source: Li et al., "CommVQ: Commutative Vector Quantization for KV Cache Compression" (2025).
#ifndef QKV_ENGINE_CODEC_COMMVQ_H
#define QKV_ENGINE_CODEC_COMMVQ_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_commvq;

#endif
