// The codecs "turboquant-low-rank", "kivi-low-rank", "polarquant-low-rank", "int8-low-rank" and
// "running-u8-low-rank": a page's rows by the codec that the name begins with, and factors U V^T of what that misses,
// added to scores and to sums of values without rebuilding a row (low_rank.h). The parameter `rank` is 1 to 16, by
// default 4; the inner codec's own are theirs, too.
//
//   block   a block of the inner codec, up to a multiple of 64
//           factors (low_rank.h), in the inner codec's code space
//
// Factors take rank (dim + 65) bytes for 64 tokens: 8 rank (1 / 64 + 65 / (64 dim)) bits a coordinate, 1.0 of rank 4
// and dim 64, 0.75 of dim 128. Published figures are of longer runs, where they take less.
//
// Source: Halko, Martinsson, Tropp, "Finding Structure with Randomness" (2011), for the factors.
#ifndef QKV_ENGINE_CODEC_LOW_RANK_STAGE_H
#define QKV_ENGINE_CODEC_LOW_RANK_STAGE_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_turboquant_low_rank, qkvi_codec_kivi_low_rank, qkvi_codec_polarquant_low_rank,
    qkvi_codec_int8_low_rank, qkvi_codec_running_u8_low_rank;

#endif
