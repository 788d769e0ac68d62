// How long sessions stay: Pin, Touch, and those whose time is over.
#ifndef QKV_SERVER_LIFETIME_H
#define QKV_SERVER_LIFETIME_H

#include "server/daemon.h"

// Closes the sessions that have not been used for their ttl_ms. Waits for the disk where they are there.
void qkvi_lifetime_expire(qkv_daemon *daemon);

#endif
