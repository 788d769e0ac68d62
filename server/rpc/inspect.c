#include "server/rpc/inspect.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/histogram.h"
#include "engine/base/log.h"
#include "server/rpc/debts.h"

// Descriptors are looked up in blocks, which are allocated when the first connection of one comes, and kept. There
// are twice as many descriptors as limit-connections may be.
enum { BLOCK = 1024, BLOCKS = 2048 };
// gRPC 1.51 reads into at most so many pieces.
#define PIECES_MAX 64
// Of a turn: work in microseconds, and bytes.
#define TURN_WORK 200
#define TURN_BYTES_MIN 1024
#define TURN_BYTES_FIRST 4096
#define TURN_BYTES_MAX (2 << 20)
// gRPC reads again at once after an EAGAIN that follows bytes: only the second one makes it wait.
#define TURN_REFUSALS 2
#define PAUSE_NS UINT64_C(5000000)
#define CONNECTION_POINTS 10
// Of a turn between pauses for messages that are not whole: 6.4 MB/s.
#define PAUSED_BYTES (32 * 1024)
#define LOG_PAUSE_NS UINT64_C(60000000000)

typedef struct inspected {
  _Atomic bool open, tls;
  _Atomic bool read;        // gRPC has read something from it
  _Atomic bool closed;      // for what it has sent
  _Atomic uint64_t held;    // bytes of messages that are not whole, as counted in all_held
  _Atomic uint32_t serial;  // of the connection, as descriptors come again; changed with the lock
  pthread_mutex_t lock;     // of what follows
  int poller;               // the epoll instance that gRPC watches it with; -1: none is known, so it takes no turns
  struct epoll_event watched;
  int refusals;              // EAGAINs that are still to come until the next turn
  uint32_t turn, turn_most;  // bytes of this turn, and at most
  int32_t peer;              // its place (debts.h)
  uint64_t resumes_ns;       // a pause ends then; 0: there is none
  bool listed;               // among the paused ones, with their lock; then the next one, or -1
  int next;
  qkvi_http2_frames frames;
  qkvi_http2_cursor replies;
} inspected;

static _Atomic(inspected *) blocks[BLOCKS];
static pthread_mutex_t growing = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t points_s, held_max, all_held, pauses;
static _Atomic uint64_t closed[QKVI_HTTP2_VERDICTS];
// The connection that this thread has opened last: gRPC makes the SSL object of one before the next is opened.
static _Thread_local int opened_last = -1;

static inspected *place_of(int connection) {
  if (connection < 0 || connection >= BLOCK * BLOCKS) return NULL;
  inspected *block = atomic_load_explicit(&blocks[connection / BLOCK], memory_order_acquire);
  return block == NULL ? NULL : &block[connection % BLOCK];
}

static inspected *find(int connection) {
  inspected *found = place_of(connection);
  return found != NULL && atomic_load_explicit(&found->open, memory_order_acquire) ? found : NULL;
}

// With its lock: whether the descriptor is still that of the connection.
static bool is_same(const inspected *connection, uint32_t serial) {
  return connection->open && connection->serial == serial;
}

uint64_t qkvi_inspect_closed(qkvi_http2_verdict reason) {
  return closed[reason];
}

uint64_t qkvi_inspect_held(void) {
  return all_held;
}

uint64_t qkvi_inspect_pauses(void) {
  return pauses;
}

static void add_block(int connection) {
  pthread_mutex_lock(&growing);
  if (blocks[connection / BLOCK] == NULL) {
    inspected *block = calloc(BLOCK, sizeof(*block));
    assert(block != NULL);
    for (size_t i = 0; i < BLOCK; i++) pthread_mutex_init(&block[i].lock, NULL);
    atomic_store_explicit(&blocks[connection / BLOCK], block, memory_order_release);
  }
  pthread_mutex_unlock(&growing);
}

// Counts what the connection holds now. With its lock.
static void count_held(inspected *connection, uint64_t now) {
  if (connection->held == now) return;
  const uint64_t before = atomic_exchange(&connection->held, now);
  atomic_fetch_add(&all_held, now - before);
}

