// Variants of the kernels on whole rows in whole numbers, and on rows as columns with rotary phases.
#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "tests/checkkern/checkkern.h"

made_matrix make_matrix(checking *c, size_t dim, size_t outputs, input_kind kind) {
  float *numbers = calloc(dim * outputs, sizeof *numbers);
  fill_input(&c->random, kind, numbers, dim * outputs);
  for (size_t i = 0; i < dim; i++) numbers[i] *= i % 3 == 0 ? 100 : 0.01f;  // the first row
  made_matrix made = {.memory = aligned_alloc(64, (qkv_dense_bytes(dim, outputs) + 63) / 64 * 64)};
  assert(made.memory != NULL);
  made.matrix = qkv_dense_in(made.memory, numbers, dim, outputs);
  free(numbers);
  return made;
}

static void check_multiply(checking *c, uint16_t dim, size_t n, input_kind kind) {
  const page_part shape = {.schedule.dim = dim};
  const size_t outputs = 1 + naive_below(&c->random, dim),
               coordinates = naive_below(&c->random, (uint32_t)outputs + 1);
  made_matrix made = make_matrix(c, dim, outputs, kind);
  guarded expected = guarded_make(n * dim * sizeof(float));
  fill_input(&c->random, kind, (float *)expected.data, n * dim);
  if (n > 2) memset(expected.data, 0, dim * sizeof(float));
  guarded rows = guarded_make(2 * dim * sizeof(float));
  const float *mean = naive_below(&c->random, 2) == 0 ? NULL : (float *)rows.data;
  const float *added = naive_below(&c->random, 2) == 0 ? NULL : (float *)rows.data + dim;
  fill_input(&c->random, kind, (float *)rows.data, (size_t)2 * dim);
  guarded got = guarded_copy(&expected);
  qkv_kernels_at(0)->multiply_integer(&made.matrix, coordinates, mean, added, (float *)expected.data, n);
  c->variant->multiply_integer(&made.matrix, coordinates, mean, added, (float *)got.data, n);
  check_same(c, "multiply_integer", &shape, n, &expected, &got);
  guarded_free(&rows);
  guarded_free(&expected);
  guarded_free(&got);
  free(made.memory);
}

static void check_load(checking *c, uint16_t dim, size_t n, input_kind kind) {
  static const qkv_dtype dtypes[] = {QKV_FP32, QKV_FP16, QKV_BF16};
  const page_part shape = {.schedule.dim = dim};
  const qkv_dtype dtype = dtypes[naive_below(&c->random, 3)];
  const size_t bytes = dim * qkv_dtype_size(dtype), stride = bytes * (1 + naive_below(&c->random, 2));
  guarded floats = guarded_make(n * stride), in = guarded_make(n * stride);
  fill_input(&c->random, kind, (float *)floats.data, n * stride / sizeof(float));
  const size_t count = n * stride / qkv_dtype_size(dtype);
  for (size_t i = 0; i < count; i++) {
    qkv_from_float(dtype, (float *)floats.data + i % (n * stride / sizeof(float)),
                   in.data + i * qkv_dtype_size(dtype), 1);
  }
  const qkv_rows rows = {dtype, in.data, stride, bytes, NULL};
  guarded expected = guarded_make(n * dim * sizeof(float)), got = guarded_make(n * dim * sizeof(float));
  guarded lengths = guarded_make(n * sizeof(float)), got_lengths = guarded_make(n * sizeof(float));
  qkv_kernels_at(0)->load_rows(&rows, n, dim, (float *)expected.data, (float *)lengths.data);
  c->variant->load_rows(&rows, n, dim, (float *)got.data, (float *)got_lengths.data);
  check_same(c, "load_rows", &shape, n, &expected, &got);
  check_same(c, "load_rows squares", &shape, n, &lengths, &got_lengths);
  guarded *all[] = {&floats, &in, &expected, &got, &lengths, &got_lengths};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) guarded_free(all[i]);
}

// Turns of so many pairs, not those of any rope.
typedef struct made_turns {
  guarded cosines, sines;
  qkv_slot_turns turns;
} made_turns;

static made_turns make_turns(checking *c, size_t pairs, bool interleaved) {
  made_turns made = {.cosines = guarded_make((pairs + 1) * QKV_PAGE_TOKENS * sizeof(float)),
                     .sines = guarded_make((pairs + 1) * QKV_PAGE_TOKENS * sizeof(float))};
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)made.cosines.data, (pairs + 1) * QKV_PAGE_TOKENS);
  fill_input(&c->random, INPUT_GAUSSIAN, (float *)made.sines.data, (pairs + 1) * QKV_PAGE_TOKENS);
  made.turns = (qkv_slot_turns){.pairs = pairs,
                                .step = interleaved ? 2 : 1,
                                .apart = interleaved ? 1 : pairs,
                                .cosines = (float *)made.cosines.data,
                                .sines = (float *)made.sines.data};
  return made;
}

