// The codec commvq with a calibration and with RoPE: what it gains, attention at positions, repeated rows, codebooks.
// What it has in common with all codecs of parts is in parts_test.c.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibrate.h"
#include "engine/codec/codec.h"
#include "engine/codec/commvq_book.h"
#include "tests/engine/codec/naive.h"

enum { HEADS = 2, Q_HEADS = 4, LEARNT = 1024, DIM = 32 };

static const uint64_t FAR = 100032;  // where the pages are that are tried

// Keys before RoPE and values of a model: far from 0, along few directions of their own in each head.
typedef struct source {
  float mean[2][HEADS][DIM], mix[2][HEADS][DIM][DIM];
} source;

static void init_source(source *from) {
  naive_random random = {3};
  for (size_t part = 0; part < 2; part++) {
    for (size_t h = 0; h < HEADS; h++) {
      for (size_t i = 0; i < DIM; i++) {
        from->mean[part][h][i] = (float)(2 * naive_gaussian(&random));
        for (size_t j = 0; j < DIM; j++)
          from->mix[part][h][i][j] = (float)(naive_gaussian(&random) * pow(0.8, (double)j));
      }
    }
  }
}

// A token's rows [HEADS][DIM]; keys turned to the position.
static void draw(const source *from, naive_random *random, const qkv_rope *rope, uint64_t position, size_t part,
                 float *rows) {
  for (size_t h = 0; h < HEADS; h++) {
    float *row = rows + h * DIM;
    memcpy(row, from->mean[part][h], DIM * sizeof *row);
    for (size_t j = 0; j < DIM; j++) {
      const float z = (float)naive_gaussian(random);
      for (size_t i = 0; i < DIM; i++) row[i] += z * from->mix[part][h][i][j];
    }
    if (part == QKV_K) qkv_rope_forward(rope, row, position);
  }
}

