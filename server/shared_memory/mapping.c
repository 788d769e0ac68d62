#include "server/shared_memory/mapping.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static _Atomic uint64_t bytes_mapped;

uint64_t qkvi_mapping_total(void) {
  return atomic_load_explicit(&bytes_mapped, memory_order_relaxed);
}

const char *qkvi_mapping_name(const qkvi_mapping *mapping) {
  return mapping->key[0] != '\0' ? mapping->key : "behind descriptor";
}

void qkvi_mapping_close(qkvi_mapping *mapping) {
  if (mapping->pages != NULL) {
    (void)munmap(mapping->pages, mapping->mapped);
    (void)atomic_fetch_sub_explicit(&bytes_mapped, mapping->mapped, memory_order_relaxed);
  }
  *mapping = (qkvi_mapping){0};
}

static qkv_status check_extent(const qkvi_mapping *mapping, const struct stat *object, qkv_error *error) {
  uint64_t end = 0;
  if (!__builtin_add_overflow(mapping->offset, mapping->bytes, &end) && end <= (uint64_t)object->st_size)
    return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "region.offset is %" PRIu64 " and region.byte_size %" PRIu64 ", the object %.64s has %" PRIu64
                  " bytes",
                  mapping->offset, mapping->bytes, qkvi_mapping_name(mapping), (uint64_t)object->st_size);
}

static qkv_status map(qkvi_mapping *mapping, int descriptor, const struct stat *object, qkv_error *error) {
  const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), before = mapping->offset % page;
  QKV_TRY(check_extent(mapping, object, error));
  mapping->device = object->st_dev;
  mapping->inode = object->st_ino;
  mapping->mapped = mapping->bytes + before;
  void *pages =
      mmap(NULL, mapping->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, (off_t)(mapping->offset - before));
  if (pages == MAP_FAILED) {
    const bool denied = errno == EACCES || errno == EPERM;  // of a descriptor that is not for reading and writing
    return qkv_fail(error, denied ? QKV_PERMISSION_DENIED : QKV_RESOURCE_EXHAUSTED,
                    "%" PRIu64 " bytes of the region cannot be mapped: %s", mapping->bytes, strerror(errno));
  }
  (void)atomic_fetch_add_explicit(&bytes_mapped, mapping->mapped, memory_order_relaxed);
  mapping->pages = pages;
  mapping->data = mapping->pages + before;
  return QKV_OK;
}

// ---- By a key ----

static qkv_status copy_key(const char *key, qkvi_mapping *mapping, qkv_error *error) {
  const char *name = key[0] == '/' ? key + 1 : key;
  const size_t length = strlen(name);
  if (length == 0 || length > QKVI_MAPPING_KEY_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.key has %zu characters after a '/', allowed are 1 to %d",
                    length, QKVI_MAPPING_KEY_MAX);
  if (strchr(name, '/') != NULL || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "region.key is %.64s, must be the name of a shared memory object: no path", key);
  mapping->key[0] = '/';
  memcpy(mapping->key + 1, name, length + 1);
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

static qkv_status check_object(const qkvi_mapping *mapping, const struct stat *object, uid_t owner,
                               qkv_error *error) {
  if (!S_ISREG(object->st_mode))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.key %.64s is no shared memory object", mapping->key);
  if (owner == unknown_user())
    return qkv_fail(
        error, QKV_PERMISSION_DENIED,
        "region.key %.64s: the client's user is %u, which stands for every user whom the daemon cannot tell "
        "from others",
        mapping->key, (unsigned)owner);
  if (object->st_uid == owner) return QKV_OK;
  return qkv_fail(error, QKV_PERMISSION_DENIED, "region.key %.64s is an object of user %u, the client's is %u",
                  mapping->key, (unsigned)object->st_uid, (unsigned)owner);
}

qkv_status qkvi_mapping_open(const char *key, uint64_t offset, uint64_t bytes, uid_t owner, qkvi_mapping *mapping,
                             qkv_error *error) {
  struct stat object = {0};
  *mapping = (qkvi_mapping){.offset = offset, .bytes = bytes};
  QKV_TRY(copy_key(key, mapping, error));
  // Of shm_open's flags O_NOFOLLOW is glibc's own; O_NONBLOCK: opening never waits, whatever file it is.
  const int descriptor = shm_open(mapping->key, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
  if (descriptor < 0 && errno == ENOENT)
    return qkv_fail(error, QKV_NOT_FOUND, "region.key %.64s: there is no such object", mapping->key);
  if (descriptor < 0) {
    const bool denied = errno == EACCES || errno == EPERM;
    return qkv_fail(error, denied ? QKV_PERMISSION_DENIED : QKV_INVALID_ARGUMENT,
                    "region.key %.64s cannot be opened by the daemon, user %u: %s", mapping->key, (unsigned)geteuid(),
                    strerror(errno));
  }
  const int failed = fstat(descriptor, &object);
  assert(failed == 0);
  (void)failed;
  qkv_status status = check_object(mapping, &object, owner, error);
  if (status == QKV_OK) status = map(mapping, descriptor, &object, error);
  (void)close(descriptor);
  return status;
}

// ---- By a descriptor ----

// Seals are asked for first: of a file that is no memfd that waits for nobody, whereas its size may come from a file
// system that the client serves itself.
static qkv_status check_memfd(int descriptor, struct stat *object, qkv_error *error) {
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "descriptor is no memfd that can be sealed: %s", strerror(errno));
  if ((seals & F_SEAL_SHRINK) == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "descriptor is a memfd without the seal F_SEAL_SHRINK: it could be made shorter");
  const int failed = fstat(descriptor, object);
  assert(failed == 0);
  (void)failed;
  return QKV_OK;
}

qkv_status qkvi_mapping_of_descriptor(int descriptor, uint64_t offset, uint64_t bytes, qkvi_mapping *mapping,
                                      qkv_error *error) {
  struct stat object = {0};
  *mapping = (qkvi_mapping){.offset = offset, .bytes = bytes};
  QKV_TRY(check_memfd(descriptor, &object, error));
  return map(mapping, descriptor, &object, error);
}
