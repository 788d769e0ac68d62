#include "engine/kernel/kernel.h"

#include <math.h>

enum { STEPS = 8, GAIN_ONE = 128, GAIN_MIN = 1, GAIN_MAX = 255 };

// 2^(i / 8)
static const float roots[STEPS + 1] = {1.0f,        1.09050773f, 1.18920712f, 1.29683955f, 1.41421356f,
                                       1.54221083f, 1.68179283f, 1.83400809f, 2.0f};

float qkv_gain_value(uint8_t gain) {
  if (gain == 0) return 0;
  return ldexpf(roots[gain % STEPS], gain / STEPS - GAIN_ONE / STEPS);
}

uint8_t qkvi_gain_nearest(float factor) {
  int exponent;
  const float mantissa = 2 * frexpf(factor, &exponent);  // [1, 2)
  int step = 0;
  while (step < STEPS && mantissa > (roots[step] + roots[step + 1]) / 2) step++;
  const int gain = GAIN_ONE + STEPS * (exponent - 1) + step;
  if (gain < GAIN_MIN) return GAIN_MIN;
  return (uint8_t)(gain > GAIN_MAX ? GAIN_MAX : gain);
}

const qkv_kernels *qkv_kernels_get(void) {
  return &qkvi_kernels_reference;
}
