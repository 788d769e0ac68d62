// The embedded codec: error, prefixes, attention against decoded rows, repeated rows, golden pages.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdio.h>
#include <xxhash.h>

#include "engine/codec/codebook.h"
#include "engine/codec/codec.h"
#include "engine/codec/hadamard.h"
#include "engine/kernel/kernel.h"
#include "naive.h"

static const uint16_t dims[] = {8, 16, 24, 64, 80, 96, 128, 192, 256, 576};
static const uint8_t budgets[] = {1, 2, 3, 4, 8};
enum { DIMS = sizeof dims / sizeof *dims, BUDGETS = sizeof budgets };

static const qkv_codec *codec(void) {
  return qkv_codec_by_id(QKV_CODEC_EMBEDDED);
}

static void *allocate(size_t bytes) {
  void *block = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  assert_non_null(block);
  return block;
}

typedef struct coded {
  qkv_page_shape shape;
  uint32_t tokens;
  size_t bytes;
  uint8_t *image;
  float *k, *v;  // [tokens][kv_heads][dim]
} coded;

typedef void fill_fn(naive_random *random, float *row, size_t dim);

static void gaussian(naive_random *random, float *row, size_t dim) {
  const double scale = exp(2 * naive_gaussian(random));
  for (size_t c = 0; c < dim; c++) row[c] = (float)(scale * naive_gaussian(random));
}

// One coordinate 30 times larger, at a place of its own in every row.
static void wandering_outlier(naive_random *random, float *row, size_t dim) {
  gaussian(random, row, dim);
  row[naive_below(random, (unsigned)dim)] *= 30;
}

// Two channels far from 0 in every row.
static void fixed_outliers(naive_random *random, float *row, size_t dim) {
  for (size_t c = 0; c < dim; c++) row[c] = (float)naive_gaussian(random);
  row[dim / 3] += 40;
  row[dim - 1] -= 25;
}

static coded encode(naive_random *random, qkv_page_shape shape, uint32_t tokens, fill_fn *fill) {
  coded page = {.shape = shape, .tokens = tokens, .bytes = codec()->page_bytes(&shape)};
  const size_t rows = (size_t)tokens * shape.kv_heads;
  page.k = allocate(rows * shape.key_dim * sizeof(float));
  page.v = allocate(rows * shape.value_dim * sizeof(float));
  for (size_t i = 0; i < rows; i++) fill(random, page.k + i * shape.key_dim, shape.key_dim);
  for (size_t i = 0; i < rows; i++) fill(random, page.v + i * shape.value_dim, shape.value_dim);
  page.image = allocate(page.bytes);
  codec()->encode(&shape, 5, 640, tokens, page.k, page.v, page.image);
  assert_int_equal(codec()->validate(page.image, page.bytes, NULL), QKV_OK);
  return page;
}

static void release(coded *page) {
  free(page->image);
  free(page->k);
  free(page->v);
}

static uint16_t dim_of(const coded *page, qkv_part part) {
  return part == QKV_K ? page->shape.key_dim : page->shape.value_dim;
}

