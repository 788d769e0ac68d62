// Codecs of parts: their rows, attention, bytes and limits, and the figures that their sources publish.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/codec/codec.h"
#include "engine/codec/parts.h"
#include "engine/codec/sphere.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/codec/coded_page.h"

static const way ways[] = {
    {"kivi", NULL, 2, 2, 0},
    {"kivi", NULL, 3, 4, 64},
    {"kivi", NULL, 8, 5, 0},
    {"turboquant", NULL, 1, 2, 0},
    {"turboquant", NULL, 3, 4, 2},
    {"turboquant", NULL, 5, 6, 0},
    {"turboquant", NULL, 7, 8, 0},
    {"turboquant-ip", "turboquant", 2, 3, 0},
    {"turboquant-ip", "kivi", 4, 4, 0},
    {"turboquant-ip", "turboquant", 8, 1, 2},
    {"pq", NULL, 2, 1, 0},
    {"pq", NULL, 4, 4, 0},
    {"int8", NULL, 8, 8, 0},
    {"commvq", NULL, 1, 2, 0},
    {"commvq", NULL, 2, 1, 0},
    {"commvq", "kivi", 2, 4, 0},
    {"kivi", "commvq", 2, 2, 0},
    {"turboquant-outliers", NULL, 1, 4, 0},
    {"turboquant-outliers", "kivi", 3, 2, 0},
    {"turboquant-ip-outliers", "turboquant-outliers", 2, 3, 0},
    {"turboquant-ip-outliers", "turboquant", 4, 2, 0},
    {"turboquant-outliers", NULL, 3, 2, 40},
    {"turboquant-low-rank", NULL, 2, 3, 0},
    {"kivi-low-rank", "turboquant-low-rank", 3, 1, 8},
    {"turboquant-low-rank", "kivi-low-rank", 4, 2, 1},
    {"turboquant-delta", NULL, 1, 3, 0},
    {"turboquant-delta", "int8-delta", 4, 8, 8},
    {"int8-delta", "turboquant-delta", 8, 2, 64},
    {"polarquant-low-rank", "int8-low-rank", 3, 8, 0},
    {"int8-low-rank", "kivi-low-rank", 8, 3, 1},
    {"running-u8-low-rank", "polarquant-low-rank", 8, 2, 0},
    {"kivi-delta", NULL, 2, 3, 0},
    {"kivi-delta", NULL, 8, 4, 8},
    {"polarquant-delta", NULL, 3, 2, 0},
    {"polarquant-delta", "kivi-delta", 1, 5, 64},
    {"turboquant-outliers-delta", NULL, 3, 2, 0},
    {"turboquant-outliers-delta", "polarquant-delta", 4, 4, 16},
    {"polarquant", NULL, 2, 3, 0},
    {"polarquant", NULL, 4, 5, 2},
    {"running-u8", NULL, 8, 8, 0},
    {"turboquant", "kivi", 3, 2, 0},
    {"kivi", "polarquant", 4, 5, 0},
    {"running-u8", "turboquant", 8, 1, 0},
    {"ecsq", NULL, 2, 3.25, 0},
    {"ecsq", NULL, 8, 1.25, 0},
    {"ecsq", "kivi", 2.5, 4, 0},
    {"turboquant", "ecsq", 4, 2, 0},
};
enum { WAYS = sizeof ways / sizeof *ways };
static const uint16_t dims[] = {8, 64, 80, 128, 256};
enum { DIMS = sizeof dims / sizeof *dims };

// ---- Rows ----

static void rows_come_back_within_the_bound(void **state) {
  (void)state;
  naive_random random = {1};
  for (size_t w = 0; w < WAYS; w++) {
    coded page;
    setup(&page, &ways[w], 128, 64, NULL);
    double errors[2] = {0};
    enum { ROUNDS = 6 };
    for (int i = 0; i < ROUNDS; i++) {
      encode(&page, &random, QKV_PAGE_TOKENS, gaussian);
      for (qkv_part part = QKV_K; part <= QKV_V; part++) errors[part] += error_of(&page, part) / ROUNDS;
      free(page.k);
      free(page.v);
      free(page.image);
    }
    const qkv_codec *codecs[] = {page.policy.codec,
                                 page.policy.codec_v != NULL ? page.policy.codec_v : page.policy.codec};
    const double bits[] = {ways[w].bits_k, ways[w].bits_v};
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const double bound = codecs[part]->error_bound(bits[part]);
      if (errors[part] > bound || errors[part] < bound / 3)
        fail_msg("%s of %s at %g bits: error %g, bound %g", part == QKV_K ? "keys" : "values", codecs[part]->name,
                 bits[part], errors[part], bound);
    }
    page.k = page.v = NULL;
    page.image = NULL;
    release(&page);
  }
}

