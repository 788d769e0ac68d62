#include "server/shared_memory/regions.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "server/shared_memory/copy.h"
#include "server/shared_memory/mapping.h"
#include "storage/gpu/driver.h"

struct qkvi_region {
  qkvi_region_kind kind;
  char tenant[QKV_NAME_MAX + 1], name[QKV_NAME_MAX + 1];
  uint64_t offset, bytes;
  qkvi_mapping mapping;                // system
  qkvi_gpu_lent *lent;                 // CUDA
  int64_t device_id;                   //
  bool by_handle;                      //
  uint8_t handle[QKV_CUDA_IPC_BYTES];  // where it is by one
  _Atomic uint64_t references;
  qkv_metric_value *const *counters;
  qkvi_region *next;
};

struct qkvi_regions {
  pthread_mutex_t lock;  // of the list
  qkvi_region *first;    // in the order of their registration
  size_t count, count_max, tenant_max;
  _Atomic size_t on_gpu;  // of these
  const qkvi_gpus *gpus;
  qkvi_buffers *buffers;
  qkv_metric_value *counters[QKVI_REGION_COUNTERS];
};

qkvi_buffers *qkvi_regions_buffers(qkvi_regions *regions) {
  return regions->buffers;
}

bool qkvi_regions_may_wait(qkvi_regions *regions) {
  return regions != NULL && atomic_load_explicit(&regions->on_gpu, memory_order_relaxed) > 0;
}

bool qkvi_region_is_on_gpu(const qkvi_region *region) {
  return region->kind == QKVI_REGION_CUDA;
}

qkvi_regions *qkvi_regions_create(size_t count_max, size_t tenant_max, size_t kept_max, const qkvi_gpus *gpus,
                                  qkv_metric_value *const counters[QKVI_REGION_COUNTERS]) {
  qkvi_regions *regions = calloc(1, sizeof *regions);
  if (regions == NULL) abort();
  const int failed = pthread_mutex_init(&regions->lock, NULL);
  assert(failed == 0);
  (void)failed;
  regions->count_max = count_max;
  regions->tenant_max = tenant_max;
  regions->gpus = gpus;
  regions->buffers = qkvi_buffers_create(kept_max);
  memcpy((void *)regions->counters, (const void *)counters, sizeof regions->counters);
  qkvi_copy_setup();
  return regions;
}

void qkvi_region_release(qkvi_region *region) {
  if (region == NULL || atomic_fetch_sub_explicit(&region->references, 1, memory_order_acq_rel) > 1) return;
  qkvi_mapping_close(&region->mapping);
  qkvi_gpu_give_back(&region->lent);
  free(region);
}

// Bookkeeping of a region that is taken into the list, or out of it. With the lock.
static void count(qkvi_regions *regions, const qkvi_region *region, int sign) {
  const bool on_gpu = qkvi_region_is_on_gpu(region);
  regions->count += (size_t)sign;
  regions->on_gpu += on_gpu ? (size_t)sign : 0;
  qkv_metric_add(regions->counters[QKVI_REGION_COUNT], sign);
  qkv_metric_add(regions->counters[QKVI_REGION_BYTES], sign * (int64_t)region->bytes);
  qkv_metric_add(regions->counters[QKVI_REGION_ON_GPU], on_gpu ? sign : 0);
}

// Removes the region behind *place from the list. With the lock.
static void take_out(qkvi_regions *regions, qkvi_region **place) {
  qkvi_region *region = *place;
  *place = region->next;
  count(regions, region, -1);
  qkvi_region_release(region);
}

void qkvi_regions_destroy(qkvi_regions **regions) {
  qkvi_regions *old = *regions;
  if (old == NULL) return;
  *regions = NULL;
  while (old->first != NULL) take_out(old, &old->first);
  qkvi_buffers_destroy(&old->buffers);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}

// ---- Register ----

static qkv_status open_system(qkvi_region *region, const qkvi_region_spec *spec, qkv_error *error) {
  if (spec->descriptors == NULL)
    return qkvi_mapping_open(spec->key, spec->offset, spec->bytes, spec->owner, &region->mapping, error);
  if (spec->descriptor_count != 1)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "descriptor stands for %zu, system memory has 1",
                    spec->descriptor_count);
  return qkvi_mapping_of_descriptor(spec->descriptors[0], spec->offset, spec->bytes, &region->mapping, error);
}

