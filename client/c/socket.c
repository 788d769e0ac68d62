#include "client/c/socket.h"
#include "engine/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

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

static qkv_status connect_tcp(const qkvi_target *target, int64_t timeout_ms, int *fd, int *reason, qkv_error *error) {
  struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
  struct addrinfo *addresses = NULL;
  int resolved = getaddrinfo(target->host, target->port, &hints, &addresses);
  if (resolved != 0) return qkv_fail(error, QKV_UNAVAILABLE, "%s", gai_strerror(resolved));
  *reason = ECONNREFUSED;
  for (const struct addrinfo *at = addresses; at != NULL && *reason != 0; at = at->ai_next) {
    *reason = connect_address(at->ai_family, at->ai_addr, at->ai_addrlen, timeout_ms, fd);
  }
  freeaddrinfo(addresses);
  return *reason == 0 ? QKV_OK : QKV_UNAVAILABLE;
}

qkv_status qkvi_socket_connect(const qkvi_target *target, int64_t timeout_ms, int *fd, bool *retry,
                               qkv_error *error) {
  int reason = 0;
  *fd = -1;
  *retry = false;
  qkv_status status = target->is_unix ? connect_unix(target, timeout_ms, fd, &reason)
                                      : connect_tcp(target, timeout_ms, fd, &reason, error);
  if (status == QKV_OK || reason == 0) return status;
  *retry = reason != EACCES && reason != EPERM;
  char text[96];
  return qkv_fail(error, status, "%s", strerror_r(reason, text, sizeof text));
}

bool qkvi_socket_hung_up(int fd) {
  struct pollfd poll_fd = {.fd = fd, .events = POLLRDHUP};
  return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}
