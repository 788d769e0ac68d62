#include "tests/storage/fixture.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/log.h"

static void remove_directory(const char *path) {
  DIR *listing = opendir(path);
  if (listing == NULL) return;
  for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
    char name[400];
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    (void)snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
    (void)unlink(name);
  }
  closedir(listing);
  (void)rmdir(path);
}

static int setup(void **state, const char *io) {
  scene *on = calloc(1, sizeof *on);
  if (on == NULL) return -1;
  qkv_log_setup(stderr, QKV_LOG_ERROR);
  on->io = io;
  // In the build directory, which is on a disk: /tmp may be in memory, without O_DIRECT.
  (void)snprintf(on->directory, sizeof on->directory, "storage-test-XXXXXX");
  if (mkdtemp(on->directory) == NULL) return -1;
  qkv_storage_config_init(&on->config);
  on->config.directory = on->directory;
  on->config.io = io;
  on->config.segment_bytes = 4 << 20;
  on->config.compact_bytes_per_s = 0;
  *state = on;
  return 0;
}

int scene_setup_uring(void **state) {
  return setup(state, "uring");
}

int scene_setup_pread(void **state) {
  return setup(state, "pread");
}

int scene_teardown(void **state) {
  scene *on = *state;
  qkv_storage_close(&on->storage);
  remove_directory(on->directory);
  free(on);
  return 0;
}

static bool is_wanted(void *context, const qkv_journal_entry *entry) {
  const scene *on = context;
  const size_t length = on->unwanted == NULL ? 0 : strlen(on->unwanted);
  return length == 0 || entry->bytes != length || memcmp(entry->payload, on->unwanted, length) != 0;
}

static bool note_entry(void *context, const qkv_journal_entry *entry) {
  scene *on = context;
  assert_true(on->entry_count < sizeof on->entries / sizeof *on->entries);
  const size_t size = entry->bytes < sizeof on->texts[0] ? entry->bytes : sizeof on->texts[0];
  if (size > 0) memcpy(on->texts[on->entry_count], entry->payload, size);
  for (uint32_t i = 0; i < entry->layers && i < 4; i++) on->positions[on->entry_count][i] = entry->positions[i];
  on->entries[on->entry_count++] = *entry;
  const bool opens = entry->kind == QKV_JOURNAL_SESSION_OPEN || entry->kind == QKV_JOURNAL_SESSION_FORK;
  return !opens || entry->session != on->refused;
}

static void note_record(void *context, const qkv_record_info *info) {
  scene *on = context;
  assert_true(on->record_count < sizeof on->records / sizeof *on->records);
  on->records[on->record_count++] = *info;
}

qkv_status scene_try_open(scene *on, qkv_error *error) {
  on->entry_count = on->record_count = 0;
  const qkv_storage_restore restore = {.context = on, .entry = note_entry, .record = note_record, .keep = is_wanted};
  return qkv_storage_open(&on->config, &restore, &on->storage, error);
}

void scene_open(scene *on) {
  qkv_error error = {0};
  const qkv_status status = scene_try_open(on, &error);
  // A container may forbid io_uring; then it cannot be tested.
  if (status == QKV_UNAVAILABLE) {
    print_message("io_uring is not to be had: %s\n", error.text);
    skip();
  }
  if (status != QKV_OK) fail_msg("%s", error.text);
  assert_string_equal(scene_stats(on).io, on->io);
}

void scene_close(scene *on) {
  qkv_storage_close(&on->storage);
  assert_null(on->storage);
}

void scene_fill(uint8_t *bytes, size_t size, uint64_t seed, bool code_like) {
  uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
  for (size_t i = 0; i < size; i++) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    bytes[i] = (uint8_t)(x >> 32);
    // The smaller of two nibbles: codes that are not equally likely.
    if (code_like) bytes[i] = (uint8_t)((bytes[i] & 15) < (x >> 44 & 15) ? bytes[i] & 15 : x >> 44 & 15);
  }
}

// ---- Waiting ----

typedef struct pause_state {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool written, durable, done;
  qkv_status status;
} pause_state;

#define PAUSE \
  { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER }

static void notify(pause_state *pause, bool *flag, qkv_status status) {
  pthread_mutex_lock(&pause->lock);
  *flag = true;
  pause->status = status;
  pthread_cond_broadcast(&pause->changed);
  pthread_mutex_unlock(&pause->lock);
}

static void on_done(void *context, qkv_status status) {
  pause_state *pause = context;
  notify(pause, &pause->done, status);
}

static void on_written(void *context, uint64_t record, qkv_status status) {
  (void)record;
  pause_state *pause = context;
  notify(pause, &pause->written, status);
}

static void on_durable(void *context, uint64_t record, qkv_status status) {
  (void)record;
  pause_state *pause = context;
  notify(pause, &pause->durable, status);
}

static qkv_status await_flag(pause_state *pause, const bool *flag) {
  pthread_mutex_lock(&pause->lock);
  while (!*flag) pthread_cond_wait(&pause->changed, &pause->lock);
  const qkv_status status = pause->status;
  pthread_mutex_unlock(&pause->lock);
  return status;
}

