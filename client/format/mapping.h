// A whole file in memory, to read.
#ifndef QKV_CLIENT_FORMAT_MAPPING_H
#define QKV_CLIENT_FORMAT_MAPPING_H

#include <stddef.h>

#include "engine/base/status.h"

// NOT_FOUND where it cannot be opened, INVALID_ARGUMENT where it is no regular file or empty, UNAVAILABLE where the
// system does not map it; the text begins with the path. To be unmapped with munmap(*mapping, *bytes).
qkv_status qkv_format_map(const char *path, void **mapping, size_t *bytes, qkv_error *error);

#endif