static void check_waves(checking *c, const qkv_slot_turns *turns, size_t n, input_kind kind) {
  const page_part none = {0};
  const size_t count = 1 + naive_below(&c->random, 64);
  uint16_t pairs[64];
  for (size_t i = 0; i < count; i++) pairs[i] = (uint16_t)naive_below(&c->random, (uint32_t)turns->pairs + 1);
  guarded factors = guarded_make(n * count * 2 * sizeof(float));
  guarded expected = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float));
  fill_input(&c->random, kind, (float *)factors.data, n * count * 2);
  fill_input(&c->random, kind, (float *)expected.data, n * QKV_PAGE_TOKENS);
  guarded got = guarded_copy(&expected);
  qkv_kernels_at(0)->add_waves(turns, pairs, count, (float *)factors.data, n, (float *)expected.data);
  c->variant->add_waves(turns, pairs, count, (float *)factors.data, n, (float *)got.data);
  check_same(c, "add_waves", &none, n, &expected, &got);
  guarded_free(&factors);
  guarded_free(&expected);
  guarded_free(&got);
}

static void check_columns(checking *c, const qkv_slot_turns *turns, uint16_t dim, size_t n, input_kind kind) {
  const page_part shape = {.schedule.dim = dim};
  guarded columns = guarded_make((size_t)dim * QKV_PAGE_TOKENS * sizeof(float));
  guarded means = guarded_make((size_t)QKV_PAGE_GROUPS * dim * sizeof(float));
  guarded queries = guarded_make(n * dim * sizeof(float));
  guarded expected = guarded_make(n * QKV_PAGE_TOKENS * sizeof(float)), got = guarded_copy(&expected);
  fill_input(&c->random, kind, (float *)columns.data, (size_t)dim * QKV_PAGE_TOKENS);
  fill_input(&c->random, kind, (float *)means.data, (size_t)QKV_PAGE_GROUPS * dim);
  fill_input(&c->random, kind, (float *)queries.data, n * dim);
  qkv_kernels_at(0)->score_columns((float *)columns.data, dim, (float *)means.data, turns, (float *)queries.data, n,
                                   (float *)expected.data);
  c->variant->score_columns((float *)columns.data, dim, (float *)means.data, turns, (float *)queries.data, n,
                            (float *)got.data);
  check_same(c, "score_columns", &shape, n, &expected, &got);
  guarded_free(&columns);
  guarded_free(&means);
  guarded_free(&queries);
  guarded_free(&expected);
  guarded_free(&got);
}

// Rows of another number than slots have, of any width.
static void check_turned_rows(checking *c, size_t pairs, bool interleaved, uint16_t dim, input_kind kind) {
  const page_part shape = {.schedule.dim = dim};
  const size_t n = 1 + naive_below(&c->random, 12), bytes = (pairs + 1) * sizeof(float);
  guarded page[4], slots[2], expected = guarded_make(n * dim * sizeof(float));
  for (size_t i = 0; i < 4; i++) {
    page[i] = guarded_make(bytes);
    fill_input(&c->random, kind, (float *)page[i].data, pairs);
  }
  for (size_t i = 0; i < 2; i++) {
    slots[i] = guarded_make(n * bytes);
    fill_input(&c->random, kind, (float *)slots[i].data, n * pairs);
  }
  const qkv_row_turns turns = {.pairs = pairs,
                               .step = interleaved ? 2 : 1,
                               .apart = interleaved ? 1 : pairs,
                               .page = {(float *)page[0].data, (float *)page[1].data},
                               .slots = {(float *)slots[0].data, (float *)slots[1].data}};
  const float *x = (float *)page[2].data, *y = (float *)page[3].data;
  for (int which = 0; which < 4; which++) {
    const bool other = which % 2 != 0;
    fill_input(&c->random, kind, (float *)expected.data, n * dim);
    guarded got = guarded_copy(&expected);
    if (which < 2) {
      qkv_kernels_at(0)->turn_rows(&turns, other, n, dim, (float *)expected.data);
      c->variant->turn_rows(&turns, other, n, dim, (float *)got.data);
    } else {
      qkv_kernels_at(0)->frame_rows(&turns, x, y, other, n, dim, (float *)expected.data);
      c->variant->frame_rows(&turns, x, y, other, n, dim, (float *)got.data);
    }
    check_same(c, which < 2 ? "turn_rows" : "frame_rows", &shape, n, &expected, &got);
    guarded_free(&got);
  }
  for (size_t i = 0; i < 4; i++) guarded_free(&page[i]);
  for (size_t i = 0; i < 2; i++) guarded_free(&slots[i]);
  guarded_free(&expected);
}

void check_rows_of(checking *c, uint16_t dim, input_kind kind) {
  const size_t n = 1 + naive_below(&c->random, 12);
  check_multiply(c, dim, n, kind);
  check_multiply(c, dim, 13 + naive_below(&c->random, 64), kind);  // more rows than tiles and batches have
  check_load(c, dim, n, kind);
  check_walk_of(c, dim, n, kind);
  check_mix(c, dim, kind);
  const size_t pairs = naive_below(&c->random, dim / 2u + 1);
  made_turns made = make_turns(c, pairs, naive_below(&c->random, 2));
  check_waves(c, &made.turns, n, kind);
  check_columns(c, &made.turns, dim, n, kind);
  check_turned_rows(c, pairs, made.turns.step == 2, dim, kind);
  guarded_free(&made.cosines);
  guarded_free(&made.sines);
}
