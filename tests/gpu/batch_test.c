// Batches of attention on layers whose device is the emulator: the same bits as without a device, whatever it has
// copies of, and whatever of it fails.
#include "engine/cache/attend_internal.h"
#include "engine/codec/embedded_internal.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/cache/fixture.h"
#include "tests/gpu/copy.h"
#include "tests/gpu/launch.h"

#ifdef QKV_SANITIZED
enum { WORLDS = 4 };
#else
enum { WORLDS = 12 };
#endif
enum { CODERS = 4, LAYERS = 5, REQUESTS = 8, HEADS = 2, TOKENS = 3000, CALLS = 3, COPIES = 256, DIM_MAX = 128 };

// ---- A device ----

typedef struct emulated {
  qkv_device device;
  pthread_mutex_t lock;
  uint64_t seed;
  unsigned copies_in_4, failures_in_8;  // chances
  size_t held, under_way, forgotten, ranges, calls, calibrated;
  uint8_t *copies[COPIES];  // the last ones that were held
  size_t copy_count;
  qkv_simt_tables tables;
  qkv_device_call memory[CALLS];
  bool used[CALLS];
} emulated;

static emulated *of(qkv_device *device) {
  return (emulated *)device;
}

static bool chance(emulated *device, unsigned in, unsigned of_all) {
  return random_below(&device->seed, of_all) < in;
}

static bool takes(const qkv_page_entry *pages, uint32_t end) {
  for (uint32_t i = 0; i < end; i++) {
    if (!qkv_device_takes_coder(pages[i].coder)) return false;
    if (pages[i].page == NULL || !qkv_device_takes_image(pages[i].coder, pages[i].page)) return false;
  }
  return true;
}

static uint64_t do_hold(qkv_device *device, const qkv_device_pages *pages, qkv_device_copy **copy) {
  emulated *self = of(device);
  uint64_t address = 0;
  pthread_mutex_lock(&self->lock);
  assert_true(pages->first < pages->end && pages->end <= pages->range->count);
  if (chance(self, self->copies_in_4, 4) && takes(qkvi_range_entries(pages->range), pages->end)) {
    const void *images[QKV_RANGE_PAGES];
    uint8_t **made = &self->copies[self->copy_count++ % COPIES];
    assert_true(self->held < COPIES);
    for (uint32_t i = 0; i < pages->end; i++) images[i] = qkvi_range_entries(pages->range)[i].page;
    free(*made);
    *made = copy_pages(pages->range->coder, images, pages->end);
    address = (uintptr_t)*made;
    self->held++;
    self->ranges++;
    *copy = (void *)*made;
  }
  pthread_mutex_unlock(&self->lock);
  return address;
}

static void do_release(qkv_device *device, qkv_device_copy *copy) {
  emulated *self = of(device);
  pthread_mutex_lock(&self->lock);
  assert_non_null(copy);
  assert_true(self->held > 0);
  self->held--;
  pthread_mutex_unlock(&self->lock);
}

static bool do_has(qkv_device *device, const qkv_page_range *range, uint32_t page, uint64_t serial) {
  (void)device, (void)range, (void)page, (void)serial;
  return false;
}

static void do_forget(qkv_device *device, const qkv_page_range *range) {
  emulated *self = of(device);
  pthread_mutex_lock(&self->lock);
  assert_non_null(range);
  self->forgotten++;
  pthread_mutex_unlock(&self->lock);
}

static bool do_begin(qkv_device *device, qkv_device_call *call) {
  emulated *self = of(device);
  size_t i = 0;
  pthread_mutex_lock(&self->lock);
  assert_true(self->held > 0);
  while (i < CALLS && self->used[i]) i++;
  const bool has = i < CALLS && !chance(self, self->failures_in_8, 8);
  if (has) {
    self->used[i] = true;
    self->under_way++;
    *call = self->memory[i];
    memset(call->input, 0xa5, call->input_bytes);
    memset((void *)call->output, 0xff, call->output_bytes);
  }
  pthread_mutex_unlock(&self->lock);
  return has;
}

