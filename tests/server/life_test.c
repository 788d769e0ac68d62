// The daemon's life: start, refusal to start, drain, exit.
#include <dirent.h>
#include <grpc/grpc.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/server/fixture.h"

#include <cmocka.h>

#define WATCH "/grpc.health.v1.Health/Watch"
#define REFLECTION "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
#define MIB (INT64_C(1) << 20)

static void stops_when_idle(void **out) {
  (void)out;
  for (int i = 0; i < 2; i++) {
    fixture_daemon *daemon = fixture_start(NULL);
    assert_int_equal(fixture_stop(&daemon, i == 0 ? SIGTERM : SIGINT, FIXTURE_PATIENCE_MS), 0);
  }
}

// A connection without calls must not delay the end.
static void stops_with_an_idle_client(void **out) {
  (void)out;
  fixture_daemon *daemon = fixture_start(NULL);
  fixture_client *client = fixture_connect(daemon->tcp_address);
  fixture_result result = fixture_call(client, "/grpc.health.v1.Health/Check", NULL, 0, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_OK);
  fixture_free(&result);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  fixture_disconnect(&client);
}

static void watcher_is_told(void **out) {
  (void)out;
  fixture_daemon *daemon = fixture_start(NULL);
  fixture_client *client = fixture_connect(daemon->unix_address);
  fixture_stream *stream = fixture_open(client, WATCH, FIXTURE_PATIENCE_MS);
  uint8_t *data;
  size_t length;
  assert_true(fixture_send(stream, NULL, 0));
  assert_true(fixture_receive(stream, &data, &length));
  assert_memory_equal(data, "\x08\x01", 2);  // SERVING
  free(data);
  assert_int_equal(kill(daemon->pid, SIGTERM), 0);
  assert_true(fixture_receive(stream, &data, &length));
  assert_memory_equal(data, "\x08\x02", 2);  // NOT_SERVING
  free(data);
  fixture_result result = fixture_finish(&stream);
  assert_int_equal(result.status, GRPC_STATUS_UNAVAILABLE);
  assert_non_null(strstr(result.text, "draining"));
  assert_int_equal(fixture_stop(&daemon, 0, FIXTURE_PATIENCE_MS), 0);
  fixture_disconnect(&client);
}

// A client that holds a stream open for ever gets the grace period, and no more.
static void stuck_stream_is_cut_after_the_grace(void **out) {
  (void)out;
  fixture_daemon *daemon = fixture_start((const char *[]){"--drain-grace", "500ms", NULL});
  fixture_client *client = fixture_connect(daemon->unix_address);
  fixture_stream *stream = fixture_open(client, REFLECTION, 0);
  uint8_t *data;
  size_t length;
  assert_true(fixture_send(stream, "\x3a\x00", 2));  // list_services
  assert_true(fixture_receive(stream, &data, &length));
  free(data);
  int64_t begin = fixture_now_ms();
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  assert_true(fixture_now_ms() - begin >= 500);
  assert_int_not_equal(fixture_finish(&stream).status, GRPC_STATUS_OK);
  fixture_disconnect(&client);
}

static void second_signal_ends_at_once(void **out) {
  (void)out;
  fixture_daemon *daemon = fixture_start((const char *[]){"--drain-grace", "10m", NULL});
  fixture_client *client = fixture_connect(daemon->unix_address);
  fixture_stream *stream = fixture_open(client, REFLECTION, 0);
  uint8_t *data;
  size_t length;
  assert_true(fixture_send(stream, "\x3a\x00", 2));
  assert_true(fixture_receive(stream, &data, &length));
  free(data);
  assert_int_equal(kill(daemon->pid, SIGTERM), 0);
  fixture_wait_log(daemon, "draining");
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 1);
  (void)fixture_finish(&stream);
  fixture_disconnect(&client);
}

static void expect_run(const char *const *arguments, int status, const char *text) {
  char output[16384];
  assert_int_equal(fixture_run(arguments, output, sizeof(output)), status);
  if (strstr(output, text) == NULL) fail_msg("\"%s\" is not in \"%s\"", text, output);
}

// The signals that a thread of the daemon blocks, a bit each; all for a thread without a name of its own: libraries
// create those before main() begins.
static uint64_t blocked_signals(const fixture_daemon *daemon, const char *thread) {
  char path[320], line[256];
  snprintf(path, sizeof(path), "/proc/%d/task/%.200s/status", daemon->pid, thread);
  FILE *file = fopen(path, "re");
  assert_non_null(file);
  uint64_t blocked = 0;
  while (fgets(line, sizeof(line), file) != NULL) {
    if (strcmp(line, "Name:\tqkvd\n") == 0) blocked = UINT64_MAX;
    if (strncmp(line, "SigBlk:", 7) == 0) blocked |= strtoull(line + 7, NULL, 16);
  }
  (void)fclose(file);
  return blocked;
}

