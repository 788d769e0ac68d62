// What the product of two of a low-rank section's whole numbers is worth (low_rank.h).
#ifndef QKV_ENGINE_CODEC_LOW_RANK_SCALE_H
#define QKV_ENGINE_CODEC_LOW_RANK_SCALE_H

#include <stdint.h>

#include "engine/kernel/kernel.h"

#define QKVI_LOW_RANK_WHOLE_MAX 127

static inline float qkvi_low_rank_unit(uint8_t scale) {
  return qkv_gain_value(scale) / (QKVI_LOW_RANK_WHOLE_MAX * QKVI_LOW_RANK_WHOLE_MAX);
}

#endif
