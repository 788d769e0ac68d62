// qkv-bench storage: records are put into a storage and read back, on each driver in turn; GB/s of payload.
//
// fio measures the same device in the same directory (docs/storage.md has the command). Every repeat
// begins with an empty storage; puts end with everything durable. Reads are O_DIRECT: no cache helps them.
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/bench/bench.h"
#include "storage/storage.h"

static const qkv_option options[] = {
    QKV_BENCH_OPTIONS,
    {"data-dir", QKV_OPTION_STRING, offsetof(qkv_bench_settings, directory), NULL, 0, 0, "DIR",
     "directory for the storage, on the disk that is to be measured; made, and emptied afterwards"},
    {"bytes", QKV_OPTION_BYTES, offsetof(qkv_bench_settings, bytes), "1GiB", 1 << 20, 1e12, "BYTES",
     "payload of all records of a repeat"},
    {"record", QKV_OPTION_BYTES, offsetof(qkv_bench_settings, record), "256KiB", 1, 64 << 20, "BYTES",
     "payload of a record"},
    {"threads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "1", 1, 64, "N",
     "threads that wait for reads, each with its share of the records"},
    {"codes", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, codes), NULL, 0, 0, NULL,
     "records of codes that zstd shortens by some percent, instead of noise"},
};

// Payloads differ: this many are put in turn.
enum { PAYLOADS = 16 };

typedef struct storage_side {
  const qkv_bench_settings *settings;
  const char *io;
  qkv_storage *storage;
  uint8_t *payloads[PAYLOADS];
  size_t count;
  uint64_t *records;  // numbers of these
  pthread_mutex_t lock;
  pthread_cond_t changed;
  size_t failed;
  bool ready, synced;
  qkv_samples put, read;
} storage_side;

static void notify(storage_side *side, bool *flag) {
  pthread_mutex_lock(&side->lock);
  *flag = true;
  pthread_cond_broadcast(&side->changed);
  pthread_mutex_unlock(&side->lock);
}

static void await_flag(storage_side *side, bool *flag) {
  pthread_mutex_lock(&side->lock);
  while (!*flag) pthread_cond_wait(&side->changed, &side->lock);
  *flag = false;
  pthread_mutex_unlock(&side->lock);
}

static void on_written(void *context, uint64_t record, qkv_status status) {
  (void)record;
  storage_side *side = context;
  if (status == QKV_OK) return;
  pthread_mutex_lock(&side->lock);
  side->failed++;
  pthread_mutex_unlock(&side->lock);
}

static void on_ready(qkv_storage_waiter *waiter) {
  storage_side *side = waiter->context;
  notify(side, &side->ready);
}

static void on_synced(void *context, qkv_status status) {
  (void)status;
  storage_side *side = context;
  notify(side, &side->synced);
}

// Codes as a page has them: nibbles of which the middle ones are likelier, about 3.8 bits each; or noise.
static void fill(uint8_t *bytes, size_t size, uint64_t seed, bool codes) {
  uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
  for (size_t i = 0; i < size; i++) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    const unsigned low = ((unsigned)(x >> 8 & 15) + (unsigned)(x >> 16 & 15)) / 2;
    const unsigned high = ((unsigned)(x >> 24 & 15) + (unsigned)(x >> 32 & 15)) / 2;
    bytes[i] = codes ? (uint8_t)(high << 4 | low) : (uint8_t)(x >> 32);
  }
}

static int put_all(storage_side *side) {
  const uint64_t session = qkv_storage_session_number(side->storage);
  qkv_error error = {0};
  if (qkv_storage_journal(side->storage, QKV_JOURNAL_SESSION_OPEN, session, NULL, 0, NULL, NULL, &error) != QKV_OK) {
    return qkv_program_failed("%s", error.text);
  }
  for (size_t i = 0; i < side->count; i++) {
    const qkv_storage_put_request request = {.meta = {.session = session, .position = 64 * i, .tokens = 64},
                                             .payload = side->payloads[i % PAYLOADS],
                                             .bytes = (uint64_t)side->settings->record,
                                             .written = on_written,
                                             .context = side};
    for (;;) {
      const qkv_status status = qkv_storage_put(side->storage, &request, &side->records[i], &error);
      if (status == QKV_OK) break;
      if (status != QKV_UNAVAILABLE) return qkv_program_failed("%s", error.text);
      qkv_storage_waiter waiter = {.ready = on_ready, .context = side};
      qkv_storage_when_ready(side->storage, &waiter);
      await_flag(side, &side->ready);
      error = (qkv_error){0};
    }
  }
  qkv_storage_sync(side->storage, on_synced, side);
  await_flag(side, &side->synced);
  return side->failed == 0 ? QKV_EXIT_OK : qkv_program_failed("%zu records could not be written", side->failed);
}

typedef struct reader {
  storage_side *side;
  size_t first, count;
  pthread_t thread;
  bool failed;
} reader;

static void *read_share(void *context) {
  reader *self = context;
  storage_side *side = self->side;
  const size_t size = (size_t)side->settings->record;
  uint8_t *buffer = malloc(size);
  if (buffer == NULL) abort();
  qkv_storage_batch *batch =
      qkv_storage_batch_create(side->storage, side->records + self->first, self->count, UINT64_C(16) << 20);
  for (size_t i = 0; i < self->count; i++) {
    const bool ok = qkv_storage_batch_wait(batch, i, buffer, size, NULL) == QKV_OK;
    // Each answer's first bytes tell which payload it is.
    if (!ok || memcmp(buffer, side->payloads[(self->first + i) % PAYLOADS], size < 64 ? size : 64) != 0) {
      self->failed = true;
    }
  }
  qkv_storage_batch_destroy(&batch);
  free(buffer);
  return NULL;
}

