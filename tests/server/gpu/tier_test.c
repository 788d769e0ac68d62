// The GPU tier in this process, with the fake driver, whose kernels the emulator runs: each attend has the bits that
// it has without a GPU, whatever becomes of sessions, of pages and of the driver meanwhile. Runs under
// ThreadSanitizer.
//
//   test_server_gpu_tier OPERATIONS [SEED]    random operations alone, more of them than usual
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "engine/cache/calibration_slot.h"
#include "engine/cache/session_retier.h"
#include "engine/cache/session_spill.h"
#include "engine/kernel/kernel.h"
#include "server/gpu/gpus.h"
#include "server/residency/internal.h"
#include "server/residency/restore.h"
#include "storage/gpu/driver.h"
#include "tests/engine/cache/fixture.h"
#include "tests/server/gpu/worker.h"
#include "tests/storage/gpu/fake_cuda.h"

#ifdef QKV_SANITIZED
enum { OPERATIONS = 500, ROUNDS = 8 };
#else
enum { OPERATIONS = 10000, ROUNDS = 100 };
#endif
enum {
  FAULTS = 30,
  SESSIONS = 48,
  TOKENS = 4096,
  DIM = 64,
  Q_HEADS = 2,
  PIECE = 400,
  READERS = 2,
  GPUS = 2,
  NAME_BYTES = 32,
  CALIBRATED_PART = 4
};

static fake_cuda_fail_function *fake_fail;
static fake_cuda_fail_on_function *fake_fail_on;
static fake_cuda_read_function *fake_read;
static uint64_t operations = OPERATIONS, first_seed = 1;
static _Atomic uint64_t gpu_quota;  // bytes; 0: none

typedef struct world {
  char directory[64], kernels[80];
  qkv_model model;
  const qkv_calibration *calibration;  // NULL: all is data-free
  qkv_calibration_slot *slot;          // the store's
  sequence rows;
  qkv_server_options values;
  qkv_options *options;
  qkv_metric_value metrics[QKV_METRIC_COUNT];
  qkvi_gpus *gpus;  // two
  qkv_store *store;
  qkvi_residency *residency;
  qkv_session *sessions[SESSIONS];  // NULL: closed
  uint64_t area_bytes;
  worker worker;
  qkvi_gpu_lent *lent[GPUS];   // its memory; NULL: not opened
  size_t coded[2], lent_rows;  // pages from there that GPUs have coded, and the CPU; appends
  uint64_t opened;
  uint64_t seed;
} world;

static int64_t count_of(const world *w, qkv_metric_id metric) {
  return qkv_metric_read(&w->metrics[metric]);
}

// ---- The tenant's quota ----

static void read_limits(void *unused, const char *tenant, qkv_account_limits *limits) {
  (void)unused;
  (void)tenant;
  limits->gpu_bytes = gpu_quota;
}

static void set_quota(const world *w, uint64_t bytes) {
  gpu_quota = bytes;
  qkv_accounts_refresh(qkv_store_accounts(w->store));
}

// ---- Life ----

static void start_gpus(world *w, uint64_t memory_bytes, int64_t half_life_ms) {
  qkv_error error = {0};
  const qkvi_gpu_config config = {.memory_bytes = memory_bytes,
                                  .kernels = w->kernels,
                                  .admit_attends = 1,
                                  .half_life_ms = half_life_ms,
                                  .retry_ms = 2,
                                  .area_bytes = w->area_bytes,
                                  .metrics = w->metrics};
  const char *names[] = {"0", "GPU-b0b1b2b3-b4b5-b6b7-b8b9-babbbcbdbebf"};
  if (qkvi_gpus_create(&config, &(qkv_option_list){names, GPUS}, &w->gpus, &error) != QKV_OK)
    fail_msg("%s", error.text);
  assert_int_equal(qkvi_gpus_count(w->gpus), GPUS);
}

static qkvi_gpu_stats read_gpu(const world *w, size_t i) {
  return qkvi_gpu_read(qkvi_gpus_at(w->gpus, i));
}

static uint64_t ranges_of(const world *w) {
  return read_gpu(w, 0).ranges + read_gpu(w, 1).ranges;
}