uint64_t scene_session(scene *on) {
  pause_state pause = PAUSE;
  const uint64_t session = qkv_storage_session_number(on->storage);
  assert_int_equal(
      qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_OPEN, session, "open", 4, on_done, &pause, NULL), QKV_OK);
  assert_int_equal(await_flag(&pause, &pause.done), QKV_OK);
  return session;
}

qkv_status scene_put_status(scene *on, const qkv_record_meta *meta, size_t size, bool durable, uint64_t *record) {
  pause_state pause = PAUSE;
  uint8_t *payload = malloc(size);
  assert_non_null(payload);
  scene_fill(payload, size, meta->session ^ (meta->position << 8) ^ size, size % 2 == 1);
  const qkv_storage_put_request request = {.meta = *meta,
                                           .payload = payload,
                                           .bytes = size,
                                           .sync_now = durable,
                                           .written = on_written,
                                           .durable = durable ? on_durable : NULL,
                                           .context = &pause};
  qkv_status status = qkv_storage_put(on->storage, &request, record, NULL);
  if (status == QKV_OK) {
    status = await_flag(&pause, &pause.written);
    if (status == QKV_OK && durable) status = await_flag(&pause, &pause.durable);
  }
  free(payload);
  return status;
}

uint64_t scene_put(scene *on, uint64_t session, uint32_t layer, uint64_t position, size_t size) {
  uint64_t record = 0;
  const qkv_record_meta meta = {.session = session, .layer = layer, .position = position, .tokens = 64, .kind = 1};
  assert_int_equal(scene_put_status(on, &meta, size, true, &record), QKV_OK);
  return record;
}

qkv_status scene_read(scene *on, uint64_t record, void *buffer, size_t size) {
  pause_state pause = PAUSE;
  qkv_storage_read(on->storage, record, buffer, size, on_done, &pause);
  return await_flag(&pause, &pause.done);
}

void scene_check(scene *on, uint64_t session, uint64_t record, uint64_t position, size_t size) {
  uint8_t *wanted = malloc(size), *got = malloc(size);
  assert_true(wanted != NULL && got != NULL);
  scene_fill(wanted, size, session ^ (position << 8) ^ size, size % 2 == 1);
  assert_int_equal(scene_read(on, record, got, size), QKV_OK);
  assert_memory_equal(wanted, got, size);
  free(wanted);
  free(got);
}

uint64_t scene_fork(scene *on, uint64_t parent, const uint64_t *positions, uint32_t layers, qkv_status *status) {
  pause_state pause = PAUSE;
  const uint64_t child = qkv_storage_session_number(on->storage);
  assert_int_equal(
      qkv_storage_session_fork(on->storage, child, parent, positions, layers, "fork", 4, on_done, &pause, NULL),
      QKV_OK);
  const qkv_status ended = await_flag(&pause, &pause.done);
  if (status == NULL) assert_int_equal(ended, QKV_OK);
  if (status != NULL) *status = ended;
  return ended == QKV_OK ? child : 0;
}

qkv_status scene_close_session(scene *on, uint64_t session) {
  pause_state pause = PAUSE;
  qkv_storage_session_close(on->storage, session, on_done, &pause);
  return await_flag(&pause, &pause.done);
}

qkv_status scene_truncate(scene *on, uint64_t session, uint32_t layer, uint64_t position) {
  pause_state pause = PAUSE;
  qkv_storage_session_truncate(on->storage, session, layer, position, on_done, &pause);
  return await_flag(&pause, &pause.done);
}

void scene_sync(scene *on) {
  pause_state pause = PAUSE;
  qkv_storage_sync(on->storage, on_done, &pause);
  assert_int_equal(await_flag(&pause, &pause.done), QKV_OK);
}

qkv_status scene_compact(scene *on, double live_share) {
  pause_state pause = PAUSE;
  qkv_storage_compact(on->storage, live_share, on_done, &pause);
  return await_flag(&pause, &pause.done);
}

qkv_storage_stats scene_stats(scene *on) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(on->storage, &stats);
  return stats;
}

void scene_file(const scene *on, const char *beginning, char path[128]) {
  int found = 0;
  DIR *listing = opendir(on->directory);
  assert_non_null(listing);
  for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
    if (strncmp(entry->d_name, beginning, strlen(beginning)) != 0) continue;
    (void)snprintf(path, 128, "%s/%.60s", on->directory, entry->d_name);
    found++;
  }
  closedir(listing);
  assert_int_equal(found, 1);
}

void scene_damage(const char *path, uint64_t offset) {
  FILE *file = fopen(path, "r+b");
  assert_non_null(file);
  assert_int_equal(fseek(file, (long)offset, SEEK_SET), 0);
  const int byte = fgetc(file);
  assert_true(byte >= 0);
  assert_int_equal(fseek(file, (long)offset, SEEK_SET), 0);
  assert_int_equal(fputc(byte ^ 0x10, file), byte ^ 0x10);
  assert_int_equal(fclose(file), 0);
}
