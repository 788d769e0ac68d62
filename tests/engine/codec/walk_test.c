// Queries on their way over pages, against the definition of the attend frame.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/walk.h"
#include "tests/engine/codec/coder.h"

enum { TOKENS = QKV_PAGE_TOKENS };

typedef struct walk_case {
  uint16_t dim;
  size_t n;
  qkv_rope rope;
} walk_case;

static const walk_case cases[] = {
    {64, 1, {.theta = 10000}},
    {64, 5, {.theta = 10000, .interleaved = true}},
    {128, 4, {.theta = 500000}},
    {80, 3, {.theta = 500000, .width = 22}},
    {192, 8, {.theta = 1e6, .width = 48, .interleaved = true}},
    {64, 2, {.theta = 10000, .scaling = QKV_ROPE_YARN, .factor = 16, .original_max_position = 4096}},
    {128, 4, {.theta = 500000, .scaling = QKV_ROPE_LLAMA3, .factor = 8, .original_max_position = 8192}},
    {64, 3, {.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 2, .original_max_position = 2048}},
    {24, 2, {.theta = 2, .width = 16}},  // all pairs are plain
    {320, 32, {.theta = 1e6}},           // more than is kept
};
enum { CASES = sizeof cases / sizeof *cases };

static const uint64_t positions[] = {
    0, 64, 128, 1984, 1985, 2048, 4032, 4096, 4160, 8191, 8192, 8256, 123456, 1 << 20, ((uint64_t)1 << 40) + 17, 64};
enum { POSITIONS = sizeof positions / sizeof *positions };

typedef struct fixture {
  qkv_rope rope;
  qkv_phases *phases;
  owned_transform owned;
  size_t dim, n, coordinates;
  float *queries, *codes;
  qkv_walk *walk;
} fixture;

static void setup(fixture *f, const walk_case *c, naive_random *random) {
  qkv_error error = {0};
  *f = (fixture){.rope = c->rope, .dim = c->dim, .n = c->n};
  if (qkv_rope_resolve(&f->rope, c->dim, &error) != QKV_OK) fail_msg("%s", error.text);
  f->phases = qkv_phases_create(&f->rope);
  transform_init(&f->owned, random, c->dim, false, 2, &f->rope);
  transform_by_blocks(&f->owned, &f->rope);
  f->coordinates = c->dim - naive_below(random, c->dim / 2u);
  f->queries = coder_allocate(f->n * f->dim, sizeof(float));
  f->codes = coder_allocate(f->n * f->dim, sizeof(float));
  for (size_t i = 0; i < f->n * f->dim; i++) f->queries[i] = (float)naive_gaussian(random);
  f->walk = aligned_alloc(64, (sizeof *f->walk + 63) / 64 * 64);
  assert_non_null(f->walk);
  qkv_walk_start(f->walk, f->phases, &f->owned.transform, f->queries, f->n, f->coordinates);
}

static void teardown(fixture *f) {
  transform_deinit(&f->owned);
  qkv_phases_destroy(&f->phases);
  free(f->queries);
  free(f->codes);
  free(f->walk);
}

static void turn_pair(const qkv_rope *rope, uint32_t pair, long double angle, double *row) {
  double *first = row + qkv_rope_first(rope, pair), *second = row + qkv_rope_second(rope, pair);
  const double a = *first, b = *second, c = (double)cosl(angle), s = (double)sinl(angle);
  *first = a * c - b * s;
  *second = a * s + b * c;
}

static double length_of(const float *row, size_t dim) {
  double sum = 0;
  for (size_t i = 0; i < dim; i++) sum += (double)row[i] * (double)row[i];
  return sqrt(sum);
}

// In double, and how far whole numbers may be off.
static void check_codes(const fixture *f, uint64_t position, double share) {
  const double angles = 4 * 0x1p-52 * (double)position;
  for (size_t i = 0; i < f->n; i++) {
    double row[QKV_DIM_MAX];
    const double length = length_of(f->queries + i * f->dim, f->dim);
    for (size_t j = 0; j < f->dim; j++) row[j] = f->queries[i * f->dim + j];
    for (uint32_t pair = 0; pair < f->rope.width / 2; pair++) {
      turn_pair(&f->rope, pair, -coder_frame_angle(&f->rope, &f->owned.transform, position, pair), row);
    }
    for (size_t c = 0; c < f->dim; c++) {
      const float *line = f->owned.transform.synthesis + c * f->dim;
      double expected = 0;
      for (size_t j = 0; j < f->dim && c < f->coordinates; j++) expected += row[j] * (double)line[j];
      const double got = f->codes[i * f->dim + c], miss = fabs(got - expected);
      if (miss <= (share + angles) * length * length_of(line, f->dim)) continue;
      fail_msg("at %llu query %zu coordinate %zu is %g, expected %g", (unsigned long long)position, i, c, got,
               expected);
    }
  }
}

