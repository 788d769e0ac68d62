// What peers owe: points of control frames (http2_frames.h) that were left when their connections ended. A new
// connection of the peer begins with them, so a client that floods gains nothing by connecting again.
//
// A peer is an IPv4 address, or the first 64 bits of an IPv6 address. Peers have one of 4096 places each, by a hash
// that a key of the process goes into; those of one place share what they owe.
//
// Threads: any; one lock.
#ifndef QKV_SERVER_RPC_DEBTS_H
#define QKV_SERVER_RPC_DEBTS_H

#include <stdint.h>
#include <sys/socket.h>

// A peer's place; -1: a unix socket, whose clients owe nothing.
int32_t qkvi_debts_place(const struct sockaddr *peer);

// What is owed now, where `points_s` drain in a second. `now_ns`: on any clock.
uint64_t qkvi_debts_owed(int32_t place, uint64_t points_s, uint64_t now_ns);

// A connection has ended that had so many points: not less is owed.
void qkvi_debts_raise(int32_t place, uint64_t points, uint64_t points_s, uint64_t now_ns);

#endif
