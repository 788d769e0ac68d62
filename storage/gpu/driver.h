// The CUDA driver, loaded at run time.
//
// Nothing links against libcuda: qkv_cuda_load looks for libcuda.so.1 and for each function of one table. The same
// binary runs where there is no GPU, no driver, or one that is too old, and says which. The declarations are our own,
// so that the build needs no CUDA toolkit; they follow the driver's documented ABI on 64-bit Linux.
//
// Threads: any, once loaded. The driver keeps a current context per thread (device.h sets it).
#ifndef QKV_STORAGE_GPU_DRIVER_H
#define QKV_STORAGE_GPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef struct qkv_cuda_context_s *qkv_cuda_context;
typedef struct qkv_cuda_module_s *qkv_cuda_module;
typedef struct qkv_cuda_function_s *qkv_cuda_function;
typedef struct qkv_cuda_stream_s *qkv_cuda_stream;
typedef struct qkv_cuda_event_s *qkv_cuda_event;
typedef uint64_t qkv_cuda_memory;  // an address on the device; 0 is none

typedef struct qkv_cuda_uuid {
  uint8_t bytes[16];
} qkv_cuda_uuid;
#define QKV_CUDA_IPC_BYTES 64
typedef struct qkv_cuda_ipc {
  uint8_t bytes[QKV_CUDA_IPC_BYTES];
} qkv_cuda_ipc;
typedef uint64_t qkv_cuda_allocation;  // memory without an address
typedef struct qkv_cuda_access {
  int place, device, rights;
} qkv_cuda_access;

// Results, attributes and flags by their values in the driver's interface.
enum {
  QKV_CUDA_SUCCESS = 0,
  QKV_CUDA_INVALID_VALUE = 1,
  QKV_CUDA_OUT_OF_MEMORY = 2,
  QKV_CUDA_NOT_READY = 600,
  QKV_CUDA_ATTRIBUTE_PROCESSORS = 16,  // multiprocessors; of a MIG slice, its own
  QKV_CUDA_ATTRIBUTE_MAJOR = 75,
  QKV_CUDA_ATTRIBUTE_MINOR = 76,
  QKV_CUDA_FUNCTION_SHARED_MAX = 8,  // bytes of shared memory given at launch
  QKV_CUDA_STREAM_NON_BLOCKING = 1,
  QKV_CUDA_EVENT_UNTIMED = 2,
  QKV_CUDA_HOST_MAPPED = 2,
  QKV_CUDA_IPC_LAZY_PEER_ACCESS = 1,  // the only way to open a handle
  QKV_CUDA_DESCRIPTOR = 1,            // kind of a handle that is a file descriptor
  QKV_CUDA_PLACE_DEVICE = 1,
  QKV_CUDA_READ_WRITE = 3,
};
// The list that a launch takes its arguments from: one buffer and its size.
#define QKV_CUDA_ARGUMENTS ((void *)1)
#define QKV_CUDA_ARGUMENT_BYTES ((void *)2)
#define QKV_CUDA_ARGUMENTS_END ((void *)0)

