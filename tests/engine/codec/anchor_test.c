// Anchors: attention against decoded rows, chains in a closed loop, bytes from outside, the choice at equal bytes.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdio.h>

#include "engine/codec/anchor.h"
#include "engine/codec/trial.h"
#include "engine/kernel/kernel.h"
#include "naive.h"

enum { TOKENS = QKV_PAGE_TOKENS, SLOTS_OF_GROUP = QKV_GROUP_TOKENS };

static const uint16_t dims[] = {8, 24, 64, 80, 128, 256, 1024};
enum { DIMS = sizeof dims / sizeof *dims };

static void *allocate(size_t bytes) {
  void *block = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  assert_non_null(block);
  memset(block, 0xa5, (bytes + 63) & ~(size_t)63);
  return block;
}

// One head's part of a page.
typedef struct coded {
  qkv_schedule schedule;
  uint32_t tokens;
  uint8_t byte;
  uint8_t tier;
  uint8_t *section;
  size_t bytes;
  float *rows, *residual, *decoded;  // [64][dim]
  const float *weights;              // [dim] of squared errors, or NULL
  uint8_t gains[TOKENS], *codes;
  float errors[TOKENS];
  qkv_page_codes page;
  qkv_anchor anchor;
} coded;

static coded start(uint16_t dim, uint32_t tokens) {
  coded c = {.tokens = tokens};
  qkv_schedule_uniform(&c.schedule, dim);
  const size_t floats = (size_t)TOKENS * dim * sizeof(float);
  c.section = allocate(qkv_anchor_bytes_max(dim));
  c.rows = allocate(floats);
  c.residual = allocate(floats);
  c.decoded = allocate(floats);
  c.codes = allocate((size_t)TOKENS * dim);
  return c;
}

static void finish(coded *c) {
  free(c->section);
  free(c->rows);
  free(c->residual);
  free(c->decoded);
  free(c->codes);
}

static qkv_anchor_input input_of(const coded *c) {
  return (qkv_anchor_input){.schedule = &c->schedule, .weights = c->weights, .rows = c->rows, .tokens = c->tokens};
}

// The residual's codes, and what they and the section decode to.
static void code(coded *c, qkv_part part) {
  c->page = (qkv_page_codes){.gains = c->gains, .schedule = &c->schedule};
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    c->page.groups[g] = c->codes + g * qkv_schedule_group_bytes(&c->schedule, c->tier);
    c->page.tiers[g] = c->tier;
  }
  qkv_kernels_get()->encode(part, &c->schedule, c->tier, c->weights, c->residual, c->gains, c->codes, c->errors);
  qkv_kernels_get()->decode(part, &c->page, c->decoded);
  assert_int_equal(qkv_anchor_find(c->byte, c->section, c->schedule.dim, &c->anchor), c->bytes);
  qkv_anchor_rows(&c->anchor, c->decoded);
}

static void encode(coded *c, qkv_part part, const qkv_anchor_options *options, uint8_t tier) {
  const qkv_anchor_input input = input_of(c);
  c->tier = tier;
  c->byte = qkv_anchor_encode(&input, options, tier, TOKENS, c->section, &c->bytes, c->residual);
  assert_int_equal(qkv_anchor_kind_of(c->byte), options->kind);
  code(c, part);
}

// Squared error over squared signal.
static double error_of(const coded *c) {
  double error = 0, signal = 0;
  for (size_t i = 0; i < (size_t)c->tokens * c->schedule.dim; i++) {
    const double x = (double)c->rows[i], miss = x - (double)c->decoded[i];
    error += miss * miss;
    signal += x * x;
  }
  return error / signal;
}

// A walk that starts anywhere: every step is `step` times the norm of a row.
static void slow_drift(naive_random *random, double step, coded *c) {
  const size_t dim = c->schedule.dim;
  for (size_t i = 0; i < dim; i++) {
    double x = naive_gaussian(random);
    for (size_t t = 0; t < c->tokens; t++) {
      c->rows[t * dim + i] = (float)x;
      x = (x + step * naive_gaussian(random)) / sqrt(1 + step * step);
    }
  }
}

// ---- Attention ----

static double dot(const float *a, const float *b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
  return sum;
}

