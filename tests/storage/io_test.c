// storage/io.h: both drivers execute requests, in any number; the front goes on after short results.
#include "storage/io.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "storage/io_drivers.h"
#include "tests/fault/disk.h"
#include "tests/storage/fixture.h"

enum { BLOCK = 4096, MANY = 300 };

typedef struct io_scene {
  uv_loop_t loop;
  qkv_io *io;
  int ended;
  uint64_t deepest;  // requests at a time
} io_scene;

static void open_io(io_scene *ring, const scene *on, unsigned depth) {
  *ring = (io_scene){0};
  assert_int_equal(uv_loop_init(&ring->loop), 0);
  const qkv_io_config config = {.directory = on->directory, .driver = on->io, .depth = depth};
  qkv_error error = {0};
  const qkv_status status = qkv_io_create(&ring->loop, &config, &ring->io, &error);
  if (status == QKV_UNAVAILABLE) {
    print_message("%s\n", error.text);
    assert_int_equal(uv_loop_close(&ring->loop), 0);
    skip();
  }
  assert_int_equal(status, QKV_OK);
  assert_string_equal(qkv_io_driver_name(ring->io), on->io);
}

static void close_io(io_scene *ring) {
  qkv_io_destroy(&ring->io);
  uv_run(&ring->loop, UV_RUN_DEFAULT);
  assert_int_equal(uv_loop_close(&ring->loop), 0);
}

static void on_ended(qkv_io_request *request) {
  ((io_scene *)request->context)->ended++;
}

static int now(io_scene *ring, qkv_io_kind kind, int file, uint64_t offset, uint8_t *bytes, uint64_t size) {
  qkv_io_request request = {
      .kind = kind, .file = file, .offset = offset, .size = size, .bytes = bytes, .done = on_ended, .context = ring};
  qkv_io_submit(ring->io, &request);
  qkv_io_drain(ring->io);
  return request.error;
}

static uint8_t *blocks(size_t count) {
  uint8_t *bytes = aligned_alloc(BLOCK, count * BLOCK);
  assert_non_null(bytes);
  return bytes;
}

static void files_are_written_and_read(void **state) {
  const scene *on = *state;
  io_scene ring;
  open_io(&ring, on, 4);
  int file = -1, none = -1;
  uint64_t size = 0;
  assert_int_equal(qkv_io_open(ring.io, "a", false, &none), ENOENT);
  assert_int_equal(qkv_io_open(ring.io, "a", true, &file), 0);
  assert_int_equal(qkv_io_open(ring.io, "a", true, &none), EEXIST);
  assert_int_equal(now(&ring, QKV_IO_ALLOCATE, file, 0, NULL, 64 * BLOCK), 0);
  assert_int_equal(qkv_io_size(ring.io, file, &size), 0);
  assert_int_equal(size, 64 * BLOCK);
  uint8_t *out = blocks(8), *in = blocks(64);
  qkv_io_adopt(ring.io, out, 8 * BLOCK);
  scene_fill(out, 8 * BLOCK, 5, false);
  assert_int_equal(now(&ring, QKV_IO_WRITE, file, 3 * BLOCK, out, 8 * BLOCK), 0);
  assert_int_equal(now(&ring, QKV_IO_SYNC, file, 0, NULL, 0), 0);
  assert_int_equal(now(&ring, QKV_IO_READ, file, 0, in, 64 * BLOCK), 0);
  assert_memory_equal(in + 3 * BLOCK, out, 8 * BLOCK);
  for (size_t i = 0; i < 3 * BLOCK; i++) assert_int_equal(in[i], 0);
  assert_int_equal(now(&ring, QKV_IO_READ, file, 60 * BLOCK, in, 8 * BLOCK), ENODATA);
  assert_int_equal(qkv_io_truncate(ring.io, file, 4 * BLOCK), 0);
  assert_int_equal(now(&ring, QKV_IO_READ, file, 4 * BLOCK, in, BLOCK), ENODATA);
  qkv_io_close(ring.io, file);
  assert_int_equal(qkv_io_rename(ring.io, "a", "b"), 0);
  assert_int_equal(qkv_io_remove(ring.io, "a"), ENOENT);
  assert_int_equal(qkv_io_sync_directory(ring.io), 0);
  assert_int_equal(qkv_io_open(ring.io, "b", false, &file), 0);
  qkv_io_close(ring.io, file);
  assert_int_equal(qkv_io_remove(ring.io, "b"), 0);
  close_io(&ring);
  free(out);
  free(in);
}

// A pipe, which cannot be synchronized, gives that error: each driver asks the system.
static void syncs_reach_the_system(void **state) {
  const scene *on = *state;
  io_scene ring;
  char path[128];
  int file = -1;
  open_io(&ring, on, 4);
  assert_true((size_t)snprintf(path, sizeof path, "%s/pipe", on->directory) < sizeof path);
  assert_int_equal(mkfifo(path, 0600), 0);
  assert_int_equal(qkv_io_open(ring.io, "pipe", false, &file), 0);
  assert_int_equal(now(&ring, QKV_IO_SYNC, file, 0, NULL, 0), EINVAL);
  qkv_io_close(ring.io, file);
  close_io(&ring);
}