// A copy of the page with its groups cut to these tiers (NULL: as they are), written by the drawing in page.h.
static coded narrowed(const coded *page, const uint8_t tiers_k[4], const uint8_t tiers_v[4]) {
  coded out = *page;
  out.k = out.v = NULL;
  qkv_schedule schedules[2];
  qkv_schedule_uniform(&schedules[QKV_K], page->shape.key_dim);
  qkv_schedule_uniform(&schedules[QKV_V], page->shape.value_dim);
  out.image = allocate(page->bytes);
  memset(out.image, 0, page->bytes);
  size_t at = naive_read(page->image, 64, 4);
  memcpy(out.image, page->image, at);
  for (uint16_t h = 0; h < page->shape.kv_heads; h++) {
    uint8_t *entry = out.image + 64 + 16 * (size_t)h;
    const size_t start = at, old = naive_read(page->image, 64 + 16 * (size_t)h, 4);
    memcpy(out.image + at, page->image + old, 128);
    at += 128;
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      qkv_page_codes codes;
      qkv_page_find(page->image, h, part, &schedules[QKV_K], &schedules[QKV_V], &codes);
      const uint8_t *tiers = part == QKV_K ? tiers_k : tiers_v;
      for (size_t g = 0; g < 4; g++) {
        const uint8_t tier = tiers ? tiers[g] : codes.tiers[g];
        naive_narrow(part, &schedules[part], codes.tiers[g], codes.groups[g], tier, out.image + at);
        entry[4 + 4 * part + g] = tier;
        at += qkv_schedule_group_bytes(&schedules[part], tier);
      }
    }
    at = (at + 63) & ~(size_t)63;
    memcpy(entry, &(uint32_t){(uint32_t)start}, 4);
  }
  out.bytes = at;
  memcpy(out.image + 8, &(uint32_t){(uint32_t)at}, 4);
  qkv_page_seal(out.image);
  assert_int_equal(codec()->validate(out.image, out.bytes, NULL), QKV_OK);
  return out;
}

// Sum over one head's rows of the relative squared error.
static double head_error(const coded *page, const coded *exact, uint16_t h, qkv_part part) {
  const size_t dim = dim_of(page, part);
  float *rows = allocate(page->tokens * dim * sizeof *rows);
  codec()->decode(page->image, h, part, rows);
  double sum = 0;
  for (size_t t = 0; t < page->tokens; t++) {
    const float *row = (part == QKV_K ? exact->k : exact->v) + (t * page->shape.kv_heads + h) * dim;
    double error = 0, energy = 0;
    for (size_t c = 0; c < dim; c++) {
      const double miss = (double)row[c] - rows[t * dim + c];
      error += miss * miss;
      energy += (double)row[c] * row[c];
    }
    sum += error / energy;
  }
  free(rows);
  return sum;
}

// Mean relative squared error of K and V rows.
static double mean_error(naive_random *random, uint16_t dim, uint8_t bits, fill_fn *fill) {
  const unsigned pages = dim < 64 ? 10 : 1;
  double sum = 0;
  for (unsigned i = 0; i < pages; i++) {
    coded page = encode(random, (qkv_page_shape){1, dim, dim, bits, bits}, 64, fill);
    sum += head_error(&page, &page, 0, QKV_K) + head_error(&page, &page, 0, QKV_V);
    release(&page);
  }
  return sum / (128 * pages);
}

static void gaussian_rows_keep_the_bound(void **state) {
  (void)state;
  naive_random random = {31};
  printf("width  relative squared error at 1, 2, 3, 4, 8 bits\n");
  for (size_t d = 0; d < DIMS; d++) {
    printf("%5u ", dims[d]);
    for (size_t b = 0; b < BUDGETS; b++) {
      const double error = mean_error(&random, dims[d], budgets[b], gaussian);
      printf(" %.3g", error);
      assert_true(error <= codec()->error_bound(budgets[b]));
      // A code of 4 bits that is no better than one of 3 would pass the bound of 3.
      assert_true(error >= 0.5 * codec()->error_bound(budgets[b]));
    }
    printf("\n");
  }
}

static void outliers_are_tamed(void **state) {
  (void)state;
  naive_random random = {32};
  for (size_t d = 0; d < DIMS; d++) {
    const bool power_of_two = (dims[d] & (dims[d] - 1)) == 0;
    for (size_t b = 0; b < BUDGETS; b++) {
      const double bound = codec()->error_bound(budgets[b]);
      const double wandering = mean_error(&random, dims[d], budgets[b], wandering_outlier);
      const double fixed = mean_error(&random, dims[d], budgets[b], fixed_outliers);
      // In other widths an outlier in a small block outweighs the other blocks.
      const double slack = power_of_two ? 1 : 2.5;
      assert_true(wandering <= slack * bound);
      assert_true(fixed <= slack * bound);
    }
  }
}

