// Phases by the page against rope.h, row by row.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/phases.h"
#include "tests/engine/codec/coder.h"

enum { TOKENS = QKV_PAGE_TOKENS, DIM_MAX = 192 };

typedef struct rope_case {
  uint32_t dim;
  qkv_rope rope;
} rope_case;

static const rope_case cases[] = {
    {64, {.theta = 10000}},
    {64, {.theta = 10000, .interleaved = true}},
    {80, {.theta = 500000, .width = 32}},
    {192, {.theta = 1e6, .width = 48, .interleaved = true}},
    {128, {.theta = 10000, .scaling = QKV_ROPE_LINEAR, .factor = 4}},
    {64, {.theta = 10000, .scaling = QKV_ROPE_YARN, .factor = 16, .original_max_position = 4096}},
    {128,
     {.theta = 500000, .scaling = QKV_ROPE_LLAMA3, .factor = 8, .original_max_position = 8192, .interleaved = true}},
    {64, {.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 2, .original_max_position = 2048}},
    {40, {.theta = 10000, .width = 8, .scaling = QKV_ROPE_DYNAMIC, .factor = 3, .original_max_position = 100}},
};
enum { CASES = sizeof cases / sizeof *cases };

// In the table's first pages and far beyond it, at the ends of a trained length and across, anywhere.
static const uint64_t positions[] = {
    0,
    1,
    37,
    64,
    1984,
    1985,
    2047,
    2048,
    4032,
    4096,
    8191,
    8192,
    123456,
    1 << 20,
    (1ull << 31) - 5,
    (1ull << 40) + 17,
};
enum { POSITIONS = sizeof positions / sizeof *positions };

static qkv_rope resolved(const rope_case *c) {
  qkv_rope rope = c->rope;
  qkv_error error = {0};
  if (qkv_rope_resolve(&rope, c->dim, &error) != QKV_OK) fail_msg("%s", error.text);
  return rope;
}

// Of rows of length 1 in every pair: rounding to float, and the angle, which a double counts in steps of its own.
static double tolerance(uint64_t position) {
  return 2e-6 + 3 * 0x1p-52 * (double)position;
}

static void fill(naive_random *random, float *numbers, size_t n) {
  for (size_t i = 0; i < n; i++) numbers[i] = (float)naive_gaussian(random);
}

static double largest(const float *row, size_t dim) {
  double most = 0;
  for (size_t c = 0; c < dim; c++) most = fmax(most, fabs((double)row[c]));
  return most;
}

static void check_rows(const float *got, const float *expected, size_t tokens, size_t dim, uint64_t position) {
  for (size_t t = 0; t < tokens; t++) {
    const double allowed = tolerance(position + t) * (1 + largest(expected + t * dim, dim));
    for (size_t c = 0; c < dim; c++) {
      if (fabs((double)got[t * dim + c] - (double)expected[t * dim + c]) <= allowed) continue;
      fail_msg("position %llu coordinate %zu is %.9g, expected %.9g", (unsigned long long)(position + t), c,
               got[t * dim + c], expected[t * dim + c]);
    }
  }
}

static void rows_turn_as_one_by_one(void **state) {
  (void)state;
  naive_random random = {51};
  static float rows[TOKENS * DIM_MAX], got[TOKENS * DIM_MAX], expected[TOKENS * DIM_MAX];
  for (size_t i = 0; i < CASES; i++) {
    const qkv_rope rope = resolved(&cases[i]);
    const size_t dim = cases[i].dim;
    qkv_phases *phases = qkv_phases_create(&rope);
    for (size_t p = 0; p < POSITIONS; p++) {
      const size_t tokens = p % 3 == 0 ? TOKENS : 1 + naive_below(&random, TOKENS);
      fill(&random, rows, tokens * dim);
      memcpy(got, rows, sizeof rows);
      memcpy(expected, rows, sizeof rows);
      qkv_phases_forward(phases, positions[p], tokens, dim, got);
      for (size_t t = 0; t < tokens; t++) qkv_rope_forward(&rope, expected + t * dim, positions[p] + t);
      check_rows(got, expected, tokens, dim, positions[p]);
      qkv_phases_inverse(phases, positions[p], tokens, dim, got);
      check_rows(got, rows, tokens, dim, 0);

      memcpy(got, rows, sizeof rows);
      memcpy(expected, rows, sizeof rows);
      qkv_phases_inverse(phases, positions[p], tokens, dim, got);
      for (size_t t = 0; t < tokens; t++) qkv_rope_inverse(&rope, expected + t * dim, positions[p] + t);
      check_rows(got, expected, tokens, dim, positions[p]);
      for (size_t t = 0; t < tokens; t++) {
        assert_memory_equal(got + t * dim + rope.width, rows + t * dim + rope.width,
                            (dim - rope.width) * sizeof(float));
      }
    }
    qkv_phases_destroy(&phases);
    assert_null(phases);
  }
}

// ---- Attend frame, straight from its definition ----