static int read_all(storage_side *side) {
  const size_t threads = (size_t)side->settings->threads;
  reader readers[64];
  bool failed = false;
  for (size_t t = 0; t < threads; t++) {
    const size_t begin = side->count * t / threads, end = side->count * (t + 1) / threads;
    readers[t] = (reader){.side = side, .first = begin, .count = end - begin};
    if (pthread_create(&readers[t].thread, NULL, read_share, &readers[t]) != 0) abort();
  }
  for (size_t t = 0; t < threads; t++) {
    pthread_join(readers[t].thread, NULL);
    failed = failed || readers[t].failed;
  }
  return failed ? qkv_program_failed("a record could not be read, or was another") : QKV_EXIT_OK;
}

static void remove_files(const char *directory) {
  DIR *listing = opendir(directory);
  if (listing == NULL) return;
  for (const struct dirent *entry; (entry = readdir(listing)) != NULL;) {
    char path[4096];
    const bool ours = strncmp(entry->d_name, "segment-", 8) == 0 || strncmp(entry->d_name, "journal.", 8) == 0 ||
                      strcmp(entry->d_name, "lock") == 0;
    if (ours && snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) < (int)sizeof path) (void)unlink(path);
  }
  closedir(listing);
}

static int repeat(storage_side *side, json_t **result) {
  qkv_storage_config config;
  qkv_storage_config_init(&config);
  config.directory = side->settings->directory;
  config.io = side->io;
  config.compact_bytes_per_s = 0;
  qkv_error error = {0};
  remove_files(config.directory);
  if (qkv_storage_open(&config, NULL, &side->storage, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  const double gigabytes = (double)side->count * (double)side->settings->record * 1e-9;
  double begin = qkv_bench_now();
  int status = put_all(side);
  qkv_samples_add(&side->put, gigabytes / (qkv_bench_now() - begin));
  begin = qkv_bench_now();
  if (status == QKV_EXIT_OK) status = read_all(side);
  qkv_samples_add(&side->read, gigabytes / (qkv_bench_now() - begin));
  qkv_storage_stats stats;
  qkv_storage_read_stats(side->storage, &stats);
  // And how long it takes to know all of them again.
  qkv_storage_close(&side->storage);
  if (qkv_storage_open(&config, NULL, &side->storage, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  qkv_storage_stats recovered;
  qkv_storage_read_stats(side->storage, &recovered);
  json_decref(*result);
  *result =
      json_pack("{s:s, s:f, s:f, s:f, s:I, s:I, s:I, s:f}", "io", side->io, "put_GB_s",
                qkv_samples_quantile(&side->put, 0.5), "read_GB_s", qkv_samples_quantile(&side->read, 0.5),
                "stored_share", (double)stats.put_stored_bytes / (double)stats.put_bytes, "records",
                (json_int_t)side->count, "record_bytes", (json_int_t)side->settings->record, "recovered_records",
                (json_int_t)recovered.recovered_records, "recovery_ms", 1e3 * recovered.recovery_s);
  qkv_storage_close(&side->storage);
  remove_files(config.directory);
  return status;
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkv_bench_settings *settings = values;
  if (settings->directory == NULL) {
    (void)qkv_program_failed("--data-dir is needed: a directory on the disk that is to be measured");
    return QKV_EXIT_USAGE;
  }
  storage_side sides[2] = {{.io = "uring"}, {.io = "pread"}};
  json_t *results[2] = {NULL, NULL};
  int status = QKV_EXIT_OK;
  for (size_t s = 0; s < 2; s++) {
    sides[s].settings = settings;
    sides[s].count = (size_t)((settings->bytes + settings->record - 1) / settings->record);
    sides[s].records = calloc(sides[s].count, sizeof *sides[s].records);
    pthread_mutex_init(&sides[s].lock, NULL);
    pthread_cond_init(&sides[s].changed, NULL);
    if (sides[s].records == NULL) abort();
    for (size_t i = 0; i < PAYLOADS; i++) {
      sides[s].payloads[i] = malloc((size_t)settings->record);
      if (sides[s].payloads[i] == NULL) abort();
      fill(sides[s].payloads[i], (size_t)settings->record, i + 1, settings->codes);
    }
  }
  for (int64_t i = 0; i < settings->repeats && status == QKV_EXIT_OK; i++) {
    for (size_t s = 0; s < 2 && status == QKV_EXIT_OK; s++) status = repeat(&sides[s], &results[s]);
  }
  for (size_t s = 0; s < 2; s++) {
    if (status == QKV_EXIT_OK) {
      qkv_bench_report(settings, results[s]);
    } else {
      json_decref(results[s]);
    }
    for (size_t i = 0; i < PAYLOADS; i++) free(sides[s].payloads[i]);
    free(sides[s].records);
    qkv_samples_free(&sides[s].put);
    qkv_samples_free(&sides[s].read);
    pthread_mutex_destroy(&sides[s].lock);
    pthread_cond_destroy(&sides[s].changed);
  }
  return status;
}

const qkv_command qkvi_bench_storage = {.name = "storage",
                                        .arguments = "",
                                        .summary = "puts and reads records on a disk, with both drivers",
                                        .options = options,
                                        .option_count = sizeof options / sizeof *options,
                                        .run = run};
