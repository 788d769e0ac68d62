#include "client/bench/daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/common/program.h"

enum { ARGUMENTS_MAX = 16 };

// The path of qkvd in this executable's folder.
static bool daemon_path(char *path, size_t size) {
  ssize_t length = readlink("/proc/self/exe", path, size - 1);
  if (length <= 0) return false;
  path[length] = '\0';
  char *slash = strrchr(path, '/');
  if (!slash) return false;
  size_t capacity = size - (size_t)(slash + 1 - path);
  return snprintf(slash + 1, capacity, "qkvd") < (int)capacity && access(path, X_OK) == 0;
}

static void run_daemon(const char *path, const qkv_bench_daemon *daemon, const char *const *arguments) {
  // Whatever happens to the benchmark, the daemon does not outlive it. Its log is of no interest.
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  int null = open("/dev/null", O_RDWR);
  if (null >= 0) {
    dup2(null, STDIN_FILENO);
    dup2(null, STDOUT_FILENO);
  }
  const char *all[ARGUMENTS_MAX] = {path, "--listen", daemon->target, "--log-level", "error", "--calibrate-tokens",
                                    "0"};
  for (size_t i = 7; *arguments != NULL && i + 1 < ARGUMENTS_MAX; i++) all[i] = *arguments++;
  execv(path, (char *const *)all);
  _exit(127);
}

bool qkv_bench_daemon_start(qkv_bench_daemon *daemon, const char *target, const char *const *arguments) {
  memset(daemon, 0, sizeof *daemon);
  if (target) {
    snprintf(daemon->target, sizeof daemon->target, "%s", target);
    return true;
  }
  char path[4096];
  if (!daemon_path(path, sizeof path)) {
    qkv_program_failed("no qkvd lies in this program's folder; start one and give its address with --target");
    return false;
  }
  snprintf(daemon->directory, sizeof daemon->directory, "/tmp/qkv-bench-XXXXXX");
  if (!mkdtemp(daemon->directory)) {
    qkv_program_failed("cannot make a directory for the daemon's socket: %s", strerror(errno));
    return false;
  }
  snprintf(daemon->target, sizeof daemon->target, "unix:%s/socket", daemon->directory);
  daemon->pid = fork();
  if (daemon->pid < 0) {
    qkv_program_failed("cannot start a daemon: %s", strerror(errno));
    daemon->pid = 0;
    return false;
  }
  if (daemon->pid == 0) run_daemon(path, daemon, arguments);
  return true;
}

void qkv_bench_daemon_stop(qkv_bench_daemon *daemon) {
  if (daemon->pid == 0) return;
  kill(daemon->pid, SIGTERM);
  waitpid(daemon->pid, NULL, 0);
  daemon->pid = 0;
  // The daemon removes its socket; its lock file is left.
  char path[160];
  for (size_t i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/socket%s", daemon->directory, i ? ".lock" : "");
    unlink(path);
  }
  rmdir(daemon->directory);
}