static const qkv_calibration *learn(const source *from, const qkv_rope *rope) {
  const qkv_calibration_shape shape = {
      .layers = 1, .kv_heads = HEADS, .q_heads = Q_HEADS, .key_dim = DIM, .value_dim = DIM, .rope = *rope};
  naive_random random = {5};
  qkv_moments *moments = qkv_moments_create(&shape);
  for (uint64_t t = 0; t < LEARNT; t++) {
    float k[HEADS * DIM], v[HEADS * DIM];
    draw(from, &random, rope, t, QKV_K, k);
    draw(from, &random, rope, t, QKV_V, v);
    qkv_moments_add(moments, 0, t, 1, k, v, true);
  }
  qkv_calibration *made = NULL;
  qkv_error error;
  if (qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_moments_destroy(&moments);
  return made;
}

typedef struct coded {
  const qkv_coder *coder;
  void *made;
  uint32_t tokens;
  float k[QKV_PAGE_TOKENS * HEADS * DIM], v[QKV_PAGE_TOKENS * HEADS * DIM];
  void *image;
  size_t bytes;
} coded;

static void setup(coded *page, double bits, const qkv_rope *rope, const qkv_calibration *calibration) {
  qkv_policy policy = QKV_POLICY_UNSET;
  policy.codec = qkv_codec_by_name("commvq");
  policy.bits_k = policy.bits_v = bits;
  const qkv_coder_spec spec = {.layers = 1,
                               .kv_heads = HEADS,
                               .q_heads = Q_HEADS,
                               .key_dim = DIM,
                               .value_dim = DIM,
                               .rope = rope,
                               .policies = &policy,
                               .purpose = QKV_PURPOSE_ATTEND,
                               .calibration = calibration};
  uint64_t bytes = 0;
  page->made = policy.codec->create(&spec, &page->coder, &bytes);
  page->image = aligned_alloc(64, policy.codec->page_bytes_max(page->coder));
  assert_non_null(page->image);
}

static void encode(coded *page, const source *from, const qkv_rope *rope, uint32_t tokens) {
  naive_random random = {7};
  page->tokens = tokens;
  for (uint32_t t = 0; t < tokens; t++) {
    draw(from, &random, rope, FAR + t, QKV_K, page->k + t * HEADS * DIM);
    draw(from, &random, rope, FAR + t, QKV_V, page->v + t * HEADS * DIM);
  }
  page->bytes = page->coder->codec->encode(page->coder, FAR, tokens, QKV_FP32, page->k, page->v, NULL, page->image);
}

static void release(coded *page) {
  page->coder->codec->destroy(page->made);
  free(page->image);
}

static double error_of(const coded *page, qkv_part part) {
  double error = 0, square = 0;
  for (size_t h = 0; h < HEADS; h++) {
    float rows[QKV_PAGE_TOKENS * DIM];
    page->coder->codec->decode(page->coder, page->image, (uint16_t)h, part, false, rows);
    for (size_t i = 0; i < page->tokens * (size_t)DIM; i++) {
      const double exact = (double)(part == QKV_K ? page->k : page->v)[(i / DIM * HEADS + h) * DIM + i % DIM];
      error += (exact - (double)rows[i]) * (exact - (double)rows[i]);
      square += exact * exact;
    }
  }
  return error / square;
}

// RoPE over all of a row, over part of it, of neighbours, with other frequencies at each position, and longer rows.
static const qkv_rope ropes[] = {
    {.theta = 10000},
    {.theta = 500000, .width = 16},
    {.theta = 10000, .interleaved = true},
    {.theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 2, .original_max_position = 512},
    {.theta = 10000, .scaling = QKV_ROPE_YARN, .factor = 4, .original_max_position = 512},
};
enum { ROPES = sizeof ropes / sizeof *ropes };

static qkv_rope resolved(size_t i) {
  qkv_rope rope = ropes[i];
  qkv_error error;
  if (qkv_rope_resolve(&rope, DIM, &error) != QKV_OK) fail_msg("%s", error.text);
  return rope;
}

static void a_calibration_gains(void **state) {
  (void)state;
  source from;
  init_source(&from);
  for (size_t i = 0; i < ROPES; i++) {
    const qkv_rope rope = resolved(i);
    const qkv_calibration *calibration = learn(&from, &rope);
    for (int bits = 1; bits <= 2; bits++) {
      static coded page;
      double errors[2][2];
      for (int calibrated = 0; calibrated < 2; calibrated++) {
        setup(&page, bits, &rope, calibrated ? calibration : NULL);
        encode(&page, &from, &rope, QKV_PAGE_TOKENS);
        for (qkv_part part = QKV_K; part <= QKV_V; part++) errors[calibrated][part] = error_of(&page, part);
        const qkv_page_header *header = page.image;
        assert_int_equal(header->calibration, calibrated ? qkv_calibration_version(calibration) : 0);
        release(&page);
      }
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        if (errors[1][part] > errors[0][part] * (part == QKV_K ? 0.9 : 0.1))
          fail_msg("rope %zu, %d bits, part %d: %g, without a calibration %g", i, bits, part, errors[1][part],
                   errors[0][part]);
      }
    }
    qkv_calibration_unref(&calibration);
  }
}

