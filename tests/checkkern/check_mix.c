// Products with plain codes, sums of entries, and nearest points.
#include <stdlib.h>

#include "tests/checkkern/checkkern.h"

static guarded random_floats(checking *c, input_kind kind, size_t n) {
  guarded made = guarded_make(n * sizeof(float));
  fill_input(&c->random, kind, (float *)made.data, n);
  return made;
}

static guarded random_bytes(checking *c, size_t n) {
  guarded made = guarded_make(n);
  for (size_t i = 0; i < n; i++) made.data[i] = (uint8_t)naive_next(&c->random);
  return made;
}

static void check_mix_of(checking *c, size_t lanes, size_t steps, unsigned bits, size_t n, input_kind kind) {
  const page_part shape = {.schedule.dim = (uint16_t)lanes};
  const size_t stride = lanes + naive_below(&c->random, 3);
  guarded codes = random_bytes(c, qkv_code_matrix_bytes(lanes, steps, bits));
  guarded values = random_floats(c, kind, (size_t)1 << bits), factors = random_floats(c, kind, n * steps);
  guarded expected = random_floats(c, kind, n * stride), got = guarded_copy(&expected);
  const qkv_code_matrix matrix = {.codes = codes.data,
                                  .bits = bits,
                                  .lanes = lanes,
                                  .steps = steps,
                                  .values = naive_below(&c->random, 2) ? (float *)values.data : NULL};
  qkv_kernels_at(0)->mix(&matrix, (float *)factors.data, n, (float *)expected.data, stride);
  c->variant->mix(&matrix, (float *)factors.data, n, (float *)got.data, stride);
  check_same(c, "mix", &shape, n, &expected, &got);
  if (bits <= QKV_MIX_INTEGER_BITS) {
    qkv_kernels_at(0)->mix_integer(&matrix, (float *)factors.data, n, (float *)expected.data, stride);
    c->variant->mix_integer(&matrix, (float *)factors.data, n, (float *)got.data, stride);
    check_same(c, "mix_integer", &shape, n, &expected, &got);
  }
  guarded_free(&codes);
  guarded_free(&values);
  guarded_free(&factors);
  guarded_free(&expected);
  guarded_free(&got);
}

static void check_scale_factors(checking *c, size_t steps, size_t n, input_kind kind) {
  const page_part shape = {.schedule.dim = (uint16_t)steps};
  guarded factors = random_floats(c, kind, n * steps), scales = random_floats(c, kind, steps);
  guarded zeros = random_floats(c, kind, steps);
  guarded expected = guarded_make(n * steps * sizeof(float)), got = guarded_copy(&expected);
  guarded expected_shares = guarded_make(n * sizeof(float)), got_shares = guarded_copy(&expected_shares);
  qkv_kernels_at(0)->scale_factors((float *)factors.data, (float *)scales.data, (float *)zeros.data, n, steps,
                                   (float *)expected.data, (float *)expected_shares.data);
  c->variant->scale_factors((float *)factors.data, (float *)scales.data, (float *)zeros.data, n, steps,
                            (float *)got.data, (float *)got_shares.data);
  check_same(c, "scale_factors", &shape, n, &expected, &got);
  check_same(c, "scale_factors", &shape, n, &expected_shares, &got_shares);
  guarded_free(&factors);
  guarded_free(&scales);
  guarded_free(&zeros);
  guarded_free(&expected);
  guarded_free(&got);
  guarded_free(&expected_shares);
  guarded_free(&got_shares);
}

static void check_sum_entries(checking *c, size_t rounds, input_kind kind) {
  const page_part shape = {.schedule.dim = QKV_ENTRY_WIDTH};
  qkv_entries *entries = aligned_alloc(_Alignof(qkv_entries), rounds * sizeof *entries);
  const qkv_entries *rows[4];
  if (entries == NULL) abort();
  for (size_t r = 0; r < rounds; r++) {
    fill_input(&c->random, kind, entries[r].of[0][0], sizeof entries[r].of / sizeof(float));
    rows[r] = &entries[r];
  }
  guarded codes = random_bytes(c, rounds * QKV_PAGE_TOKENS), sizes = random_floats(c, kind, QKV_PAGE_TOKENS);
  guarded expected = guarded_make(QKV_ENTRY_WIDTH * QKV_PAGE_TOKENS * sizeof(float)), got = guarded_copy(&expected);
  float *expected_columns[QKV_ENTRY_WIDTH], *got_columns[QKV_ENTRY_WIDTH];
  for (size_t j = 0; j < QKV_ENTRY_WIDTH; j++) {
    expected_columns[j] = (float *)expected.data + j * QKV_PAGE_TOKENS;
    got_columns[j] = (float *)got.data + j * QKV_PAGE_TOKENS;
  }
  qkv_kernels_at(0)->sum_entries(rows, rounds, codes.data, (float *)sizes.data, expected_columns);
  c->variant->sum_entries(rows, rounds, codes.data, (float *)sizes.data, got_columns);
  check_same(c, "sum_entries", &shape, rounds, &expected, &got);
  guarded_free(&codes);
  guarded_free(&sizes);
  guarded_free(&expected);
  guarded_free(&got);
  free(entries);
}

