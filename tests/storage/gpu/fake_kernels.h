// What the fake driver of the storage's tests can run: additions over device memory.
#ifndef QKV_TESTS_STORAGE_GPU_FAKE_KERNELS_H
#define QKV_TESTS_STORAGE_GPU_FAKE_KERNELS_H

#include <stdint.h>

// output[i] = numbers[i] + input[0] for each block i.
typedef struct add_arguments {
  uint64_t numbers, input, output;  // addresses of uint32_t
} add_arguments;

#endif
