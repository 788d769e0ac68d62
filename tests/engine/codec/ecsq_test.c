// ecsq: what it gains, that no row of a page is coded badly whatever stands next to it, that pages are within their
// budget, and that bytes which no encoder writes are refused.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <math.h>

#include "engine/codec/codec.h"
#include "tests/engine/codec/coded_page.h"

enum { DIM = 64 };

// The relative squared error of one row.
static double row_error(const coded *page, qkv_part part, size_t t, uint16_t head) {
  static float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  const size_t dim = dim_of(page, part);
  const float *exact = row_of(page, part, t, head);
  double missed = 0, square = 0;
  page->coder->codec->decode(page->coder, page->image, head, part, false, rows);
  for (size_t c = 0; c < dim; c++) {
    const double off = (double)exact[c] - (double)rows[t * dim + c];
    missed += off * off;
    square += (double)exact[c] * (double)exact[c];
  }
  return missed / square;
}

// Codes the rows again that were changed.
static void encode_again(coded *page, uint64_t position) {
  qkv_error error;
  page->bytes =
      page->coder->codec->encode(page->coder, position, page->tokens, QKV_FP32, page->k, page->v, NULL, page->image);
  assert_true(page->bytes <= page->coder->codec->page_bytes_max(page->coder));
  if (page->coder->codec->validate(page->coder, page->image, page->bytes, &error) != QKV_OK)
    fail_msg("%s", error.text);
}

// Rows of another length: their errors stay a part of their own, and hardly cost the others.
static void planted_rows_are_coded_as_well_as_others(void **state) {
  (void)state;
  static const double factors[] = {1e-5, 1e-3, 0.03, 0.3, 3, 30, 1000};
  naive_random random = {1};
  for (unsigned bits = 2; bits <= 4; bits++) {
    for (size_t f = 0; f < sizeof factors / sizeof *factors; f++) {
      coded page;
      setup(&page, &(way){"ecsq", NULL, bits, bits, 0}, DIM, DIM, NULL);
      encode(&page, &random, QKV_PAGE_TOKENS, gaussian);
      const double usual[] = {error_of(&page, QKV_K), error_of(&page, QKV_V)};
      const size_t slots[] = {0, 1 + naive_below(&random, 30), 31 + naive_below(&random, 33)};
      for (size_t i = 0; i < 3; i++) {
        for (size_t c = 0; c < (size_t)HEADS * DIM; c++) {
          page.k[slots[i] * HEADS * DIM + c] *= (float)factors[f];
          page.v[slots[i] * HEADS * DIM + c] *= (float)factors[f];
        }
      }
      encode_again(&page, 640);
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
          const double error = row_error(&page, part, t, 1);
          if (error > 3 * usual[part] + 1e-9)
            fail_msg("%u bits, part %d, rows times %g: row %zu errs by %g, usually %g", bits, (int)part, factors[f],
                     t, error, usual[part]);
        }
      }
      release(&page);
    }
  }
}

// All of a row in one coordinate, in a page of others.
static void single_coordinates(void **state) {
  (void)state;
  naive_random random = {2};
  coded page;
  setup(&page, &(way){"ecsq", NULL, 2, 2, 0}, DIM, DIM, NULL);
  encode(&page, &random, QKV_PAGE_TOKENS, gaussian);
  memset(page.v + 9 * HEADS * DIM, 0, HEADS * DIM * sizeof *page.v);
  page.v[9 * HEADS * DIM + 5] = page.v[9 * HEADS * DIM + DIM + 5] = 32768;
  encode_again(&page, 640);
  assert_true(row_error(&page, QKV_V, 9, 1) < 0.1);
  release(&page);
}

// The squared error of a bit less than the fixed codes': of Gaussian rows 4^-bits is the limit, 1.42 times that what
// even steps with an ideal entropy code have.
static void gaussian_rows_are_near_the_limit(void **state) {
  (void)state;
  naive_random random = {3};
  for (double bits = 2; bits <= 6; bits += 1.125) {
    coded page;
    setup(&page, &(way){"ecsq", NULL, bits, bits, 0}, 128, 128, NULL);
    encode(&page, &random, QKV_PAGE_TOKENS, gaussian);
    const double limit = pow(4, -bits), error = error_of(&page, QKV_V);
    if (error < limit || error > 1.7 * limit) fail_msg("%g bits: error %g, limit %g", bits, error, limit);
    release(&page);
  }
}

// Rows that take more than the budget whatever the step: the worst that there is, and it ends.
static void pages_stay_within_their_budget(void **state) {
  (void)state;
  naive_random random = {4};
  for (unsigned round = 0; round < 30; round++) {
    coded page;
    setup(&page, &(way){"ecsq", NULL, 1, 1, 0}, 8, 64, NULL);
    encode(&page, &random, 1 + naive_below(&random, QKV_PAGE_TOKENS), gaussian);
    for (size_t i = 0; i < (size_t)page.tokens * HEADS * 64; i++)
      page.v[i] *= ldexpf(1, (int)naive_below(&random, 60) - 45) * (naive_below(&random, 9) == 0 ? 1 : 0);
    encode_again(&page, 640);
    release(&page);
  }
}

// A checksum that fits, and any bytes in the blocks: refused, or numbers.
static void hostile_blocks(void **state) {
  (void)state;
  naive_random random = {5};
  unsigned refused = 0;
  for (unsigned round = 0; round < 300; round++) {
    coded page;
    qkv_error error;
    float rows[QKV_PAGE_TOKENS * DIM];
    setup(&page, &(way){"ecsq", NULL, 2, 3, 0}, DIM, DIM, NULL);
    encode(&page, &random, 20, gaussian);
    for (unsigned i = 0; i <= round % 5; i++)
      page.image[128 + naive_below(&random, (uint32_t)page.bytes - 128)] = (uint8_t)naive_below(&random, 256);
    qkv_page_seal(page.image);
    if (page.coder->codec->validate(page.coder, page.image, page.bytes, &error) == QKV_OK) {
      page.coder->codec->decode(page.coder, page.image, 0, QKV_K, false, rows);
      page.coder->codec->decode(page.coder, page.image, 1, QKV_V, false, rows);
    } else {
      refused++;
    }
    release(&page);
  }
  assert_true(refused > 200);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(planted_rows_are_coded_as_well_as_others),
      cmocka_unit_test(single_coordinates),
      cmocka_unit_test(gaussian_rows_are_near_the_limit),
      cmocka_unit_test(pages_stay_within_their_budget),
      cmocka_unit_test(hostile_blocks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
