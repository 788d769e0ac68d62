// Whole files that commands write.
#ifndef QKV_CLIENT_COMMON_FILE_H
#define QKV_CLIENT_COMMON_FILE_H

#include <stddef.h>

#include "engine/base/status.h"

// Writes "PATH.partial" and gives it its name when it is complete, so that a file that was there is replaced at once
// or not at all. UNAVAILABLE with the system's reason where it cannot be written, INVALID_ARGUMENT where PATH is
// there and no ordinary file. After a failure nothing is left behind.
qkv_status qkv_file_write(const char *path, const void *bytes, size_t size, qkv_error *error);

#endif
