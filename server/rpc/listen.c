// Addresses: "unix:PATH" and "HOST:PORT".
//
// Sockets are ours or passed by the service manager, and accepted by a thread that gives gRPC the connections: gRPC
// 1.51 reports only that binding has failed, stops listening for good when accept() finds no file descriptor left,
// keeps the system's send buffer of unix sockets, which halves the throughput of large answers, and resets TCP
// connections whose client does not read for some seconds. A unix socket is guarded by a lock file (two servers on
// one path do not notice each other).
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "server/rpc/inspect.h"
#include "server/rpc/internal.h"
#include "server/service.h"

#define UNIX_PREFIX "unix:"
#define HOST_MAX 255
#define SEND_BUFFER_BYTES (1 << 20)
// How long a connection that cannot be accepted now (no file descriptor is left) waits for the next attempt.
#define ACCEPT_PAUSE_MS 100
#define REFUSALS_PAUSE_S 60
// Of each listener. A new connection costs about 100 µs of gRPC's time: calls on older ones go on meanwhile, while
// the others wait in the socket's queue. The next batch waits until gRPC has begun to read those of this one, which
// takes longer where the daemon gets little processor time: else they would wait before calls on older ones.
#define ACCEPT_BATCH 16
// One of a peer that comes again and again (inspect.h) counts as so many.
#define ACCEPT_WEIGHT 4
#define ACCEPT_BATCH_MS 5
#define ACCEPT_READ_MS 1000
#define ACCEPT_LOOK_MS 2
// A TCP connection whose peer has vanished silently is noticed after the first and so many of the second. These are
// the kernel's keepalive probes, not gRPC's pings: a busy client does not answer pings, its kernel answers probes.
#define KEEPALIVE_S 30
#define KEEPALIVE_AGAIN_S 10
#define KEEPALIVE_TIMES 3

// ---- unix:PATH ----

// Takes the lock file at `path`. The file may be unlinked by its last owner between our open and lock: then the
// lock is worthless and the next file is tried.
static qkv_status take_lock(const char *path, int *lock, qkv_error *error) {
  for (;;) {
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) {
      return qkv_fail(error, QKV_UNAVAILABLE, "cannot create the lock file %s: %s", path, strerror(errno));
    }
    if (flock(file, LOCK_EX | LOCK_NB) != 0) {
      close(file);
      return qkv_fail(error, QKV_UNAVAILABLE, "another qkvd listens on this socket: it holds %s", path);
    }
    struct stat ours, named;
    if (fstat(file, &ours) == 0 && stat(path, &named) == 0 && ours.st_ino == named.st_ino &&
        ours.st_dev == named.st_dev) {
      *lock = file;
      return QKV_OK;
    }
    close(file);
  }
}

// A socket that is left over is replaced; anything else is not ours to remove.
static qkv_status check_socket_path(const char *path, qkv_error *error) {
  struct sockaddr_un address;
  size_t length = strlen(path);
  if (length == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "listen is \"unix:\", must be unix:PATH");
  if (length >= sizeof(address.sun_path)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "listen is unix:%s, a path of %zu bytes; at most %zu are allowed",
                    path, length, sizeof(address.sun_path) - 1);
  }
  if (strchr(path, '%') != NULL || strchr(path, '?') != NULL || strchr(path, '#') != NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "listen is unix:%s, must not have %%, ? or #", path);
  }
  struct stat held;
  if (lstat(path, &held) == 0 && !S_ISSOCK(held.st_mode)) {
    return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on unix:%s: there is a file that is no socket", path);
  }
  return QKV_OK;
}

static char *join(const char *a, const char *b) {
  char *text = NULL;
  int length = asprintf(&text, "%s%s", a, b);
  assert(length >= 0 && text != NULL);
  (void)length;
  return text;
}

static bool take_unix(const char *path, qkvi_rpc_listener *listener) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  memcpy(address.sun_path, path, strlen(path) + 1);
  const int passed = qkv_service_take_socket((const struct sockaddr *)&address, sizeof(address));
  if (passed < 0) return false;
  listener->sockets[listener->socket_count++] = passed;
  listener->passed = true;
  return true;
}

static qkv_status bind_unix(const char *path, unsigned mode, qkvi_rpc_listener *listener, qkv_error *error) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  memcpy(address.sun_path, path, strlen(path) + 1);
  const int bound = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  bool ok = bound >= 0 && (unlink(path) == 0 || errno == ENOENT);
  if (bound >= 0) listener->sockets[listener->socket_count++] = bound;
  if (ok) {
    mode_t mask = umask(~(mode_t)mode & 0777);
    ok = bind(bound, (const struct sockaddr *)&address, sizeof(address)) == 0;
    umask(mask);
  }
  if (ok && listen(bound, SOMAXCONN) == 0) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on unix:%s: %s", path, strerror(errno));
}

