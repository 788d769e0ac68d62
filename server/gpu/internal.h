// Between the files of server/gpu: gpu.c opens and closes the GPU and has the thread, copies.c decides which ranges
// are resident, calls.c runs kernels, lent.c has memory of other processes, areas.c and encode.c have what
// is appended from it.
#ifndef QKV_SERVER_GPU_INTERNAL_H
#define QKV_SERVER_GPU_INTERNAL_H

#include <pthread.h>
#include <stdlib.h>

#include "engine/cache/page_range.h"
#include "server/gpu/attention.h"
#include "server/gpu/gpu.h"
#include "storage/gpu/device.h"

#define uthash_fatal(message) abort()
#include <uthash.h>

enum {
  QKVI_GPU_CALLS = 8,
  QKVI_GPU_ROWS_DIM_MAX = 256,  // of rows that kernels make: so many fit in the shared memory of all GPUs
  QKVI_GPU_AREAS = 2,           // requests whose rows are coded at once
  QKVI_GPU_FILLS = 2,  // ranges whose images have been copied and are not uploaded yet: some 10 MB each at most
};

typedef enum qkvi_copy_state {
  QKVI_COPY_COUNTED,   // its attends are counted
  QKVI_COPY_UNFIT,     // the kernels do not take its images
  QKVI_COPY_FILLED,    // its images are being copied, wait for the upload, or are being uploaded
  QKVI_COPY_RESIDENT,  // they are on the GPU
} qkvi_copy_state;

// A range that has been attended. All under the lock, but the buffer, which belongs to the thread that fills or
// uploads.
struct qkv_device_copy {
  const qkv_page_range *range;
  qkvi_copy_state state;
  bool forgotten;  // not in the table any more: freed by its last user
  uint32_t users;  // calls that may read it
  uint32_t attends;
  double attention;                   // attention.h: of all its pages
  size_t place;                       // resident: its place in gpu->resident
  uint32_t pages;                     // of which it has images
  uint64_t serials[QKV_RANGE_PAGES];  // of these; unfit: of those that were looked at
  uint64_t places[QKV_RANGE_PAGES];   // offsets of images that lie there as in memory; 0: it is expanded
  qkv_cuda_memory at;                 // resident: the list of addresses, then the images
  uint64_t bytes;
  qkv_account *account;                 // the range's; NULL: none
  uint64_t claimed;                     // of it; 0 once the range is forgotten
  uint8_t *buffer;                      // filled: the same, addresses counted from 0
  struct qkv_device_copy *prev, *next;  // in the queue
  UT_hash_handle hh;
};

typedef struct qkvi_gpu_slot {
  qkv_cuda_memory scratch;
  qkv_gpu_call *call;  // NULL: not in use
  uint64_t began_ns;
} qkvi_gpu_slot;

// Pages of a source that have been coded: results of the kernel, one page after the other.
typedef struct qkvi_gpu_coded {
  const struct qkvi_gpu_source *source;  // NULL: there are none
  const struct qkv_coder *coder;
  uint64_t token, position;  // of the first one's first row
  size_t pages, page_bytes;
  uint8_t *results;
  size_t capacity;
} qkvi_gpu_coded;

// append.h
struct qkvi_gpu_area {
  qkvi_gpu *gpu;
  uint64_t opening;  // of the GPU, with which it ends
  qkv_cuda_memory at;
  uint64_t used;  // of area_bytes
  qkvi_gpu_coded coded;
};

typedef struct qkvi_gpu_area_slot {
  qkv_cuda_memory at;          // 0: there was no memory
  struct qkvi_gpu_area *user;  // NULL: not in use
} qkvi_gpu_area_slot;

struct qkvi_gpu {
  qkv_device device;  // first, so that one leads to the other
  qkvi_gpu_config config;
  qkv_cuda_driver driver;
  qkv_metric_value counts[QKVI_GPU_COUNTERS];
  char *image;  // of kernels, from a file; NULL: the program's
  pthread_t thread;
  pthread_cond_t changed;

  pthread_mutex_t lock;  // of all that follows; `open` is changed by the thread alone
  qkv_gpu_device *open;  // NULL: none is
  bool usable;           // copies of it may be held
  bool stopping;
  char name[QKV_GPU_NAME_MAX], uuid[QKV_GPU_NAME_MAX];  // of the one that was opened last
  int number;                                           // the driver's; -1: it has not been opened yet
  char reason[QKV_ERROR_TEXT_MAX];                      // why it was closed, or not opened
  size_t held;                                          // by callers: the GPU stays open
  uint64_t openings;                                    // how often it was opened
  int64_t full_until_ms;                                // no memory was found: none is looked for before
  qkvi_gpu_lent *given_back;                            // to be closed by the thread
  struct qkv_device_copy *table;
  qkvi_gpu_ranks resident;  // by attention
  struct qkv_device_copy *queue;
  size_t filled;
  bool full;                   // memory was not found, and none has been given back since
  qkv_cuda_memory tables;      // qkv_simt_tables
  qkv_cuda_memory row_tables;  // qkv_simt_encode_tables, which begin with qkv_simt_row_tables
  qkvi_gpu_slot slots[QKVI_GPU_CALLS];
  qkvi_gpu_area_slot areas[QKVI_GPU_AREAS];
  uint64_t scratch_bytes;
};

