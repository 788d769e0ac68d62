// Loaded before libc into a daemon that reads and writes with threads: while the file that FAIL_SYNC names is there,
// fdatasync of a segment fails as a device's does.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int fdatasync(int file) {
  const char *flag = getenv("FAIL_SYNC");
  char link[64], name[4096];
  (void)snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, name, sizeof name - 1);
  name[length < 0 ? 0 : length] = '\0';
  if (flag != NULL && strstr(name, "/segment-") != NULL && access(flag, F_OK) == 0) {
    errno = EIO;
    return -1;
  }
  return (int)syscall(SYS_fdatasync, file);
}
