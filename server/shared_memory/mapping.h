// System memory of a client in this process's address space. The client may change its bytes at any time, and may
// make an object of shm_open shorter: copy.h says how it is accessed.
//
// Threads: any; a mapping belongs to its owner.
#ifndef QKV_SERVER_SHARED_MEMORY_MAPPING_H
#define QKV_SERVER_SHARED_MEMORY_MAPPING_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "engine/base/status.h"

#define QKVI_MAPPING_KEY_MAX 255  // characters after the '/'

typedef struct qkvi_mapping {
  char key[QKVI_MAPPING_KEY_MAX + 2];  // of the object, with '/'; "": it came by a descriptor
  uint8_t *data;                       // the first byte; NULL: none is mapped
  uint64_t offset, bytes;              // in the object
  uint8_t *pages;                      // from the page of `offset` on
  size_t mapped;                       // of these
  dev_t device;                        // of the object
  ino_t inode;
} qkvi_mapping;

// Maps bytes [offset, offset + bytes) of an object of shm_open. Errors name the fields of a SystemSharedMemoryRegion.
// INVALID_ARGUMENT: a key that is none, bytes beyond the object's end. NOT_FOUND: it does not exist.
// PERMISSION_DENIED: it is not the property of `owner`, or the daemon may not open it. RESOURCE_EXHAUSTED: no address
// space.
qkv_status qkvi_mapping_open(const char *key, uint64_t offset, uint64_t bytes, uid_t owner, qkvi_mapping *mapping,
                             qkv_error *error);
// Maps a descriptor, which the caller keeps: a memfd sealed against shrinking. Errors as of qkvi_mapping_open.
qkv_status qkvi_mapping_of_descriptor(int descriptor, uint64_t offset, uint64_t bytes, qkvi_mapping *mapping,
                                      qkv_error *error);
// Of the object, for errors: "/name", or "behind descriptor".
const char *qkvi_mapping_name(const qkvi_mapping *mapping);
void qkvi_mapping_close(qkvi_mapping *mapping);  // one that is zeroed is ok

// Bytes that the process has mapped: resident or not, they are not the daemon's memory.
uint64_t qkvi_mapping_total(void);

#endif
