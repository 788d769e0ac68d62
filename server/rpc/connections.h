// How many connections there are, in all and of one peer.
//
// gRPC owns the connections and does not report when one has ended. So the table identifies them by their file
// descriptor and the inode of their socket. Where a descriptor is accepted again, its earlier connection has ended.
// Where a limit is reached, entries whose inode has changed are removed.
//
// A peer is an IPv4 address, or the first 64 bits of an IPv6 address: one machine can have all addresses of such a
// prefix. Connections of unix sockets count in the total, and have no peer.
//
// Threads: any; one lock. A count takes fstat() of every connection, and is made ten times a second at most.
#ifndef QKV_SERVER_RPC_CONNECTIONS_H
#define QKV_SERVER_RPC_CONNECTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

typedef struct qkvi_rpc_connections qkvi_rpc_connections;

// `max` connections at once, at least 1; of one peer `peer_max`, 0: half of them. Where the process may open fewer
// files than that, the last 256 of these are kept for other use.
qkvi_rpc_connections *qkvi_rpc_connections_create(size_t max, size_t peer_max);
void qkvi_rpc_connections_destroy(qkvi_rpc_connections **connections);

typedef enum qkvi_rpc_admission {
  QKVI_RPC_ADMITTED,
  QKVI_RPC_TOO_MANY,         // connections in all
  QKVI_RPC_TOO_MANY_OF_PEER  // of this one
} qkvi_rpc_admission;

// Counts the connection `accepted` from `peer_address`, or does not: then the caller closes it.
qkvi_rpc_admission qkvi_rpc_connections_admit(qkvi_rpc_connections *connections, int accepted,
                                              const struct sockaddr *peer_address);

// Connections open now, and refused since the start.
size_t qkvi_rpc_connections_open(qkvi_rpc_connections *connections);
uint64_t qkvi_rpc_connections_refused(qkvi_rpc_connections *connections);

#endif
