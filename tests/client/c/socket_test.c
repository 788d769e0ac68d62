#include "client/c/socket.h"

#include <arpa/inet.h>
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
  assert_false(retry);
}

static void on_alarm(int number) {
  (void)number;
}

// A signal that the program handles does not end a connect: a listener whose queue is full does not answer.
static void test_signals(void **state) {
  (void)state;
  enum { CLIENTS = 8, ALARM_US = 50000, TIMEOUT_MS = 400 };
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(listener, (const struct sockaddr *)&address, size), 0);
  assert_int_equal(listen(listener, 0), 0);
  assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &size), 0);
  char text[64];
  qkvi_target target;
  snprintf(text, sizeof text, "127.0.0.1:%d", ntohs(address.sin_port));
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
      cmocka_unit_test(test_targets),      cmocka_unit_test(test_refused_targets),
      cmocka_unit_test(test_path_lengths), cmocka_unit_test(test_nobody_there),
      cmocka_unit_test(test_signals),      cmocka_unit_test(test_hung_up),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
