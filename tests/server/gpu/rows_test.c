// Rows of layers to memory of the GPU, with the fake driver, whose kernels the emulator runs: the bytes that the
// engine's own rows have, whatever the pages' code, whether they are resident, and while the driver fails.
#include <dlfcn.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/cache/attend.h"
#include "engine/kernel/kernel.h"
#include "server/gpu/rows.h"
#include "tests/engine/cache/fixture.h"
#include "tests/storage/gpu/fake_cuda.h"

enum { HEADS = 2, DIM = 64, TOKENS = 1600, WINDOW = 40, SINKS = 4, CODERS = 5 };
#ifdef QKV_SANITIZED
enum { FETCHES = 2, FAULTS = 10 };
#else
enum { FETCHES = 25, FAULTS = 60 };
#endif

static fake_cuda_fail_function *fake_fail;
static fake_cuda_read_function *fake_read;
static qkv_cuda_driver cuda;

typedef struct world {
  char kernels[64];
  qkv_model model;
  qkv_arena *arena;
  qkv_coder *coders[CODERS];  // data-free, parts of bits, anchors, calibrated for attending, for archiving
  sequence rows;
  qkv_layer trunk, layer;  // the layer has the trunk's ranges
  qkv_metric_value metrics[QKV_METRIC_COUNT];
  qkvi_gpu *gpu;
  uint64_t seed;
} world;

static int64_t count_of(const world *w, qkv_metric_id metric) {
  return qkv_metric_read(&w->metrics[metric]);
}

// ---- Life ----