static void short_pages_and_odd_rows(void **state) {
  (void)state;
  naive_random random = {2};
  for (size_t w = 0; w < WAYS; w++) {
    for (size_t d = 0; d < DIMS; d++) {
      coded page;
      qkv_error error;
      setup(&page, &ways[w], dims[d], dims[DIMS - 1 - d], NULL);
      encode(&page, &random, 1 + naive_below(&random, QKV_PAGE_TOKENS), outlier_channels);
      assert_int_equal(page.coder->codec->validate(page.coder, page.image, page.bytes, &error), QKV_OK);
      assert_true(error_of(&page, QKV_K) < 1 && error_of(&page, QKV_V) < 1);
      release(&page);
      // Zeros come back as zeros.
      setup(&page, &ways[w], dims[d], 8, NULL);
      encode(&page, &random, 3, gaussian);
      memset(page.k, 0, (size_t)3 * HEADS * dims[d] * sizeof *page.k);
      page.coder->codec->encode(page.coder, 0, 3, QKV_FP32, page.k, page.v, NULL, page.image);
      float rows[3 * 256];
      page.coder->codec->decode(page.coder, page.image, 1, QKV_K, false, rows);
      for (size_t i = 0; i < (size_t)3 * dims[d]; i++) assert_true(rows[i] == 0);
      release(&page);
    }
  }
}

// Channels far from 0 that hardly change, a few rows by as little as fp32 has: what is stored of them is finite, and
// close.
static void nearly_constant(naive_random *random, float *row, size_t dim) {
  for (size_t c = 0; c < dim; c++)
    row[c] = 1001.3f + (float)c + (naive_below(random, QKV_PAGE_TOKENS) == 0 ? 1e-4f : 0);
}

static void channels_that_hardly_change(void **state) {
  (void)state;
  naive_random random = {4};
  for (size_t w = 0; w < WAYS; w++) {
    coded page;
    qkv_error error = {0};
    setup(&page, &ways[w], 128, 64, NULL);
    encode(&page, &random, QKV_PAGE_TOKENS, nearly_constant);
    if (page.coder->codec->validate(page.coder, page.image, page.bytes, &error) != QKV_OK)
      fail_msg("%s: %s", page.coder->codec->name, error.text);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const double missed = error_of(&page, part);
      if (!(missed < 0.5)) fail_msg("%s, part %d: error %g", page.coder->codec->name, (int)part, missed);
    }
    release(&page);
  }
}

static void repeated_rows_are_told_from_others(void **state) {
  (void)state;
  naive_random random = {3};
  for (size_t w = 0; w < WAYS; w++) {
    coded page;
    setup(&page, &ways[w], 64, 128, NULL);
    encode(&page, &random, QKV_PAGE_TOKENS, outlier_channels);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const size_t dim = dim_of(&page, part);
      float *rows = allocate(QKV_PAGE_TOKENS * dim * sizeof *rows);
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++)
        memcpy(rows + t * dim, row_of(&page, part, t, 1), dim * sizeof *rows);
      assert_int_equal(page.coder->codec->rows_match(page.coder, page.image, 1, part, 0, 64, rows), 64);
      assert_int_equal(page.coder->codec->rows_match(page.coder, page.image, 1, part, 10, 7, rows + 10 * dim), 7);
      for (size_t c = 0; c < dim; c++) rows[40 * dim + c] = -rows[40 * dim + c];
      assert_int_equal(page.coder->codec->rows_match(page.coder, page.image, 1, part, 0, 64, rows), 40);
      free(rows);
    }
    release(&page);
  }
}