static bool do_submit(qkv_device *device, qkv_device_call *call, const qkv_simt_shape *shape,
                      const qkv_device_kernels *kernels) {
  emulated *self = of(device);
  (void)call;
  pthread_mutex_lock(&self->lock);
  assert_int_equal(kernels->attend.count, kernels->merge.count);
  assert_int_equal(kernels->attend.count, kernels->turn.count);
  const bool runs = !chance(self, self->failures_in_8, 8);
  if (runs) {
    launch_attend(&(launch_work){.shape = shape,
                                 .tables = kernels->attend.tables,
                                 .ranges = kernels->attend.ranges,
                                 .merges = kernels->merge.merges,
                                 .turns = kernels->turn.turns,
                                 .count = kernels->attend.count,
                                 .order = random_below(&self->seed, 4)});
    self->calls++;
    self->calibrated += shape->turn != NULL;
  }
  pthread_mutex_unlock(&self->lock);
  return runs;
}

static bool do_wait(qkv_device *device, qkv_device_call *call) {
  emulated *self = of(device);
  pthread_mutex_lock(&self->lock);
  const bool ended = !chance(self, self->failures_in_8, 8);
  if (!ended) memset((void *)call->output, 0xff, call->output_bytes);
  pthread_mutex_unlock(&self->lock);
  return ended;
}

static void do_end(qkv_device *device, qkv_device_call *call) {
  emulated *self = of(device);
  pthread_mutex_lock(&self->lock);
  const size_t i = (size_t)((qkv_device_call *)call->own - self->memory);
  assert_true(i < CALLS && self->used[i]);
  self->used[i] = false;
  self->under_way--;
  pthread_mutex_unlock(&self->lock);
}

static emulated *create_device(uint64_t seed) {
  emulated *made = calloc(1, sizeof *made);
  *made = (emulated){.device = {.hold = do_hold,
                                .release = do_release,
                                .has = do_has,
                                .forget = do_forget,
                                .begin = do_begin,
                                .submit = do_submit,
                                .wait = do_wait,
                                .end = do_end},
                     .seed = seed};
  pthread_mutex_init(&made->lock, NULL);
  qkv_simt_tables_fill(&made->tables);
  for (size_t i = 0; i < CALLS; i++) {
    qkv_device_call *call = &made->memory[i];
    const size_t jobs = 10 + random_below(&made->seed, 60), partial = QKV_SIMT_PARTIAL_BYTES(DIM_MAX, 8);
    *call = (qkv_device_call){.own = call,
                              .input_bytes = 20000 + jobs * 1500,
                              .output_bytes = jobs * partial,
                              .scratch_bytes = jobs * partial * QKV_SIMT_RANGE_RUNS * 3,
                              .tables_address = (uintptr_t)&made->tables};
    call->input = aligned_alloc(64, (call->input_bytes + 63) / 64 * 64);
    call->output = aligned_alloc(64, (call->output_bytes + 63) / 64 * 64);
    call->input_address = (uintptr_t)call->input;
    call->output_address = (uintptr_t)call->output;
    call->scratch_address = (uintptr_t)aligned_alloc(64, (call->scratch_bytes + 63) / 64 * 64);
  }
  return made;
}

static void destroy_device(emulated *device) {
  for (size_t i = 0; i < CALLS; i++) {
    free(device->memory[i].input);
    free((void *)device->memory[i].output);
    free((void *)(uintptr_t)device->memory[i].scratch_address);
  }
  for (size_t i = 0; i < COPIES; i++) free(device->copies[i]);
  pthread_mutex_destroy(&device->lock);
  free(device);
}

// ---- Layers ----

typedef struct world {
  qkv_model model;
  qkv_policy policy;
  qkv_arena *arena;
  qkv_coder *coders[CODERS];  // data-free ones that the kernels take as they are, one that they have expanded if at
                              // all, and a calibrated one
  sequence rows;
  qkv_layer layers[LAYERS];
  size_t count;
  emulated *device;
  uint64_t seed;
} world;

