// Rows of layers to memory of the GPU, with the fake driver, whose kernels the emulator runs: the bytes that the
// engine's own rows have, whatever the pages' code, whether they are resident, and while the driver fails. And rows
// of a worker's memory to pages: those that the codec makes of the copy that the CPU has.
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/cache/attend.h"
#include "engine/kernel/kernel.h"
#include "server/gpu/rows.h"
#include "tests/engine/cache/fixture.h"
#include "tests/server/gpu/worker.h"
#include "tests/storage/gpu/fake_cuda.h"

enum {
  HEADS = 2,
  DIM = 64,
  TOKENS = 1600,
  WINDOW = 40,
  SINKS = 4,
  CODERS = 5,
  AREA_BYTES = 512 << 10,
  WORKER_BYTES = 1 << 20
};
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
  worker worker;
  qkvi_gpu_lent *lent;  // its memory
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
                                  .area_bytes = AREA_BYTES,
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

// Rows of an append, and where they lie.
typedef struct appended {
  test_tensor k, v;
  uint32_t tokens;
  qkv_dtype dtype;
  uint64_t position, offset;  // offset: in the worker's memory
} appended;

// Some rows are much larger than others, so that they are outliers; those at the first positions are sinks.
static float *random_rows(world *w, uint32_t tokens) {
  float *rows = random_floats(random_next(&w->seed), (size_t)tokens * HEADS * DIM);
  for (size_t i = 0; i < (size_t)tokens * HEADS * DIM; i++) rows[i] *= i / DIM % 37 == 5 ? 40 : i % DIM == 3 ? 6 : 1;
  return rows;
}

// A tensor's dims may lie in the order heads, tokens.
static void lay_rows(world *w, const appended *a, bool heads_first, test_tensor *made) {
  float *rows = random_rows(w, a->tokens);
  make_tensor(made, a->dtype, rows, a->tokens, HEADS, DIM);
  const int64_t row = (int64_t)(DIM * qkv_dtype_size(a->dtype));
  if (heads_first) {
    made->tensor.strides[0] = row;
    made->tensor.strides[1] = a->tokens * row;
  }
  free(rows);
}

static void make_appended(world *w, uint32_t tokens, appended *a) {
  static const qkv_dtype dtypes[] = {QKV_FP32, QKV_FP16, QKV_BF16};
  *a =
      (appended){.tokens = tokens, .dtype = dtypes[random_below(&w->seed, 3)], .offset = random_below(&w->seed, 100)};
  a->position = random_below(&w->seed, 3) == 0 ? 0 : 64 * random_below(&w->seed, 100);
  lay_rows(w, a, random_below(&w->seed, 2) == 0, &a->k);
  lay_rows(w, a, random_below(&w->seed, 2) == 0, &a->v);
  worker_put(&w->worker, a->offset, &a->k.segment, &a->v.segment);
}

static void free_appended(appended *a) {
  free_tensor(&a->k);
  free_tensor(&a->v);
}

// A page's rows as the layer gathers them.
static void *gather(const qkv_tensor *tensor, uint64_t token) {
  const size_t row = DIM * qkv_dtype_size(tensor->dtype);
  uint8_t *rows = aligned_alloc(64, QKV_PAGE_TOKENS * HEADS * row);
  for (uint32_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    for (uint32_t h = 0; h < HEADS; h++)
      qkv_tensor_row_raw(tensor, (int64_t)(token + t), h, rows + (t * HEADS + h) * row);
  }
  return rows;
}

// Asks for pages from a random one on; how many of them the GPU makes.
static size_t make_pages(world *w, const qkv_coder *coder, const appended *a, const qkvi_gpu_source *source) {
  size_t made = 0, left = 0;
  const checked_encoder checked = check_encoder(source, &made, &left);
  void *image = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
  const uint64_t first = random_below(&w->seed, a->tokens - QKV_PAGE_TOKENS + 1);
  const uint64_t pages = (a->tokens - first) / QKV_PAGE_TOKENS;
  for (uint64_t i = 0; i < pages; i++) {
    if (pages > 1 && random_below(&w->seed, 8) == 0) continue;  // another session has it already
    const uint64_t token = first + i * QKV_PAGE_TOKENS;
    void *k = gather(&a->k.tensor, token), *v = gather(&a->v.tensor, token);
    const qkv_row_page page = {coder, a->position + token, token, pages - 1 - i + random_below(&w->seed, 3), k, v};
    size_t bytes;
    (void)encode_checked(&checked.encoder, &page, image, &bytes);
    free(k);
    free(v);
  }
  free(image);
  return made;
}