static void check_attention(naive_random *random, coded *c, qkv_part part) {
  enum { QUERIES = 5 };
  const size_t dim = c->schedule.dim;
  float queries[QUERIES * QKV_DIM_MAX], scores[QUERIES * TOKENS], weights[QUERIES * TOKENS];
  float scratch[QUERIES * TOKENS], sums[QUERIES * QKV_DIM_MAX];
  for (size_t i = 0; i < QUERIES * dim; i++) queries[i] = (float)naive_gaussian(random);
  for (size_t i = 0; i < QUERIES * TOKENS; i++) {
    weights[i] = i % TOKENS < c->tokens ? (float)naive_uniform(random) : 0;
  }
  if (part == QKV_K) {
    qkv_kernels_get()->scores(&c->page, queries, QUERIES, scores);
    qkv_anchor_scores(&c->anchor, queries, QUERIES, scores);
    for (size_t i = 0; i < QUERIES * TOKENS; i++) {
      if (i % TOKENS >= c->tokens) continue;
      const float *query = queries + i / TOKENS * dim, *row = c->decoded + i % TOKENS * dim;
      const double size = sqrt(dot(query, query, dim) * dot(row, row, dim));
      assert_true(fabs(dot(query, row, dim) - (double)scores[i]) <= 3e-5 * size + 1e-30);
    }
    return;
  }
  memset(sums, 0, sizeof sums);
  const float *used = qkv_anchor_weights(&c->anchor, weights, QUERIES, scratch, sums);
  assert_ptr_equal(used, c->anchor.kind == QKV_ANCHOR_CHAIN ? scratch : weights);
  qkv_kernels_get()->accumulate(&c->page, used, QUERIES, sums);
  for (size_t i = 0; i < QUERIES; i++) {
    for (size_t j = 0; j < dim; j++) {
      double expected = 0, size = 0;
      for (size_t t = 0; t < c->tokens; t++) {
        const double term = (double)weights[i * TOKENS + t] * (double)c->decoded[t * dim + j];
        expected += term;
        size += fabs(term);
      }
      assert_true(fabs(expected - (double)sums[i * dim + j]) <= 1e-4 * size + 1e-3);
    }
  }
}

static void test_attention(void **state) {
  (void)state;
  naive_random random = {1};
  static const qkv_anchor_options options[] = {{.kind = QKV_ANCHOR_NONE},
                                               {.kind = QKV_ANCHOR_MEAN},
                                               {.kind = QKV_ANCHOR_GROUP},
                                               {.kind = QKV_ANCHOR_CHAIN},
                                               {.kind = QKV_ANCHOR_CHAIN, .every = 1},
                                               {.kind = QKV_ANCHOR_CHAIN, .every = 7},
                                               {.kind = QKV_ANCHOR_CHAIN, .threshold = 0.2f}};
  for (size_t d = 0; d < DIMS; d++) {
    for (size_t o = 0; o < sizeof options / sizeof *options; o++) {
      coded c = start(dims[d], o % 2 == 0 ? TOKENS : 1 + naive_below(&random, TOKENS));
      slow_drift(&random, 0.2, &c);
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        encode(&c, part, &options[o], 24);
        check_attention(&random, &c, part);
      }
      finish(&c);
    }
  }
}

// A constant far from 0 costs nothing once it is taken off; slots without tokens are coded as zero rows.
static void test_means(void **state) {
  (void)state;
  naive_random random = {2};
  for (qkv_anchor_kind kind = QKV_ANCHOR_MEAN; kind <= QKV_ANCHOR_GROUP; kind++) {
    coded c = start(64, 37);
    for (size_t t = 0; t < c.tokens; t++) {
      for (size_t i = 0; i < 64; i++) {
        const double level = kind == QKV_ANCHOR_MEAN ? 10 : 10.0 * ((double)(t / SLOTS_OF_GROUP) - 1);
        c.rows[t * 64 + i] = (float)((i % 2 ? level : -level) + naive_gaussian(&random));
      }
    }
    encode(&c, QKV_K, &(qkv_anchor_options){.kind = kind}, 16);
    const double signal = dot(c.rows, c.rows, (size_t)c.tokens * 64) / (c.tokens * 64.0);
    assert_true(error_of(&c) * signal < 0.125);  // of noise with variance 1, at 2 bits
    for (size_t t = c.tokens; t < TOKENS; t++) assert_int_equal(c.gains[t], 0);
    finish(&c);
  }
}

