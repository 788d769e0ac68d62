// The codecs "turboquant-outliers" and "turboquant-ip-outliers": rows in two sets of channels, each coded by
// turboquant or turboquant-ip as a row of its own, with its own size and rotation. The quarter of the channels that
// are largest on average have a bit more and the others one less: of b bits, 1 to 4, min(b + 1, 4) and max(b - 1, 1);
// keys of turboquant-ip have at least 2. A quarter is rounded to a multiple of 8. The parameter `n_out` is how many
// channels have a bit more, in place of a quarter: a multiple of 8, at most all but 8. Of rows of 8 there is one set,
// with b bits.
//
//   block   a block of the first set (sized.h, turboquant_ip.h), up to a multiple of 64; a block of the other one
//
// Which channels: for each KV head those whose mean square in the calibration is largest, of equal ones the first.
// The two channels that RoPE turns together have theirs averaged, as keys are coded after it. Without a calibration,
// or where it leaves a part data-free, they are the first ones. They are in no page: the calibration that a page
// names gives them.
//
// Source: Zandieh, Daliri, Hadian, Mirrokni, "TurboQuant" (2025), the section on outlier channels.
#ifndef QKV_ENGINE_CODEC_OUTLIER_CHANNELS_H
#define QKV_ENGINE_CODEC_OUTLIER_CHANNELS_H

#include "engine/codec/parts.h"

extern const qkv_codec qkvi_codec_turboquant_outliers, qkvi_codec_turboquant_ip_outliers;

#endif