// Coordinates of very different sizes, so that a calibration gives them 0 to 8 bits.
static void spread_rows(sequence *rows) {
  const size_t width = rows->model->key_dim;
  for (size_t i = 0; i < rows->tokens * width; i++) {
    rows->k[i] *= expf(1 - 3 * (float)(i % width) / (float)width);
    rows->v[i] *= expf(1 - 4 * (float)(i % width) / (float)width);
  }
}

static const qkv_calibration *calibration_of(const world *w) {
  const qkv_calibration_shape shape = qkv_model_calibration_shape(&w->model);
  qkv_moments *moments = qkv_moments_create(&shape);
  qkv_calibration *calibration = NULL;
  qkv_moments_add(moments, 0, 0, TOKENS, w->rows.k, w->rows.v, false);
  assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &calibration, NULL), QKV_OK);
  qkv_moments_destroy(&moments);
  return calibration;
}

// Codes new pages with the world's calibration, or without it.
static void calibrate(const world *w, bool on) {
  qkv_calibration_slot_set(w->slot, on ? w->calibration : NULL);
}

static void setup(world *w, bool calibrated, uint64_t memory_bytes, uint64_t area_bytes, int64_t half_life_ms,
                  uint64_t seed) {
  qkv_error error = {0};
  const qkv_model *registered;
  *w = (world){.seed = seed, .area_bytes = area_bytes};
  snprintf(w->directory, sizeof w->directory, "gpu-tier-%d", (int)getpid());
  snprintf(w->kernels, sizeof w->kernels, "%s.kernels", w->directory);
  FILE *file = fopen(w->kernels, "w");
  assert_non_null(file);
  fputs("the fake driver has its own", file);
  fclose(file);
  const char *arguments[] = {
      "qkvd", "--data-dir",      w->directory, "--storage-io",    "pread", "--storage-compact-rate",
      "0",    "--memory-budget", "64MiB",      "--recent-window", "0"};
  if (qkv_server_options_read(sizeof arguments / sizeof *arguments, (char **)(uintptr_t)arguments, &w->values,
                              &w->options, &error) != QKV_OK)
    fail_msg("%s", error.text);
  w->model = test_model(1, Q_HEADS, DIM, DIM, QKV_FP32);
  w->model.layers = 1;
  if (calibrated) w->model.rope = (qkv_rope){.theta = 10000};
  if (qkv_model_resolve(&w->model, &error) != QKV_OK) fail_msg("%s", error.text);
  w->rows = make_sequence(&w->model, TOKENS, seed);
  if (calibrated) {
    spread_rows(&w->rows);
    w->calibration = calibration_of(w);
  }
  start_gpus(w, memory_bytes, half_life_ms);
  w->store = qkv_store_create(&(qkv_store_config){.memory_budget = (uint64_t)w->values.memory_budget,
                                                  .models_max = 1,
                                                  .sessions_max = 2 * SESSIONS,
                                                  .policy = qkv_server_options_policy(&w->values),
                                                  .limits = read_limits,
                                                  .choose_device = qkvi_gpus_choose,
                                                  .devices = w->gpus});
  if (qkvi_residency_create(&w->values, w->store, NULL, w->metrics, &w->residency, &error) != QKV_OK)
    fail_msg("%s", error.text);
  if (qkv_store_register_model(w->store, &w->model, &registered, &error) != QKV_OK) fail_msg("%s", error.text);
  w->worker = worker_start(2 * PIECE * DIM * sizeof(float));
  w->slot = registered->calibration;
  calibrate(w, calibrated);
}

