// The codec "int8": a byte a coordinate, evenly spaced from minus to plus the largest of its token, whose scale is
// kept in fp16. The example of docs/adding-a-codec.md.
//
//   block   sized.h; a row's size is its largest coordinate / 127, a code's value its number - 128
#ifndef QKV_ENGINE_CODEC_INT8_H
#define QKV_ENGINE_CODEC_INT8_H

#include "engine/codec/codec.h"

extern const qkv_codec qkvi_codec_int8;

#endif
