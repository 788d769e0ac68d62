#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/checkkern/checkkern.h"

static const uint16_t dims[] = {8, 16, 24, 64, 80, 96, 128, 192, 256, 576, 1024};
static const size_t counts[] = {1, 2, 3, 4, 7, 8, 32};
enum { DIMS = sizeof dims / sizeof *dims, COUNTS = sizeof counts / sizeof *counts };

static uint64_t mix_bytes(uint64_t digest, const uint8_t *bytes, size_t n) {
  for (size_t i = 0; i < n; i += sizeof digest) {
    uint64_t word = 0;
    memcpy(&word, bytes + i, n - i < sizeof word ? n - i : sizeof word);
    digest = (digest ^ word) * 0x9e3779b97f4a7c15u;
    digest ^= digest >> 29;
  }
  return digest;
}

void check_same(checking *c, const char *kernel, const page_part *page, size_t n, const guarded *expected,
                const guarded *got) {
  const uint8_t *tiers = page->codes.tiers;
  size_t at = 0;
  c->digest = mix_bytes(c->digest, expected->data, expected->bytes);
  while (at < got->bytes && got->data[at] == expected->data[at]) at++;
  if (at == got->bytes && guarded_intact(got)) return;
  c->failures++;
  printf("%s %s %s, dim %u, tiers %u %u %u %u, %zu queries: ", c->variant->name, kernel,
         page->part == QKV_K ? "K" : "V", page->schedule.dim, tiers[0], tiers[1], tiers[2], tiers[3], n);
  if (at < got->bytes) {
    printf("byte %zu of %zu differs\n", at, got->bytes);
  } else {
    printf("wrote beyond its %zu bytes\n", got->bytes);
  }
}

bool check_equal_floats(const checking *c, const char *kernel, const float *expected, const float *got, size_t n) {
  for (size_t i = 0; i < n; i++) {
    if (memcmp(&expected[i], &got[i], sizeof *got) == 0) continue;
    printf("%s %s: number %zu is %.9g, expected %.9g\n", c->variant->name, kernel, i, (double)got[i],
           (double)expected[i]);
    return true;
  }
  return false;
}

static void check_scores(checking *c, const page_part *page, size_t n, input_kind kind) {
  guarded queries = guarded_make(n * page->schedule.dim * sizeof(float));
  fill_input(&c->random, kind, (float *)queries.data, n * page->schedule.dim);
  guarded expected = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float)), got = guarded_copy(&expected);
  qkv_kernels_at(0)->scores(&page->codes, (float *)queries.data, n, (float *)expected.data);
  c->variant->scores(&page->codes, (float *)queries.data, n, (float *)got.data);
  check_same(c, "scores", page, n, &expected, &got);
  guarded_free(&queries);
  guarded_free(&expected);
  guarded_free(&got);
}

static void check_accumulate(checking *c, const page_part *page, size_t n, input_kind kind) {
  guarded weights = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float));
  fill_input(&c->random, kind, (float *)weights.data, n * QKV_PAGE_TOKENS);
  guarded expected = guarded_make(n * page->schedule.dim * sizeof(float));
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)expected.data, n * page->schedule.dim);
  guarded got = guarded_copy(&expected);
  qkv_kernels_at(0)->accumulate(&page->codes, (float *)weights.data, n, (float *)expected.data);
  c->variant->accumulate(&page->codes, (float *)weights.data, n, (float *)got.data);
  check_same(c, "accumulate", page, n, &expected, &got);
  guarded_free(&weights);
  guarded_free(&expected);
  guarded_free(&got);
}

static void check_decode(checking *c, const page_part *page) {
  guarded expected = guarded_make((size_t)QKV_PAGE_TOKENS * page->schedule.dim * sizeof(float));
  guarded got = guarded_copy(&expected);
  qkv_kernels_at(0)->decode(page->part, &page->codes, (float *)expected.data);
  c->variant->decode(page->part, &page->codes, (float *)got.data);
  check_same(c, "decode", page, 0, &expected, &got);
  guarded_free(&expected);
  guarded_free(&got);
}

// Weights that differ as much as those of a calibration, for every other page.
static const float *some_weights(checking *c, size_t dim, float *weights) {
  static bool weighted;
  weighted = !weighted;
  for (size_t i = 0; i < dim; i++) weights[i] = (float)exp2(6 - (double)naive_below(&c->random, 20));
  return weighted ? weights : NULL;
}

