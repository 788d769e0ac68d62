// Which ranges are on the GPU, by the attention that they get, with the fake driver. Attends are told, not made.
#include <dlfcn.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/kernel/kernel.h"
#include "server/gpu/internal.h"
#include "tests/engine/cache/fixture.h"

enum { HEADS = 2, DIM = 64, TOKENS = 4096, LAYERS = 16, LAST = LAYERS - 1, ATTENDS = 4 };

static qkv_account_limits limits_now;  // of the tenant "limited"

static void limits(void *unused, const char *tenant, qkv_account_limits *out) {
  (void)unused;
  if (strcmp(tenant, "limited") == 0) *out = limits_now;
}

typedef struct world {
  char kernels[64];
  qkv_model model;
  qkv_arena *arena;
  qkv_accounts *accounts;
  qkv_account *account, *other;  // of all layers but the last, and of that
  qkv_coder *coder;
  sequence rows;
  qkv_layer layers[LAYERS];  // of a range each
  qkv_metric_value metrics[QKV_METRIC_COUNT];
  qkvi_gpu *gpu;
} world;

static int64_t count_of(const world *w, qkv_metric_id metric) {
  return qkv_metric_read(&w->metrics[metric]);
}

static void setup(world *w) {
  qkv_error error = {0};
  *w = (world){.model = test_model(HEADS, 1, DIM, DIM, QKV_FP32)};
  assert_int_equal(qkv_model_resolve(&w->model, &error), QKV_OK);
  (void)snprintf(w->kernels, sizeof w->kernels, "gpu-residency-%d.kernels", (int)getpid());
  FILE *file = fopen(w->kernels, "w");
  assert_non_null(file);
  fputs("the fake driver has its own", file);
  fclose(file);
  const qkvi_gpu_config config = {.memory_bytes = 6 << 20,
                                  .device = "0",
                                  .kernels = w->kernels,
                                  .admit_attends = 2,
                                  .half_life_ms = 3600000,
                                  .retry_ms = 2,
                                  .metrics = w->metrics};
  if (qkvi_gpu_create(&config, &w->gpu, &error) != QKV_OK) fail_msg("%s", error.text);
  w->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 28);
  w->accounts = qkv_accounts_create(w->arena, limits, NULL);
  w->account = qkv_accounts_join(w->accounts, "limited");
  w->other = qkv_accounts_join(w->accounts, "other");
  w->coder = test_coder(&w->model, test_policy(4, 4, 0));
  w->rows = make_sequence(&w->model, TOKENS, 1);
  qkv_layer_config layer = test_layer_config(&w->model, test_policy(4, 4, 0), 0, w->arena);
  layer.device = qkvi_gpu_device(w->gpu);
  row_pair pair;
  make_pair(&pair, &w->rows, 0, TOKENS, QKV_FP32);
  for (size_t i = 0; i < LAYERS; i++) {
    uint64_t appended;
    layer.arena = qkv_account_arena(i + 1 < LAYERS ? w->account : w->other);
    qkv_layer_init(&w->layers[i], &layer, w->coder);
    if (qkv_layer_append(&w->layers[i], 0, &pair.k.tensor, &pair.v.tensor, false, &appended, &error) != QKV_OK)
      fail_msg("%s", error.text);
    atomic_store(&w->layers[i].ranges[0].range->device, layer.device);
  }
  free_pair(&pair);
}

static void teardown(world *w) {
  for (size_t i = 0; i < LAYERS; i++) qkv_layer_deinit(&w->layers[i]);
  assert_int_equal(qkvi_gpu_read(w->gpu).ranges, 0);
  qkvi_gpu_destroy(&w->gpu);
  coder_destroy(w->coder);
  qkv_account_unref(&w->account);  // which have nothing on a GPU
  qkv_account_unref(&w->other);
  qkv_accounts_destroy(&w->accounts);
  qkv_arena_destroy(&w->arena);
  free_sequence(&w->rows);
  assert_int_equal(unlink(w->kernels), 0);
}

static qkv_page_range *range_of(const world *w, size_t layer) {
  return w->layers[layer].ranges[0].range;
}

static bool is_resident(const world *w, size_t layer) {
  qkv_device *device = qkvi_gpu_device(w->gpu);
  return device->has(device, range_of(w, layer), 0, qkv_layer_page(&w->layers[layer], 0)->serial);
}

// Longer than none is tried after memory was not found, or the quota was reached.
static void settle(const world *w) {
  for (bool busy = true; busy;) {
    usleep(1000);
    pthread_mutex_lock(&w->gpu->lock);
    busy = w->gpu->filled > 0 || (w->gpu->full && qkv_now_ms() < w->gpu->full_until_ms) ||
           qkv_account_waits_gpu(w->account, qkv_now_ms());
    pthread_mutex_unlock(&w->gpu->lock);
  }
}

