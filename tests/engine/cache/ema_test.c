// Averages of attention: their arithmetic, and that attend feeds them with its own weights.
#include "engine/cache/ema.h"

#include <time.h>

#include "tests/engine/cache/retier_fixture.h"

static const qkv_ema_options every = {.alpha = 0.9, .sample_every = 1};

static void options_have_limits(void **state) {
  (void)state;
  qkv_error error = {0};
  assert_int_equal(qkv_ema_check(&every, &error), QKV_OK);
  assert_int_equal(qkv_ema_check(&(qkv_ema_options){.alpha = 7, .sample_every = 0}, &error), QKV_OK);
  assert_int_equal(qkv_ema_check(&(qkv_ema_options){.alpha = 1, .sample_every = 2}, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "ema-alpha is 1, allowed are 0 (not included) to 0.99999");
  assert_int_equal(qkv_ema_check(&(qkv_ema_options){.alpha = (double)NAN, .sample_every = 2}, NULL),
                   QKV_INVALID_ARGUMENT);
  assert_null(qkv_ema_clock_create(&(qkv_ema_options){0}, 2));
}

static void one_block_in_so_many_is_due(void **state) {
  (void)state;
  qkv_ema_clock *clock = qkv_ema_clock_create(&(qkv_ema_options){.alpha = 0.9, .sample_every = 4}, 1);
  uint64_t due = 0, stood_for = 0, queries = 0;
  uint64_t seed = 5;
  for (int i = 0; i < 1000; i++) {
    const uint64_t n = 1 + random_below(&seed, 3);
    qkv_ema_step step;
    queries += n;
    if (!qkv_ema_clock_count(clock, n, 1, &step)) continue;
    assert_int_equal(step.now, queries);
    stood_for += step.queries;
    assert_int_equal(stood_for, queries);  // every query is stood for once
    due++;
  }
  assert_int_equal(due, 250);
  assert_int_equal(qkv_ema_clock_now(clock), queries);
  // A large one is due whatever came before.
  qkv_ema_step step;
  assert_true(qkv_ema_clock_count(clock, 100, 4, &step));
  qkv_ema_clock_destroy(&clock);
  assert_null(clock);
}

// Against the definition, query by query in double, with samples that stand for several queries.
static void averages_follow_the_definition(void **state) {
  (void)state;
  const qkv_ema_options options = {.alpha = 0.97, .sample_every = 1};
  qkv_ema_clock *clock = qkv_ema_clock_create(&options, 3);
  qkv_ema *ema = malloc(qkv_ema_bytes(3));
  assert_non_null(ema);
  double expected[QKV_PAGE_TOKENS] = {0};
  float values[QKV_PAGE_TOKENS];
  uint64_t seed = 6, now = 1000;
  qkv_ema_init(ema, 3, now);
  for (int round = 0; round < 300; round++) {
    float attention[QKV_PAGE_TOKENS];
    const uint64_t n = 1 + random_below(&seed, 20);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      attention[t] = (float)(random_below(&seed, 1 << 20)) * 0x1p-20f * exp2f(-(float)(t % 32) / 2);
    }
    now += n;
    qkv_ema_add(ema, clock, 1, &(qkv_ema_step){.now = now, .queries = n}, attention);
    for (uint64_t i = 0; i < n; i++) {
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
        expected[t] = 0.97 * expected[t] + 0.03 * (double)attention[t];
      }
    }
  }
  qkv_ema_read(ema, clock, 1, now, values);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    assert_true(fabs((double)values[t] - expected[t]) <= 0.002 * expected[t] + 0x1p-30);
  }
  // Without attention it fades, though nothing touches it.
  qkv_ema_read(ema, clock, 1, now + 50, values);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    assert_true(fabs((double)values[t] - expected[t] * pow(0.97, 50)) <= 0.002 * expected[t] + 0x1p-30);
  }
  assert_true(qkv_ema_seen(ema, 1));
  assert_false(qkv_ema_seen(ema, 0));
  qkv_ema_read(ema, clock, 0, now, values);  // no query asked the other heads
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) assert_true(values[t] == 0);
  free(ema);
  qkv_ema_clock_destroy(&clock);
}

