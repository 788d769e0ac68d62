#include "engine/base/tensor_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

enum { EIGHT = 8 };

static uint16x8_t load_halves(const uint8_t *from) {
  return vreinterpretq_u16_u8(vld1q_u8(from));
}

// Of four, whose bits the processor would change if they are signalling NaNs: we keep them as they are.
static float32x4_t four_floats(uint16x4_t halves) {
  const uint32x4_t all = vmovl_u16(halves);
  const uint32x4_t magnitude = vandq_u32(all, vdupq_n_u32(0x7fff)), nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7c00));
  const uint32x4_t sign = vshlq_n_u32(veorq_u32(all, magnitude), 16);
  const uint32x4_t kept = vorrq_u32(sign, vorrq_u32(vshlq_n_u32(magnitude, 13), vdupq_n_u32(0x7f800000)));
  return vreinterpretq_f32_u32(
      vbslq_u32(nan, kept, vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)))));
}

size_t qkvi_halves_to_floats(const uint8_t *in, uint8_t *out, size_t n) {
  const size_t whole = n / EIGHT * EIGHT;
  for (size_t i = 0; i < whole; i += EIGHT) {
    const uint16x8_t halves = load_halves(in + 2 * i);
    vst1q_u8(out + 4 * i, vreinterpretq_u8_f32(four_floats(vget_low_u16(halves))));
    vst1q_u8(out + 4 * i + 16, vreinterpretq_u8_f32(four_floats(vget_high_u16(halves))));
  }
  return whole;
}

size_t qkvi_floats_to_halves(const uint8_t *in, uint8_t *out, size_t n) {
  const size_t whole = n / EIGHT * EIGHT;
  for (size_t i = 0; i < whole; i += EIGHT) {
    const float32x4_t low = vreinterpretq_f32_u8(vld1q_u8(in + 4 * i));
    const float32x4_t high = vreinterpretq_f32_u8(vld1q_u8(in + 4 * i + 16));
    const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(low), high);
    vst1q_u8(out + 2 * i, vreinterpretq_u8_f16(halves));
  }
  return whole;
}
#endif
