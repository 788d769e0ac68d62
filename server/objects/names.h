// The checks that requests for many objects share.
#ifndef QKV_SERVER_OBJECTS_NAMES_H
#define QKV_SERVER_OBJECTS_NAMES_H

#include <stddef.h>

#include "server/auth/identity.h"

// `*tenant` becomes the request's (server/auth/identity.h); `said` is its field. INVALID_ARGUMENT: an invalid tenant,
// too many names, or an invalid one.
qkv_status qkvi_object_names_check(const qkv_rpc_call *call, const char *said, char *const *names, size_t count,
                                   const char **tenant, qkv_error *error);

#endif