static bool has_many_points(inspected *connection) {
  const uint64_t half = points_s * QKVI_HTTP2_BURST_S / 2;
  return points_s > 0 && connection->frames.points > half &&
         qkvi_http2_frames_points(&connection->frames, points_s, qkv_stage_now()) > half;
}

static void raise_debt(int32_t peer, uint64_t points, uint64_t now) {
  const uint64_t most = points_s * QKVI_HTTP2_BURST_S / 5 * 4;
  qkvi_debts_raise(peer, points < most ? points : most, points_s, now);
}

// With its lock.
static void leave_debt(inspected *connection) {
  const uint64_t now = qkv_stage_now();
  raise_debt(connection->peer, qkvi_http2_frames_points(&connection->frames, points_s, now), now);
}

// Nothing more is counted for the connection.
static void forget(inspected *connection) {
  const bool was_open = atomic_exchange(&connection->open, false);
  pthread_mutex_lock(&connection->lock);
  if (was_open) leave_debt(connection);
  qkvi_http2_streams_clear(&connection->frames.streams);
  count_held(connection, 0);
  pthread_mutex_unlock(&connection->lock);
}

bool qkvi_inspect_open(int file, bool tls, const struct sockaddr *peer) {
  assert(file >= 0 && file < BLOCK * BLOCKS);
  add_block(file);
  inspected *opened = place_of(file);
  assert(opened != NULL);
  forget(opened);  // the one that had the descriptor before
  pthread_mutex_lock(&opened->lock);
  opened->tls = tls;
  opened->read = false;
  opened->closed = false;
  opened->serial++;
  opened->poller = -1;
  opened->refusals = 0;
  opened->turn = 0;
  opened->turn_most = TURN_BYTES_FIRST;
  opened->replies = (qkvi_http2_cursor){0};
  opened->peer = qkvi_debts_place(peer);
  opened->resumes_ns = 0;
  const uint64_t now = qkv_stage_now();
  qkvi_http2_frames_init(&opened->frames, now);
  opened->frames.points = qkvi_debts_owed(opened->peer, points_s, now);
  raise_debt(opened->peer, opened->frames.points + CONNECTION_POINTS, now);
  const bool slow = has_many_points(opened);
  pthread_mutex_unlock(&opened->lock);
  atomic_store_explicit(&opened->open, true, memory_order_release);
  opened_last = file;
  return slow;
}

bool qkvi_inspect_waits(int file) {
  const inspected *connection = find(file);
  int bytes = 0;
  return connection != NULL && !connection->read && ioctl(file, FIONREAD, &bytes) == 0 && bytes > 0;
}

// ---- Closing ----

// Logs that once a minute for each reason.
static void log_closed(int file, qkvi_http2_verdict reason) {
  static const struct {
    const char *message, *limit;
  } texts[QKVI_HTTP2_VERDICTS] = {
      [QKVI_HTTP2_HEADER_BLOCK] = {"a connection is closed: its header block is too long", "64 KiB"},
      [QKVI_HTTP2_CONTROL_FRAMES] = {"a connection is closed: it sends too many control frames",
                                     "limit-control-frames"},
      [QKVI_HTTP2_REQUEST_BYTES] = {"a connection is closed: it holds the most bytes of messages that are not whole",
                                    "4 times limit-message, at least 256 MiB"}};
  static _Atomic uint64_t said_ns[QKVI_HTTP2_VERDICTS];
  const uint64_t now = qkv_stage_now();
  uint64_t last = said_ns[reason];
  if (last != 0 && now < last + LOG_PAUSE_NS) return;
  if (!atomic_compare_exchange_strong(&said_ns[reason], &last, now)) return;
  struct sockaddr_storage peer = {0};
  socklen_t length = sizeof(peer);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  if (getpeername(file, (struct sockaddr *)&peer, &length) == 0)
    (void)getnameinfo((struct sockaddr *)&peer, length, host, sizeof host, port, sizeof port,
                      NI_NUMERICHOST | NI_NUMERICSERV);
  qkv_log(QKV_LOG_WARN, texts[reason].message, "{s:s, s:s, s:s}", "peer", host, "port", port, "limit",
          texts[reason].limit);
}

