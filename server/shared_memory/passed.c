#include "server/shared_memory/passed.h"

#include <assert.h>
#include <errno.h>
#include <jansson.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utlist.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "server/rpc/internal.h"

enum {
  CONNECTIONS_MAX = 64,
  CONNECTIONS_USER_MAX = 16,
  DESCRIPTORS_MAX = 512,
  DESCRIPTORS_USER_MAX = 128,
  MESSAGE_MS = 2000,  // for the message of a connection
  WAIT_MS = 10000,    // for the call that uses them
  PAUSE_MS = 100,     // where no descriptor is left to accept with
  MESSAGE_BYTES = 8,
  TOKEN_BYTES = 16,
  TOKEN_DIGITS = 2 * TOKEN_BYTES,
};
static const uint8_t greeting[MESSAGE_BYTES] = {'q', 'k', 'v', 'd', 'f', 'd', 1, 0};

typedef struct waiting_set {
  qkvi_passed_set set;  // first, so that one leads to the other
  int descriptors[QKVI_PASSED_SET_MAX];
  char token[TOKEN_DIGITS + 1];
  uid_t user;
  int64_t until_ms;
  bool taken, used;
  struct waiting_set *prev, *next;
} waiting_set;

typedef struct connection {
  int fd;
  uid_t user;
  int64_t until_ms;
} connection;

struct qkvi_passed {
  qkvi_rpc_listener listener;
  qkv_metric_value *waiting, *accepted, *refused;
  int wake;  // an eventfd: a set was used, or `stopping`
  pthread_t thread;
  bool started;
  connection connections[CONNECTIONS_MAX];  // the thread's
  size_t connection_count;

  pthread_mutex_t lock;  // of what follows
  waiting_set *sets;
  bool stopping;
};

// ---- Sets that wait ----

static size_t count_waiting(const qkvi_passed *passed, const uid_t *user) {
  size_t count = 0;
  const waiting_set *set;
  DL_FOREACH(passed->sets, set) {
    if (user == NULL || set->user == *user) count += set->set.count;
  }
  return count;
}

static qkv_status check_headroom(const qkvi_passed *passed, uid_t user, size_t more, qkv_error *error) {
  const size_t of_user = count_waiting(passed, &user), all = count_waiting(passed, NULL);
  if (of_user + more > DESCRIPTORS_USER_MAX)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "%zu descriptors, and %zu of user %u wait to be registered, at most %d", more, of_user,
                    (unsigned)user, DESCRIPTORS_USER_MAX);
  if (all + more <= DESCRIPTORS_MAX) return QKV_OK;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%zu descriptors, and %zu wait to be registered, at most %d", more,
                  all, DESCRIPTORS_MAX);
}

static void write_token(char token[TOKEN_DIGITS + 1]) {
  uint8_t random[TOKEN_BYTES];
  const ssize_t got = getrandom(random, sizeof random, 0);
  assert(got == sizeof random);
  (void)got;
  for (size_t i = 0; i < sizeof random; i++) (void)snprintf(token + 2 * i, 3, "%02x", random[i]);
}

static void close_all(const int *descriptors, size_t count) {
  for (size_t i = 0; i < count; i++) (void)close(descriptors[i]);
}

// Takes the descriptors, or closes them.
static qkv_status keep(qkvi_passed *passed, uid_t user, const int *descriptors, size_t count, char *token,
                       qkv_error *error) {
  waiting_set *set = calloc(1, sizeof *set);
  if (set == NULL) abort();
  memcpy(set->descriptors, descriptors, count * sizeof *descriptors);
  set->set = (qkvi_passed_set){.descriptors = set->descriptors, .count = count};
  set->user = user;
  set->until_ms = qkv_now_ms() + WAIT_MS;
  write_token(set->token);
  pthread_mutex_lock(&passed->lock);
  const qkv_status status = check_headroom(passed, user, count, error);
  if (status == QKV_OK) {
    memcpy(token, set->token, sizeof set->token);
    DL_APPEND(passed->sets, set);
    qkv_metric_add(passed->waiting, (int64_t)count);
  }
  pthread_mutex_unlock(&passed->lock);
  if (status == QKV_OK) return status;
  close_all(descriptors, count);
  free(set);
  return status;
}

