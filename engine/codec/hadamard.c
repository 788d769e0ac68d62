#include "engine/codec/hadamard.h"

#include "engine/kernel/kernel.h"

void qkv_hadamard_forward(float *row, size_t dim) {
  qkv_kernels_get()->hadamard_forward(row, dim);
}

void qkv_hadamard_inverse(float *row, size_t dim) {
  qkv_kernels_get()->hadamard_inverse(row, dim);
}
