#include "client/common/file.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static qkv_status cannot_write(const char *path, qkv_error *error) {
  return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", path, strerror(errno));
}

static qkv_status write_partial(const char *partial, const void *bytes, size_t size, qkv_error *error) {
  FILE *file = fopen(partial, "wb");
  if (file == NULL) return cannot_write(partial, error);
  const bool written = fwrite(bytes, 1, size, file) == size;
  if (fclose(file) == 0 && written) return QKV_OK;
  const qkv_status status = cannot_write(partial, error);
  (void)remove(partial);
  return status;
}

qkv_status qkv_file_write(const char *path, const void *bytes, size_t size, qkv_error *error) {
  struct stat info;
  if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is there, and no ordinary file", path);
  }
  const size_t length = strlen(path) + sizeof ".partial";
  char *partial = malloc(length);
  if (partial == NULL) abort();
  (void)snprintf(partial, length, "%s.partial", path);
  qkv_status status = write_partial(partial, bytes, size, error);
  if (status == QKV_OK && rename(partial, path) != 0) {
    status = cannot_write(path, error);
    (void)remove(partial);
  }
  free(partial);
  return status;
}