// Rows of zeros, huge rows and rows smaller than any gain.
static void test_extremes(void **state) {
  (void)state;
  static const float levels[] = {0, 1e6f, 1e-7f, 32768.0f};
  for (qkv_anchor_kind kind = QKV_ANCHOR_MEAN; kind <= QKV_ANCHOR_CHAIN; kind++) {
    for (size_t l = 0; l < sizeof levels / sizeof *levels; l++) {
      coded c = start(64, TOKENS);
      for (size_t i = 0; i < (size_t)TOKENS * 64; i++) c.rows[i] = i % 3 ? levels[l] : -levels[l];
      encode(&c, QKV_V, &(qkv_anchor_options){.kind = kind, .threshold = 0.5f}, 32);
      size_t used;
      assert_int_equal(qkv_anchor_validate(c.byte, c.section, c.bytes, TOKENS, 64, &used, NULL), QKV_OK);
      for (size_t i = 0; i < (size_t)TOKENS * 64; i++) {
        assert_true(fabsf(c.rows[i] - c.decoded[i]) <= 0.2f * levels[l] + 2e-6f + (levels[l] > 1e5f ? levels[l] : 0));
      }
      finish(&c);
    }
  }
}

// ---- Chains ----

// Thirty rows around one point, and from row 15 on around another.
static void sudden_drift(naive_random *random, coded *c) {
  double point[QKV_DIM_MAX];
  for (size_t t = 0; t < c->tokens; t++) {
    for (size_t i = 0; i < c->schedule.dim; i++) {
      if (t % 15 == 0) point[i] = naive_gaussian(random);
      c->rows[t * c->schedule.dim + i] = (float)(point[i] + 0.02 * naive_gaussian(random));
    }
  }
}

// The same two anchors, once at fixed places and once where the rows change.
static void test_sudden_drift(void **state) {
  (void)state;
  naive_random random = {3};
  enum { STREAMS = 20 };
  for (uint8_t tier = 8; tier <= 24; tier += 8) {
    double fixed = 0, adaptive = 0, at_drift[2] = {0};
    for (size_t s = 0; s < STREAMS; s++) {
      coded c = start(64, 30);
      sudden_drift(&random, &c);
      for (size_t which = 0; which < 2; which++) {
        const qkv_anchor_options options = {
            .kind = QKV_ANCHOR_CHAIN, .every = which == 0 ? 20 : 0, .threshold = which == 0 ? 0 : 0.4f};
        encode(&c, QKV_K, &options, tier);
        assert_int_equal(c.anchor.count, 2);
        assert_int_equal(c.anchor.starts, which == 0 ? 0x100001 : 0x8001);
        *(which == 0 ? &fixed : &adaptive) += error_of(&c) / STREAMS;
        double error = 0;
        for (size_t i = 0; i < 64; i++) {
          const double miss = (double)c.rows[15 * 64 + i] - (double)c.decoded[15 * 64 + i];
          error += miss * miss;
        }
        at_drift[which] += error / dot(c.rows + 15 * 64, c.rows + 15 * 64, 64) / STREAMS;
      }
      finish(&c);
    }
    printf("sudden drift, %u bits: MSE %.5f (row 15: %.4f) with fixed anchors, %.6f (%.6f) with adaptive ones\n",
           tier / 8, fixed, at_drift[0], adaptive, at_drift[1]);
    assert_true(adaptive <= 0.0013);
    assert_true(fixed > 10 * adaptive);
    if (tier <= 16) assert_true(at_drift[0] > 0.116);
  }
}

// At 2 bits and, with the anchor paid for, at equal bytes.
static void test_slow_drift(void **state) {
  (void)state;
  naive_random random = {4};
  enum { STREAMS = 20 };
  for (uint8_t tier = 16; tier <= 20; tier += 4) {
    double plain = 0, chain = 0, mean = 0;
    for (size_t s = 0; s < STREAMS; s++) {
      coded c = start(64, 50);
      slow_drift(&random, 0.15, &c);
      encode(&c, QKV_V, &(qkv_anchor_options){.kind = QKV_ANCHOR_NONE}, tier);
      plain += error_of(&c) / STREAMS;
      const uint8_t paid = (uint8_t)qkvi_tier_within(&c.schedule, tier, qkv_anchor_bytes(QKV_ANCHOR_CHAIN, 1, 64));
      encode(&c, QKV_V, &(qkv_anchor_options){.kind = QKV_ANCHOR_CHAIN}, paid);
      chain += error_of(&c) / STREAMS;
      encode(&c, QKV_V, &(qkv_anchor_options){.kind = QKV_ANCHOR_MEAN}, tier - 1);
      mean += error_of(&c) / STREAMS;
      finish(&c);
    }
    printf("slow drift, %.1f bits: MSE %.5f plain, %.5f mean, %.5f chain at equal bytes, %.1f %% below\n", tier / 8.0,
           plain, mean, chain, 100 - 100 * chain / plain);
    assert_true(chain < 0.05 * plain);  // published: 0.05
  }
}