// Constant attention is the average from the first sample on, however old the layer is.
static void young_pages_are_not_underrated(void **state) {
  (void)state;
  const qkv_ema_options options = {.alpha = 0.999, .sample_every = 1};
  qkv_ema_clock *clock = qkv_ema_clock_create(&options, 1);
  qkv_ema *ema = malloc(qkv_ema_bytes(1));
  assert_non_null(ema);
  float attention[QKV_PAGE_TOKENS], values[QKV_PAGE_TOKENS];
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) attention[t] = 0.25f / (float)(1 + t);
  qkv_ema_init(ema, 1, 100);
  qkv_ema_read(ema, clock, 0, 100, values);
  assert_true(values[0] == 0);
  for (uint64_t now = 103; now < 140; now += 16) {  // the first sample stands for more than the page has seen
    qkv_ema_add(ema, clock, 0, &(qkv_ema_step){.now = now, .queries = 16}, attention);
    qkv_ema_read(ema, clock, 0, now, values);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) assert_float_equal(values[t] / attention[t], 1, 0.003);
  }
  free(ema);
  qkv_ema_clock_destroy(&clock);
}

// ---- Fed by attend ----

// What the averages should be after one request, all of whose rows are looked at.
static void check_averages(const question *asked, double share) {
  const qkv_layer *layer = asked->request.layer;
  const qkv_model *model = layer->config.model;
  const int64_t queries = asked->request.q.dims[0];
  const uint32_t group = model->q_heads / model->kv_heads;
  float *k = decoded_rows(layer, QKV_K), values[QKV_PAGE_TOKENS];
  double *weights = calloc(layer->length, sizeof *weights), *mean = calloc(layer->length, sizeof *mean);
  double *of_ranges = calloc(layer->range_count + 1, sizeof *of_ranges);
  for (uint32_t h = 0; h < model->kv_heads; h++) {
    memset(mean, 0, layer->length * sizeof *mean);
    for (int64_t query = 0; query < queries; query++) {
      for (uint32_t g = 0; g < group; g++) {
        exact_weights(asked, k, query, h * group + g, weights);
        for (uint64_t t = 0; t < layer->length; t++) mean[t] += weights[t] / (double)(queries * group);
      }
    }
    for (size_t i = 0; i < layer->page_count; i++) {
      const qkv_page_entry *entry = qkv_layer_page(layer, i);
      // Undo what corrects for youth: all pages were sealed before the first query.
      qkv_ema_read(qkv_layer_ema(layer, i), layer->clock, h, qkv_ema_clock_now(layer->clock), values);
      for (uint32_t t = 0; t < entry->tokens; t++) {
        const double expected = mean[entry->position + t];
        of_ranges[qkv_layer_range_of(layer, i)] += expected / model->kv_heads;
        if (!(fabs((double)values[t] - expected) <= 0.003 * expected + 0x1p-28 / share)) {
          fail_msg("head %u token %u: %g, expected %g", h, (unsigned)entry->position + t, (double)values[t],
                   expected);
        }
      }
    }
  }
  for (size_t i = 0; i < layer->range_count; i++) {
    const double got = (double)qkv_ema_average(&atomic_load(&layer->ranges[i].emas)->attention);
    if (!(fabs(got - of_ranges[i]) <= 0.003 * of_ranges[i] + 0x1p-28))
      fail_msg("range %zu: %g, expected %g", i, got, of_ranges[i]);
  }
  free(k);
  free(weights);
  free(mean);
  free(of_ranges);
}

