// The integer reference against sums in double over codes that the naive reader of tests/engine/codec/naive.h finds.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdio.h>

#include "engine/codec/codebook.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/codec/naive.h"

enum { ROWS = 5, SHALLOW = 4 };

// A centroid as integer.h says that it is rounded; where deeper ones are whole steps, that is no less exact.
static double rounded_value(unsigned depth, unsigned code) {
  const double step = (double)qkv_codebook_step(4) / (depth > SHALLOW ? 128 : 1);
  return depth == 0 ? 0 : step * nearbyint((double)qkv_codebook_value(depth, code) / step);
}

// One head's K or V of mixed tiers with random codes and gains, and its values without the gains.
typedef struct made_part {
  qkv_schedule schedule;
  uint8_t gains[QKV_PAGE_TOKENS];
  uint8_t *groups[QKV_PAGE_GROUPS];
  qkv_page_codes codes;
  double *values;  // [64][dim]
} made_part;

static void part_init(made_part *p, naive_random *random, qkv_part part, uint16_t dim, bool banded) {
  memset(p, 0, sizeof *p);
  banded ? naive_schedule(random, dim, &p->schedule) : qkv_schedule_uniform(&p->schedule, dim);
  p->codes = (qkv_page_codes){.gains = p->gains, .schedule = &p->schedule};
  p->values = malloc(sizeof(double) * QKV_PAGE_TOKENS * dim);
  assert_non_null(p->values);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) p->gains[t] = (uint8_t)(100 + naive_below(random, 50));
  for (unsigned g = 0; g < QKV_PAGE_GROUPS; g++) {
    p->codes.tiers[g] = (uint8_t)naive_below(random, QKV_TIER_MAX + 1);
    const uint16_t *reach = p->schedule.reach[p->codes.tiers[g]];
    const size_t bytes = qkv_schedule_group_bytes(&p->schedule, p->codes.tiers[g]);
    p->groups[g] = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(p->groups[g]);
    for (size_t i = 0; i < bytes; i++) p->groups[g][i] = (uint8_t)naive_next(random);
    p->codes.groups[g] = p->groups[g];
    for (unsigned i = 0; i < QKV_GROUP_TOKENS * dim; i++) {
      const unsigned slot = i / dim, c = i % dim, depth = naive_depth(reach, c);
      const unsigned code = depth == 0 ? 0 : naive_code(part, reach, p->groups[g], c, slot);
      p->values[(size_t)(g * QKV_GROUP_TOKENS + slot) * dim + c] = rounded_value(depth, code);
    }
  }
}

static void part_deinit(made_part *p) {
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) free(p->groups[g]);
  free(p->values);
}

static double largest_of(const float *row, size_t n) {
  double largest = 0;
  for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)row[i]));
  return largest;
}

// Scores differ by what the query's rounding costs at most, half a unit of its largest coordinate each.
static void check_scores(naive_random *random, uint16_t dim, bool banded, unsigned parts) {
  static qkv_integer_buffers buffer;
  static qkv_layouts layouts;
  made_part p;
  float queries[ROWS * QKV_DIM_MAX], scores[ROWS * QKV_PAGE_TOKENS];
  part_init(&p, random, QKV_K, dim, banded);
  for (size_t i = 0; i < (size_t)ROWS * dim; i++) queries[i] = (float)naive_gaussian(random);
  qkv_integer_queries integers = qkvi_integer_queries_in(&buffer);
  qkvi_layouts_clear(&layouts);
  qkv_kernels_at(0)->prepare(queries, ROWS, dim, parts == 1 ? QKVI_LIMIT_1 : QKVI_LIMIT_2, &integers);
  qkv_kernels_at(0)->scores_integer(&p.codes, &integers, &layouts, (qkv_ahead){0}, scores);
  for (size_t i = 0; i < ROWS; i++) {
    const double unit = largest_of(queries + i * dim, dim) / (parts == 1 ? 127 : 32639);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      double sum = 0, slack = 0;
      for (size_t c = 0; c < dim; c++) {
        const double value = p.values[t * dim + c] * naive_gain(p.gains[t]);
        sum += (double)queries[i * dim + c] * value;
        slack += fabs(value) * (unit / 2 + 1e-6 * fabs((double)queries[i * dim + c]));
      }
      assert_true(fabs((double)scores[i * QKV_PAGE_TOKENS + t] - sum) <= slack);
    }
  }
  part_deinit(&p);
}