static qkv_layer *add_layer(world *w, const qkv_layer *parent, uint64_t position) {
  qkv_layer *layer = &w->layers[w->count++];
  qkv_layer_config config = test_layer_config(&w->model, w->policy, 0, w->arena);
  config.device = &w->device->device;
  qkv_layer_init(layer, &config, w->coders[0]);
  if (parent != NULL) qkv_layer_fork(layer, parent, position);
  return layer;
}

static void append(world *w, qkv_layer *layer, size_t coder, uint64_t tokens) {
  qkv_error error = {0};
  row_pair pair;
  uint64_t appended;
  const uint64_t from = random_below(&w->seed, TOKENS - tokens);
  layer->coder = w->coders[coder];
  make_pair(&pair, &w->rows, from, from + tokens, QKV_FP32);
  if (qkv_layer_append(layer, layer->length, &pair.k.tensor, &pair.v.tensor, false, &appended, &error) != QKV_OK)
    fail_msg("%s", error.text);
  free_pair(&pair);
}

// As qkv_precision says for these tiers: coders have queries of their own.
static void set_precision(qkv_head_coder *head) {
  head->query_limit = qkvi_query_limit(head->transforms[QKV_K], head->tiers[QKV_K]);
  head->weight_bytes = (uint8_t)qkvi_weight_bytes(head->transforms[QKV_V], head->tiers[QKV_V]);
}

static qkv_coder *calibrated_coder(const world *w, double bits) {
  naive_random random = {w->seed};
  const qkv_rope *rope = w->model.rope.theta != 0 ? &w->model.rope : NULL;
  const uint16_t dim = (uint16_t)w->model.key_dim;
  qkv_coder *coder = coder_create_dense(&random, HEADS, dim, dim, bits, bits,
                                        rope != NULL ? QKV_FRAME_ATTEND : QKV_FRAME_PLAIN, rope);
  for (uint32_t h = 0; rope != NULL && h < HEADS; h++) {
    owned_transform *keys = &((owned_coder *)coder)->transforms[2 * h];
    if (keys->transform.plan == NULL) transform_by_blocks(keys, rope);
  }
  coder_keep_outliers(coder, 0.3f, 4);
  coder->layer = TEST_LAYER;
  return coder;
}

static void begin(world *w, uint64_t seed) {
  static const double bits[CODERS] = {4, 3, 6, 3};
  *w = (world){.seed = seed, .device = create_device(seed)};
  w->model =
      test_model(HEADS, 1 + (uint32_t)(seed % 5), seed % 2 == 0 ? 64 : 128, seed % 2 == 0 ? 64 : 128, QKV_FP32);
  if (seed % 3 != 0) {
    qkv_error error = {0};
    w->model.rope = (qkv_rope){.theta = 10000, .interleaved = seed % 4 == 1};
    assert_int_equal(qkv_model_resolve(&w->model, &error), QKV_OK);
  }
  w->policy = test_policy(3, 3, 0);
  w->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 28);
  for (size_t i = 0; i < CODERS; i++) {
    w->coders[i] = i < 3 ? test_coder(&w->model, test_policy(bits[i], bits[i], 0)) : calibrated_coder(w, bits[i]);
    for (size_t h = 0; h < HEADS; h++) set_precision((qkv_head_coder *)&qkv_embedded(w->coders[i])->heads[h]);
  }
  coder_own(w->coders[1])->anchors[QKV_K].kind = seed % 2 == 0 ? QKV_ANCHOR_AUTO : QKV_ANCHOR_GROUP;
  coder_own(w->coders[1])->anchors[QKV_V].kind = QKV_ANCHOR_MEAN;
  w->rows = make_sequence(&w->model, TOKENS, seed);
  qkv_layer *trunk = add_layer(w, NULL, 0);
  for (uint64_t i = 0; i < 2 + seed % 3; i++)
    append(w, trunk, i == 0 ? 3 : i % CODERS, 100 + random_below(&w->seed, 900));
  if (seed % 8 == 0) {
    for (size_t i = 0; i < 2; i++) append(w, trunk, seed % 16 == 0 ? 0 : 3, 2900);
  }
  while (w->count < LAYERS) {
    const qkv_layer *parent = &w->layers[random_below(&w->seed, w->count)];
    qkv_layer *layer =
        add_layer(w, parent, random_below(&w->seed, 2) == 0 ? UINT64_MAX : random_below(&w->seed, parent->length));
    append(w, layer, random_below(&w->seed, CODERS), 1 + random_below(&w->seed, 300));
  }
}

