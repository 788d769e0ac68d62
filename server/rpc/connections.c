#include "server/rpc/connections.h"

#include <assert.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#define uthash_fatal(message) abort()
#include <uthash.h>

// Descriptors that are reserved for files, when limit-connections is beyond what the process may open.
#define FILES_KEPT 256
#define COUNT_PAUSE_MS 100

typedef struct peer_key {
  unsigned char bytes[16];  // an IPv6 address; IPv4 as ::ffff:a.b.c.d
} peer_key;

typedef struct peer {
  peer_key key;
  size_t connections;
  UT_hash_handle hh;
} peer;

typedef struct connection {
  ino_t inode;
  struct peer *peer;  // NULL: a unix socket
  bool open;          // as far as the table knows
} connection;

struct qkvi_rpc_connections {
  pthread_mutex_t lock;
  size_t max, peer_max;
  connection *table;  // by file descriptor
  size_t table_length, open;
  peer *peers;
  uint64_t refused;
  int64_t counted_ms;  // when the last count was made
};

static int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

qkvi_rpc_connections *qkvi_rpc_connections_create(size_t max, size_t peer_max) {
  assert(max > 0);
  struct rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur > 2 * FILES_KEPT && max > files.rlim_cur - FILES_KEPT)
    max = files.rlim_cur - FILES_KEPT;
  qkvi_rpc_connections *connections = calloc(1, sizeof(*connections));
  assert(connections != NULL);
  pthread_mutex_init(&connections->lock, NULL);
  connections->max = max;
  connections->peer_max = peer_max > 0 ? peer_max : (max + 1) / 2;
  connections->counted_ms = INT64_MIN;
  return connections;
}

void qkvi_rpc_connections_destroy(qkvi_rpc_connections **connections) {
  qkvi_rpc_connections *old = *connections;
  if (old == NULL) return;
  *connections = NULL;
  peer *each = old->peers, *next;
  HASH_CLEAR(hh, old->peers);
  for (; each != NULL; each = next) {
    next = each->hh.next;
    free(each);
  }
  pthread_mutex_destroy(&old->lock);
  free(old->table);
  free(old);
}

static bool key_of(const struct sockaddr *address, peer_key *key) {
  memset(key, 0, sizeof(*key));
  if (address->sa_family == AF_INET) {
    key->bytes[10] = key->bytes[11] = 0xff;
    memcpy(key->bytes + 12, &((const struct sockaddr_in *)address)->sin_addr, 4);
  } else if (address->sa_family == AF_INET6) {
    const struct in6_addr *ip = &((const struct sockaddr_in6 *)address)->sin6_addr;
    memcpy(key->bytes, ip, IN6_IS_ADDR_V4MAPPED(ip) ? 16 : 8);
  } else {
    return false;
  }
  return true;
}

static peer *peer_of(qkvi_rpc_connections *connections, const struct sockaddr *address) {
  peer_key key;
  peer *found = NULL;
  if (!key_of(address, &key)) return NULL;
  HASH_FIND(hh, connections->peers, &key, sizeof(key), found);
  if (found != NULL) return found;
  found = calloc(1, sizeof(*found));
  assert(found != NULL);
  found->key = key;
  HASH_ADD(hh, connections->peers, key, sizeof(found->key), found);
  return found;
}

static void drop_if_idle(qkvi_rpc_connections *connections, peer *idle) {
  if (idle == NULL || idle->connections > 0) return;
  HASH_DEL(connections->peers, idle);
  free(idle);
}

static void end(qkvi_rpc_connections *connections, connection *ended) {
  peer *of = ended->peer;
  *ended = (connection){0};
  connections->open--;
  if (of != NULL) of->connections--;
  drop_if_idle(connections, of);
}

static bool is_inode(int file, ino_t inode) {
  struct stat now;
  return fstat(file, &now) == 0 && S_ISSOCK(now.st_mode) && now.st_ino == inode;
}

// Removes connections that have ended.
static void count(qkvi_rpc_connections *connections) {
  for (size_t i = 0; i < connections->table_length; i++) {
    connection *each = &connections->table[i];
    if (each->open && !is_inode((int)i, each->inode)) end(connections, each);
  }
  connections->counted_ms = now_ms();
}

static void grow(qkvi_rpc_connections *connections, size_t length) {
  if (length <= connections->table_length) return;
  if (length < 2 * connections->table_length) length = 2 * connections->table_length;
  connections->table = realloc(connections->table, length * sizeof(*connections->table));
  assert(connections->table != NULL);
  memset(connections->table + connections->table_length, 0,
         (length - connections->table_length) * sizeof(*connections->table));
  connections->table_length = length;
}

static qkvi_rpc_admission judge(const qkvi_rpc_connections *connections, const peer *of) {
  if (connections->open >= connections->max) return QKVI_RPC_TOO_MANY;
  if (of != NULL && of->connections >= connections->peer_max) return QKVI_RPC_TOO_MANY_OF_PEER;
  return QKVI_RPC_ADMITTED;
}

static qkvi_rpc_admission judge_counted(qkvi_rpc_connections *connections, const struct sockaddr *address,
                                        peer **of) {
  *of = peer_of(connections, address);
  qkvi_rpc_admission admission = judge(connections, *of);
  if (admission == QKVI_RPC_ADMITTED || now_ms() < connections->counted_ms + COUNT_PAUSE_MS) return admission;
  if (*of != NULL) (*of)->connections++;  // so that the count does not free it
  count(connections);
  if (*of != NULL) (*of)->connections--;
  return judge(connections, *of);
}

qkvi_rpc_admission qkvi_rpc_connections_admit(qkvi_rpc_connections *connections, int accepted,
                                              const struct sockaddr *peer_address) {
  struct stat socket;
  const bool known = fstat(accepted, &socket) == 0;
  assert(known);
  (void)known;
  pthread_mutex_lock(&connections->lock);
  grow(connections, (size_t)accepted + 1);
  connection *slot = &connections->table[accepted];
  if (slot->open) end(connections, slot);  // the descriptor was free: its earlier connection has ended
  peer *of;
  const qkvi_rpc_admission admission = judge_counted(connections, peer_address, &of);
  if (admission == QKVI_RPC_ADMITTED) {
    *slot = (connection){.inode = socket.st_ino, .peer = of, .open = true};
    connections->open++;
    if (of != NULL) of->connections++;
  } else {
    connections->refused++;
    drop_if_idle(connections, of);
  }
  pthread_mutex_unlock(&connections->lock);
  return admission;
}

size_t qkvi_rpc_connections_open(qkvi_rpc_connections *connections) {
  pthread_mutex_lock(&connections->lock);
  if (now_ms() >= connections->counted_ms + COUNT_PAUSE_MS) count(connections);
  const size_t open = connections->open;
  pthread_mutex_unlock(&connections->lock);
  return open;
}

uint64_t qkvi_rpc_connections_refused(qkvi_rpc_connections *connections) {
  pthread_mutex_lock(&connections->lock);
  const uint64_t refused = connections->refused;
  pthread_mutex_unlock(&connections->lock);
  return refused;
}