static void attend(const world *w, size_t layer, size_t times, float attention) {
  qkv_device *device = qkvi_gpu_device(w->gpu);
  for (size_t i = 0; i < times; i++) {
    qkv_device_copy *copy;
    const qkv_device_pages pages = {
        .range = range_of(w, layer), .end = QKV_RANGE_PAGES, .grows = false, .attention = attention};
    if (device->hold(device, &pages, &copy) != 0) device->release(device, copy);
    settle(w);
  }
}

static void what_gets_attention_stays(void **unused) {
  (void)unused;
  static world w;
  setup(&w);
  attend(&w, 0, ATTENDS, 1);
  assert_true(is_resident(&w, 0));
  // Others, of which each gets a tenth, until they do not fit: then those that came first stay.
  size_t fitting = 1;
  for (bool fits = true; fits; fitting += fits) {
    assert_true(fitting < LAYERS - 1);
    attend(&w, fitting, ATTENDS, 0.1f);
    fits = is_resident(&w, fitting);
  }
  assert_true(fitting > 2);
  assert_true(count_of(&w, QKV_METRIC_GPU_LESS_ATTENDED) > 0);
  for (size_t i = 1; i < fitting + 1; i++) attend(&w, i, 1, 0.1f);
  assert_int_equal(count_of(&w, QKV_METRIC_GPU_EVICTIONS), 0);
  // One that gets more than they: one of them goes, not the first, although that was attended before all of them.
  const size_t last = fitting + 1;
  attend(&w, last, ATTENDS, 0.5f);
  assert_true(is_resident(&w, last));
  assert_int_equal(count_of(&w, QKV_METRIC_GPU_EVICTIONS), 1);
  assert_true(is_resident(&w, 0));
  // It does not go for the one that has gone once that is attended again: half as much again is needed.
  for (size_t i = 1; i < fitting; i++) attend(&w, i, 1, 0.1f);
  assert_int_equal(count_of(&w, QKV_METRIC_GPU_EVICTIONS), 1);
  teardown(&w);
}

static void set_quota(const world *w, uint64_t bytes) {
  limits_now = (qkv_account_limits){.gpu_bytes = bytes};
  qkv_accounts_refresh(w->accounts);
}

static void a_tenant_keeps_to_its_quota(void **unused) {
  (void)unused;
  static world w;
  setup(&w);
  attend(&w, 0, ATTENDS, 1);
  const uint64_t one = qkv_account_read(w.account).gpu_bytes;
  assert_true(is_resident(&w, 0) && one > 0);
  set_quota(&w, 2 * one + one / 2);
  attend(&w, 1, ATTENDS, 0.1f);
  assert_true(is_resident(&w, 1));
  attend(&w, 2, ATTENDS, 0.1f);  // gets no more than those that are there
  assert_false(is_resident(&w, 2));
  attend(&w, LAST, ATTENDS, 0.1f);  // there is memory for other tenants
  assert_true(is_resident(&w, LAST));
  attend(&w, 2, ATTENDS, 0.5f);
  assert_true(is_resident(&w, 0) && is_resident(&w, 2) && is_resident(&w, LAST));
  assert_false(is_resident(&w, 1));
  assert_int_equal(count_of(&w, QKV_METRIC_GPU_EVICTIONS), 1);
  assert_int_equal(qkv_account_read(w.account).gpu_bytes, 2 * one);
  set_quota(&w, one / 2);  // less than there is: that stays, and nothing comes
  attend(&w, 3, ATTENDS, 10);
  assert_true(is_resident(&w, 0) && is_resident(&w, 2) && !is_resident(&w, 3));
  set_quota(&w, 0);
  attend(&w, 3, ATTENDS, 10);
  assert_true(is_resident(&w, 3));
  assert_int_equal(qkv_account_read(w.account).gpu_bytes, 3 * one);
  assert_int_equal(qkv_account_read(w.other).gpu_bytes, one);
  teardown(&w);
}

static int load(void **unused) {
  (void)unused;
  return dlopen(FAKE_CUDA, RTLD_NOW) == NULL ? -1 : 0;
}

int main(void) {
  qkv_log_setup(stderr, QKV_LOG_ERROR);
  qkv_kernels_setup(UINT32_MAX);
  const struct CMUnitTest tests[] = {cmocka_unit_test(what_gets_attention_stays),
                                     cmocka_unit_test(a_tenant_keeps_to_its_quota)};
  return cmocka_run_group_tests(tests, load, NULL);
}
