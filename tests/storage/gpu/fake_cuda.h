// A CUDA driver for tests: a libcuda.so.1 with the functions that qkvd uses, running on the CPU.
//
// The program under test finds it by LD_LIBRARY_PATH and takes it for the real one. It is stricter than a GPU:
//
//   - work in a stream runs when it is waited for, not before, so memory that is freed too early is found;
//   - device memory can be touched only while a stream runs, and not at all once it is freed: an error is a signal;
//   - a function that needs the context current in its thread says so (201) where it is not;
//   - errors other than out of memory (2) and wrong values (1) stay until the device's context is reset;
//   - a stream touches memory of its own device alone.
//
// It has two devices, or as many as FAKE_CUDA_DEVICES says, up to four, each with a context, memory and errors of its
// own.
//
// Memory of other processes is shared memory: a handle of 64 bytes is "ekaf" and the name of an object of shm_open,
// and a descriptor that stands for an allocation is that of a memfd, whose size is a multiple of 64 KiB.
//
// The program that builds the library provides the kernels (fake_cuda_kernels). Threads: any; one lock.
#ifndef QKV_TESTS_STORAGE_GPU_FAKE_CUDA_H
#define QKV_TESTS_STORAGE_GPU_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef struct fake_cuda_kernel {
  const char *name;
  void (*run)(const void *arguments, uint32_t blocks, uint32_t threads, uint32_t shared_bytes);
} fake_cuda_kernel;

// Ends with a row without a name.
extern const fake_cuda_kernel fake_cuda_kernels[];

// What is alive, and how often each function was called.
typedef struct fake_cuda_state {
  size_t memory_blocks, host_blocks, streams, events, modules, contexts;
  uint64_t memory_bytes;
  uint64_t launches;
} fake_cuda_state;

// Found by dlsym in the loaded library, by these names.
typedef void fake_cuda_fail_function(const char *function, unsigned nth, int result);
typedef fake_cuda_state fake_cuda_read_function(void);
typedef unsigned fake_cuda_count_function(const char *function);

// The `nth` call from now on of `function` ("cuMemAlloc") fails with `result`, 0 for none. With FAKE_CUDA_HANG, which
// is for cuEventQuery, it and all that follow are not ready. The variable FAKE_CUDA_FAIL="cuMemAlloc:3:2" does the
// same at the start; with ":1" behind it, to device 1 alone.
#define FAKE_CUDA_HANG (-1)
void fake_cuda_fail(const char *function, unsigned nth, int result);
// The same of calls for one device.
typedef void fake_cuda_fail_on_function(int device, const char *function, unsigned nth, int result);
void fake_cuda_fail_on(int device, const char *function, unsigned nth, int result);
fake_cuda_state fake_cuda_read(void);
// Calls of the function since the library was loaded.
unsigned fake_cuda_count(const char *function);

#endif
