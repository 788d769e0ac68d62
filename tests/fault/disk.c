#include "tests/fault/disk.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SECTOR = 512, NAMES_MAX = 256, FILES_MAX = 256, FLIGHT_MAX = 256, NAME_BYTES = 40 };

// A write that is complete and not durable.
typedef struct disk_write {
  uint64_t order, offset, size;
  struct disk_write *next;
  uint8_t bytes[];
} disk_write;

typedef struct disk_file {
  uint8_t *now, *durable;
  uint64_t capacity, size, durable_size;
  disk_write *writes, **last;
  unsigned opened;
  bool segment;
} disk_file;

typedef struct disk_name {
  char name[NAME_BYTES];
  disk_file *file;
} disk_name;

typedef struct disk_names {
  disk_name names[NAMES_MAX];
  size_t count;
} disk_names;

// A change of a name since the directory was synced. `to` "": removed; `from` "": created.
typedef struct name_change {
  char from[NAME_BYTES], to[NAME_BYTES];
  disk_file *file;
} name_change;

typedef struct flight {
  qkv_io_request *request;
  uint64_t order;  // of its beginning
  bool late;       // after the crash
} flight;

struct fault_disk {
  uint64_t state;  // of the generator
  fault_plan plan;
  qkv_io *io;
  uv_idle_t *turns;
  bool crashed, held;
  uint64_t done;   // requests and names, against plan.crash_after
  uint64_t order;  // of writes and syncs
  uint64_t damaged_segments, damaged_journal;
  disk_names now, durable;
  name_change changes[NAMES_MAX];
  size_t change_count;
  disk_file *files[FILES_MAX];   // all that exist
  disk_file *opened[FILES_MAX];  // by number
  flight flights[FLIGHT_MAX];
  size_t flight_count;
};

uint64_t fault_disk_random(fault_disk *disk, uint64_t bound) {
  disk->state += UINT64_C(0x9e3779b97f4a7c15);
  uint64_t x = disk->state;
  x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
  return (x ^ x >> 31) % bound;
}

bool fault_disk_chance(fault_disk *disk, double probability) {
  return (double)fault_disk_random(disk, 1u << 30) < probability * (1u << 30);
}

// ---- Files ----

static void reserve(disk_file *file, uint64_t capacity) {
  if (capacity <= file->capacity) return;
  file->now = realloc(file->now, capacity);
  file->durable = realloc(file->durable, capacity);
  if (file->now == NULL || file->durable == NULL) abort();
  memset(file->now + file->capacity, 0, capacity - file->capacity);
  memset(file->durable + file->capacity, 0, capacity - file->capacity);
  file->capacity = capacity;
}

static void drop_write(disk_file *file, disk_write **link) {
  disk_write *write = *link;
  *link = write->next;
  if (write->next == NULL) file->last = link;
  free(write);
}

static void free_file(disk_file *file) {
  while (file->writes != NULL) drop_write(file, &file->writes);
  free(file->now);
  free(file->durable);
  free(file);
}

static disk_file *new_file(fault_disk *disk, const char *name) {
  size_t at = 0;
  while (disk->files[at] != NULL) assert(++at < FILES_MAX);
  disk_file *file = calloc(1, sizeof *file);
  if (file == NULL) abort();
  file->last = &file->writes;
  file->segment = strncmp(name, "segment", 7) == 0;
  disk->files[at] = file;
  return file;
}

static disk_name *find_name(disk_names *names, const char *name) {
  for (size_t i = 0; i < names->count; i++) {
    if (strcmp(names->names[i].name, name) == 0) return &names->names[i];
  }
  return NULL;
}

static bool has_file(const disk_names *names, const disk_file *file) {
  for (size_t i = 0; i < names->count; i++) {
    if (names->names[i].file == file) return true;
  }
  return false;
}

// Of changes of names the first ones may become durable: a file that is made and removed may come back.
static bool may_get_name(const fault_disk *disk, const disk_file *file) {
  for (size_t i = 0; i < disk->change_count; i++) {
    if (disk->changes[i].file == file) return true;
  }
  return has_file(&disk->now, file) || has_file(&disk->durable, file);
}

