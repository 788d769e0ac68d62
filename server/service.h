// The service manager: sockets that it passes, and notifications to it (systemd's protocol; sd_listen_fds(3),
// sd_notify(3)).
//
// libsystemd is loaded at run time, and only where the environment asks for it (LISTEN_FDS, NOTIFY_SOCKET): images
// without it, and daemons without a service manager, do not need it. Where it is asked for and missing the log says
// so, and the daemon serves as without a manager.
//
// Threads: setup comes before any other thread is started. Sockets are taken by one thread at a time; the rest is for
// any thread.
#ifndef QKV_SERVER_SERVICE_H
#define QKV_SERVER_SERVICE_H

#include <stdint.h>
#include <sys/socket.h>

#include "engine/base/status.h"

// Reads the environment, and removes these variables from it. UNAVAILABLE where a descriptor that was passed is not a
// listening stream socket, or where there are too many; names it.
qkv_status qkv_service_setup(qkv_error *error);

// The socket that was passed bound to `address`; -1: none. It is the caller's to close. Not to be shut down: the
// manager goes on listening on it.
int qkv_service_take_socket(const struct sockaddr *address, socklen_t length);

// UNAVAILABLE where a socket that was passed has not been taken; names its address.
qkv_status qkv_service_check_taken(qkv_error *error);

// Notifies the manager, as sd_notify does: "READY=1", "STOPPING=1", "WATCHDOG=1". Does nothing without a manager.
void qkv_service_notify(const char *state);

// How often the manager wants "WATCHDOG=1", with a factor of two to spare; 0: never.
uint64_t qkv_service_watchdog_ms(void);

#endif
