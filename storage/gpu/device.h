// One GPU: its memory, its kernels, calls under way on it, and copies to it.
//
//   upload    host memory ─► staging (pinned, two halves) ─► memory of the device   one at a time, on its own stream
//   download  the other way round, through the same staging
//   copy      within the device, on the stream of both
//   call      input (pinned, read in place by kernels) ─► launches ─► output (pinned, written by kernels)
//
// Each call has a stream, so that calls overlap. Their number is fixed; a caller that finds none computes elsewhere.
//
// Failure: running out of memory is QKV_RESOURCE_EXHAUSTED and changes nothing. Any other error of the driver, any at
// all in an upload, a download, a copy or a wait, and a call that does not end in time, ends the use of the device,
// as the driver's contexts do not recover: the device is down, logs that once, and every later operation is
// QKV_UNAVAILABLE. Close it and open it again to retry.
//
// Threads: any, all functions but open and close; a call belongs to one thread at a time.
#ifndef QKV_STORAGE_GPU_DEVICE_H
#define QKV_STORAGE_GPU_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "storage/gpu/driver.h"
#include "storage/gpu/heap.h"

#define QKV_GPU_NAME_MAX 64
#define QKV_GPU_KERNELS_MAX 32
#define QKV_GPU_CALLS_MAX 64
#define QKV_GPU_ARGUMENT_BYTES_MAX 4096

typedef struct qkv_gpu_kernel {
  const char *name;       // in the image
  uint32_t shared_bytes;  // given at launch
} qkv_gpu_kernel;

typedef struct qkv_gpu_config {
  const qkv_cuda_driver *driver;  // outlives the device
  const char *device;             // "0", "1", …, or a UUID with or without its prefix "GPU-" or "MIG-"
  uint64_t memory_bytes;          // of blocks, at most; taken as it is needed
  const void *image;              // of all kernels: a fat binary, a cubin, or PTX with a NUL at its end
  const qkv_gpu_kernel *kernels;  // launched by their index
  size_t kernel_count;            // at most QKV_GPU_KERNELS_MAX
  size_t calls;                   // under way at once, 1 to QKV_GPU_CALLS_MAX
  size_t input_bytes;             // of each call
  size_t output_bytes;            // of each call
  size_t staging_bytes;           // of each half
  int64_t timeout_ms;             // of a call and of an upload
} qkv_gpu_config;

typedef struct qkv_gpu_info {
  char name[QKV_GPU_NAME_MAX];
  char uuid[QKV_GPU_NAME_MAX];
  int ordinal;           // its number, as the driver counts them in this process
  int major, minor;      // of its architecture
  int processors;        // multiprocessors
  uint64_t bytes_total;  // of the device, which others use as well
  qkv_gpu_heap_stats heap;
  uint64_t calls;  // that succeeded since it was opened
  uint64_t uploaded_bytes;
  bool up;
  char reason[QKV_ERROR_TEXT_MAX];  // why it is not
} qkv_gpu_info;

typedef struct qkv_gpu_device qkv_gpu_device;
typedef struct qkv_gpu_call qkv_gpu_call;

// The number of the device of this name, as in qkv_gpu_config. NOT_FOUND, UNAVAILABLE.
qkv_status qkv_gpu_resolve(const qkv_cuda_driver *driver, const char *wanted, int *number, qkv_error *error);

// NOT_FOUND where no device has this name, UNAVAILABLE with the driver's error otherwise; *device is NULL then.
qkv_status qkv_gpu_open(const qkv_gpu_config *config, qkv_gpu_device **device, qkv_error *error);
// When no call is under way. A device that is down is reset, so that it can be opened again. Clears *device.
void qkv_gpu_close(qkv_gpu_device **device);

bool qkv_gpu_is_up(qkv_gpu_device *device);
qkv_gpu_info qkv_gpu_read(qkv_gpu_device *device);

// A block, or 0: the budget or the device's memory is used up, or the device is down.
qkv_cuda_memory qkv_gpu_alloc(qkv_gpu_device *device, uint64_t bytes);
// When no call that was submitted reads or writes it any more.
void qkv_gpu_free(qkv_gpu_device *device, qkv_cuda_memory at, uint64_t bytes);

typedef struct qkv_gpu_copy {
  qkv_cuda_memory to;
  const void *from;
  size_t bytes;
} qkv_gpu_copy;
// Returns once all is copied; `from` may be reused then.
qkv_status qkv_gpu_upload(qkv_gpu_device *device, const qkv_gpu_copy *copies, size_t count, qkv_error *error);

typedef struct qkv_gpu_copy_back {
  void *to;
  qkv_cuda_memory from;
  size_t bytes;
} qkv_gpu_copy_back;
// Returns once all is copied. What writes to `from` has ended before.
qkv_status qkv_gpu_download(qkv_gpu_device *device, const qkv_gpu_copy_back *copies, size_t count, qkv_error *error);

// From memory of the device to other memory of it. Returns once all is copied. What writes to `from` has ended
// before.
qkv_status qkv_gpu_copy_within(qkv_gpu_device *device, qkv_cuda_memory to, qkv_cuda_memory from, size_t bytes,
                               qkv_error *error);

// Memory of another process, mapped here. That process may not be trusted: what the driver refuses to open is
// INVALID_ARGUMENT with its error, and the device stays in use, unless it is the device that has failed. The memory
// is read and written by uploads and downloads, and lives until both processes have given it up.
typedef struct qkv_gpu_lent {
  qkv_cuda_memory at;
  uint64_t bytes;
  uint64_t reserved;  // addresses of mapped allocations; 0: it was opened by a handle
} qkv_gpu_lent;
// By a handle of cuIpcGetMemHandle: the whole allocation that it is of.
qkv_status qkv_gpu_open_handle(qkv_gpu_device *device, const qkv_cuda_ipc *handle, qkv_gpu_lent *lent,
                               qkv_error *error);
// By descriptors of cuMemExportToShareableHandle, one for each allocation of `each` bytes: one behind the other. The
// descriptors stay the caller's, and can be closed.
qkv_status qkv_gpu_open_descriptors(qkv_gpu_device *device, const int *descriptors, size_t count, uint64_t each,
                                    qkv_gpu_lent *lent, qkv_error *error);
// When nothing copies from or to it.
void qkv_gpu_close_lent(qkv_gpu_device *device, const qkv_gpu_lent *lent);

// A call, or NULL where all are in use or the device is down. Its output is not cleared.
qkv_gpu_call *qkv_gpu_begin(qkv_gpu_device *device);
void *qkv_gpu_input(qkv_gpu_call *call);
const void *qkv_gpu_output(qkv_gpu_call *call);
// The same memory as kernels see it.
qkv_cuda_memory qkv_gpu_input_address(const qkv_gpu_call *call);
qkv_cuda_memory qkv_gpu_output_address(const qkv_gpu_call *call);
// Launches after earlier kernels of this call. `arguments` is the kernel's one parameter, by value, and copied here.
qkv_status qkv_gpu_launch(qkv_gpu_call *call, size_t kernel, uint32_t blocks, uint32_t threads, const void *arguments,
                          size_t argument_bytes, qkv_error *error);
// Waits until all launched kernels have ended; the output is valid where it returns QKV_OK.
qkv_status qkv_gpu_wait(qkv_gpu_call *call, qkv_error *error);
// Gives the call back, waited for or without a launch.
void qkv_gpu_end(qkv_gpu_call *call);

#endif