static void forget_files(fault_disk *disk) {
  for (size_t i = 0; i < FILES_MAX; i++) {
    disk_file *file = disk->files[i];
    if (file == NULL || file->opened > 0 || may_get_name(disk, file)) continue;
    free_file(file);
    disk->files[i] = NULL;
  }
}

static void change(disk_names *names, const name_change *what) {
  disk_name *from = find_name(names, what->from), *to = find_name(names, what->to);
  if (from != NULL) *from = names->names[--names->count];
  if (what->to[0] == '\0') return;
  to = find_name(names, what->to);
  if (to == NULL) {
    assert(names->count < NAMES_MAX);
    to = &names->names[names->count++];
    memcpy(to->name, what->to, NAME_BYTES);
  }
  to->file = what->file;
}

static void change_now(fault_disk *disk, const char *from, const char *to, disk_file *file) {
  assert(disk->change_count < NAMES_MAX);
  name_change *made = &disk->changes[disk->change_count++];
  *made = (name_change){.file = file};
  (void)snprintf(made->from, NAME_BYTES, "%s", from);
  (void)snprintf(made->to, NAME_BYTES, "%s", to);
  change(&disk->now, made);
}

static void sync_names(fault_disk *disk, size_t count) {
  for (size_t i = 0; i < count; i++) change(&disk->durable, &disk->changes[i]);
  disk->change_count = 0;
}

// ---- Bytes ----

static void note_damage(fault_disk *disk, const disk_file *file) {
  if (file->segment) {
    disk->damaged_segments++;
  } else {
    disk->damaged_journal++;
  }
}

static void put_bytes(fault_disk *disk, disk_file *file, uint64_t offset, const uint8_t *bytes, uint64_t size) {
  disk_write *write = malloc(sizeof *write + size);
  if (write == NULL) abort();
  *write = (disk_write){.order = ++disk->order, .offset = offset, .size = size};
  memcpy(write->bytes, bytes, size);
  reserve(file, offset + size);
  if (fault_disk_chance(disk, disk->plan.flip)) {
    write->bytes[fault_disk_random(disk, size)] ^= (uint8_t)(1u << fault_disk_random(disk, 8));
    note_damage(disk, file);
  }
  memcpy(file->now + offset, write->bytes, size);
  if (offset + size > file->size) file->size = offset + size;
  *file->last = write;
  file->last = &write->next;
}

static void write_bytes(fault_disk *disk, disk_file *file, uint64_t offset, const uint8_t *bytes, uint64_t size) {
  if (fault_disk_chance(disk, disk->plan.lost)) {
    note_damage(disk, file);
    return;
  }
  if (fault_disk_chance(disk, disk->plan.misdirected)) {
    note_damage(disk, file);
    const uint64_t blocks = file->capacity > size ? (file->capacity - size) / 4096 : 0;
    if (blocks == 0) return;
    offset = 4096 * fault_disk_random(disk, blocks);
  }
  put_bytes(disk, file, offset, bytes, size);
}

// A failed fdatasync: the cache considers the bytes clean, and the medium does not have them.
static void forget_writes(disk_file *file, uint64_t order) {
  for (disk_write **link = &file->writes; *link != NULL;) {
    if ((*link)->order > order) {
      link = &(*link)->next;
    } else {
      drop_write(file, link);
    }
  }
}

static void make_durable(disk_file *file, uint64_t order) {
  for (disk_write **link = &file->writes; *link != NULL;) {
    disk_write *write = *link;
    if (write->order > order) {
      link = &write->next;
      continue;
    }
    memcpy(file->durable + write->offset, write->bytes, write->size);
    drop_write(file, link);
  }
  file->durable_size = file->size;
}

// ---- The driver ----

// Counts one operation; whether the disk is dead.
static bool step(fault_disk *disk) {
  disk->done++;
  if (disk->plan.crash_after != 0 && disk->done >= disk->plan.crash_after) disk->crashed = true;
  return disk->crashed;
}

