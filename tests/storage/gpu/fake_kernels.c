#include "tests/storage/gpu/fake_kernels.h"

#include "tests/storage/gpu/fake_cuda.h"

static uint32_t *at(uint64_t address) {
  return (uint32_t *)(uintptr_t)address;
}

static void add(const void *arguments, uint32_t blocks, uint32_t threads, uint32_t shared_bytes) {
  const add_arguments *of = arguments;
  (void)threads, (void)shared_bytes;
  for (uint32_t i = 0; i < blocks; i++) at(of->output)[i] = at(of->numbers)[i] + at(of->input)[0];
}

const fake_cuda_kernel fake_cuda_kernels[] = {{"add", add}, {0}};
