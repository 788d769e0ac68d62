// A dense random rotation of SO(d), the same for every session: Gram-Schmidt of a random matrix, the sign of one row
// flipped where the determinant is below 0. O(d^2) a row, where the Hadamard transform (hadamard.h) takes d log d.
//
// And the Gaussian matrix S that signs are taken through to estimate inner products (turboquant_ip.h): entries N(0,
// 1).
//
// Found once for a width; sums, products and square roots in double, so that it is the same on every machine.
//
// Threads: any.
#ifndef QKV_ENGINE_CODEC_ROTATION_H
#define QKV_ENGINE_CODEC_ROTATION_H

#include <stddef.h>

// rows [n][dim] in place, `dim` a multiple of 8 up to QKV_DIM_MAX.
void qkv_rotation_forward(float *rows, size_t n, size_t dim);
void qkv_rotation_inverse(float *rows, size_t n, size_t dim);
// S x, and its transpose.
void qkv_sketch_forward(float *rows, size_t n, size_t dim);
void qkv_sketch_back(float *rows, size_t n, size_t dim);

#endif