static int64_t do_read(fault_disk *disk, disk_file *file, uint64_t offset, uint8_t *bytes, uint64_t size) {
  if (fault_disk_chance(disk, disk->plan.read_error)) return -EIO;
  if (file->segment && disk->plan.segment_error > 0 && fault_disk_chance(disk, disk->plan.segment_error)) return -EIO;
  if (offset >= file->size) return 0;
  if (size > file->size - offset) size = file->size - offset;
  memcpy(bytes, file->now + offset, size);
  if (fault_disk_chance(disk, disk->plan.stale_read)) bytes[fault_disk_random(disk, size)] ^= 0x40;
  return (int64_t)size;
}

static uint64_t total_size(const fault_disk *disk) {
  uint64_t size = 0;
  for (size_t i = 0; i < disk->now.count; i++) size += disk->now.names[i].file->size;
  return size;
}

static int64_t perform(fault_disk *disk, const flight *in) {
  const qkv_io_request *request = in->request;
  disk_file *file = disk->opened[request->file];
  const uint64_t offset = request->offset + request->progress;
  uint64_t size = request->size - request->progress;
  if (step(disk)) return -EIO;
  if (fault_disk_chance(disk, disk->plan.interrupted)) return fault_disk_chance(disk, 0.5) ? -EINTR : -EAGAIN;
  if (request->bytes != NULL && fault_disk_chance(disk, disk->plan.shorter)) {
    size = fault_disk_random(disk, size) / SECTOR * SECTOR + SECTOR;
    if (size > request->size - request->progress) size = request->size - request->progress;
  }
  switch (request->kind) {
    case QKV_IO_READ:
      return do_read(disk, file, offset, request->bytes + request->progress, size);
    case QKV_IO_WRITE:
      if (fault_disk_chance(disk, disk->plan.write_error)) return -EIO;
      write_bytes(disk, file, offset, request->bytes + request->progress, size);
      return (int64_t)size;
    case QKV_IO_SYNC:
      if (fault_disk_chance(disk, disk->plan.sync_error)) {
        forget_writes(file, in->order);
        return -EIO;
      }
      make_durable(file, in->order);
      return 0;
    case QKV_IO_ALLOCATE:
      if (fault_disk_chance(disk, disk->plan.full) || total_size(disk) > UINT64_C(256) << 20) return -ENOSPC;
      reserve(file, offset + size);
      if (offset + size > file->size) file->size = offset + size;
      return 0;
  }
  return -EINVAL;
}

// Requests in flight when the process died may have reached the disk, whole or in part.
static void land_late(fault_disk *disk, const flight *in) {
  const qkv_io_request *request = in->request;
  if (in->late || request->kind != QKV_IO_WRITE || fault_disk_chance(disk, 0.5)) return;
  const uint64_t offset = request->offset + request->progress, size = request->size - request->progress;
  const uint64_t part = fault_disk_chance(disk, 0.5) ? size : fault_disk_random(disk, size) / SECTOR * SECTOR;
  if (part > 0) put_bytes(disk, disk->opened[request->file], offset, request->bytes + request->progress, part);
}

static void turn(uv_idle_t *handle) {
  fault_disk *disk = handle->data;
  // The loop turns once more after the last completion, as it does where completions are polled.
  if (disk->flight_count == 0) {
    uv_idle_stop(handle);
    return;
  }
  if (disk->held) return;
  // Some of the requests in flight complete, in any order.
  for (uint64_t lands = 1 + fault_disk_random(disk, disk->flight_count); lands > 0; lands--) {
    const size_t which = (size_t)fault_disk_random(disk, disk->flight_count);
    const flight in = disk->flights[which];
    disk->flights[which] = disk->flights[--disk->flight_count];
    if (disk->crashed) land_late(disk, &in);
    const int64_t result = disk->crashed ? -EIO : perform(disk, &in);
    qkvi_io_finish(disk->io, in.request, result);
  }
}

