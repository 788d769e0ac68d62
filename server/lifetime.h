// Lifetime of sessions: Pin, Touch, and expiry.
#ifndef QKV_SERVER_LIFETIME_H
#define QKV_SERVER_LIFETIME_H

#include "server/daemon.h"

// Closes the sessions that have not been used for their ttl_ms. Waits for the disk where they are on it.
void qkvi_lifetime_expire(qkv_daemon *daemon);

#endif