static void check_encode(checking *c, qkv_part part, const qkv_schedule *schedule, unsigned tier, input_kind kind) {
  float buffer[QKV_DIM_MAX];
  const float *weights = some_weights(c, schedule->dim, buffer);
  const uint8_t tiers[QKV_PAGE_GROUPS] = {(uint8_t)tier, (uint8_t)tier, (uint8_t)tier, (uint8_t)tier};
  const page_part page = {
      .part = part, .schedule = *schedule, .codes.tiers = {tiers[0], tiers[1], tiers[2], tiers[3]}};
  guarded rows = guarded_make((size_t)QKV_PAGE_TOKENS * schedule->dim * sizeof(float));
  fill_rows(&c->random, kind, (float *)rows.data, schedule->dim);
  guarded gains = guarded_make(QKV_PAGE_TOKENS), gains_got = guarded_copy(&gains);
  guarded errors = guarded_make(QKV_PAGE_TOKENS * sizeof(float)), errors_got = guarded_copy(&errors);
  guarded codes = guarded_make(QKV_PAGE_GROUPS * qkv_schedule_group_bytes(schedule, tier));
  guarded codes_got = guarded_copy(&codes);
  qkv_kernels_at(0)->encode(part, schedule, tier, weights, (float *)rows.data, gains.data, codes.data,
                            (float *)errors.data);
  c->variant->encode(part, schedule, tier, weights, (float *)rows.data, gains_got.data, codes_got.data,
                     (float *)errors_got.data);
  check_same(c, "encode: gains,", &page, 0, &gains, &gains_got);
  check_same(c, "encode: codes,", &page, 0, &codes, &codes_got);
  check_same(c, "encode: errors,", &page, 0, &errors, &errors_got);
  guarded_free(&rows);
  guarded_free(&gains);
  guarded_free(&gains_got);
  guarded_free(&errors);
  guarded_free(&errors_got);
  guarded_free(&codes);
  guarded_free(&codes_got);
}

// Rows that lie apart, some of a page or all, and others to prefetch.
static void check_encode_rows(checking *c, qkv_part part, const qkv_schedule *schedule, unsigned tier,
                              input_kind kind) {
  static const qkv_dtype dtypes[] = {QKV_FP16, QKV_BF16, QKV_FP32};
  const qkv_dtype dtype = dtypes[naive_below(&c->random, 3)];
  const page_part page = {.part = part,
                          .schedule = *schedule,
                          .codes.tiers = {(uint8_t)tier, (uint8_t)tier, (uint8_t)tier, (uint8_t)tier}};
  const size_t bytes = schedule->dim * qkv_dtype_size(dtype), stride = bytes + 2 * naive_below(&c->random, 40);
  const size_t tokens =
      naive_below(&c->random, 2) == 0 ? QKV_PAGE_TOKENS : naive_below(&c->random, QKV_PAGE_TOKENS + 1);
  float *floats = malloc((size_t)QKV_PAGE_TOKENS * schedule->dim * sizeof *floats);
  assert(floats != NULL);
  fill_rows(&c->random, kind, floats, schedule->dim);
  for (size_t i = 0; i < (size_t)QKV_PAGE_TOKENS * schedule->dim; i++)
    floats[i] = fmaxf(fminf(floats[i], 6e4f), -6e4f);
  guarded data = guarded_make(tokens > 0 ? (tokens - 1) * stride + bytes : 0);
  for (size_t t = 0; t < tokens; t++) {
    qkv_from_float(dtype, floats + t * schedule->dim, data.data + t * stride, schedule->dim);
  }
  const qkv_rows next = {.dtype = dtype, .data = data.data, .stride = stride, .bytes = bytes};
  qkv_rows rows = next;
  if (naive_below(&c->random, 2) == 0) rows.next = &next;
  guarded gains = guarded_make(QKV_PAGE_TOKENS), gains_got = guarded_copy(&gains);
  guarded codes = guarded_make(QKV_PAGE_GROUPS * qkv_schedule_group_bytes(schedule, tier));
  guarded codes_got = guarded_copy(&codes);
  guarded measures = guarded_make(2 * QKV_PAGE_TOKENS * sizeof(float)), measures_got = guarded_copy(&measures);
  float *errors = (float *)measures.data, *errors_got = (float *)measures_got.data;
  qkv_kernels_at(0)->encode_rows(part, schedule, tier, &rows, tokens, gains.data, codes.data, errors,
                                 errors + QKV_PAGE_TOKENS);
  c->variant->encode_rows(part, schedule, tier, &rows, tokens, gains_got.data, codes_got.data, errors_got,
                          errors_got + QKV_PAGE_TOKENS);
  check_same(c, "encode_rows: gains,", &page, tokens, &gains, &gains_got);
  check_same(c, "encode_rows: codes,", &page, tokens, &codes, &codes_got);
  check_same(c, "encode_rows: errors and squares,", &page, tokens, &measures, &measures_got);
  guarded_free(&measures);
  guarded_free(&measures_got);
  free(floats);
  guarded_free(&data);
  guarded_free(&gains);
  guarded_free(&gains_got);
  guarded_free(&codes);
  guarded_free(&codes_got);
}

