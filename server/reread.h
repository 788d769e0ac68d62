// Files that the daemon reads again when they change: certificates, the auth file, keys of JWTs.
//
// Threads: any; no state.
#ifndef QKV_SERVER_REREAD_H
#define QKV_SERVER_REREAD_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include "engine/base/status.h"

// Whether the file is another one than was `seen`, or is not there.
bool qkvi_file_is_changed(const char *path, const struct stat *seen);

// The whole file, 1 to `bytes_max` bytes, with a NUL behind it, which the caller frees. UNAVAILABLE: it cannot be
// read. INVALID_ARGUMENT: it has nothing, or more.
qkv_status qkvi_file_read(const char *path, size_t bytes_max, char **text, struct stat *seen, qkv_error *error);

#endif
