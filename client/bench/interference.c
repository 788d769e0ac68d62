// qkv-bench interference: attends of a session in memory, while others go to the SSD of a running daemon and come
// back.
//
//   quiet       nothing else
//   spilling    another connection appends to sessions that take more than memory, one request at a time
//   restoring   it brings them back in turn, layer by layer (Prefetch), and each time another one has to leave
//   attending   it attends them in turn, layer by layer: they come back, and attention is taken for it, too
//
// The four modes take turns, a window each. The daemon is the caller's, with --data-dir and a --memory-budget that is
// a part of what the other sessions take.
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/bench/traffic.h"

#define NAME "qkv-bench-interference"

typedef enum mode { QUIET, SPILLING, RESTORING, ATTENDING, MODES, ENDING } mode;

static const qkv_option options[] = {
    QKV_BENCH_OPTIONS,
    {"layers", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "8", 1, 1024, "N", "layers of the model"},
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, tokens), "8192", 512, 4194304, "N",
     "tokens of each session"},
    {"sessions", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, sessions), "32", 2, 65536, "N",
     "sessions that come and go"},
    {"dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, dim), "128", 8, 1024, "N", "width of a row"},
    {"kv-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, kv_heads), "8", 1, 128, "N", "KV heads"},
    {"q-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, q_heads), "32", 1, 1024, "N",
     "query heads, a multiple of the KV heads"},
    {"bits-k", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, bits_k), "4", 1, 8, "BITS", "code bits of keys"},
    {"bits-v", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, bits_v), "4", 1, 8, "BITS", "code bits of values"},
    {"window", QKV_OPTION_DURATION, offsetof(qkv_bench_settings, pause), "3s", 10, 3600000, "TIME",
     "how long each of the four goes on"},
};

struct shared {
  _Atomic int mode;               // what the other one is to do
  _Atomic int doing;              // what it does
  _Atomic bool failed;            // it has said why
  _Atomic uint64_t steps[MODES];  // that it has done
};

typedef struct interference {
  const qkv_bench_settings *settings;
  qkv_client *client, *other;
  qkv_bench_traffic traffic;
  uint64_t appended, returned;  // steps that are done: of a layer of a chunk, of a layer
  struct shared *shared;        // with the other process
  pid_t process;                // that one
} interference;

// ---- The other sessions ----

static void name_other(const interference *all, uint64_t number, char *name, size_t bytes) {
  snprintf(name, bytes, NAME "-%llu", (unsigned long long)(number % (uint64_t)all->settings->sessions));
}

static uint64_t chunks(const interference *all) {
  return ((uint64_t)all->settings->tokens + QKV_BENCH_CHUNK_TOKENS - 1) / QKV_BENCH_CHUNK_TOKENS;
}

// Session by session, chunk by chunk, layer by layer; behind the last session the first one is begun anew.
static int append_step(interference *all) {
  char name[64];
  const uint64_t layers = (uint64_t)all->settings->rounds;
  const uint64_t layer = all->appended % layers, chunk = all->appended / layers % chunks(all);
  name_other(all, all->appended / layers / chunks(all), name, sizeof name);
  if (layer == 0 && chunk == 0 && qkv_bench_traffic_open(&all->traffic, all->other, name) != 0) return 1;
  all->appended++;
  return qkv_bench_traffic_append(&all->traffic, all->other, name, (int64_t)layer,
                                  (int64_t)chunk * QKV_BENCH_CHUNK_TOKENS);
}

// Session by session, the longest unused first, layer by layer.
static int return_step(interference *all, mode wanted) {
  char name[64];
  const uint64_t layers = (uint64_t)all->settings->rounds;
  const uint64_t begun = all->appended / layers / chunks(all) + 1;  // is still being appended to
  name_other(all, begun + all->returned / layers % (uint64_t)(all->settings->sessions - 1), name, sizeof name);
  const int64_t layer = (int64_t)(all->returned++ % layers);
  return wanted == RESTORING ? qkv_bench_traffic_prefetch(&all->traffic, all->other, name, layer)
                             : qkv_bench_traffic_attend(&all->traffic, all->other, name, layer);
}