static qkv_status open_cuda(const qkvi_regions *regions, qkvi_region *region, const qkvi_region_spec *spec,
                            qkv_error *error) {
  const qkvi_gpu_loan loan = {.device_id = spec->device_id,
                              .handle = spec->handle,
                              .descriptors = spec->descriptors,
                              .descriptor_count = spec->descriptor_count,
                              .descriptor_bytes = spec->descriptor_bytes,
                              .offset = spec->offset,
                              .bytes = spec->bytes};
  if (qkvi_gpus_count(regions->gpus) == 0)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "region.device_id is %" PRId64 ", this daemon uses no GPU (--gpu-memory)", spec->device_id);
  region->device_id = spec->device_id;
  region->by_handle = spec->handle != NULL;
  if (region->by_handle) memcpy(region->handle, spec->handle, sizeof region->handle);
  return qkvi_gpu_lend(qkvi_gpus_numbered(regions->gpus, spec->device_id), &loan, &region->lent, error);
}

static qkv_status open_region(const qkvi_regions *regions, qkvi_region *region, const qkvi_region_spec *spec,
                              qkv_error *error) {
  QKV_TRY(qkv_name_check(spec->name, "region.name", error));
  if (spec->bytes == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.byte_size is 0, at least 1");
  memcpy(region->name, spec->name, strlen(spec->name) + 1);
  memcpy(region->tenant, spec->tenant, strlen(spec->tenant) + 1);
  region->kind = spec->kind;
  region->offset = spec->offset;
  region->bytes = spec->bytes;
  return region->kind == QKVI_REGION_CUDA ? open_cuda(regions, region, spec, error)
                                          : open_system(region, spec, error);
}

// The list position of the tenant's region of this name, or where it would be.
static qkvi_region **find_place(qkvi_regions *regions, const char *tenant, const char *name) {
  qkvi_region **place = &regions->first;
  while (*place != NULL && (strcmp((*place)->name, name) != 0 || strcmp((*place)->tenant, tenant) != 0))
    place = &(*place)->next;
  return place;
}

static bool is_same(const qkvi_region *a, const qkvi_region *b) {
  if (a->kind != b->kind || a->offset != b->offset || a->bytes != b->bytes) return false;
  if (a->kind == QKVI_REGION_CUDA)
    return a->by_handle && b->by_handle && memcmp(a->handle, b->handle, sizeof a->handle) == 0;
  return strcmp(a->mapping.key, b->mapping.key) == 0 && a->mapping.device == b->mapping.device &&
         a->mapping.inode == b->mapping.inode;
}

static qkv_status already_exists(const qkvi_region *other, qkv_error *error) {
  if (other->kind == QKVI_REGION_CUDA)
    return qkv_fail(error, QKV_ALREADY_EXISTS, "region.name %s is another region, on the GPU", other->name);
  return qkv_fail(error, QKV_ALREADY_EXISTS, "region.name %s is another region, of the object %.64s", other->name,
                  qkvi_mapping_name(&other->mapping));
}

static size_t count_of(const qkvi_regions *regions, const char *tenant) {
  size_t count = 0;
  for (const qkvi_region *at = regions->first; at != NULL; at = at->next) count += strcmp(at->tenant, tenant) == 0;
  return count;
}

// With the lock. The region is taken where `*added`.
static qkv_status put_in(qkvi_regions *regions, qkvi_region *region, bool *added, qkv_error *error) {
  qkvi_region **place = find_place(regions, region->tenant, region->name);
  if (*place != NULL && (*place)->lent != NULL && !qkvi_gpu_lent_lives((*place)->lent)) {
    take_out(regions, place);
    place = find_place(regions, region->tenant, region->name);
  }
  if (*place != NULL) return is_same(*place, region) ? QKV_OK : already_exists(*place, error);
  if (regions->count == regions->count_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-client-shm is %zu, all are in use", regions->count_max);
  if (count_of(regions, region->tenant) >= regions->tenant_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-client-shm is %zu, and one tenant may have %zu",
                    regions->count_max, regions->tenant_max);
  *place = region;
  count(regions, region, 1);
  *added = true;
  return QKV_OK;
}

qkv_status qkvi_regions_add(qkvi_regions *regions, const qkvi_region_spec *spec, qkv_error *error) {
  qkvi_region *region = calloc(1, sizeof *region);
  bool added = false;
  if (region == NULL) abort();
  atomic_init(&region->references, 1);
  region->counters = regions->counters;
  qkv_status status = open_region(regions, region, spec, error);
  if (status == QKV_OK) {
    (void)pthread_mutex_lock(&regions->lock);
    status = put_in(regions, region, &added, error);
    (void)pthread_mutex_unlock(&regions->lock);
  }
  if (!added) qkvi_region_release(region);
  return status;
}

// ---- The others ----

static qkv_status not_registered(const char *name, qkv_error *error) {
  return qkv_fail(error, QKV_NOT_FOUND, "the region %s is not registered", name);
}

static bool is_meant(const qkvi_region *region, qkvi_region_kind kind, const char *tenant, const char *name) {
  return region->kind == kind && strcmp(region->tenant, tenant) == 0 &&
         (name[0] == '\0' || strcmp(region->name, name) == 0);
}

qkv_status qkvi_regions_remove(qkvi_regions *regions, qkvi_region_kind kind, const char *tenant, const char *name,
                               qkv_error *error) {
  bool found = name[0] == '\0';
  (void)pthread_mutex_lock(&regions->lock);
  for (qkvi_region **place = &regions->first; *place != NULL;) {
    const bool meant = is_meant(*place, kind, tenant, name);
    found |= meant;
    if (meant)
      take_out(regions, place);
    else
      place = &(*place)->next;
  }
  (void)pthread_mutex_unlock(&regions->lock);
  return found ? QKV_OK : not_registered(name, error);
}

qkv_status qkvi_regions_each(qkvi_regions *regions, qkvi_region_kind kind, const char *tenant, const char *name,
                             void (*fn)(void *context, const qkvi_region_spec *spec), void *context,
                             qkv_error *error) {
  bool found = name[0] == '\0';
  (void)pthread_mutex_lock(&regions->lock);
  for (const qkvi_region *region = regions->first; region != NULL; region = region->next) {
    if (!is_meant(region, kind, tenant, name)) continue;
    found = true;
    fn(context, &(qkvi_region_spec){.kind = kind,
                                    .tenant = region->tenant,
                                    .name = region->name,
                                    .key = region->mapping.key,
                                    .device_id = region->device_id,
                                    .offset = region->offset,
                                    .bytes = region->bytes});
  }
  (void)pthread_mutex_unlock(&regions->lock);
  return found ? QKV_OK : not_registered(name, error);
}

static qkv_status copy_name(qkv_bytes from, const char *field, char *name, qkv_error *error) {
  const bool fits = from.length <= QKV_NAME_MAX;
  if (fits) qkv_bytes_copy(from, 0, from.length, name);
  name[fits ? from.length : 0] = '\0';
  if (fits && strlen(name) == from.length) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "%s.shared_memory_region has %zu bytes, or a NUL among them, at most %d", field, from.length,
                  QKV_NAME_MAX);
}

qkv_status qkvi_regions_find(qkvi_regions *regions, const char *tenant, const qkvi_region_part *part,
                             const char *field, qkvi_region **region, qkv_error *error) {
  char name[QKV_NAME_MAX + 1];
  QKV_TRY(copy_name(part->region, field, name, error));
  (void)pthread_mutex_lock(&regions->lock);
  qkvi_region *found = *find_place(regions, tenant, name);
  if (found != NULL) (void)atomic_fetch_add_explicit(&found->references, 1, memory_order_relaxed);
  (void)pthread_mutex_unlock(&regions->lock);
  if (found == NULL)
    return qkv_fail(error, QKV_NOT_FOUND, "%s.shared_memory_region %s is not registered", field, name);
  if (part->offset > found->bytes || part->bytes > found->bytes - part->offset) {
    (void)qkv_fail(error, QKV_INVALID_ARGUMENT,
                   "%s.shared_memory_offset is %" PRIu64 " and shared_memory_byte_size %" PRIu64
                   ", the region %s has %" PRIu64 " bytes",
                   field, part->offset, part->bytes, name, found->bytes);
    qkvi_region_release(found);
    return error->status;
  }
  *region = found;
  return QKV_OK;
}

// ---- Copies ----

static qkv_status lost(const qkvi_region *region, qkv_error *error) {
  return qkv_fail(error, QKV_FAILED_PRECONDITION,
                  "the region %s cannot be reached: the object %.64s has become shorter than it was when it was "
                  "registered, or /dev/shm is full",
                  region->name, qkvi_mapping_name(&region->mapping));
}

static void count_copy(const qkvi_region *region, bool done, qkvi_region_counter counter, uint64_t bytes) {
  qkv_metric_add(region->counters[done ? counter : QKVI_REGION_LOST], done ? (int64_t)bytes : 1);
}

static qkv_status unreachable(const qkvi_region *region, qkv_error *error) {
  return qkv_error_prefix(error, "the region %s cannot be reached: ", region->name);
}

static qkv_status copied(const qkvi_region *region, qkv_status status, qkvi_region_counter counter, size_t bytes,
                         qkv_error *error) {
  count_copy(region, status == QKV_OK, counter, bytes);
  return status != QKV_OK && region->kind == QKVI_REGION_CUDA ? unreachable(region, error) : status;
}

qkv_status qkvi_region_read(qkvi_region *region, uint64_t offset, void *out, size_t bytes, qkv_error *error) {
  assert(offset <= region->bytes && bytes <= region->bytes - offset);
  qkv_status status = QKV_OK;
  if (region->kind == QKVI_REGION_CUDA)
    status = qkvi_gpu_lent_read(region->lent, offset, out, bytes, error);
  else if (!qkvi_copy_from(out, region->mapping.data + offset, bytes))
    status = lost(region, error);
  return copied(region, status, QKVI_REGION_READ, bytes, error);
}

qkvi_gpu *qkvi_region_gpu(const qkvi_region *region) {
  return region->lent != NULL ? qkvi_gpu_lent_on(region->lent) : NULL;
}

qkv_status qkvi_region_take(qkvi_region *region, uint64_t offset, void *out, size_t bytes, qkvi_gpu_area **area,
                            qkv_cuda_memory *at, qkv_error *error) {
  *at = 0;
  if (region->lent == NULL) return qkvi_region_read(region, offset, out, bytes, error);
  assert(offset <= region->bytes && bytes <= region->bytes - offset);
  if (*area == NULL) *area = qkvi_gpu_area_take(region->lent);
  const qkv_status status = qkvi_gpu_lent_take(region->lent, offset, out, bytes, *area, at, error);
  return copied(region, status, QKVI_REGION_READ, bytes, error);
}

qkv_status qkvi_region_write(qkvi_region *region, uint64_t offset, const void *data, size_t bytes, qkv_error *error) {
  assert(offset <= region->bytes && bytes <= region->bytes - offset);
  qkv_status status = QKV_OK;
  if (region->kind == QKVI_REGION_CUDA)
    status = qkvi_gpu_lent_write(region->lent, offset, data, bytes, error);
  else if (!qkvi_copy_to(region->mapping.data + offset, data, bytes))
    status = lost(region, error);
  return copied(region, status, QKVI_REGION_WRITTEN, bytes, error);
}

bool qkvi_region_takes_rows(const qkvi_region *region, uint64_t offset, size_t size) {
  return region->lent != NULL && qkvi_gpu_lent_is_aligned(region->lent, offset, size);
}

qkv_status qkvi_regions_fetch(qkvi_region *const regions[2], const qkvi_gpu_rows *rows, const uint64_t bytes[2],
                              qkv_error *error) {
  qkvi_gpu_lent *lent[2] = {NULL, NULL};
  for (int part = 0; part < 2; part++) {
    if (regions[part] == NULL) continue;
    assert(rows->to[part].at <= regions[part]->bytes && bytes[part] <= regions[part]->bytes - rows->to[part].at);
    lent[part] = regions[part]->lent;
  }
  const qkv_status status = qkvi_gpu_lent_fetch(lent, rows, error);
  for (int part = 0; part < 2; part++) {
    if (regions[part] != NULL) count_copy(regions[part], status == QKV_OK, QKVI_REGION_WRITTEN, bytes[part]);
  }
  return status == QKV_OK ? status : unreachable(regions[regions[0] != NULL ? 0 : 1], error);
}

void qkvi_region_put(qkv_wire_writer *writer, const qkvi_region_part *part, uint64_t offset, uint64_t bytes) {
  enum { TENSOR_REGION = 4, TENSOR_OFFSET, TENSOR_BYTE_SIZE };
  char name[QKV_NAME_MAX + 1];
  assert(part->region.length <= QKV_NAME_MAX);  // qkvi_regions_find has found it
  qkv_bytes_copy(part->region, 0, part->region.length, name);
  name[part->region.length] = '\0';
  qkv_wire_put_string(writer, TENSOR_REGION, name);
  qkv_wire_put_varint(writer, TENSOR_OFFSET, part->offset + offset);
  qkv_wire_put_varint(writer, TENSOR_BYTE_SIZE, bytes);
}