// What is coded is the difference to the row before as it is decoded, to the bit, so errors do not add up.
static void test_closed_loop(void **state) {
  (void)state;
  naive_random random = {5};
  coded c = start(64, TOKENS);
  slow_drift(&random, 0.3, &c);
  encode(&c, QKV_K, &(qkv_anchor_options){.kind = QKV_ANCHOR_CHAIN}, 16);
  double first = 0, last = 0;
  for (size_t t = 1; t < TOKENS; t++) {
    double error = 0;
    for (size_t i = 0; i < 64; i++) {
      const double miss = (double)c.rows[t * 64 + i] - (double)c.decoded[t * 64 + i];
      error += miss * miss;
      assert_true(c.residual[t * 64 + i] == c.rows[t * 64 + i] - c.decoded[(t - 1) * 64 + i]);
    }
    *(t < TOKENS / 2 ? &first : &last) += error;
  }
  assert_true(last < 1.5 * first);
  finish(&c);
}

// Down a tier by coding again: about what coding the rows themselves at that tier gives, where dropping planes
// drifts.
static void test_recode(void **state) {
  (void)state;
  naive_random random = {6};
  coded c = start(64, 50);
  slow_drift(&random, 0.15, &c);
  const qkv_anchor_options options = {.kind = QKV_ANCHOR_CHAIN, .every = 16};
  encode(&c, QKV_K, &options, 24);
  qkv_page_codes cut = c.page;
  uint8_t narrowed[QKV_PAGE_GROUPS][QKV_GROUP_TOKENS * 64];
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    naive_narrow(QKV_K, &c.schedule, 24, c.page.groups[g], 16, narrowed[g]);
    cut.groups[g] = narrowed[g];
    cut.tiers[g] = 16;
  }
  memcpy(c.residual, c.decoded, (size_t)TOKENS * 64 * sizeof(float));
  qkv_kernels_get()->decode(QKV_K, &cut, c.decoded);
  qkv_anchor_rows(&c.anchor, c.decoded);
  const double dropped = error_of(&c);
  qkv_anchor_recode(&c.anchor, &c.schedule, NULL, 16, c.tokens, c.residual);
  c.tier = 16;
  code(&c, QKV_K);
  const double recoded = error_of(&c);
  for (size_t t = c.tokens; t < TOKENS; t++) assert_int_equal(c.gains[t], 0);
  encode(&c, QKV_K, &options, 16);
  const double direct = error_of(&c);
  printf("chain from 3 bits to 2: MSE %.5f planes dropped, %.5f recoded, %.5f coded anew\n", dropped, recoded,
         direct);
  assert_true(recoded < 1.5 * direct);
  assert_true(recoded < 0.5 * dropped);
  finish(&c);
}

// ---- Choice ----

typedef void fill_fn(naive_random *random, coded *c);

static void fill_noise(naive_random *random, coded *c) {
  for (size_t i = 0; i < (size_t)c->tokens * c->schedule.dim; i++) c->rows[i] = (float)naive_gaussian(random);
}

static void fill_offset(naive_random *random, coded *c) {
  fill_noise(random, c);
  for (size_t i = 0; i < (size_t)c->tokens * c->schedule.dim; i++) {
    c->rows[i] += i % c->schedule.dim % 2 == 0 ? 2.0f : -2.0f;
  }
}

static void fill_groups(naive_random *random, coded *c) {
  const size_t dim = c->schedule.dim;
  double level[QKV_DIM_MAX];
  for (size_t t = 0; t < c->tokens; t++) {
    for (size_t i = 0; i < dim; i++) {
      if (t % SLOTS_OF_GROUP == 0) level[i] = 3 * naive_gaussian(random);
      c->rows[t * dim + i] = (float)(level[i] + naive_gaussian(random));
    }
  }
}

static void fill_walk(naive_random *random, coded *c) {
  slow_drift(random, 0.15, c);
}

static const struct {
  const char *name;
  fill_fn *fill;
  qkv_anchor_kind best;
} streams[] = {{"noise", fill_noise, QKV_ANCHOR_NONE},
               {"offset", fill_offset, QKV_ANCHOR_MEAN},
               {"groups", fill_groups, QKV_ANCHOR_GROUP},
               {"walk", fill_walk, QKV_ANCHOR_CHAIN}};

