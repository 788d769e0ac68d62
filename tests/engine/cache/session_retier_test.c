// A session's tiers: requests, steps, statistics, memory, and threads that do it all at once.
#include "engine/cache/session_retier.h"

#include <pthread.h>
#include <unistd.h>

#include "engine/cache/layer_retier.h"
#include "engine/cache/session_internal.h"
#include "tests/engine/cache/fixture.h"
#include "tests/engine/cache/used_session.h"

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_session *session;
} scene;

static void setup_scene(scene *s, qkv_model model, qkv_policy policy, uint64_t tokens, bool keep_full) {
  *s = (scene){.model = model, .arena = qkv_arena_create("memory-budget", (uint64_t)1 << 28)};
  s->rows = make_sequence(&s->model, tokens, 1);
  qkv_session_config config = {.name = "a",
                               .tenant = "default",
                               .purpose = QKV_PURPOSE_ATTEND,
                               .policy = policy,
                               .ema = {.alpha = 0.9, .sample_every = 1},
                               .keep_full = keep_full};
  qkv_error error = {0};
  if (qkv_session_create(&config, &s->model, s->arena, &s->session, &error) != QKV_OK) fail_msg("%s", error.text);
}

static void teardown_scene(scene *s) {
  qkv_session_unref(&s->session);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  assert_int_equal(qkv_arena_read(s->arena).bytes_reserved, 0);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

static void append(scene *s, uint32_t layer, uint64_t begin, uint64_t end) {
  row_pair pair;
  qkv_error error = {0};
  uint64_t appended, length;
  make_pair(&pair, &s->rows, begin, end, s->model.dtype);
  if (qkv_session_append(s->session, layer, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length,
                         &error) != QKV_OK)
    fail_msg("%s", error.text);
  free_pair(&pair);
}

static void attend(scene *s, uint32_t layer, uint64_t seed) {
  const qkv_layer *read;
  const size_t heads = s->model.q_heads;
  float *q = random_floats(seed, heads * s->model.key_dim);
  float *out = calloc(heads * s->model.value_dim, sizeof *out), *lse = calloc(heads, sizeof *lse);
  test_tensor tensor;
  make_tensor(&tensor, QKV_FP32, q, 1, (int64_t)heads, s->model.key_dim);
  assert_int_equal(qkv_session_read(s->session, layer, &read, NULL), QKV_OK);
  const qkv_attend request = {.layer = read, .position = read->length, .q = tensor.tensor, .out = out, .lse = lse};
  qkv_attend_run(NULL, &request, 1);
  qkv_session_read_done(s->session, layer);
  free_tensor(&tensor);
  free(q);
  free(out);
  free(lse);
}

static void check_layers(scene *s) {
  for (uint32_t i = 0; i < s->model.layers; i++) {
    const char *reason = qkv_layer_validate(qkvi_session_look(s->session, i));
    if (reason != NULL) fail_msg("layer %u: %s", i, reason);
    qkv_session_read_done(s->session, i);
  }
}

// Average code bits of the pages of [begin, end) of a layer, by the tiers in their directories.
static double average_bits(scene *s, uint32_t layer, uint64_t begin, uint64_t end) {
  const qkv_layer *read = qkvi_session_look(s->session, layer);
  double bits = 0, groups = 0;
  for (size_t i = 0; i < read->page_count; i++) {
    if (qkv_layer_page(read, i)->position < begin || qkv_layer_page(read, i)->position + QKV_PAGE_TOKENS > end)
      continue;
    for (uint16_t h = 0; h < s->model.kv_heads; h++) {
      const qkv_page_directory *entry = qkv_page_entry_of(qkv_layer_page(read, i)->page, h);
      for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
        bits += entry->tier_k[g] / 8.0 + entry->tier_v[g] / 8.0;
        groups += 2;
      }
    }
  }
  qkv_session_read_done(s->session, layer);
  return bits / groups;
}

static qkv_session_info info_of(scene *s) {
  qkv_session_info info;
  qkv_session_read_info(s->session, &info, NULL);
  return info;
}

