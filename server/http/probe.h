// Asks a daemon by HTTP whether it is ready (server/check_health.h).
#ifndef QKV_SERVER_HTTP_PROBE_H
#define QKV_SERVER_HTTP_PROBE_H

#include <stdbool.h>

#include "engine/base/status.h"

// GET /health/ready at "HOST:PORT" or "unix:PATH", within some seconds. INVALID_ARGUMENT: `address` is none.
// UNAVAILABLE: no answer, or the answer says why it is not ready. With `tls` by HTTPS, whatever certificate is shown:
// nothing secret is sent.
qkv_status qkvi_probe(const char *address, bool tls, qkv_error *error);

#endif