static qkv_status listen_unix(const char *path, unsigned mode, qkvi_rpc_listener *listener, qkv_error *error) {
  if (strncmp(path, "//", 2) == 0) path += 2;  // unix:///path
  QKV_TRY(check_socket_path(path, error));
  listener->address = join(UNIX_PREFIX, path);
  listener->local = true;
  if (take_unix(path, listener)) return QKV_OK;
  listener->lock_path = join(path, ".lock");
  qkv_status status = take_lock(listener->lock_path, &listener->lock, error);
  if (status == QKV_OK) status = bind_unix(path, mode, listener, error);
  if (status != QKV_OK) qkvi_rpc_unlisten(listener);
  return status;
}

// ---- HOST:PORT ----

// Splits "HOST:PORT" and "[IPV6]:PORT".
static qkv_status split(const char *address, char *host, const char **port, qkv_error *error) {
  const char *colon = strrchr(address, ':');
  const char *begin = address, *end = colon;
  bool good = colon != NULL;
  if (good && *begin == '[') {
    begin++;
    good = *--end == ']';
  } else if (good) {
    good = memchr(begin, ':', (size_t)(end - begin)) == NULL;
  }
  char *rest = NULL;
  unsigned long number = good ? strtoul(colon + 1, &rest, 10) : 0;
  good = good && end > begin && end - begin <= HOST_MAX && colon[1] >= '0' && colon[1] <= '9' && *rest == '\0' &&
         number <= 65535;
  if (!good) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "listen is \"%s\", must be unix:PATH or HOST:PORT", address);
  }
  memcpy(host, begin, (size_t)(end - begin));
  host[end - begin] = '\0';
  *port = colon + 1;
  return QKV_OK;
}

static int listen_at(const struct addrinfo *info, int *bound) {
  const int on = 1, off = 0;
  *bound = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (*bound < 0) return errno;
  (void)setsockopt(*bound, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (info->ai_family == AF_INET6) (void)setsockopt(*bound, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (bind(*bound, info->ai_addr, info->ai_addrlen) == 0 && listen(*bound, SOMAXCONN) == 0) return 0;
  const int reason = errno;
  close(*bound);
  return reason;
}

// An address of IPv4 has its port where one of IPv6 has it.
static_assert(offsetof(struct sockaddr_in, sin_port) == offsetof(struct sockaddr_in6, sin6_port), "ports");

static in_port_t bound_port(int socket) {
  struct sockaddr_in6 address = {0};
  socklen_t length = sizeof(address);
  const int failed = getsockname(socket, (struct sockaddr *)&address, &length);
  assert(failed == 0);
  (void)failed;
  return address.sin6_port;
}

// /etc/hosts may name an address twice.
static bool is_repeated(const struct addrinfo *list, const struct addrinfo *info) {
  for (; list != info; list = list->ai_next) {
    if (list->ai_addrlen == info->ai_addrlen && memcmp(list->ai_addr, info->ai_addr, info->ai_addrlen) == 0)
      return true;
  }
  return false;
}

// Listens at all addresses of a name, at one port. "localhost" may stand for an IPv6 address that the machine does
// not have: it is skipped, unless there is no other. Returns the reason why there is none, or 0.
static int listen_at_all(const struct addrinfo *list, qkvi_rpc_listener *listener) {
  int missing = 0;
  for (const struct addrinfo *info = list; info != NULL && listener->socket_count < QKVI_RPC_SOCKETS_MAX;
       info = info->ai_next) {
    if (is_repeated(list, info)) continue;
    if (listener->socket_count > 0)
      ((struct sockaddr_in *)info->ai_addr)->sin_port = bound_port(listener->sockets[0]);
    const int reason = listen_at(info, &listener->sockets[listener->socket_count]);
    if (reason == 0) {
      listener->socket_count++;
    } else if (reason == EAFNOSUPPORT || reason == EADDRNOTAVAIL) {
      missing = reason;
    } else {
      return reason;
    }
  }
  return listener->socket_count > 0 ? 0 : missing;
}

// The sockets that the service manager passed for the addresses of a name; nothing else is bound then.
static bool take_tcp(const struct addrinfo *list, qkvi_rpc_listener *listener) {
  for (const struct addrinfo *info = list; info != NULL && listener->socket_count < QKVI_RPC_SOCKETS_MAX;
       info = info->ai_next) {
    const int passed = qkv_service_take_socket(info->ai_addr, info->ai_addrlen);
    if (passed >= 0) listener->sockets[listener->socket_count++] = passed;
  }
  listener->passed = listener->socket_count > 0;
  return listener->passed;
}

static bool is_loopback(int socket) {
  union {
    struct sockaddr any;
    struct sockaddr_in ipv4;
    struct sockaddr_in6 ipv6;
  } at = {0};
  socklen_t length = sizeof(at);
  if (getsockname(socket, &at.any, &length) != 0) return false;
  if (at.any.sa_family == AF_INET) return ntohl(at.ipv4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  return at.any.sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&at.ipv6.sin6_addr);
}

static qkv_status check_open(const char *address, const qkvi_rpc_listener *listener, qkv_error *error) {
  for (size_t i = 0; i < listener->socket_count; i++) {
    if (is_loopback(listener->sockets[i])) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "listen is %s, which other machines reach, and nobody would have to say who they are: give "
                    "--auth-file or --tls-client-ca, or --allow-anonymous all",
                    address);
  }
  return QKV_OK;
}

static qkv_status listen_tcp(const char *address, const qkvi_rpc_listen_config *config, qkvi_rpc_listener *listener,
                             qkv_error *error) {
  char host[HOST_MAX + 1];
  const char *port = NULL;
  QKV_TRY(split(address, host, &port, error));
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *found;
  int failed = getaddrinfo(host, port, &hints, &found);
  if (failed != 0) {
    return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on %s: %s", address, gai_strerror(failed));
  }
  const int reason = take_tcp(found, listener) ? 0 : listen_at_all(found, listener);
  freeaddrinfo(found);
  if (reason != 0) {
    qkvi_rpc_unlisten(listener);
    return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on %s: %s%s", address, strerror(reason),
                    reason == EADDRINUSE ? "; is another qkvd running?" : "");
  }
  if (!config->open && check_open(address, listener, error) != QKV_OK) {
    qkvi_rpc_unlisten(listener);
    return error->status;
  }
  listener->tls = config->tls;
  char *text = NULL;
  int length = asprintf(&text, "%.*s:%d", (int)(strrchr(address, ':') - address), address,
                        ntohs(bound_port(listener->sockets[0])));
  assert(length > 0);
  (void)length;
  listener->address = text;
  return QKV_OK;
}

