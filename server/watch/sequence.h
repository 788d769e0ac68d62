// The numbers of changes as clients are told them. Changes are counted over all tenants, so that a number, or the
// difference of two, would tell a client what others do: it is told another one, which this process alone can read.
//
// Pure, but for making a key. Threads: any.
#ifndef QKV_SERVER_WATCH_SEQUENCE_H
#define QKV_SERVER_WATCH_SEQUENCE_H

#include <stdint.h>

enum { QKVI_WATCH_SEQUENCE_BITS = 52 };  // that JSON keeps; numbers are below 2^52

typedef struct qkvi_watch_key {
  uint8_t bytes[16];
} qkvi_watch_key;

qkvi_watch_key qkvi_watch_key_create(void);
// A permutation of the numbers below 2^52, by four rounds of Feistel's network over SHA-256, and the way back. Where
// what a client has sent is no such number the latter is UINT64_MAX.
uint64_t qkvi_watch_conceal(const qkvi_watch_key *key, uint64_t number);
uint64_t qkvi_watch_reveal(const qkvi_watch_key *key, uint64_t concealed);

#endif
