// The reference kernels against the naive reader of tests/engine/codec/naive.h, in double.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/codebook.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/codec/naive.h"

static const uint16_t dims[] = {8, 16, 24, 64, 80, 96, 128, 192, 256, 576};
enum { DIMS = sizeof dims / sizeof *dims, QUERIES = 5 };

// One head's K or V with groups of mixed tiers and random codes, each group in a block of its own size, and its
// rows as the naive reader sees them.
typedef struct part_case {
  qkv_part part;
  qkv_schedule schedule;
  uint8_t gains[QKV_PAGE_TOKENS];
  uint8_t *groups[QKV_PAGE_GROUPS];
  qkv_page_codes codes;
  double *rows;  // [64][dim]
} part_case;

static void read_rows(part_case *c) {
  for (unsigned slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
    const unsigned g = slot / 16;
    const uint16_t *reach = c->schedule.reach[c->codes.tiers[g]];
    for (unsigned i = 0; i < c->schedule.dim; i++) {
      const unsigned depth = naive_depth(reach, i);
      const double value =
          depth == 0 ? 0 : (double)qkv_codebook_value(depth, naive_code(c->part, reach, c->groups[g], i, slot % 16));
      c->rows[(size_t)slot * c->schedule.dim + i] = naive_gain(c->gains[slot]) * value;
    }
  }
}

static void part_init(part_case *c, naive_random *random, qkv_part part, uint16_t dim, bool banded) {
  memset(c, 0, sizeof *c);
  c->part = part;
  banded ? naive_schedule(random, dim, &c->schedule) : qkv_schedule_uniform(&c->schedule, dim);
  for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
    c->gains[slot] = naive_below(random, 8) == 0 ? 0 : (uint8_t)(100 + naive_below(random, 50));
  }
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    c->codes.tiers[g] = (uint8_t)naive_below(random, dim > 256 ? 33 : QKV_TIER_MAX + 1);
    const size_t bytes = qkv_schedule_group_bytes(&c->schedule, c->codes.tiers[g]);
    c->groups[g] = malloc(bytes + 1);
    assert_non_null(c->groups[g]);
    for (size_t i = 0; i < bytes; i++) c->groups[g][i] = (uint8_t)naive_next(random);
    c->codes.groups[g] = c->groups[g];
  }
  c->codes.gains = c->gains;
  c->codes.schedule = &c->schedule;
  c->rows = malloc(sizeof(double) * QKV_PAGE_TOKENS * dim);
  assert_non_null(c->rows);
  read_rows(c);
}

static void part_deinit(part_case *c) {
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) free(c->groups[g]);
  free(c->rows);
}

static float *random_floats(naive_random *random, size_t n) {
  float *out = malloc(n * sizeof *out);
  assert_non_null(out);
  for (size_t i = 0; i < n; i++) out[i] = (float)naive_gaussian(random);
  return out;
}

static void check_scores(naive_random *random, uint16_t dim, bool banded) {
  part_case c;
  part_init(&c, random, QKV_K, dim, banded);
  float *queries = random_floats(random, (size_t)QUERIES * dim);
  float scores[QUERIES * QKV_PAGE_TOKENS];
  qkv_kernels_at(0)->scores(&c.codes, queries, QUERIES, scores);
  for (size_t i = 0; i < QUERIES; i++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      double sum = 0, size = 0;
      for (size_t j = 0; j < dim; j++) {
        const double term = queries[i * dim + j] * c.rows[t * dim + j];
        sum += term;
        size += fabs(term);
      }
      assert_true(fabs(scores[i * QKV_PAGE_TOKENS + t] - sum) <= 2e-6 * size);
    }
  }
  free(queries);
  part_deinit(&c);
}

static void check_accumulate(naive_random *random, uint16_t dim, bool banded) {
  part_case c;
  part_init(&c, random, QKV_V, dim, banded);
  float *weights = random_floats(random, QUERIES * QKV_PAGE_TOKENS);
  float *sums = random_floats(random, (size_t)QUERIES * dim), *before = malloc(sizeof(float) * QUERIES * dim);
  assert_non_null(before);
  memcpy(before, sums, sizeof(float) * QUERIES * dim);
  qkv_kernels_at(0)->accumulate(&c.codes, weights, QUERIES, sums);
  for (size_t i = 0; i < QUERIES; i++) {
    for (size_t j = 0; j < dim; j++) {
      double sum = before[i * dim + j], size = fabs(sum);
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
        const double term = weights[i * QKV_PAGE_TOKENS + t] * c.rows[t * dim + j];
        sum += term;
        size += fabs(term);
      }
      assert_true(fabs(sums[i * dim + j] - sum) <= 2e-6 * size);
    }
  }
  free(weights);
  free(sums);
  free(before);
  part_deinit(&c);
}

