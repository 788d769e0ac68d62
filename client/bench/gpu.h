// A GPU that has all pages of a benchmark, for attention in this process: a device (engine/cache/device.h) by the
// CUDA driver. What is attended is uploaded first.
//
// Threads: those that attend, one call at a time.
#ifndef QKV_CLIENT_BENCH_GPU_H
#define QKV_CLIENT_BENCH_GPU_H

#include "engine/base/status.h"
#include "engine/cache/device.h"

// UNAVAILABLE: there is no driver, no GPU, or the program was built without kernels.
qkv_status qkv_bench_gpu_open(qkv_device **device, qkv_error *error);
// Which one it is, and how many ranges of requests it has attended since it was opened.
const char *qkv_bench_gpu_name(const qkv_device *device);
uint64_t qkv_bench_gpu_attended(const qkv_device *device);
// When all layers are gone. Clears *device, which may be NULL.
void qkv_bench_gpu_close(qkv_device **device);

#endif
