#include "server/shared_memory/regions.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/shared_memory/copy.h"

struct qkvi_region {
  char tenant[QKV_NAME_MAX + 1], name[QKV_NAME_MAX + 1];
  char key[QKVI_REGION_KEY_MAX + 2];  // with '/'
  uint64_t offset, bytes;             // in the object
  dev_t device;                       // of the object
  ino_t inode;
  uint8_t *mapping;  // from the page of `offset` on
  size_t mapped;
  uint8_t *data;  // the region's first byte
  _Atomic uint64_t references;
  qkv_metric_value *const *counters;
  qkvi_region *next;
};

struct qkvi_regions {
  pthread_mutex_t lock;  // of the list
  qkvi_region *first;    // in the order of their registration
  size_t count, count_max;
  qkvi_buffers *buffers;
  qkv_metric_value *counters[QKVI_REGION_COUNTERS];
};

static _Atomic uint64_t bytes_mapped;

uint64_t qkvi_regions_mapped(void) {
  return atomic_load_explicit(&bytes_mapped, memory_order_relaxed);
}

qkvi_buffers *qkvi_regions_buffers(qkvi_regions *regions) {
  return regions->buffers;
}

qkvi_regions *qkvi_regions_create(size_t count_max, size_t kept_max,
                                  qkv_metric_value *const counters[QKVI_REGION_COUNTERS]) {
  qkvi_regions *regions = calloc(1, sizeof *regions);
  if (regions == NULL) abort();
  const int failed = pthread_mutex_init(&regions->lock, NULL);
  assert(failed == 0);
  (void)failed;
  regions->count_max = count_max;
  regions->buffers = qkvi_buffers_create(kept_max);
  memcpy((void *)regions->counters, (const void *)counters, sizeof regions->counters);
  qkvi_copy_setup();
  return regions;
}

void qkvi_region_release(qkvi_region *region) {
  if (region == NULL || atomic_fetch_sub_explicit(&region->references, 1, memory_order_acq_rel) > 1) return;
  if (region->mapping != NULL) {
    (void)munmap(region->mapping, region->mapped);
    (void)atomic_fetch_sub_explicit(&bytes_mapped, region->mapped, memory_order_relaxed);
  }
  free(region);
}

// Removes the region behind *place from the list. With the lock.
static void take_out(qkvi_regions *regions, qkvi_region **place) {
  qkvi_region *region = *place;
  *place = region->next;
  regions->count--;
  qkv_metric_add(regions->counters[QKVI_REGION_COUNT], -1);
  qkv_metric_add(regions->counters[QKVI_REGION_BYTES], -(int64_t)region->bytes);
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

static qkv_status copy_key(const char *key, qkvi_region *region, qkv_error *error) {
  const char *name = key[0] == '/' ? key + 1 : key;
  const size_t length = strlen(name);
  if (length == 0 || length > QKVI_REGION_KEY_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.key has %zu characters after a '/', allowed are 1 to %d",
                    length, QKVI_REGION_KEY_MAX);
  if (strchr(name, '/') != NULL || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "region.key is %.64s, must be the name of a shared memory object: no path", key);
  region->key[0] = '/';
  memcpy(region->key + 1, name, length + 1);
  return QKV_OK;
}

static qkv_status copy_spec(const qkvi_region_spec *spec, qkvi_region *region, qkv_error *error) {
  QKV_TRY(qkv_name_check(spec->name, "region.name", error));
  QKV_TRY(copy_key(spec->key, region, error));
  if (spec->bytes == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.byte_size is 0, at least 1");
  memcpy(region->name, spec->name, strlen(spec->name) + 1);
  memcpy(region->tenant, spec->tenant, strlen(spec->tenant) + 1);
  region->offset = spec->offset;
  region->bytes = spec->bytes;
  return QKV_OK;
}

// The user id that stands for all users that are unknown in this process's user namespace (systemd's PrivateUsers):
// two of them cannot be distinguished.
static uid_t unknown_user(void) {
  unsigned user = 65534;
  FILE *file = fopen("/proc/sys/kernel/overflowuid", "re");
  if (file == NULL) return user;
  if (fscanf(file, "%u", &user) != 1) user = 65534;  // NOLINT(cert-err34-c): the kernel's text
  (void)fclose(file);
  return user;
}

static qkv_status check_object(const qkvi_region *region, const struct stat *object, uid_t owner, qkv_error *error) {
  if (!S_ISREG(object->st_mode))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.key %.64s is no shared memory object", region->key);
  if (owner == unknown_user())
    return qkv_fail(
        error, QKV_PERMISSION_DENIED,
        "region.key %.64s: the client's user is %u, which stands for every user whom the daemon cannot tell "
        "from others",
        region->key, (unsigned)owner);
  if (object->st_uid != owner)
    return qkv_fail(error, QKV_PERMISSION_DENIED, "region.key %.64s is an object of user %u, the client's is %u",
                    region->key, (unsigned)object->st_uid, (unsigned)owner);
  uint64_t end = 0;
  if (__builtin_add_overflow(region->offset, region->bytes, &end) || end > (uint64_t)object->st_size)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "region.offset is %" PRIu64 " and region.byte_size %" PRIu64 ", the object %.64s has %" PRIu64
                    " bytes",
                    region->offset, region->bytes, region->key, (uint64_t)object->st_size);
  return QKV_OK;
}

static qkv_status map_object(qkvi_region *region, int fd, qkv_error *error) {
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), before = region->offset % page;
  region->mapped = region->bytes + before;
  void *mapping =
      mmap(NULL, region->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(region->offset - before));
  if (mapping == MAP_FAILED)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "region.byte_size is %" PRIu64 ", cannot map so much: %s",
                    region->bytes, strerror(errno));
  (void)atomic_fetch_add_explicit(&bytes_mapped, region->mapped, memory_order_relaxed);
  region->mapping = mapping;
  region->data = region->mapping + before;
  return QKV_OK;
}

