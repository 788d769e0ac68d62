#include "server/watch/sequence.h"

#include <assert.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { HALF_BITS = QKVI_WATCH_SEQUENCE_BITS / 2, ROUNDS = 4 };
#define HALF_MASK ((UINT64_C(1) << HALF_BITS) - 1)

qkvi_watch_key qkvi_watch_key_create(void) {
  qkvi_watch_key key;
  if (getrandom(key.bytes, sizeof key.bytes, 0) != (ssize_t)sizeof key.bytes) abort();
  return key;
}

static uint64_t scramble(const qkvi_watch_key *key, uint64_t round, uint64_t half) {
  uint8_t bytes[sizeof key->bytes + 2 * sizeof(uint64_t)], digest[SHA256_DIGEST_LENGTH];
  uint64_t scrambled;
  memcpy(bytes, key->bytes, sizeof key->bytes);
  memcpy(bytes + sizeof key->bytes, &round, sizeof round);
  memcpy(bytes + sizeof key->bytes + sizeof round, &half, sizeof half);
  (void)SHA256(bytes, sizeof bytes, digest);
  memcpy(&scrambled, digest, sizeof scrambled);
  return scrambled & HALF_MASK;
}

uint64_t qkvi_watch_conceal(const qkvi_watch_key *key, uint64_t number) {
  uint64_t left = number >> HALF_BITS, right = number & HALF_MASK;
  assert(left <= HALF_MASK);
  for (uint64_t round = 0; round < ROUNDS; round++) {
    const uint64_t mixed = left ^ scramble(key, round, right);
    left = right;
    right = mixed;
  }
  return left << HALF_BITS | right;
}

uint64_t qkvi_watch_reveal(const qkvi_watch_key *key, uint64_t concealed) {
  uint64_t left = concealed >> HALF_BITS, right = concealed & HALF_MASK;
  if (left > HALF_MASK) return UINT64_MAX;
  for (uint64_t round = ROUNDS; round-- > 0;) {
    const uint64_t mixed = right ^ scramble(key, round, left);
    right = left;
    left = mixed;
  }
  return left << HALF_BITS | right;
}