static inline qkvi_gpu *qkvi_gpu_of(qkv_device *device) {
  return (qkvi_gpu *)device;
}

static inline void qkvi_gpu_count(qkvi_gpu *gpu, qkv_metric_id metric, uint64_t more) {
  qkv_metric_add(&gpu->config.metrics[metric], (int64_t)more);
  qkv_metric_add(&gpu->counts[metric - QKV_METRIC_GPU_HITS], (int64_t)more);
}

// An operation has failed: where the GPU has, it is not used from here on, and the thread is woken.
void qkvi_gpu_failed(qkvi_gpu *gpu);

// While between these the GPU stays open. False: it is not usable.
bool qkvi_gpu_enter(qkvi_gpu *gpu);
void qkvi_gpu_leave(qkvi_gpu *gpu);

// copies.c: hold, release, has and forget of qkv_device; by the thread: uploads what was filled first (the lock is
// held, and released meanwhile); drops what is not in use. Nothing is held when all are dropped, or destroyed.
uint64_t qkvi_gpu_hold(qkv_device *device, const qkv_device_pages *pages, qkv_device_copy **out);
void qkvi_gpu_release(qkv_device *device, qkv_device_copy *copy);
bool qkvi_gpu_has(qkv_device *device, const qkv_page_range *range, uint32_t page, uint64_t serial);
void qkvi_gpu_forget(qkv_device *device, const qkv_page_range *range);
// The copy of a range, which stays until it is released, or NULL; counts nothing. The address of an image that it has
// as it lies in memory, or 0.
qkv_device_copy *qkvi_gpu_find(qkvi_gpu *gpu, const qkv_page_range *range);
qkv_cuda_memory qkvi_gpu_image_of(const qkv_device_copy *copy, uint32_t page, uint64_t serial);
void qkvi_gpu_upload_next(qkvi_gpu *gpu);
void qkvi_gpu_drop_copies(qkvi_gpu *gpu);
void qkvi_gpu_destroy_copies(qkvi_gpu *gpu);

// lent.c, by the thread: closes what was given back last. The lock is held, and released meanwhile.
void qkvi_gpu_close_given_back(qkvi_gpu *gpu);

// areas.c: takes memory for areas as the GPU is opened. An area, or NULL. qkvi_gpu_enter where the area is still what
// it was. Space in it, or 0: `gpu` and `opening` are of what is copied there.
void qkvi_gpu_prepare_areas(qkvi_gpu *gpu, qkv_gpu_device *device);
struct qkvi_gpu_area *qkvi_gpu_area_new(qkvi_gpu *gpu);
bool qkvi_gpu_enter_area(struct qkvi_gpu_area *area);
qkv_cuda_memory qkvi_gpu_area_space(struct qkvi_gpu_area *area, const qkvi_gpu *gpu, uint64_t opening, size_t bytes);

// calls.c: the others; tables and scratch memory, which go with the GPU.
bool qkvi_gpu_begin_call(qkv_device *device, qkv_device_call *call);
bool qkvi_gpu_submit(qkv_device *device, qkv_device_call *call, const qkv_simt_shape *shape,
                     const qkv_device_kernels *kernels);
bool qkvi_gpu_wait_call(qkv_device *device, qkv_device_call *call);
void qkvi_gpu_end_call(qkv_device *device, qkv_device_call *call);
// Runs qkv_simt_encode_rows over jobs of `dim` coordinates at most, and waits.
qkv_status qkvi_gpu_encode_jobs(qkvi_gpu *gpu, const qkv_device_call *call, uint16_t dim,
                                const qkv_simt_encode_args *args, qkv_error *error);
// Runs qkv_simt_decode_rows over jobs of `dim` coordinates at most, and waits. `args` need no tables.
qkv_status qkvi_gpu_decode(qkvi_gpu *gpu, const qkv_device_call *call, uint16_t dim, const qkv_simt_decode_args *args,
                           qkv_error *error);
uint64_t qkvi_gpu_scratch_bytes(uint64_t memory_bytes);
void qkvi_gpu_set_calls(const qkvi_gpu *gpu, qkv_gpu_config *config);
qkv_status qkvi_gpu_prepare_calls(qkvi_gpu *gpu, qkv_gpu_device *device, qkv_error *error);

#endif