static qkv_status open_object(qkvi_region *region, uid_t owner, qkv_error *error) {
  struct stat object;
  // Of shm_open's flags O_NOFOLLOW is glibc's own; O_NONBLOCK: opening never waits, whatever file it is.
  const int fd = shm_open(region->key, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
  if (fd < 0 && errno == ENOENT)
    return qkv_fail(error, QKV_NOT_FOUND, "region.key %.64s: there is no such object", region->key);
  if (fd < 0) {
    const bool denied = errno == EACCES || errno == EPERM;
    return qkv_fail(error, denied ? QKV_PERMISSION_DENIED : QKV_INVALID_ARGUMENT,
                    "region.key %.64s cannot be opened by the daemon, user %u: %s", region->key, (unsigned)geteuid(),
                    strerror(errno));
  }
  const int failed = fstat(fd, &object);
  assert(failed == 0);
  (void)failed;
  region->device = object.st_dev;
  region->inode = object.st_ino;
  qkv_status status = check_object(region, &object, owner, error);
  if (status == QKV_OK) status = map_object(region, fd, error);
  (void)close(fd);
  return status;
}

// The list position of the tenant's region of this name, or where it would be.
static qkvi_region **find_place(qkvi_regions *regions, const char *tenant, const char *name) {
  qkvi_region **place = &regions->first;
  while (*place != NULL && (strcmp((*place)->name, name) != 0 || strcmp((*place)->tenant, tenant) != 0))
    place = &(*place)->next;
  return place;
}

static bool is_same(const qkvi_region *a, const qkvi_region *b) {
  return strcmp(a->key, b->key) == 0 && a->offset == b->offset && a->bytes == b->bytes && a->device == b->device &&
         a->inode == b->inode;
}

// With the lock. The region is taken where `*added`.
static qkv_status put_in(qkvi_regions *regions, qkvi_region *region, bool *added, qkv_error *error) {
  qkvi_region **place = find_place(regions, region->tenant, region->name);
  if (*place != NULL) {
    if (is_same(*place, region)) return QKV_OK;
    return qkv_fail(error, QKV_ALREADY_EXISTS, "region.name %s is another region, of the object %.64s", region->name,
                    (*place)->key);
  }
  if (regions->count == regions->count_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-client-shm is %zu, all are in use", regions->count_max);
  *place = region;
  regions->count++;
  qkv_metric_add(regions->counters[QKVI_REGION_COUNT], 1);
  qkv_metric_add(regions->counters[QKVI_REGION_BYTES], (int64_t)region->bytes);
  *added = true;
  return QKV_OK;
}

qkv_status qkvi_regions_add(qkvi_regions *regions, const qkvi_region_spec *spec, uid_t owner, qkv_error *error) {
  qkvi_region *region = calloc(1, sizeof *region);
  bool added = false;
  if (region == NULL) abort();
  atomic_init(&region->references, 1);
  region->counters = regions->counters;
  qkv_status status = copy_spec(spec, region, error);
  if (status == QKV_OK) status = open_object(region, owner, error);
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

qkv_status qkvi_regions_remove(qkvi_regions *regions, const char *tenant, const char *name, qkv_error *error) {
  const bool all = name[0] == '\0';
  bool found = all;
  (void)pthread_mutex_lock(&regions->lock);
  for (qkvi_region **place = &regions->first; *place != NULL;) {
    const bool meant = strcmp((*place)->tenant, tenant) == 0 && (all || strcmp((*place)->name, name) == 0);
    found |= meant;
    if (meant)
      take_out(regions, place);
    else
      place = &(*place)->next;
  }
  (void)pthread_mutex_unlock(&regions->lock);
  return found ? QKV_OK : not_registered(name, error);
}

qkv_status qkvi_regions_each(qkvi_regions *regions, const char *tenant, const char *name,
                             void (*fn)(void *context, const qkvi_region_spec *spec), void *context,
                             qkv_error *error) {
  const bool all = name[0] == '\0';
  bool found = all;
  (void)pthread_mutex_lock(&regions->lock);
  for (const qkvi_region *region = regions->first; region != NULL; region = region->next) {
    if (strcmp(region->tenant, tenant) != 0 || (!all && strcmp(region->name, name) != 0)) continue;
    found = true;
    fn(context, &(qkvi_region_spec){.tenant = region->tenant,
                                    .name = region->name,
                                    .key = region->key,
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

static qkv_status copied(const qkvi_region *region, bool done, qkvi_region_counter counter, size_t bytes,
                         qkv_error *error) {
  qkv_metric_add(region->counters[done ? counter : QKVI_REGION_LOST], done ? (int64_t)bytes : 1);
  if (done) return QKV_OK;
  return qkv_fail(error, QKV_FAILED_PRECONDITION,
                  "the region %s cannot be reached: the object %.64s has become shorter than it was when it was "
                  "registered, or /dev/shm is full",
                  region->name, region->key);
}

qkv_status qkvi_region_read(qkvi_region *region, uint64_t offset, void *out, size_t bytes, qkv_error *error) {
  assert(offset <= region->bytes && bytes <= region->bytes - offset);
  return copied(region, qkvi_copy_from(out, region->data + offset, bytes), QKVI_REGION_READ, bytes, error);
}

qkv_status qkvi_region_write(qkvi_region *region, uint64_t offset, const void *data, size_t bytes, qkv_error *error) {
  assert(offset <= region->bytes && bytes <= region->bytes - offset);
  return copied(region, qkvi_copy_to(region->data + offset, data, bytes), QKVI_REGION_WRITTEN, bytes, error);
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