// One that is over, out of the list; NULL: none.
static waiting_set *take_over(qkvi_passed *passed, int64_t now_ms) {
  waiting_set *set;
  pthread_mutex_lock(&passed->lock);
  DL_FOREACH(passed->sets, set) {
    if (!set->taken && (set->used || passed->stopping || now_ms >= set->until_ms)) break;
  }
  if (set != NULL) {
    DL_DELETE(passed->sets, set);
    qkv_metric_add(passed->waiting, -(int64_t)set->set.count);
  }
  pthread_mutex_unlock(&passed->lock);
  return set;
}

static void close_over(qkvi_passed *passed) {
  const int64_t now_ms = qkv_now_ms();
  for (waiting_set *set = take_over(passed, now_ms); set != NULL; set = take_over(passed, now_ms)) {
    close_all(set->descriptors, set->set.count);
    free(set);
  }
}

qkv_status qkvi_passed_take(qkvi_passed *passed, const char *token, uid_t user, const qkvi_passed_set **set,
                            qkv_error *error) {
  waiting_set *found;
  *set = NULL;
  if (strlen(token) != TOKEN_DIGITS)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "descriptor has %zu characters, a token has %d", strlen(token),
                    TOKEN_DIGITS);
  const int64_t now_ms = qkv_now_ms();
  pthread_mutex_lock(&passed->lock);
  DL_FOREACH(passed->sets, found) {
    if (found->user == user && !found->taken && !found->used && now_ms < found->until_ms &&
        CRYPTO_memcmp(found->token, token, TOKEN_DIGITS) == 0)
      break;
  }
  if (found != NULL) found->taken = true;
  pthread_mutex_unlock(&passed->lock);
  if (found == NULL)
    return qkv_fail(error, QKV_NOT_FOUND,
                    "descriptor is no token of user %u that waits: each is used once, within %d s", (unsigned)user,
                    WAIT_MS / 1000);
  *set = &found->set;
  return QKV_OK;
}

void qkvi_passed_return(qkvi_passed *passed, const qkvi_passed_set **set, bool used) {
  if (*set == NULL) return;
  waiting_set *taken = (waiting_set *)(uintptr_t)*set;
  *set = NULL;
  pthread_mutex_lock(&passed->lock);
  taken->taken = false;
  taken->used = used;
  pthread_mutex_unlock(&passed->lock);
  (void)eventfd_write(passed->wake, 1);
}

// ---- A message ----

// All descriptors that have come, of which the first QKVI_PASSED_SET_MAX are received.
static size_t read_descriptors(struct msghdr *message, int *descriptors) {
  size_t count = 0;
  for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part != NULL; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t more = (part->cmsg_len - CMSG_LEN(0)) / sizeof *descriptors;
    assert(count + more <= QKVI_PASSED_SET_MAX);
    memcpy(descriptors + count, CMSG_DATA(part), more * sizeof *descriptors);
    count += more;
  }
  return count;
}