static void keys_before_rope(void **state) {
  (void)state;
  naive_random random = {4};
  qkv_rope rope = {.theta = 10000};
  qkv_error error;
  assert_int_equal(qkv_rope_resolve(&rope, 64, &error), QKV_OK);
  coded page;
  setup(&page, &ways[2], 64, 64, &rope);
  encode(&page, &random, 50, gaussian);
  float after[64 * 64], before[64 * 64];
  page.coder->codec->decode(page.coder, page.image, 0, QKV_K, false, after);
  page.coder->codec->decode(page.coder, page.image, 0, QKV_K, true, before);
  for (size_t t = 0; t < 50; t++) {
    qkv_rope_forward(&rope, before + t * 64, 640 + t);
    for (size_t c = 0; c < 64; c++) assert_true(fabsf(before[t * 64 + c] - after[t * 64 + c]) < 1e-4f);
  }
  release(&page);
}

// ---- Attention ----

// What products in whole numbers may add, relative to the query's length times that of the page's longest key.
// Nothing in floats.
static double rounding_of(double bits, qkv_precision precision) {
  return precision == QKV_PRECISION_DEFAULT && bits <= QKV_MIX_INTEGER_BITS ? 0.01 : 0;
}

// Weights as the softmax makes them; in whole numbers where the coder can.
static void weigh(const coded *page, qkv_query_block *block, const float *weights, float *sums) {
  const void *pages[] = {page->image};
  float scores[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS], peaks[QKV_QUERY_BLOCK] = {0}, totals[QKV_QUERY_BLOCK];
  const qkv_codec *codec = page->coder->codec;
  for (size_t i = 0; i < block->count * QKV_PAGE_TOKENS; i++) scores[i] = logf(weights[i]);
  if (codec->weigh(page->coder, pages, 1, 1, block, scores, peaks, totals, sums) == 0)
    return codec->accumulate(page->coder, page->image, 1, weights, block->count, sums);
  for (size_t i = 0; i < block->count; i++) {
    double total = 0;
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) total += (double)weights[i * QKV_PAGE_TOKENS + t];
    assert_true(fabs(total - (double)totals[i]) < 1e-4 * total);
  }
}

static double length_of(const float *row, size_t dim) {
  double square = 0;
  for (size_t c = 0; c < dim; c++) square += (double)row[c] * (double)row[c];
  return sqrt(square);
}

static void check_attention(qkv_precision precision) {
  naive_random random = {5};
  qkv_query_block *block = allocate(sizeof *block);
  for (size_t w = 0; w < WAYS; w++) {
    const double rounding_k = rounding_of(ways[w].bits_k, precision);
    const double rounding_v = rounding_of(ways[w].bits_v, precision);
    for (size_t d = 0; d < DIMS; d++) {
      coded page;
      setup(&page, &ways[w], dims[d], dims[DIMS - 1 - d], NULL);
      encode(&page, &random, QKV_PAGE_TOKENS, outlier_channels);
      const qkv_codec *codec = page.coder->codec;
      const size_t kd = dims[d], vd = dims[DIMS - 1 - d], n = 1 + naive_below(&random, QKV_QUERY_BLOCK);
      float *k = allocate(64 * kd * sizeof *k), *v = allocate(64 * vd * sizeof *v);
      float *scores = allocate(n * 64 * sizeof *scores), *sums = allocate(n * vd * sizeof *sums);
      double totals[QKV_QUERY_BLOCK];
      codec->decode(page.coder, page.image, 1, QKV_K, false, k);
      codec->decode(page.coder, page.image, 1, QKV_V, false, v);
      block->count = n;
      block->precision = precision;
      gaussian(&random, block->rows, n * kd);
      double longest = 0;
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) longest = fmax(longest, length_of(k + t * kd, kd));
      codec->query(page.coder, 1, block);
      codec->scores(page.coder, page.image, 1, block, scores);
      for (size_t i = 0; i < n; i++) {
        for (size_t t = 0; t < 64; t++) {
          double sum = 0, size = 0, qq = 0;
          for (size_t c = 0; c < kd; c++) {
            sum += (double)block->rows[i * kd + c] * (double)k[t * kd + c];
            size += fabs((double)block->rows[i * kd + c] * (double)k[t * kd + c]);
            qq += (double)block->rows[i * kd + c] * (double)block->rows[i * kd + c];
          }
          const double off = fabs(sum - (double)scores[i * 64 + t]);
          if (off > 2e-5 * size + 2e-5 + rounding_k * sqrt(qq) * longest)
            fail_msg("keys of %s at %g bits, width %zu: a score is %g off of lengths %g", ways[w].k, ways[w].bits_k,
                     kd, off, sqrt(qq) * longest);
        }
      }
      memset(sums, 0, n * vd * sizeof *sums);
      for (size_t i = 0; i < n; i++) {
        totals[i] = 0;
        for (size_t t = 0; t < 64; t++) totals[i] += (double)(scores[i * 64 + t] = (float)naive_uniform(&random));
      }
      weigh(&page, block, scores, sums);
      codec->output(page.coder, 1, sums, totals, n);
      for (size_t i = 0; i < n; i++) {
        double size = 0;
        for (size_t j = 0; j < 64 * vd; j++) size = fmax(size, fabs((double)v[j]));
        for (size_t c = 0; c < vd; c++) {
          double sum = 0;
          for (size_t t = 0; t < 64; t++) sum += (double)scores[i * 64 + t] * (double)v[t * vd + c];
          assert_true(fabs(sum - (double)sums[i * vd + c]) <= 64 * (1e-5 + rounding_v) * size);
        }
      }
      free(k);
      free(v);
      free(scores);
      free(sums);
      release(&page);
    }
  }
  free(block);
}