// With its lock.
static void close_for(inspected *connection, int file, qkvi_http2_verdict reason) {
  if (atomic_exchange(&connection->closed, true)) return;
  atomic_fetch_add_explicit(&closed[reason], 1, memory_order_relaxed);
  log_closed(file, reason);
}

// ---- The functions that ours replace ----

// The one that gRPC and OpenSSL would call otherwise, kept in found. It is loaded explicitly: gcc 12 calls through an
// _Atomic pointer to a function without an atomic load.
static void *find_next(_Atomic(void *) *found, const char *name) {
  void *function = atomic_load_explicit(found, memory_order_acquire);
  if (function != NULL) return function;
  function = dlsym(RTLD_NEXT, name);
  assert(function != NULL);
  atomic_store_explicit(found, function, memory_order_release);
  return function;
}

// ---- Turns ----

static int watch(int poller, int operation, int file, struct epoll_event *event) {
  static _Atomic(void *) found;
  __typeof__(epoll_ctl) *real = (__typeof__(epoll_ctl) *)find_next(&found, "epoll_ctl");
  return real(poller, operation, file, event);
}

// Makes epoll report the connection, so that gRPC reads from it. With its lock.
static bool wake(inspected *connection, int file) {
  return watch(connection->poller, EPOLL_CTL_MOD, file, &connection->watched) == 0;
}

static void begin_turn(inspected *connection) {
  const uint64_t work = connection->frames.work;
  const bool full = connection->turn >= connection->turn_most;
  if (work > TURN_WORK && connection->turn_most > TURN_BYTES_MIN) connection->turn_most /= 2;
  if (work < TURN_WORK / 4 && full && connection->turn_most < TURN_BYTES_MAX) connection->turn_most *= 2;
  connection->turn = 0;
  connection->frames.work = 0;
}

// ---- Pauses ----

// Those that end first come first. Each has the list's next descriptor.
static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int first, last;  // -1: none
  bool started;
} paused = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .first = -1, .last = -1};

static bool holds_much(const inspected *connection) {
  return connection->held > held_max / 8 && all_held > held_max / 4 * 3;
}

// After a turn.
static bool has_to_pause(inspected *connection) {
  if (connection->poller < 0) return false;
  if (!holds_much(connection)) return has_many_points(connection);
  connection->turn_most = PAUSED_BYTES;
  return true;
}

static int take_paused(void) {
  pthread_mutex_lock(&paused.lock);
  while (paused.first < 0) pthread_cond_wait(&paused.changed, &paused.lock);
  const int taken = paused.first;
  inspected *connection = place_of(taken);
  paused.first = connection->next;
  connection->listed = false;
  pthread_mutex_unlock(&paused.lock);
  return taken;
}

// When the pause of the connection ends; 0: it has none any more. Where it is over, gRPC reads again.
static uint64_t resume(int file) {
  inspected *connection = place_of(file);
  pthread_mutex_lock(&connection->lock);
  const uint64_t until = connection->open ? connection->resumes_ns : 0;
  if (until != 0 && until <= qkv_stage_now()) (void)wake(connection, file);
  pthread_mutex_unlock(&connection->lock);
  return until;
}

static void *end_pauses(void *unused) {
  (void)unused;
  for (;;) {
    const int file = take_paused();
    for (uint64_t until, now; (until = resume(file)) > (now = qkv_stage_now());) {
      const struct timespec rest = {.tv_nsec = (long)(until - now)};
      (void)nanosleep(&rest, NULL);
    }
  }
  return NULL;
}

// With the list's lock.
static void start_pauses(void) {
  sigset_t all, before;
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that wait for them
  if (pthread_create(&thread, NULL, end_pauses, NULL) != 0) abort();
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  (void)pthread_setname_np(thread, "qkvd-pauses");
  (void)pthread_detach(thread);
  paused.started = true;
}

// With the connection's lock.
static void pause_now(inspected *connection, int file) {
  connection->resumes_ns = qkv_stage_now() + PAUSE_NS;
  atomic_fetch_add_explicit(&pauses, 1, memory_order_relaxed);
  pthread_mutex_lock(&paused.lock);
  if (!connection->listed) {
    connection->listed = true;
    connection->next = -1;
    if (paused.first < 0) paused.first = file;
    if (paused.first != file) place_of(paused.last)->next = file;
    paused.last = file;
  }
  if (!paused.started) start_pauses();
  pthread_cond_signal(&paused.changed);
  pthread_mutex_unlock(&paused.lock);
}