qkv_status qkvi_rpc_listen(grpc_server *server, const char *address, const qkvi_rpc_listen_config *config,
                           qkvi_rpc_listener *listener, qkv_error *error) {
  *listener = (qkvi_rpc_listener){.server = server, .connections = config->connections, .lock = -1};
  if (strncmp(address, UNIX_PREFIX, strlen(UNIX_PREFIX)) == 0) {
    return listen_unix(address + strlen(UNIX_PREFIX), config->mode, listener, error);
  }
  return listen_tcp(address, config, listener, error);
}

// ---- Connections ----

static void set_integer(int connection, int level, int option, int value) {
  (void)setsockopt(connection, level, option, &value, sizeof(value));
}

static void set_options(const qkvi_rpc_listener *listener, int connection) {
  if (listener->local) return set_integer(connection, SOL_SOCKET, SO_SNDBUF, SEND_BUFFER_BYTES);
  set_integer(connection, IPPROTO_TCP, TCP_NODELAY, 1);
  set_integer(connection, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_integer(connection, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_S);
  set_integer(connection, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_AGAIN_S);
  set_integer(connection, IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_TIMES);
}

// Logs that once a minute.
static void refuse_connection(const qkvi_rpc_listener *listener, int connection, qkvi_rpc_admission reason) {
  static _Atomic int64_t said_s;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  int64_t last = said_s;
  close(connection);
  if (last != 0 && now.tv_sec < last + REFUSALS_PAUSE_S) return;
  if (!atomic_compare_exchange_strong(&said_s, &last, (int64_t)now.tv_sec)) return;
  qkv_log(QKV_LOG_WARN, "too many connections, closing new ones", "{s:s, s:s}", "address", listener->address, "limit",
          reason == QKVI_RPC_TOO_MANY ? "limit-connections" : "limit-peer-connections");
}

typedef struct accepted_batch {
  int connections[ACCEPT_BATCH];
  size_t count;
  size_t weight;  // of them
  int64_t begun_ms;
} accepted_batch;

static void accept_one(const qkvi_rpc_listener *listener, int socket, grpc_server_credentials *credentials,
                       accepted_batch *batch) {
  struct sockaddr_storage peer = {0};
  socklen_t length = sizeof(peer);
  const int connection = accept4(socket, (struct sockaddr *)&peer, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (connection >= 0) {
    const qkvi_rpc_admission admission =
        qkvi_rpc_connections_admit(listener->connections, connection, (const struct sockaddr *)&peer);
    if (admission != QKVI_RPC_ADMITTED) return refuse_connection(listener, connection, admission);
    set_options(listener, connection);
    batch->connections[batch->count++] = connection;
    const bool slow = qkvi_inspect_open(connection, listener->tls != NULL, (const struct sockaddr *)&peer);
    batch->weight += slow ? ACCEPT_WEIGHT : 1;
    if (listener->tls != NULL) {
      qkvi_tls_give(listener->tls, connection);
    } else {
      grpc_server_add_channel_from_fd(listener->server, connection, credentials);
    }
  } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
    qkv_log(QKV_LOG_WARN, "cannot accept a connection, trying again", "{s:s, s:s}", "address", listener->address,
            "reason", strerror(errno));
    (void)poll(NULL, 0, ACCEPT_PAUSE_MS);
  }  // else the connection is gone again
}

static bool waits(const accepted_batch *batch) {
  for (size_t i = 0; i < batch->count; i++) {
    if (qkvi_inspect_waits(batch->connections[i])) return true;
  }
  return false;
}

// After a connection has come, or none. Waits after the last one of a batch, unless the listener is woken.
static void pace(accepted_batch *batch, struct pollfd *wake) {
  if (batch->count <= 1) batch->begun_ms = qkv_now_ms();
  if (batch->weight < ACCEPT_BATCH) return;
  for (;;) {
    const int64_t passed = qkv_now_ms() - batch->begun_ms;
    if (passed >= ACCEPT_BATCH_MS && (passed >= ACCEPT_READ_MS || !waits(batch))) break;
    if (poll(wake, 1, passed < ACCEPT_BATCH_MS ? (int)(ACCEPT_BATCH_MS - passed) : ACCEPT_LOOK_MS) > 0) break;
  }
  batch->count = batch->weight = 0;
}

// Until the listener is woken.
static void *accept_connections(void *context) {
  const qkvi_rpc_listener *listener = context;
  grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
  struct pollfd waited[QKVI_RPC_SOCKETS_MAX + 1];
  accepted_batch batch = {.count = 0};
  const size_t count = listener->socket_count;
  for (size_t i = 0; i < count; i++) waited[i] = (struct pollfd){.fd = listener->sockets[i], .events = POLLIN};
  waited[count] = (struct pollfd){.fd = listener->wake, .events = POLLIN};
  for (;;) {
    (void)poll(waited, (nfds_t)count + 1, -1);
    if (waited[count].revents != 0) break;
    for (size_t i = 0; i < count; i++) {
      if (waited[i].revents != POLLIN) continue;
      accept_one(listener, waited[i].fd, credentials, &batch);
      pace(&batch, &waited[count]);
    }
  }
  grpc_server_credentials_release(credentials);
  return NULL;
}

void qkvi_rpc_accept(qkvi_rpc_listener *listener) {
  listener->wake = eventfd(0, EFD_CLOEXEC);
  assert(listener->wake >= 0);
  int failed = pthread_create(&listener->thread, NULL, accept_connections, listener);
  assert(failed == 0);
  (void)failed;
  pthread_setname_np(listener->thread, "qkvd-accept");
  listener->accepting = true;
}

static void close_sockets(qkvi_rpc_listener *listener) {
  for (size_t i = 0; i < listener->socket_count; i++) close(listener->sockets[i]);
  listener->socket_count = 0;
}

void qkvi_rpc_accept_done(qkvi_rpc_listener *listener) {
  if (listener->accepting) {
    (void)eventfd_write(listener->wake, 1);
    pthread_join(listener->thread, NULL);
    close(listener->wake);
  }
  close_sockets(listener);
  listener->accepting = false;
}

void qkvi_rpc_unlisten(qkvi_rpc_listener *listener) {
  assert(!listener->accepting);
  close_sockets(listener);
  if (listener->lock >= 0) {
    unlink(listener->address + strlen(UNIX_PREFIX));
    unlink(listener->lock_path);
    close(listener->lock);
  }
  free(listener->lock_path);
  free(listener->address);
  *listener = (qkvi_rpc_listener){.lock = -1};
}
