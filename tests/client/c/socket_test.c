#include "client/c/socket.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/base/clock.h"

static void test_targets(void **state) {
  (void)state;
  qkvi_target target;
  assert_int_equal(qkvi_target_parse("unix:/run/qkvd.sock", &target, NULL), QKV_OK);
  assert_true(target.is_unix);
  assert_string_equal(target.path, "/run/qkvd.sock");
  assert_int_equal(qkvi_target_parse("unix:here", &target, NULL), QKV_OK);
  assert_string_equal(target.path, "here");
  assert_int_equal(qkvi_target_parse("localhost:7580", &target, NULL), QKV_OK);
  assert_false(target.is_unix);
  assert_string_equal(target.host, "localhost");
  assert_string_equal(target.port, "7580");
  assert_int_equal(qkvi_target_parse("[::1]:65535", &target, NULL), QKV_OK);
  assert_string_equal(target.host, "::1");
  assert_string_equal(target.port, "65535");
}

static void test_refused_targets(void **state) {
  (void)state;
  static const char *const refused[] = {"",           "localhost",      ":7580",       "localhost:",       "host:0",
                                        "host:65536", "host:99999",     "host:123456", "host:75x",         "::1:7580",
                                        "[]:7580",    "http://host:80", "dns:host:1",  "unix-abstract:x:1"};
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    qkvi_target target;
    qkv_error error = {0};
    assert_int_equal(qkvi_target_parse(refused[i], &target, &error), QKV_INVALID_ARGUMENT);
    char text[128];
    snprintf(text, sizeof text, "target \"%s\" is neither unix:PATH nor HOST:PORT", refused[i]);
    assert_string_equal(error.text, text);
  }
}

static void test_path_lengths(void **state) {
  (void)state;
  char text[200] = "unix:";
  qkvi_target target;
  qkv_error error = {0};
  memset(text + 5, 'x', 107);
  assert_int_equal(qkvi_target_parse(text, &target, &error), QKV_OK);
  text[5 + 107] = 'x';
  assert_int_equal(qkvi_target_parse(text, &target, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "the socket's path has 108 bytes, at most 107 are possible");
  qkv_error empty = {0};
  assert_int_equal(qkvi_target_parse("unix:", &target, &empty), QKV_INVALID_ARGUMENT);
  assert_string_equal(empty.text, "target unix: has no path; write unix:PATH");
}

static void test_nobody_there(void **state) {
  (void)state;
  qkvi_target target;
  int fd = 0;
  bool retry = false;
  qkv_error error = {0};
  assert_int_equal(qkvi_target_parse("unix:/no/such/socket", &target, NULL), QKV_OK);
  assert_int_equal(qkvi_socket_connect(&target, 1000, &fd, &retry, &error), QKV_UNAVAILABLE);
  assert_string_equal(error.text, "No such file or directory");
  assert_int_equal(fd, -1);
  assert_true(retry);

  qkv_error unknown = {0};
  assert_int_equal(qkvi_target_parse("no-such-host.invalid:1", &target, NULL), QKV_OK);
  assert_int_equal(qkvi_socket_connect(&target, 1000, &fd, &retry, &unknown), QKV_UNAVAILABLE);
  assert_int_equal(fd, -1);
  assert_true(unknown.text[0] != '\0');
}

// ---- names ----

enum { RESOLVER_MS = 3000 };

static char full[64], listening[64];  // ports of 127.0.0.1, whose queue is full, and where somebody listens

static struct addrinfo *address_of(const char *port) {
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
  struct addrinfo *list = NULL;
  assert_int_equal(getaddrinfo("127.0.0.1", port, &hints, &list), 0);
  return list;
}

// The C library's, but for a few names: one whose server does not answer for a while, one with two addresses, one
// that there is not, and one of which that is not known at the moment.
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **out) {
  const bool slow = strcmp(name, "slow.test") == 0;
  if ((hints->ai_flags & AI_NUMERICHOST) != 0 && (slow || strcmp(name, "two.test") == 0)) return EAI_NONAME;
  if (strcmp(name, "none.test") == 0) return EAI_NONAME;
  if (strcmp(name, "again.test") == 0) return (hints->ai_flags & AI_NUMERICHOST) != 0 ? EAI_NONAME : EAI_AGAIN;
  if (slow) {
    usleep(RESOLVER_MS * 1000);
    *out = address_of(listening);
    return 0;
  }
  if (strcmp(name, "two.test") == 0) {
    *out = address_of(full);
    (*out)->ai_next = address_of(listening);
    return 0;
  }
  typedef int resolver(const char *, const char *, const struct addrinfo *, struct addrinfo **);
  resolver *real = (resolver *)dlsym(RTLD_NEXT, "getaddrinfo");
  return real(name, service, hints, out);
}

static int listen_at(int queue, char port[64]) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(listener, (const struct sockaddr *)&address, size), 0);
  assert_int_equal(listen(listener, queue), 0);
  assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &size), 0);
  (void)snprintf(port, 64, "%d", ntohs(address.sin_port));
  return listener;
}