static void end(world *w) {
  const size_t forgotten = w->device->forgotten;
  for (size_t i = 0; i < w->count; i++) qkv_layer_deinit(&w->layers[i]);
  assert_true(w->device->forgotten > forgotten);
  for (size_t i = 0; i < CODERS; i++) coder_destroy(w->coders[i]);
  assert_int_equal(qkv_arena_read(w->arena).bytes_used, 0);
  qkv_arena_destroy(&w->arena);
  free_sequence(&w->rows);
  destroy_device(w->device);
}

// ---- Requests ----

typedef struct asked {
  float *values, *out, *lse, *expected, *expected_lse;
  test_tensor q;
  size_t rows;
} asked;

static qkv_attend_options random_options(world *w) {
  static const qkv_precision precisions[] = {QKV_PRECISION_DEFAULT, QKV_PRECISION_DEFAULT, QKV_PRECISION_INT8,
                                             QKV_PRECISION_INT16, QKV_PRECISION_FP32};
  qkv_attend_options options = {.precision = precisions[random_below(&w->seed, 5)]};
  const uint64_t dice = random_below(&w->seed, 12);
  if (dice == 0) options.sliding_window = 1 + random_below(&w->seed, 1500);
  if (dice == 1) options.not_causal = true;
  if (dice == 2) options.begin = random_below(&w->seed, 700);
  if (dice == 3) options.end = 1 + random_below(&w->seed, 1500);
  if (dice == 4) options.soft_cap = 3;
  return options;
}

static void ask(world *w, qkv_attend *request, asked *all) {
  const qkv_layer *layer = &w->layers[random_below(&w->seed, w->count)];
  const size_t width = w->model.value_dim;
  const uint64_t dice = random_below(&w->seed, 8), queries = dice == 0 ? 20 : dice < 3 ? 2 + dice : 1;
  qkv_error error = {0};
  *all = (asked){.rows = queries * w->model.q_heads};
  all->values = random_floats(random_next(&w->seed), all->rows * width);
  make_tensor(&all->q, QKV_FP32, all->values, (int64_t)queries, w->model.q_heads, width);
  all->out = calloc(all->rows, width * sizeof(float));
  all->expected = calloc(all->rows, width * sizeof(float));
  all->lse = calloc(all->rows, sizeof(float));
  all->expected_lse = calloc(all->rows, sizeof(float));
  *request = (qkv_attend){.layer = layer, .q = all->q.tensor, .options = random_options(w)};
  request->position = layer->length > queries ? layer->length - queries : 0;
  if (random_below(&w->seed, 5) == 0) request->position = random_below(&w->seed, layer->length);
  if (qkv_attend_check(request, &error) != QKV_OK) fail_msg("%s", error.text);
  request->out = all->expected;
  request->lse = all->expected_lse;
  qkv_attend_run(NULL, request, 1);
  request->out = all->out;
  request->lse = all->lse;
}

static void free_asked(asked *all) {
  free(all->values);
  free(all->out);
  free(all->lse);
  free(all->expected);
  free(all->expected_lse);
  free_tensor(&all->q);
}