static void demoting_frees_what_it_says(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(2, 2, 64, 64, QKV_FP16), test_policy(4, 4, 0), 64 * 8, false);
  append(&s, 0, 0, 64 * 8);
  append(&s, 2, 0, 64 * 8);
  attend(&s, 0, 3);
  const int64_t used_at = info_of(&s).last_used_ms;
  const qkv_layer_usage before = info_of(&s).usage;
  const uint64_t used = qkv_arena_read(s.arena).bytes_used;
  qkv_retier_report report = {0};
  const qkv_retier_scope two = {.begin = 64, .end = 64 * 4 + 20, .layers = (uint32_t[]){2}, .layer_count = 1};
  assert_int_equal(qkv_session_demote(s.session, &two, 1.5, true, &report, NULL), QKV_OK);
  assert_int_equal(report.pages, 4);
  assert_true(average_bits(&s, 2, 64, 64 * 4) == 1.5);
  assert_true(average_bits(&s, 2, 0, 64) == 4);
  assert_true(average_bits(&s, 2, 64 * 4, 64 * 5) == (1.5 + 3 * 4) / 4);  // 16 tokens of 64
  assert_true(average_bits(&s, 0, 0, 64 * 8) == 4);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used - report.bytes_freed);
  assert_int_equal(info_of(&s).usage.bytes_coded, before.bytes_coded - report.bytes_freed);
  assert_int_equal(report.bytes_taken, 0);

  // All layers to an average, by attention: unevenly.
  qkv_retier_scope all = {0};
  assert_int_equal(qkv_session_demote(s.session, &all, 2, false, &report, NULL), QKV_OK);
  assert_true(average_bits(&s, 0, 0, 64 * 8) <= 2 && average_bits(&s, 0, 0, 64 * 8) > 1.95);
  assert_true(average_bits(&s, 2, 0, 64 * 8) <= 2);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used - report.bytes_freed);
  const qkv_layer *read = qkvi_session_look(s.session, 0);
  assert_int_equal(qkv_page_entry_of(qkv_layer_page(read, 0)->page, 0)->tier_k[0], 32);  // sinks
  qkv_session_read_done(s.session, 0);
  check_layers(&s);
  // None of this is a use.
  assert_int_equal(info_of(&s).last_used_ms, used_at);

  qkv_error error = {0};
  assert_int_equal(qkv_session_demote(s.session, &all, 0.3, true, &report, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "bits is 0.3, allowed are multiples of 0.125 up to 8");
  error = (qkv_error){0};
  assert_int_equal(qkv_session_demote(s.session, &all, 0, true, &report, &error), QKV_INVALID_ARGUMENT);
  all.layers = (uint32_t[]){4};
  all.layer_count = 1;
  error = (qkv_error){0};
  assert_int_equal(qkv_session_demote(s.session, &all, 1, true, &report, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "layer is 4, the model tiny has 4 layers");
  all = (qkv_retier_scope){.begin = 9, .end = 8};
  assert_int_equal(qkv_session_demote(s.session, &all, 1, true, &report, NULL), QKV_INVALID_ARGUMENT);
  teardown_scene(&s);
}

static void promoting_needs_what_was_kept(void **state) {
  (void)state;
  for (int keep_full = 0; keep_full < 2; keep_full++) {
    scene s;
    setup_scene(&s, test_model(1, 1, 32, 32, QKV_FP16), test_policy(4, 3, 0), 64 * 6, keep_full);
    append(&s, 1, 0, 64 * 6);
    const qkv_layer *read = qkvi_session_look(s.session, 1);
    float *before = decoded_rows(read, QKV_K);
    qkv_session_read_done(s.session, 1);
    qkv_retier_report report = {0};
    qkv_error error = {0};
    const qkv_retier_scope all = {0}, part = {.begin = 128, .end = 256};
    assert_int_equal(qkv_session_demote(s.session, &part, 2, true, &report, NULL), QKV_OK);
    const uint64_t used = qkv_arena_read(s.arena).bytes_used;
    if (keep_full) {
      assert_true(report.bytes_taken > 0 && report.bytes_freed == 0);
      assert_int_equal(qkv_session_promote(s.session, &all, 3.5, &report, &error), QKV_OK);
      assert_true(average_bits(&s, 1, 128, 256) == (3.5 + 3) / 2);
      assert_int_equal(qkv_session_promote(s.session, &all, 0, &report, &error), QKV_OK);
      assert_true(average_bits(&s, 1, 128, 256) == 3.5);
      assert_true(qkv_arena_read(s.arena).bytes_used < used);
      read = qkvi_session_look(s.session, 1);
      float *after = decoded_rows(read, QKV_K);
      qkv_session_read_done(s.session, 1);
      assert_memory_equal(after, before, 64 * 6 * 32 * sizeof *after);
      free(after);
    } else {
      assert_int_equal(qkv_session_promote(s.session, &all, 3, &report, &error), QKV_FAILED_PRECONDITION);
      assert_string_equal(error.text, "layer 1: position 128 is held at 2 bits, 3 are asked and were not kept");
      assert_true(average_bits(&s, 1, 128, 256) == 2);
      assert_int_equal(qkv_session_promote(s.session, &all, 2, &report, &error), QKV_OK);
      assert_int_equal(qkv_session_promote(s.session, &(qkv_retier_scope){.end = 128}, 0, &report, &error), QKV_OK);
      assert_int_equal(qkv_arena_read(s.arena).bytes_used, used);
    }
    check_layers(&s);
    free(before);
    teardown_scene(&s);
  }
}

// The background's steps take layers in turn, a few pages each, until nothing is left to do.
static void steps_reach_the_budget(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(2, 2, 64, 64, QKV_FP16), test_policy(4, 4, 16), 64 * 20, false);
  for (uint32_t i = 0; i < 4; i++) {
    append(&s, i, 0, 64 * 20);
    for (uint64_t n = 0; n < 10; n++) attend(&s, i, n);
  }
  qkv_retier_policy policy = QKV_RETIER_POLICY;
  policy.bits = 2;
  policy.pages_max = 6;
  policy.rest = 8;
  uint64_t steps = 0, quiet = 0, pages = 0;
  while (quiet < 4) {
    qkv_retier_report report = {0};
    uint32_t layer;
    assert_int_equal(qkv_session_retier(s.session, &policy, &layer, &report, NULL), QKV_OK);
    assert_int_equal(layer, steps % 4);
    assert_true(report.pages <= 6);
    quiet = report.pages == 0 ? quiet + 1 : 0;
    pages += report.pages;
    assert_true(++steps < 100);
  }
  assert_true(pages > 4 * 15);
  for (uint32_t i = 0; i < 4; i++) assert_true(average_bits(&s, i, 0, 64 * 20) <= 2);
  check_layers(&s);
  teardown_scene(&s);
}

