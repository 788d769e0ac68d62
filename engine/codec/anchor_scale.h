// What one of an anchor row's whole numbers is worth (anchor.h), for its readers and its writer.
#ifndef QKV_ENGINE_CODEC_ANCHOR_SCALE_H
#define QKV_ENGINE_CODEC_ANCHOR_SCALE_H

#include <stdint.h>

#include "engine/codec/anchor.h"
#include "engine/kernel/kernel.h"

#define QKVI_ANCHOR_WHOLE_MAX 127
#define QKVI_ANCHOR_KIND_BITS 2

// Of a row with a scale byte.
static inline float qkvi_anchor_scale_unit(uint8_t scale) {
  return qkv_gain_value(scale) / QKVI_ANCHOR_WHOLE_MAX;
}

// The scale that the six bits in the directory's byte stand for.
static inline uint8_t qkvi_anchor_unit_scale(unsigned unit) {
  return (uint8_t)(4 * unit + 3);
}

static inline float qkvi_anchor_unit(unsigned unit) {
  return qkvi_anchor_scale_unit(qkvi_anchor_unit_scale(unit));
}

// Of one row.
static inline float qkvi_anchor_row_unit(const qkv_anchor *anchor, size_t index) {
  return anchor->scales ? qkvi_anchor_scale_unit(anchor->scales[index]) : anchor->unit;
}

// The least scale that reaches `largest`: 0 for 0, the highest where none does.
static inline uint8_t qkvi_anchor_scale_for(float largest) {
  if (largest == 0) return 0;
  uint8_t scale = qkvi_gain_nearest(largest);
  while (scale < UINT8_MAX && qkv_gain_value(scale) < largest) scale++;
  return scale;
}

// The least unit that reaches it.
static inline unsigned qkvi_anchor_unit_for(float largest) {
  const uint8_t scale = qkvi_anchor_scale_for(largest);
  return scale <= 3 ? 0 : scale / 4u;
}

#endif
