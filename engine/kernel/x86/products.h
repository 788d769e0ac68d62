// Products of 16-bit numbers with sums of 32, and what becomes of them: for dense transforms (kernel/dense.h).
#ifndef QKV_ENGINE_KERNEL_X86_PRODUCTS_H
#define QKV_ENGINE_KERNEL_X86_PRODUCTS_H

#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
#include "engine/kernel/dense.h"

enum {
  ROWS = 4,                      // at once
  ACROSS = LANES == 16 ? 4 : 2,  // vectors of outputs at once: sums fill the registers
  HALVES = QKVI_DENSE_OUTPUTS / LANES,
};

// sum += the products of 16-bit numbers, two to a lane. (On a Zen 5, 64 rows of 128 take 8.4 us with VNNI's vpdpwssd,
// which does one a cycle, and 6.0 us with these two.)
INLINE bytes add_products(bytes sum, bytes a, bytes b) {
#if LANES == 16
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#else
  bytes all = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  // Else gcc takes all products before it adds them, and spills a sum, which then waits for itself.
  __asm__("" : "+x"(all));
  return all;
#endif
}

// As add_products, by VNNI's single instruction where the processor has it. Of a walk's levels (walk.c) every second
// product is taken so: on a Zen 4, 10 pairs of four queries take 185 ns with the two instructions alone, 171 with
// VNNI's alone, 165 by turns.
INLINE bytes add_products_at_once(bytes sum, bytes a, bytes b) {
#if BYTE_DOTS
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return add_products(sum, a, b);
#endif
}

INLINE lanes to_lanes(bytes sum) {
#if LANES == 16
  return (lanes)_mm512_cvtepi32_ps(sum);
#else
  return (lanes)_mm256_cvtepi32_ps(sum);
#endif
}

// The words of vector v of outputs.
INLINE const int16_t *words_of(const qkv_dense *matrix, size_t v) {
  return matrix->words + v / HALVES * QKVI_DENSE_OUTPUTS * matrix->dim + v % HALVES * LANES * 2;
}

// Of a vector that reaches beyond the row's end its lower half.
INLINE void put_outputs(lanes all, size_t c, size_t dim, float *row) {
#if LANES == 16
  if (c + LANES > dim) return store_eight(row + c, (eight)_mm512_castps512_ps256((__m512)all));
#endif
  (void)dim;
  store_lanes(row + c, all);
}

#endif
#endif