static void statistics_are_those_of_the_tokens(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(2, 1, 64, 32, QKV_FP16), test_policy(4, 2, 0), 64 * 3 + 10, false);
  append(&s, 1, 0, 64 * 3 + 10);
  for (uint64_t n = 0; n < 30; n++) attend(&s, 1, n);
  qkv_retier_report report = {0};
  qkv_attention_stats stats;
  assert_int_equal(
      qkv_session_demote(s.session, &(qkv_retier_scope){.begin = 64, .end = 128}, 1, true, &report, NULL), QKV_OK);
  assert_int_equal(qkv_session_read_attention(s.session, 1, 0, &stats, NULL), QKV_OK);
  assert_true(stats.counted);
  assert_int_equal(stats.queries, 30);
  assert_int_equal(stats.buckets, 202);
  assert_int_equal(stats.tokens_per_bucket, 1);
  for (uint32_t h = 0; h < 2; h++) {
    double sum = 0;
    for (size_t t = 0; t < 202; t++) {
      const double bits = t < 64 ? (4.0 * 64 + 2 * 32) / 96 : t < 128 ? 1 : t < 192 ? (4.0 * 64 + 2 * 32) / 96 : 16;
      assert_float_equal(stats.bits[h * 202 + t], bits, 1e-5);
      assert_true(t < 192 ? stats.ema[h * 202 + t] > 0 : stats.ema[h * 202 + t] == 0);
      sum += (double)stats.ema[h * 202 + t];
    }
    assert_true(sum > 0.7 && sum < 1);  // the rest is the exact rows'
  }
  qkv_attention_stats coarse;
  assert_int_equal(qkv_session_read_attention(s.session, 1, 10, &coarse, NULL), QKV_OK);
  assert_int_equal(coarse.tokens_per_bucket, 21);
  assert_int_equal(coarse.buckets, 10);
  for (uint32_t h = 0; h < 2; h++) {
    for (size_t b = 0; b < 10; b++) {
      double ema = 0, bits = 0, n = 0;
      for (size_t t = b * 21; t < (b + 1) * 21 && t < 202; t++, n++) {
        ema += (double)stats.ema[h * 202 + t];
        bits += (double)stats.bits[h * 202 + t];
      }
      assert_float_equal(coarse.ema[h * 10 + b], ema / n, 1e-6);
      assert_float_equal(coarse.bits[h * 10 + b], bits / n, 1e-4);
    }
  }
  qkv_attention_stats_deinit(&coarse);
  qkv_attention_stats_deinit(&stats);
  assert_int_equal(qkv_session_read_attention(s.session, 0, 10, &stats, NULL), QKV_OK);  // nothing there
  assert_int_equal(stats.buckets, 0);
  qkv_attention_stats_deinit(&stats);
  assert_int_equal(qkv_session_read_attention(s.session, 4, 10, &stats, NULL), QKV_INVALID_ARGUMENT);
  teardown_scene(&s);
}

