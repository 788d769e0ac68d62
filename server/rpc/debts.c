#include "server/rpc/debts.h"

#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { PLACES = 4096, PREFIX_BYTES = 8 };

static struct {
  uint64_t points, ns;  // so many at that time
} debts[PLACES];
static uint64_t key;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_key(void) {
  if (getrandom(&key, sizeof key, 0) != (ssize_t)sizeof key) key = 0;
}

static int32_t place_of(const void *bytes, size_t count) {
  (void)pthread_once(&once, make_key);
  return (int32_t)(XXH3_64bits_withSeed(bytes, count, key) % PLACES);
}

int32_t qkvi_debts_place(const struct sockaddr *peer) {
  if (peer->sa_family == AF_INET) {
    const struct sockaddr_in *address = (const struct sockaddr_in *)peer;
    return place_of(&address->sin_addr, sizeof address->sin_addr);
  }
  if (peer->sa_family != AF_INET6) return -1;
  const struct in6_addr *address = &((const struct sockaddr_in6 *)peer)->sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(address)) return place_of(address->s6_addr + 12, sizeof(struct in_addr));
  return place_of(address->s6_addr, PREFIX_BYTES);
}

// With the lock.
static uint64_t owed(int32_t place, uint64_t points_s, uint64_t now_ns) {
  const uint64_t passed_ms = now_ns > debts[place].ns ? (now_ns - debts[place].ns) / 1000000 : 0;
  const uint64_t points = debts[place].points;
  return points_s > 0 && passed_ms < points * 1000 / points_s ? points - passed_ms * points_s / 1000 : 0;
}

uint64_t qkvi_debts_owed(int32_t place, uint64_t points_s, uint64_t now_ns) {
  if (place < 0) return 0;
  pthread_mutex_lock(&lock);
  const uint64_t now = owed(place, points_s, now_ns);
  pthread_mutex_unlock(&lock);
  return now;
}

void qkvi_debts_raise(int32_t place, uint64_t points, uint64_t points_s, uint64_t now_ns) {
  if (place < 0) return;
  pthread_mutex_lock(&lock);
  if (points > owed(place, points_s, now_ns)) debts[place].points = points, debts[place].ns = now_ns;
  pthread_mutex_unlock(&lock);
}
