// Kernels of queries on their way over pages, and of outlier rows.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/checkkern/checkkern.h"

static void check_products(checking *c, uint16_t dim, size_t n, input_kind kind) {
  const page_part shape = {.schedule.dim = dim};
  const size_t outputs = 1 + naive_below(&c->random, dim),
               coordinates = naive_below(&c->random, (uint32_t)outputs + 1),
               stride = (coordinates + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
  const size_t first = naive_below(&c->random, dim / 2u) * 2,
               count = naive_below(&c->random, (dim - (uint32_t)first) / 2 + 1) * 2;
  made_matrix made = make_matrix(c, dim, outputs, kind);
  guarded numbers = guarded_make(n * count * sizeof(int16_t));
  guarded before = guarded_make(n * stride * sizeof(int32_t));
  guarded expected = guarded_make(n * stride * sizeof(int32_t)), got = guarded_copy(&expected);
  for (size_t i = 0; i < n * count; i++)
    ((int16_t *)numbers.data)[i] = (int16_t)((int)naive_below(&c->random, 1001) - 500);
  for (size_t i = 0; i < n * stride; i++)
    ((int32_t *)before.data)[i] = (int32_t)naive_below(&c->random, 1 << 20) - (1 << 19);
  const int32_t *from = naive_below(&c->random, 3) == 0 ? NULL : (int32_t *)before.data;
  qkv_kernels_at(0)->add_products(&made.matrix, coordinates, first, count, (int16_t *)numbers.data, n, from,
                                  (int32_t *)expected.data);
  c->variant->add_products(&made.matrix, coordinates, first, count, (int16_t *)numbers.data, n, from,
                           (int32_t *)got.data);
  check_same(c, "add_products", &shape, n, &expected, &got);
  // In place.
  qkv_kernels_at(0)->add_products(&made.matrix, coordinates, first, count, (int16_t *)numbers.data, n,
                                  (int32_t *)expected.data, (int32_t *)expected.data);
  c->variant->add_products(&made.matrix, coordinates, first, count, (int16_t *)numbers.data, n, (int32_t *)got.data,
                           (int32_t *)got.data);
  check_same(c, "add_products", &shape, n, &expected, &got);
  guarded *const all[] = {&numbers, &before, &expected, &got};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) guarded_free(all[i]);
  free(made.memory);
}

// All levels of a page, some of which are kept.
static void check_levels(checking *c, uint16_t dim, size_t n, input_kind kind) {
  enum { LEVELS = 3 };
  const page_part shape = {.schedule.dim = dim};
  const size_t pairs = dim / 2u, outputs = 1 + naive_below(&c->random, dim),
               coordinates = naive_below(&c->random, (uint32_t)outputs + 1),
               stride = (coordinates + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
  made_matrix made = make_matrix(c, dim, outputs, kind);
  guarded rows = guarded_make(n * dim * sizeof(float)), turns = guarded_make(4 * pairs * sizeof(float));
  guarded factors = guarded_make(n * sizeof(float)), before = guarded_make(n * stride * sizeof(int32_t));
  guarded kept[2][LEVELS], out[2];
  fill_input(&c->random, kind, (float *)rows.data, n * dim);
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)turns.data, 4 * pairs);
  for (size_t i = 0; i < n * stride; i++)
    ((int32_t *)before.data)[i] = (int32_t)naive_below(&c->random, 1 << 20) - (1 << 19);
  for (size_t i = 0; i < n; i++) {  // as for rows of this length
    double squares = 0;
    for (size_t j = 0; j < dim; j++) squares += pow((double)((float *)rows.data)[i * dim + j], 2);
    ((float *)factors.data)[i] = squares > 0 ? (float)(500 / sqrt(squares)) : 0;
  }
  const float *at = (float *)turns.data;
  const qkv_pair_turns base = {at, at + pairs}, on = {at + 2 * pairs, at + 3 * pairs};
  const qkv_walk_queries queries = {n, dim, pairs, (float *)rows.data, (float *)factors.data, (float *)factors.data};
  const size_t count = naive_below(&c->random, LEVELS + 1), keep = naive_below(&c->random, 1 << LEVELS);
  size_t ends[LEVELS + 1] = {pairs};
  for (size_t l = 0; l < LEVELS; l++) ends[l + 1] = naive_below(&c->random, (uint32_t)ends[l] + 1);
  for (size_t k = 0; k < 2; k++) {
    qkv_walk_level levels[LEVELS];
    out[k] = guarded_make(n * dim * sizeof(float));
    for (size_t l = 0; l < LEVELS; l++) {
      kept[k][l] = guarded_make(n * stride * sizeof(int32_t));
      int32_t *sums = (keep >> l & 1) != 0 ? (int32_t *)kept[k][l].data : NULL;
      levels[l] = (qkv_walk_level){ends[l + 1], ends[l], base, on, sums};
    }
    (k == 0 ? qkv_kernels_at(0) : c->variant)
        ->sum_levels(&made.matrix, coordinates, &queries, levels, count, (int32_t *)before.data,
                     (float *)out[k].data);
  }
  check_same(c, "sum_levels", &shape, n, &out[0], &out[1]);
  for (size_t l = 0; l < LEVELS; l++) check_same(c, "sum_levels", &shape, n, &kept[0][l], &kept[1][l]);
  guarded *const all[] = {&rows, &turns, &factors, &before, &out[0], &out[1]};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) guarded_free(all[i]);
  for (size_t i = 0; i < 2 * (size_t)LEVELS; i++) guarded_free(&kept[i / LEVELS][i % LEVELS]);
  free(made.memory);
}

