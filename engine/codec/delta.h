// The codecs "turboquant-delta", "int8-delta", "kivi-delta", "polarquant-delta" and "turboquant-outliers-delta":
// delta anchoring. Of a page's rows some are anchors, stored in fp16; each other one is coded, by the codec that the
// name begins with, as its difference to the row before it as that decodes, so that errors do not add up:
//
//   row'_t = row'_(t - 1) + coded(row_t - row'_(t - 1))
//
// Row 0 is an anchor, and so is a row `anchor_every` tokens behind the last one, and one whose difference is more
// than `anchor_threshold` thousandths of its length, as long as there are any left of the page's 64 / anchor_every.
//
//   block   u64      bit t: slot t is an anchor                      at 0
//           sizes    f32 [anchors], RMS of anchors; 0 of unused ones, as is what follows
//           rows     fp16 [anchors][dim], over the size, in the inner codec's code space, at a multiple of 64
//           deltas   a block of the inner codec, at a multiple of 64; anchors' slots are of zeros
//
// Nothing is rebuilt to attend: scores are prefix sums, from an anchor on, of those of the deltas, and values have
// suffix sums of weights, up to the next anchor. Both in floats, as errors of roundings would add up, too.
//
// A codec that codes each row by itself can be in the loop (qkv_part_codec's round_trip), and one whose rows share
// numbers that are found before: those of differences between exact rows, between the same anchors.
#ifndef QKV_ENGINE_CODEC_DELTA_H
#define QKV_ENGINE_CODEC_DELTA_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_turboquant_delta, qkvi_codec_int8_delta, qkvi_codec_kivi_delta,
    qkvi_codec_polarquant_delta, qkvi_codec_turboquant_outliers_delta;

#endif
