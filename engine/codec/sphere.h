// Lloyd-Max codebooks for one coordinate of a uniform point on the sphere of a width d, times sqrt(d), so that its
// variance is 1: the density f(u) ~ (1 - u^2 / d)^((d - 3) / 2), which is what rotated rows have. QKV_SPHERE_GAUSSIAN
// stands for N(0, 1).
//
// Found once for a width and a number of bits: Lloyd's iteration from the cells of equal integral of f^(1/3), which
// are optimal for many bits, on the positive half alone, so that the codebook is exactly symmetric. Everything is
// sums, products, quotients and square roots in double without contraction, so that it is the same on every machine.
//
// Source: Zandieh et al., "TurboQuant" (2025); Lloyd (1982), Max (1960); Panter and Dite (1951).
//
// Threads: any.
#ifndef QKV_ENGINE_CODEC_SPHERE_H
#define QKV_ENGINE_CODEC_SPHERE_H

#include <stddef.h>
#include <stdint.h>

#define QKV_SPHERE_GAUSSIAN 0

typedef struct qkv_sphere {
  float values[256];  // first; [1 << bits], ascending; values[i] == -values[last - i]
  float bounds[255];  // between neighbours
  double distortion;  // squared error, of variance 1
} qkv_sphere;

// `dim` 8 to QKV_DIM_MAX in steps of 8, or QKV_SPHERE_GAUSSIAN; bits 1 to 8. Stays for ever.
const qkv_sphere *qkv_sphere_get(uint16_t dim, unsigned bits);

// The code of a number: how many bounds it is above.
static inline uint8_t qkv_sphere_code(const qkv_sphere *sphere, unsigned bits, float x) {
  unsigned code = 0;
  for (unsigned half = 1u << (bits - 1); half > 0; half /= 2) {
    if (x > sphere->bounds[code + half - 1]) code += half;
  }
  return (uint8_t)code;
}

#endif
