// Randomized Hadamard transform, orthonormal: y = (1/sqrt(n)) H (s o x).
//
// A width that is no power of two is split into blocks that are, largest first (96 = 64 + 32, 80 = 64 + 16,
// 576 = 512 + 64), so nothing is padded. The signs s are fixed by the width's seed below: every page of every
// session uses the same ones, so they need no storage. O(d log d). Source: algorithms of the TurboQuant
// family; signs from splitmix64.
#ifndef QKV_ENGINE_CODEC_HADAMARD_H
#define QKV_ENGINE_CODEC_HADAMARD_H

#include <stddef.h>

// rows [n][dim] in place, `dim` a multiple of 8 up to QKV_DIM_MAX.
void qkv_hadamard_forward(float *rows, size_t n, size_t dim);
void qkv_hadamard_inverse(float *rows, size_t n, size_t dim);

#endif