// Sums likewise, by the rounding of the weights with the gains in them.
static void check_sums(naive_random *random, uint16_t dim, bool banded, unsigned parts) {
  static qkv_integer_weights integers;
  static qkv_layouts layouts;
  made_part p;
  float scores[ROWS * QKV_PAGE_TOKENS], peaks[ROWS], totals[ROWS], sums[ROWS * QKV_DIM_MAX];
  part_init(&p, random, QKV_V, dim, banded);
  for (size_t i = 0; i < ROWS * QKV_PAGE_TOKENS; i++) scores[i] = 3 * (float)naive_gaussian(random);
  for (size_t i = 0; i < (size_t)ROWS * dim; i++) sums[i] = 1;
  qkvi_layouts_clear(&layouts);
  qkv_kernels_at(0)->peaks(scores, ROWS, peaks);
  qkv_kernels_at(0)->weigh_integer(scores, peaks, ROWS, p.gains, parts, &integers, totals);
  qkv_kernels_at(0)->accumulate_integer(&p.codes, &integers, &layouts, (qkv_ahead){0}, sums);
  for (size_t i = 0; i < ROWS; i++) {
    double total = 0, weights[QKV_PAGE_TOKENS], top = 0;
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      weights[t] = exp((double)scores[i * QKV_PAGE_TOKENS + t] - (double)peaks[i]);
      total += weights[t];
      weights[t] *= naive_gain(p.gains[t]);
      top = fmax(top, weights[t]);
    }
    assert_true(fabs((double)totals[i] / total - 1) < 1e-5);
    const double unit = top / (parts == 1 ? 255 : 65535);
    for (size_t c = 0; c < dim; c++) {
      double sum = 1, slack = 1e-6;
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
        const double value = p.values[t * dim + c];
        sum += weights[t] * value;
        slack += fabs(value) * (unit / 2 + 1e-5 * weights[t]);
      }
      assert_true(fabs((double)sums[i * dim + c] - sum) <= slack);
    }
  }
  part_deinit(&p);
}

static void sums_are_those_of_the_rounded_numbers(void **state) {
  (void)state;
  static const uint16_t dims[] = {8, 24, 64, 80, 128, 192};
  naive_random random = {31};
  for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
    for (unsigned i = 0; i < 4; i++) {
      check_scores(&random, dims[d], i / 2 != 0, 1 + i % 2);
      check_sums(&random, dims[d], i / 2 != 0, 1 + i % 2);
    }
  }
}

// What rounding the centroids costs, as a share of the error of a code of N(0, 1), RMS, as integer.h has it.
static void rounding_costs_what_the_header_says(void **state) {
  (void)state;
  static const double percent[SHALLOW + 1] = {0, 0.7, 3.9, 4.0, 0};
  for (unsigned depth = 1; depth <= SHALLOW; depth++) {
    const double step = 1e-3;
    double error = 0, rounding = 0;
    for (double x = -6 + step / 2; x < 6; x += step) {
      const unsigned code = qkv_codebook_code((float)x) >> (QKV_DEPTH_MAX - depth);
      const double value = (double)qkv_codebook_value(depth, code), moved = rounded_value(depth, code) - value;
      const double density = exp(-x * x / 2) / sqrt(2 * 3.14159265358979) * step;
      error += (x - value) * (x - value) * density;
      rounding += moved * moved * density;
    }
    printf("depth %u: rounding the centroids %.2f %% of the code's error\n", depth, 100 * sqrt(rounding / error));
    assert_true(fabs(100 * sqrt(rounding / error) - percent[depth]) < 0.06);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sums_are_those_of_the_rounded_numbers),
      cmocka_unit_test(rounding_costs_what_the_header_says),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
