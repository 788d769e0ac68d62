// Targets, and sockets connected to them.
//
//   unix:PATH      a stream socket in the file system
//   HOST:PORT      TCP; HOST is a name, an IPv4 address or an IPv6 address in [ ]
#ifndef QKV_CLIENT_C_SOCKET_H
#define QKV_CLIENT_C_SOCKET_H

#include <netdb.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/un.h>

#include "engine/base/status.h"

typedef struct qkvi_target {
  bool is_unix;
  char path[sizeof((struct sockaddr_un *)0)->sun_path];
  char host[NI_MAXHOST], port[8];
} qkvi_target;

// INVALID_ARGUMENT for anything else, saying what is allowed.
qkv_status qkvi_target_parse(const char *text, qkvi_target *target, qkv_error *error);

// A connected, non-blocking socket into *fd, within `timeout_ms`, the time to resolve a name included. UNAVAILABLE
// with the system's reason; *retry says whether waiting may help (nobody listens yet, the name is not resolved yet)
// or not (no permission, unknown host).
qkv_status qkvi_socket_connect(const qkvi_target *target, int64_t timeout_ms, int *fd, bool *retry, qkv_error *error);

// Whether the other end has closed. One system call.
bool qkvi_socket_hung_up(int fd);

#endif