// name without "cu", CUDA version of the interface as cuGetProcAddress takes it, parameters. All return a result.
#define QKV_CUDA_FUNCTIONS(X)                                                                                  \
  X(Init, 2000, (unsigned flags))                                                                              \
  X(DriverGetVersion, 2020, (int *version))                                                                    \
  X(GetErrorName, 6000, (int result, const char **name))                                                       \
  X(DeviceGetCount, 2000, (int *count))                                                                        \
  X(DeviceGet, 2000, (int *device, int ordinal))                                                               \
  X(DeviceGetName, 2000, (char *name, int bytes, int device))                                                  \
  X(DeviceGetUuid, 11040, (qkv_cuda_uuid * uuid, int device))                                                  \
  X(DeviceGetAttribute, 2000, (int *value, int attribute, int device))                                         \
  X(DeviceTotalMem, 3020, (size_t * bytes, int device))                                                        \
  X(DevicePrimaryCtxRetain, 7000, (qkv_cuda_context * context, int device))                                    \
  X(DevicePrimaryCtxRelease, 11000, (int device))                                                              \
  X(DevicePrimaryCtxReset, 11000, (int device))                                                                \
  X(CtxSetCurrent, 4000, (qkv_cuda_context context))                                                           \
  X(ModuleLoadData, 2000, (qkv_cuda_module * module, const void *image))                                       \
  X(ModuleUnload, 2000, (qkv_cuda_module module))                                                              \
  X(ModuleGetFunction, 2000, (qkv_cuda_function * function, qkv_cuda_module module, const char *name))         \
  X(FuncSetAttribute, 9000, (qkv_cuda_function function, int attribute, int value))                            \
  X(MemAlloc, 3020, (qkv_cuda_memory * at, size_t bytes))                                                      \
  X(MemFree, 3020, (qkv_cuda_memory at))                                                                       \
  X(MemHostAlloc, 2020, (void **at, size_t bytes, unsigned flags))                                             \
  X(MemFreeHost, 2000, (void *at))                                                                             \
  X(MemHostGetDevicePointer, 3020, (qkv_cuda_memory * at, void *host, unsigned flags))                         \
  X(MemcpyHtoDAsync, 3020, (qkv_cuda_memory to, const void *from, size_t bytes, qkv_cuda_stream stream))       \
  X(MemcpyDtoHAsync, 3020, (void *to, qkv_cuda_memory from, size_t bytes, qkv_cuda_stream stream))             \
  X(MemcpyDtoDAsync, 3020, (qkv_cuda_memory to, qkv_cuda_memory from, size_t bytes, qkv_cuda_stream stream))   \
  X(MemGetAddressRange, 3020, (qkv_cuda_memory * base, size_t * bytes, qkv_cuda_memory at))                    \
  X(IpcOpenMemHandle, 11000, (qkv_cuda_memory * at, qkv_cuda_ipc handle, unsigned flags))                      \
  X(IpcCloseMemHandle, 4010, (qkv_cuda_memory at))                                                             \
  X(MemImportFromShareableHandle, 10020, (qkv_cuda_allocation * allocation, void *handle, int kind))           \
  X(MemRelease, 10020, (qkv_cuda_allocation allocation))                                                       \
  X(MemAddressReserve, 10020,                                                                                  \
    (qkv_cuda_memory * at, size_t bytes, size_t alignment, qkv_cuda_memory wanted, uint64_t flags))            \
  X(MemAddressFree, 10020, (qkv_cuda_memory at, size_t bytes))                                                 \
  X(MemMap, 10020,                                                                                             \
    (qkv_cuda_memory at, size_t bytes, size_t offset, qkv_cuda_allocation allocation, uint64_t flags))         \
  X(MemUnmap, 10020, (qkv_cuda_memory at, size_t bytes))                                                       \
  X(MemSetAccess, 10020, (qkv_cuda_memory at, size_t bytes, const qkv_cuda_access *access, size_t count))      \
  X(LaunchKernel, 4000,                                                                                        \
    (qkv_cuda_function function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,  \
     unsigned threads_y, unsigned threads_z, unsigned shared_bytes, qkv_cuda_stream stream, void **parameters, \
     void **extra))                                                                                            \
  X(StreamCreate, 2000, (qkv_cuda_stream * stream, unsigned flags))                                            \
  X(StreamDestroy, 4000, (qkv_cuda_stream stream))                                                             \
  X(EventCreate, 2000, (qkv_cuda_event * event, unsigned flags))                                               \
  X(EventDestroy, 4000, (qkv_cuda_event event))                                                                \
  X(EventRecord, 2000, (qkv_cuda_event event, qkv_cuda_stream stream))                                         \
  X(EventQuery, 2000, (qkv_cuda_event event))                                                                  \
  X(EventElapsedTime, 2000, (float *ms, qkv_cuda_event from, qkv_cuda_event to))

typedef struct qkv_cuda_driver {
#define X(name, version, parameters) int(*name) parameters;  // NOLINT(bugprone-macro-parentheses)
  QKV_CUDA_FUNCTIONS(X)
#undef X
} qkv_cuda_driver;

// Fills `driver`. UNAVAILABLE with the reason: no library, a stub, a driver without one of the functions, or cuInit's
// error. The library stays loaded.
qkv_status qkv_cuda_load(qkv_cuda_driver *driver, qkv_error *error);
// "CUDA_ERROR_OUT_OF_MEMORY"; "an unknown error" where the driver does not know it.
const char *qkv_cuda_result_name(const qkv_cuda_driver *driver, int result);

#endif
