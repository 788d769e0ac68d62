// A daemon that has not answered, asked in the background until it does: no call waits for it meanwhile (place.h).
//
// The thread that asks has a client of its own, so that it shares nothing with calls. It asks after 100 ms, and then
// after pauses that double, up to 2 s, for a second at most each time.
//
// Threads: as the client's that it belongs to.
#ifndef QKV_CLIENT_C_HEALTH_H
#define QKV_CLIENT_C_HEALTH_H

#include "client/c/client.h"

enum {
  QKVI_HEALTH_MS = 1000,  // of connecting and a health check
  QKVI_HEALTH_PAUSE_MS = 100,
  QKVI_HEALTH_PAUSE_MAX_MS = 2000,
};

// Asks nobody yet. INVALID_ARGUMENT as of qkvi_client_create.
qkv_code qkvi_health_create(const char *target, const qkv_client_options *options, qkvi_health **out,
                            qkv_call_error *error);
// Waits for a check under way. NULL is none.
void qkvi_health_destroy(qkvi_health **health);

// Begins to ask, where nobody does. Without a thread for it nothing happens.
void qkvi_health_watch(qkvi_health *health);
// Whether it is still being asked; `why` then gets what the last check has said, where there was one. False once it
// has answered SERVING.
bool qkvi_health_watching(qkvi_health *health, qkv_call_error *why);

#endif