static void choose(coded *c, qkv_part part, qkv_anchor_kind kind, unsigned budget, qkv_anchor_choice *choice) {
  const qkv_anchor_options options = {.kind = kind};
  const qkv_anchor_input input = input_of(c);
  const size_t capacity = qkv_anchor_scratch_bytes(c->schedule.dim);
  uint8_t *scratch = allocate(capacity + 64);
  qkv_anchor_choose(part, &input, &options, budget, scratch, c->section, c->residual, choice);
  for (size_t i = capacity; i < capacity + 64; i++) assert_int_equal(scratch[i], 0xa5);
  free(scratch);
  c->byte = choice->byte;
  c->tier = choice->tier;
  c->bytes = choice->bytes;
  code(c, part);
  assert_true(qkv_schedule_group_bytes(&c->schedule, c->tier) * QKV_PAGE_GROUPS + c->bytes <=
              qkv_schedule_group_bytes(&c->schedule, budget) * QKV_PAGE_GROUPS);
}

// The error it reports is about the decoded rows', and none of the kinds forced has a lower one.
static void test_choose(void **state) {
  (void)state;
  naive_random random = {7};
  float weights[QKV_DIM_MAX];
  for (size_t i = 0; i < QKV_DIM_MAX; i++) weights[i] = (float)exp(0.5 * naive_gaussian(&random));
  for (size_t s = 0; s < sizeof streams / sizeof *streams; s++) {
    for (unsigned budget = 12; budget <= 32; budget += 10) {
      for (size_t weighted = 0; weighted < 2; weighted++) {
        coded c = start(weighted ? 128 : 64, weighted ? TOKENS : 50);
        c.weights = weighted ? weights : NULL;
        streams[s].fill(&random, &c);
        qkv_anchor_choice best, choice;
        choose(&c, QKV_K, QKV_ANCHOR_AUTO, budget, &best);
        assert_int_equal(qkv_anchor_kind_of(best.byte), streams[s].best);
        double error = 0;
        for (size_t i = 0; i < (size_t)c.tokens * c.schedule.dim; i++) {
          const double miss = (double)c.rows[i] - (double)c.decoded[i];
          error += miss * miss * (weighted ? (double)weights[i % c.schedule.dim] : 1);
        }
        assert_true(fabs(error - best.error) <= 0.05 * error);
        for (qkv_anchor_kind kind = QKV_ANCHOR_NONE; kind <= QKV_ANCHOR_CHAIN; kind++) {
          choose(&c, QKV_K, kind, budget, &choice);
          assert_true(choice.error >= best.error);
          if (kind == streams[s].best) assert_true(choice.error == best.error);
        }
        finish(&c);
      }
    }
  }
}

// A kind that the budget cannot pay for is replaced by none; a chain begins no more segments than it pays for.
static void test_poor_budget(void **state) {
  (void)state;
  naive_random random = {8};
  coded c = start(64, TOKENS);
  fill_groups(&random, &c);
  qkv_anchor_choice choice;
  choose(&c, QKV_K, QKV_ANCHOR_MEAN, 1, &choice);
  assert_int_equal(choice.byte, QKV_ANCHOR_NONE);
  assert_int_equal(choice.tier, 1);
  choose(&c, QKV_K, QKV_ANCHOR_GROUP, 4, &choice);
  assert_int_equal(choice.byte, QKV_ANCHOR_NONE);
  choose(&c, QKV_K, QKV_ANCHOR_GROUP, 5, &choice);
  assert_int_equal(qkv_anchor_kind_of(choice.byte), QKV_ANCHOR_GROUP);
  assert_int_equal(choice.tier, 1);
  const qkv_anchor_options options = {.kind = QKV_ANCHOR_CHAIN, .every = 1};
  const qkv_anchor_input input = input_of(&c);
  void *scratch = allocate(qkv_anchor_scratch_bytes(64));
  qkv_anchor_choose(QKV_K, &input, &options, 16, scratch, c.section, c.residual, &choice);
  assert_int_equal(choice.byte, QKV_ANCHOR_CHAIN);
  assert_true(choice.tier >= 1);
  assert_true(choice.bytes + 64 * (size_t)choice.tier <= 64 * 16);
  uint64_t starts;
  memcpy(&starts, c.section, sizeof starts);
  assert_true(starts != UINT64_MAX && starts % 2 == 1);
  free(scratch);
  finish(&c);
}

// ---- Bytes from outside ----

