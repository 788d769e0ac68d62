#include "server/rpc_inspect.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include "engine/base/histogram.h"
#include "engine/base/log.h"

// Descriptors are looked up in blocks, which are allocated when the first connection of one comes, and kept.
enum { BLOCK = 1024, BLOCKS = 1024 };
// gRPC 1.51 reads into at most so many pieces.
#define PIECES_MAX 64
// Of a turn: work in microseconds, and bytes.
#define TURN_WORK 200
#define TURN_BYTES_MIN 1024
#define TURN_BYTES_FIRST 4096
#define TURN_BYTES_MAX (2 << 20)
// gRPC reads again at once after an EAGAIN that follows bytes: only the second one makes it wait.
#define TURN_REFUSALS 2
#define LOG_PAUSE_NS UINT64_C(60000000000)

typedef struct inspected {
  _Atomic bool open;
  bool tls;
  bool closed;               // for what it has sent
  int refusals;              // EAGAINs that are still to come until the next turn
  int poller;                // the epoll instance that gRPC watches it with; -1: none is known, so it takes no turns
  uint32_t turn, turn_most;  // bytes of this turn, and at most
  struct epoll_event watched;
  qkvi_http2_frames frames;  // with TLS only their work
} inspected;

static _Atomic(inspected *) blocks[BLOCKS];
static pthread_mutex_t growing = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t points_s;
static _Atomic uint64_t closed[QKVI_HTTP2_VERDICTS];
// Whose bytes this thread has read last: gRPC decrypts them before it reads others.
static _Thread_local int reading = -1;

static inspected *find(int connection) {
  if (connection < 0 || connection >= BLOCK * BLOCKS) return NULL;
  inspected *block = atomic_load_explicit(&blocks[connection / BLOCK], memory_order_acquire);
  if (block == NULL) return NULL;
  inspected *found = &block[connection % BLOCK];
  return atomic_load_explicit(&found->open, memory_order_acquire) ? found : NULL;
}

void qkvi_inspect_setup(uint64_t limit) {
  // gRPC calls ours only if they are found first.
  assert(dlsym(RTLD_DEFAULT, "recvmsg") == (void *)recvmsg && dlsym(RTLD_DEFAULT, "SSL_read") == (void *)SSL_read);
  points_s = limit;
}

uint64_t qkvi_inspect_closed(qkvi_http2_verdict reason) {
  return closed[reason];
}

void qkvi_inspect_open(int connection, bool tls) {
  assert(connection >= 0 && connection < BLOCK * BLOCKS);
  pthread_mutex_lock(&growing);
  inspected *block = blocks[connection / BLOCK];
  if (block == NULL) {
    block = calloc(BLOCK, sizeof(*block));
    assert(block != NULL);
    atomic_store_explicit(&blocks[connection / BLOCK], block, memory_order_release);
  }
  pthread_mutex_unlock(&growing);
  inspected *opened = &block[connection % BLOCK];
  opened->tls = tls;
  opened->closed = false;
  opened->refusals = 0;
  opened->poller = -1;
  opened->turn = 0;
  opened->turn_most = TURN_BYTES_FIRST;
  qkvi_http2_frames_init(&opened->frames, qkv_stage_now());
  atomic_store_explicit(&opened->open, true, memory_order_release);
}

// ---- Closing ----

// Logs that once a minute for each reason.
static void log_closed(int connection, qkvi_http2_verdict reason) {
  static _Atomic uint64_t said_ns[QKVI_HTTP2_VERDICTS];
  const uint64_t now = qkv_stage_now();
  uint64_t last = said_ns[reason];
  if (last != 0 && now < last + LOG_PAUSE_NS) return;
  if (!atomic_compare_exchange_strong(&said_ns[reason], &last, now)) return;
  struct sockaddr_storage peer = {0};
  socklen_t length = sizeof(peer);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  if (getpeername(connection, (struct sockaddr *)&peer, &length) == 0)
    (void)getnameinfo((struct sockaddr *)&peer, length, host, sizeof host, port, sizeof port,
                      NI_NUMERICHOST | NI_NUMERICSERV);
  if (reason == QKVI_HTTP2_HEADER_BLOCK)
    qkv_log(QKV_LOG_WARN, "a connection is closed: its header block is too long", "{s:s, s:s, s:i}", "peer", host,
            "port", port, "bytes_max", QKVI_HTTP2_BLOCK_BYTES_MAX);
  else
    qkv_log(QKV_LOG_WARN, "a connection is closed: it sends too many control frames", "{s:s, s:s, s:s}", "peer", host,
            "port", port, "limit", "limit-control-frames");
}

static void note_closed(int connection, qkvi_http2_verdict reason) {
  atomic_fetch_add_explicit(&closed[reason], 1, memory_order_relaxed);
  log_closed(connection, reason);
}

// ---- Turns ----

static int watch(int poller, int operation, int file, struct epoll_event *event) {
  static _Atomic(int (*)(int, int, int, struct epoll_event *)) real;
  if (real == NULL) real = (int (*)(int, int, int, struct epoll_event *))dlsym(RTLD_NEXT, "epoll_ctl");
  return real(poller, operation, file, event);
}

static void begin_turn(inspected *connection) {
  const uint64_t work = connection->frames.work;
  const bool full = connection->turn >= connection->turn_most;
  if (work > TURN_WORK && connection->turn_most > TURN_BYTES_MIN) connection->turn_most /= 2;
  if (work < TURN_WORK / 4 && full && connection->turn_most < TURN_BYTES_MAX) connection->turn_most *= 2;
  connection->turn = 0;
  connection->frames.work = 0;
}