// ---- Memory of the process ----

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const bool measured = false;  // their allocators keep what is freed
#else
static const bool measured = true;
#endif

static uint64_t resident_bytes(void) {
  unsigned long long all, resident;
  FILE *file = fopen("/proc/self/statm", "r");
  assert_non_null(file);
  assert_int_equal(fscanf(file, "%llu %llu", &all, &resident), 2);
  (void)fclose(file);
  return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

// Memory freed to the arena goes back to the system, but for a rest.
static void demoting_shrinks_the_process(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(8, 1, 128, 128, QKV_FP16), test_policy(4, 4, 0), 64, false);
  row_pair pair;
  make_pair(&pair, &s.rows, 0, 64, QKV_FP16);
  for (uint64_t position = 0; position < 64 * 512; position += 64) {
    uint64_t appended, length;
    assert_int_equal(qkv_session_append(s.session, (uint32_t)(position / 64 % 4), position / 256 * 64, &pair.k.tensor,
                                        &pair.v.tensor, false, &appended, &length, NULL),
                     QKV_OK);
  }
  free_pair(&pair);
  qkv_retier_report report = {0};
  const uint64_t before = resident_bytes();
  assert_int_equal(qkv_session_demote(s.session, &(qkv_retier_scope){0}, 1, true, &report, NULL), QKV_OK);
  qkv_heap_trim(qkv_arena_heap(s.arena), 0);
  const uint64_t after = resident_bytes();
  assert_int_equal(report.pages, 512);
  assert_true(report.bytes_freed > 23 << 20);
  if (measured) {
    printf("freed %.1f MiB, resident memory fell by %.1f MiB\n", (double)report.bytes_freed * 0x1p-20,
           ((double)before - (double)after) * 0x1p-20);
    assert_true(before > after + report.bytes_freed * 3 / 4);
  }
  teardown_scene(&s);
}

// ---- All at once ----

enum { THREADS_TOKENS = 64 * 30, ROUNDS = 120 };

typedef struct crowd {
  scene s;
  qkv_calibration_slot *slot;
  const qkv_calibration *calibrations[2];
  _Atomic bool done;
} crowd;

static void *append_and_truncate(void *context) {
  crowd *c = context;
  uint64_t seed = 1;
  for (int round = 0; round < ROUNDS; round++) {
    const uint32_t layer = (uint32_t)random_below(&seed, 2);
    uint64_t lengths[4];
    qkv_session_info info;
    qkv_session_read_info(c->s.session, &info, lengths);
    uint64_t end = lengths[layer] + 1 + random_below(&seed, 130);
    if (end > THREADS_TOKENS) end = THREADS_TOKENS;
    if (end > lengths[layer]) append(&c->s, layer, lengths[layer], end);
    if (random_below(&seed, 8) == 0) {
      assert_int_equal(qkv_session_truncate(c->s.session, random_below(&seed, end), &layer, 1, NULL), QKV_OK);
    }
  }
  atomic_store(&c->done, true);
  return NULL;
}

static void *attend_on(void *context) {
  crowd *c = context;
  for (uint64_t n = 0; !atomic_load(&c->done); n++) attend(&c->s, (uint32_t)(n % 2), n);
  return NULL;
}

