// Vectors of 16 bytes: what the kernels for 64-bit ARM have in common. Arithmetic on floats is C's on these vectors.
#ifndef QKV_ENGINE_KERNEL_NEON_VECTORS_H
#define QKV_ENGINE_KERNEL_NEON_VECTORS_H

#if defined(__aarch64__)
#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/schedule.h"

#define INLINE static inline __attribute__((always_inline))

// Before loops whose counts are constants once they are inlined. Sanitizers leave some of them alone, and the
// compiler says so, which is an error.
#ifdef QKV_SANITIZED
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

enum { GROUP = QKV_GROUP_TOKENS };

// Shifts of bytes, down.
INLINE uint8x16_t down(uint8x16_t all, int bits) {
  return vshlq_u8(all, vdupq_n_s8((int8_t)-bits));
}

INLINE uint8x16_t keep(uint8x16_t all, uint8_t mask) {
  return vandq_u8(all, vdupq_n_u8(mask));
}

// ---- Tables of bytes ----

INLINE uint8x16x4_t load_64(const uint8_t *table) {
  return vld1q_u8_x4(table);
}

// 0 for an index beyond the table.
INLINE uint8x16_t look_up_64(uint8x16x4_t table, uint8x16_t index) {
  return vqtbl4q_u8(table, index);
}

typedef struct table_256 {
  uint8x16x4_t quarters[4];
} table_256;

INLINE table_256 load_256(const uint8_t *table) {
  return (table_256){{load_64(table), load_64(table + 64), load_64(table + 128), load_64(table + 192)}};
}

// An index beyond a quarter leaves what was found.
INLINE uint8x16_t look_up_256(const table_256 *table, uint8x16_t index) {
  uint8x16_t found = look_up_64(table->quarters[0], index);
  UNROLL
  for (uint8_t i = 1; i < 4; i++) {
    found = vqtbx4q_u8(found, table->quarters[i], vsubq_u8(index, vdupq_n_u8((uint8_t)(64 * i))));
  }
  return found;
}

// ---- Sums ----

enum { SUM_QUADS = 4, SUM_STEP = 4 * SUM_QUADS };

// Sixteen lanes, added by halves.
INLINE float add_lanes(const float32x4_t sums[SUM_QUADS]) {
  const float32x4_t by_four = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  const float32x2_t by_two = vget_low_f32(by_four) + vget_high_f32(by_four);
  return by_two[0] + by_two[1];
}

#endif
#endif