static void attention_is_that_of_the_decoded_rows(void **state) {
  (void)state;
  check_attention(QKV_PRECISION_FP32);
}

static void attention_in_whole_numbers_is_close(void **state) {
  (void)state;
  check_attention(QKV_PRECISION_DEFAULT);
}

// ---- Bytes ----

static void damaged_pages_are_refused(void **state) {
  (void)state;
  naive_random random = {6};
  for (size_t w = 0; w < WAYS; w++) {
    coded page;
    qkv_error error;
    setup(&page, &ways[w], 64, 24, NULL);
    encode(&page, &random, 40, gaussian);
    uint8_t *whole = allocate(page.bytes), *copy = (uint8_t *)allocate(page.bytes + 1) + 1;
    memcpy(whole, page.image, page.bytes);
    memcpy(copy, whole, page.bytes);
    assert_int_equal(page.coder->codec->validate(page.coder, copy, page.bytes, &error), QKV_OK);
    for (size_t i = 0; i < page.bytes; i += i < 160 ? 1 : 17) {
      copy[i] ^= (uint8_t)(1 + naive_below(&random, 255));
      assert_int_equal(page.coder->codec->validate(page.coder, copy, page.bytes, &error), QKV_DATA_LOSS);
      // With a checksum that fits, all but rows and positions still has to be right.
      memcpy(page.image, copy, page.bytes);
      const size_t begin = offsetof(qkv_page_header, layer), end = offsetof(qkv_page_header, tokens) + 1;
      if (i < 128 && (i < begin || i >= end) && (i < 56 || i >= 64) && (i < 8 || i >= 12)) {
        qkv_page_seal(page.image);
        assert_int_equal(page.coder->codec->validate(page.coder, page.image, page.bytes, &error), QKV_DATA_LOSS);
      }
      memcpy(page.image, whole, page.bytes);
      memcpy(copy, whole, page.bytes);
    }
    for (size_t bytes = 0; bytes < page.bytes; bytes += 1 + bytes / 2)
      assert_int_equal(page.coder->codec->validate(page.coder, copy, bytes, &error), QKV_DATA_LOSS);
    // Numbers that are none.
    memset(page.image + 128, 0xff, 64);
    qkv_page_seal(page.image);
    assert_int_equal(page.coder->codec->validate(page.coder, page.image, page.bytes, &error), QKV_DATA_LOSS);
    free(copy - 1);
    free(whole);
    release(&page);
  }
}

