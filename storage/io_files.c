// The blocking half of both drivers: the files of a directory.
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "storage/io_drivers.h"

qkv_status qkvi_files_init(qkvi_files *files, const char *directory, qkv_error *error) {
  *files = (qkvi_files){.directory = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC), .count = QKVI_FILES_MAX};
  if (files->directory < 0) {
    return qkv_fail(error, errno == EACCES ? QKV_PERMISSION_DENIED : QKV_NOT_FOUND, "%s: %s", directory,
                    strerror(errno));
  }
  files->slots = malloc((size_t)files->count * sizeof *files->slots);
  if (files->slots == NULL) abort();
  for (int i = 0; i < files->count; i++) files->slots[i] = -1;
  return QKV_OK;
}

void qkvi_files_deinit(qkvi_files *files) {
  for (int i = 0; i < files->count; i++) assert(files->slots[i] < 0);
  free(files->slots);
  if (files->directory >= 0) close(files->directory);
  *files = (qkvi_files){.directory = -1};
}

static int open_direct(qkvi_files *files, const char *name, int flags) {
  if (!files->buffered) {
    const int descriptor = openat(files->directory, name, flags | O_DIRECT, 0600);
    if (descriptor >= 0 || errno != EINVAL) return descriptor;
    files->buffered = true;
    qkv_log(QKV_LOG_WARN, "the file system refuses O_DIRECT, storage goes through the page cache", NULL);
  }
  return openat(files->directory, name, flags, 0600);
}

int qkvi_files_open(qkvi_files *files, const char *name, bool create, int *file) {
  int slot = 0;
  while (slot < files->count && files->slots[slot] >= 0) slot++;
  if (slot == files->count) return -EMFILE;
  const int descriptor = open_direct(files, name, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0));
  if (descriptor < 0) return -errno;
  files->slots[slot] = descriptor;
  *file = slot;
  return 0;
}

void qkvi_files_close(qkvi_files *files, int file) {
  close(files->slots[file]);
  files->slots[file] = -1;
}

int qkvi_files_extend(qkvi_files *files, int file, uint64_t bytes) {
  struct stat info;
  if (fstat(files->slots[file], &info) != 0) return -errno;
  if ((uint64_t)info.st_size >= bytes) return 0;
  return ftruncate(files->slots[file], (off_t)bytes) == 0 ? 0 : -errno;
}

// ---- As a driver's functions ----

static qkvi_files *files_of(void *self) {
  return *(qkvi_files **)self;
}

static int open_file(void *self, const char *name, bool create, int *file) {
  return qkvi_files_open(files_of(self), name, create, file);
}

static void close_file(void *self, int file) {
  qkvi_files_close(files_of(self), file);
}

static int size_of(void *self, int file, uint64_t *bytes) {
  struct stat info;
  if (fstat(files_of(self)->slots[file], &info) != 0) return -errno;
  *bytes = (uint64_t)info.st_size;
  return 0;
}

static int truncate_file(void *self, int file, uint64_t bytes) {
  return ftruncate(files_of(self)->slots[file], (off_t)bytes) == 0 ? 0 : -errno;
}

static int rename_file(void *self, const char *from, const char *to) {
  const int directory = files_of(self)->directory;
  return renameat(directory, from, directory, to) == 0 ? 0 : -errno;
}

static int remove_file(void *self, const char *name) {
  return unlinkat(files_of(self)->directory, name, 0) == 0 ? 0 : -errno;
}

static int list_files(void *self, void (*each)(void *context, const char *name), void *context) {
  const int descriptor = openat(files_of(self)->directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return -errno;
  DIR *listing = fdopendir(descriptor);
  if (listing == NULL) {
    const int error = errno;
    close(descriptor);
    return -error;
  }
  for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) each(context, entry->d_name);
  closedir(listing);
  return 0;
}

static int sync_directory(void *self) {
  return fsync(files_of(self)->directory) == 0 ? 0 : -errno;
}

void qkvi_files_fill(qkv_io_driver *driver) {
  driver->open = open_file;
  driver->close = close_file;
  driver->size = size_of;
  driver->truncate = truncate_file;
  driver->rename = rename_file;
  driver->remove = remove_file;
  driver->list = list_files;
  driver->sync_directory = sync_directory;
}
