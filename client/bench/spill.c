// qkv-bench spill: a session goes to the SSD of a running daemon and comes back.
//
//   append   rows arrive, are coded and written: until the last ones are acknowledged, and until everything that is
//            sealed is durable, which comes in steps of a second
//   cold     the session has left memory; one query for every layer brings it back, or streams it where it is larger
//            than memory
//   warm     the same queries again
//
// The daemon is the caller's, with --data-dir and the --memory-budget that is to be tried. fio measures the device in
// the same directory (docs/storage.md).
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/bench/traffic.h"

#define NAME "qkv-bench-spill"

static const qkv_option options[] = {
    QKV_BENCH_OPTIONS,
    {"layers", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "32", 1, 1024, "N", "layers of the model"},
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, tokens), "32768", 64, 4194304, "N",
     "tokens of the session"},
    {"dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, dim), "128", 8, 1024, "N", "width of a row"},
    {"kv-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, kv_heads), "8", 1, 128, "N", "KV heads"},
    {"q-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, q_heads), "32", 1, 1024, "N",
     "query heads, a multiple of the KV heads"},
    {"bits-k", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, bits_k), "4", 1, 8, "BITS", "code bits of keys"},
    {"pause", QKV_OPTION_DURATION, offsetof(qkv_bench_settings, pause), "0", 0, 60000, "TIME",
     "between two layers' queries, as a model computes; not counted"},
    {"connections", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "1", 1, 64, "N",
     "that rows are appended by at a time, each to its share of the layers"},
    {"keep", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, keep), NULL, 0, 0, NULL,
     "the session stays; one that an earlier run has left is attended without appending"},
    {"bits-v", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, bits_v), "4", 1, 8, "BITS", "code bits of values"},
};

typedef struct spilling {
  const qkv_bench_settings *settings;
  qkv_client *client;
  qkv_bench_traffic traffic;
  qkv_client_session_info info;
} spilling;

static int read_info(spilling *all) {
  qkv_call_error error = {0};
  qkv_free(all->info.lengths);
  if (qkv_client_get_session(all->client, NAME, &all->info, &error) != 0) return qkv_bench_failed("ask", &error);
  return 0;
}

// One connection's share of the layers.
typedef struct appending {
  const spilling *all;
  qkv_client *client;
  int64_t first, step;
  pthread_t thread;
  int status;
} appending;

static void *append_share(void *context) {
  appending *on = context;
  const qkv_bench_settings *settings = on->all->settings;
  for (int64_t position = 0; position < settings->tokens && on->status == 0; position += QKV_BENCH_CHUNK_TOKENS) {
    for (int64_t layer = on->first; layer < settings->rounds && on->status == 0; layer += on->step)
      on->status = qkv_bench_traffic_append(&on->all->traffic, on->client, NAME, layer, position);
  }
  return NULL;
}

static int append_rows(const spilling *all) {
  const int64_t count = all->settings->threads;
  appending shares[64] = {{.all = all, .client = all->client, .step = count}};
  int status = 0;
  for (int64_t i = 1; i < count; i++) {
    shares[i] = (appending){.all = all, .first = i, .step = count};
    shares[i].client = qkv_bench_connect(all->settings, all->settings->program.target);
    if (shares[i].client == NULL) return 1;
  }
  for (int64_t i = 1; i < count; i++) {
    if (pthread_create(&shares[i].thread, NULL, append_share, &shares[i]) != 0) abort();
  }
  (void)append_share(&shares[0]);
  for (int64_t i = 0; i < count; i++) {
    if (i > 0) (void)pthread_join(shares[i].thread, NULL);
    if (i > 0) qkv_client_close(&shares[i].client);
    status |= shares[i].status;
  }
  return status;
}

// Seconds that all cores together were busy, with any process, since the machine's start; 0 without /proc/stat.
static double busy_seconds(void) {
  unsigned long long user = 0, nice = 0, system = 0;
  FILE *file = fopen("/proc/stat", "re");
  if (file == NULL) return 0;
  // NOLINTNEXTLINE(cert-err34-c): the kernel's text
  if (fscanf(file, "cpu %llu %llu %llu", &user, &nice, &system) != 3) user = nice = system = 0;
  (void)fclose(file);
  return (double)(user + nice + system) / (double)sysconf(_SC_CLK_TCK);
}

typedef struct append_figures {
  double acknowledged_s, durable_s;
  double cores;  // busy until then
} append_figures;

// Whether an earlier run has left it.
static bool is_there(spilling *all) {
  qkv_call_error error = {0};
  return qkv_client_get_session(all->client, NAME, &all->info, &error) == 0;
}

static int append_all(spilling *all, append_figures *figures) {
  const double begin = qkv_bench_now(), busy = busy_seconds();
  if (append_rows(all) != 0) return 1;
  figures->acknowledged_s = qkv_bench_now() - begin;
  figures->cores = (busy_seconds() - busy) / figures->acknowledged_s;
  // Sealed pages are durable about a second later at most, and what is not sealed is not written.
  const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
  for (bool durable = false; !durable; (void)nanosleep(&pause, NULL)) {
    if (read_info(all) != 0) return 1;
    durable = all->info.durable != NULL;
    for (uint32_t i = 0; i < all->info.layers && durable; i++)
      durable = all->info.durable[i] + 192 > all->info.lengths[i];
    if (all->info.durable == NULL) return qkv_program_failed("the daemon has no data-dir");
  }
  figures->durable_s = qkv_bench_now() - begin;
  return 0;
}

