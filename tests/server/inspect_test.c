// What is counted of a connection ends with it: the next user of its descriptor starts anew, whoever closes it when.
#include "server/rpc/inspect.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

enum { DATA = 0, HEADERS = 1, SETTINGS = 4, END_HEADERS = 4, HEAD_BYTES = 9, MESSAGE_HEAD = 5 };
enum { HELD_MAX = 64 * 1024, SENT_MAX = 256 * 1024 };

typedef struct sent {
  uint8_t bytes[SENT_MAX];
  size_t count;
} sent;

static void put(sent *to, const void *bytes, size_t count) {
  memcpy(to->bytes + to->count, bytes, count);
  to->count += count;
}

static void put_frame(sent *to, uint8_t type, uint8_t flags, uint8_t stream, const void *payload, uint32_t length) {
  const uint8_t head[HEAD_BYTES] = {
      (uint8_t)(length >> 16), (uint8_t)(length >> 8), (uint8_t)length, type, flags, 0, 0, 0, stream};
  put(to, head, sizeof head);
  put(to, payload, length);
}

// A message of which `bytes` have come, its head among them, and more will.
static sent *make_begun(uint32_t bytes) {
  static const uint8_t zeros[HELD_MAX];
  sent *made = calloc(1, sizeof *made);
  assert_non_null(made);
  put(made, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
  put_frame(made, HEADERS, END_HEADERS, 1, zeros, 8);
  uint8_t *data = calloc(1, bytes);
  assert_non_null(data);
  data[1] = 1;  // 16 MiB
  put_frame(made, DATA, 0, 1, data, bytes);
  free(data);
  return made;
}

typedef struct ends {
  int client, server;
} ends;

static ends connect_both(void) {
  int both[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, both) != 0) abort();
  const int size = 2 * SENT_MAX;
  (void)setsockopt(both[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  (void)fcntl(both[1], F_SETFL, O_NONBLOCK);
  return (ends){both[0], both[1]};
}

static ends open_inspected(void) {
  const struct sockaddr_un local = {.sun_family = AF_UNIX};
  const ends made = connect_both();
  (void)qkvi_inspect_open(made.server, false, (const struct sockaddr *)&local);
  return made;
}

// As gRPC reads; false: the connection was reset. Turns end with EAGAIN while there is more.
static bool receive(const ends *of, size_t bytes) {
  uint8_t buffer[4096];
  while (bytes > 0) {
    struct iovec piece = {.iov_base = buffer, .iov_len = sizeof buffer};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    const ssize_t got = recvmsg(of->server, &message, 0);
    if (got < 0 && errno == EAGAIN) continue;
    if (got < 0) return false;
    bytes -= (size_t)got;
  }
  return true;
}

static bool pass(const ends *by, const sent *all) {
  if (write(by->client, all->bytes, all->count) != (ssize_t)all->count) abort();
  return receive(by, all->count);
}

static void close_both(const ends *both) {
  (void)close(both->server);
  (void)close(both->client);
}

// gRPC closes connections whose end it has not read.
static void test_a_closed_connection_holds_nothing(void **state) {
  (void)state;
  qkvi_inspect_setup(0, HELD_MAX);
  sent *begun = make_begun(500);
  const ends both = open_inspected();
  assert_true(pass(&both, begun));
  assert_int_equal(qkvi_inspect_held(), 500);
  close_both(&both);
  assert_int_equal(qkvi_inspect_held(), 0);
  free(begun);
}

// It may be one that has nothing to do with gRPC, as that by which descriptors are passed.
static void test_the_next_user_is_not_inspected(void **state) {
  (void)state;
  enum { FRAMES = 2000 };
  qkvi_inspect_setup(1, HELD_MAX);
  sent *begun = make_begun(MESSAGE_HEAD + 1), *flood = calloc(1, sizeof *flood);
  assert_non_null(flood);
  for (int i = 0; i < FRAMES; i++) put_frame(flood, SETTINGS, 0, 0, "", 0);
  const ends before = open_inspected();
  assert_true(pass(&before, begun));
  close_both(&before);
  const ends next = connect_both();
  assert_int_equal(next.server, before.server);
  const uint64_t closed = qkvi_inspect_closed(QKVI_HTTP2_CONTROL_FRAMES);
  assert_true(pass(&next, flood));
  close_both(&next);
  const ends inspected = open_inspected();
  put(begun, flood->bytes, flood->count);
  assert_false(pass(&inspected, begun));
  assert_int_equal(qkvi_inspect_closed(QKVI_HTTP2_CONTROL_FRAMES), closed + 1);
  close_both(&inspected);
  free(begun);
  free(flood);
}

typedef struct user {
  const sent *sends;
  uint64_t until;  // so many connections have been closed
  int reset;       // of its own
  pthread_t thread;
} user;

static void *use(void *context) {
  enum { TIMES_MAX = 200000 };
  user *by = context;
  for (int i = 0; i < TIMES_MAX && qkvi_inspect_closed(QKVI_HTTP2_REQUEST_BYTES) < by->until; i++) {
    const ends both = open_inspected();
    if (!pass(&both, by->sends)) by->reset++;
    close_both(&both);
  }
  return NULL;
}

// Descriptors go from connections that hold much to those that hold little while others look for the one to close.
static void test_the_one_that_holds_the_most_is_closed(void **state) {
  (void)state;
  enum { USERS = 6, CLOSED = 1000 };
  qkvi_inspect_setup(0, HELD_MAX);
  const uint64_t until = qkvi_inspect_closed(QKVI_HTTP2_REQUEST_BYTES) + CLOSED;
  sent *much = make_begun(HELD_MAX / 4 * 3), *little = make_begun(MESSAGE_HEAD + 1);
  user users[USERS];
  for (int i = 0; i < USERS; i++) {
    users[i] = (user){.sends = i % 2 == 0 ? little : much, .until = until};
    assert_int_equal(pthread_create(&users[i].thread, NULL, use, &users[i]), 0);
  }
  int little_reset = 0;
  for (int i = 0; i < USERS; i++) {
    assert_int_equal(pthread_join(users[i].thread, NULL), 0);
    if (users[i].sends == little) little_reset += users[i].reset;
  }
  assert_true(qkvi_inspect_closed(QKVI_HTTP2_REQUEST_BYTES) >= until);
  assert_int_equal(little_reset, 0);
  assert_int_equal(qkvi_inspect_held(), 0);
  free(much);
  free(little);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_closed_connection_holds_nothing),
      cmocka_unit_test(test_the_next_user_is_not_inspected),
      cmocka_unit_test(test_the_one_that_holds_the_most_is_closed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