static void refused(uint8_t byte, const uint8_t *section, size_t bytes, uint32_t tokens, const char *text) {
  // Of its own size, so that the sanitizer sees a byte read beyond.
  uint8_t *copy = malloc(bytes > 0 ? bytes : 1);
  assert_non_null(copy);
  memcpy(copy, section, bytes);
  size_t used = 1;
  qkv_error error = {0};
  assert_int_equal(qkv_anchor_validate(byte, copy, bytes, tokens, 64, &used, &error), QKV_DATA_LOSS);
  assert_int_equal(used, 0);
  assert_non_null(strstr(error.text, text));
  free(copy);
}

static void test_validate(void **state) {
  (void)state;
  naive_random random = {9};
  coded c = start(64, 50);
  slow_drift(&random, 0.15, &c);
  size_t used;
  assert_int_equal(qkv_anchor_validate(QKV_ANCHOR_NONE, NULL, 0, 50, 64, &used, NULL), QKV_OK);
  assert_int_equal(used, 0);
  refused(4, c.section, 64, 50, "0x04");
  encode(&c, QKV_K, &(qkv_anchor_options){.kind = QKV_ANCHOR_GROUP}, 16);
  assert_int_equal(c.bytes, 256);
  for (size_t bytes = 0; bytes < c.bytes; bytes++) refused(c.byte, c.section, bytes, 50, "takes 256 bytes");
  c.section[100] = 0x80;
  refused(c.byte, c.section, c.bytes, 50, "byte 100");
  encode(&c, QKV_K, &(qkv_anchor_options){.kind = QKV_ANCHOR_CHAIN, .every = 20}, 16);
  assert_int_equal(c.bytes, 208);  // 8 + 3 + 3 * 64, up to a multiple of 16
  assert_int_equal(qkv_anchor_validate(c.byte, c.section, c.bytes, 50, 64, &used, NULL), QKV_OK);
  assert_int_equal(used, c.bytes);
  for (size_t bytes = 0; bytes < c.bytes; bytes++) refused(c.byte, c.section, bytes, 50, "there are");
  refused(c.byte, c.section, c.bytes, 40, "40 tokens");
  c.section[204] = 1;
  refused(c.byte, c.section, c.bytes, 50, "padding");
  c.section[0] ^= 1;
  refused(c.byte, c.section, c.bytes, 50, "token 0");
  memset(c.section, 0, 8);
  c.section[0] = 1;
  refused(c.byte, c.section, c.bytes, 50, "another one");
  encode(&c, QKV_K, &(qkv_anchor_options){.kind = QKV_ANCHOR_CHAIN}, 16);
  assert_int_equal(c.bytes, 64);
  for (size_t bytes = 0; bytes < c.bytes; bytes++) refused(c.byte, c.section, bytes, 50, "takes 64 bytes");
  finish(&c);
}

// Whatever is accepted is read within its bytes.
static void test_damaged(void **state) {
  (void)state;
  naive_random random = {10};
  unsigned accepted = 0;
  for (size_t i = 0; i < 20000; i++) {
    const size_t bytes = naive_below(&random, 700);
    const uint32_t tokens = 1 + naive_below(&random, TOKENS);
    const uint16_t dim = (uint16_t)(8 + 8 * naive_below(&random, 4));
    uint8_t *section = malloc(bytes > 0 ? bytes : 1);
    assert_non_null(section);
    for (size_t j = 0; j < bytes; j++) section[j] = (uint8_t)(naive_next(&random) % 64);
    if (bytes >= 8 && i % 2 == 0) memset(section + 1, 0, 7);
    const uint8_t byte = (uint8_t)(i % 8 == 0 ? i : i % 4);
    size_t used;
    if (qkv_anchor_validate(byte, section, bytes, tokens, dim, &used, NULL) == QKV_OK) {
      assert_true(used <= bytes);
      qkv_anchor anchor;
      assert_int_equal(qkv_anchor_find(byte, section, dim, &anchor), used);
      float rows[TOKENS * 32] = {0};
      qkv_anchor_rows(&anchor, rows);
      accepted += byte != 0;
    }
    free(section);
  }
  assert_true(accepted > 100);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_attention),    cmocka_unit_test(test_means),      cmocka_unit_test(test_extremes),
      cmocka_unit_test(test_sudden_drift), cmocka_unit_test(test_slow_drift), cmocka_unit_test(test_closed_loop),
      cmocka_unit_test(test_recode),       cmocka_unit_test(test_choose),     cmocka_unit_test(test_poor_budget),
      cmocka_unit_test(test_validate),     cmocka_unit_test(test_damaged),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
