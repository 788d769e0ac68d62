#include "client/c/socket.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/clock.h"

enum { SEND_BUFFER_BYTES = 1 << 20 };

static qkv_status parse_unix(const char *path, qkvi_target *target, qkv_error *error) {
  size_t length = strlen(path);
  if (length == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "target unix: has no path; write unix:PATH");
  if (length >= sizeof target->path) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the socket's path has %zu bytes, at most %zu are possible", length,
                    sizeof target->path - 1);
  }
  memcpy(target->path, path, length + 1);
  target->is_unix = true;
  return QKV_OK;
}

static bool is_port(const char *text) {
  size_t digits = strspn(text, "0123456789");
  if (digits == 0 || digits > 5 || text[digits] != '\0') return false;
  long port = strtol(text, NULL, 10);
  return port >= 1 && port <= 65535;
}

qkv_status qkvi_target_parse(const char *text, qkvi_target *target, qkv_error *error) {
  *target = (qkvi_target){0};
  if (strncmp(text, "unix:", 5) == 0) return parse_unix(text + 5, target, error);

  const char *host = text;
  const char *colon = strrchr(text, ':');
  size_t length = colon == NULL ? 0 : (size_t)(colon - text);
  if (length >= 2 && host[0] == '[' && host[length - 1] == ']') {
    host++;
    length -= 2;
  } else if (memchr(host, ':', length) != NULL || memchr(host, '/', length) != NULL) {
    length = 0;
  }
  if (length == 0 || length >= sizeof target->host || !is_port(colon + 1)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "target \"%.100s\" is neither unix:PATH nor HOST:PORT", text);
  }
  memcpy(target->host, host, length);
  memcpy(target->port, colon + 1, strlen(colon + 1) + 1);
  return QKV_OK;
}

// Waits for a non-blocking connect, whatever signals the program handles meanwhile. 0 or an errno.
static int wait_connected(int fd, int64_t timeout_ms) {
  struct pollfd poll_fd = {.fd = fd, .events = POLLOUT};
  const int64_t until = qkv_now_ms() + timeout_ms;
  int ready;
  do {
    const int64_t left_ms = until - qkv_now_ms();
    ready = poll(&poll_fd, 1, left_ms < 0 ? 0 : left_ms < INT32_MAX ? (int)left_ms : INT32_MAX);
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) return ETIMEDOUT;
  if (ready < 0) return errno;
  int reason = 0;
  socklen_t size = sizeof reason;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &reason, &size) != 0) return errno;
  return reason;
}