// Of the other process: the sessions are appended to once before it waits for orders.
static int work(interference *all) {
  const uint64_t steps = (uint64_t)all->settings->sessions * chunks(all) * (uint64_t)all->settings->rounds;
  if (qkv_bench_traffic_register(&all->traffic, all->other) != 0) return 1;
  for (uint64_t i = 0; i < steps; i++) {
    if (append_step(all) != 0) return 1;
  }
  const struct timespec pause = {.tv_nsec = 2 * 1000 * 1000};
  for (;;) {
    const mode wanted = (mode)atomic_load(&all->shared->mode);
    atomic_store(&all->shared->doing, wanted);
    if (wanted == ENDING) return 0;
    int status = 0;
    if (wanted == QUIET) (void)nanosleep(&pause, NULL);
    if (wanted == SPILLING) status = append_step(all);
    if (wanted == RESTORING || wanted == ATTENDING) status = return_step(all, wanted);
    if (status == 0) {
      atomic_fetch_add(&all->shared->steps[wanted], 1);
      continue;
    }
    return 1;
  }
}

static int run_other(interference *all) {
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  all->other = qkv_bench_connect(all->settings, all->settings->program.target);
  const int status = all->other == NULL ? 1 : work(all);
  if (status != 0) atomic_store(&all->shared->failed, true);
  qkv_client_close(&all->other);
  return status;
}