// Whatever planes are dropped, what is left keeps the bound of its own budget.
static void every_prefix_keeps_its_bound(void **state) {
  (void)state;
  naive_random random = {33};
  for (size_t d = 3; d < 7; d += 2) {
    for (unsigned top = 3; top <= 8; top += top == 4 ? 4 : 1) {
      coded page = encode(&random, (qkv_page_shape){2, dims[d], dims[d], (uint8_t)top, (uint8_t)top}, 64, gaussian);
      for (uint8_t tier = 1; tier < top && tier <= 4; tier++) {
        const uint8_t tiers[4] = {tier, tier, tier, tier};
        coded cut = narrowed(&page, tiers, tiers);
        double sum = 0;
        for (uint16_t h = 0; h < 2; h++) sum += head_error(&cut, &page, h, QKV_K) + head_error(&cut, &page, h, QKV_V);
        assert_true(sum / 256 <= codec()->error_bound(tier));
        assert_true(cut.bytes < page.bytes);
        release(&cut);
      }
      release(&page);
    }
  }
}

// What slot `t` of the uncut page decodes to at `tier` bits: its gain times the codebook's value of the leading bits.
static void expected_row(qkv_part part, const qkv_page_codes *uncut, unsigned t, unsigned tier, float *row) {
  const unsigned top = uncut->tiers[t / 16];
  for (unsigned c = 0; c < uncut->schedule->dim; c++) {
    const unsigned code = naive_code(part, uncut->schedule->reach[top], uncut->groups[t / 16], c, t % 16);
    row[c] = tier == 0 ? 0 : qkv_gain_value(uncut->gains[t]) * qkv_codebook_value(tier, code >> (top - tier));
  }
  qkv_hadamard_inverse(row, uncut->schedule->dim);
}

// Dropping planes leaves the smaller quantizer's values of the leading bits, and nothing else changes. (A page coded
// at the smaller budget from the start may choose another scale and gain.)
static void dropping_planes_keeps_leading_bits(void **state) {
  (void)state;
  naive_random random = {34};
  const uint8_t tiers[2][4] = {{4, 0, 2, 3}, {1, 3, 3, 2}};
  coded page = encode(&random, (qkv_page_shape){2, 80, 24, 4, 3}, 64, gaussian);
  coded cut = narrowed(&page, tiers[QKV_K], tiers[QKV_V]);
  qkv_schedule k, v;
  qkv_schedule_uniform(&k, 80);
  qkv_schedule_uniform(&v, 24);
  for (uint16_t h = 0; h < 2; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const size_t dim = dim_of(&page, part);
      qkv_page_codes uncut;
      qkv_page_find(page.image, h, part, &k, &v, &uncut);
      float rows[64 * 80], expected[80];
      codec()->decode(cut.image, h, part, rows);
      for (unsigned t = 0; t < 64; t++) {
        expected_row(part, &uncut, t, tiers[part][t / 16], expected);
        for (size_t c = 0; c < dim; c++) {
          assert_true(fabsf(rows[t * dim + c] - expected[c]) <= 1e-5f * qkv_gain_value(uncut.gains[t]));
        }
      }
    }
  }
  release(&cut);
  release(&page);
}

