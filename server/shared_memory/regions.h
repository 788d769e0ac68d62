// Regions of memory that clients on this machine have registered, so that rows do not cross the socket.
//
//   region    system: [offset, offset + bytes) of a POSIX shared memory object or a memfd, mapped
//             CUDA:   a range of memory on the GPU that the daemon uses, opened there
//             until it is unregistered and the last request that uses it is done
//   name      the client's, of its tenant: a region of another tenant does not exist for it
//
// Registrations end with the process: a client registers again after a restart, and what lies on a GPU after the GPU
// has failed. The client may change the bytes at any time; copy.h and mapping.h say how they are accessed.
//
// Threads: any. Adding waits for the file system of /dev/shm, in memory, or for the GPU's driver.
#ifndef QKV_SERVER_SHARED_MEMORY_REGIONS_H
#define QKV_SERVER_SHARED_MEMORY_REGIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "engine/base/bytes.h"
#include "engine/base/metric.h"
#include "engine/base/name.h"
#include "engine/base/status.h"
#include "proto/wire.h"
#include "server/gpu/append.h"
#include "server/gpu/gpus.h"
#include "server/gpu/rows.h"
#include "server/shared_memory/buffers.h"

typedef struct qkvi_regions qkvi_regions;
typedef struct qkvi_region qkvi_region;

typedef enum qkvi_region_kind { QKVI_REGION_SYSTEM, QKVI_REGION_CUDA } qkvi_region_kind;

// What a client asks for, or has. All is borrowed.
typedef struct qkvi_region_spec {
  qkvi_region_kind kind;
  const char *tenant, *name;
  uint64_t offset, bytes;     // of the region in what is named below
  const char *key;            // system: of the object as for shm_open: "/name" or "name"; "": by a descriptor
  uid_t owner;                // system: whose the object must be
  int64_t device_id;          // CUDA: of the GPU
  const uint8_t *handle;      // CUDA: of QKV_CUDA_IPC_BYTES; NULL: by descriptors
  const int *descriptors;     // they stay the caller's
  size_t descriptor_count;    // of a memfd 1
  uint64_t descriptor_bytes;  // CUDA: of the allocation behind each
} qkvi_region_spec;

// A part of a region, as a tensor or a request names it.
typedef struct qkvi_region_part {
  qkv_bytes region;        // the name, a view into the message; empty: none
  uint64_t offset, bytes;  // from the region's begin
} qkvi_region_part;

typedef enum qkvi_region_counter {
  QKVI_REGION_COUNT,    // gauge: registered
  QKVI_REGION_BYTES,    // gauge: their bytes
  QKVI_REGION_ON_GPU,   // gauge: those of them that lie on the GPU
  QKVI_REGION_READ,     // counter: bytes copied from them
  QKVI_REGION_WRITTEN,  // counter: bytes copied into them
  QKVI_REGION_LOST,     // counter: copies that found an object shorter than it was, or the GPU failed
  QKVI_REGION_COUNTERS
} qkvi_region_counter;

// `count_max`: regions at once, `tenant_max`: of one tenant; `kept_max`: bytes of copies that are kept for the next.
// `gpus` (NULL: none is used) outlives the regions. `counters` are borrowed, in the order above.
qkvi_regions *qkvi_regions_create(size_t count_max, size_t tenant_max, size_t kept_max, const qkvi_gpus *gpus,
                                  qkv_metric_value *const counters[QKVI_REGION_COUNTERS]);
void qkvi_regions_destroy(qkvi_regions **regions);  // NULL inside is none; no request uses one any more

// Maps and names a region. Repeating it (same name, memory and place) is ok, unless it came by descriptors of a GPU;
// one whose GPU has failed since is replaced. INVALID_ARGUMENT names the field: an invalid name or key, no bytes, a
// region that reaches beyond the memory's end, memory that cannot be opened. NOT_FOUND: the object does not exist.
// PERMISSION_DENIED: it is not the property of `owner`, or the daemon may not open it. FAILED_PRECONDITION: no GPU is
// used; UNAVAILABLE: not now. ALREADY_EXISTS: the name is another region's. RESOURCE_EXHAUSTED: `limit-client-shm`,
// or no address space.
qkv_status qkvi_regions_add(qkvi_regions *regions, const qkvi_region_spec *spec, qkv_error *error);
// "": all of the tenant and the kind. NOT_FOUND: it has none of this name.
qkv_status qkvi_regions_remove(qkvi_regions *regions, qkvi_region_kind kind, const char *tenant, const char *name,
                               qkv_error *error);
// Calls fn for each region of the tenant and the kind in the order of their registration, or for that of the name
// alone; inside it nothing else of this module may be called. Of the spec all but handle, descriptors and owner is
// there. NOT_FOUND as above.
qkv_status qkvi_regions_each(qkvi_regions *regions, qkvi_region_kind kind, const char *tenant, const char *name,
                             void (*fn)(void *context, const qkvi_region_spec *spec), void *context,
                             qkv_error *error);

// Whether copies may have to wait for a GPU: not on a completion-queue thread then.
bool qkvi_regions_may_wait(qkvi_regions *regions);
bool qkvi_region_is_on_gpu(const qkvi_region *region);

// A reference to the region that holds the part. `field` is put in front of an error's text. NOT_FOUND:
// "k.shared_memory_region r is not registered". INVALID_ARGUMENT: it reaches beyond the region.
qkv_status qkvi_regions_find(qkvi_regions *regions, const char *tenant, const qkvi_region_part *part,
                             const char *field, qkvi_region **region, qkv_error *error);
void qkvi_region_release(qkvi_region *region);  // NULL is none

// Copies [offset, offset + bytes) of the region, which is inside (asserted). FAILED_PRECONDITION: the object has
// become shorter than the region, or the machine has no memory for it; UNAVAILABLE: the GPU has failed. Then some
// bytes may have been copied.
qkv_status qkvi_region_read(qkvi_region *region, uint64_t offset, void *out, size_t bytes, qkv_error *error);
qkv_status qkvi_region_write(qkvi_region *region, uint64_t offset, const void *data, size_t bytes, qkv_error *error);

// qkvi_region_read() for rows to be appended. Where the region is on a GPU they are copied into `*area` as well,
// which is taken if it is NULL; `*at` gets the address of that copy, or 0: there is none (qkvi_gpu_lent_take).
qkv_status qkvi_region_take(qkvi_region *region, uint64_t offset, void *out, size_t bytes, qkvi_gpu_area **area,
                            qkv_cuda_memory *at, qkv_error *error);
// NULL: the region is not on a GPU.
qkvi_gpu *qkvi_region_gpu(const qkvi_region *region);

// Whether rows of elements of `size` bytes can be made there by the GPU: the region is on one, and `offset` at a
// multiple of it.
bool qkvi_region_takes_rows(const qkvi_region *region, uint64_t offset, size_t size);
// Makes the rows of the parts whose region is not NULL, which take them; `at` of `rows` is the offset in the region,
// `bytes` what is written. UNAVAILABLE: the GPU has failed.
qkv_status qkvi_regions_fetch(qkvi_region *const regions[2], const qkvi_gpu_rows *rows, const uint64_t bytes[2],
                              qkv_error *error);

// Fields 4 to 6 of a Tensor in an answer (tensor.proto), instead of its data: bytes [offset, offset + bytes) of
// `part`.
void qkvi_region_put(qkv_wire_writer *writer, const qkvi_region_part *part, uint64_t offset, uint64_t bytes);

// The buffers that regions are copied to.
qkvi_buffers *qkvi_regions_buffers(qkvi_regions *regions);

#endif
