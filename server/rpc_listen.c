// Addresses: "unix:PATH" and "HOST:PORT".
//
// A unix socket is ours: bound, guarded by a lock file (two servers on one path do not notice each other) and
// accepted by a thread that gives gRPC the connections. gRPC would leave them the system's send buffer, which halves
// what large answers reach.
//
// A TCP port is gRPC's. It tells only that binding failed, so each address is tried with a socket of our own first,
// which knows the reason.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "server/rpc_internal.h"

#define UNIX_PREFIX "unix:"
#define HOST_MAX 255
#define SEND_BUFFER_BYTES (1 << 20)
// How long a connection that cannot be accepted now (no file descriptor is left) waits for the next attempt.
#define ACCEPT_PAUSE_MS 100

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

static qkv_status bind_unix(const char *path, int *bound, qkv_error *error) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  memcpy(address.sun_path, path, strlen(path) + 1);
  *bound = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool ok = *bound >= 0 && (unlink(path) == 0 || errno == ENOENT);
  if (ok) {
    mode_t mask = umask(0117);  // srw-rw----
    ok = bind(*bound, (const struct sockaddr *)&address, sizeof(address)) == 0;
    umask(mask);
  }
  if (ok && listen(*bound, SOMAXCONN) == 0) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on unix:%s: %s", path, strerror(errno));
}

static qkv_status listen_unix(const char *path, qkvi_rpc_listener *listener, qkv_error *error) {
  if (strncmp(path, "//", 2) == 0) path += 2;  // unix:///path
  QKV_TRY(check_socket_path(path, error));
  listener->address = join(UNIX_PREFIX, path);
  listener->lock_path = join(path, ".lock");
  qkv_status status = take_lock(listener->lock_path, &listener->lock, error);
  if (status == QKV_OK) status = bind_unix(path, &listener->socket, error);
  if (status != QKV_OK) qkvi_rpc_unlisten(listener);
  return status;
}

// Until the socket is shut down.
static void *accept_connections(void *context) {
  qkvi_rpc_listener *listener = context;
  grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
  for (;;) {
    const int bytes = SEND_BUFFER_BYTES;
    int connection = accept4(listener->socket, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection >= 0) {
      (void)setsockopt(connection, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
      grpc_server_add_channel_from_fd(listener->server, connection, credentials);
    } else if (errno == EINVAL) {
      break;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      qkv_log(QKV_LOG_WARN, "cannot accept a connection, trying again", "{s:s, s:s}", "address", listener->address,
              "reason", strerror(errno));
      (void)poll(NULL, 0, ACCEPT_PAUSE_MS);
    }
  }
  grpc_server_credentials_release(credentials);
  return NULL;
}

// ---- HOST:PORT ----

static qkv_status bind_grpc(grpc_server *server, const char *address, int *port, qkv_error *error) {
  grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
  *port = grpc_server_add_http2_port(server, address, credentials);
  grpc_server_credentials_release(credentials);
  if (*port == 0) return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on %s", address);
  return QKV_OK;
}

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

// The reason why an address cannot be bound, or 0.
static int try_bind(const struct addrinfo *info) {
  int result = 0, on = 1;
  int file = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (file < 0) return errno;
  setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(file, info->ai_addr, info->ai_addrlen) != 0) result = errno;
  close(file);
  return result;
}

// The same for all that a name stands for. "localhost" may stand for an IPv6 address that the machine does not
// have; such are left out as gRPC does, unless there is no other.
static int try_bind_all(const struct addrinfo *info) {
  int missing = 0;
  bool bound = false;
  for (; info != NULL; info = info->ai_next) {
    int reason = try_bind(info);
    if (reason == EAFNOSUPPORT || reason == EADDRNOTAVAIL) {
      missing = reason;
    } else if (reason != 0) {
      return reason;
    } else {
      bound = true;
    }
  }
  return bound ? 0 : missing;
}

static qkv_status listen_tcp(grpc_server *server, const char *address, qkvi_rpc_listener *listener,
                             qkv_error *error) {
  char host[HOST_MAX + 1];
  const char *port = NULL;
  QKV_TRY(split(address, host, &port, error));
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *found;
  int failed = getaddrinfo(host, port, &hints, &found);
  if (failed != 0) {
    return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on %s: %s", address, gai_strerror(failed));
  }
  int reason = try_bind_all(found);
  freeaddrinfo(found);
  if (reason != 0) {
    return qkv_fail(error, QKV_UNAVAILABLE, "cannot listen on %s: %s%s", address, strerror(reason),
                    reason == EADDRINUSE ? "; is another qkvd running?" : "");
  }
  int bound;
  QKV_TRY(bind_grpc(server, address, &bound, error));
  char *text = NULL;
  int length = asprintf(&text, "%.*s:%d", (int)(strrchr(address, ':') - address), address, bound);
  assert(length > 0);
  (void)length;
  listener->address = text;
  return QKV_OK;
}

qkv_status qkvi_rpc_listen(grpc_server *server, const char *address, qkvi_rpc_listener *listener, qkv_error *error) {
  *listener = (qkvi_rpc_listener){.server = server, .lock = -1, .socket = -1};
  if (strncmp(address, UNIX_PREFIX, strlen(UNIX_PREFIX)) == 0) {
    return listen_unix(address + strlen(UNIX_PREFIX), listener, error);
  }
  return listen_tcp(server, address, listener, error);
}

void qkvi_rpc_accept(qkvi_rpc_listener *listener) {
  if (listener->socket < 0) return;
  int failed = pthread_create(&listener->thread, NULL, accept_connections, listener);
  assert(failed == 0);
  (void)failed;
  pthread_setname_np(listener->thread, "qkvd-accept");
  listener->accepting = true;
}

void qkvi_rpc_accept_done(qkvi_rpc_listener *listener) {
  if (listener->accepting) {
    (void)shutdown(listener->socket, SHUT_RDWR);
    pthread_join(listener->thread, NULL);
  }
  if (listener->socket >= 0) close(listener->socket);
  listener->socket = -1;
  listener->accepting = false;
}

void qkvi_rpc_unlisten(qkvi_rpc_listener *listener) {
  assert(!listener->accepting);
  if (listener->socket >= 0) close(listener->socket);
  if (listener->lock >= 0) {
    unlink(listener->address + strlen(UNIX_PREFIX));
    unlink(listener->lock_path);
    close(listener->lock);
  }
  free(listener->lock_path);
  free(listener->address);
  *listener = (qkvi_rpc_listener){.lock = -1, .socket = -1};
}
