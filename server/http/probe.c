#include "server/http/probe.h"

#include <errno.h>
#include <netdb.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { TIMEOUT_S = 5, HOST_MAX = 255, ANSWER_MAX = 2048 };
#define UNIX_PREFIX "unix:"
#define REQUEST "GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

static int open_socket(int family) {
  const struct timeval timeout = {.tv_sec = TIMEOUT_S};
  const int made = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (made < 0) return -1;
  (void)setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  (void)setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);  // of connect(), too
  return made;
}

static int connect_to(int family, const struct sockaddr *address, socklen_t length) {
  const int made = open_socket(family);
  if (made >= 0 && connect(made, address, length) == 0) return made;
  const int reason = errno;
  if (made >= 0) close(made);
  errno = reason;
  return -1;
}

static qkv_status connect_unix(const char *path, int *out, qkv_error *error) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--admin-listen is %s%s, a path that is too long", UNIX_PREFIX,
                    path);
  memcpy(address.sun_path, path, strlen(path) + 1);
  *out = connect_to(AF_UNIX, (const struct sockaddr *)&address, sizeof address);
  return QKV_OK;
}

static qkv_status connect_tcp(const char *text, int *out, qkv_error *error) {
  char host[HOST_MAX + 1];
  const char *colon = strrchr(text, ':'), *begin = text;
  size_t length = colon == NULL ? 0 : (size_t)(colon - text);
  if (length >= 2 && text[0] == '[' && text[length - 1] == ']') {
    begin++;
    length -= 2;
  }
  if (length == 0 || length > HOST_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--admin-listen is \"%s\", must be unix:PATH or HOST:PORT", text);
  memcpy(host, begin, length);
  host[length] = '\0';
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
  struct addrinfo *found = NULL;
  const int failed = getaddrinfo(host, colon + 1, &hints, &found);
  if (failed != 0) return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", text, gai_strerror(failed));
  *out = -1;
  for (const struct addrinfo *at = found; at != NULL && *out < 0; at = at->ai_next)
    *out = connect_to(at->ai_family, at->ai_addr, at->ai_addrlen);
  const int reason = errno;
  freeaddrinfo(found);
  errno = reason;
  return QKV_OK;
}

// Reads the whole answer, up to `bytes`.
static void read_answer(int socket, char *answer, size_t bytes) {
  size_t length = 0;
  while (length + 1 < bytes) {
    const ssize_t got = recv(socket, answer + length, bytes - 1 - length, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    length += (size_t)got;
  }
  answer[length] = '\0';
}

static void ask(int socket, char *answer, size_t bytes) {
  if (send(socket, REQUEST, strlen(REQUEST), MSG_NOSIGNAL) == (ssize_t)strlen(REQUEST))
    read_answer(socket, answer, bytes);
}

static void ask_encrypted(int socket, char *answer, size_t bytes) {
  SSL_CTX *context = SSL_CTX_new(TLS_client_method());
  SSL *ssl = context == NULL ? NULL : SSL_new(context);
  if (ssl == NULL || SSL_set_fd(ssl, socket) != 1) abort();
  (void)signal(SIGPIPE, SIG_IGN);  // OpenSSL writes without MSG_NOSIGNAL
  int length = 0;
  if (SSL_connect(ssl) == 1 && SSL_write(ssl, REQUEST, (int)strlen(REQUEST)) == (int)strlen(REQUEST)) {
    int got = 0;
    while (length + 1 < (int)bytes && (got = SSL_read(ssl, answer + length, (int)bytes - 1 - length)) > 0)
      length += got;
  }
  answer[length] = '\0';
  SSL_free(ssl);
  SSL_CTX_free(context);
}

static qkv_status judge(const char *address, const char *answer, qkv_error *error) {
  const char *body = strstr(answer, "\r\n\r\n");
  if (strncmp(answer, "HTTP/1.1 200 ", strlen("HTTP/1.1 200 ")) == 0) return QKV_OK;
  if (body == NULL) return qkv_fail(error, QKV_UNAVAILABLE, "%s does not answer", address);
  return qkv_fail(error, QKV_UNAVAILABLE, "%s is not ready: %.*s", address, (int)strcspn(body + 4, "\r\n"), body + 4);
}

qkv_status qkvi_probe(const char *address, bool tls, qkv_error *error) {
  char answer[ANSWER_MAX] = "";
  int opened = -1;
  const bool is_unix = strncmp(address, UNIX_PREFIX, strlen(UNIX_PREFIX)) == 0;
  QKV_TRY(is_unix ? connect_unix(address + strlen(UNIX_PREFIX), &opened, error)
                  : connect_tcp(address, &opened, error));
  if (opened < 0) return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", address, strerror(errno));
  if (tls) {
    ask_encrypted(opened, answer, sizeof answer);
  } else {
    ask(opened, answer, sizeof answer);
  }
  close(opened);
  return judge(address, answer, error);
}
