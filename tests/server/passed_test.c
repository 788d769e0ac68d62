// Descriptors that are passed: by many at once, taken once, by their user alone, and none left open. Runs under
// ThreadSanitizer; tests/e2e/test_passed_memory.py has what a client can do wrong.
#include "server/shared_memory/passed.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

enum { THREADS = 6, ROUNDS = 40, TOKEN = 32 };

static qkv_metric_value waiting, accepted, refused;
static char address[64];

static qkvi_passed *start(void) {
  qkvi_passed *passed = NULL;
  qkv_error error = {0};
  snprintf(address, sizeof address, "unix:passed-test-%d.sock", (int)getpid());
  const qkvi_passed_config config = {
      .address = address, .mode = 0600, .waiting = &waiting, .accepted = &accepted, .refused = &refused};
  if (qkvi_passed_create(&config, &passed, &error) != QKV_OK) fail_msg("%s", error.text);
  return passed;
}

static size_t open_descriptors(void) {
  DIR *folder = opendir("/proc/self/fd");
  size_t count = 0;
  assert_non_null(folder);
  while (readdir(folder) != NULL) count++;
  closedir(folder);
  return count;
}

static int connect_to(void) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  snprintf(to.sun_path, sizeof to.sun_path, "%s", address + strlen("unix:"));
  assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
  return fd;
}

// Passes `count` copies of the descriptor. The code of the answer, and its text.
static int pass(int descriptor, size_t count, char text[QKV_ERROR_TEXT_MAX + 1]) {
  union {
    char bytes[CMSG_SPACE(QKVI_PASSED_SET_MAX * sizeof(int))];
    struct cmsghdr aligned;
  } control = {0};
  struct iovec place = {.iov_base = (void *)(uintptr_t) "qkvdfd\1\0", .iov_len = 8};
  struct msghdr message = {.msg_iov = &place,
                           .msg_iovlen = 1,
                           .msg_control = control.bytes,
                           .msg_controllen = CMSG_SPACE(count * sizeof(int))};
  struct cmsghdr *part = CMSG_FIRSTHDR(&message);
  *part =
      (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(count * sizeof(int))};
  for (size_t i = 0; i < count; i++) memcpy(CMSG_DATA(part) + i * sizeof(int), &descriptor, sizeof descriptor);
  const int fd = connect_to();
  uint8_t answer[1 + QKV_ERROR_TEXT_MAX] = {0};
  assert_int_equal(sendmsg(fd, &message, 0), 8);
  const ssize_t got = recv(fd, answer, sizeof answer, MSG_WAITALL);
  close(fd);
  assert_true(got >= 1);
  memcpy(text, answer + 1, (size_t)got - 1);
  text[got - 1] = '\0';
  return answer[0];
}

static void a_token_is_taken_once_by_its_user(void **state) {
  (void)state;
  char token[QKV_ERROR_TEXT_MAX + 1];
  qkv_error error = {0};
  const qkvi_passed_set *set = NULL, *again = NULL;
  qkvi_passed *passed = start();
  const int memfd = memfd_create("passed", MFD_CLOEXEC);
  assert_int_equal(pass(memfd, 3, token), 0);
  assert_int_equal(strlen(token), TOKEN);
  assert_int_equal(qkv_metric_read(&waiting), 3);
  assert_int_equal(qkvi_passed_take(passed, token, getuid() + 1, &set, &error), QKV_NOT_FOUND);
  assert_int_equal(qkvi_passed_take(passed, "x", getuid(), &set, &error), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkvi_passed_take(passed, token, getuid(), &set, &error), QKV_OK);
  assert_int_equal(set->count, 3);
  assert_true((fcntl(set->descriptors[2], F_GETFD) & FD_CLOEXEC) != 0);
  assert_int_equal(qkvi_passed_take(passed, token, getuid(), &again, &error), QKV_NOT_FOUND);
  qkvi_passed_return(passed, &set, false);
  assert_null(set);
  assert_int_equal(qkvi_passed_take(passed, token, getuid(), &set, &error), QKV_OK);
  qkvi_passed_return(passed, &set, true);
  assert_int_equal(qkvi_passed_take(passed, token, getuid(), &set, &error), QKV_NOT_FOUND);
  assert_int_equal(pass(memfd, 1, token), 0);  // is closed at the end
  qkvi_passed_destroy(&passed);
  assert_int_equal(qkv_metric_read(&waiting), 0);
  close(memfd);
}

typedef struct worker {
  qkvi_passed *passed;
  int memfd;
  unsigned seed;
} worker;

// Some are used, some returned, some left.
static void *work(void *context) {
  worker *own = context;
  for (int i = 0; i < ROUNDS; i++) {
    char token[QKV_ERROR_TEXT_MAX + 1];
    const qkvi_passed_set *set = NULL;
    const size_t count = 1 + (size_t)rand_r(&own->seed) % 3;
    if (pass(own->memfd, count, token) != 0) continue;
    if (rand_r(&own->seed) % 8 == 0) continue;
    assert_int_equal(qkvi_passed_take(own->passed, token, getuid(), &set, NULL), QKV_OK);
    assert_int_equal(set->count, count);
    qkvi_passed_return(own->passed, &set, rand_r(&own->seed) % 8 != 0);
  }
  return NULL;
}

static void many_at_once(void **state) {
  (void)state;
  const size_t before = open_descriptors();
  qkvi_passed *passed = start();
  worker workers[THREADS];
  pthread_t threads[THREADS];
  for (size_t i = 0; i < THREADS; i++) {
    workers[i] = (worker){.passed = passed, .memfd = memfd_create("passed", MFD_CLOEXEC), .seed = (unsigned)i};
    assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
  }
  for (size_t i = 0; i < THREADS; i++) {
    pthread_join(threads[i], NULL);
    close(workers[i].memfd);
  }
  assert_true(qkv_metric_read(&waiting) <= 128);
  qkvi_passed_destroy(&passed);
  assert_int_equal(qkv_metric_read(&waiting), 0);
  assert_int_equal(open_descriptors(), before);
  assert_int_equal(access(address + strlen("unix:"), F_OK), -1);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(a_token_is_taken_once_by_its_user),
                                     cmocka_unit_test(many_at_once)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