// Whether the connection has to wait until epoll has reported the others that are ready. epoll reports this one
// again, now or, where gRPC does not wait yet, as soon as it does.
static bool yields(inspected *connection, int file) {
  if (connection->resumes_ns != 0 && connection->resumes_ns > qkv_stage_now()) return true;
  connection->resumes_ns = 0;
  if (connection->refusals == 0) {
    if (connection->turn < connection->turn_most && connection->frames.work <= TURN_WORK) return false;
    begin_turn(connection);
    if (has_to_pause(connection)) {
      pause_now(connection, file);
      return true;
    }
    connection->refusals = connection->poller >= 0 ? TURN_REFUSALS : 0;
  }
  if (connection->refusals == 0) return false;
  connection->refusals--;
  return wake(connection, file);
}

// Bytes that the connection may read now; 0: it yields.
static size_t turn_left(inspected *connection, int file) {
  pthread_mutex_lock(&connection->lock);
  const size_t left = yields(connection, file) ? 0 : connection->turn_most - connection->turn;
  pthread_mutex_unlock(&connection->lock);
  return left;
}

// What recvmsg has returned: 0 where the socket is empty.
static void take_turn(inspected *connection, size_t received) {
  pthread_mutex_lock(&connection->lock);
  if (received == 0) begin_turn(connection);
  connection->turn += (uint32_t)received;
  pthread_mutex_unlock(&connection->lock);
}

// ---- Reading ----

