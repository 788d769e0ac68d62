// The codec "pq", product quantization: each row's RMS in fp16, and of its direction, rotated by a Hadamard
// transform, each 8 / bits neighbouring coordinates by the nearest of 256 points, those of the page's calibration
// where there is one (pq_book.h). 1, 2 or 4 bits.
//
//   block   sizes  [64] fp16, |row| / sqrt(dim)
//           codes  [dim * bits / 8][64], u8: sub-vector by sub-vector, the number of its point
//
// Scores are sums of look-ups: query() makes a table of every query's inner products with all points of each
// sub-vector, four queries together. Values add the weights straight to the coordinates of their points: a page has
// 64 tokens and a codebook 256 points, so summing the weights of each point first would be more work and not less.
#ifndef QKV_ENGINE_CODEC_PQ_H
#define QKV_ENGINE_CODEC_PQ_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_pq;

#endif
