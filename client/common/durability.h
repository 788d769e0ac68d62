// Names of durabilities, as options have them.
#ifndef QKV_CLIENT_COMMON_DURABILITY_H
#define QKV_CLIENT_COMMON_DURABILITY_H

#include "engine/base/status.h"

// "memory", "async" or "sync", as in qkv_session_options; NULL is 0, the daemon's. INVALID_ARGUMENT "--durability is
// x, known are memory, async and sync".
qkv_status qkvi_durability_parse(const char *text, int *durability, qkv_error *error);
// "memory" for what is unknown.
const char *qkvi_durability_name(int durability);

#endif