static void check_scores(const coded *page, uint16_t head, qkv_query_block *block) {
  float rows[QKV_PAGE_TOKENS * DIM], scores[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  const qkv_codec *codec = page->coder->codec;
  codec->decode(page->coder, page->image, head, QKV_K, false, rows);
  codec->query(page->coder, head, block);
  codec->scores(page->coder, page->image, head, block, scores);
  for (size_t i = 0; i < block->count; i++) {
    for (size_t t = 0; t < page->tokens; t++) {
      double sum = 0, size = 0;
      for (size_t c = 0; c < DIM; c++) {
        const double product = (double)block->rows[i * DIM + c] * (double)rows[t * DIM + c];
        sum += product;
        size += fabs(product);
      }
      if (fabs(sum - (double)scores[i * QKV_PAGE_TOKENS + t]) > 1e-4 * size)
        fail_msg("slot %zu: score %g, expected %g", t, (double)scores[i * QKV_PAGE_TOKENS + t], sum);
    }
  }
}

static void check_sums(const coded *page, uint16_t head, naive_random *random) {
  float rows[QKV_PAGE_TOKENS * DIM], weights[QKV_PAGE_TOKENS] = {0}, sums[DIM] = {0};
  double total = 0;
  const qkv_codec *codec = page->coder->codec;
  codec->decode(page->coder, page->image, head, QKV_V, false, rows);
  for (size_t t = 0; t < page->tokens; t++) total += (double)(weights[t] = (float)naive_uniform(random));
  codec->accumulate(page->coder, page->image, head, weights, 1, sums);
  codec->output(page->coder, head, sums, &total, 1);
  for (size_t c = 0; c < DIM; c++) {
    double sum = 0, size = 0;
    for (size_t t = 0; t < page->tokens; t++) {
      sum += (double)weights[t] * (double)rows[t * DIM + c];
      size += fabs((double)weights[t] * (double)rows[t * DIM + c]);
    }
    assert_true(fabs(sum - (double)sums[c]) <= 1e-4 * size);
  }
}

// A trial leaves parts of some heads data-free: these are coded as without a calibration.
static void parts_that_a_trial_drops_are_data_free(void **state) {
  (void)state;
  source from;
  init_source(&from);
  const qkv_rope rope = resolved(0);
  const qkv_calibration *learnt = learn(&from, &rope), *tried = NULL;
  bool drop[HEADS * QKV_CALIBRATION_PARTS];
  memset(drop, true, sizeof drop);
  qkv_error error = {0};
  if (qkv_calibration_adjust(&learnt, drop, NULL, NULL, (qkv_calibration **)&tried, &error) != QKV_OK)
    fail_msg("%s", error.text);
  static coded page, plain;
  setup(&page, 2, &rope, tried);
  setup(&plain, 2, &rope, NULL);
  encode(&page, &from, &rope, QKV_PAGE_TOKENS);
  encode(&plain, &from, &rope, QKV_PAGE_TOKENS);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (fabs(error_of(&page, part) / error_of(&plain, part) - 1) > 0.02)
      fail_msg("part %d: %g, without a calibration %g", part, error_of(&page, part), error_of(&plain, part));
  }
  release(&page);
  release(&plain);
  qkv_calibration_unref(&tried);
}

static void attention_is_that_of_the_decoded_rows(void **state) {
  (void)state;
  source from;
  init_source(&from);
  qkv_query_block *block = aligned_alloc(64, sizeof *block);
  assert_non_null(block);
  for (size_t i = 0; i < ROPES; i++) {
    static coded page;
    naive_random random = {11 + i};
    const qkv_rope rope = resolved(i);
    const qkv_calibration *calibration = learn(&from, &rope);
    setup(&page, 2, &rope, calibration);
    encode(&page, &from, &rope, 50);
    block->precision = QKV_PRECISION_DEFAULT;
    for (size_t h = 0; h < HEADS; h++) {
      block->count = 1 + naive_below(&random, QKV_QUERY_BLOCK);
      for (size_t c = 0; c < block->count * DIM; c++) block->rows[c] = (float)naive_gaussian(&random);
      check_scores(&page, (uint16_t)h, block);
      check_sums(&page, (uint16_t)h, &random);
    }
    release(&page);
    qkv_calibration_unref(&calibration);
  }
  free(block);
}

static void repeated_rows_are_told_from_others(void **state) {
  (void)state;
  source from;
  init_source(&from);
  for (size_t i = 0; i < ROPES; i++) {
    static coded page;
    const qkv_rope rope = resolved(i);
    const qkv_calibration *calibration = learn(&from, &rope);
    setup(&page, 2, &rope, calibration);
    encode(&page, &from, &rope, QKV_PAGE_TOKENS);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      float rows[QKV_PAGE_TOKENS * DIM];
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++)
        memcpy(rows + t * DIM, (part == QKV_K ? page.k : page.v) + (t * HEADS + 1) * DIM, DIM * sizeof *rows);
      const qkv_codec *codec = page.coder->codec;
      assert_int_equal(codec->rows_match(page.coder, page.image, 1, part, 0, 64, rows), 64);
      assert_int_equal(codec->rows_match(page.coder, page.image, 1, part, 21, 30, rows + 21 * DIM), 30);
      // Rows of other positions are other rows.
      assert_true(codec->rows_match(page.coder, page.image, 1, part, 20, 30, rows + 21 * DIM) < 30);
      rows[40 * DIM] += 100;
      assert_int_equal(codec->rows_match(page.coder, page.image, 1, part, 0, 64, rows), 40);
    }
    release(&page);
    qkv_calibration_unref(&calibration);
  }
}

