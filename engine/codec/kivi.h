// The codec "kivi": evenly spaced levels between the least and the largest number of a group, keys for each channel
// over groups of tokens, because outliers are channels of keys, values for each token over groups of channels; scale
// and zero point in fp16. 2 to 8 bits. The parameter q_group_size is the size of both groups; the newest tokens,
// which stay exact, are the policy's recent window and the open page.
//
// Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024).
#ifndef QKV_ENGINE_CODEC_KIVI_H
#define QKV_ENGINE_CODEC_KIVI_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_kivi;

#endif
