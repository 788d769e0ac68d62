// ecsq: what it gains, that no row of a page is coded badly whatever stands next to it, that pages are within their
// budget, that every machine writes the same bytes, and that bytes which no encoder writes are refused.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "engine/base/cpu.h"
#include "engine/codec/codec.h"
#include "engine/codec/ecsq_internal.h"
#include "engine/kernel/kernel.h"
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

// Rows of another length: their errors stay a part of their own, and hardly cost the others: two steps, which
// are 1.19.
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
        double others = 0;
        for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
          const double error = row_error(&page, part, t, 1);
          if (error > 3 * usual[part] + 1e-9)
            fail_msg("%u bits, part %d, rows times %g: row %zu errs by %g, usually %g", bits, (int)part, factors[f],
                     t, error, usual[part]);
          if (t != slots[0] && t != slots[1] && t != slots[2])
            others += (error + row_error(&page, part, t, 0)) / (HEADS * (QKV_PAGE_TOKENS - 3));
        }
        if (others > 1.25 * usual[part])
          fail_msg("%u bits, part %d, rows times %g: the others err by %g, usually %g", bits, (int)part, factors[f],
                   others, usual[part]);
      }
      release(&page);
    }
  }
}

// Steps of rows that are more than two octaves longer than others grow with them: their relative error is that of
// rows four times as long as usual, a sixteenth of the usual one, however long they are.
static void long_rows_do_not_take_the_bits_of_others(void **state) {
  (void)state;
  static const float factors[] = {8, 30, 1000, 1e5f};
  naive_random random = {10};
  for (size_t f = 0; f < sizeof factors / sizeof *factors; f++) {
    coded page;
    setup(&page, &(way){"ecsq", NULL, 3, 3, 0}, DIM, DIM, NULL);
    encode(&page, &random, QKV_PAGE_TOKENS, gaussian);
    const double usual = error_of(&page, QKV_V);
    for (size_t c = 0; c < (size_t)HEADS * DIM; c++) page.v[20 * HEADS * DIM + c] *= factors[f];
    encode_again(&page, 640);
    const double error = row_error(&page, QKV_V, 20, 0);
    if (error > usual / 6 || error < usual / 40) fail_msg("times %g: %g, usually %g", factors[f], error, usual);
    release(&page);
  }
}

// ---- The ladder ----

// Student's t with 8 degrees of freedom: what is below x, and the integral of t f(t) from x on.
static double t_below(double x) {
  const double angle = atan(x / sqrt(8)), square = cos(angle) * cos(angle);
  return 0.5 + 0.5 * sin(angle) * (1 + square / 2 * (1 + square * 3 / 4 * (1 + square * 5 / 6)));
}

static double t_mean_from(double x) {
  const double density = tgamma(4.5) / (sqrt(8 * M_PI) * tgamma(4));
  return density * 8 / 7 * pow(1 + x * x / 8, -3.5);
}

// Where codes of a magnitude begin.
static double border(unsigned context, unsigned magnitude) {
  if (magnitude == 0) return 0;
  return magnitude == 1 ? (double)qkvi_ecsq.borders[context].zero
                        : (double)(magnitude - qkvi_ecsq.borders[context].offset);
}

