// The raw socket: what the machine's own sockets carry, without gRPC, as the limit to compare with.
//
// A peer process answers over a socket of the same kind as the daemon's; one exchange is `up` bytes there and
// `down` bytes back, written and read in one piece, one in flight. Blocking sockets, default buffers.
#ifndef QKV_CLIENT_BENCH_RAW_H
#define QKV_CLIENT_BENCH_RAW_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

typedef struct qkv_raw {
  int socket;
  pid_t peer;
  size_t up, down;
  char *buffer;
} qkv_raw;

// Two connected sockets: over loopback if `tcp`, else a unix socket pair. Blocking.
bool qkv_raw_pair(bool tcp, int pair[2]);
// `tcp`: over loopback, else a unix socket pair.
bool qkv_raw_start(qkv_raw *raw, bool tcp, size_t up, size_t down);
// One exchange; seconds, or a negative number where the peer is gone.
double qkv_raw_exchange(qkv_raw *raw);
void qkv_raw_stop(qkv_raw *raw);

#endif
