// What `qkvd --check-health` does: a process of its own asks the daemon of the same options whether it is ready.
#ifndef QKV_SERVER_CHECK_HEALTH_H
#define QKV_SERVER_CHECK_HEALTH_H

#include "server/options.h"

// Asks at admin-listen, where there is one, else by grpc.health.v1 at the first address of listen that has no TLS.
// INVALID_ARGUMENT: neither is configured. UNAVAILABLE: no answer within some seconds, or the answer says why it is
// not ready.
qkv_status qkvi_check_health(const qkv_server_options *options, qkv_error *error);

#endif