// Of the distribution that a context stands for, scaled to its deviation in steps: codes take at most 1 % and 0.01
// bits more than their entropy, and values are within 0.1 steps of the mean of what has their code (borders above
// the second are taken to be whole steps from it).
static void contexts_are_what_they_stand_for(void **state) {
  (void)state;
  qkvi_ecsq_fill();
  for (unsigned context = 0; context < ECSQ_CONTEXTS; context++) {
    const double scale = exp2((ECSQ_LEAST + (int)context) / 4.0) / sqrt(8.0 / 6);
    double cost = 0, entropy = 0, left = 1;
    for (int magnitude = 0; magnitude <= qkvi_ecsq.tops[context]; magnitude++) {
      const double from = border(context, (unsigned)magnitude) / scale;
      const double to = border(context, (unsigned)magnitude + 1) / scale;
      const double share = t_below(to) - t_below(from);  // of one sign; of 0 half
      const ecsq_symbol *symbol = &qkvi_ecsq.symbols[context][ECSQ_HALF + magnitude];
      const double codes = magnitude == 0 ? 1 : 2, own = magnitude == 0 ? 2 * share : share;
      cost += codes * own * -log2(symbol->frequency / (double)RANS_TOTAL);
      entropy += codes * own * -log2(own);
      left -= 2 * share;
      const double mean = scale * (t_mean_from(from) - t_mean_from(to)) / share;
      if (magnitude > 0 && share > 0.002 && fabs(mean - (double)symbol->value) > 0.1)
        fail_msg("context %u, code %d: its value is %g, the mean %g", context, magnitude, (double)symbol->value,
                 mean);
    }
    const double escape = qkvi_ecsq.symbols[context][ECSQ_ESCAPE].frequency / (double)RANS_TOTAL;
    cost += left * -log2(escape);
    entropy += left * -log2(left);
    if (cost > 1.01 * entropy + 0.01) fail_msg("context %u: %g bits, the entropy is %g", context, cost, entropy);
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

// The quotient by a product is the one by division, at the borders, too.
static void symbols_are_put_as_by_division(void **state) {
  (void)state;
  naive_random random = {6};
  for (uint32_t frequency = 1; frequency < RANS_TOTAL; frequency++) {
    const uint32_t start = naive_below(&random, RANS_TOTAL - frequency + 1), limit = frequency << 20;
    const uint32_t given[] = {RANS_LEAST,
                              limit - 1,
                              limit,
                              UINT32_MAX,
                              limit - frequency,
                              limit - frequency - 1,
                              limit / 2,
                              limit / 2 + limit % 3,
                              naive_below(&random, UINT32_MAX)};
    const rans_symbol symbol = rans_symbol_of(start, frequency);
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
      uint8_t bytes[2][4] = {{0}};
      rans_writer by_division = {.states = {given[i] | RANS_LEAST}, .begin = bytes[0], .at = bytes[0] + 4};
      rans_writer by_product = {.states = {given[i] | RANS_LEAST}, .begin = bytes[1], .at = bytes[1] + 4};
      rans_put(&by_division, 0, start, frequency);
      rans_put_symbol(&by_product, 0, &symbol);
      assert_int_equal(by_product.states[0], by_division.states[0]);
      assert_int_equal(by_product.at - by_product.begin, by_division.at - by_division.begin);
      if (by_division.at < bytes[0] + 4) assert_memory_equal(bytes[0] + 2, bytes[1] + 2, 2);
    }
  }
}

static void few_bits_are_put_as_many(void **state) {
  (void)state;
  naive_random random = {9};
  for (unsigned count = 1; count <= RANS_BITS; count++) {
    for (unsigned round = 0; round < 100; round++) {
      const uint32_t limit = (uint32_t)(RANS_TOTAL >> count) << 20, bits = naive_below(&random, 1u << count);
      const uint32_t x = round < 3 ? limit + round - 1 : RANS_LEAST + naive_below(&random, UINT32_MAX - RANS_LEAST);
      uint8_t bytes[2][4] = {{0}};
      rans_writer a = {.states = {x}, .begin = bytes[0], .at = bytes[0] + 4};
      rans_writer b = {.states = {x}, .begin = bytes[1], .at = bytes[1] + 4};
      rans_put_bits(&a, 0, bits, count);
      rans_put_few(&b, 0, bits, count);
      assert_int_equal(a.states[0], b.states[0]);
      assert_int_equal(a.at - bytes[0], b.at - bytes[1]);
      if (a.at < bytes[0] + 4) assert_memory_equal(bytes[0] + 2, bytes[1] + 2, 2);
    }
  }
}

// Of a page of whole numbers, coded with the calibration in a golden file.
static uint64_t calibrated_digest(const qkv_calibration *calibration) {
  enum { KEY_DIM = 16, VALUE_DIM = 8, TOKENS = 61 };
  const qkv_rope none = {0};
  naive_random random = {8};
  qkv_policy policy = QKV_POLICY_UNSET;
  policy.codec = qkv_codec_by_name("ecsq");
  policy.bits_k = policy.bits_v = 2.5;
  policy.sink_tokens = 4;
  const qkv_coder_spec spec = {.layers = 1,
                               .kv_heads = 1,
                               .q_heads = 1,
                               .key_dim = KEY_DIM,
                               .value_dim = VALUE_DIM,
                               .rope = &none,
                               .policies = &policy,
                               .purpose = QKV_PURPOSE_FETCH,
                               .calibration = calibration};
  const qkv_coder *coder = NULL;
  qkv_error error;
  uint64_t used = 0, digest = 0;
  float k[TOKENS * KEY_DIM], v[TOKENS * VALUE_DIM];
  void *made = policy.codec->create(&spec, &coder, &used);
  void *image = allocate(policy.codec->page_bytes_max(coder));
  for (unsigned round = 0; round < 8; round++) {  // rows of 1, 8, 64, ...
    const uint32_t range = 1u << round * 3 % 16;
    for (size_t i = 0; i < sizeof k / sizeof *k; i++)
      k[i] = (float)naive_below(&random, 2 * range + 1) - (float)range;
    for (size_t i = 0; i < sizeof v / sizeof *v; i++)
      v[i] = (float)naive_below(&random, 2 * range + 1) - (float)range;
    const size_t bytes = policy.codec->encode(coder, round * 64, TOKENS, QKV_FP32, k, v, NULL, image);
    if (policy.codec->validate(coder, image, bytes, &error) != QKV_OK) fail_msg("%s", error.text);
    digest = XXH3_64bits_withSeed(image, bytes, digest);
  }
  policy.codec->destroy(made);
  free(image);
  return digest;
}

// With a calibration, and by the kernels of every rung; without one parts_test.c has a golden page.
static void every_machine_writes_the_same_bytes(void **state) {
  (void)state;
  static uint8_t bytes[8192];
  qkv_calibration *calibration = NULL;
  qkv_error error;
  FILE *file = fopen(QKV_SOURCE_DIR "/tests/golden/calibration_v2.bin", "rb");
  assert_non_null(file);
  const size_t size = fread(bytes, 1, sizeof bytes, file);
  fclose(file);
  if (qkv_calibration_read(bytes, size, &calibration, &error) != QKV_OK) fail_msg("%s", error.text);
  for (size_t row = 0; qkv_kernels_at(row) != NULL; row++) {
    if ((qkv_kernels_at(row)->needs & ~qkv_cpu_flags()) != 0) continue;
    qkv_kernels_setup(qkv_kernels_at(row)->needs);
    const uint64_t digest = calibrated_digest(calibration), expected = UINT64_C(0xde7c35f68890e779);
    if (digest != expected)
      fail_msg("%s: digest %016llx, expected %016llx", qkv_kernels_at(row)->name, (unsigned long long)digest,
               (unsigned long long)expected);
  }
  qkv_kernels_setup(~(uint32_t)0);
  qkv_calibration_unref((const qkv_calibration **)&calibration);
}

// Behind the image there is no memory. In one page of 32 the last block ends where the image does.
static void no_byte_behind_a_page_is_read(void **state) {
  (void)state;
  enum { SPACE = 1 << 16 };
  uint8_t *space = mmap(NULL, 2 * (size_t)SPACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_ptr_not_equal(space, MAP_FAILED);
  assert_int_equal(mprotect(space + SPACE, SPACE, PROT_NONE), 0);
  naive_random random = {9};
  unsigned full = 0;
  for (unsigned round = 0; round < 400; round++) {
    static float expected[QKV_PAGE_TOKENS * DIM], rows[QKV_PAGE_TOKENS * DIM];
    coded page;
    uint32_t end;
    setup(&page, &(way){"ecsq", NULL, 2, 2, 0}, DIM, DIM, NULL);
    encode(&page, &random, QKV_PAGE_TOKENS, gaussian);
    memcpy(&end, page.image + 128 + (2 * HEADS - 1) * sizeof end, sizeof end);
    full += (128 + 2 * HEADS * sizeof end + 63) / 64 * 64 + end == page.bytes ? 1 : 0;
    uint8_t *image = space + SPACE - page.bytes;
    memcpy(image, page.image, page.bytes);
    page.coder->codec->decode(page.coder, page.image, HEADS - 1, QKV_V, false, expected);
    page.coder->codec->decode(page.coder, image, HEADS - 1, QKV_V, false, rows);
    assert_memory_equal(rows, expected, sizeof rows);
    release(&page);
  }
  assert_true(full >= 3);
  assert_int_equal(munmap(space, 2 * (size_t)SPACE), 0);
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
      cmocka_unit_test(long_rows_do_not_take_the_bits_of_others),
      cmocka_unit_test(contexts_are_what_they_stand_for),
      cmocka_unit_test(gaussian_rows_are_near_the_limit),
      cmocka_unit_test(pages_stay_within_their_budget),
      cmocka_unit_test(symbols_are_put_as_by_division),
      cmocka_unit_test(few_bits_are_put_as_many),
      cmocka_unit_test(every_machine_writes_the_same_bytes),
      cmocka_unit_test(hostile_blocks),
      cmocka_unit_test(no_byte_behind_a_page_is_read),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