static void expect_same_entries(const qkv_commvq_book *book, const qkv_commvq_book *other) {
  assert_memory_equal(other->rounds, book->rounds, book->groups * book->bits * sizeof *book->rounds);
  assert_memory_equal(other->pairs, book->pairs, sizeof book->pairs);
  assert_memory_equal(other->roots, book->roots, sizeof book->roots);
}

// A section has what would be trained at the first use; from a file's bytes it is read again.
static void sections_have_the_same_entries(void **state) {
  (void)state;
  source from;
  init_source(&from);
  const qkv_rope rope = resolved(1);
  const qkv_calibration *calibration = learn(&from, &rope), *plain = learn(&from, &rope);
  qkv_calibration *with = NULL, *again = NULL;
  qkv_section_wants wants = {0};
  qkv_error error = {0};
  size_t size;
  for (int bits = 1; bits <= 2; bits++) {
    const qkv_policy policy = {.codec = qkv_codec_by_name("commvq"), .bits_k = bits, .bits_v = 1};
    qkv_section_want(&wants, &policy);
  }
  assert_int_equal(qkv_calibration_add_sections(&plain, &wants, NULL, &with, &error), QKV_OK);
  const void *file = qkv_calibration_bytes(with, &size);
  if (qkv_calibration_read(file, size, &again, &error) != QKV_OK) fail_msg("%s", error.text);
  for (uint32_t h = 0; h < HEADS; h++) {
    for (unsigned bits = 1; bits <= 2; bits++) {
      const qkv_commvq_book *trained = qkv_commvq_book_get(calibration, 0, h, bits);
      expect_same_entries(trained, qkv_commvq_book_get(with, 0, h, bits));
      expect_same_entries(trained, qkv_commvq_book_get(again, 0, h, bits));
    }
  }
  // A trial that leaves a head's keys data-free leaves the other's entries.
  bool drop[HEADS * QKV_CALIBRATION_PARTS] = {[QKV_PART_K_ARCHIVE] = true};
  const qkv_calibration *tried = again;
  assert_int_equal(qkv_calibration_adjust(&tried, drop, NULL, NULL, &again, &error), QKV_OK);
  assert_ptr_equal(qkv_commvq_book_get(again, 0, 0, 2), qkv_commvq_book_data_free(DIM, 2));
  expect_same_entries(qkv_commvq_book_get(calibration, 0, 1, 2), qkv_commvq_book_get(again, 0, 1, 2));
  qkv_calibration_unref((const qkv_calibration **)&again);
  qkv_calibration_unref((const qkv_calibration **)&with);
  qkv_calibration_unref(&calibration);
}

