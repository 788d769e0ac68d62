// Loaded before libc into a daemon that reads and writes with threads: while the file that FAIL_SYNC names is there,
// fdatasync of a segment fails as a device's does, while that of FAIL_JOURNAL is that of the journal, and while that
// of FAIL_READ is, whatever reads a segment. While that of HOLD_SYNC is there, fdatasync of a segment does not end,
// while that of HOLD_JOURNAL is that of the journal. While that of SLOW_JOURNAL is, it takes a quarter of a second,
// and while that of SLOW_READ is, what reads a segment 20 ms.
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool concerns(int file, const char *kind, const char *variable) {
  const char *flag = getenv(variable);
  char link[64], name[4096];
  (void)snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, name, sizeof name - 1);
  name[length < 0 ? 0 : length] = '\0';
  if (flag == NULL || strstr(name, kind) == NULL || access(flag, F_OK) != 0) return false;
  return true;
}

static bool fails(int file, const char *kind, const char *variable) {
  if (!concerns(file, kind, variable)) return false;
  errno = EIO;
  return true;
}

int fdatasync(int file) {
  while (concerns(file, "/segment-", "HOLD_SYNC") || concerns(file, "/journal", "HOLD_JOURNAL")) (void)usleep(1000);
  if (concerns(file, "/journal", "SLOW_JOURNAL")) (void)usleep(250000);
  if (fails(file, "/journal", "FAIL_JOURNAL")) return -1;
  return fails(file, "/segment-", "FAIL_SYNC") ? -1 : (int)syscall(SYS_fdatasync, file);
}

ssize_t pread(int file, void *bytes, size_t size, off_t offset) {
  if (concerns(file, "/segment-", "SLOW_READ")) (void)usleep(20000);
  return fails(file, "/segment-", "FAIL_READ") ? -1 : syscall(SYS_pread64, file, bytes, size, offset);
}
