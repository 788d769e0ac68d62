// The budget of a directory that none was given for: the part of its file system that the store can have.
#ifndef QKV_STORAGE_SPACE_H
#define QKV_STORAGE_SPACE_H

#include <stdint.h>

// Bytes of a directory and of the file system that it lies on.
typedef struct qkvi_space {
  uint64_t held;       // lengths of the directory's own files
  uint64_t allocated;  // blocks of these
  uint64_t available;  // blocks that this process may take
  uint64_t whole;      // blocks of the file system; 0: it does not count them
} qkvi_space;

// Returns errno.
int qkvi_space_read(const char *directory, qkvi_space *space);
// `allocated` and `available` but for a tenth, which the journal, the file system's own tables, and what others write
// there take; at least what the directory holds, and four segments. 0: the file system counts no blocks.
uint64_t qkvi_space_budget(const qkvi_space *space, uint64_t segment_bytes);

#endif