static void start_gpu(world *w) {
  qkv_error error = {0};
  (void)snprintf(w->kernels, sizeof w->kernels, "gpu-rows-%d.kernels", (int)getpid());
  FILE *file = fopen(w->kernels, "w");
  assert_non_null(file);
  fputs("the fake driver has its own", file);
  fclose(file);
  const qkvi_gpu_config config = {.memory_bytes = 32 << 20,
                                  .device = "0",
                                  .kernels = w->kernels,
                                  .admit_attends = 1,
                                  .half_life_ms = 1000,
                                  .retry_ms = 2,
                                  .metrics = w->metrics};
  if (qkvi_gpu_create(&config, &w->gpu, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_non_null(w->gpu);
}

static qkv_coder *make_coder(world *w, size_t i) {
  static const double bits[CODERS] = {4, 3.5, 3, 3, 3};
  naive_random random = {w->seed + i};
  const qkv_rope *rope = &w->model.rope;
  qkv_coder *coder = i < 3 ? test_coder(&w->model, test_policy(bits[i], bits[i], 0))
                           : coder_create_dense(&random, HEADS, DIM, DIM, bits[i], bits[i],
                                                i == 3 ? QKV_FRAME_ATTEND : QKV_FRAME_ARCHIVE, rope);
  if (i == 2) coder_own(coder)->anchors[QKV_K].kind = coder_own(coder)->anchors[QKV_V].kind = QKV_ANCHOR_CHAIN;
  coder_keep_outliers(coder, 0.3f, SINKS);
  coder->layer = TEST_LAYER;
  return coder;
}

static void append(world *w, qkv_layer *layer, size_t coder, uint64_t tokens) {
  qkv_error error = {0};
  row_pair pair;
  uint64_t appended;
  const uint64_t from = random_below(&w->seed, TOKENS - tokens);
  layer->coder = w->coders[coder];
  make_pair(&pair, &w->rows, from, from + tokens, w->model.dtype);
  if (qkv_layer_append(layer, layer->length, &pair.k.tensor, &pair.v.tensor, false, &appended, &error) != QKV_OK)
    fail_msg("%s", error.text);
  free_pair(&pair);
}

static void setup(world *w, uint64_t seed, bool turns) {
  qkv_error error = {0};
  *w = (world){.seed = seed, .model = test_model(HEADS, 1, DIM, DIM, QKV_BF16)};
  w->model.rope = (qkv_rope){.theta = turns ? 10000 : 0, .interleaved = seed % 2 == 1};
  assert_int_equal(qkv_model_resolve(&w->model, &error), QKV_OK);
  w->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 28);
  for (size_t i = 0; i < CODERS; i++) w->coders[i] = turns || i < 3 ? make_coder(w, i) : NULL;
  w->rows = make_sequence(&w->model, TOKENS, seed);
  start_gpu(w);
  qkv_layer_config config = test_layer_config(&w->model, test_policy(3, 3, WINDOW), 0, w->arena);
  config.device = qkvi_gpu_device(w->gpu);
  qkv_layer_init(&w->trunk, &config, w->coders[0]);
  append(w, &w->trunk, 0, 700);
  qkv_layer_init(&w->layer, &config, w->coders[0]);
  qkv_layer_fork(&w->layer, &w->trunk, UINT64_MAX);
  for (size_t i = 0; i < CODERS; i++) {
    if (w->coders[i] != NULL) append(w, &w->layer, i, 100 + random_below(&w->seed, 200));
  }
}

static void teardown(world *w) {
  qkv_layer_deinit(&w->layer);
  qkv_layer_deinit(&w->trunk);
  qkvi_gpu_destroy(&w->gpu);
  for (size_t i = 0; i < CODERS; i++) {
    if (w->coders[i] != NULL) coder_destroy(w->coders[i]);
  }
  qkv_arena_destroy(&w->arena);
  free_sequence(&w->rows);
  assert_int_equal(unlink(w->kernels), 0);
  const fake_cuda_state left = fake_read();
  assert_int_equal(left.memory_blocks + left.host_blocks + left.streams + left.events + left.modules, 0);
}

// ---- Memory of a worker ----

static void must(int result) {
  assert_int_equal(result, QKV_CUDA_SUCCESS);
}

static void enter_context(void) {
  qkv_cuda_context context;
  must(cuda.DevicePrimaryCtxRetain(&context, 0));
  must(cuda.CtxSetCurrent(context));
  must(cuda.DevicePrimaryCtxRelease(0));
}

static void copy_out(qkv_cuda_memory from, uint8_t *to, size_t bytes) {
  qkv_cuda_stream stream;
  qkv_cuda_event done;
  int result;
  must(cuda.StreamCreate(&stream, QKV_CUDA_STREAM_NON_BLOCKING));
  must(cuda.EventCreate(&done, QKV_CUDA_EVENT_UNTIMED));
  must(cuda.MemcpyDtoHAsync(to, from, bytes, stream));
  must(cuda.EventRecord(done, stream));
  while ((result = cuda.EventQuery(done)) == QKV_CUDA_NOT_READY) {
  }
  must(result);
  must(cuda.EventDestroy(done));
  must(cuda.StreamDestroy(stream));
}

// ---- Fetches ----

typedef struct asked {
  qkvi_gpu_rows rows;
  bool heads_first;
  size_t row_bytes, bytes;  // of a part
  qkv_cuda_memory at[2];
} asked;

static size_t place(const asked *a, uint64_t token, uint32_t head) {
  return a->heads_first ? (head * a->rows.tokens + token) * a->row_bytes : (token * HEADS + head) * a->row_bytes;
}

// `whole`: of all rows.
static asked ask(world *w, bool whole) {
  static const qkv_dtype dtypes[] = {QKV_FP32, QKV_FP16, QKV_BF16};
  asked a = {.rows = {.layer = &w->layer, .dtype = dtypes[random_below(&w->seed, 3)]}};
  a.rows.begin = whole || random_below(&w->seed, 3) == 0 ? 0 : random_below(&w->seed, w->layer.length);
  a.rows.tokens = whole || random_below(&w->seed, 3) == 0
                      ? w->layer.length - a.rows.begin
                      : 1 + random_below(&w->seed, w->layer.length - a.rows.begin);
  a.rows.before_rope = random_below(&w->seed, 3) == 0;
  a.heads_first = random_below(&w->seed, 3) == 0;
  a.row_bytes = DIM * qkv_dtype_size(a.rows.dtype);
  a.bytes = a.rows.tokens * HEADS * a.row_bytes;
  const uint64_t parts = 1 + random_below(&w->seed, 3);
  for (size_t part = 0; part < 2; part++) {
    if ((parts >> part & 1) == 0) continue;
    must(cuda.MemAlloc(&a.at[part], a.bytes));
    a.rows.to[part] = (qkvi_gpu_place){.at = a.at[part],
                                       .token_stride = a.heads_first ? a.row_bytes : HEADS * a.row_bytes,
                                       .head_stride = a.heads_first ? a.rows.tokens * a.row_bytes : a.row_bytes};
  }
  return a;
}

static void compare_part(const asked *a, qkv_part part) {
  float *floats = malloc(a->rows.tokens * HEADS * DIM * sizeof *floats);
  uint8_t *got = malloc(a->bytes), *row = malloc(a->row_bytes);
  qkv_layer_rows(a->rows.layer, part, a->rows.begin, a->rows.tokens, a->rows.before_rope, floats);
  copy_out(a->at[part], got, a->bytes);
  for (uint64_t t = 0; t < a->rows.tokens; t++) {
    for (uint32_t h = 0; h < HEADS; h++) {
      qkv_from_float(a->rows.dtype, floats + (t * HEADS + h) * DIM, row, DIM);
      if (memcmp(row, got + place(a, t, h), a->row_bytes) != 0)
        fail_msg("part %d, position %llu, head %u: other bytes", (int)part, (unsigned long long)(a->rows.begin + t),
                 h);
    }
  }
  free(floats);
  free(got);
  free(row);
}

static void end_fetch(const asked *a, bool compare) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (a->at[part] == 0) continue;
    if (compare) compare_part(a, part);
    must(cuda.MemFree(a->at[part]));
  }
}

