#include "server/service.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "engine/base/log.h"

enum { SOCKETS_MAX = 16, ADDRESS_TEXT = 160 };

typedef union socket_address {
  struct sockaddr any;
  struct sockaddr_in ipv4;
  struct sockaddr_in6 ipv6;
  struct sockaddr_un local;
} socket_address;

static struct {
  __typeof__(sd_notify) *notify;  // NULL: there is no manager
  uint64_t watchdog_us;           // 0: not asked for
  int sockets[SOCKETS_MAX];       // -1 where it has been taken
  int count;
} service;

// A path, and "HOST:PORT".
static void print_address(int socket, char *text) {
  socket_address address = {0};
  socklen_t length = sizeof(address);
  char host[INET6_ADDRSTRLEN] = "?";
  (void)getsockname(socket, &address.any, &length);
  if (address.any.sa_family == AF_UNIX) {
    snprintf(text, ADDRESS_TEXT, "unix:%s", address.local.sun_path);
  } else if (address.any.sa_family == AF_INET6) {
    (void)inet_ntop(AF_INET6, &address.ipv6.sin6_addr, host, sizeof(host));
    snprintf(text, ADDRESS_TEXT, "[%s]:%d", host, ntohs(address.ipv6.sin6_port));
  } else {
    (void)inet_ntop(AF_INET, &address.ipv4.sin_addr, host, sizeof(host));
    snprintf(text, ADDRESS_TEXT, "%s:%d", host, ntohs(address.ipv4.sin_port));
  }
}

static int integer_option(int socket, int option) {
  int value = -1;
  socklen_t length = sizeof(value);
  return getsockopt(socket, SOL_SOCKET, option, &value, &length) == 0 ? value : -1;
}

static qkv_status add_sockets(int count, qkv_error *error) {
  if (count > SOCKETS_MAX) {
    return qkv_fail(error, QKV_UNAVAILABLE, "the service manager passed %d sockets, at most %d are allowed", count,
                    SOCKETS_MAX);
  }
  for (int i = 0; i < count; i++) {
    const int passed = SD_LISTEN_FDS_START + i;
    if (integer_option(passed, SO_TYPE) != SOCK_STREAM || integer_option(passed, SO_ACCEPTCONN) != 1 ||
        fcntl(passed, F_SETFL, O_NONBLOCK) != 0) {
      return qkv_fail(error, QKV_UNAVAILABLE,
                      "the service manager passed descriptor %d, which is not a listening stream socket "
                      "(ListenStream= without Accept=yes)",
                      passed);
    }
    service.sockets[service.count++] = passed;
  }
  return QKV_OK;
}

qkv_status qkv_service_setup(qkv_error *error) {
  if (getenv("LISTEN_FDS") == NULL && getenv("NOTIFY_SOCKET") == NULL) return QKV_OK;
  void *library = dlopen("libsystemd.so.0", RTLD_NOW);
  if (library == NULL) {
    qkv_log(QKV_LOG_WARN, "no libsystemd: sockets of the service manager are not used, and it is told nothing",
            "{s:s}", "reason", dlerror());
    return QKV_OK;
  }
  __typeof__(sd_listen_fds) *listen_fds = (__typeof__(sd_listen_fds) *)dlsym(library, "sd_listen_fds");
  __typeof__(sd_watchdog_enabled) *watchdog =
      (__typeof__(sd_watchdog_enabled) *)dlsym(library, "sd_watchdog_enabled");
  service.notify = (__typeof__(sd_notify) *)dlsym(library, "sd_notify");
  if (watchdog != NULL && watchdog(true, &service.watchdog_us) <= 0) service.watchdog_us = 0;
  const int count = listen_fds != NULL ? listen_fds(true) : 0;
  if (count < 0) {
    return qkv_fail(error, QKV_UNAVAILABLE, "sockets of the service manager (LISTEN_FDS): %s", strerror(-count));
  }
  return add_sockets(count, error);
}

static bool is_bound_to(int socket, const struct sockaddr *address, socklen_t length) {
  socket_address bound = {0};
  socklen_t bound_length = sizeof(bound);
  if (getsockname(socket, &bound.any, &bound_length) != 0 || bound.any.sa_family != address->sa_family) return false;
  if (address->sa_family == AF_UNIX)  // the length may count the end of the path or not
    return strcmp(bound.local.sun_path, ((const struct sockaddr_un *)address)->sun_path) == 0;
  return bound_length == length && memcmp(&bound, address, length) == 0;
}

int qkv_service_take_socket(const struct sockaddr *address, socklen_t length) {
  for (int i = 0; i < service.count; i++) {
    const int passed = service.sockets[i];
    if (passed < 0 || !is_bound_to(passed, address, length)) continue;
    service.sockets[i] = -1;
    return passed;
  }
  return -1;
}

qkv_status qkv_service_check_taken(qkv_error *error) {
  for (int i = 0; i < service.count; i++) {
    if (service.sockets[i] < 0) continue;
    char text[ADDRESS_TEXT];
    print_address(service.sockets[i], text);
    return qkv_fail(error, QKV_UNAVAILABLE, "the service manager passed a socket at %s, which no --listen names",
                    text);
  }
  return QKV_OK;
}

void qkv_service_notify(const char *state) {
  if (service.notify == NULL) return;
  const int result = service.notify(false, state);
  if (result < 0) {
    qkv_log(QKV_LOG_WARN, "cannot tell the service manager", "{s:s, s:s}", "state", state, "reason",
            strerror(-result));
  }
}

uint64_t qkv_service_watchdog_ms(void) {
  const uint64_t every_ms = service.watchdog_us / 2000;
  return service.watchdog_us > 0 && every_ms == 0 ? 1 : every_ms;
}