bool fault_disk_land(fault_disk *disk, qkv_io_kind kind, size_t skip, int error) {
  size_t at = 0;
  for (; at < disk->flight_count; at++) {
    if (disk->flights[at].request->kind == kind && skip-- == 0) break;
  }
  if (at == disk->flight_count) return false;
  const flight in = disk->flights[at];
  disk->flight_count--;
  memmove(&disk->flights[at], &disk->flights[at + 1], (disk->flight_count - at) * sizeof in);
  qkvi_io_finish(disk->io, in.request, error != 0 ? -error : perform(disk, &in));
  return true;
}

static bool start(void *self, qkv_io_request *request) {
  fault_disk *disk = self;
  assert(disk->flight_count < FLIGHT_MAX && disk->opened[request->file] != NULL);
  if (disk->flight_count > 4 && fault_disk_chance(disk, 0.1)) return false;  // the queue is full now
  disk->flights[disk->flight_count++] = (flight){.request = request, .order = disk->order, .late = disk->crashed};
  uv_idle_start(disk->turns, turn);
  return true;
}

static void flush(void *self) {
  (void)self;
}

static int open_file(void *self, const char *name, bool create, int *number) {
  fault_disk *disk = self;
  if (step(disk) || fault_disk_chance(disk, disk->plan.name_error)) return -EIO;
  const disk_name *found = find_name(&disk->now, name);
  if (create && found != NULL) return -EEXIST;
  if (!create && found == NULL) return -ENOENT;
  disk_file *file = create ? new_file(disk, name) : found->file;
  if (create) change_now(disk, "", name, file);
  int at = 0;
  while (disk->opened[at] != NULL) assert(++at < FILES_MAX);
  disk->opened[at] = file;
  file->opened++;
  *number = at;
  return 0;
}

static void close_file(void *self, int number) {
  fault_disk *disk = self;
  disk->opened[number]->opened--;
  disk->opened[number] = NULL;
}

static int size_of(void *self, int number, uint64_t *bytes) {
  const fault_disk *disk = self;
  if (disk->crashed) return -EIO;
  *bytes = disk->opened[number]->size;
  return 0;
}

static int truncate_file(void *self, int number, uint64_t bytes) {
  fault_disk *disk = self;
  if (step(disk) || fault_disk_chance(disk, disk->plan.name_error)) return -EIO;
  assert(bytes <= disk->opened[number]->size);
  disk->opened[number]->size = bytes;
  return 0;
}

static int rename_file(void *self, const char *from, const char *to) {
  fault_disk *disk = self;
  if (step(disk) || fault_disk_chance(disk, disk->plan.name_error)) return -EIO;
  const disk_name *found = find_name(&disk->now, from);
  if (found == NULL) return -ENOENT;
  change_now(disk, from, to, found->file);
  return 0;
}

static int remove_file(void *self, const char *name) {
  fault_disk *disk = self;
  if (step(disk) || fault_disk_chance(disk, disk->plan.name_error)) return -EIO;
  const disk_name *found = find_name(&disk->now, name);
  if (found == NULL) return -ENOENT;
  change_now(disk, name, "", found->file);
  return 0;
}

static int list(void *self, void (*each)(void *context, const char *name), void *context) {
  const fault_disk *disk = self;
  if (disk->crashed) return -EIO;
  for (size_t i = 0; i < disk->now.count; i++) each(context, disk->now.names[i].name);
  return 0;
}

static int sync_directory(void *self) {
  fault_disk *disk = self;
  if (step(disk) || fault_disk_chance(disk, disk->plan.name_error)) return -EIO;
  if (disk->plan.directory_error > 0 && fault_disk_chance(disk, disk->plan.directory_error)) return -EIO;
  sync_names(disk, disk->change_count);
  forget_files(disk);
  return 0;
}

static void adopt(void *self, void *region, size_t bytes) {
  (void)self;
  (void)region;
  (void)bytes;
}

static void free_handle(uv_handle_t *handle) {
  free(handle);
}