// A termination signal that another thread took would be pending for as long as that thread waits.
static void signals_go_to_the_main_thread(void **out) {
  (void)out;
  fixture_daemon *daemon = fixture_start(NULL);
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/task", daemon->pid);
  DIR *tasks = opendir(path);
  assert_non_null(tasks);
  const uint64_t end = UINT64_C(1) << (SIGTERM - 1) | UINT64_C(1) << (SIGINT - 1);
  size_t named = 0;
  for (const struct dirent *task; (task = readdir(tasks)) != NULL;) {
    if (task->d_name[0] == '.') continue;
    const uint64_t blocked = blocked_signals(daemon, task->d_name);
    if ((blocked & end) != end) fail_msg("thread %s takes signals", task->d_name);
    named += blocked != UINT64_MAX;
  }
  closedir(tasks);
  assert_true(named >= 4);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

static void second_daemon_is_refused(void **out) {
  (void)out;
  fixture_daemon *daemon = fixture_start(NULL);
  expect_run((const char *[]){"--listen", daemon->unix_address, NULL}, 1, "another qkvd listens on this socket");
  expect_run((const char *[]){"--listen", daemon->tcp_address, NULL}, 1,
             "Address already in use; is another qkvd running?");
  fixture_client *client = fixture_connect(daemon->unix_address);  // the first one still serves
  fixture_result result = fixture_call(client, "/grpc.health.v1.Health/Check", NULL, 0, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_OK);
  fixture_free(&result);
  fixture_disconnect(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

// kill -9 leaves the socket and the lock file behind; the next daemon takes them over and cleans up.
static void stale_socket_is_replaced(void **out) {
  (void)out;
  char directory[128], address[192], path[160];
  fixture_make_directory(directory, sizeof(directory));
  snprintf(path, sizeof(path), "%s/s", directory);
  snprintf(address, sizeof(address), "unix:%s", path);
  for (int i = 0; i < 2; i++) {
    fixture_daemon *daemon = fixture_start((const char *[]){"--listen", address, NULL});
    fixture_client *client = fixture_connect(address);
    fixture_result result = fixture_call(client, "/grpc.health.v1.Health/Check", NULL, 0, FIXTURE_PATIENCE_MS);
    assert_int_equal(result.status, GRPC_STATUS_OK);
    fixture_free(&result);
    fixture_disconnect(&client);
    (void)fixture_stop(&daemon, i == 0 ? SIGKILL : SIGTERM, FIXTURE_PATIENCE_MS);
    assert_int_equal(access(path, F_OK), i == 0 ? 0 : -1);
  }
  assert_int_equal(rmdir(directory), 0);  // nothing is left, no lock file either
}

// The soft limit on file descriptors, 1024 by default, is raised to the hard one.
static void many_connections_are_possible(void **out) {
  (void)out;
  struct rlimit ours, low, theirs;
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &ours), 0);
  low = (struct rlimit){.rlim_cur = 200, .rlim_max = ours.rlim_max};
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);  // the daemon inherits it
  fixture_daemon *daemon = fixture_start(NULL);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &ours), 0);
  assert_int_equal(prlimit(daemon->pid, RLIMIT_NOFILE, NULL, &theirs), 0);
  assert_int_equal(theirs.rlim_cur, ours.rlim_max);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

static int check_health(fixture_client *client, int64_t timeout_ms) {
  fixture_result result = fixture_call(client, "/grpc.health.v1.Health/Check", NULL, 0, timeout_ms);
  int status = result.status;
  fixture_free(&result);
  return status;
}

static void wait_for_a_file_descriptor(const fixture_daemon *daemon, const char *address) {
  struct rlimit all, none;
  assert_int_equal(prlimit(daemon->pid, RLIMIT_NOFILE, NULL, &all), 0);
  none = (struct rlimit){.rlim_cur = 3, .rlim_max = all.rlim_max};  // for new ones
  assert_int_equal(prlimit(daemon->pid, RLIMIT_NOFILE, &none, NULL), 0);
  // The first one may find the descriptor that accept() took before it went to sleep.
  fixture_client *first = fixture_connect(address), *second = fixture_connect(address);
  (void)check_health(first, 500);
  assert_int_equal(check_health(second, 500), GRPC_STATUS_DEADLINE_EXCEEDED);
  assert_int_equal(prlimit(daemon->pid, RLIMIT_NOFILE, &all, NULL), 0);
  assert_int_equal(check_health(second, FIXTURE_PATIENCE_MS), GRPC_STATUS_OK);
  assert_int_equal(check_health(first, FIXTURE_PATIENCE_MS), GRPC_STATUS_OK);
  fixture_disconnect(&first);
  fixture_disconnect(&second);
}

