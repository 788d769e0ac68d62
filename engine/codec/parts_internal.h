// Between the files of pages of parts: what their coders are.
#ifndef QKV_ENGINE_CODEC_PARTS_INTERNAL_H
#define QKV_ENGINE_CODEC_PARTS_INTERNAL_H

#include "engine/codec/parts.h"
#include "engine/codec/phases.h"

enum { QKVI_PARTS_ALIGN = 64 };  // of blocks, and of tables of heads

typedef struct qkvi_parts_coder {
  qkv_coder base;
  const qkv_phases *phases;  // of models with RoPE
  qkv_part_coder parts[2];
  uint8_t *heads[2];  // [kv_heads] tables of codecs that have them; else NULL
  size_t head_bytes[2];
} qkvi_parts_coder;

#endif
