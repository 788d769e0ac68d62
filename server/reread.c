#include "server/reread.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

bool qkvi_file_is_changed(const char *path, const struct stat *seen) {
  struct stat now;
  return stat(path, &now) != 0 || now.st_ino != seen->st_ino || now.st_dev != seen->st_dev ||
         now.st_size != seen->st_size || now.st_mtim.tv_sec != seen->st_mtim.tv_sec ||
         now.st_mtim.tv_nsec != seen->st_mtim.tv_nsec;
}

qkv_status qkvi_file_read(const char *path, size_t bytes_max, char **text, struct stat *seen, qkv_error *error) {
  FILE *file = fopen(path, "re");
  char *read = calloc(1, bytes_max + 2);
  assert(read != NULL);
  const bool opened = file != NULL && fstat(fileno(file), seen) == 0;
  const size_t bytes = opened ? fread(read, 1, bytes_max + 1, file) : 0;
  if (file != NULL) (void)fclose(file);
  if (opened && bytes > 0 && bytes <= bytes_max) {
    *text = read;
    return QKV_OK;
  }
  free(read);
  if (!opened) return qkv_fail(error, QKV_UNAVAILABLE, "cannot read %.300s: %m", path);
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%.300s has %s, 1 to %zu bytes are allowed", path,
                  bytes == 0 ? "nothing" : "more", bytes_max);
}
