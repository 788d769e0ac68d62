#include "client/bench/raw.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/bench/bench.h"

static bool write_all(int socket, const char *data, size_t size) {
  while (size > 0) {
    ssize_t written = send(socket, data, size, MSG_NOSIGNAL);
    if (written <= 0) return false;
    data += written;
    size -= (size_t)written;
  }
  return true;
}

static bool read_all(int socket, char *data, size_t size) {
  while (size > 0) {
    ssize_t got = read(socket, data, size);
    if (got <= 0) return false;
    data += got;
    size -= (size_t)got;
  }
  return true;
}

bool qkv_raw_pair(bool tcp, int pair[2]) {
  if (!tcp) return socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0;
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  bool ok = listener >= 0 && bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0 &&
            getsockname(listener, (struct sockaddr *)&address, &length) == 0;
  pair[0] = ok ? socket(AF_INET, SOCK_STREAM, 0) : -1;
  ok = pair[0] >= 0 && connect(pair[0], (struct sockaddr *)&address, length) == 0;
  pair[1] = ok ? accept(listener, NULL, NULL) : -1;
  if (listener >= 0) close(listener);
  int on = 1;
  for (int i = 0; i < 2; i++) {
    if (pair[i] >= 0) setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return pair[1] >= 0;
}

bool qkv_raw_start(qkv_raw *raw, bool tcp, size_t up, size_t down) {
  *raw = (qkv_raw){.up = up, .down = down};
  int pair[2];
  if (!qkv_raw_pair(tcp, pair)) return false;
  raw->buffer = qkv_bench_rows(up > down ? up : down, 7);
  raw->peer = fork();
  if (raw->peer < 0) return false;
  if (raw->peer == 0) {
    close(pair[0]);
    while (read_all(pair[1], raw->buffer, up) && write_all(pair[1], raw->buffer, down)) {
    }
    _exit(0);
  }
  close(pair[1]);
  raw->socket = pair[0];
  return true;
}

double qkv_raw_exchange(qkv_raw *raw) {
  double begin = qkv_bench_now();
  if (!write_all(raw->socket, raw->buffer, raw->up) || !read_all(raw->socket, raw->buffer, raw->down)) return -1;
  return qkv_bench_now() - begin;
}

void qkv_raw_stop(qkv_raw *raw) {
  if (raw->peer > 0) {
    close(raw->socket);
    waitpid(raw->peer, NULL, 0);
  }
  free(raw->buffer);
  *raw = (qkv_raw){0};
}