// 0 and *fd, or an errno.
static int connect_address(int family, const struct sockaddr *address, socklen_t size, int64_t timeout_ms, int *fd) {
  *fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (*fd < 0) return errno;
  const int bytes = SEND_BUFFER_BYTES;
  if (family == AF_UNIX) (void)setsockopt(*fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  int reason = connect(*fd, address, size) == 0 ? 0 : errno;
  if (reason == EINPROGRESS) reason = wait_connected(*fd, timeout_ms);
  if (reason == 0 && family != AF_UNIX) {
    int on = 1;
    (void)setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  if (reason != 0) {
    close(*fd);
    *fd = -1;
  }
  return reason;
}

static qkv_status connect_unix(const qkvi_target *target, int64_t timeout_ms, int *fd, int *reason) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  memcpy(address.sun_path, target->path, sizeof address.sun_path);
  *reason = connect_address(AF_UNIX, (const struct sockaddr *)&address, sizeof address, timeout_ms, fd);
  return *reason == 0 ? QKV_OK : QKV_UNAVAILABLE;
}

// ---- names ----

// A name on its way to addresses. getaddrinfo has no deadline and cannot be cancelled: it runs in a thread of its
// own, which outlives a caller that waits no longer. The last of the two frees.
typedef struct lookup {
  char host[NI_MAXHOST], port[8];
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool done, abandoned;
  int failure;  // of getaddrinfo
  struct addrinfo *addresses;
} lookup;

static void free_lookup(lookup *name) {
  if (name->addresses != NULL) freeaddrinfo(name->addresses);
  (void)pthread_cond_destroy(&name->changed);
  (void)pthread_mutex_destroy(&name->lock);
  free(name);
}

static void *look_up(void *context) {
  lookup *name = context;
  const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
  struct addrinfo *addresses = NULL;
  const int failure = getaddrinfo(name->host, name->port, &hints, &addresses);
  (void)pthread_mutex_lock(&name->lock);
  name->failure = failure;
  name->addresses = failure == 0 ? addresses : NULL;
  name->done = true;
  const bool abandoned = name->abandoned;
  (void)pthread_cond_signal(&name->changed);
  (void)pthread_mutex_unlock(&name->lock);
  if (abandoned) free_lookup(name);
  return NULL;
}

static lookup *start_lookup(const qkvi_target *target) {
  lookup *name = calloc(1, sizeof *name);
  pthread_condattr_t clock;
  pthread_attr_t detached;
  pthread_t thread;
  assert(name != NULL);
  memcpy(name->host, target->host, sizeof name->host);
  memcpy(name->port, target->port, sizeof name->port);
  int failed = pthread_mutex_init(&name->lock, NULL);
  failed |= pthread_condattr_init(&clock);
  failed |= pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  failed |= pthread_cond_init(&name->changed, &clock);
  failed |= pthread_condattr_destroy(&clock);
  failed |= pthread_attr_init(&detached);
  failed |= pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  if (failed != 0) abort();
  if (pthread_create(&thread, &detached, look_up, name) != 0) (void)look_up(name);  // no thread: without a deadline
  (void)pthread_attr_destroy(&detached);
  return name;
}

// The addresses of the target's name, to be freed. UNAVAILABLE: there are none, or they are not known in time.
static qkv_status resolve(const qkvi_target *target, int64_t timeout_ms, struct addrinfo **addresses, bool *retry,
                          qkv_error *error) {
  const struct addrinfo numeric = {
      .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | AI_NUMERICHOST};
  if (getaddrinfo(target->host, target->port, &numeric, addresses) == 0) return QKV_OK;
  *addresses = NULL;
  lookup *name = start_lookup(target);
  struct timespec until;
  (void)clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += timeout_ms / 1000;
  until.tv_nsec += timeout_ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  int waited = 0;
  (void)pthread_mutex_lock(&name->lock);
  while (!name->done && waited == 0) waited = pthread_cond_timedwait(&name->changed, &name->lock, &until);
  const bool done = name->done;
  name->abandoned = !done;
  (void)pthread_mutex_unlock(&name->lock);
  if (!done) {
    *retry = true;
    return qkv_fail(error, QKV_UNAVAILABLE, "the host's name was not resolved within %lld ms", (long long)timeout_ms);
  }
  const int failure = name->failure;
  *retry = failure == EAI_AGAIN;
  *addresses = name->addresses;
  name->addresses = NULL;
  free_lookup(name);
  return failure == 0 ? QKV_OK : qkv_fail(error, QKV_UNAVAILABLE, "%s", gai_strerror(failure));
}

// One address after the other. Each has an equal part of the time that is left, so that one that does not answer
// leaves time for the next.
static int connect_first(const struct addrinfo *addresses, int64_t until_ms, int *fd) {
  int reason = ECONNREFUSED;
  int64_t left = 0;
  for (const struct addrinfo *at = addresses; at != NULL; at = at->ai_next) left++;
  for (const struct addrinfo *at = addresses; at != NULL && reason != 0; at = at->ai_next)
    reason = connect_address(at->ai_family, at->ai_addr, at->ai_addrlen, (until_ms - qkv_now_ms()) / left--, fd);
  return reason;
}

static qkv_status connect_tcp(const qkvi_target *target, int64_t timeout_ms, int *fd, bool *retry, int *reason,
                              qkv_error *error) {
  const int64_t until_ms = qkv_now_ms() + timeout_ms;
  struct addrinfo *addresses = NULL;
  QKV_TRY(resolve(target, timeout_ms, &addresses, retry, error));
  *reason = connect_first(addresses, until_ms, fd);
  freeaddrinfo(addresses);
  return *reason == 0 ? QKV_OK : QKV_UNAVAILABLE;
}

qkv_status qkvi_socket_connect(const qkvi_target *target, int64_t timeout_ms, int *fd, bool *retry,
                               qkv_error *error) {
  int reason = 0;
  *fd = -1;
  *retry = false;
  qkv_status status = target->is_unix ? connect_unix(target, timeout_ms, fd, &reason)
                                      : connect_tcp(target, timeout_ms, fd, retry, &reason, error);
  if (status == QKV_OK || reason == 0) return status;
  *retry = reason != EACCES && reason != EPERM;
  char text[96];
  return qkv_fail(error, status, "%s", strerror_r(reason, text, sizeof text));
}

bool qkvi_socket_hung_up(int fd) {
  struct pollfd poll_fd = {.fd = fd, .events = POLLRDHUP};
  return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}
