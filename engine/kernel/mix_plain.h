// What comes before a product with plain codes (mix.h), in loops over independent lanes: compiled once for every
// rung, with the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_MIX_PLAIN_H
#define QKV_ENGINE_KERNEL_MIX_PLAIN_H

#include "engine/kernel/mix.h"
#include "engine/kernel/plain.h"

static inline QKV_DECLARE_SCALE_FACTORS(scale_factors_plain) {
  for (size_t i = 0; i < n; i++, factors += steps, scaled += steps) {
    plain_floats sums = {0};
    for (size_t s = 0; s < steps; s += PLAIN_WIDTH) {
      plain_floats factor, scale, zero;
      memcpy(&factor, factors + s, sizeof factor);
      memcpy(&scale, scales + s, sizeof scale);
      memcpy(&zero, zeros + s, sizeof zero);
      sums += factor * zero;
      factor *= scale;
      memcpy(scaled + s, &factor, sizeof factor);
    }
    float share = 0;
    for (size_t j = 0; j < PLAIN_WIDTH; j++) share += sums[j];
    shares[i] = share;
  }
}

#endif