// Some points are there twice: of equally near ones it is the first.
static void check_nearest_points(checking *c, size_t width, input_kind kind) {
  const page_part shape = {.schedule.dim = (uint16_t)width};
  const size_t n = 1 + naive_below(&c->random, 40);
  guarded columns = random_floats(c, kind, width * QKV_POINTS), squares = random_floats(c, kind, QKV_POINTS);
  guarded x = random_floats(c, kind, n * width);
  for (size_t i = 0; i < QKV_POINTS; i++) {
    const size_t from = naive_below(&c->random, QKV_POINTS), to = naive_below(&c->random, QKV_POINTS);
    float *numbers = (float *)columns.data;
    for (size_t j = 0; j < width; j++) numbers[j * QKV_POINTS + to] = numbers[j * QKV_POINTS + from];
    ((float *)squares.data)[to] = ((float *)squares.data)[from];
  }
  guarded expected = guarded_make(n), got = guarded_copy(&expected);
  qkv_kernels_at(0)->nearest_points((float *)columns.data, (float *)squares.data, width, (float *)x.data, n,
                                    expected.data);
  c->variant->nearest_points((float *)columns.data, (float *)squares.data, width, (float *)x.data, n, got.data);
  check_same(c, "nearest_points", &shape, n, &expected, &got);
  guarded_free(&columns);
  guarded_free(&squares);
  guarded_free(&x);
  guarded_free(&expected);
  guarded_free(&got);
}

static void check_points(checking *c, size_t width, size_t subs, bool shared, input_kind kind) {
  const page_part shape = {.schedule.dim = (uint16_t)(width * subs)};
  const size_t stride = shared ? 0 : QKV_POINTS * width, lanes = QKV_POINT_QUERIES;
  guarded codes = random_bytes(c, subs * QKV_PAGE_TOKENS), weights = random_floats(c, kind, QKV_PAGE_TOKENS * lanes);
  guarded points = random_floats(c, kind, (shared ? 1 : subs) * QKV_POINTS * width);
  guarded expected = guarded_make(subs * width * lanes * sizeof(float)), got = guarded_copy(&expected);
  qkv_kernels_at(0)->weigh_points((float *)points.data, stride, width, subs, codes.data, (float *)weights.data,
                                  (float *)expected.data);
  c->variant->weigh_points((float *)points.data, stride, width, subs, codes.data, (float *)weights.data,
                           (float *)got.data);
  check_same(c, "weigh_points", &shape, subs, &expected, &got);
  guarded tables = random_floats(c, kind, subs * QKV_POINTS * lanes);
  guarded expected_sums = guarded_make(QKV_PAGE_TOKENS * lanes * sizeof(float)),
          got_sums = guarded_copy(&expected_sums);
  qkv_kernels_at(0)->sum_look_ups((float *)tables.data, subs, codes.data, (float *)expected_sums.data);
  c->variant->sum_look_ups((float *)tables.data, subs, codes.data, (float *)got_sums.data);
  check_same(c, "sum_look_ups", &shape, subs, &expected_sums, &got_sums);
  guarded_free(&codes);
  guarded_free(&weights);
  guarded_free(&points);
  guarded_free(&expected);
  guarded_free(&got);
  guarded_free(&tables);
  guarded_free(&expected_sums);
  guarded_free(&got_sums);
}

void check_mix(checking *c, uint16_t dim, input_kind kind) {
  const size_t n = 1 + naive_below(&c->random, 9), steps = 8 * (1 + naive_below(&c->random, 9));
  for (unsigned bits = 1; bits <= 8; bits++) check_mix_of(c, dim, steps, bits, n, kind);
  check_scale_factors(c, dim, n, kind);
  check_sum_entries(c, 1 + naive_below(&c->random, 4), kind);
  check_nearest_points(c, 1 + naive_below(&c->random, QKV_POINT_WIDTH_MAX), kind);
  const size_t width = (size_t)2 << naive_below(&c->random, 3);
  check_points(c, width, dim / width, naive_below(&c->random, 4) == 0, kind);
}