static qkv_status check_message(const struct msghdr *message, const uint8_t *data, ssize_t bytes, size_t count,
                                qkv_error *error) {
  if (bytes != MESSAGE_BYTES || memcmp(data, greeting, MESSAGE_BYTES) != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the message is not the %d bytes \"qkvdfd\" 01 00", MESSAGE_BYTES);
  if ((message->msg_flags & MSG_CTRUNC) != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the message has more than %d descriptors", QKVI_PASSED_SET_MAX);
  if (count > 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the message has no descriptor");
}

// The socket's buffer is empty and takes it at once; a client that has gone gets nothing.
static void answer(const qkvi_passed *passed, int fd, const qkv_error *error, const char *token) {
  uint8_t data[1 + QKV_ERROR_TEXT_MAX];
  const bool ok = error->status == QKV_OK;
  data[0] = (uint8_t)error->status;
  const int length = snprintf((char *)data + 1, sizeof data - 1, "%s", ok ? token : error->text);
  qkv_metric_add(ok ? passed->accepted : passed->refused, 1);
  (void)send(fd, data, 1 + (size_t)length, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Reads what has come. False: nothing has, after all.
static bool serve(qkvi_passed *passed, const connection *from) {
  union {
    char bytes[CMSG_SPACE(QKVI_PASSED_SET_MAX * sizeof(int))];
    struct cmsghdr aligned;
  } control;
  uint8_t data[MESSAGE_BYTES + 1];
  struct iovec place = {.iov_base = data, .iov_len = sizeof data};
  struct msghdr message = {
      .msg_iov = &place, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
  int descriptors[QKVI_PASSED_SET_MAX];
  char token[TOKEN_DIGITS + 1] = "";
  qkv_error error = {0};
  const ssize_t bytes = recvmsg(from->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (bytes <= 0) return true;  // it has gone
  const size_t count = read_descriptors(&message, descriptors);
  if (check_message(&message, data, bytes, count, &error) == QKV_OK)
    (void)keep(passed, from->user, descriptors, count, token, &error);
  else
    close_all(descriptors, count);
  answer(passed, from->fd, &error, token);
  return true;
}

// ---- Connections ----

static size_t connections_of(const qkvi_passed *passed, uid_t user) {
  size_t count = 0;
  for (size_t i = 0; i < passed->connection_count; i++) count += passed->connections[i].user == user;
  return count;
}

static qkv_status admit(const qkvi_passed *passed, uid_t user, qkv_error *error) {
  if (connections_of(passed, user) >= CONNECTIONS_USER_MAX)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "user %u has %d connections here, at most as many", (unsigned)user,
                    CONNECTIONS_USER_MAX);
  if (passed->connection_count < CONNECTIONS_MAX) return QKV_OK;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "there are %d connections here, at most as many", CONNECTIONS_MAX);
}

static void accept_one(qkvi_passed *passed, int socket) {
  struct ucred process;
  socklen_t size = sizeof process;
  qkv_error error = {0};
  const int fd = accept4(socket, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) (void)poll(NULL, 0, PAUSE_MS);
    return;
  }
  const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &process, &size) == 0;
  if (known && admit(passed, process.uid, &error) == QKV_OK) {
    passed->connections[passed->connection_count++] =
        (connection){.fd = fd, .user = process.uid, .until_ms = qkv_now_ms() + MESSAGE_MS};
    return;
  }
  if (known) answer(passed, fd, &error, "");
  (void)close(fd);
}

static void drop(qkvi_passed *passed, size_t i) {
  (void)close(passed->connections[i].fd);
  passed->connections[i] = passed->connections[--passed->connection_count];
}

// From the last one on, as a dropped one's place is taken by the last.
static void serve_connections(qkvi_passed *passed, const struct pollfd *polled) {
  const int64_t now_ms = qkv_now_ms();
  for (size_t i = passed->connection_count; i-- > 0;) {
    const connection *at = &passed->connections[i];
    bool over = polled[i].revents != 0 && serve(passed, at);
    if (!over && now_ms >= at->until_ms) {
      qkv_error late = {0};
      (void)qkv_fail(&late, QKV_DEADLINE_EXCEEDED, "no message within %d s", MESSAGE_MS / 1000);
      answer(passed, at->fd, &late, "");
      over = true;
    }
    if (over) drop(passed, i);
  }
}

// ---- The thread ----

static int next_ms(qkvi_passed *passed) {
  int64_t next = INT64_MAX;
  const waiting_set *set;
  for (size_t i = 0; i < passed->connection_count; i++) {
    if (passed->connections[i].until_ms < next) next = passed->connections[i].until_ms;
  }
  pthread_mutex_lock(&passed->lock);
  DL_FOREACH(passed->sets, set) {
    if (!set->taken && set->until_ms < next) next = set->until_ms;  // one that is returned wakes the thread
  }
  pthread_mutex_unlock(&passed->lock);
  if (next == INT64_MAX) return -1;
  const int64_t left = next - qkv_now_ms();
  return left > 0 ? (int)left : 0;
}

static bool is_stopping(qkvi_passed *passed) {
  pthread_mutex_lock(&passed->lock);
  const bool stopping = passed->stopping;
  pthread_mutex_unlock(&passed->lock);
  return stopping;
}

static void *run(void *context) {
  qkvi_passed *passed = context;
  const size_t sockets = passed->listener.socket_count;
  struct pollfd polled[CONNECTIONS_MAX + QKVI_RPC_SOCKETS_MAX + 1];
  while (!is_stopping(passed)) {
    const size_t connections = passed->connection_count;
    size_t count = 0;
    for (size_t i = 0; i < connections; i++)
      polled[count++] = (struct pollfd){.fd = passed->connections[i].fd, .events = POLLIN};
    for (size_t i = 0; i < sockets; i++)
      polled[count++] = (struct pollfd){.fd = passed->listener.sockets[i], .events = POLLIN};
    polled[count++] = (struct pollfd){.fd = passed->wake, .events = POLLIN};
    if (poll(polled, count, next_ms(passed)) < 0) continue;
    eventfd_t ignored;
    if (polled[count - 1].revents != 0) (void)eventfd_read(passed->wake, &ignored);
    serve_connections(passed, polled);
    for (size_t i = 0; i < sockets; i++) {
      if (polled[connections + i].revents == POLLIN) accept_one(passed, passed->listener.sockets[i]);
    }
    close_over(passed);
  }
  while (passed->connection_count > 0) drop(passed, passed->connection_count - 1);
  close_over(passed);
  return NULL;
}

// ---- Life ----

static qkv_status start(qkvi_passed *passed, const qkvi_passed_config *config, qkv_error *error) {
  const qkvi_rpc_listen_config listen = {.mode = config->mode};
  if (qkvi_rpc_listen(NULL, config->address, &listen, &passed->listener, error) != QKV_OK)
    return qkv_error_prefix(error, "--shm-listen: ");
  passed->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  int failed = passed->wake < 0;
  assert(!failed);
  failed = pthread_create(&passed->thread, NULL, run, passed);
  assert(failed == 0);
  (void)pthread_setname_np(passed->thread, "qkvd-shm");
  passed->started = true;
  qkv_log(QKV_LOG_INFO, "taking descriptors", "{s:s}", "address", passed->listener.address);
  return QKV_OK;
}

qkv_status qkvi_passed_create(const qkvi_passed_config *config, qkvi_passed **out, qkv_error *error) {
  qkvi_passed *passed = calloc(1, sizeof *passed);
  if (passed == NULL) abort();
  passed->waiting = config->waiting;
  passed->accepted = config->accepted;
  passed->refused = config->refused;
  passed->listener.lock = -1;
  const int failed = pthread_mutex_init(&passed->lock, NULL);
  assert(failed == 0);
  (void)failed;
  const qkv_status status = start(passed, config, error);
  if (status != QKV_OK) qkvi_passed_destroy(&passed);
  *out = passed;
  return status;
}

void qkvi_passed_destroy(qkvi_passed **passed) {
  qkvi_passed *old = *passed;
  if (old == NULL) return;
  *passed = NULL;
  if (old->started) {
    pthread_mutex_lock(&old->lock);
    old->stopping = true;
    pthread_mutex_unlock(&old->lock);
    (void)eventfd_write(old->wake, 1);
    (void)pthread_join(old->thread, NULL);
    (void)close(old->wake);
  }
  assert(old->sets == NULL);
  qkvi_rpc_unlisten(&old->listener);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}
