#include "engine/codec/hadamard.h"

#include "engine/kernel/kernel.h"

void qkv_hadamard_forward(float *rows, size_t n, size_t dim) {
  qkv_kernels_get()->hadamard_forward(rows, n, dim);
}

void qkv_hadamard_inverse(float *rows, size_t n, size_t dim) {
  qkv_kernels_get()->hadamard_inverse(rows, n, dim);
}