// One KV head, of one group of pairs or of many; only some of a wide row turns.
static void narrow_and_wide_heads_have_sections(void **state) {
  (void)state;
  static const uint32_t dims[] = {8, 256};
  for (size_t i = 0; i < 2; i++) {
    const uint32_t dim = dims[i];
    qkv_calibration_shape shape = {.layers = 1, .kv_heads = 1, .q_heads = 1, .key_dim = dim, .value_dim = 8};
    shape.rope = (qkv_rope){.theta = 10000, .width = dim < 64 ? dim : 64};
    qkv_error error = {0};
    assert_int_equal(qkv_rope_resolve(&shape.rope, dim, &error), QKV_OK);
    qkv_moments *moments = qkv_moments_create(&shape);
    naive_random random = {13};
    for (uint64_t t = 0; t < LEARNT; t++) {
      float k[256], v[8];
      for (size_t c = 0; c < dim; c++) k[c] = (float)(2 + naive_gaussian(&random) * pow(0.98, (double)c));
      for (size_t c = 0; c < 8; c++) v[c] = (float)naive_gaussian(&random);
      qkv_moments_add(moments, 0, t, 1, k, v, true);
    }
    qkv_calibration *made = NULL, *again = NULL;
    size_t size;
    assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, &error), QKV_OK);
    qkv_moments_destroy(&moments);
    const qkv_calibration *plain = qkv_calibration_ref(made);
    qkv_section_wants wants = {0};
    qkv_section_want(&wants, &(qkv_policy){.codec = qkv_codec_by_name("commvq"), .bits_k = 1, .bits_v = 1});
    assert_int_equal(qkv_calibration_sections_cost(&shape, &wants), 64 + 64 * dim);
    assert_int_equal(qkv_calibration_add_sections(&plain, &wants, NULL, &again, &error), QKV_OK);
    const void *file = qkv_calibration_bytes(again, &size);
    qkv_calibration *read = NULL;
    assert_int_equal(qkv_calibration_read(file, size, &read, &error), QKV_OK);
    assert_int_equal(qkv_commvq_book_get(read, 0, 0, 1)->groups, dim / QKV_COMMVQ_WIDTH);
    expect_same_entries(qkv_commvq_book_get(made, 0, 0, 1), qkv_commvq_book_get(read, 0, 0, 1));
    qkv_calibration_unref((const qkv_calibration **)&made);
    qkv_calibration_unref((const qkv_calibration **)&again);
    qkv_calibration_unref((const qkv_calibration **)&read);
  }
}

// Entries are 2 x 2 matrices that commute with rotations; the book is made once and goes with the calibration.
static void books(void **state) {
  (void)state;
  source from;
  init_source(&from);
  const qkv_rope rope = resolved(0);
  const uint64_t before = qkv_calibration_bytes_held();
  const qkv_calibration *calibration = learn(&from, &rope);
  const uint64_t without = qkv_calibration_bytes_held();
  const qkv_commvq_book *book = qkv_commvq_book_get(calibration, 0, 1, 2);
  assert_ptr_equal(qkv_commvq_book_get(calibration, 0, 1, 2), book);
  assert_ptr_not_equal(qkv_commvq_book_get(calibration, 0, 0, 2), book);
  assert_true(qkv_calibration_bytes_held() >= without + 2 * sizeof *book);
  bool seen[DIM / 2] = {false};
  for (size_t at = 0; at < DIM / 2; at++) {
    assert_true(book->pairs[at] < DIM / 2 && !seen[book->pairs[at]]);
    seen[book->pairs[at]] = true;
  }
  for (size_t r = 0; r < book->groups * book->bits; r++) {
    for (size_t a = 0; a < QKV_COMMVQ_ENTRIES; a++) {
      for (size_t j = 0; j < QKV_COMMVQ_WIDTH; j += 2) {
        const float x = book->rounds[r].entries.of[0][j][a], y = book->rounds[r].entries.of[0][j + 1][a];
        assert_true(isfinite(x) && isfinite(y));
        assert_true(book->rounds[r].entries.of[1][j][a] == -y && book->rounds[r].entries.of[1][j + 1][a] == x);
      }
    }
  }
  // Another calibration of the same rows has the same codebooks.
  const qkv_calibration *again = learn(&from, &rope);
  const qkv_commvq_book *same = qkv_commvq_book_get(again, 0, 1, 2);
  expect_same_entries(same, book);
  qkv_calibration_unref(&again);
  qkv_calibration_unref(&calibration);
  assert_int_equal(qkv_calibration_bytes_held(), before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_calibration_gains),
      cmocka_unit_test(parts_that_a_trial_drops_are_data_free),
      cmocka_unit_test(attention_is_that_of_the_decoded_rows),
      cmocka_unit_test(repeated_rows_are_told_from_others),
      cmocka_unit_test(sections_have_the_same_entries),
      cmocka_unit_test(narrow_and_wide_heads_have_sections),
      cmocka_unit_test(books),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
