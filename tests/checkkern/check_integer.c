// The variants of the integer kernels against the reference.
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/codec/codebook.h"
#include "tests/checkkern/checkkern.h"

static const size_t counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 31, 32};
enum { COUNTS = sizeof counts / sizeof *counts };

// Zeroed, so that bytes that are not written are equal.
static void *fresh(size_t bytes) {
  void *all = aligned_alloc(64, (bytes + 63) / 64 * 64);
  assert(all != NULL);
  return memset(all, 0, bytes);
}

static void scores_of(const qkv_kernels *kernels, const page_part *page, const float *rows, size_t n, float limit,
                      const guarded *out) {
  qkv_integer_buffers *buffer = fresh(sizeof *buffer);
  qkv_integer_queries queries = qkvi_integer_queries_in(buffer);
  qkv_layouts *layouts = fresh(sizeof *layouts);
  kernels->prepare(rows, n, page->schedule.dim, limit, &queries);
  const qkv_ahead ahead = {page->codes.groups[0], page->groups.bytes};
  kernels->scores_integer(&page->codes, &queries, layouts, ahead, (float *)out->data);
  free(buffer);
  free(layouts);
}

// With two bytes, half of the time queries that fall off, as in calibrated code space, and a lower limit: then most
// first bytes are 0.
static void check_scores(checking *c, const page_part *page, size_t n, unsigned parts, input_kind kind) {
  const size_t dim = page->schedule.dim;
  const bool falls = parts == 2 && naive_below(&c->random, 2) == 0;
  const float limit = parts == 1 ? QKVI_LIMIT_1 : falls ? 128 + (float)naive_below(&c->random, 2000) : QKVI_LIMIT_2;
  guarded rows = guarded_make(n * dim * sizeof(float));
  fill_input(&c->random, kind, (float *)rows.data, n * dim);
  for (size_t i = 0; falls && i < n * dim; i++) ((float *)rows.data)[i] *= expf(-6 * (float)(i % dim) / (float)dim);
  guarded expected = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float)), got = guarded_copy(&expected);
  scores_of(qkv_kernels_at(0), page, (float *)rows.data, n, limit, &expected);
  scores_of(c->variant, page, (float *)rows.data, n, limit, &got);
  check_same(c, parts == 1 ? "scores_integer 1" : "scores_integer 2", page, n, &expected, &got);
  guarded_free(&rows);
  guarded_free(&expected);
  guarded_free(&got);
}

// Weights of a tile and their sums of values; `totals` [n].
static void sums_of(const qkv_kernels *kernels, const page_part *page, const float *scores, const float *peaks,
                    size_t n, unsigned parts, const guarded *totals, const guarded *sums) {
  qkv_integer_weights *weights = fresh(sizeof *weights);
  qkv_layouts *layouts = fresh(sizeof *layouts);
  kernels->weigh_integer(scores, peaks, n, page->codes.gains, parts, weights, (float *)totals->data);
  kernels->accumulate_integer(&page->codes, weights, layouts, (qkv_ahead){0}, (float *)sums->data);
  free(weights);
  free(layouts);
}

static void check_sums(checking *c, const page_part *page, size_t n, unsigned parts, input_kind kind) {
  guarded scores = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float));
  fill_scores(&c->random, kind, (float *)scores.data, n);
  float peaks[QKV_INTEGER_ROWS], peaks_got[QKV_INTEGER_ROWS];
  qkv_kernels_at(0)->peaks((float *)scores.data, n, peaks);
  c->variant->peaks((float *)scores.data, n, peaks_got);
  c->failures += check_equal_floats(c, "peaks", peaks, peaks_got, n);
  for (size_t i = 0; i < n; i++) peaks[i] += (float)naive_below(&c->random, 3);
  guarded totals = guarded_make(n * sizeof(float)), totals_got = guarded_copy(&totals);
  guarded sums = guarded_make(n * page->schedule.dim * sizeof(float));
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)sums.data, n * page->schedule.dim);
  guarded sums_got = guarded_copy(&sums);
  sums_of(qkv_kernels_at(0), page, (float *)scores.data, peaks, n, parts, &totals, &sums);
  sums_of(c->variant, page, (float *)scores.data, peaks, n, parts, &totals_got, &sums_got);
  check_same(c, "weigh_integer", page, n, &totals, &totals_got);
  check_same(c, parts == 1 ? "accumulate_integer 1" : "accumulate_integer 2", page, n, &sums, &sums_got);
  guarded_free(&scores);
  guarded_free(&totals);
  guarded_free(&totals_got);
  guarded_free(&sums);
  guarded_free(&sums_got);
}

static void check_page(checking *c, const qkv_schedule *schedule, const uint8_t tiers[QKV_PAGE_GROUPS], size_t n) {
  for (unsigned parts = 1; parts <= QKV_INTEGER_PARTS; parts++) {
    const input_kind kind = naive_below(&c->random, INPUT_KINDS);
    page_part keys, values;
    page_part_init(&keys, &c->random, QKV_K, schedule, tiers);
    check_scores(c, &keys, n, parts, kind);
    page_part_deinit(&keys);
    page_part_init(&values, &c->random, QKV_V, schedule, tiers);
    check_sums(c, &values, n, parts, kind);
    page_part_deinit(&values);
  }
}

void check_integer(checking *c, const qkv_schedule *schedule) {
  const unsigned step = check_tier_step(c, schedule);
  for (unsigned tier = naive_below(&c->random, step); tier <= QKV_TIER_MAX; tier += step) {
    const uint8_t same[QKV_PAGE_GROUPS] = {(uint8_t)tier, (uint8_t)tier, (uint8_t)tier, (uint8_t)tier};
    check_page(c, schedule, same, counts[naive_below(&c->random, COUNTS)]);
  }
  for (size_t i = 0; i < COUNTS; i++) {
    uint8_t mixed[QKV_PAGE_GROUPS];
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) mixed[g] = (uint8_t)naive_below(&c->random, QKV_TIER_MAX + 1);
    if (i % 2 == 0) mixed[1] = mixed[0];
    check_page(c, schedule, mixed, counts[i]);
  }
}