static void close_session(world *w, qkv_session **session) {
  uint64_t freed;
  qkv_error error = {0};
  assert_int_equal(qkv_store_close_session(w->store, *session, &freed, NULL), QKV_OK);
  if (qkvi_catalogue_closed(w->residency, *session, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_session_unref(session);
}

static void teardown(world *w) {
  char command[256];
  set_quota(w, 0);
  for (size_t i = 0; i < SESSIONS; i++) {
    if (w->sessions[i] != NULL) close_session(w, &w->sessions[i]);
  }
  qkvi_residency_finish(w->residency, 60000);
  qkvi_residency_destroy(&w->residency);
  qkv_store_destroy(&w->store);
  assert_int_equal(ranges_of(w), 0);
  for (size_t i = 0; i < GPUS; i++) qkvi_gpu_give_back(&w->lent[i]);
  worker_end(&w->worker);
  qkvi_gpus_destroy(&w->gpus);
  fake_fail("", 1, 0);
  const fake_cuda_state left = fake_read();
  assert_int_equal(left.memory_blocks + left.host_blocks + left.streams + left.events + left.modules, 0);
  qkv_calibration_unref(&w->calibration);
  qkv_options_destroy(&w->options);
  free_sequence(&w->rows);
  snprintf(command, sizeof command, "rm -r %s %s", w->directory, w->kernels);
  assert_int_equal(system(command), 0);  // NOLINT(cert-env33-c)
}

// ---- Sessions ----

static const char *next_name(world *w, char name[NAME_BYTES]) {
  snprintf(name, NAME_BYTES, "s%llu", (unsigned long long)++w->opened);
  return name;
}

static qkv_session *open_session(world *w) {
  qkv_error error = {0};
  qkv_session *session = NULL;
  char name[NAME_BYTES];
  qkv_session_config config = {.tenant = "default",
                               .name = next_name(w, name),
                               .purpose = QKV_PURPOSE_ATTEND,
                               .policy = {.recent_window = 0, .bits_k = 4, .bits_v = 4},
                               .ema = {.alpha = 0.9, .sample_every = 0},
                               .durability = QKV_DURABILITY_ASYNC};
  qkv_status status = qkvi_catalogue_enlist(w->residency, &config, &error);
  if (status == QKV_OK) status = qkv_store_open(w->store, &config, "tiny", &session, &error);
  if (status == QKV_OK) status = qkvi_catalogue_opened(w->residency, session, &error);
  if (status != QKV_OK) fail_msg("%s", error.text);
  return session;
}

static qkv_session *fork_session(world *w, qkv_session *parent) {
  qkv_error error = {0};
  qkv_session *child = NULL;
  qkvi_catalogue_fork fork;
  const uint64_t position = qkv_session_length(parent);
  qkv_session_config config = *qkv_session_config_of(parent);
  char name[NAME_BYTES];
  config.name = next_name(w, name);
  config.parent_truncations = qkv_session_truncations(parent);
  qkv_status status = qkvi_catalogue_enlist(w->residency, &config, &error);
  if (status == QKV_OK) status = qkvi_catalogue_fork_begin(w->residency, parent, &config, &position, &fork, &error);
  if (status == QKV_OK) {
    status = qkv_store_fork(w->store, parent, &config, &position, &child, &error);
    const qkv_status written = qkvi_catalogue_fork_done(&fork, status == QKV_OK ? child : NULL, &error);
    if (status == QKV_OK) status = written;
  }
  if (status != QKV_OK) fail_msg("%s", error.text);
  return child;
}

// The worker's memory on one of the GPUs; NULL: that does not open it now.
static qkvi_gpu_lent *lent_on(world *w, size_t gpu) {
  qkv_error error = {0};
  qkvi_gpu_lent **lent = &w->lent[gpu];
  if (*lent != NULL && !qkvi_gpu_lent_lives(*lent)) qkvi_gpu_give_back(lent);
  if (*lent == NULL) (void)worker_lend(&w->worker, qkvi_gpus_at(w->gpus, gpu), (int64_t)gpu, lent, &error);
  return *lent;
}

// The rows come from the worker's memory, if that can be reached; else they stay as they are.
static bool take(world *w, row_pair *pair, qkvi_gpu_area **area, qkvi_gpu_source *source) {
  qkvi_gpu_lent *lent = lent_on(w, random_below(&w->seed, GPUS));
  if (lent == NULL) return false;
  row_pair copy = {pair->k, pair->v};
  uint8_t *k = malloc(pair->k.segment.length), *v = malloc(pair->v.segment.length);
  assert_true(k != NULL && v != NULL);
  copy.k.segment.data = k;
  copy.v.segment.data = v;
  worker_put(&w->worker, 0, &pair->k.segment, &pair->v.segment);
  *area = random_below(&w->seed, 8) == 0 ? NULL : qkvi_gpu_area_take(lent);
  const bool taken = worker_take(&w->worker, lent, 0, &copy.k, &copy.v, *area, source, NULL) == QKV_OK;
  if (taken) assert_memory_equal(k, pair->k.segment.data, pair->k.segment.length);
  if (taken) assert_memory_equal(v, pair->v.segment.data, pair->v.segment.length);
  free(k);
  free(v);
  return taken;
}

// Rows that no other session has at these positions, half of them from a worker's memory. A page that is needed for
// it may be cold: then it is refused.
static void append(world *w, qkv_session *session, uint64_t tokens) {
  uint64_t appended, length;
  qkv_error error = {0};
  row_pair pair;
  qkvi_gpu_area *area = NULL;
  qkvi_gpu_source source;
  const uint64_t from = random_below(&w->seed, TOKENS - tokens);
  make_pair(&pair, &w->rows, from, from + tokens, QKV_FP32);
  const uint64_t position = qkv_session_length(session);
  const bool lent = random_below(&w->seed, 2) == 0 && take(w, &pair, &area, &source);
  checked_encoder checked;
  if (lent) checked = check_encoder(&source, &w->coded[0], &w->coded[1]);
  qkv_append_use use = {.encoder = lent ? &checked.encoder : NULL};
  const qkv_status status = qkv_session_append_in(session, 0, &use, position, &pair.k.tensor, &pair.v.tensor, false,
                                                  &appended, &length, &error);
  if (status != QKV_OK && status != QKV_UNAVAILABLE) fail_msg("%s", error.text);
  w->lent_rows += lent;
  qkvi_gpu_area_return(&area);
  free_pair(&pair);
}

// ---- Attends ----

typedef struct result {
  float out[3 * Q_HEADS * DIM], lse[3 * Q_HEADS];
} result;

static void attend_layer(const qkv_layer *layer, const qkv_attend *request, bool on_gpu, result *got) {
  static const qkv_device *const none = NULL;
  qkv_layer *other = malloc(sizeof *other);
  memcpy((void *)other, (const void *)layer, sizeof *other);
  if (!on_gpu) memcpy((void *)&other->config.device, (const void *)&none, sizeof none);
  qkv_attend own = *request;
  memset(got, 0xff, sizeof *got);
  own.layer = other;
  own.out = got->out;
  own.lse = got->lse;
  qkv_attend_run(NULL, &own, 1);
  free(other);
}

static void check_attend(const qkv_layer *layer, uint64_t *seed) {
  qkv_error error = {0};
  test_tensor q;
  static _Thread_local result gpu, cpu;
  const uint64_t queries = 1 + random_below(seed, 3);
  float *values = random_floats(random_next(seed), queries * Q_HEADS * DIM);
  make_tensor(&q, QKV_FP32, values, (int64_t)queries, Q_HEADS, DIM);
  qkv_attend request = {.layer = layer, .q = q.tensor, .position = layer->length};
  if (random_below(seed, 4) == 0) request.options.sliding_window = 1 + random_below(seed, layer->length);
  if (random_below(seed, 4) == 0) request.position = random_below(seed, layer->length);
  if (qkv_attend_check(&request, &error) != QKV_OK) fail_msg("%s", error.text);
  attend_layer(layer, &request, true, &gpu);
  attend_layer(layer, &request, false, &cpu);
  const size_t rows = queries * Q_HEADS;
  if (memcmp(gpu.out, cpu.out, rows * DIM * sizeof(float)) != 0 ||
      memcmp(gpu.lse, cpu.lse, rows * sizeof(float)) != 0)
    fail_msg("an attend has other bits with the GPU");
  free(values);
  free_tensor(&q);
}

// Cold pages come back first, as for a request.
static void attend(const world *w, qkv_session *session, uint64_t *seed) {
  const qkv_layer *layer;
  const qkvi_wanted wanted = {.session = session};
  qkv_error error = {0};
  if (qkvi_restore(w->residency, &wanted, NULL, &error) != QKV_OK) fail_msg("%s", error.text);
  if (qkv_session_read(session, 0, &layer, NULL) == QKV_OK) {
    if (layer->length > 0 && qkv_layer_holds(layer, 0, layer->length)) check_attend(layer, seed);
    qkv_session_read_done(session, 0);
  }
  qkvi_budget_release(w->residency, session, 0);
}

// ---- Random operations ----

static void demote(qkv_session *session, uint64_t *seed) {
  qkv_retier_report report = {0};
  const qkv_retier_scope all = {0};
  const qkv_status status = qkv_session_demote(session, &all, 1 + (double)random_below(seed, 3), true, &report, NULL);
  assert_true(status == QKV_OK || status == QKV_UNAVAILABLE);
}

static void change(world *w, size_t at) {
  qkv_session **session = &w->sessions[at];
  if (*session == NULL) {
    const qkv_session *parent = w->sessions[random_below(&w->seed, SESSIONS)];
    *session =
        parent != NULL && random_below(&w->seed, 4) > 0 ? fork_session(w, (qkv_session *)parent) : open_session(w);
    return append(w, *session, 1 + random_below(&w->seed, PIECE));
  }
  const uint64_t dice = random_below(&w->seed, 12), length = qkv_session_length(*session);
  if (dice < 5) return append(w, *session, 1 + random_below(&w->seed, PIECE));
  if (dice < 7) return demote(*session, &w->seed);
  if (dice < 9) return (void)qkv_session_evict(*session, UINT64_MAX, true);
  if (dice < 10) return (void)qkv_session_truncate(*session, random_below(&w->seed, length + 1), NULL, 0, NULL);
  close_session(w, session);
}

// The nth call of some function of the driver fails: for good, or for want of memory.
static void break_something(uint64_t *seed) {
  static const char *const functions[] = {"cuMemcpyHtoDAsync", "cuLaunchKernel",    "cuEventRecord",
                                          "cuEventQuery",      "cuCtxSetCurrent",   "cuMemAlloc",
                                          "cuMemHostAlloc",    "cuModuleLoadData",  "cuMemcpyDtoDAsync",
                                          "cuMemcpyDtoHAsync", "cuIpcOpenMemHandle"};
  const char *function = functions[random_below(seed, sizeof functions / sizeof *functions)];
  fake_fail(function, 1 + (unsigned)random_below(seed, 20),
            random_below(seed, 3) == 0 ? QKV_CUDA_OUT_OF_MEMORY : 719);
}

// Some of the memory of each GPU is for areas.
static void operate(bool calibrated, uint64_t count, uint64_t memory_bytes, uint64_t area_bytes) {
  world w;
  setup(&w, calibrated, memory_bytes, area_bytes, 1, first_seed);
  for (uint64_t i = 0; i < count; i++) {
    if (calibrated && random_below(&w.seed, 100) == 0) calibrate(&w, random_below(&w.seed, 3) > 0);
    const size_t at = random_below(&w.seed, SESSIONS);
    if (random_below(&w.seed, count / FAULTS + 1) == 0) break_something(&w.seed);
    if (random_below(&w.seed, count / FAULTS + 1) == 0) set_quota(&w, random_below(&w.seed, 3) << 18);
    if (w.sessions[at] != NULL && qkv_session_length(w.sessions[at]) > 1500) close_session(&w, &w.sessions[at]);
    if (w.sessions[at] == NULL || random_below(&w.seed, 6) == 0) {
      change(&w, at);
    } else {
      attend(&w, w.sessions[at], &w.seed);
    }
  }
  print_message("%zu appends from a worker, %zu pages of them by the GPU, %zu not\n", w.lent_rows, w.coded[0],
                w.coded[1]);
  print_message("%lld hits, %lld calls, %lld uploads, %lld evictions, %lld failures, %lld pages restored\n",
                (long long)count_of(&w, QKV_METRIC_GPU_HITS), (long long)count_of(&w, QKV_METRIC_GPU_CALLS),
                (long long)count_of(&w, QKV_METRIC_GPU_UPLOADS), (long long)count_of(&w, QKV_METRIC_GPU_EVICTIONS),
                (long long)count_of(&w, QKV_METRIC_GPU_FAILURES), (long long)count_of(&w, QKV_METRIC_RESTORED_PAGES));
  assert_true(count_of(&w, QKV_METRIC_GPU_CALLS) > 0);
  if (count >= 2000) {  // of fewer, on a busy machine, hardly any may meet a resident range
    assert_true(count_of(&w, QKV_METRIC_GPU_CALLS) > (int64_t)count / 20);
    assert_true(count_of(&w, QKV_METRIC_GPU_UPLOADS) > (int64_t)count / 50);
    assert_true(count_of(&w, QKV_METRIC_GPU_FAILURES) > 0);
    assert_true(count_of(&w, QKV_METRIC_RESTORED_PAGES) > 0);
    assert_true(w.coded[0] > w.coded[1]);
    assert_int_equal(count_of(&w, QKV_METRIC_GPU_APPEND_TOKENS), 64 * w.coded[0]);
    assert_int_equal(count_of(&w, QKV_METRIC_GPU_APPEND_HOST_TOKENS), 64 * w.coded[1]);
  }
  teardown(&w);
}

static void random_operations(void **unused) {
  (void)unused;
  operate(false, operations, 3 << 20, 1100 << 10);
}

// Pages of a calibrated code, and some that are not.
static void random_operations_calibrated(void **unused) {
  (void)unused;
  operate(true, operations / CALIBRATED_PART, 4 << 20, 896 << 10);
}

// ---- One change at a time ----

static void wait_for_ranges(const world *w, qkv_session *session, uint64_t *seed, uint64_t ranges) {
  for (int i = 0; i < 10000 && ranges_of(w) < ranges; i++) {
    attend(w, session, seed);
    usleep(1000);
  }
  assert_int_equal(ranges_of(w), ranges);
}

// A range that nothing is appended to, of three pages: the fork's, too, until that is closed.
static qkv_session *inner_range(world *w, qkv_session **fork) {
  qkv_session *session = open_session(w);
  append(w, session, 192);
  // Pages that are shared before they have records are copied for these: then the range is not shared, and grows.
  for (int i = 0; i < 10000 && !qkv_session_settle(session); i++) usleep(1000);
  assert_true(qkv_session_settle(session));
  *fork = fork_session(w, session);
  append(w, session, 64);
  return session;
}

static void check_residency(bool calibrated) {
  world w;
  qkv_session *fork;
  setup(&w, calibrated, 4 << 20, 0, 1, first_seed + 2);
  uint64_t seed = w.seed;
  qkv_session *session = inner_range(&w, &fork);
  wait_for_ranges(&w, session, &seed, 1);
  const int64_t uploads = count_of(&w, QKV_METRIC_GPU_UPLOADS), hits = count_of(&w, QKV_METRIC_GPU_HITS);
  for (int i = 0; i < 10; i++) attend(&w, session, &seed);  // of which some see little
  attend(&w, fork, &seed);                                  // which has the same range
  assert_int_equal(count_of(&w, QKV_METRIC_GPU_UPLOADS), uploads);
  assert_true(count_of(&w, QKV_METRIC_GPU_HITS) >= hits + 5);
  close_session(&w, &fork);
  // Other images at the same places of the same range, with nothing that would forget it.
  assert_int_equal(qkv_session_truncate(session, 64, NULL, 0, NULL), QKV_OK);
  append(&w, session, 130);
  for (int i = 0; i < 3; i++) attend(&w, session, &seed);
  close_session(&w, &session);
  assert_int_equal(ranges_of(&w), 0);
  session = inner_range(&w, &fork);
  close_session(&w, &fork);
  wait_for_ranges(&w, session, &seed, 1);
  // Pages change, and leave, once they are durable.
  for (int i = 0; i < 10000 && ranges_of(&w) > 0; i++, usleep(1000)) demote(session, &seed);
  assert_int_equal(ranges_of(&w), 0);
  wait_for_ranges(&w, session, &seed, 1);
  for (int i = 0; i < 10000 && ranges_of(&w) > 0; i++, usleep(1000))
    (void)qkv_session_evict(session, UINT64_MAX, true);
  assert_int_equal(ranges_of(&w), 0);
  wait_for_ranges(&w, session, &seed, 1);
  close_session(&w, &session);
  teardown(&w);
}

static void a_range_is_resident_while_it_is_the_same(void **unused) {
  (void)unused;
  check_residency(false);
  check_residency(true);
}

// ---- Several GPUs ----

static int64_t calls_of(const world *w, size_t gpu) {
  return read_gpu(w, gpu).counts[QKV_METRIC_GPU_CALLS - QKV_METRIC_GPU_HITS];
}

// Attends the sessions until kernels of the GPU have run for them, or it has failed.
static void attend_on(world *w, qkv_session *const *sessions, size_t count, uint64_t *seed, size_t gpu) {
  const int64_t before = calls_of(w, gpu);
  for (int i = 0; i < 5000 && calls_of(w, gpu) == before && !read_gpu(w, gpu).down; i++, usleep(1000)) {
    for (size_t s = 0; s < count; s++) attend(w, sessions[s], seed);
  }
}

static void a_gpu_that_fails_leaves_the_other(void **unused) {
  (void)unused;
  world w;
  qkv_session *sessions[4], *forks[4];
  setup(&w, false, 16 << 20, 0, 1, first_seed + 3);
  uint64_t seed = w.seed;
  for (size_t i = 0; i < 4; i++) sessions[i] = inner_range(&w, &forks[i]);
  assert_int_equal(read_gpu(&w, 0).sessions, 4);  // two, and forks where their parents are
  assert_int_equal(read_gpu(&w, 1).sessions, 4);
  for (size_t g = 0; g < GPUS; g++) {
    attend_on(&w, sessions, 4, &seed, g);
    assert_true(calls_of(&w, g) > 0);
  }
  // The one is made to fail again as soon as it is back.
  for (int i = 0; i < 3; i++) {
    fake_fail_on(0, "cuEventRecord", 1, 719);
    attend_on(&w, sessions, 4, &seed, 0);
    const int64_t before = calls_of(&w, 1);
    attend_on(&w, sessions, 4, &seed, 1);
    assert_true(calls_of(&w, 1) > before);
    for (int n = 0; n < 5000 && read_gpu(&w, 0).down; n++) usleep(1000);
  }
  const qkvi_gpu_stats failed = read_gpu(&w, 0), other = read_gpu(&w, 1);
  assert_int_equal(failed.counts[QKV_METRIC_GPU_FAILURES - QKV_METRIC_GPU_HITS], 3);
  assert_int_equal(other.counts[QKV_METRIC_GPU_FAILURES - QKV_METRIC_GPU_HITS], 0);
  assert_string_equal(other.name, "fake 1");
  const int64_t before = calls_of(&w, 0);
  attend_on(&w, sessions, 4, &seed, 0);
  assert_true(calls_of(&w, 0) > before);
  for (size_t i = 0; i < 4; i++) {
    close_session(&w, &forks[i]);
    close_session(&w, &sessions[i]);
  }
  assert_int_equal(read_gpu(&w, 0).sessions + read_gpu(&w, 1).sessions, 0);
  teardown(&w);
}

static void names_are_checked(void **unused) {
  (void)unused;
#define NOT_A_NAME(text)   \
  "--gpu-devices: \"" text \
  "\" is neither a number, nor `all`, nor a UUID as nvidia-smi -L shows it (GPU-... or MIG-...)"
  static const struct {
    const char *names[2];
    size_t count;
    const char *error;
  } cases[] = {
      {{"0", "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"},
       2,
       "--gpu-devices: 0 and GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf are the same GPU"},
      {{"7", "7"}, 2, "--gpu-devices: 7 and 7 are the same GPU"},
      {{"1", "all"}, 2, "--gpu-devices has `all` and other names"},
      {{""}, 1, "--gpu-devices: a name has 0 bytes, allowed are 1 to 63"},
      {{"GPU0"}, 1, NOT_A_NAME("GPU0")},
      {{"-1"}, 1, NOT_A_NAME("-1")},
      {{"01"}, 1, NOT_A_NAME("01")},
      {{"1", "All"}, 2, NOT_A_NAME("All")},
      {{"GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaea"}, 1, NOT_A_NAME("GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaea")},
      {{"MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeag"}, 1, NOT_A_NAME("MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeag")},
      {{"MIG-a0a1a2a3a4a5-a6a7-a8a9-aaabacadaeaf00"}, 1, NOT_A_NAME("MIG-a0a1a2a3a4a5-a6a7-a8a9-aaabacadaeaf00")},
      {{NULL}, 0, "--gpu-devices has 0 names, allowed are 1 to 64"},
  };
  world w;
  setup(&w, false, 16 << 20, 0, 1, first_seed);
  const qkvi_gpu_config config = {
      .memory_bytes = 16 << 20, .kernels = w.kernels, .half_life_ms = 1, .metrics = w.metrics};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_error error = {0};
    qkvi_gpus *gpus = NULL;
    const qkv_option_list names = {(const char **)(uintptr_t)cases[i].names, cases[i].count};
    assert_int_equal(qkvi_gpus_create(&config, &names, &gpus, &error), QKV_INVALID_ARGUMENT);
    assert_null(gpus);
    assert_string_equal(error.text, cases[i].error);
  }
  const char *all[] = {"all"};
  qkvi_gpus *gpus = NULL;
  assert_int_equal(qkvi_gpus_create(&config, &(qkv_option_list){all, 1}, &gpus, NULL), QKV_OK);
  assert_int_equal(qkvi_gpus_count(gpus), 2);
  qkvi_gpus_destroy(&gpus);
  teardown(&w);
}

// ---- Threads ----

typedef struct reader {
  const world *w;
  qkv_session *session;
  uint64_t seed;
  _Atomic bool stop;
  pthread_t thread;
} reader;

static void *read_on(void *context) {
  reader *on = context;
  while (!atomic_load(&on->stop)) attend(on->w, on->session, &on->seed);
  return NULL;
}

// Attends on some threads while the sessions change.
static void change_meanwhile(bool calibrated, uint64_t memory_bytes) {
  world w;
  reader readers[READERS];
  setup(&w, calibrated, memory_bytes, 0, 1, first_seed + 1);
  for (size_t i = 0; i < READERS; i++) {
    w.sessions[i] = i == 0 ? open_session(&w) : fork_session(&w, w.sessions[0]);
    append(&w, w.sessions[i], 200);
  }
  for (size_t i = 0; i < READERS; i++) {
    readers[i] = (reader){.w = &w, .session = w.sessions[i], .seed = i};
    atomic_init(&readers[i].stop, false);
    assert_int_equal(pthread_create(&readers[i].thread, NULL, read_on, &readers[i]), 0);
  }
  // Until the GPU has attended, too, for which ranges must stay the same for a while.
  for (size_t i = 0; i < ROUNDS || (i < 50 * ROUNDS && count_of(&w, QKV_METRIC_GPU_CALLS) == 0); i++) {
    qkv_session *session = w.sessions[random_below(&w.seed, READERS)];
    qkv_session *fork = fork_session(&w, session);
    if (random_below(&w.seed, 3) == 0) demote(session, &w.seed);
    if (random_below(&w.seed, 3) == 0) (void)qkv_session_evict(session, UINT64_MAX, false);
    if (random_below(&w.seed, 10) == 0) break_something(&w.seed);
    append(&w, session, 1 + random_below(&w.seed, 90));
    if (qkv_session_length(session) > 700) (void)qkv_session_truncate(session, 128, NULL, 0, NULL);
    append(&w, fork, 130);
    attend(&w, fork, &w.seed);
    close_session(&w, &fork);
  }
  for (size_t i = 0; i < READERS; i++) {
    atomic_store(&readers[i].stop, true);
    assert_int_equal(pthread_join(readers[i].thread, NULL), 0);
  }
  print_message("%lld calls, %lld failures\n", (long long)count_of(&w, QKV_METRIC_GPU_CALLS),
                (long long)count_of(&w, QKV_METRIC_GPU_FAILURES));
  assert_true(count_of(&w, QKV_METRIC_GPU_CALLS) > 0);
  teardown(&w);
}

static void changes_meanwhile(void **unused) {
  (void)unused;
  change_meanwhile(false, 560 << 10);
  change_meanwhile(true, 3 << 20);
}

static int load(void **unused) {
  (void)unused;
  void *library = dlopen(FAKE_CUDA, RTLD_NOW);
  if (library == NULL) return -1;
  *(void **)&fake_fail = dlsym(library, "fake_cuda_fail");
  *(void **)&fake_fail_on = dlsym(library, "fake_cuda_fail_on");
  *(void **)&fake_read = dlsym(library, "fake_cuda_read");
  return fake_fail != NULL && fake_fail_on != NULL && fake_read != NULL ? 0 : -1;
}

int main(int argc, char **argv) {
  if (argc > 1) operations = strtoull(argv[1], NULL, 10);
  if (argc > 2) first_seed = strtoull(argv[2], NULL, 10);
  qkv_log_setup(stderr, QKV_LOG_ERROR);
  qkv_kernels_setup(UINT32_MAX);
  const struct CMUnitTest random[] = {cmocka_unit_test(random_operations),
                                      cmocka_unit_test(random_operations_calibrated)};
  if (argc > 1) return cmocka_run_group_tests(random, load, NULL);
  const struct CMUnitTest tests[] = {cmocka_unit_test(a_range_is_resident_while_it_is_the_same),
                                     cmocka_unit_test(a_gpu_that_fails_leaves_the_other),
                                     cmocka_unit_test(names_are_checked),
                                     cmocka_unit_test(random_operations),
                                     cmocka_unit_test(random_operations_calibrated),
                                     cmocka_unit_test(changes_meanwhile)};
  return cmocka_run_group_tests(tests, load, NULL);
}