static long double angle_at(const qkv_rope *rope, uint64_t position, uint32_t pair) {
  return (long double)position * qkv_rope_frequency(rope, position, pair);
}

// A pair of a row, turned by an angle.
static void turn_pair(const qkv_rope *rope, uint32_t pair, long double angle, double *row) {
  double *first = row + qkv_rope_first(rope, pair), *second = row + qkv_rope_second(rope, pair);
  const double a = *first, b = *second, c = (double)cosl(angle), s = (double)sinl(angle);
  *first = a * c - b * s;
  *second = a * s + b * c;
}

// A row, or a query, turned back as the transform says.
static void turn_back(const qkv_rope *rope, const qkv_transform *transform, uint64_t position, const float *from,
                      double *row) {
  for (size_t c = 0; c < transform->schedule->dim; c++) row[c] = from[c];
  for (uint32_t pair = 0; pair < rope->width / 2; pair++) {
    turn_pair(rope, pair, -coder_frame_angle(rope, transform, position, pair), row);
  }
}

// The anchor of a position, on a page from `begin` on.
static void anchor_row(const qkv_rope *rope, const qkv_transform *transform, uint64_t begin, uint64_t position,
                       double *row) {
  for (size_t c = 0; c < transform->schedule->dim; c++) row[c] = 0;
  for (size_t i = 0; i < transform->anchor_pairs; i++) {
    const uint32_t pair = qkv_transform_anchored(transform, i);
    row[qkv_rope_first(rope, pair)] = qkv_rope_magnitude(rope) * transform->anchor[2 * i];
    row[qkv_rope_second(rope, pair)] = qkv_rope_magnitude(rope) * transform->anchor[2 * i + 1];
    turn_pair(rope, pair, angle_at(rope, position, pair) - coder_frame_angle(rope, transform, begin, pair), row);
  }
}

static void check_row(const float *got, const double *expected, size_t dim, uint64_t position) {
  double most = 1;
  for (size_t c = 0; c < dim; c++) most = fmax(most, fabs(expected[c]));
  for (size_t c = 0; c < dim; c++) {
    if (fabs(got[c] - expected[c]) <= 4 * tolerance(position) * most) continue;
    fail_msg("position %llu coordinate %zu is %.9g, expected %.9g", (unsigned long long)position, c, got[c],
             expected[c]);
  }
}

static void check_page(naive_random *random, const qkv_phases *phases, const qkv_rope *rope,
                       const qkv_transform *transform, uint64_t position) {
  static float rows[TOKENS * DIM_MAX], got[TOKENS * DIM_MAX], query[DIM_MAX], turned[DIM_MAX];
  static double anchors[TOKENS][DIM_MAX], expected[DIM_MAX];
  const size_t dim = transform->schedule->dim, tokens = 1 + naive_below(random, TOKENS);
  fill(random, rows, TOKENS * dim);
  memcpy(got, rows, sizeof rows);
  qkv_phases_to_page(phases, transform, position, tokens, got);
  for (size_t t = 0; t < TOKENS; t++) {
    anchor_row(rope, transform, position, position + t, anchors[t]);
    if (t >= tokens) continue;
    turn_back(rope, transform, position, rows + t * dim, expected);
    for (size_t c = 0; c < dim; c++) expected[c] -= anchors[t][c];
    check_row(got + t * dim, expected, dim, position);
  }
  qkv_phases_from_page(phases, transform, position, tokens, got);
  check_rows(got, rows, TOKENS, dim, 0);

  if (qkv_transform_by_blocks(transform)) return;  // walk_test.c
  qkv_phases_walk walk;
  float scores[TOKENS];
  fill(random, query, dim);
  turn_back(rope, transform, position, query, expected);
  qkv_phases_start(&walk);
  qkv_phases_turn_queries(phases, &walk, position, 1, dim, query, turned);
  check_row(turned, expected, dim, position);
  for (size_t t = 0; t < TOKENS; t++) scores[t] = (float)t;
  qkv_phases_add_scores(phases, transform, position, 1, turned, scores);
  for (size_t t = 0; t < TOKENS; t++) {
    double sum = (double)t, size = (double)t;
    for (size_t c = 0; c < dim; c++) {
      sum += turned[c] * anchors[t][c];
      size += fabs(turned[c] * anchors[t][c]);
    }
    assert_true(fabs(scores[t] - sum) <= 4 * tolerance(position) * (1 + size));
  }
}

static void pages_turn_as_defined(void **state) {
  (void)state;
  naive_random random = {52};
  for (size_t i = 0; i < CASES; i++) {
    const qkv_rope rope = resolved(&cases[i]);
    qkv_phases *phases = qkv_phases_create(&rope);
    for (int blocks = 0; blocks <= 1; blocks++) {
      owned_transform owned;
      transform_init(&owned, &random, (uint16_t)cases[i].dim, false, 1, &rope);
      owned.transform.plan = NULL;
      if (blocks) transform_by_blocks(&owned, &rope);
      assert_true(owned.transform.anchor_pairs > 0);
      for (size_t p = 0; p < POSITIONS; p++) check_page(&random, phases, &rope, &owned.transform, positions[p]);
      transform_deinit(&owned);
    }
    qkv_phases_destroy(&phases);
  }
}