static void detach(void *self) {
  fault_disk *disk = self;
  assert(disk->flight_count == 0);
  uv_close((uv_handle_t *)disk->turns, free_handle);
  disk->turns = NULL;
  disk->io = NULL;
}

qkv_io *fault_disk_attach(fault_disk *disk, uv_loop_t *loop, unsigned depth) {
  assert(disk->io == NULL && depth <= FLIGHT_MAX);
  disk->turns = calloc(1, sizeof *disk->turns);
  if (disk->turns == NULL) abort();
  uv_idle_init(loop, disk->turns);
  disk->turns->data = disk;
  const qkv_io_driver driver = {.name = "fault",
                                .self = disk,
                                .start = start,
                                .flush = flush,
                                .open = open_file,
                                .close = close_file,
                                .size = size_of,
                                .truncate = truncate_file,
                                .rename = rename_file,
                                .remove = remove_file,
                                .list = list,
                                .sync_directory = sync_directory,
                                .adopt = adopt,
                                .destroy = detach};
  disk->io = qkv_io_create_over(loop, driver, depth);
  return disk->io;
}

// ---- Life ----

fault_disk *fault_disk_create(uint64_t seed) {
  fault_disk *disk = calloc(1, sizeof *disk);
  if (disk == NULL) abort();
  disk->state = seed;
  return disk;
}

void fault_disk_destroy(fault_disk **disk) {
  fault_disk *old = *disk;
  assert(old->io == NULL);
  for (size_t i = 0; i < FILES_MAX; i++) {
    if (old->files[i] != NULL) free_file(old->files[i]);
  }
  free(old);
  *disk = NULL;
}

void fault_disk_plan(fault_disk *disk, const fault_plan *plan) {
  disk->plan = *plan;
  disk->done = 0;
}

void fault_disk_hold(fault_disk *disk, bool held) {
  disk->held = held;
}

void fault_disk_crash(fault_disk *disk) {
  disk->crashed = true;
}

bool fault_disk_crashed(const fault_disk *disk) {
  return disk->crashed;
}

// Every sector of a write that was not durable may be written or not; some writes are written or not as a whole.
static void land_partly(fault_disk *disk, disk_file *file, const disk_write *write) {
  const uint64_t how = fault_disk_random(disk, 3);
  if (how == 0) return;
  for (uint64_t at = 0; at < write->size; at += SECTOR) {
    if (how == 1 || fault_disk_chance(disk, 0.5)) {
      memcpy(file->durable + write->offset + at, write->bytes + at, SECTOR);
    }
  }
}

static void lose_power(fault_disk *disk, disk_file *file) {
  while (file->writes != NULL) {
    land_partly(disk, file, file->writes);
    drop_write(file, &file->writes);
  }
  if (fault_disk_chance(disk, 0.5)) file->durable_size = file->size;
  if (file->capacity > 0) memcpy(file->now, file->durable, file->capacity);
  file->size = file->durable_size;
}

void fault_disk_restart(fault_disk *disk, bool power_cut) {
  assert(disk->io == NULL);
  disk->crashed = false;
  disk->plan = (fault_plan){0};
  if (power_cut) {
    const size_t kept = (size_t)fault_disk_random(disk, disk->change_count + 1);
    sync_names(disk, kept);
    disk->now = disk->durable;
    for (size_t i = 0; i < FILES_MAX; i++) {
      if (disk->files[i] != NULL) lose_power(disk, disk->files[i]);
    }
  }
  forget_files(disk);
}

uint64_t fault_disk_damaged_segments(const fault_disk *disk) {
  return disk->damaged_segments;
}

uint64_t fault_disk_damaged_journal(const fault_disk *disk) {
  return disk->damaged_journal;
}

uint8_t *fault_disk_bytes(fault_disk *disk, const char *name, uint64_t *size) {
  const disk_name *found = find_name(&disk->now, name);
  if (found == NULL) return NULL;
  *size = found->file->size;
  return found->file->now;
}
