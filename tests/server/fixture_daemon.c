#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/server/fixture.h"

#include <cmocka.h>

#define ARGUMENTS_MAX 32
#define POLL_MS 5

int64_t fixture_now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void fixture_sleep_ms(int64_t ms) {
  struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  nanosleep(&time, NULL);
}

bool fixture_is_sanitized(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

// ---- Directories ----

void fixture_make_directory(char *path, size_t size) {
  const char *base = getenv("TMPDIR");
  int length = snprintf(path, size, "%s/qkvd-XXXXXX", base == NULL ? P_tmpdir : base);
  assert_true(length > 0 && (size_t)length < size);
  assert_non_null(mkdtemp(path));
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *walk) {
  (void)info;
  (void)type;
  (void)walk;
  return remove(path);
}

void fixture_remove_directory(const char *path) {
  assert_int_equal(nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS), 0);
}

// ---- Processes ----

// Starts qkvd with its standard error (and output) in `file`.
static pid_t launch(const char *const *arguments, int file) {
  const char *argv[ARGUMENTS_MAX + 2] = {QKVD_PATH};
  size_t count = 0;
  for (; arguments[count] != NULL; count++) {
    assert_true(count < ARGUMENTS_MAX);
    argv[count + 1] = arguments[count];
  }
  pid_t parent = getpid(), pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    // The daemon does not outlive the test, however that ends.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) _exit(127);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    execv(QKVD_PATH, (char *const *)argv);
    _exit(127);
  }
  close(file);
  return pid;
}

static int open_log(const char *path) {
  int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
  assert_true(file >= 0);
  return file;
}

static void read_file(const char *path, char *text, size_t size) {
  FILE *file = fopen(path, "re");
  assert_non_null(file);
  size_t length = fread(text, 1, size - 1, file);
  text[length] = '\0';
  fclose(file);
}

// The exit status, or -1 if it is still running after `wait_ms` (then it is killed) or was killed by a signal.
static int wait_end(pid_t pid, int64_t wait_ms) {
  int64_t until = fixture_now_ms() + wait_ms;
  int status;
  for (;;) {
    pid_t done = waitpid(pid, &status, WNOHANG);
    assert_true(done >= 0);
    if (done == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (fixture_now_ms() >= until) break;
    fixture_sleep_ms(POLL_MS);
  }
  print_message("qkvd is still running after %lld ms, killed\n", (long long)wait_ms);
  kill(pid, SIGKILL);
  waitpid(pid, &status, 0);
  return -1;
}

int fixture_run(const char *const *arguments, char *output, size_t size) {
  char directory[128], path[160];
  fixture_make_directory(directory, sizeof(directory));
  snprintf(path, sizeof(path), "%s/log", directory);
  int status = wait_end(launch(arguments, open_log(path)), FIXTURE_PATIENCE_MS);
  read_file(path, output, size);
  fixture_remove_directory(directory);
  return status;
}

// Waits for the "ready" line; the TCP address is in the "listening" line before it.
static void wait_ready(fixture_daemon *daemon) {
  char text[8192];
  int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  do {
    int status;
    fixture_sleep_ms(POLL_MS);
    read_file(daemon->log_path, text, sizeof(text));
    if (waitpid(daemon->pid, &status, WNOHANG) != 0) fail_msg("qkvd did not start: %s", text);
    if (fixture_now_ms() > until) fail_msg("qkvd is not ready: %s", text);
  } while (strstr(text, "\"message\":\"ready\"") == NULL);
  const char *address = strstr(text, "\"address\":\"127.0.0.1:");
  assert_non_null(address);
  assert_int_equal(sscanf(address, "\"address\":\"%63[0-9.:]", daemon->tcp_address), 1);
}

void fixture_wait_log(const fixture_daemon *daemon, const char *text) {
  char log[8192];
  const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  for (read_file(daemon->log_path, log, sizeof(log)); strstr(log, text) == NULL;
       read_file(daemon->log_path, log, sizeof(log))) {
    if (fixture_now_ms() > until) fail_msg("no %s in %s", text, log);
    fixture_sleep_ms(POLL_MS);
  }
}

fixture_daemon *fixture_start(const char *const *arguments) {
  fixture_daemon *daemon = calloc(1, sizeof(*daemon));
  assert_non_null(daemon);
  fixture_make_directory(daemon->directory, sizeof(daemon->directory));
  snprintf(daemon->unix_address, sizeof(daemon->unix_address), "unix:%s/socket", daemon->directory);
  snprintf(daemon->log_path, sizeof(daemon->log_path), "%s/log", daemon->directory);
  const char *all[ARGUMENTS_MAX] = {"--listen", daemon->unix_address, "--listen", "127.0.0.1:0"};
  for (size_t i = 0; arguments != NULL && arguments[i] != NULL; i++) {
    assert_true(i + 5 < ARGUMENTS_MAX);
    all[i + 4] = arguments[i];
  }
  daemon->pid = launch(all, open_log(daemon->log_path));
  wait_ready(daemon);
  return daemon;
}

int fixture_stop(fixture_daemon **daemon, int signal, int64_t wait_ms) {
  fixture_daemon *old = *daemon;
  *daemon = NULL;
  assert_int_equal(kill(old->pid, signal), 0);
  int status = wait_end(old->pid, wait_ms);
  if (status != 0 && status != EXIT_FAILURE && signal != SIGKILL) {
    char text[8192];
    read_file(old->log_path, text, sizeof(text));
    print_message("qkvd ended with %d; its log:\n%s\n", status, text);
  }
  fixture_remove_directory(old->directory);
  free(old);
  return status;
}

int64_t fixture_memory(const fixture_daemon *daemon, const char *key) {
  char path[64], text[4096];
  snprintf(path, sizeof(path), "/proc/%d/status", (int)daemon->pid);
  read_file(path, text, sizeof(text));
  const char *line = strstr(text, key);
  assert_non_null(line);
  return strtoll(line + strlen(key) + 1, NULL, 10) * 1024;  // "VmRSS:     14032 kB"
}
