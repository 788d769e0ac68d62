// The compiled kernels (attend.h) as the CUDA driver loads them: a fatbin, part of the program where it was built
// with nvcc (QKV_CUDA).
#ifndef QKV_ENGINE_KERNEL_SIMT_IMAGE_H
#define QKV_ENGINE_KERNEL_SIMT_IMAGE_H

#include <stddef.h>

// 64-byte aligned. NULL and 0 bytes: built without.
const void *qkv_simt_image(size_t *bytes);

#endif