static void attend_counts_its_own_weights(void **state) {
  (void)state;
  static const struct {
    uint32_t kv_heads, group;
    int64_t queries;
    uint64_t window;
    double soft_cap;
  } cases[] = {{1, 1, 1, 0, 0}, {2, 4, 1, 0, 0}, {2, 4, 5, 0, 0}, {3, 2, 1, 100, 0}, {2, 8, 4, 200, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    scene s;
    question asked;
    qkv_model model = test_model(cases[i].kv_heads, cases[i].group, 64, 32, QKV_FP16);
    model.sliding_window = cases[i].window;
    setup_scene(&s, model, test_policy(4, 3, 20), 700, every, false);
    must_append(&s.layer, &s.rows, 0, 700);
    ask(&asked, &s.layer, cases[i].queries, 700 - (uint64_t)cases[i].queries, 7, 3);
    run(NULL, &asked.request);
    check_averages(&asked, 1 - pow(0.9, (double)cases[i].queries));
    // The same queries again change nothing: the average of equals.
    run(NULL, &asked.request);
    check_averages(&asked, 1 - pow(0.9, 2 * (double)cases[i].queries));
    float size = 0;
    const size_t n = (size_t)cases[i].queries * s.model.q_heads * 64;
    for (size_t c = 0; c < n; c++) size += asked.q[c] * asked.q[c] * (float)square(s.model.scale);
    float measured = 0;
    for (uint32_t h = 0; h < s.model.kv_heads; h++) measured += qkv_ema_clock_size(s.layer.clock, h);
    assert_float_equal(measured / (float)s.model.kv_heads, size / (float)n, 1e-4f * size / (float)n);
    forget(&asked);
    teardown_scene(&s);
  }
}

// The answers are the same bits with counting and without, and the averages with a pool and without.
static void counting_changes_no_answer(void **state) {
  (void)state;
  qkv_pool *pool = NULL;
  assert_int_equal(qkv_pool_create(3, 16, &pool, NULL), QKV_OK);
  const qkv_model model = test_model(2, 4, 64, 64, QKV_FP16);
  scene plain, counted, pooled;
  setup_scene(&plain, model, test_policy(3, 3, 0), 64 * 130, (qkv_ema_options){0}, false);
  setup_scene(&counted, model, test_policy(3, 3, 0), 64 * 130, every, false);
  setup_scene(&pooled, model, test_policy(3, 3, 0), 64 * 130, every, false);
  scene *all[] = {&plain, &counted, &pooled};
  question asked[3];
  for (size_t i = 0; i < 3; i++) {
    must_append(&all[i]->layer, &all[i]->rows, 0, 64 * 130);
    ask(&asked[i], &all[i]->layer, 2, 64 * 130, 8, 2);
    run(i == 2 ? pool : NULL, &asked[i].request);
    assert_memory_equal(asked[i].request.out, asked[0].request.out, 2 * 8 * 64 * sizeof(float));
    assert_memory_equal(asked[i].request.lse, asked[0].request.lse, 2 * 8 * sizeof(float));
  }
  for (size_t i = 0; i < counted.layer.page_count; i++) {
    assert_memory_equal(qkv_layer_ema(&counted.layer, i), qkv_layer_ema(&pooled.layer, i), qkv_ema_bytes(2));
  }
  assert_int_equal(qkv_ema_clock_now(counted.layer.clock), 2);
  assert_null(plain.layer.clock);
  for (size_t i = 0; i < 3; i++) {
    forget(&asked[i]);
    teardown_scene(all[i]);
  }
  qkv_pool_destroy(&pool);
}

// The shares of a part of the tokens are no shares of all.
static void parts_are_not_counted(void **state) {
  (void)state;
  scene s;
  question asked;
  setup_scene(&s, test_model(1, 1, 16, 16, QKV_FP16), test_policy(4, 4, 0), 300, every, false);
  must_append(&s.layer, &s.rows, 0, 300);
  ask(&asked, &s.layer, 1, 300, 9, 1);
  asked.request.options.begin = 64;
  run(NULL, &asked.request);
  asked.request.options.begin = 0;
  asked.request.options.end = 200;
  run(NULL, &asked.request);
  assert_int_equal(qkv_ema_clock_now(s.layer.clock), 0);
  asked.request.options.end = 256;  // all that is in pages
  run(NULL, &asked.request);
  assert_int_equal(qkv_ema_clock_now(s.layer.clock), 1);
  forget(&asked);
  teardown_scene(&s);
}

// The averages are the arena's, and go with their page.
static void averages_are_paid_for(void **state) {
  (void)state;
  scene with, without;
  const qkv_model model = test_model(2, 1, 16, 16, QKV_FP16);
  setup_scene(&with, model, test_policy(4, 4, 0), 64 * 5, every, false);
  setup_scene(&without, model, test_policy(4, 4, 0), 64 * 5, (qkv_ema_options){0}, false);
  must_append(&with.layer, &with.rows, 0, 64 * 5);
  must_append(&without.layer, &without.rows, 0, 64 * 5);
  const uint64_t cost = qkv_arena_cost(qkv_ema_bytes(2));
  assert_int_equal(qkv_arena_read(with.arena).bytes_used, qkv_arena_read(without.arena).bytes_used + 5 * cost);
  assert_int_equal(qkv_layer_read_usage(&with.layer).bytes_overhead, 5 * cost);
  assert_int_equal(qkv_layer_read_usage(&with.layer).bytes_coded, qkv_layer_read_usage(&without.layer).bytes_coded);
  assert_valid(&with.layer);
  qkv_layer_truncate(&with.layer, 100);
  assert_int_equal(qkv_layer_read_usage(&with.layer).bytes_overhead, 2 * cost);
  assert_valid(&with.layer);
  teardown_scene(&with);
  teardown_scene(&without);
}

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

// What looking at one attend takes: the median of those that are looked at against that of those that are not, in
// turn. No test of speed, which machines differ in: it prints the figure that attend_sample.c names.
static void a_look_takes_part_of_an_attend(void **state) {
  (void)state;
  enum { TOKENS = 64 * 64, ROUNDS = 15 };
  static const double bits[] = {4, 2};
  for (size_t i = 0; i < 2; i++) {
    scene s;
    question asked;
    double plain[ROUNDS], counted[ROUNDS];
    setup_scene(&s, test_model(2, 4, 128, 128, QKV_FP16), test_policy(bits[i], bits[i], 0), TOKENS, every, false);
    must_append(&s.layer, &s.rows, 0, TOKENS);
    ask(&asked, &s.layer, 1, TOKENS, 8, 1);
    for (int round = 0; round < ROUNDS; round++) {
      s.layer.clock->sample_every = 1u << 30;
      double begin = now_us();
      run(NULL, &asked.request);
      plain[round] = now_us() - begin;
      s.layer.clock->sample_every = 1;
      begin = now_us();
      run(NULL, &asked.request);
      counted[round] = now_us() - begin;
    }
    qsort(plain, ROUNDS, sizeof *plain, by_size);
    qsort(counted, ROUNDS, sizeof *counted, by_size);
    const double extra = (counted[ROUNDS / 2] - plain[ROUNDS / 2]) / plain[ROUNDS / 2];
    printf("%g bits, 2 x 4 heads of 128, %d tokens: attend %.0f us, a look %.0f %% more, %.1f %% on average\n",
           bits[i], TOKENS, plain[ROUNDS / 2], 100 * extra, 100 * extra / QKV_EMA_SAMPLE_EVERY);
    forget(&asked);
    teardown_scene(&s);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(options_have_limits),
      cmocka_unit_test(one_block_in_so_many_is_due),
      cmocka_unit_test(averages_follow_the_definition),
      cmocka_unit_test(young_pages_are_not_underrated),
      cmocka_unit_test(attend_counts_its_own_weights),
      cmocka_unit_test(counting_changes_no_answer),
      cmocka_unit_test(parts_are_not_counted),
      cmocka_unit_test(averages_are_paid_for),
      cmocka_unit_test(a_look_takes_part_of_an_attend),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