static void check_anchors(checking *c, uint16_t dim, size_t n, input_kind kind) {
  const page_part shape = {.schedule.dim = dim};
  qkv_page_waves waves = {.pairs = 1 + naive_below(&c->random, dim / 2u)};
  waves.stride = (waves.pairs + QKV_BAND - 1) / QKV_BAND * QKV_BAND;
  waves.fast = naive_below(&c->random, (uint32_t)waves.pairs + 1);
  for (size_t i = 0; i < QKV_WAVE_TERMS; i++) waves.ends[i] = naive_below(&c->random, (uint32_t)waves.pairs + 1);
  const size_t slots = (waves.fast + 1) * QKV_WAVE_SLOTS, terms = QKV_WAVE_TERMS * waves.stride;
  guarded tables = guarded_make((2 * slots + 2 * terms) * sizeof(float));
  guarded turns = guarded_make(4 * waves.pairs * sizeof(float)), shares = guarded_make(n * sizeof(float));
  guarded products = guarded_make(n * 2 * waves.stride * sizeof(float));
  guarded expected = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float));
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)tables.data, 2 * slots + 2 * terms);
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)turns.data, 4 * waves.pairs);
  fill_input(&c->random, kind, (float *)products.data, n * 2 * waves.stride);
  fill_input(&c->random, kind, (float *)shares.data, n);
  fill_input(&c->random, kind, (float *)expected.data, n * QKV_PAGE_TOKENS);
  waves.cosines = (float *)tables.data;
  waves.sines = waves.cosines + slots;
  waves.even = waves.sines + slots;
  waves.odd = waves.even + terms;
  guarded got = guarded_copy(&expected);
  const float *all_turns = (float *)turns.data;
  const qkv_pair_turns base = {all_turns, all_turns + waves.pairs};
  const qkv_pair_turns on = {all_turns + 2 * waves.pairs, all_turns + 3 * waves.pairs};
  qkv_kernels_at(0)->add_anchors(&waves, base, on, (float *)products.data, n, (float *)shares.data,
                                 (float *)expected.data);
  c->variant->add_anchors(&waves, base, on, (float *)products.data, n, (float *)shares.data, (float *)got.data);
  check_same(c, "add_anchors", &shape, n, &expected, &got);
  guarded *const all[] = {&tables, &turns, &shares, &products, &expected, &got};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) guarded_free(all[i]);
}

// Rows of one byte a coordinate and of two.
static void check_outliers(checking *c, uint16_t dim, size_t n, input_kind kind) {
  const page_part shape = {.schedule.dim = dim};
  const size_t count = 1 + naive_below(&c->random, QKV_OUTLIERS_MAX);
  guarded slots = guarded_make(count), scales = guarded_make(count * sizeof(float));
  size_t bytes = 0;
  for (size_t i = 0; i < count; i++) {
    const bool wide = naive_below(&c->random, 4) == 0;
    slots.data[i] = (uint8_t)(i * (QKV_PAGE_TOKENS / QKV_OUTLIERS_MAX) + naive_below(&c->random, 4)) |
                    (wide ? QKV_OUTLIER_WIDE : 0);
    bytes += wide ? 2u * dim : dim;
  }
  guarded rows = guarded_make(bytes), queries = guarded_make(n * dim * sizeof(float));
  guarded steps = guarded_make(dim * sizeof(float)), peaks = guarded_make(n * sizeof(float));
  guarded scores = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float)), sums = guarded_make(n * dim * sizeof(float));
  for (size_t i = 0; i < bytes; i++) rows.data[i] = (uint8_t)naive_below(&c->random, 256);
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)scales.data, count);
  fill_input(&c->random, kind, (float *)queries.data, n * dim);
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)steps.data, dim);
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)peaks.data, n);
  fill_input(&c->random, kind, (float *)scores.data, n * QKV_PAGE_TOKENS);
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)sums.data, n * dim);
  guarded scores_got = guarded_copy(&scores), sums_got = guarded_copy(&sums);
  const qkv_outliers found = {count, dim, slots.data, scales.data, rows.data};
  const float *step = naive_below(&c->random, 2) == 0 ? NULL : (float *)steps.data;
  const float *peak = naive_below(&c->random, 2) == 0 ? NULL : (float *)peaks.data;
  qkv_kernels_at(0)->weigh_outliers(&found, step, (float *)scores.data, peak, n, (float *)sums.data);
  c->variant->weigh_outliers(&found, step, (float *)scores.data, peak, n, (float *)sums_got.data);
  check_same(c, "weigh_outliers", &shape, n, &sums, &sums_got);
  qkv_kernels_at(0)->score_outliers(&found, (float *)queries.data, n, (float *)scores.data);
  c->variant->score_outliers(&found, (float *)queries.data, n, (float *)scores_got.data);
  check_same(c, "score_outliers", &shape, n, &scores, &scores_got);
  guarded *const all[] = {&slots, &scales, &rows, &queries, &steps, &peaks, &scores, &sums, &scores_got, &sums_got};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) guarded_free(all[i]);
}

void check_walk_of(checking *c, uint16_t dim, size_t n, input_kind kind) {
  check_products(c, dim, n, kind);
  check_levels(c, dim, n, kind);
  check_anchors(c, dim, n, kind);
  check_outliers(c, dim, n, kind);
}
