// ecsq: entropy-coded scalar quantization, even steps and an entropy code, as a codec of parts. For sessions that are
// fetched: a row's codes have no fixed place, so attention decodes pages first.
//
// Rows go through the head's transform (keys before RoPE, as in the archive frame; without a calibration the
// data-free one, likewise with one that says that the archive codec is refused). Each coordinate times the root of
// its weight is divided by the page's step, which is one for all heads, keys and values, so that all errors count
// alike, and rounded: coordinates that are small compared with it become zeros at almost no cost. Steps are powers of
// 2^(1/16). The page takes about the least step that fits its budget. Rows that are short, and sinks, have finer
// steps, so that no row errs much by its own length; long ones need none, as any code can be written.
//
// A code is coded by a distribution of a fixed ladder (ecsq_ladder.h), which the coordinate's deviation in steps
// names: the row's gain times what the calibration says of the coordinate. Codes are rounded towards the cheaper one
// where the error grows by little. Sources: Sullivan, "Efficient scalar quantization of exponential and Laplacian
// random variables" (1996), for the borders; Duda, "Asymmetric numeral systems" (2014), and Giesen, "Interleaved
// entropy coders" (2014), for the code.
//
//   block, any multiple of 2 bytes
//     0  u16 step: 2^((step - 256) / 16) times that of the head's bits; 511: all rows are zeros, and nothing follows
//     2  u8  eighths of the coordinates that have codes, the first ones      3  u8  the page's middle gain
//     4  u32 state of each of 4 lanes, 2^16 or more
//    20  u16 words that refill states, in the order of reading
//
//   read by lane t % 4 for each of 64 rows: gain (255 kinds, half octaves; 0: a row of zeros), how much finer its
//   steps are read by lane j % 4 for each row that is none of zeros, each coordinate j: the code; of one that escapes
//   its bits' number, its sign and the bits; of one whose deviation is beyond the ladder the low bits that were cut
//
// At the end all states are 2^16 and no word is left.
#ifndef QKV_ENGINE_CODEC_ECSQ_H
#define QKV_ENGINE_CODEC_ECSQ_H

#include "engine/codec/parts.h"

extern const qkv_codec qkvi_codec_ecsq;

#endif