// Whatever pages a query has met before, it gets the same bits: results must not depend on where a walk over pages
// began, nor on what other queries of the block see.
static void the_walk_does_not_matter(void **state) {
  (void)state;
  naive_random random = {53};
  float query[DIM_MAX], got[DIM_MAX], alone[DIM_MAX];
  for (size_t i = 0; i < CASES; i++) {
    const qkv_rope rope = resolved(&cases[i]);
    const size_t dim = cases[i].dim;
    qkv_phases *phases = qkv_phases_create(&rope);
    fill(&random, query, dim);
    qkv_phases_walk walk, fresh;
    qkv_phases_start(&walk);
    uint64_t position = (uint64_t)100 * TOKENS;
    for (int step = 0; step < 300; step++) {
      qkv_phases_turn_queries(phases, &walk, position, 1, dim, query, got);
      qkv_phases_start(&fresh);
      qkv_phases_turn_queries(phases, &fresh, position, 1, dim, query, alone);
      assert_memory_equal(got, alone, dim * sizeof *got);
      // On, now and then by a short page or far, or back.
      position += step % 50 == 49 ? naive_below(&random, 100000) : step % 20 == 19 ? 17 : TOKENS;
      if (step % 70 == 69) position /= 2;
    }
    qkv_phases_destroy(&phases);
  }
}

// However coarsely a double counts the angles, a query meets a key as if neither had been turned.
static void keys_and_queries_turn_alike(void **state) {
  (void)state;
  naive_random random = {55};
  for (size_t i = 0; i < CASES; i++) {
    const qkv_rope rope = resolved(&cases[i]);
    const size_t dim = cases[i].dim;
    const qkv_transform *transform = qkv_transform_uniform((uint16_t)dim);
    qkv_phases *phases = qkv_phases_create(&rope);
    for (unsigned octave = 13; octave <= 53; octave++) {
      float query[DIM_MAX], turned[DIM_MAX], row[DIM_MAX];
      double before = 0, after = 0, size = 0;
      // The last page of a span.
      const uint64_t position = ((uint64_t)1 << octave) - TOKENS;
      fill(&random, query, dim);
      fill(&random, row, dim);
      for (size_t c = 0; c < dim; c++) before += (double)query[c] * (double)row[c];
      for (size_t c = 0; c < dim; c++) size += fabs((double)query[c] * (double)row[c]);
      qkv_phases_walk walk;
      qkv_phases_start(&walk);
      qkv_phases_turn_queries(phases, &walk, position, 1, dim, query, turned);
      qkv_phases_to_page(phases, transform, position, 1, row);
      for (size_t c = 0; c < dim; c++) after += (double)turned[c] * (double)row[c];
      if (fabs(after - before) > 2e-6 * size) fail_msg("at 2^%u: %g, not %g", octave, after, before);
    }
    qkv_phases_destroy(&phases);
  }
}

// What a thread keeps of the last page is that of its phases alone.
static void models_take_turns(void **state) {
  (void)state;
  enum { DIM = 64, MODELS = 2 };
  static const rope_case models[MODELS] = {{DIM, {.theta = 10000}}, {DIM, {.theta = 500000}}};
  naive_random random = {55};
  qkv_phases *phases[MODELS];
  qkv_rope ropes[MODELS];
  owned_transform known[MODELS];
  float rows[TOKENS * DIM], got[TOKENS * DIM], expected[TOKENS * DIM];
  for (size_t m = 0; m < MODELS; m++) {
    ropes[m] = resolved(&models[m]);
    phases[m] = qkv_phases_create(&ropes[m]);
    transform_init(&known[m], &random, DIM, false, 1, &ropes[m]);
    known[m].transform.plan = NULL;
  }
  fill(&random, rows, TOKENS * DIM);
  for (size_t i = 0; i < 2 * MODELS; i++) {
    const size_t m = i % MODELS;
    memcpy(got, rows, sizeof rows);
    memcpy(expected, rows, sizeof rows);
    qkv_phases_forward(phases[m], 37, TOKENS, DIM, got);
    for (size_t t = 0; t < TOKENS; t++) qkv_rope_forward(&ropes[m], expected + t * DIM, 37 + t);
    check_rows(got, expected, TOKENS, DIM, 37);
  }
  for (size_t i = 0; i < 2 * MODELS; i++)
    check_page(&random, phases[i % MODELS], &ropes[i % MODELS], &known[i % MODELS].transform, 37);
  for (size_t m = 0; m < MODELS; m++) {
    transform_deinit(&known[m]);
    qkv_phases_destroy(&phases[m]);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_turn_as_one_by_one),  cmocka_unit_test(pages_turn_as_defined),
      cmocka_unit_test(the_walk_does_not_matter), cmocka_unit_test(keys_and_queries_turn_alike),
      cmocka_unit_test(models_take_turns),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
