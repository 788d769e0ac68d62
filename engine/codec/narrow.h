// Narrowing: a page is brought to lower tiers by dropping planes.
//
// Codes are prefixes, so the bits that stay do not change: no code is quantized again. Only the gains are: those of
// groups that lose planes are fitted anew, to the rows as they were before. Without that, an error along the row
// stays, which long keys turn into scores: on tinylm, from 4 bits to 1.6 in the attend frame, the KL is 0.0031 with
// the gains as they were, 0.0012 with fitted ones and 0.0017 for rows coded at 1.6 bits. Anchors are copied; low-rank
// factors are fitted anew, too, to the rows as they were, less the codes that are left. What may be dropped is what
// the anchor allows (anchor.h): a part whose rows are a chain keeps its tiers, whatever is asked.
//
// Down in two steps gives the codes of one step, but for gains that may be a step off.
//
// Cost, for 8 heads of 128 + 128 and 64 tokens: 100 to 145 us (narrow_test prints it), most of it for the gains.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_NARROW_H
#define QKV_ENGINE_CODEC_NARROW_H

#include "engine/codec/embedded.h"

#define QKV_GAIN_OCTAVE 8  // steps of a gain byte; one that is fitted anew moves by less

extern const qkv_codec_planes qkvi_embedded_planes;

#endif