// A query of the last position to every layer. `layers` gets the time of each.
static int attend_all(spilling *all, double *seconds, qkv_samples *layers) {
  const qkv_bench_settings *settings = all->settings;
  const struct timespec pause = {.tv_sec = settings->pause / 1000, .tv_nsec = settings->pause % 1000 * 1000000};
  *seconds = 0;
  for (int64_t layer = 0; layer < settings->rounds; layer++) {
    if (layer > 0 && settings->pause > 0) (void)nanosleep(&pause, NULL);
    const double begin = qkv_bench_now();
    if (qkv_bench_traffic_attend(&all->traffic, all->client, NAME, layer) != 0) return 1;
    const double took = qkv_bench_now() - begin;
    qkv_samples_add(layers, took);
    *seconds += took;
  }
  return 0;
}

static void report_append(const spilling *all, const append_figures *appended, json_t *line) {
  const double fp16 = (double)all->info.bytes_fp16 * 1e-9, stored = (double)all->info.bytes_stored * 1e-9;
  json_t *figures =
      json_pack("{s:f, s:f, s:f, s:f, s:f}", "append_s", appended->acknowledged_s, "durable_s", appended->durable_s,
                "append_fp16_gbps", fp16 / appended->acknowledged_s, "append_stored_gbps",
                stored / appended->acknowledged_s, "append_cores_busy", appended->cores);
  json_object_update(line, figures);
  json_decref(figures);
}

static int measure(spilling *all) {
  append_figures appended = {0};
  double cold_s = 0, warm_s = 0;
  qkv_call_error error = {0};
  const bool append = !all->settings->keep || !is_there(all);
  if (append && (qkv_bench_traffic_register(&all->traffic, all->client) != 0 ||
                 qkv_bench_traffic_open(&all->traffic, all->client, NAME) != 0 || append_all(all, &appended) != 0))
    return QKV_EXIT_FAILED;
  qkv_samples cold = {0}, warm = {0}, cold_layers = {0}, warm_layers = {0};
  for (int64_t i = 0; i < all->settings->repeats; i++) {
    if (qkv_client_sink_session(all->client, NAME, NULL, &error) != 0) return qkv_bench_failed("sink", &error);
    if (attend_all(all, &cold_s, &cold_layers) != 0 || attend_all(all, &warm_s, &warm_layers) != 0)
      return QKV_EXIT_FAILED;
    qkv_samples_add(&cold, cold_s);
    qkv_samples_add(&warm, warm_s);
  }
  if (read_info(all) != 0) return QKV_EXIT_FAILED;
  const double stored = (double)all->info.bytes_stored * 1e-9;
  const double cold_median = qkv_samples_quantile(&cold, 0.5), warm_median = qkv_samples_quantile(&warm, 0.5);
  json_t *line = json_pack("{s:s, s:f}", "bench", "spill", "stored_gb", stored);
  if (append) report_append(all, &appended, line);
  json_t *figures = json_pack(
      "{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "cold_s", cold_median, "cold_gbps", stored / cold_median, "warm_s",
      warm_median, "cold_layer_ms", 1e3 * qkv_samples_quantile(&cold_layers, 0.5), "cold_layer_p99_ms",
      1e3 * qkv_samples_quantile(&cold_layers, 0.99), "warm_layer_ms", 1e3 * qkv_samples_quantile(&warm_layers, 0.5),
      "warm_layer_p99_ms", 1e3 * qkv_samples_quantile(&warm_layers, 0.99));
  json_object_update(line, figures);
  json_decref(figures);
  qkv_bench_report(all->settings, line);
  qkv_samples_free(&cold);
  qkv_samples_free(&warm);
  qkv_samples_free(&cold_layers);
  qkv_samples_free(&warm_layers);
  if (all->settings->keep) return QKV_EXIT_OK;
  if (qkv_client_close_session(all->client, NAME, NULL, &error) != 0) return qkv_bench_failed("close", &error);
  return QKV_EXIT_OK;
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkv_bench_settings *settings = values;
  if (settings->program.target == NULL) return qkv_program_misused("--target is missing: a qkvd with a --data-dir");
  spilling all = {.settings = settings};
  qkv_bench_traffic_init(&all.traffic, settings, NAME);
  all.client = qkv_bench_connect(settings, settings->program.target);
  const int status = all.client == NULL ? QKV_EXIT_FAILED : measure(&all);
  qkv_client_close(&all.client);
  qkv_free(all.info.lengths);
  qkv_bench_traffic_deinit(&all.traffic);
  return status;
}

const qkv_command qkvi_bench_spill = {
    .name = "spill",
    .arguments = "",
    .summary = "a session to the SSD of a running daemon and back",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .run = run,
};