// Whether the other process is still of use: it has not failed, and nobody has killed it.
static bool other_works(const interference *all) {
  siginfo_t ended = {0};
  return !atomic_load(&all->shared->failed) &&
         (waitid(P_PID, (id_t)all->process, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid == 0);
}

// Waits until the other connection does it.
static void change(interference *all, mode wanted) {
  const struct timespec pause = {.tv_nsec = 1000 * 1000};
  atomic_store(&all->shared->mode, wanted);
  while (atomic_load(&all->shared->doing) != (int)wanted && other_works(all)) (void)nanosleep(&pause, NULL);
}

// ---- The attended session ----

static int window(interference *all, mode which, qkv_samples *samples) {
  change(all, which);
  const double until = qkv_bench_now() + (double)all->settings->pause * 1e-3;
  for (int64_t i = 0; qkv_bench_now() < until; i++) {
    const double begin = qkv_bench_now();
    if (qkv_bench_traffic_attend(&all->traffic, all->client, NAME, i % all->settings->rounds) != 0) return 1;
    if (!other_works(all))
      return atomic_load(&all->shared->failed) ? 1 : qkv_program_failed("the other process is gone");
    qkv_samples_add(samples, (qkv_bench_now() - begin) * 1e3);
  }
  return 0;
}

static int prepare(interference *all) {
  const qkv_bench_traffic *traffic = &all->traffic;
  if (qkv_bench_traffic_register(traffic, all->client) != 0) return 1;
  if (qkv_bench_traffic_open(traffic, all->client, NAME) != 0) return 1;
  for (int64_t position = 0; position < all->settings->tokens; position += QKV_BENCH_CHUNK_TOKENS) {
    for (int64_t layer = 0; layer < all->settings->rounds; layer++) {
      if (qkv_bench_traffic_append(traffic, all->client, NAME, layer, position) != 0) return 1;
    }
  }
  return 0;
}

static double done_gbps(const interference *all, mode which, int64_t tokens) {
  const qkv_bench_settings *settings = all->settings;
  const double row = (double)(settings->kv_heads * settings->dim) * 2 * 2;  // bytes of a token, K and V, fp16
  const double busy_s = (double)(settings->repeats * settings->pause) * 1e-3;
  return (double)atomic_load(&all->shared->steps[which]) * (double)tokens * row * 1e-9 / busy_s;
}

static void report(const interference *all, qkv_samples *samples) {
  static const char *const names[MODES] = {"quiet", "spilling", "restoring", "attending"};
  json_t *line = json_pack("{s:s, s:i}", "bench", "interference", "attends", (int)samples[QUIET].count);
  const double quiet = qkv_samples_quantile(&samples[QUIET], 0.99);
  for (int i = 0; i < MODES; i++) {
    char key[64];
    const double p99 = qkv_samples_quantile(&samples[i], 0.99);
    snprintf(key, sizeof key, "%s_p50_ms", names[i]);
    json_object_set_new(line, key, json_real(qkv_samples_quantile(&samples[i], 0.5)));
    snprintf(key, sizeof key, "%s_p99_ms", names[i]);
    json_object_set_new(line, key, json_real(p99));
    if (i == QUIET) continue;
    snprintf(key, sizeof key, "%s_slower", names[i]);
    json_object_set_new(line, key, json_real(p99 / quiet));
    snprintf(key, sizeof key, "%s_fp16_gbps", names[i]);
    const int64_t tokens = i == SPILLING ? QKV_BENCH_CHUNK_TOKENS : all->settings->tokens;
    json_object_set_new(line, key, json_real(done_gbps(all, (mode)i, tokens)));
  }
  qkv_bench_report(all->settings, line);
}

static int measure(interference *all) {
  qkv_samples samples[MODES] = {0};
  int status = prepare(all);
  // Until the others are there the session is used, so that it stays.
  while (status == 0 && atomic_load(&all->shared->doing) != QUIET && other_works(all)) {
    for (int64_t i = 0; i < all->settings->rounds && status == 0; i++)
      status = qkv_bench_traffic_attend(&all->traffic, all->client, NAME, i);
  }
  for (int64_t i = 0; i < all->settings->repeats && status == 0; i++) {
    for (int which = 0; which < MODES && status == 0; which++) status = window(all, (mode)which, &samples[which]);
  }
  change(all, ENDING);
  if (status == 0) report(all, samples);
  for (int i = 0; i < MODES; i++) qkv_samples_free(&samples[i]);
  char name[64];
  for (int64_t i = 0; i < all->settings->sessions; i++) {
    name_other(all, (uint64_t)i, name, sizeof name);
    qkv_client_close_session(all->client, name, NULL, &(qkv_call_error){0});
  }
  qkv_client_close_session(all->client, NAME, NULL, &(qkv_call_error){0});
  return status == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkv_bench_settings *settings = values;
  if (settings->program.target == NULL) return qkv_program_misused("--target is missing: a qkvd with a --data-dir");
  interference all = {.settings = settings};
  all.shared = mmap(NULL, sizeof *all.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (all.shared == MAP_FAILED) abort();
  atomic_init(&all.shared->doing, MODES);  // nothing yet
  qkv_bench_traffic_init(&all.traffic, settings, NAME);
  fflush(NULL);
  all.process = fork();  // before there is a connection: gRPC's threads would not come along
  if (all.process < 0) return qkv_program_failed("fork: %s", strerror(errno));
  if (all.process == 0) _exit(run_other(&all));
  all.client = qkv_bench_connect(settings, settings->program.target);
  const int status = all.client == NULL ? QKV_EXIT_FAILED : measure(&all);
  if (all.client == NULL) atomic_store(&all.shared->mode, ENDING);
  (void)waitpid(all.process, NULL, 0);
  qkv_client_close(&all.client);
  qkv_bench_traffic_deinit(&all.traffic);
  (void)munmap(all.shared, sizeof *all.shared);
  return status;
}

const qkv_command qkvi_bench_interference = {
    .name = "interference",
    .arguments = "",
    .summary = "attends in memory while sessions go to the SSD and come back",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .run = run,
};