static void check_golden(const char *name, const way *as, uint32_t tokens) {
  naive_random random = {7};
  coded page;
  char path[256];
  setup(&page, as, 64, 64, NULL);
  encode(&page, &random, tokens, whole);
  snprintf(path, sizeof path, "%s/tests/golden/%s", QKV_SOURCE_DIR, name);
  if (getenv("QKV_GOLDEN_WRITE") != NULL) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(page.image, 1, page.bytes, out), page.bytes);
    fclose(out);
  }
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  uint8_t *golden = allocate(page.bytes + 1);
  qkv_error error;
  assert_int_equal(fread(golden, 1, page.bytes + 1, file), page.bytes);
  fclose(file);
  assert_int_equal(page.coder->codec->validate(page.coder, golden, page.bytes, &error), QKV_OK);
  assert_memory_equal(golden, page.image, page.bytes);
  free(golden);
  release(&page);
}

// Of an encoder of before, whose choices were others: they are read, and err as little.
static void check_golden_of_before(const char *name, const way *as, uint32_t tokens) {
  naive_random random = {7};
  coded page;
  char path[256];
  qkv_error error;
  setup(&page, as, 64, 64, NULL);
  encode(&page, &random, tokens, whole);
  const double now[] = {error_of(&page, QKV_K), error_of(&page, QKV_V)};
  snprintf(path, sizeof path, "%s/tests/golden/%s", QKV_SOURCE_DIR, name);
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  const size_t bytes = fread(page.image, 1, page.coder->codec->page_bytes_max(page.coder), file);
  fclose(file);
  if (page.coder->codec->validate(page.coder, page.image, bytes, &error) != QKV_OK) fail_msg("%s", error.text);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (fabs(error_of(&page, part) / now[part] - 1) > 0.1)
      fail_msg("%s, part %d: error %g, now %g", name, part, error_of(&page, part), now[part]);
  }
  release(&page);
}

static void golden_pages_stay_readable(void **state) {
  (void)state;
  check_golden("parts_v1_kivi_k4_v2.bin", &(way){"kivi", NULL, 4, 2, 0}, 64);
  check_golden("parts_v1_turboquant_k4_v3.bin", &(way){"turboquant", NULL, 4, 3, 0}, 41);
  check_golden("parts_v1_turboquant-ip_k3_v2.bin", &(way){"turboquant-ip", NULL, 3, 2, 0}, 50);
  check_golden("parts_v1_pq_k2_v4.bin", &(way){"pq", NULL, 2, 4, 0}, 50);
  check_golden("parts_v1_commvq_k2_v1.bin", &(way){"commvq", NULL, 2, 1, 0}, 50);
  check_golden("parts_v1_int8.bin", &(way){"int8", NULL, 8, 8, 0}, 64);
  check_golden("parts_v1_turboquant-outliers_k2_v3.bin", &(way){"turboquant-outliers", NULL, 2, 3, 0}, 50);
  check_golden("parts_v1_turboquant-ip-outliers_k3_v2.bin", &(way){"turboquant-ip-outliers", NULL, 3, 2, 0}, 40);
  check_golden("parts_v1_turboquant-low-rank_k2_v3.bin", &(way){"turboquant-low-rank", NULL, 2, 3, 0}, 50);
  check_golden("parts_v1_kivi-low-rank_k2_v3.bin", &(way){"kivi-low-rank", NULL, 2, 3, 8}, 64);
  check_golden("parts_v1_turboquant-delta_k2_v3.bin", &(way){"turboquant-delta", NULL, 2, 3, 0}, 50);
  check_golden("parts_v1_int8-delta.bin", &(way){"int8-delta", NULL, 8, 8, 16}, 64);
  check_golden("parts_v1_polarquant-low-rank_k2_v3.bin", &(way){"polarquant-low-rank", NULL, 2, 3, 0}, 50);
  check_golden("parts_v1_int8-low-rank.bin", &(way){"int8-low-rank", NULL, 8, 8, 1}, 50);
  check_golden("parts_v1_running-u8-low-rank.bin", &(way){"running-u8-low-rank", NULL, 8, 8, 1}, 50);
  check_golden("parts_v1_kivi-delta_k2_v3.bin", &(way){"kivi-delta", NULL, 2, 3, 0}, 50);
  check_golden("parts_v1_polarquant-delta_k2_v3.bin", &(way){"polarquant-delta", NULL, 2, 3, 16}, 50);
  check_golden("parts_v1_turboquant-outliers-delta_k2_v3.bin", &(way){"turboquant-outliers-delta", NULL, 2, 3, 0},
               50);
  check_golden("parts_v1_ecsq_k2.5_v2.bin", &(way){"ecsq", NULL, 2.5, 2, 0}, 50);
  check_golden_of_before("parts_v1_ecsq_k2.5_v2_exact_borders.bin", &(way){"ecsq", NULL, 2.5, 2, 0}, 50);
  check_golden("parts_v1_polarquant_k4_v2.bin", &(way){"polarquant", NULL, 4, 2, 0}, 64);
  check_golden("parts_v1_running-u8.bin", &(way){"running-u8", NULL, 8, 8, 0}, 64);
  check_golden("parts_v1_turboquant_k3_kivi_v2.bin", &(way){"turboquant", "kivi", 3, 2, 0}, 64);
}