// scores is q . k and accumulate is the weighted sum of v, over the decoded rows, in pages of mixed tiers too.
static void check_attention(const coded *page, naive_random *random) {
  enum { N = 3 };
  const size_t kd = page->shape.key_dim, vd = page->shape.value_dim;
  const uint16_t h = (uint16_t)(page->shape.kv_heads - 1);
  float *k = allocate(64 * kd * sizeof *k), *v = allocate(64 * vd * sizeof *v);
  float *queries = allocate(N * kd * sizeof *queries), *turned = allocate(N * kd * sizeof *turned);
  float *sums = allocate(N * vd * sizeof *sums);
  float scores[N * 64], weights[N * 64] = {0};
  for (size_t i = 0; i < N * kd; i++) turned[i] = queries[i] = (float)naive_gaussian(random);
  for (size_t i = 0; i < N * vd; i++) sums[i] = 0;
  for (size_t i = 0; i < N; i++) {
    for (size_t t = 0; t < page->tokens; t++) weights[i * 64 + t] = (float)naive_uniform(random);
  }
  codec()->query(&page->shape, 5, h, turned, N);
  codec()->scores(page->image, h, turned, N, scores);
  codec()->accumulate(page->image, h, weights, N, sums);
  codec()->output(&page->shape, 5, h, sums, N);
  codec()->decode(page->image, h, QKV_K, k);
  codec()->decode(page->image, h, QKV_V, v);
  for (size_t i = 0; i < N; i++) {
    for (size_t t = 0; t < page->tokens; t++) {
      double expected = 0, q2 = 0, k2 = 0;
      for (size_t c = 0; c < kd; c++) {
        const double q = queries[i * kd + c], key = k[t * kd + c];
        expected += q * key, q2 += q * q, k2 += key * key;
      }
      assert_true(fabs(scores[i * 64 + t] - expected) <= 2e-6 * sqrt(q2 * k2));
    }
    double miss2 = 0, size2 = 0;
    for (size_t c = 0; c < vd; c++) {
      double expected = 0, size = 0;
      for (size_t t = 0; t < page->tokens; t++) {
        const double term = (double)weights[i * 64 + t] * v[t * vd + c];
        expected += term, size += fabs(term);
      }
      const double miss = sums[i * vd + c] - expected;
      miss2 += miss * miss, size2 += size * size;
    }
    assert_true(sqrt(miss2) <= 2e-6 * sqrt(size2));
  }
  free(k), free(v), free(queries), free(turned), free(sums);
}

static void attention_is_that_over_decoded_rows(void **state) {
  (void)state;
  naive_random random = {35};
  for (size_t d = 0; d < DIMS; d++) {
    const uint8_t bits_k = budgets[naive_below(&random, BUDGETS)], bits_v = budgets[naive_below(&random, BUDGETS)];
    const qkv_page_shape shape = {2, dims[d], dims[DIMS - 1 - d], bits_k, bits_v};
    coded page = encode(&random, shape, d % 2 ? 64 : 37, gaussian);
    check_attention(&page, &random);
    uint8_t tiers_k[4], tiers_v[4];
    for (size_t g = 0; g < 4; g++) {
      tiers_k[g] = (uint8_t)naive_below(&random, bits_k + 1u);
      tiers_v[g] = (uint8_t)naive_below(&random, bits_v + 1u);
    }
    coded cut = narrowed(&page, tiers_k, tiers_v);
    check_attention(&cut, &random);
    release(&cut);
    release(&page);
  }
}

static void missing_slots_are_zero_rows(void **state) {
  (void)state;
  naive_random random = {36};
  coded page = encode(&random, (qkv_page_shape){2, 64, 64, 4, 4}, 5, gaussian);
  assert_int_equal(naive_read(page.image, 24, 2), 5);
  float query[64], scores[64];
  for (size_t c = 0; c < 64; c++) query[c] = 1;
  codec()->scores(page.image, 1, query, 1, scores);
  for (size_t t = 5; t < 64; t++) assert_true(scores[t] == 0);
  release(&page);
}

// One head's rows of the page's tokens, dense.
static float *head_rows(const coded *page, uint16_t h, qkv_part part) {
  const size_t dim = dim_of(page, part);
  float *rows = allocate(page->tokens * dim * sizeof *rows);
  for (size_t t = 0; t < page->tokens; t++) {
    const float *row = (part == QKV_K ? page->k : page->v) + (t * page->shape.kv_heads + h) * dim;
    memcpy(rows + t * dim, row, dim * sizeof *rows);
  }
  return rows;
}