static void fetch_some(world *w) {
  enter_context();
  for (size_t i = 0; i < FETCHES; i++) {
    qkv_error error = {0};
    const asked a = ask(w, i == 0);
    if (qkvi_gpu_fetch(w->gpu, &a.rows, &error) != QKV_OK) fail_msg("%s", error.text);
    end_fetch(&a, true);
  }
}

static void attend(world *w) {
  static float out[HEADS * DIM], lse[HEADS];
  qkv_error error = {0};
  test_tensor q;
  float *values = random_floats(1, HEADS * DIM);
  make_tensor(&q, QKV_FP32, values, 1, HEADS, DIM);
  qkv_attend request = {.layer = &w->layer, .q = q.tensor, .position = w->layer.length, .out = out, .lse = lse};
  if (qkv_attend_check(&request, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_attend_run(NULL, &request, 1);
  free_tensor(&q);
  free(values);
}

static void rows_have_the_same_bytes(void **unused) {
  (void)unused;
  for (uint64_t seed = 1; seed <= 4; seed++) {
    world w;
    setup(&w, seed, seed % 4 != 0);
    fetch_some(&w);
    assert_true(count_of(&w, QKV_METRIC_GPU_FETCH_TOKENS) > 0);
    assert_true(count_of(&w, QKV_METRIC_GPU_FETCH_HOST_TOKENS) > 0);  // the exact rows
    teardown(&w);
  }
}

static void resident_pages_do_not_cross(void **unused) {
  (void)unused;
  world w;
  setup(&w, 5, false);
  for (int i = 0; i < 5000 && qkvi_gpu_read(w.gpu).ranges == 0; i++, usleep(1000)) attend(&w);
  assert_true(qkvi_gpu_read(w.gpu).ranges > 0);
  fetch_some(&w);
  enter_context();
  asked a = {.rows = {.layer = &w.layer, .tokens = 640, .dtype = QKV_FP16}, .row_bytes = DIM * 2};
  a.bytes = a.rows.tokens * HEADS * a.row_bytes;
  must(cuda.MemAlloc(&a.at[QKV_V], a.bytes));
  a.rows.to[QKV_V] = (qkvi_gpu_place){a.at[QKV_V], HEADS * a.row_bytes, a.row_bytes};
  const uint64_t before = qkvi_gpu_read(w.gpu).uploaded_bytes;
  assert_int_equal(qkvi_gpu_fetch(w.gpu, &a.rows, NULL), QKV_OK);
  const uint64_t crossed = qkvi_gpu_read(w.gpu).uploaded_bytes - before;
  print_message("%llu bytes crossed for 10 pages of %u\n", (unsigned long long)crossed,
                qkv_layer_page(&w.layer, 0)->bytes);
  assert_true(crossed < 10 * (uint64_t)qkv_layer_page(&w.layer, 0)->bytes);
  end_fetch(&a, true);
  teardown(&w);
}

// A GPU that fails again within 12 ms (six times retry_ms) is opened after twice the time, and soon after minutes.
static void wait_until_up(const world *w) {
  for (int n = 0; n < 5000 && qkvi_gpu_read(w->gpu).down; n++) usleep(1000);
  assert_false(qkvi_gpu_read(w->gpu).down);
  usleep(20000);
}

// The nth call of some function fails: the right bytes, or an error.
static void the_driver_fails(void **unused) {
  (void)unused;
  static const char *const functions[] = {"cuMemcpyHtoDAsync", "cuLaunchKernel", "cuEventRecord", "cuEventQuery",
                                          "cuCtxSetCurrent"};
  world w;
  size_t failed = 0;
  setup(&w, 7, true);
  for (size_t i = 0; i < FAULTS; i++) {
    qkv_error error = {0};
    wait_until_up(&w);
    enter_context();
    const asked a = ask(&w, false);
    fake_fail(functions[i % 5], 1 + (unsigned)random_below(&w.seed, 8),
              random_below(&w.seed, 4) == 0 ? QKV_CUDA_OUT_OF_MEMORY : 719);
    const qkv_status status = qkvi_gpu_fetch(w.gpu, &a.rows, &error);
    fake_fail("", 1, 0);
    failed += status != QKV_OK;
    if (status == QKV_OK) end_fetch(&a, true);
    if (status != QKV_OK) assert_true(error.text[0] != '\0');  // its memory went with the context
  }
  print_message("%zu of %d fetches failed\n", failed, FAULTS);
  assert_true(failed > FAULTS / 4);
  wait_until_up(&w);
  fetch_some(&w);
  teardown(&w);
}

// ---- Rows to pages ----

static qkv_cuda_memory copy_in(const void *from, size_t bytes) {
  qkv_cuda_memory to;
  qkv_cuda_stream stream;
  qkv_cuda_event done;
  must(cuda.MemAlloc(&to, bytes));
  must(cuda.StreamCreate(&stream, QKV_CUDA_STREAM_NON_BLOCKING));
  must(cuda.EventCreate(&done, QKV_CUDA_EVENT_UNTIMED));
  must(cuda.MemcpyHtoDAsync(to, from, bytes, stream));
  must(cuda.EventRecord(done, stream));
  while (cuda.EventQuery(done) == QKV_CUDA_NOT_READY) {
  }
  must(cuda.EventDestroy(done));
  must(cuda.StreamDestroy(stream));
  return to;
}

static void *page_of(const qkv_coder *coder) {
  const size_t bytes = (coder->codec->page_bytes_max(coder) + 63) / 64 * 64;
  return memset(aligned_alloc(64, bytes), 0, bytes);
}

// Some rows are much larger than others, so that they are outliers; those at the first positions are sinks.
static void check_page(world *w, const qkv_coder *coder, qkv_status expected_status) {
  static const qkv_dtype dtypes[] = {QKV_FP32, QKV_FP16, QKV_BF16};
  const qkv_dtype dtype = dtypes[random_below(&w->seed, 3)];
  const uint32_t tokens = random_below(&w->seed, 2) == 0 ? QKV_PAGE_TOKENS : 1 + (uint32_t)random_below(&w->seed, 64);
  const size_t row = DIM * qkv_dtype_size(dtype), count = (size_t)tokens * HEADS * DIM, bytes = tokens * HEADS * row;
  const uint64_t position = random_below(&w->seed, 3) == 0 ? 0 : 64 * random_below(&w->seed, 100);
  void *narrow[2], *there = page_of(coder), *here = page_of(coder);
  qkvi_gpu_page page = {.coder = coder, .position = position, .tokens = tokens, .dtype = dtype};
  for (size_t part = 0; part < 2; part++) {
    float *rows = random_floats(random_next(&w->seed), count);
    for (size_t i = 0; i < count; i++) rows[i] *= i / DIM % 37 == 5 ? 40 : i % DIM == 3 ? 6 : 1;
    narrow[part] = aligned_alloc(64, (bytes + 63) / 64 * 64);
    qkv_from_float(dtype, rows, narrow[part], count);
    page.from[part] = (qkvi_gpu_place){copy_in(narrow[part], bytes), HEADS * row, row};
    free(rows);
  }
  qkv_error error = {0};
  size_t made = 0;
  const qkv_status status = qkvi_gpu_encode(w->gpu, &page, there, &made, &error);
  if (expected_status == QKV_OK && status != QKV_OK) fail_msg("%s", error.text);
  const size_t expected = coder->codec->encode(coder, position, tokens, dtype, narrow[0], narrow[1], NULL, here);
  if (status == QKV_OK) {
    assert_int_equal(made, expected);
    assert_memory_equal(there, here, expected);
  }
  for (size_t part = 0; part < 2; part++) {
    if (status == QKV_OK) must(cuda.MemFree(page.from[part].at));
    free(narrow[part]);
  }
  free(there);
  free(here);
}

static void pages_have_the_same_bytes(void **unused) {
  (void)unused;
  world w;
  setup(&w, 9, true);
  enter_context();
  const fake_cuda_state before = fake_read();
  for (size_t i = 0; i < CODERS * FETCHES / 2; i++) check_page(&w, w.coders[i % CODERS], QKV_OK);
  assert_true(fake_read().launches >= before.launches + 4 * (FETCHES / 2));  // but of the one with anchors
  for (size_t i = 0; i < FAULTS / 2; i++) {
    wait_until_up(&w);
    enter_context();
    fake_fail(i % 2 == 0 ? "cuMemcpyDtoHAsync" : "cuLaunchKernel", 1, 719);
    check_page(&w, w.coders[i % CODERS], QKV_UNAVAILABLE);
    fake_fail("", 1, 0);
  }
  wait_until_up(&w);
  teardown(&w);
}

static int load(void **unused) {
  (void)unused;
  void *library = dlopen(FAKE_CUDA, RTLD_NOW);
  if (library == NULL) return -1;
  *(void **)&fake_fail = dlsym(library, "fake_cuda_fail");
  *(void **)&fake_read = dlsym(library, "fake_cuda_read");
  return fake_fail != NULL && fake_read != NULL && qkv_cuda_load(&cuda, NULL) == QKV_OK ? 0 : -1;
}

int main(void) {
  qkv_log_setup(stderr, QKV_LOG_ERROR);
  qkv_kernels_setup(UINT32_MAX);
  const struct CMUnitTest tests[] = {cmocka_unit_test(rows_have_the_same_bytes),
                                     cmocka_unit_test(resident_pages_do_not_cross),
                                     cmocka_unit_test(the_driver_fails), cmocka_unit_test(pages_have_the_same_bytes)};
  return cmocka_run_group_tests(tests, load, NULL);
}