// ---- Published figures ----

static void lloyd_max_distortions(void **state) {
  (void)state;
  static const double published[] = {0.36338, 0.11748, 0.03454, 0.00950, 0.00250};
  for (unsigned bits = 1; bits <= 8; bits++) {
    const qkv_sphere *gaussian_book = qkv_sphere_get(QKV_SPHERE_GAUSSIAN, bits);
    if (bits <= 5) assert_true(fabs(gaussian_book->distortion - published[bits - 1]) < 1e-5);
    for (size_t d = 0; d < DIMS; d++) {
      const qkv_sphere *book = qkv_sphere_get(dims[d], bits);
      const size_t last = ((size_t)1 << bits) - 1;
      // Less than the bound of the sphere, and than a Gaussian's.
      assert_true(book->distortion < sqrt(3) * 3.14159265 / 2 * pow(4, -(double)bits));
      assert_true(book->distortion < gaussian_book->distortion);
      for (size_t i = 0; i <= last; i++) {
        assert_true(book->values[i] == -book->values[last - i]);
        assert_true(i == 0 || book->values[i] > book->values[i - 1]);
        assert_int_equal(qkv_sphere_code(book, bits, book->values[i]), i);
      }
    }
  }
}

static double cosine_of(const coded *page, qkv_part part) {
  const size_t dim = dim_of(page, part);
  float *rows = allocate(QKV_PAGE_TOKENS * dim * sizeof *rows);
  double sum = 0;
  page->coder->codec->decode(page->coder, page->image, 0, part, false, rows);
  for (size_t t = 0; t < page->tokens; t++) {
    const float *exact = row_of(page, part, t, 0), *read = rows + t * dim;
    double xy = 0, xx = 0, yy = 0;
    for (size_t c = 0; c < dim; c++) {
      xy += (double)exact[c] * (double)read[c];
      xx += (double)exact[c] * (double)exact[c];
      yy += (double)read[c] * (double)read[c];
    }
    sum += xy / sqrt(xx * yy);
  }
  free(rows);
  return sum / page->tokens;
}

typedef struct products {
  double xx, xy, yy, missed;  // of exact scores x and scores y
  size_t count;
} products;