// In the page and in one of lower tiers: any run of the rows matches where it lies, up to the first row that is
// another one, and nowhere else.
static void the_same_rows_match_and_no_others(void **state) {
  (void)state;
  naive_random random = {37};
  const uint8_t low_k[4] = {2, 1, 4, 3}, low_v[4] = {3, 3, 1, 2};
  coded page = encode(&random, (qkv_page_shape){2, 64, 96, 4, 3}, 50, gaussian);
  coded cut = narrowed(&page, low_k, low_v);
  for (unsigned i = 0; i < 200; i++) {
    const uint16_t h = i & 1;
    const qkv_part part = i & 2 ? QKV_V : QKV_K;
    const void *image = i & 4 ? cut.image : page.image;
    const size_t dim = dim_of(&page, part);
    const uint32_t first = i < 100 ? i % 50 : naive_below(&random, 50);
    const uint32_t tokens = i < 100 ? 1 : 1 + naive_below(&random, 50 - first);
    float *rows = head_rows(&page, h, part), *run = rows + first * dim;
    assert_int_equal(codec()->rows_match(image, h, part, first, tokens, run), tokens);
    assert_int_equal(codec()->rows_match(image, h, part, (first + 1) % 50, 1, run), 0);
    const uint32_t other = naive_below(&random, tokens);
    float largest = 0;
    for (size_t c = 0; c < dim; c++) largest = fmaxf(largest, fabsf(run[other * dim + c]));
    run[other * dim + naive_below(&random, (unsigned)dim)] += 4 * largest;
    assert_int_equal(codec()->rows_match(page.image, h, part, first, tokens, run), other);
    free(rows);
  }
  release(&cut);
  release(&page);
}

static void encoding_is_deterministic(void **state) {
  (void)state;
  naive_random random = {38};
  coded page = encode(&random, (qkv_page_shape){3, 80, 64, 4, 2}, 64, wandering_outlier);
  uint8_t *again = allocate(page.bytes);
  memset(again, 0xff, page.bytes);
  codec()->encode(&page.shape, 5, 640, 64, page.k, page.v, again);
  assert_memory_equal(again, page.image, page.bytes);
  free(again);
  release(&page);
}