// A connection for which no file descriptor is left waits until there is one.
static void connection_waits_for_a_file_descriptor(void **out) {
  (void)out;
  fixture_daemon *daemon = fixture_start(NULL);
  wait_for_a_file_descriptor(daemon, daemon->unix_address);
  wait_for_a_file_descriptor(daemon, daemon->tcp_address);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

// A test that fails, or crashes, leaves no daemon running.
static void daemon_does_not_outlive_its_test(void **out) {
  (void)out;
  int pipe_ends[2], status = 0;
  pid_t pid = 0;
  assert_int_equal(pipe(pipe_ends), 0);
  assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // we become the orphan's parent, so that its end is seen
  pid_t test = fork();
  assert_true(test >= 0);
  if (test == 0) {
    const fixture_daemon *daemon = fixture_start(NULL);
    if (write(pipe_ends[1], &daemon->pid, sizeof(pid)) != (ssize_t)sizeof(pid)) _exit(1);
    fixture_remove_directory(daemon->directory);
    (void)raise(SIGKILL);
  }
  assert_int_equal(read(pipe_ends[0], &pid, sizeof(pid)), sizeof(pid));
  assert_int_equal(waitpid(test, &status, 0), test);
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

static void command_line_is_checked(void **out) {
  (void)out;
  expect_run((const char *[]){"--lisen", "x", NULL}, 1, "did you mean --listen?");
  expect_run((const char *[]){"serve", NULL}, 1, "unexpected argument serve");
  expect_run((const char *[]){"--limit-calls", "0", NULL}, 1, "--limit-calls is 0, allowed are 1 to");
  expect_run((const char *[]){"--listen", "7580", NULL}, 1, "listen is \"7580\", must be unix:PATH or HOST:PORT");
  expect_run((const char *[]){"--config", "no-such-file.yaml", NULL}, 1, "no-such-file.yaml");
  expect_run((const char *[]){"--log-level", "loud", NULL}, 1, "allowed are debug, info, warn and error");
  expect_run((const char *[]){"--bits-k", "5.2", NULL}, 1, "allowed are multiples of 0.125 up to 8");
}

static void lists_are_printed(void **out) {
  (void)out;
  expect_run((const char *[]){"--version", NULL}, 0, "qkvd " QKV_VERSION);
  expect_run((const char *[]){"--help", NULL}, 0, "QKVD_MEMORY_BUDGET");
  expect_run((const char *[]){"--print-metrics", NULL}, 0, "qkvd_append_tokens_total");
  expect_run((const char *[]){"--limit-items=7", "--print-options", NULL}, 0, "limit-items: 7  # flag");
}

static void idle_daemon_is_small(void **out) {
  (void)out;
  if (fixture_is_sanitized()) {
    print_message("skipped: a sanitizer's memory says nothing about the daemon's\n");
    skip();
  }
  fixture_daemon *daemon = fixture_start(NULL);
  fixture_client *client = fixture_connect(daemon->unix_address);
  fixture_result result = fixture_call(client, "/qkv.v1.Admin/GetStatus", NULL, 0, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_OK);
  fixture_free(&result);
  fixture_sleep_ms(1200);  // a tick of its timer
  assert_in_range(fixture_memory(daemon, "VmRSS"), MIB, 60 * MIB);
  fixture_disconnect(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

// The log says where memory lies, on any machine.
static void memory_is_where_it_is_asked_for(void **out) {
  (void)out;
  static const char *const said[] = {"\"pages\":\"small pages, as asked\"", "\"numa\":\"local\""};
  fixture_daemon *daemon = fixture_start((const char *[]){"--huge-pages", "off", "--numa", "local", NULL});
  for (size_t i = 0; i < sizeof said / sizeof *said; i++) fixture_wait_log(daemon, said[i]);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(stops_when_idle),
      cmocka_unit_test(stops_with_an_idle_client),
      cmocka_unit_test(watcher_is_told),
      cmocka_unit_test(stuck_stream_is_cut_after_the_grace),
      cmocka_unit_test(second_signal_ends_at_once),
      cmocka_unit_test(signals_go_to_the_main_thread),
      cmocka_unit_test(second_daemon_is_refused),
      cmocka_unit_test(stale_socket_is_replaced),
      cmocka_unit_test(many_connections_are_possible),
      cmocka_unit_test(connection_waits_for_a_file_descriptor),
      cmocka_unit_test(daemon_does_not_outlive_its_test),
      cmocka_unit_test(command_line_is_checked),
      cmocka_unit_test(lists_are_printed),
      cmocka_unit_test(idle_daemon_is_small),
      cmocka_unit_test(memory_is_where_it_is_asked_for),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
