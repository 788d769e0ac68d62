#include "engine/base/tensor_internal.h"

#if defined(__F16C__)
#include <immintrin.h>
#include <string.h>

enum { EIGHT = 8, EIGHTS = 4 };  // that are checked together for NaNs

// The processor makes signalling NaNs quiet; we keep them as they are.
static void keep_nans(const uint8_t *in, uint8_t *out) {
  for (size_t i = 0; i < EIGHT; i++) {
    uint16_t half;
    memcpy(&half, in + 2 * i, sizeof half);
    if ((half & 0x7fff) <= 0x7c00) continue;
    const uint32_t bits = (uint32_t)(half & 0x8000) << 16 | 0x7f800000 | (uint32_t)(half & 0x3ff) << 13;
    memcpy(out + 4 * i, &bits, sizeof bits);
  }
}

// Whether some of eight are NaNs, by their magnitudes.
static int any_nan(__m128i magnitudes) {
  return _mm_movemask_epi8(_mm_cmpgt_epi16(magnitudes, _mm_set1_epi16(0x7c00)));
}

size_t qkvi_halves_to_floats(const uint8_t *in, uint8_t *out, size_t n) {
  const __m128i magnitude = _mm_set1_epi16(0x7fff);
  const size_t whole = n / EIGHT * EIGHT;
  size_t i = 0;
  for (; i + EIGHTS * EIGHT <= whole; i += EIGHTS * EIGHT) {
    __m128i largest = _mm_setzero_si128();
    for (size_t j = i; j < i + EIGHTS * EIGHT; j += EIGHT) {
      const __m128i halves = _mm_loadu_si128((const __m128i *)(in + 2 * j));
      _mm256_storeu_ps((float *)(out + 4 * j), _mm256_cvtph_ps(halves));
      largest = _mm_max_epi16(largest, _mm_and_si128(halves, magnitude));
    }
    if (any_nan(largest) == 0) continue;
    for (size_t j = i; j < i + EIGHTS * EIGHT; j += EIGHT) keep_nans(in + 2 * j, out + 4 * j);
  }
  for (; i < whole; i += EIGHT) {
    const __m128i halves = _mm_loadu_si128((const __m128i *)(in + 2 * i));
    _mm256_storeu_ps((float *)(out + 4 * i), _mm256_cvtph_ps(halves));
    if (any_nan(_mm_and_si128(halves, magnitude)) != 0) keep_nans(in + 2 * i, out + 4 * i);
  }
  return whole;
}

size_t qkvi_floats_to_halves(const uint8_t *in, uint8_t *out, size_t n) {
  const size_t whole = n / EIGHT * EIGHT;
  for (size_t i = 0; i < whole; i += EIGHT) {
    const __m256 floats = _mm256_loadu_ps((const float *)(in + 4 * i));
    _mm_storeu_si128((__m128i *)(out + 2 * i), _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
  }
  return whole;
}
#elif !defined(__aarch64__)
size_t qkvi_halves_to_floats(const uint8_t *in, uint8_t *out, size_t n) {
  (void)in, (void)out, (void)n;
  return 0;
}

size_t qkvi_floats_to_halves(const uint8_t *in, uint8_t *out, size_t n) {
  (void)in, (void)out, (void)n;
  return 0;
}
#endif