static void foreign_pages_are_refused(void **state) {
  (void)state;
  naive_random random = {39};
  static const struct {
    size_t offset;
    uint8_t value;
    const char *text;
  } cases[] = {
      {5, 2, "page.codec is 2, expected 1"},
      {32, 7, "page.calibration is 7 and page.frame 0, only 0 is known"},
      {38, 2, "page.calibration is 0 and page.frame 2, only 0 is known"},
      {28, 12, "page.key_dim is 12: the row width is not a multiple of 8"},
      {28, 0, "page.key_dim is 0: the row width is not within 1 to 1024"},
      {31, 0xff, "page.value_dim is 65288: the row width is not within 1 to 1024"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    coded page = encode(&random, (qkv_page_shape){1, 8, 8, 1, 1}, 64, gaussian);
    page.image[cases[i].offset] = cases[i].value;
    qkv_page_seal(page.image);
    qkv_error error = {0};
    assert_int_equal(codec()->validate(page.image, page.bytes, &error), QKV_DATA_LOSS);
    assert_string_equal(error.text, cases[i].text);
    release(&page);
  }
  qkv_error error = {0};
  assert_int_equal(codec()->validate(cases, 10, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "the page is 10 bytes, its header is 64");
}

static void sizes_are_as_advertised(void **state) {
  (void)state;
  printf("bits  page of 2 heads, 64/64   bits per coordinate, all in\n");
  for (size_t b = 0; b < BUDGETS; b++) {
    const qkv_page_shape shape = {2, 64, 64, budgets[b], budgets[b]};
    const size_t bytes = codec()->page_bytes(&shape);
    const double all_in = 8.0 * (double)bytes / (2 * 64 * 128);
    printf("%4u  %6zu                   %.4f\n", budgets[b], bytes, all_in);
    assert_int_equal(bytes, 128 + 2 * (128 + 64 * 128 * budgets[b] / 8));
    assert_true(all_in <= budgets[b] + 0.2);
  }
  for (int bits = -1; bits < 20; bits++) {
    const bool allowed = bits == 1 || bits == 2 || bits == 3 || bits == 4 || bits == 8;
    assert_int_equal(codec()->bits_valid(bits), allowed);
  }
  assert_false(codec()->bits_valid(2.5));
  assert_false(codec()->bits_valid(NAN));
}

// Pages of the first release, decoded forever. Rows are integers over 256 from a generator of integers, so that
// every machine codes the same ones.
static void integers(naive_random *random, float *row, size_t dim) {
  for (size_t c = 0; c < dim; c++) row[c] = (float)((int)naive_below(random, 4097) - 2048) / 256;
  if (naive_below(random, 4) == 0) row[naive_below(random, (unsigned)dim)] *= 16;
  if (naive_below(random, 32) == 0) memset(row, 0, dim * sizeof *row);
}

static void check_golden(const char *path, uint8_t bits_k, uint8_t bits_v, uint32_t tokens, uint64_t decoded) {
  naive_random random = {1};
  coded page = encode(&random, (qkv_page_shape){2, 64, 64, bits_k, bits_v}, tokens, integers);
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  uint8_t *golden = allocate(page.bytes + 1);
  assert_int_equal(fread(golden, 1, page.bytes + 1, file), page.bytes);
  assert_int_equal(fclose(file), 0);
  assert_memory_equal(golden, page.image, page.bytes);
  float rows[4][64 * 64];
  memset(rows, 0, sizeof rows);
  for (uint16_t h = 0; h < 2; h++) {
    codec()->decode(golden, h, QKV_K, rows[h]);
    codec()->decode(golden, h, QKV_V, rows[2 + h]);
  }
  assert_true(XXH3_64bits(rows, sizeof rows) == decoded);
  free(golden);
  release(&page);
}

static void golden_pages_stay_readable(void **state) {
  (void)state;
  check_golden(QKV_SOURCE_DIR "/tests/golden/page_v1_k4_v4.bin", 4, 4, 64, 0x71e52ced19a20771u);
  check_golden(QKV_SOURCE_DIR "/tests/golden/page_v1_k2_v3.bin", 2, 3, 41, 0x87406cbc3ef2cd25u);
}

static void the_table_finds_its_rows(void **state) {
  (void)state;
  assert_ptr_equal(qkv_codec_by_name("embedded"), codec());
  assert_ptr_equal(qkv_codec_at(0), codec());
  assert_null(qkv_codec_at(1));
  assert_null(qkv_codec_by_id(0));
  assert_null(qkv_codec_by_id(2));
  assert_null(qkv_codec_by_name("Embedded"));
  for (size_t row = 0; qkv_codec_at(row); row++) {
    assert_ptr_equal(qkv_codec_by_id(qkv_codec_at(row)->id), qkv_codec_at(row));
    assert_int_not_equal(qkv_codec_at(row)->id, 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_table_finds_its_rows),
      cmocka_unit_test(sizes_are_as_advertised),
      cmocka_unit_test(gaussian_rows_keep_the_bound),
      cmocka_unit_test(outliers_are_tamed),
      cmocka_unit_test(every_prefix_keeps_its_bound),
      cmocka_unit_test(dropping_planes_keeps_leading_bits),
      cmocka_unit_test(attention_is_that_over_decoded_rows),
      cmocka_unit_test(missing_slots_are_zero_rows),
      cmocka_unit_test(the_same_rows_match_and_no_others),
      cmocka_unit_test(encoding_is_deterministic),
      cmocka_unit_test(foreign_pages_are_refused),
      cmocka_unit_test(golden_pages_stay_readable),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