// Rows of the worker's to pages by a GPU in use; how many of them it makes.
static size_t append_some(world *w, const qkv_coder *coder, uint32_t tokens) {
  qkv_error error = {0};
  qkvi_gpu_source source;
  appended a;
  make_appended(w, tokens, &a);
  qkvi_gpu_area *area = qkvi_gpu_area_take(w->lent);
  assert_non_null(area);
  if (worker_take(&w->worker, w->lent, a.offset, &a.k, &a.v, area, &source, &error) != QKV_OK)
    fail_msg("%s", error.text);
  const size_t made = make_pages(w, coder, &a, &source);
  qkvi_gpu_area_return(&area);
  assert_null(area);
  free_appended(&a);
  return made;
}

static void lend(world *w) {
  qkv_error error = {0};
  qkvi_gpu_give_back(&w->lent);
  if (worker_lend(&w->worker, w->gpu, 0, &w->lent, &error) != QKV_OK) fail_msg("%s", error.text);
}

static void setup_worker(world *w, uint64_t seed) {
  setup(w, seed, true);
  w->worker = worker_start(WORKER_BYTES);
  lend(w);
}

static void teardown_worker(world *w) {
  qkvi_gpu_give_back(&w->lent);
  worker_end(&w->worker);
  teardown(w);
}

static void pages_have_the_same_bytes(void **unused) {
  (void)unused;
  world w;
  setup_worker(&w, 9);
  size_t made[CODERS] = {0};
  for (size_t i = 0; i < CODERS * FETCHES / 2; i++)
    made[i % CODERS] += append_some(&w, w.coders[i % CODERS], 64 + (uint32_t)random_below(&w.seed, 500));
  for (size_t i = 0; i < CODERS; i++) assert_true(i == 2 ? made[i] == 0 : made[i] > 0);  // 2: it has anchors
  assert_true(count_of(&w, QKV_METRIC_GPU_APPEND_HOST_TOKENS) > 0);
  // Pages that follow one another are coded together.
  const uint64_t launches = fake_read().launches;
  size_t pages = 0;
  for (int i = 0; i < 4; i++) pages += append_some(&w, w.coders[3], 512);
  assert_true(fake_read().launches - launches <= pages / 2);
  teardown_worker(&w);
}

typedef struct writing {
  const worker *worker;
  _Atomic bool stop;
} writing;

static void *write_always(void *context) {
  writing *own = context;
  for (uint8_t byte = 0; !own->stop; byte ^= 0x3c) memset(own->worker->data, byte, own->worker->bytes);
  return NULL;
}

// What the CPU has and what the GPU codes is one copy, whatever the worker does.
static void the_worker_writes_meanwhile(void **unused) {
  (void)unused;
  world w;
  pthread_t thread;
  setup_worker(&w, 11);
  writing other = {.worker = &w.worker};
  assert_int_equal(pthread_create(&thread, NULL, write_always, &other), 0);
  size_t made = 0;
  for (size_t i = 0; i < 2 * FETCHES; i++) made += append_some(&w, w.coders[0], 320);
  other.stop = true;
  pthread_join(thread, NULL);
  assert_true(made > 0);
  teardown_worker(&w);
}

// An append that is tried again, with another calibration or elsewhere, gets other pages of the same rows.
static void what_was_coded_is_of_one_coder_and_position(void **unused) {
  (void)unused;
  world w;
  qkvi_gpu_source source;
  setup_worker(&w, 14);
  appended a;
  make_appended(&w, 64, &a);
  qkvi_gpu_area *area = qkvi_gpu_area_take(w.lent);
  assert_int_equal(worker_take(&w.worker, w.lent, a.offset, &a.k, &a.v, area, &source, NULL), QKV_OK);
  for (size_t i = 0; i < 8; i++) {
    a.position += i % 4 == 3 ? 64 : 0;
    assert_int_equal(make_pages(&w, w.coders[i % 2 == 0 ? 3 : 4], &a, &source), 1);
  }
  qkvi_gpu_area_return(&area);
  free_appended(&a);
  teardown_worker(&w);
}