// Whether the connection has to wait until epoll has reported the others that are ready. epoll reports this one
// again, now or, where gRPC does not wait yet, as soon as it does.
static bool yields(inspected *connection, int file) {
  if (connection->refusals == 0) {
    if (connection->turn < connection->turn_most && connection->frames.work <= TURN_WORK) return false;
    begin_turn(connection);
    connection->refusals = connection->poller >= 0 ? TURN_REFUSALS : 0;
  }
  if (connection->refusals == 0) return false;
  connection->refusals--;
  return watch(connection->poller, EPOLL_CTL_MOD, file, &connection->watched) == 0;
}

// ---- Reading ----

static ssize_t receive(int file, struct msghdr *message, int flags) {
  static _Atomic(ssize_t(*)(int, struct msghdr *, int)) real;
  if (real == NULL) real = (ssize_t(*)(int, struct msghdr *, int))dlsym(RTLD_NEXT, "recvmsg");
  return real(file, message, flags);
}

// As recvmsg(2), of at most so many bytes.
static ssize_t receive_some(int file, struct msghdr *message, int flags, size_t most) {
  struct iovec pieces[PIECES_MAX];
  struct msghdr some = *message;
  size_t count = 0;
  if (message->msg_iovlen > PIECES_MAX) return receive(file, message, flags);
  for (; count < message->msg_iovlen && most > 0; count++) {
    pieces[count] = message->msg_iov[count];
    if (pieces[count].iov_len > most) pieces[count].iov_len = most;
    most -= pieces[count].iov_len;
  }
  some.msg_iov = pieces;
  some.msg_iovlen = count;
  const ssize_t received = receive(file, &some, flags);
  message->msg_namelen = some.msg_namelen;
  message->msg_controllen = some.msg_controllen;
  message->msg_flags = some.msg_flags;
  return received;
}

static qkvi_http2_verdict inspect(inspected *connection, const struct msghdr *message, size_t count) {
  qkvi_http2_verdict verdict = QKVI_HTTP2_GOOD;
  for (size_t i = 0; i < message->msg_iovlen && count > 0 && verdict == QKVI_HTTP2_GOOD; i++) {
    const struct iovec *piece = &message->msg_iov[i];
    const size_t bytes = piece->iov_len < count ? piece->iov_len : count;
    verdict = qkvi_http2_frames_read(&connection->frames, piece->iov_base, bytes, points_s, qkv_stage_now);
    count -= bytes;
  }
  return verdict;
}

static ssize_t refuse(int reason) {
  errno = reason;
  return -1;
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
ssize_t recvmsg(int file, struct msghdr *message, int flags) {
  inspected *connection = find(file);
  if (connection == NULL) return receive(file, message, flags);
  reading = file;
  if (connection->closed) return refuse(ECONNRESET);
  if (yields(connection, file)) return refuse(EAGAIN);
  const ssize_t received = receive_some(file, message, flags, connection->turn_most - connection->turn);
  if (received < 0 && errno == EAGAIN) begin_turn(connection);
  if (received <= 0) return received;
  connection->turn += (uint32_t)received;
  if (connection->tls) return received;
  const qkvi_http2_verdict verdict = inspect(connection, message, (size_t)received);
  if (verdict == QKVI_HTTP2_GOOD) return received;
  connection->closed = true;
  note_closed(file, verdict);
  return refuse(ECONNRESET);
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
int epoll_ctl(int poller, int operation, int file, struct epoll_event *event) {
  inspected *connection = operation == EPOLL_CTL_ADD ? find(file) : NULL;
  if (connection != NULL) {
    connection->poller = poller;
    connection->watched = *event;
  }
  return watch(poller, operation, file, event);
}

// ---- TLS ----

static int frames_index;

static void free_frames(void *parent, void *frames, CRYPTO_EX_DATA *data, int index, long argument, void *pointer) {
  (void)parent, (void)data, (void)index, (void)argument, (void)pointer;
  free(frames);
}

static void make_index(void) {
  frames_index = SSL_get_ex_new_index(0, NULL, NULL, NULL, free_frames);
  assert(frames_index >= 0);
}

static qkvi_http2_frames *frames_of(SSL *ssl) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_index);
  qkvi_http2_frames *frames = SSL_get_ex_data(ssl, frames_index);
  if (frames != NULL) return frames;
  frames = malloc(sizeof(*frames));
  assert(frames != NULL);
  qkvi_http2_frames_init(frames, qkv_stage_now());
  const int kept = SSL_set_ex_data(ssl, frames_index, frames);
  assert(kept == 1);
  (void)kept;
  return frames;
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
int SSL_read(SSL *ssl, void *bytes, int most) {
  static _Atomic(int (*)(SSL *, void *, int)) real;
  if (real == NULL) real = (int (*)(SSL *, void *, int))dlsym(RTLD_NEXT, "SSL_read");
  const int count = real(ssl, bytes, most);
  if (count <= 0 || SSL_is_server(ssl) == 0) return count;
  qkvi_http2_frames *frames = frames_of(ssl);
  const qkvi_http2_verdict verdict = qkvi_http2_frames_read(frames, bytes, (size_t)count, points_s, qkv_stage_now);
  inspected *connection = find(reading);
  if (connection != NULL) connection->frames.work += frames->work;
  frames->work = 0;
  if (verdict == QKVI_HTTP2_GOOD) return count;
  note_closed(reading, verdict);
  ERR_raise(ERR_LIB_USER, ERR_R_PASSED_INVALID_ARGUMENT);
  return -1;
}