static qkv_status connect_to(const char *text, int64_t timeout_ms, int *fd, bool *retry, qkv_error *error) {
  qkvi_target target;
  assert_int_equal(qkvi_target_parse(text, &target, NULL), QKV_OK);
  return qkvi_socket_connect(&target, timeout_ms, fd, retry, error);
}

// The deadline counts while a name is resolved; what comes later goes to nobody.
static void test_a_resolver_that_does_not_answer(void **state) {
  (void)state;
  int fd = 0;
  bool retry = false;
  qkv_error error = {0};
  const int listener = listen_at(8, listening);
  const int64_t began = qkv_now_ms();
  assert_int_equal(connect_to("slow.test:1", 200, &fd, &retry, &error), QKV_UNAVAILABLE);
  assert_in_range(qkv_now_ms() - began, 200, RESOLVER_MS - 200);
  assert_string_equal(error.text, "the host's name was not resolved within 200 ms");
  assert_true(retry);
  assert_int_equal(fd, -1);
  assert_int_equal(connect_to("slow.test:1", 60000, &fd, &retry, &error), QKV_OK);
  assert_true(qkv_now_ms() - began >= RESOLVER_MS);
  close(fd);
  close(listener);
}

// A name server that is not there yet, as while a machine starts, is worth another try; a name that there is not is
// not.
static void test_a_resolver_that_fails(void **state) {
  (void)state;
  int fd = 0;
  bool retry = true;
  qkv_error error = {0};
  assert_int_equal(connect_to("none.test:1", 200, &fd, &retry, &error), QKV_UNAVAILABLE);
  assert_false(retry);
  assert_int_equal(connect_to("again.test:1", 200, &fd, &retry, &error), QKV_UNAVAILABLE);
  assert_true(retry);
  assert_int_equal(fd, -1);
}

// An address that does not answer leaves time for the next.
static void test_a_second_address(void **state) {
  (void)state;
  enum { CLIENTS = 8 };
  int fds[CLIENTS], fd = -1;
  size_t count = 0;
  bool retry = false;
  qkv_error error = {0};
  const int dead = listen_at(0, full), alive = listen_at(8, listening);
  char text[80];
  (void)snprintf(text, sizeof text, "127.0.0.1:%s", full);
  while (count < CLIENTS && connect_to(text, 200, &fds[count], &retry, &error) == QKV_OK) count++;
  assert_true(count < CLIENTS);
  const int64_t began = qkv_now_ms();
  assert_int_equal(connect_to("two.test:1", 4000, &fd, &retry, &error), QKV_OK);
  assert_in_range(qkv_now_ms() - began, 1000, 3900);
  close(fd);
  while (count > 0) close(fds[--count]);
  close(dead);
  close(alive);
}

static void on_alarm(int number) {
  (void)number;
}

// A signal that the program handles does not end a connect: a listener whose queue is full does not answer.
static void test_signals(void **state) {
  (void)state;
  enum { CLIENTS = 8, ALARM_US = 50000, TIMEOUT_MS = 400 };
  const int listener = listen_at(0, full);
  char text[80];
  qkvi_target target;
  (void)snprintf(text, sizeof text, "127.0.0.1:%s", full);
  assert_int_equal(qkvi_target_parse(text, &target, NULL), QKV_OK);
  const struct sigaction handled = {.sa_handler = on_alarm};
  const struct itimerval often = {{0, ALARM_US}, {0, ALARM_US}}, never = {{0, 0}, {0, 0}};
  assert_int_equal(sigaction(SIGALRM, &handled, NULL), 0);
  assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
  int fds[CLIENTS];
  size_t count = 0;
  qkv_error error = {0};
  while (count < CLIENTS) {
    bool retry = false;
    if (qkvi_socket_connect(&target, TIMEOUT_MS, &fds[count], &retry, &error) != QKV_OK) break;
    count++;
  }
  assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
  assert_true(count < CLIENTS);
  assert_string_equal(error.text, "Connection timed out");
  while (count > 0) close(fds[--count]);
  close(listener);
}

static void test_hung_up(void **state) {
  (void)state;
  int pair[2];
  assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  assert_false(qkvi_socket_hung_up(pair[0]));
  // Bytes that nobody has read yet do not hide the end behind them.
  assert_int_equal(write(pair[1], "x", 1), 1);
  assert_false(qkvi_socket_hung_up(pair[0]));
  close(pair[1]);
  assert_true(qkvi_socket_hung_up(pair[0]));
  close(pair[0]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_targets),
      cmocka_unit_test(test_refused_targets),
      cmocka_unit_test(test_path_lengths),
      cmocka_unit_test(test_nobody_there),
      cmocka_unit_test(test_signals),
      cmocka_unit_test(test_hung_up),
      cmocka_unit_test(test_a_second_address),
      cmocka_unit_test(test_a_resolver_that_does_not_answer),
      cmocka_unit_test(test_a_resolver_that_fails),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