// Scores of random queries of length sqrt(dim) against a head's keys, exact and on codes.
static products score_gaussian_keys(const way *as, size_t dim, int rounds) {
  naive_random random = {11};
  products sums = {0};
  qkv_query_block *block = allocate(sizeof *block);
  for (int round = 0; round < rounds; round++) {
    coded page;
    float scores[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
    setup(&page, as, (uint16_t)dim, 64, NULL);
    encode(&page, &random, QKV_PAGE_TOKENS, gaussian);
    block->count = QKV_QUERY_BLOCK;
    block->precision = QKV_PRECISION_DEFAULT;
    gaussian(&random, block->rows, QKV_QUERY_BLOCK * dim);
    page.coder->codec->query(page.coder, 0, block);
    page.coder->codec->scores(page.coder, page.image, 0, block, scores);
    for (size_t i = 0; i < sizeof scores / sizeof *scores; i++) {
      const float *key = row_of(&page, QKV_K, i % QKV_PAGE_TOKENS, 0);
      const float *query = block->rows + i / QKV_PAGE_TOKENS * dim;
      double x = 0, y = (double)scores[i];
      for (size_t c = 0; c < dim; c++) x += (double)query[c] * (double)key[c];
      sums.xx += x * x;
      sums.xy += x * y;
      sums.yy += y * y;
      sums.missed += (y - x) * (y - x);
      sums.count++;
    }
    release(&page);
  }
  free(block);
  return sums;
}

// The MSE quantizer's scores are those of shorter keys, by what it misses; those of the inner-product quantizer are
// right on average, and vary as its source says: of residuals r by (pi / 2 |q|^2 |r|^2 - (q . r)^2) / dim.
static void inner_products_are_unbiased(void **state) {
  (void)state;
  enum { DIM = 64, ROUNDS = 40 };
  for (unsigned bits = 2; bits <= 4; bits++) {
    const double left = qkv_sphere_get(DIM, bits - 1)->distortion;
    const products mse = score_gaussian_keys(&(way){"turboquant", NULL, bits - 1, 2, 0}, DIM, ROUNDS);
    const products ip = score_gaussian_keys(&(way){"turboquant-ip", NULL, bits, 2, 0}, DIM, ROUNDS);
    assert_true(fabs(mse.xy / mse.xx - (1 - left)) < 0.02 * left + 0.002);
    assert_true(fabs(ip.xy / ip.xx - 1) < 0.1 * left);
    const double variance = left * DIM * (1.57079633 - 1.0 / DIM);  // |q|^2 and |k|^2 are DIM on average
    const double found = ip.missed / (double)ip.count;
    if (fabs(found / variance - 1) > 0.05) fail_msg("%u bits: variance %g, expected %g", bits, found, variance);
    // The bound of the source: sqrt(3) pi^2 |q|^2 |k|^2 / dim * 4^-bits.
    assert_true(found < sqrt(3) * 9.8696 * DIM * pow(4, -(double)bits));
  }
}

// On Gaussian rows of 128, as published, without norms of rows.
static void polarquant_cosines(void **state) {
  (void)state;
  static const double published[] = {0.94, 0.98, 0.995, 0.999};
  naive_random random = {8};
  for (int bits = 2; bits <= 5; bits++) {
    coded page;
    setup(&page, &(way){"polarquant", NULL, bits, bits, 2}, 128, 128, NULL);
    encode(&page, &random, 64, gaussian);
    const double cosine = cosine_of(&page, QKV_K);
    assert_true(fabs(cosine - published[bits - 2]) < 0.004);
    release(&page);
  }
}

// Keys with channels that are far off: per channel, as keys are coded, against per token, as values are.
static void kivi_keys_are_closer_per_channel(void **state) {
  (void)state;
  naive_random random = {9};
  coded page;
  setup(&page, &(way){"kivi", NULL, 4, 4, 0}, 128, 128, NULL);
  encode(&page, &random, 64, outlier_channels);
  const double per_channel = sqrt(error_of(&page, QKV_K)), per_token = sqrt(error_of(&page, QKV_V));
  assert_true(per_token / per_channel >= 1.7);
  release(&page);
}

static void running_u8_is_small_and_close(void **state) {
  (void)state;
  naive_random random = {10};
  coded page;
  setup(&page, &(way){"running-u8", NULL, 8, 8, 0}, 128, 128, NULL);
  encode(&page, &random, 64, gaussian);
  assert_true(3 * page.bytes < (size_t)64 * HEADS * 256 * sizeof(float));
  assert_true(cosine_of(&page, QKV_K) > 0.9999 && cosine_of(&page, QKV_V) > 0.9999);
  release(&page);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_come_back_within_the_bound),
      cmocka_unit_test(short_pages_and_odd_rows),
      cmocka_unit_test(channels_that_hardly_change),
      cmocka_unit_test(repeated_rows_are_told_from_others),
      cmocka_unit_test(keys_before_rope),
      cmocka_unit_test(attention_is_that_of_the_decoded_rows),
      cmocka_unit_test(attention_in_whole_numbers_is_close),
      cmocka_unit_test(damaged_pages_are_refused),
      cmocka_unit_test(golden_pages_stay_readable),
      cmocka_unit_test(lloyd_max_distortions),
      cmocka_unit_test(inner_products_are_unbiased),
      cmocka_unit_test(polarquant_cosines),
      cmocka_unit_test(kivi_keys_are_closer_per_channel),
      cmocka_unit_test(running_u8_is_small_and_close),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
