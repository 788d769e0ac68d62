// The codec "running-u8": a byte a coordinate. Keys have a running range for each channel, which grows when a token
// lies outside of it: the earlier tokens' codes are then rescaled. Values have the range of each token. Scale and
// zero point in fp32. 8 bits.
//
// The range runs over a page: pages do not change once they are coded, and the tokens before them are exact.
#ifndef QKV_ENGINE_CODEC_RUNNING_U8_H
#define QKV_ENGINE_CODEC_RUNNING_U8_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_running_u8;

#endif
