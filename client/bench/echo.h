// The bare gRPC call: what gRPC-core by itself carries, without our proto, our loop or our client, as the second
// limit to compare with.
//
// A peer process serves unary calls over a socket of the same kind as the daemon's; one exchange is a request of `up`
// bytes and a response of `down` bytes, both sent from where they lie, one call in flight. As in the benchmark of the
// daemon, the peer does not look at what it gets, and this side reads a value of every cache line.
#ifndef QKV_CLIENT_BENCH_ECHO_H
#define QKV_CLIENT_BENCH_ECHO_H

#include <grpc/grpc.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

typedef struct qkv_echo {
  pid_t peer;
  size_t up, down;
  char *buffer;
  grpc_channel *channel;
  grpc_completion_queue *queue;
} qkv_echo;

// `tcp`: over loopback, else a unix socket pair. Must come before anything in this process uses gRPC, as it forks.
bool qkv_echo_start(qkv_echo *echo, bool tcp, size_t up, size_t down);
// One exchange; seconds, or a negative number where the peer is gone.
double qkv_echo_exchange(qkv_echo *echo);
void qkv_echo_stop(qkv_echo *echo);

#endif
