#include "client/format/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

qkv_status qkv_format_map(const char *path, void **mapping, size_t *bytes, qkv_error *error) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return qkv_fail(error, QKV_NOT_FOUND, "%s: %s", path, strerror(errno));
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) {
    close(fd);
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no file with content", path);
  }
  *bytes = (size_t)info.st_size;
  *mapping = mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE, fd, 0);
  const int reason = errno;
  close(fd);
  if (*mapping == MAP_FAILED) return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", path, strerror(reason));
  return QKV_OK;
}
