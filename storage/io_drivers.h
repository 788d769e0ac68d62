// What the drivers share. Not for others: see io.h.
#ifndef QKV_STORAGE_IO_DRIVERS_H
#define QKV_STORAGE_IO_DRIVERS_H

#include "storage/io.h"

// Open files of one directory: a request's `file` is a slot here.
typedef struct qkvi_files {
  int directory;  // descriptor
  int *slots;     // descriptors, -1: free
  int count;      // of slots
  bool buffered;  // O_DIRECT was refused
} qkvi_files;

enum { QKVI_FILES_MAX = 1088 };  // slots: the most segments that may be open, and other files

qkv_status qkvi_files_init(qkvi_files *files, const char *directory, qkv_error *error);
void qkvi_files_deinit(qkvi_files *files);

// As those of qkv_io_driver.
int qkvi_files_open(qkvi_files *files, const char *name, bool create, int *file);
void qkvi_files_close(qkvi_files *files, int file);
// For file systems that cannot reserve: the length alone.
int qkvi_files_extend(qkvi_files *files, int file, uint64_t bytes);

// Sets the directory functions of a driver whose self begins with a pointer to its qkvi_files.
void qkvi_files_fill(qkv_io_driver *driver);

// Fills `driver`, but for what it needs of the io, which qkvi_*_attach gives it. Both fail with a reason.
qkv_status qkvi_uring_create(uv_loop_t *loop, const qkv_io_config *config, qkv_io_driver *driver, qkv_error *error);
void qkvi_uring_attach(void *self, qkv_io *io);
qkv_status qkvi_pread_create(uv_loop_t *loop, const qkv_io_config *config, qkv_io_driver *driver, qkv_error *error);
void qkvi_pread_attach(void *self, qkv_io *io);

#endif