// The mean of what does not turn, and each slot's anchor.
static void check_scores(fixture *f, uint64_t position) {
  float scores[QKV_QUERY_BLOCK * TOKENS];
  const qkv_transform *transform = &f->owned.transform;
  for (size_t i = 0; i < f->n * TOKENS; i++) scores[i] = (float)(i % 7);
  qkv_walk_add_scores(f->walk, position, scores);
  for (size_t i = 0; i < f->n; i++) {
    const float *query = f->queries + i * f->dim;
    for (size_t t = 0; t < TOKENS; t++) {
      double anchor[QKV_DIM_MAX] = {0}, sum = (double)((i * TOKENS + t) % 7), size = 7;
      for (size_t j = 0; j < transform->anchor_pairs; j++) {
        const uint32_t pair = qkv_transform_anchored(transform, j);
        anchor[qkv_rope_first(&f->rope, pair)] = qkv_rope_magnitude(&f->rope) * (double)transform->anchor[2 * j];
        anchor[qkv_rope_second(&f->rope, pair)] = qkv_rope_magnitude(&f->rope) * (double)transform->anchor[2 * j + 1];
        const double frequency = qkv_rope_frequency(&f->rope, position + t, pair);
        turn_pair(&f->rope, pair, (long double)(position + t) * frequency, anchor);
      }
      for (size_t c = 0; c < f->dim; c++) {
        sum += (double)query[c] * (anchor[c] + (double)transform->mean[c]);
        size += fabs((double)query[c] * (anchor[c] + (double)transform->mean[c]));
      }
      const double allowed = (5e-5 + 8 * 0x1p-52 * (double)position) * size;
      if (fabs((double)scores[i * TOKENS + t] - sum) <= allowed) continue;
      fail_msg("at %llu query %zu slot %zu is %g, expected %g", (unsigned long long)position, i, t,
               (double)scores[i * TOKENS + t], sum);
    }
  }
}

static void pages_are_met_as_defined(void **state) {
  (void)state;
  naive_random random = {81};
  for (size_t i = 0; i < CASES; i++) {
    fixture f;
    setup(&f, &cases[i], &random);
    for (size_t p = 0; p < POSITIONS; p++) {
      qkv_walk_codes(f.walk, positions[p], f.codes);
      check_codes(&f, positions[p], 1e-4);
      check_scores(&f, positions[p]);
      qkv_walk_exact(f.walk, positions[p], f.queries, f.codes);
      check_codes(&f, positions[p], 2e-6);
    }
    teardown(&f);
  }
}

// Whatever pages a query has met before, and with whichever others, it gets the same bits.
static void the_way_does_not_matter(void **state) {
  (void)state;
  naive_random random = {82};
  for (size_t i = 0; i < CASES; i++) {
    fixture f;
    setup(&f, &cases[i], &random);
    qkv_walk *fresh = aligned_alloc(64, (sizeof *fresh + 63) / 64 * 64);
    assert_non_null(fresh);
    uint64_t position = (uint64_t)100 * TOKENS;
    for (int step = 0; step < (f.n > 8 ? 40 : 200); step++) {
      float alone[QKV_DIM_MAX], scores[2][QKV_QUERY_BLOCK * TOKENS];
      const size_t which = naive_below(&random, (uint32_t)f.n);
      qkv_walk_codes(f.walk, position, f.codes);
      memset(scores, 0, sizeof scores);
      qkv_walk_add_scores(f.walk, position, scores[0]);
      qkv_walk_start(fresh, f.phases, &f.owned.transform, f.queries + which * f.dim, 1, f.coordinates);
      qkv_walk_codes(fresh, position, alone);
      qkv_walk_add_scores(fresh, position, scores[1]);
      assert_memory_equal(f.codes + which * f.dim, alone, f.dim * sizeof *alone);
      assert_memory_equal(scores[0] + which * TOKENS, scores[1], TOKENS * sizeof *alone);
      // On, now and then by a short page or far, or back.
      position += step % 50 == 49 ? naive_below(&random, 100000) : step % 20 == 19 ? 17 : TOKENS;
      if (step % 70 == 69) position /= 2;
    }
    free(fresh);
    teardown(&f);
  }
}

static void zeros_are_zeros(void **state) {
  (void)state;
  naive_random random = {83};
  fixture f;
  setup(&f, &cases[2], &random);
  memset(f.queries, 0, f.n * f.dim * sizeof *f.queries);
  qkv_walk_start(f.walk, f.phases, &f.owned.transform, f.queries, f.n, f.coordinates);
  qkv_walk_codes(f.walk, 640, f.codes);
  for (size_t i = 0; i < f.n * f.dim; i++) assert_true(f.codes[i] == 0);
  teardown(&f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(pages_are_met_as_defined),
      cmocka_unit_test(the_way_does_not_matter),
      cmocka_unit_test(zeros_are_zeros),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