static void *retier_on(void *context) {
  crowd *c = context;
  uint64_t seed = 2;
  do {
    qkv_retier_report report = {0};
    qkv_retier_policy policy = QKV_RETIER_POLICY;
    policy.bits = 1 + 0.5 * (double)random_below(&seed, 5);
    policy.pages_max = random_below(&seed, 5);
    const qkv_retier_scope scope = {.begin = random_below(&seed, 500)};
    const uint64_t what = random_below(&seed, 4);
    qkv_status status = QKV_OK;
    if (what == 0) status = qkv_session_demote(c->s.session, &scope, policy.bits, true, &report, NULL);
    if (what == 1) status = qkv_session_promote(c->s.session, &scope, policy.bits, &report, NULL);
    if (what > 1) status = qkv_session_retier(c->s.session, &policy, NULL, &report, NULL);
    assert_true(status == QKV_OK || (what == 1 && status == QKV_FAILED_PRECONDITION));
    qkv_attention_stats stats;
    assert_int_equal(qkv_session_read_attention(c->s.session, (uint32_t)random_below(&seed, 2), 20, &stats, NULL),
                     QKV_OK);
    qkv_attention_stats_deinit(&stats);
  } while (!atomic_load(&c->done));
  return NULL;
}

// One calibration after the other, so that codings come and go.
static void *calibrate_on(void *context) {
  crowd *c = context;
  for (size_t i = 0; !atomic_load(&c->done); i++) {
    qkv_calibration_slot_set(c->slot, i % 3 == 2 ? NULL : c->calibrations[i % 3]);
    // Behind the end: nothing goes but codings.
    assert_int_equal(qkv_session_truncate(c->s.session, THREADS_TOKENS, NULL, 0, NULL), QKV_OK);
  }
  return NULL;
}

static void calibrations_change_meanwhile(void **state) {
  (void)state;
  static void *(*const jobs[])(void *) = {append_and_truncate, attend_on, retier_on, retier_on, calibrate_on};
  enum { JOBS = sizeof jobs / sizeof *jobs };
  crowd c = {.slot = qkv_calibration_slot_create()};
  pthread_t threads[JOBS];
  qkv_model model = test_model(2, 2, 32, 32, QKV_FP16);
  for (uint64_t i = 0; i < 2; i++) c.calibrations[i] = test_calibration(&model, 5 + i);
  model.calibration = c.slot;
  setup_scene(&c.s, model, test_policy(4, 4, 16), THREADS_TOKENS, false);
  use_session(c.s.session);
  const uint64_t one = qkv_coding_bytes_held();
  for (size_t i = 0; i < JOBS; i++) assert_int_equal(pthread_create(&threads[i], NULL, jobs[i], &c), 0);
  for (size_t i = 0; i < JOBS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  check_layers(&c.s);
  for (size_t i = 0; i < 2; i++) qkv_calibration_unref(&c.calibrations[i]);
  qkv_calibration_slot_set(c.slot, NULL);
  assert_int_equal(qkv_session_truncate(c.s.session, 0, NULL, 0, NULL), QKV_OK);
  for (uint32_t layer = 0; layer < 2; layer++) append(&c.s, layer, 0, 1);
  assert_int_equal(qkv_coding_bytes_held(), one);
  assert_int_equal(qkv_calibration_bytes_held(), 0);
  teardown_scene(&c.s);
  qkv_calibration_slot_destroy(&c.slot);
}

static void everything_runs_together(void **state) {
  (void)state;
  for (int keep_full = 0; keep_full < 2; keep_full++) {
    static void *(*const jobs[])(void *) = {append_and_truncate, attend_on, attend_on, retier_on, retier_on};
    enum { JOBS = sizeof jobs / sizeof *jobs };
    crowd c;
    pthread_t threads[JOBS];
    setup_scene(&c.s, test_model(2, 2, 32, 32, QKV_FP16), test_policy(4, 4, 16), THREADS_TOKENS, keep_full);
    atomic_init(&c.done, false);
    for (size_t i = 0; i < JOBS; i++) assert_int_equal(pthread_create(&threads[i], NULL, jobs[i], &c), 0);
    for (size_t i = 0; i < JOBS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    check_layers(&c.s);
    teardown_scene(&c.s);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(demoting_frees_what_it_says),   cmocka_unit_test(promoting_needs_what_was_kept),
      cmocka_unit_test(steps_reach_the_budget),        cmocka_unit_test(statistics_are_those_of_the_tokens),
      cmocka_unit_test(demoting_shrinks_the_process),  cmocka_unit_test(everything_runs_together),
      cmocka_unit_test(calibrations_change_meanwhile),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
