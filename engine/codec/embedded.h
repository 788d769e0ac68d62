// The embedded codec in its data-free form: randomized Hadamard, one gain byte per row, nested scalar codes at
// the same depth for every coordinate. One row of the codec table; see codec.h for what its functions do.
#ifndef QKV_ENGINE_CODEC_EMBEDDED_H
#define QKV_ENGINE_CODEC_EMBEDDED_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_embedded;

#endif