static void check_batch(const world *w, qkv_pool *pool, const qkv_attend *requests, const asked *all, size_t count) {
  const size_t width = w->model.value_dim;
  for (size_t i = 0; i < count; i++) {
    memset(requests[i].out, 0xff, all[i].rows * width * sizeof(float));
    memset(requests[i].lse, 0xff, all[i].rows * sizeof(float));
  }
  qkv_attend_run(pool, requests, count);
  for (size_t i = 0; i < count; i++) {
    assert_memory_equal(requests[i].out, all[i].expected, all[i].rows * width * sizeof(float));
    assert_memory_equal(requests[i].lse, all[i].expected_lse, all[i].rows * sizeof(float));
  }
  assert_int_equal(w->device->held, 0);
  assert_int_equal(w->device->under_way, 0);
}

static void check_world(uint64_t seed, size_t *ranges, size_t *calls, size_t *calibrated) {
  static const size_t threads[] = {0, 2};
  static const struct { unsigned copies, failures; } chances[] = {{4, 0}, {2, 0}, {3, 2}};
  qkv_attend requests[REQUESTS];
  asked all[REQUESTS];
  world w;
  begin(&w, seed);
  const size_t count = 1 + random_below(&w.seed, REQUESTS);
  for (size_t i = 0; i < count; i++) ask(&w, &requests[i], &all[i]);  // the device has no copy yet
  assert_int_equal(w.device->ranges, 0);
  for (size_t t = 0; t < 2; t++) {
    qkv_pool *pool = NULL;
    if (threads[t] > 0) assert_int_equal(qkv_pool_create(threads[t], 4, &pool, NULL), QKV_OK);
    for (size_t i = 0; i < sizeof chances / sizeof *chances; i++) {
      w.device->copies_in_4 = chances[i].copies;
      w.device->failures_in_8 = chances[i].failures;
      check_batch(&w, pool, requests, all, count);
    }
    qkv_pool_destroy(&pool);
  }
  *ranges += w.device->ranges;
  *calls += w.device->calls;
  *calibrated += w.device->calibrated;
  for (size_t i = 0; i < count; i++) free_asked(&all[i]);
  end(&w);
}

static void same_bits_with_a_device(void **unused) {
  (void)unused;
  size_t ranges = 0, calls = 0, calibrated = 0;
  for (uint64_t seed = 0; seed < WORLDS; seed++) check_world(seed, &ranges, &calls, &calibrated);
  print_message("%zu ranges of requests had copies, %zu calls, %zu of them of a calibrated code\n", ranges, calls,
                calibrated);
  assert_true(calibrated > WORLDS / 2);
  assert_true(ranges > 10 * WORLDS && calls > 2 * WORLDS);
}

// What the kernels take: codec, frame, width, depths of all groups of all heads.
static void pages_that_kernels_take(void **unused) {
  (void)unused;
  static const struct {
    uint32_t key_dim, value_dim;
    double bits;
    bool coder, image;
  } cases[] = {{64, 64, 4, true, true},     {128, 128, 1, true, true},   {64, 64, 6, true, true},
               {64, 64, 7, true, false},    {128, 128, 4.5, true, true}, {128, 128, 5, true, false},
               {128, 128, 2.5, true, true}, {96, 96, 4, false, false},   {64, 128, 4, false, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const qkv_model model = test_model(HEADS, 1, cases[i].key_dim, cases[i].value_dim, QKV_FP32);
    const qkv_policy policy = test_policy(cases[i].bits, cases[i].bits, 0);
    qkv_arena *arena = qkv_arena_create("memory-budget", (uint64_t)1 << 26);
    sequence rows = make_sequence(&model, 128, i);
    qkv_layer layer;
    init_layer(&layer, &model, policy, 0, arena);
    must_append(&layer, &rows, 0, 128);
    assert_int_equal(qkv_device_takes_coder(layer.coder), cases[i].coder);
    if (cases[i].coder)
      assert_int_equal(qkv_device_takes_image(layer.coder, qkvi_layer_image(&layer, 0)), cases[i].image);
    deinit_layer(&layer);
    qkv_arena_destroy(&arena);
    free_sequence(&rows);
  }
}

int main(void) {
  qkv_kernels_setup(UINT32_MAX);
  const struct CMUnitTest tests[] = {cmocka_unit_test(pages_that_kernels_take),
                                     cmocka_unit_test(same_bits_with_a_device)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