// Scores of a tile, some of them masked.
static void check_softmax(checking *c, input_kind kind) {
  guarded expected = guarded_make(QKV_PAGE_TOKENS * sizeof(float));
  float *scores = (float *)expected.data;
  fill_scores(&c->random, kind, scores, 1);
  guarded got = guarded_copy(&expected);
  const float largest = qkv_kernels_at(0)->largest(scores);
  const float largest_got = c->variant->largest((float *)got.data);
  const float peak = largest + (float)naive_below(&c->random, 3);
  const double sum = qkv_kernels_at(0)->weigh(scores, peak), sum_got = c->variant->weigh((float *)got.data, peak);
  const page_part none = {0};
  check_same(c, "weigh", &none, 0, &expected, &got);
  if (largest != largest_got || memcmp(&sum, &sum_got, sizeof sum) != 0) {
    c->failures++;
    printf("%s: largest %g for %g, sum %.17g for %.17g\n", c->variant->name, (double)largest_got, (double)largest,
           sum_got, sum);
  }
  guarded_free(&expected);
  guarded_free(&got);
}

// Runs both ways of a transform, one on what the other has made.
static void check_rows(checking *c, const char *name, const page_part *shape, size_t n, input_kind kind,
                       void (*run)(const qkv_kernels *kernels, bool back, float *rows, size_t n,
                                   const page_part *shape, const float *matrix),
                       const float *matrix) {
  guarded expected = guarded_make(n * shape->schedule.dim * sizeof(float));
  fill_input(&c->random, kind, (float *)expected.data, n * shape->schedule.dim);
  guarded got = guarded_copy(&expected);
  for (int back = 0; back <= 1; back++) {
    run(qkv_kernels_at(0), back, (float *)expected.data, n, shape, matrix);
    run(c->variant, back, (float *)got.data, n, shape, matrix);
    check_same(c, name, shape, n, &expected, &got);
  }
  guarded_free(&expected);
  guarded_free(&got);
}

static void run_hadamard(const qkv_kernels *kernels, bool back, float *rows, size_t n, const page_part *shape,
                         const float *matrix) {
  (void)matrix;
  (back ? kernels->hadamard_inverse : kernels->hadamard_forward)(rows, n, shape->schedule.dim);
}

// As many coordinates as the shape's tier has.
static void run_dense(const qkv_kernels *kernels, bool back, float *rows, size_t n, const page_part *shape,
                      const float *matrix) {
  (back ? kernels->combine : kernels->multiply)(matrix, shape->schedule.dim, shape->schedule.reach[0][0], rows, n);
}

// The sums that anchors are chosen by, and rows less the last one.
static void check_sums_of_rows(checking *c, uint16_t dim, input_kind kind) {
  const page_part shape = {.schedule.dim = dim};
  const size_t tokens = 1 + naive_below(&c->random, QKV_PAGE_TOKENS);
  float weights[QKV_DIM_MAX];
  guarded rows = guarded_make(tokens * dim * sizeof(float));
  fill_input(&c->random, kind, (float *)rows.data, tokens * dim);
  for (size_t i = 0; i < dim; i++) weights[i] = (float)naive_below(&c->random, 9) / 8;
  guarded expected = guarded_make(QKV_PAGE_GROUPS * dim * sizeof(float)), got = guarded_copy(&expected);
  double sums[2][2];
  qkv_kernels_at(0)->sums((float *)rows.data, tokens, dim, weights, (float *)expected.data, &sums[0][0], &sums[0][1]);
  c->variant->sums((float *)rows.data, tokens, dim, weights, (float *)got.data, &sums[1][0], &sums[1][1]);
  check_same(c, "sums of rows", &shape, 0, &expected, &got);
  if (memcmp(sums[0], sums[1], sizeof sums[0]) != 0) {
    c->failures++;
    printf("%s: sums of squares %.17g and %.17g for %.17g and %.17g\n", c->variant->name, sums[1][0], sums[1][1],
           sums[0][0], sums[0][1]);
  }
  guarded left = guarded_make(rows.bytes), left_got = guarded_copy(&left);
  const float *last = (float *)rows.data + (tokens - 1) * dim;
  qkv_kernels_at(0)->subtract((float *)rows.data, tokens, dim, last, (float *)left.data);
  c->variant->subtract((float *)rows.data, tokens, dim, last, (float *)left_got.data);
  check_same(c, "subtract", &shape, 0, &left, &left_got);
  guarded_free(&rows);
  guarded_free(&expected);
  guarded_free(&got);
  guarded_free(&left);
  guarded_free(&left_got);
}

