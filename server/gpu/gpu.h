// The tier above memory: ranges of pages that a GPU has copies of, and their attention computed there (docs/gpu.md).
//
//   attend ─► hold: has the GPU copies of these images? ─ yes ─► kernels read them, partial results come back
//                          │ no: counted; the CPU computes
//                          ▼ from the second attend on
//             images are copied to a buffer ─► thread qkvd-gpu: memory on the GPU, upload ─► the range is resident
//
// The host's images stay, so what a GPU loses nobody misses. A copy is of images by their serials: it is used only
// while the range has just these. It goes when the range is gone, leaves memory or gets other tiers, and when memory
// on the GPU is needed for a range that gets more attention (attention.h).
//
// Failure: memory that runs out leaves ranges with the CPU. Any other error of the driver, or a call that does not
// end, takes the GPU out of use: requests go on with the CPU, and the thread opens it again later, after 10 s first,
// then after twice as long each time, up to 5 minutes.
//
// Threads: any, but for create and destroy, with which no other may run. One lock, a leaf: nothing is waited for
// under it, and no function of the driver is called.
#ifndef QKV_SERVER_GPU_GPU_H
#define QKV_SERVER_GPU_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/device.h"
#include "server/metrics.h"

#define QKVI_GPU_MEMORY_LEAST (INT64_C(16) << 20)  // bytes; 0 is no GPU

typedef struct qkvi_gpu_config {
  uint64_t memory_bytes;      // on the GPU, at most
  const char *device;         // its number or UUID (storage/gpu/device.h)
  const char *kernels;        // file that the kernels are in; NULL: those of this program
  uint32_t admit_attends;     // of a range, before it is uploaded
  int64_t half_life_ms;       // of what is counted of a range's attention, > 0
  int64_t retry_ms;           // after the first failure
  uint64_t area_bytes;        // of memory_bytes, for each of two areas that appended rows are coded in (append.h)
  qkv_metric_value *metrics;  // [QKV_METRIC_COUNT]
} qkvi_gpu_config;

#define QKVI_GPU_ADMIT_ATTENDS 2
#define QKVI_GPU_HALF_LIFE_MS 10000
#define QKVI_GPU_RETRY_MS 10000

typedef struct qkvi_gpu qkvi_gpu;

// Opens the GPU, and says in one line of the log which one is used, or why none is. Strings are borrowed. NULL: there
// is no driver, or there are no kernels. INVALID_ARGUMENT where the file of kernels cannot be read.
qkv_status qkvi_gpu_create(const qkvi_gpu_config *config, qkvi_gpu **out, qkv_error *error);
// When nothing is attended any more and all layers are gone. Clears *gpu.
void qkvi_gpu_destroy(qkvi_gpu **gpu);

// What layers attend with (engine/cache/device.h). Borrowed.
qkv_device *qkvi_gpu_device(qkvi_gpu *gpu);

// Memory of another process on the GPU (lent.c), from `offset` on in what is opened. It ends with the GPU's use:
// where it has failed since, reading and writing are UNAVAILABLE, also once it is open again.
typedef struct qkvi_gpu_lent qkvi_gpu_lent;
typedef struct qkvi_gpu_loan {
  int64_t device_id;          // that the GPU must have
  const uint8_t *handle;      // of QKV_CUDA_IPC_BYTES; NULL: by descriptors
  const int *descriptors;     // borrowed
  size_t descriptor_count;    //
  uint64_t descriptor_bytes;  // of the allocation behind each
  uint64_t offset, bytes;     // bytes > 0
} qkvi_gpu_loan;
// INVALID_ARGUMENT: another device_id, what the driver refuses, or bytes beyond the end of what was opened; errors
// name the fields of CudaSharedMemoryRegisterRequest. UNAVAILABLE: the GPU is not used now.
qkv_status qkvi_gpu_lend(qkvi_gpu *gpu, const qkvi_gpu_loan *loan, qkvi_gpu_lent **out, qkv_error *error);
void qkvi_gpu_give_back(qkvi_gpu_lent **lent);  // NULL inside is none
// Whether the GPU has not failed since.
bool qkvi_gpu_lent_lives(qkvi_gpu_lent *lent);
// Whether `offset` is at a multiple of `size` (1, 2 or 4) on the GPU.
bool qkvi_gpu_lent_is_aligned(const qkvi_gpu_lent *lent, uint64_t offset, size_t size);
// [offset, offset + bytes) is inside. They wait for the GPU, for some seconds where it does not answer.
qkv_status qkvi_gpu_lent_read(qkvi_gpu_lent *lent, uint64_t offset, void *out, size_t bytes, qkv_error *error);
qkv_status qkvi_gpu_lent_write(qkvi_gpu_lent *lent, uint64_t offset, const void *data, size_t bytes,
                               qkv_error *error);

// area_bytes are at most this part of memory_bytes.
#define QKVI_GPU_AREA_PART 16

// What is counted of each GPU, too: these metrics.
#define QKVI_GPU_COUNTERS (QKV_METRIC_GPU_APPEND_HOST_TOKENS - QKV_METRIC_GPU_HITS + 1)

#define QKVI_GPU_TEXT_MAX 64

typedef struct qkvi_gpu_stats {
  const char *device;                                     // as it was named
  char name[QKVI_GPU_TEXT_MAX], uuid[QKVI_GPU_TEXT_MAX];  // the driver's; empty: it has not been opened yet
  char reason[QKV_ERROR_TEXT_MAX];                        // why it is down
  uint64_t bytes_limit, bytes;                            // on the GPU
  uint64_t ranges;                                        // resident
  uint64_t uploaded_bytes;                                // since it was opened
  uint32_t sessions;                                      // whose layers are on it
  int number;                                             // the driver's, in this process; -1: not known
  int64_t counts[QKVI_GPU_COUNTERS];                      // by the metric's number less QKV_METRIC_GPU_HITS
  bool down;
} qkvi_gpu_stats;
qkvi_gpu_stats qkvi_gpu_read(qkvi_gpu *gpu);

#endif
