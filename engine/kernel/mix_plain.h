// What comes before a product with plain codes (mix.h), in loops over independent lanes: compiled once for every
// rung, with the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_MIX_PLAIN_H
#define QKV_ENGINE_KERNEL_MIX_PLAIN_H

#include "engine/kernel/mix.h"
#include "engine/kernel/plain.h"

// ---- In whole numbers ----

// What codes of up to four bits stand for: (2 * byte - middle) * half_step, bytes up to 127.
typedef struct mix_bytes {
  _Alignas(16) uint8_t bytes[1 << QKV_MIX_INTEGER_BITS];
  int32_t middle;
  float half_step;
} mix_bytes;

static inline void mix_bytes_plain(const qkv_code_matrix *matrix, mix_bytes *table) {
  const unsigned count = 1u << matrix->bits;
  assert(matrix->bits >= 1 && matrix->bits <= QKV_MIX_INTEGER_BITS);
  float largest = 0;
  for (unsigned i = 0; matrix->values != NULL && i < count; i++) largest = fmaxf(largest, fabsf(matrix->values[i]));
  const float inverse = largest > 0 ? QKVI_MIX_VALUE_MOST / largest : 0;
  for (unsigned i = 0; i < 1u << QKV_MIX_INTEGER_BITS; i++) {
    const float value = matrix->values != NULL ? matrix->values[i & (count - 1)] : 0;
    table->bytes[i] = (uint8_t)(matrix->values != NULL ? 64 + (int)lrintf(value * inverse) : (int)(i & (count - 1)));
  }
  table->middle = matrix->values != NULL ? 128 : (int32_t)count - 1;
  table->half_step = matrix->values != NULL ? largest / (2 * QKVI_MIX_VALUE_MOST) : 0.5f;
}

// What factors are multiplied by before they are rounded, and what a whole one counts; 0 where they are nearly 0.
static inline float mix_inverse_plain(float largest, float *scale) {
  const bool any = largest >= QKVI_NUMBER_LEAST;
  *scale = any ? largest / QKVI_LIMIT_1 : 0;
  return any ? QKVI_LIMIT_1 / largest : 0;
}

// ---- Factors ----

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