static void check_transforms(checking *c, uint16_t dim, input_kind kind) {
  page_part shape = {.schedule.dim = dim};
  check_rows(c, "hadamard", &shape, 1 + naive_below(&c->random, 5), kind, run_hadamard, NULL);
  check_sums_of_rows(c, dim, kind);
  check_rows_of(c, dim, kind);
  if (dim > 256 && dim % 64 != 0) return;  // the reference takes long
  guarded matrix = guarded_make((size_t)dim * dim * sizeof(float));
  fill_input(&c->random, kind, (float *)matrix.data, (size_t)dim * dim);
  shape.schedule.reach[0][0] = (uint16_t)naive_below(&c->random, dim + 1u);
  check_rows(c, "dense", &shape, 1 + naive_below(&c->random, 9), kind, run_dense, (float *)matrix.data);
  shape.schedule.reach[0][0] = dim;
  check_rows(c, "dense", &shape, 4, kind, run_dense, (float *)matrix.data);
  guarded_free(&matrix);
}

static void check_page(checking *c, const qkv_schedule *schedule, const uint8_t tiers[QKV_PAGE_GROUPS], size_t n) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    page_part page;
    page_part_init(&page, &c->random, part, schedule, tiers);
    const input_kind kind = naive_below(&c->random, INPUT_KINDS);
    part == QKV_K ? check_scores(c, &page, n, kind) : check_accumulate(c, &page, n, kind);
    check_decode(c, &page);
    page_part_deinit(&page);
  }
}

unsigned check_tier_step(const checking *c, const qkv_schedule *schedule) {
  return c->every * (schedule->dim <= 64 ? 1 : schedule->dim <= 256 ? 5 : 13);
}

static void check_schedule(checking *c, const qkv_schedule *schedule) {
  const unsigned step = check_tier_step(c, schedule);
  for (unsigned tier = naive_below(&c->random, step); tier <= QKV_TIER_MAX; tier += step) {
    const uint8_t same[QKV_PAGE_GROUPS] = {(uint8_t)tier, (uint8_t)tier, (uint8_t)tier, (uint8_t)tier};
    check_page(c, schedule, same, counts[tier % COUNTS]);
    if (tier == 0) continue;
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      check_encode(c, part, schedule, tier, naive_below(&c->random, INPUT_KINDS));
      check_encode_rows(c, part, schedule, tier, naive_below(&c->random, INPUT_KINDS));
    }
  }
  for (size_t i = 0; i < COUNTS; i++) {
    uint8_t mixed[QKV_PAGE_GROUPS];
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) mixed[g] = (uint8_t)naive_below(&c->random, QKV_TIER_MAX + 1);
    check_page(c, schedule, mixed, counts[i]);
  }
}

size_t check_rung(const qkv_kernels *variant, unsigned every, uint64_t *digest) {
  checking c = {.variant = variant, .random = {1}, .every = every};
  for (int round = 0; round < 300; round++) check_softmax(&c, round % INPUT_KINDS);
  for (unsigned i = 0, dim = QKV_BAND; dim <= QKV_DIM_MAX; i++, dim += every * QKV_BAND) {
    check_transforms(&c, (uint16_t)dim, i % INPUT_KINDS);
  }
  for (size_t d = 0; d < DIMS; d++) {
    qkv_schedule schedule;
    qkv_schedule_uniform(&schedule, dims[d]);
    check_schedule(&c, &schedule);
    check_integer(&c, &schedule);
    for (int bands = 0; bands < (dims[d] > 256 ? 1 : 3); bands++) {
      naive_schedule(&c.random, dims[d], &schedule);
      assert(qkv_schedule_validate(&schedule) == NULL);
      check_schedule(&c, &schedule);
      check_integer(&c, &schedule);
      for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {  // as calibrated ones are where they can
        for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
          schedule.reach[tier][depth] = (uint16_t)(schedule.reach[tier][depth] / 16 * 16);
        }
      }
      qkv_schedule_finish(&schedule);
      check_integer(&c, &schedule);
    }
  }
  *digest = c.digest;
  return c.failures;
}