static void check_decode(naive_random *random, qkv_part part, uint16_t dim, bool banded) {
  part_case c;
  part_init(&c, random, part, dim, banded);
  float *rows = random_floats(random, (size_t)QKV_PAGE_TOKENS * dim);
  qkv_kernels_at(0)->decode(part, &c.codes, rows);
  for (size_t i = 0; i < (size_t)QKV_PAGE_TOKENS * dim; i++) {
    assert_true(fabs(rows[i] - c.rows[i]) <= 2e-7 * fabs(c.rows[i]));
  }
  free(rows);
  part_deinit(&c);
}

static void reads_follow_the_drawing(void **state) {
  (void)state;
  naive_random random = {21};
  for (size_t d = 0; d < DIMS; d++) {
    for (int banded = 0; banded < 2; banded++) {
      check_scores(&random, dims[d], banded);
      check_accumulate(&random, dims[d], banded);
      check_decode(&random, QKV_K, dims[d], banded);
      check_decode(&random, QKV_V, dims[d], banded);
    }
  }
}

// A query on its own and in a batch: the same bits.
static void queries_do_not_mix(void **state) {
  (void)state;
  naive_random random = {22};
  part_case k, v;
  part_init(&k, &random, QKV_K, 80, true);
  part_init(&v, &random, QKV_V, 80, true);
  float *queries = random_floats(&random, QUERIES * 80), *weights = random_floats(&random, QUERIES * QKV_PAGE_TOKENS);
  float together[QUERIES * QKV_PAGE_TOKENS], alone[QKV_PAGE_TOKENS], sums[QUERIES * 80] = {0};
  qkv_kernels_at(0)->scores(&k.codes, queries, QUERIES, together);
  qkv_kernels_at(0)->accumulate(&v.codes, weights, QUERIES, sums);
  for (size_t i = 0; i < QUERIES; i++) {
    float sum[80] = {0};
    qkv_kernels_at(0)->scores(&k.codes, queries + i * 80, 1, alone);
    qkv_kernels_at(0)->accumulate(&v.codes, weights + i * QKV_PAGE_TOKENS, 1, sum);
    assert_memory_equal(alone, together + i * QKV_PAGE_TOKENS, sizeof alone);
    assert_memory_equal(sum, sums + i * 80, sizeof sum);
  }
  free(queries);
  free(weights);
  part_deinit(&k);
  part_deinit(&v);
}

// A way to code a row (engine/kernel/encode_plain.h), in units of its middle gain.
typedef struct coding {
  double t[QKV_DIM_MAX], kept[QKV_DIM_MAX];
  uint8_t codes[QKV_DIM_MAX];
} coding;

static void code_row(const float *row, const uint16_t *reach, int middle, double scale, coding *made) {
  const float inverse = 64 / qkv_gain_value((uint8_t)middle);
  for (unsigned c = 0; c < reach[1]; c++) {
    const unsigned depth = naive_depth(reach, c);
    const float y = row[c] * inverse;
    const double whole = fmin(nearbyint(fabs((double)y)), 255), step = (double)qkv_codebook_step(4);
    const float looked_up = depth <= 4 ? (float)copysign(whole, (double)row[c]) : y;
    made->t[c] = depth <= 4 ? whole : fabs((double)y);
    made->codes[c] = qkv_codebook_code(looked_up / 64 * (float)scale);
    if (whole == 0 && depth <= 4) made->codes[c] = signbit(row[c]) ? 127 : 128;
    const double value = fabs((double)qkv_codebook_value(depth, made->codes[c] >> (8 - depth)));
    made->kept[c] = 64 * (depth <= 4 ? step * nearbyint(value / step) : value);
  }
}

// The squared error with the best gain byte, by trying all.
static double best_error(const coding *made, unsigned coordinates, int middle, uint8_t *best_gain) {
  double best = INFINITY;
  for (int gain = 1; gain < 256; gain++) {
    const double ratio = naive_gain((uint8_t)gain) / naive_gain((uint8_t)middle);
    double error = 0;
    for (unsigned c = 0; c < coordinates; c++) {
      const double miss = made->t[c] - ratio * made->kept[c];
      error += miss * miss;
    }
    if (error < best) best = error, *best_gain = (uint8_t)gain;
  }
  return best;
}