static ssize_t receive(int file, struct msghdr *message, int flags) {
  static _Atomic(void *) found;
  __typeof__(recvmsg) *real = (__typeof__(recvmsg) *)find_next(&found, "recvmsg");
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

// ---- Messages that are not whole ----

// The connection that holds the most, and how much: others may change that meanwhile.
static inspected *find_most(int *file, uint64_t *held) {
  inspected *most = NULL;
  *held = 0;
  for (int i = 0; i < BLOCK * BLOCKS; i++) {
    inspected *each = place_of(i);
    if (each == NULL) i += BLOCK - 1;
    const uint64_t now = each == NULL ? 0 : each->held;
    if (now <= *held) continue;
    most = each;
    *held = now;
    *file = i;
  }
  return most;
}

// While all hold too much, closes the connection that holds the most. Its descriptor may be that of another one by
// now, which does not hold as much.
static void bound_held(void) {
  inspected *most;
  int file = -1;
  uint64_t held;
  while (all_held > held_max && (most = find_most(&file, &held)) != NULL) {
    pthread_mutex_lock(&most->lock);
    if (most->open && most->held >= held) {
      close_for(most, file, QKVI_HTTP2_REQUEST_BYTES);
      count_held(most, 0);
      if (most->poller >= 0) (void)wake(most, file);
    }
    pthread_mutex_unlock(&most->lock);
  }
}

// ---- Bytes ----

// What a connection has sent, or is sent.
typedef struct passing {
  inspected *connection;
  int file;
  uint32_t serial;
  const struct iovec *pieces;
  size_t pieces_count, bytes;
} passing;

static bool is_closed(const passing *sent) {
  pthread_mutex_lock(&sent->connection->lock);
  const bool now = is_same(sent->connection, sent->serial) && sent->connection->closed;
  pthread_mutex_unlock(&sent->connection->lock);
  return now;
}

// Not GOOD: the connection is to be closed.
static qkvi_http2_verdict inspect(const passing *sent) {
  inspected *connection = sent->connection;
  qkvi_http2_verdict verdict = QKVI_HTTP2_GOOD;
  pthread_mutex_lock(&connection->lock);
  size_t left = is_same(connection, sent->serial) ? sent->bytes : 0;
  for (size_t i = 0; i < sent->pieces_count && left > 0 && verdict == QKVI_HTTP2_GOOD; i++) {
    const size_t bytes = sent->pieces[i].iov_len < left ? sent->pieces[i].iov_len : left;
    verdict = qkvi_http2_frames_read(&connection->frames, sent->pieces[i].iov_base, bytes, points_s, qkv_stage_now);
    left -= bytes;
  }
  if (verdict != QKVI_HTTP2_GOOD) close_for(connection, sent->file, verdict);
  if (!connection->closed) count_held(connection, connection->frames.streams.held);
  pthread_mutex_unlock(&connection->lock);
  if (all_held > held_max) bound_held();
  return verdict == QKVI_HTTP2_GOOD && is_closed(sent) ? QKVI_HTTP2_REQUEST_BYTES : verdict;
}

static void inspect_replies(const passing *replied) {
  inspected *connection = replied->connection;
  pthread_mutex_lock(&connection->lock);
  size_t left = is_same(connection, replied->serial) ? replied->bytes : 0;
  for (size_t i = 0; i < replied->pieces_count && left > 0; i++) {
    const size_t bytes = replied->pieces[i].iov_len < left ? replied->pieces[i].iov_len : left;
    qkvi_http2_replies_read(&connection->replies, &connection->frames.streams, replied->pieces[i].iov_base, bytes);
    left -= bytes;
  }
  if (!connection->closed) count_held(connection, connection->frames.streams.held);
  pthread_mutex_unlock(&connection->lock);
}

static ssize_t fail(int reason) {
  errno = reason;
  return -1;
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
ssize_t recvmsg(int file, struct msghdr *message, int flags) {
  inspected *connection = find(file);
  if (connection == NULL) return receive(file, message, flags);
  if (connection->closed) {
    forget(connection);
    return fail(ECONNRESET);
  }
  const size_t most = turn_left(connection, file);
  if (most == 0) return fail(EAGAIN);
  const ssize_t received = receive_some(file, message, flags, most);
  if (received < 0 && errno != EAGAIN) {
    if (errno != EINTR) forget(connection);
    return received;
  }
  take_turn(connection, received > 0 ? (size_t)received : 0);
  if (received == 0) forget(connection);
  if (received <= 0) return received;
  if (!connection->read) connection->read = true;
  if (connection->tls) return received;
  const passing sent = {.connection = connection,
                        .file = file,
                        .serial = connection->serial,
                        .pieces = message->msg_iov,
                        .pieces_count = message->msg_iovlen,
                        .bytes = (size_t)received};
  if (inspect(&sent) == QKVI_HTTP2_GOOD) return received;
  forget(connection);
  return fail(ECONNRESET);
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
ssize_t sendmsg(int file, const struct msghdr *message, int flags) {
  static _Atomic(void *) found;
  __typeof__(sendmsg) *real = (__typeof__(sendmsg) *)find_next(&found, "sendmsg");
  const ssize_t sent = real(file, message, flags);
  inspected *connection = sent > 0 ? find(file) : NULL;
  if (connection != NULL && !connection->tls)
    inspect_replies(&(passing){.connection = connection,
                               .file = file,
                               .serial = connection->serial,
                               .pieces = message->msg_iov,
                               .pieces_count = message->msg_iovlen,
                               .bytes = (size_t)sent});
  return sent;
}

// The descriptor's next user may be none of gRPC's connections.
// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
int close(int file) {
  static _Atomic(void *) found;
  __typeof__(close) *real = (__typeof__(close) *)find_next(&found, "close");
  inspected *connection = find(file);
  if (connection != NULL) forget(connection);
  return real(file);
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
int epoll_ctl(int poller, int operation, int file, struct epoll_event *event) {
  inspected *connection = operation == EPOLL_CTL_ADD ? find(file) : NULL;
  if (connection != NULL) {
    pthread_mutex_lock(&connection->lock);
    connection->poller = poller;
    connection->watched = *event;
    pthread_mutex_unlock(&connection->lock);
  }
  return watch(poller, operation, file, event);
}

// ---- TLS ----

static int link_index;

// gRPC makes an SSL object on the thread that gives it a connection: the object has the connection's descriptor and
// serial number.
static void link_made(void *parent, void *unused, CRYPTO_EX_DATA *data, int index, long argument, void *pointer) {
  (void)parent, (void)unused, (void)argument, (void)pointer;
  const inspected *opened = find(opened_last);
  if (opened == NULL || !opened->tls) return;
  const uint64_t link = (uint64_t)opened->serial << 32 | (uint32_t)opened_last;
  (void)CRYPTO_set_ex_data(data, index, (void *)(uintptr_t)link);
}

// False: no connection of ours, or no longer. It may end, and its descriptor be another one's, at any time: gRPC
// decrypts what it has read when the socket may be closed.
static bool find_linked(const SSL *ssl, passing *found) {
  if (SSL_is_server(ssl) == 0) return false;
  const uint64_t link = (uintptr_t)SSL_get_ex_data(ssl, link_index);
  found->file = (int)(link & UINT32_MAX);
  found->serial = (uint32_t)(link >> 32);
  found->connection = link != 0 ? find(found->file) : NULL;
  return found->connection != NULL;
}

// What the call of SSL_read on this thread has come by: OpenSSL reads on while records have no data.
static _Thread_local uint32_t records, handshakes;

static void on_protocol(int written, int version, int type, const void *bytes, size_t count, SSL *ssl, void *unused) {
  (void)version, (void)bytes, (void)count, (void)ssl, (void)unused;
  if (written) return;
  records += type == SSL3_RT_HEADER;
  handshakes += type == SSL3_RT_HANDSHAKE;
}

static qkvi_http2_verdict count_records(const passing *sent) {
  inspected *connection = sent->connection;
  qkvi_http2_verdict verdict = QKVI_HTTP2_GOOD;
  pthread_mutex_lock(&connection->lock);
  if (is_same(connection, sent->serial))
    verdict = qkvi_http2_frames_records(&connection->frames, records, handshakes, points_s, qkv_stage_now());
  if (verdict != QKVI_HTTP2_GOOD) close_for(connection, sent->file, verdict);
  pthread_mutex_unlock(&connection->lock);
  return verdict;
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
int SSL_read(SSL *ssl, void *bytes, int most) {
  static _Atomic(void *) found;
  passing sent;
  __typeof__(SSL_read) *real = (__typeof__(SSL_read) *)find_next(&found, "SSL_read");
  const bool linked = find_linked(ssl, &sent);
  if (linked) SSL_set_msg_callback(ssl, on_protocol);
  records = handshakes = 0;
  const int count = real(ssl, bytes, most);
  if (linked && records > 0 && count_records(&sent) != QKVI_HTTP2_GOOD) {
    ERR_raise(ERR_LIB_USER, ERR_R_PASSED_INVALID_ARGUMENT);
    return -1;
  }
  if (count <= 0 || !linked) return count;
  sent.bytes = (size_t)count;
  sent.pieces = &(struct iovec){.iov_base = bytes, .iov_len = sent.bytes};
  sent.pieces_count = 1;
  if (inspect(&sent) == QKVI_HTTP2_GOOD) return count;
  ERR_raise(ERR_LIB_USER, ERR_R_PASSED_INVALID_ARGUMENT);
  return -1;
}

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name)
int SSL_write(SSL *ssl, const void *bytes, int most) {
  static _Atomic(void *) found;
  __typeof__(SSL_write) *real = (__typeof__(SSL_write) *)find_next(&found, "SSL_write");
  const int count = real(ssl, bytes, most);
  passing replied;
  if (count <= 0 || !find_linked(ssl, &replied)) return count;
  replied.bytes = (size_t)count;
  replied.pieces = &(struct iovec){.iov_base = (void *)(uintptr_t)bytes, .iov_len = replied.bytes};
  replied.pieces_count = 1;
  inspect_replies(&replied);
  return count;
}

static void make_index(void) {
  link_index = SSL_get_ex_new_index(0, NULL, link_made, NULL, NULL);
  assert(link_index >= 0);
}

void qkvi_inspect_setup(uint64_t control_frames_s, uint64_t request_bytes_max) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  // gRPC calls ours only if they are found first.
  assert(dlsym(RTLD_DEFAULT, "recvmsg") == (void *)recvmsg && dlsym(RTLD_DEFAULT, "SSL_read") == (void *)SSL_read);
  pthread_once(&once, make_index);
  points_s = control_frames_s;
  held_max = request_bytes_max;
}