// MANY blocks, submitted at once.
static void write_and_read(io_scene *ring, int file) {
  uint8_t *out = blocks(MANY), *in = blocks(MANY);
  scene_fill(out, (size_t)MANY * BLOCK, 9, false);
  static qkv_io_request requests[MANY];
  for (int way = 0; way < 2; way++) {
    ring->ended = 0;
    for (size_t i = 0; i < MANY; i++) {
      requests[i] = (qkv_io_request){.kind = way == 0 ? QKV_IO_WRITE : QKV_IO_READ,
                                     .file = file,
                                     .offset = i * BLOCK,
                                     .size = BLOCK,
                                     .bytes = (way == 0 ? out : in) + i * BLOCK,
                                     .done = on_ended,
                                     .context = ring};
      qkv_io_submit(ring->io, &requests[i]);
      const uint64_t depth = qkv_io_read_stats(ring->io).depth;
      if (depth > ring->deepest) ring->deepest = depth;
    }
    qkv_io_drain(ring->io);
    assert_int_equal(ring->ended, MANY);
    for (size_t i = 0; i < MANY; i++) assert_int_equal(requests[i].error, 0);
  }
  assert_memory_equal(in, out, (size_t)MANY * BLOCK);
  const qkv_io_stats stats = qkv_io_read_stats(ring->io);
  assert_int_equal(stats.writes, MANY);
  assert_int_equal(stats.read_bytes, (uint64_t)MANY * BLOCK);
  free(out);
  free(in);
}

static void more_than_the_depth(void **state) {
  const scene *on = *state;
  io_scene ring;
  open_io(&ring, on, 3);
  int file = -1;
  assert_int_equal(qkv_io_open(ring.io, "many", true, &file), 0);
  write_and_read(&ring, file);
  assert_true(ring.deepest <= 3);
  qkv_io_close(ring.io, file);
  close_io(&ring);
}

// A ring of two places under a front that would give it all at once.
static void a_full_ring_is_waited_for(void **state) {
  (void)state;
  io_scene ring = {0};
  qkv_io_driver driver = {0};
  qkv_error error = {0};
  const qkv_io_config config = {.directory = ".", .driver = "uring", .depth = 2};
  assert_int_equal(uv_loop_init(&ring.loop), 0);
  if (qkvi_uring_create(&ring.loop, &config, &driver, &error) != QKV_OK) {
    print_message("%s\n", error.text);
    assert_int_equal(uv_loop_close(&ring.loop), 0);
    skip();
  }
  ring.io = qkv_io_create_over(&ring.loop, driver, MANY);
  qkvi_uring_attach(driver.self, ring.io);
  char name[32];
  int file = -1;
  (void)snprintf(name, sizeof name, "ring-%d", (int)getpid());
  assert_int_equal(qkv_io_open(ring.io, name, true, &file), 0);
  write_and_read(&ring, file);
  qkv_io_close(ring.io, file);
  assert_int_equal(qkv_io_remove(ring.io, name), 0);
  close_io(&ring);
}

// A driver that completes only a part of most requests and is often interrupted.
static void short_results_go_on(void **state) {
  (void)state;
  io_scene ring = {0};
  assert_int_equal(uv_loop_init(&ring.loop), 0);
  fault_disk *disk = fault_disk_create(3);
  ring.io = fault_disk_attach(disk, &ring.loop, 8);
  fault_disk_plan(disk, &(fault_plan){.shorter = 0.7, .interrupted = 0.3});
  int file = -1;
  assert_int_equal(qkv_io_open(ring.io, "a", true, &file), 0);
  uint8_t *out = blocks(MANY), *in = blocks(MANY);
  scene_fill(out, (size_t)MANY * BLOCK, 9, false);
  assert_int_equal(now(&ring, QKV_IO_WRITE, file, 0, out, (uint64_t)MANY * BLOCK), 0);
  assert_int_equal(now(&ring, QKV_IO_READ, file, 0, in, (uint64_t)MANY * BLOCK), 0);
  assert_memory_equal(in, out, (size_t)MANY * BLOCK);
  assert_true(qkv_io_read_stats(ring.io).short_results > 0);
  // Always interrupted: finally an error.
  fault_disk_plan(disk, &(fault_plan){.interrupted = 1});
  const int error = now(&ring, QKV_IO_READ, file, 0, in, BLOCK);
  assert_true(error == EINTR || error == EAGAIN);
  fault_disk_plan(disk, &(fault_plan){.write_error = 1});
  assert_int_equal(now(&ring, QKV_IO_WRITE, file, 0, out, BLOCK), EIO);
  assert_int_equal(qkv_io_read_stats(ring.io).errors, 2);
  qkv_io_close(ring.io, file);
  close_io(&ring);
  fault_disk_destroy(&disk);
  free(out);
  free(in);
}

static void automatic_takes_one(void **state) {
  const scene *on = *state;
  uv_loop_t loop;
  assert_int_equal(uv_loop_init(&loop), 0);
  qkv_io *io = NULL;
  const qkv_io_config config = {.directory = on->directory, .driver = "auto", .depth = 4};
  assert_int_equal(qkv_io_create(&loop, &config, &io, NULL), QKV_OK);
  const char *name = qkv_io_driver_name(io);
  assert_true(strcmp(name, "uring") == 0 || strcmp(name, "pread") == 0);
  qkv_io_destroy(&io);
  uv_run(&loop, UV_RUN_DEFAULT);
  assert_int_equal(uv_loop_close(&loop), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      BOTH(files_are_written_and_read),
      BOTH(syncs_reach_the_system),
      BOTH(more_than_the_depth),
      cmocka_unit_test_setup_teardown(automatic_takes_one, scene_setup_pread, scene_teardown),
      cmocka_unit_test(a_full_ring_is_waited_for),
      cmocka_unit_test(short_results_go_on),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