static void areas_are_few_and_end(void **unused) {
  (void)unused;
  world w;
  qkvi_gpu_area *areas[3];
  qkvi_gpu_source source;
  setup_worker(&w, 12);
  for (size_t i = 0; i < 3; i++) areas[i] = qkvi_gpu_area_take(w.lent);
  assert_true(areas[0] != NULL && areas[1] != NULL);
  assert_null(areas[2]);
  appended a;
  make_appended(&w, 128, &a);
  // Without one, rows come all the same, and the CPU makes the pages.
  assert_int_equal(worker_take(&w.worker, w.lent, a.offset, &a.k, &a.v, NULL, &source, NULL), QKV_OK);
  assert_int_equal(make_pages(&w, w.coders[0], &a, &source), 0);
  // One that is full.
  for (size_t i = 0; i < AREA_BYTES / (128 * HEADS * DIM * 2); i++) {
    assert_int_equal(worker_take(&w.worker, w.lent, a.offset, &a.k, &a.v, areas[0], &source, NULL), QKV_OK);
  }
  assert_null(source.area);
  qkvi_gpu_area_return(&areas[0]);
  areas[0] = qkvi_gpu_area_take(w.lent);
  assert_non_null(areas[0]);
  // One that was taken before the GPU failed.
  assert_int_equal(worker_take(&w.worker, w.lent, a.offset, &a.k, &a.v, areas[0], &source, NULL), QKV_OK);
  assert_non_null(source.area);
  fake_fail("cuMemcpyDtoDAsync", 1, 719);
  assert_int_equal(worker_take(&w.worker, w.lent, a.offset, &a.k, &a.v, areas[1], &source, NULL), QKV_UNAVAILABLE);
  wait_until_up(&w);
  lend(&w);
  assert_int_equal(make_pages(&w, w.coders[0], &a, &source), 0);
  assert_true(append_some(&w, w.coders[0], 320) > 0);
  areas[2] = qkvi_gpu_area_take(w.lent);
  for (size_t i = 0; i < 3; i++) qkvi_gpu_area_return(&areas[i]);
  assert_true(append_some(&w, w.coders[0], 320) > 0);
  free_appended(&a);
  teardown_worker(&w);
}

// The nth call of some function fails while rows are copied and coded: the page's bytes, or none.
static void the_driver_fails_while_pages_are_made(void **unused) {
  (void)unused;
  static const char *const functions[] = {"cuMemcpyDtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync",
                                          "cuLaunchKernel",    "cuEventRecord",     "cuEventQuery",
                                          "cuCtxSetCurrent"};
  enum { FUNCTIONS = sizeof functions / sizeof *functions };
  world w;
  size_t refused = 0, left = 0, made = 0;
  setup_worker(&w, 13);
  for (size_t i = 0; i < FAULTS; i++) {
    wait_until_up(&w);
    lend(&w);
    appended a;
    make_appended(&w, 320, &a);
    qkvi_gpu_source source;
    qkvi_gpu_area *area = qkvi_gpu_area_take(w.lent);
    fake_fail(functions[i % FUNCTIONS], 1 + (unsigned)(i / FUNCTIONS) % 6,
              random_below(&w.seed, 4) == 0 ? QKV_CUDA_OUT_OF_MEMORY : 719);
    const qkv_status status = worker_take(&w.worker, w.lent, a.offset, &a.k, &a.v, area, &source, NULL);
    const size_t by_gpu = status == QKV_OK ? make_pages(&w, w.coders[i % 2 == 0 ? 0 : 3], &a, &source) : 0;
    fake_fail("", 1, 0);
    refused += status != QKV_OK;
    left += status == QKV_OK && by_gpu == 0;
    made += by_gpu;
    qkvi_gpu_area_return(&area);
    free_appended(&a);
  }
  print_message("%zu of %d were refused, the CPU had to code %zu, the GPU made %zu pages\n", refused, FAULTS, left,
                made);
  assert_true(refused > 0 && left > 0 && made > 0);
  wait_until_up(&w);
  lend(&w);
  assert_true(append_some(&w, w.coders[0], 320) > 0);
  teardown_worker(&w);
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
                                     cmocka_unit_test(the_driver_fails),
                                     cmocka_unit_test(pages_have_the_same_bytes),
                                     cmocka_unit_test(the_worker_writes_meanwhile),
                                     cmocka_unit_test(what_was_coded_is_of_one_coder_and_position),
                                     cmocka_unit_test(areas_are_few_and_end),
                                     cmocka_unit_test(the_driver_fails_while_pages_are_made)};
  return cmocka_run_group_tests(tests, load, NULL);
}
