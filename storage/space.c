#include "storage/space.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

enum { STAT_BLOCK = 512, SEGMENTS_LEAST = 4 };  // the unit of st_blocks; what storage.c asks of a budget

static int add_files(DIR *listing, qkvi_space *space) {
  for (;;) {
    errno = 0;
    const struct dirent *entry = readdir(listing);
    if (entry == NULL) return errno;
    struct stat file;
    if (fstatat(dirfd(listing), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) != 0) return errno;
    if (!S_ISREG(file.st_mode)) continue;
    space->held += (uint64_t)file.st_size;
    space->allocated += (uint64_t)file.st_blocks * STAT_BLOCK;
  }
}

int qkvi_space_read(const char *directory, qkvi_space *space) {
  struct statvfs system;
  *space = (qkvi_space){0};
  if (statvfs(directory, &system) != 0) return errno;
  space->available = (uint64_t)system.f_bavail * system.f_frsize;
  space->whole = (uint64_t)system.f_blocks * system.f_frsize;
  DIR *listing = opendir(directory);
  if (listing == NULL) return errno;
  const int error = add_files(listing, space);
  (void)closedir(listing);
  return error;
}

static uint64_t larger(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

uint64_t qkvi_space_budget(const qkvi_space *space, uint64_t segment_bytes) {
  if (space->whole == 0) return 0;
  const uint64_t all = space->allocated + space->available;
  return larger(all - all / 10, larger(space->held, SEGMENTS_LEAST * segment_bytes));
}