// The row's gain and codes are those of the best of the three scales about its RMS.
static void check_row(const qkv_schedule *schedule, unsigned tier, const float *row, uint8_t gain,
                      const uint8_t *group, unsigned slot) {
  const uint16_t *reach = schedule->reach[tier];
  double energy = 0;
  for (unsigned c = 0; c < reach[1]; c++) energy += (double)row[c] * row[c];
  const double rms = reach[1] > 0 ? sqrt(energy / reach[1]) : 0;
  if (rms == 0) {
    assert_int_equal(gain, 0);
    for (unsigned c = 0; c < reach[1]; c++) assert_int_equal(naive_code(QKV_V, reach, group, c, slot), 0);
    return;
  }
  int middle = 1;
  for (int g = 2; g < 256; g++) {
    if (fabs(naive_gain((uint8_t)g) - rms) < fabs(naive_gain((uint8_t)middle) - rms)) middle = g;
  }
  coding made;
  uint8_t best_codes[QKV_DIM_MAX], fitted = 0, best_gain = 0;
  double best = INFINITY;
  static const uint8_t scales[] = {128, 129, 127};
  for (int i = 0; i < 3; i++) {
    code_row(row, reach, middle, (double)qkv_gain_value(scales[i]), &made);
    const double error = best_error(&made, reach[1], middle, &fitted);
    if (error < best * (1 - 1e-6)) best = error, best_gain = fitted, memcpy(best_codes, made.codes, reach[1]);
  }
  assert_int_equal(gain, best_gain);
  for (unsigned c = 0; c < reach[1]; c++) {
    assert_int_equal(naive_code(QKV_V, reach, group, c, slot), best_codes[c] >> (8 - naive_depth(reach, c)));
  }
}

static void encode_takes_the_best_of_three_scales(void **state) {
  (void)state;
  naive_random random = {23};
  for (int round = 0; round < 8; round++) {
    qkv_schedule schedule;
    round % 2 ? qkv_schedule_uniform(&schedule, 40) : naive_schedule(&random, 64, &schedule);
    const unsigned tier = 1 + naive_below(&random, QKV_TIER_MAX);
    float *rows = random_floats(&random, (size_t)QKV_PAGE_TOKENS * schedule.dim);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      const float scale = t % 9 == 4 ? 0 : (float)exp(2 * naive_gaussian(&random));
      for (size_t c = 0; c < schedule.dim; c++) rows[t * schedule.dim + c] *= scale;
    }
    uint8_t gains[QKV_PAGE_TOKENS];
    float errors[QKV_PAGE_TOKENS];
    const size_t bytes = qkv_schedule_group_bytes(&schedule, tier);
    uint8_t *codes = malloc(QKV_PAGE_GROUPS * bytes + 1);
    assert_non_null(codes);
    qkv_kernels_at(0)->encode(QKV_V, &schedule, tier, NULL, rows, gains, codes, errors);
    for (unsigned t = 0; t < QKV_PAGE_TOKENS; t += 3) {
      check_row(&schedule, tier, rows + (size_t)t * schedule.dim, gains[t], codes + t / 16 * bytes, t % 16);
    }
    free(codes);
    free(rows);
  }
}

static void tiny_and_huge_rows_stay_in_range(void **state) {
  (void)state;
  qkv_schedule schedule;
  qkv_schedule_uniform(&schedule, 8);
  static const struct {
    float value;
    uint8_t gain_min, gain_max;
  } cases[] = {{0, 0, 0}, {1e-30f, 0, 0}, {8e-6f, 0, 0}, {1.7e-5f, 1, 3}, {32768, 246, 250}, {3e6f, 255, 255}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    float rows[QKV_PAGE_TOKENS * 8];
    for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) rows[j] = j % 2 ? cases[i].value : -cases[i].value;
    uint8_t gains[QKV_PAGE_TOKENS], codes[64 * 4];
    float errors[QKV_PAGE_TOKENS];
    qkv_kernels_at(0)->encode(QKV_K, &schedule, 32, NULL, rows, gains, codes, errors);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) assert_in_range(gains[t], cases[i].gain_min, cases[i].gain_max);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(reads_follow_the_drawing),
      cmocka_unit_test(queries_do_not_mix),
      cmocka_unit_test(encode_takes_the_best_of_three_scales),
      cmocka_unit_test(tiny_and_huge_rows_stay_in_range),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
