#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/calibrate.h"
#include "engine/codec/codebook.h"
#include "engine/codec/codec.h"
#include "engine/codec/embedded.h"
#include "engine/codec/phases.h"
#include "naive.h"

enum { DIM = 32, SAMPLES = 8192, FRESH = 4096, WIDTH_MAX = 64 };

// Rows x = mean + mix g, g a vector of independent N(0, 1).
typedef struct source {
  size_t dim;
  double mean[WIDTH_MAX], mix[WIDTH_MAX][WIDTH_MAX];
} source;

static void draw(const source *from, naive_random *random, float *row) {
  double g[WIDTH_MAX];
  for (size_t i = 0; i < from->dim; i++) g[i] = naive_gaussian(random);
  for (size_t i = 0; i < from->dim; i++) {
    double x = from->mean[i];
    for (size_t j = 0; j < from->dim; j++) x += from->mix[i][j] * g[j];
    row[i] = (float)x;
  }
}

// Directions at random, with standard deviations that fall off by `ratio` each.
static source falling(size_t dim, double first, double ratio, double mean, uint64_t seed) {
  naive_random random = {seed};
  source made = {.dim = dim};
  double size = first;
  for (size_t j = 0; j < dim; j++, size *= ratio) {
    double column[WIDTH_MAX];
    for (size_t i = 0; i < dim; i++) column[i] = naive_gaussian(&random);
    for (size_t before = 0; before < j; before++) {  // mix keeps orthogonal columns
      double along = 0, length = 0;
      for (size_t i = 0; i < dim; i++) along += column[i] * made.mix[i][before];
      for (size_t i = 0; i < dim; i++) length += made.mix[i][before] * made.mix[i][before];
      for (size_t i = 0; length > 0 && i < dim; i++) column[i] -= along / length * made.mix[i][before];
    }
    double length = 0;
    for (size_t i = 0; i < dim; i++) length += column[i] * column[i];
    for (size_t i = 0; i < dim; i++) made.mix[i][j] = column[i] * size / sqrt(length);
  }
  for (size_t i = 0; i < dim; i++) made.mean[i] = mean * naive_gaussian(&random);
  return made;
}

static qkv_calibration_shape shape_of(size_t dim, qkv_rope rope) {
  qkv_calibration_shape shape = {1, 1, 1, (uint32_t)dim, (uint32_t)dim, rope};
  assert_int_equal(qkv_rope_resolve(&shape.rope, shape.key_dim, NULL), QKV_OK);
  return shape;
}

static qkv_calibration *calibrate(const qkv_moments *moments, const qkv_calibrate_options *options) {
  qkv_calibration *calibration = NULL;
  qkv_error error = {0};
  const qkv_status status = qkv_calibrate(moments, options, &calibration, &error);
  if (status != QKV_OK) print_error("%s\n", error.text);
  assert_int_equal(status, QKV_OK);
  return calibration;
}

static void unref(qkv_calibration *calibration) {
  const qkv_calibration *reference = calibration;
  qkv_calibration_unref(&reference);
}

// SAMPLES rows from position 0 on, as keys, values and queries.
static qkv_calibration *learn_with(const source *k, const source *v, const source *q, qkv_rope rope, uint64_t seed,
                                   const qkv_calibrate_options *options) {
  const qkv_calibration_shape shape = shape_of(k->dim, rope);
  naive_random random = {seed};
  qkv_moments *moments = qkv_moments_create(&shape);
  for (size_t t = 0; t < SAMPLES; t++) {
    float row_k[WIDTH_MAX], row_v[WIDTH_MAX], row_q[WIDTH_MAX];
    draw(k, &random, row_k);
    draw(v, &random, row_v);
    draw(q, &random, row_q);
    qkv_moments_add(moments, 0, t, 1, row_k, row_v, true);
    qkv_moments_add_queries(moments, 0, t, 1, row_q, true);
  }
  qkv_calibration *calibration = calibrate(moments, options);
  qkv_moments_destroy(&moments);
  return calibration;
}

static qkv_calibration *learn(const source *k, const source *v, const source *q, qkv_rope rope, uint64_t seed) {
  return learn_with(k, v, q, rope, seed, &QKV_CALIBRATE_DEFAULTS);
}

static unsigned depth_of(const qkv_schedule *schedule, unsigned tier, size_t c) {
  return naive_depth(schedule->reach[tier], (unsigned)c);
}

// The row as its codes at a tier give it back, gain 1.
static void code(const qkv_transform *transform, unsigned tier, float *row) {
  const size_t dim = transform->schedule->dim;
  qkv_transform_forward(transform, row, 1, dim);
  for (size_t c = 0; c < dim; c++) {
    const unsigned depth = depth_of(transform->schedule, tier, c);
    row[c] = depth == 0 ? 0 : qkv_codebook_value(depth, (unsigned)qkv_codebook_code(row[c]) >> (8 - depth));
  }
  qkv_transform_inverse(transform, row, 1, dim);
}

// What the weights promise for a tier.
static double predicted(const qkv_transform *transform, unsigned tier) {
  double sum = 0;
  for (size_t c = 0; c < transform->schedule->dim; c++) {
    sum += (double)transform->weights[c] * qkv_codebook_distortion[depth_of(transform->schedule, tier, c)];
  }
  return sum;
}

// Shannon's bound for a Gaussian with these variances, at `bits` a coordinate: reverse water-filling.
static double bound(const double *variances, size_t dim, double bits) {
  double low = 1e-30, high = 1e30, error = 0;
  for (int step = 0; step < 400; step++) {
    const double level = sqrt(low * high);
    double rate = 0;
    error = 0;
    for (size_t c = 0; c < dim; c++) {
      error += variances[c] < level ? variances[c] : level;
      if (variances[c] > level) rate += 0.5 * log2(variances[c] / level);
    }
    if (rate > bits * (double)dim)
      low = level;
    else
      high = level;
  }
  return error;
}

static void distortions_are_the_codebooks(void **state) {
  (void)state;
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    double sum = 0;
    const double step = 1e-4;
    for (double x = -8; x < 8; x += step) {
      const double miss = x - (double)qkv_codebook_value(depth, (unsigned)qkv_codebook_code((float)x) >> (8 - depth));
      sum += step * miss * miss * exp(-x * x / 2) / sqrt(6.283185307179586);
    }
    assert_true(fabs(sum / qkv_codebook_distortion[depth] - 1) < 0.01);
  }
  assert_true(qkv_codebook_distortion[0] == 1);
}

// Values: the error is the one that variances and depths predict, and as near to Shannon's bound as scalar quantizers
// come: 2.72 times it at many bits, and more for nesting and bands. At 4 bits more again, because coordinates rarely
// get more than six.
static void values_are_coded_near_the_bound(void **state) {
  (void)state;
  const source keys = falling(DIM, 1, 1, 0, 1), values = falling(DIM, 4, 0.85, 10, 2);
  qkv_calibration *calibration = learn(&keys, &values, &keys, (qkv_rope){.theta = 0}, 3);
  const qkv_transform *transform = qkv_calibration_transform(calibration, 0, 0, QKV_PART_V);
  double variances[DIM];
  for (size_t c = 0; c < DIM; c++) variances[c] = 16 * pow(0.85, 2.0 * (double)c);
  static const unsigned tiers[] = {4, 8, 12, 16, 24, 32};
  print_message("bits   error  predicted    bound (of the variance)\n");
  for (size_t i = 0; i < sizeof tiers / sizeof tiers[0]; i++) {
    naive_random random = {4};
    double error = 0, all = 0;
    for (size_t t = 0; t < FRESH; t++) {
      float row[DIM], coded[DIM];
      draw(&values, &random, row);
      memcpy(coded, row, sizeof coded);
      code(transform, tiers[i], coded);
      for (size_t c = 0; c < DIM; c++) error += pow((double)row[c] - (double)coded[c], 2) / FRESH;
    }
    for (size_t c = 0; c < DIM; c++) all += variances[c];
    const double least = bound(variances, DIM, tiers[i] / 8.0);
    print_message("%.2f %.5f    %.5f  %.5f\n", tiers[i] / 8.0, error / all, predicted(transform, tiers[i]) / all,
                  least / all);
    assert_true(fabs(error / predicted(transform, tiers[i]) - 1) < 0.05);
    assert_true(error < (tiers[i] < 32 ? 3.1 : 5) * least);
  }
  unref(calibration);
}

// Keys: what counts is the error of q . k, for queries that look into few directions.
static void keys_are_coded_for_their_queries(void **state) {
  (void)state;
  const source keys = falling(DIM, 3, 0.95, 5, 11), queries = falling(DIM, 2, 0.8, 1, 12);
  // The queries' own metric, without a ridge to speak of, which would have its part in what is predicted.
  qkv_calibrate_options options = QKV_CALIBRATE_DEFAULTS;
  options.metric_power = 1;
  options.ridge_queries = 1e-6;
  qkv_calibration *calibration = learn_with(&keys, &keys, &queries, (qkv_rope){.theta = 0}, 13, &options);
  const qkv_transform *aware = qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ATTEND);
  const qkv_transform *plain = qkv_calibration_transform(calibration, 0, 0, QKV_PART_V);  // the same rows
  assert_ptr_equal(qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ARCHIVE)->analysis, aware->analysis);
  naive_random random = {14};
  double errors[2] = {0};
  for (size_t t = 0; t < FRESH; t++) {
    float row[DIM], query[DIM];
    draw(&keys, &random, row);
    draw(&queries, &random, query);
    for (unsigned i = 0; i < 2; i++) {
      float coded[DIM];
      double score = 0;
      memcpy(coded, row, sizeof coded);
      code(i == 0 ? aware : plain, 12, coded);
      for (size_t c = 0; c < DIM; c++) score += (double)query[c] * ((double)row[c] - (double)coded[c]);
      errors[i] += score * score / FRESH;
    }
  }
  assert_true(fabs(errors[0] / predicted(aware, 12) - 1) < 0.1);
  assert_true(errors[0] < 0.5 * errors[1]);
  unref(calibration);
}

// Scores and sums in code space are those of the rows.
static void analysis_and_synthesis_are_duals(void **state) {
  (void)state;
  const source keys = falling(DIM, 3, 0.8, 20, 21), queries = falling(DIM, 1, 0.9, 1, 22);
  qkv_calibration *calibration = learn(&keys, &queries, &queries, (qkv_rope){.theta = 10000}, 23);
  for (unsigned part = 0; part < QKV_CALIBRATION_PARTS; part++) {
    const qkv_transform *transform = qkv_calibration_transform(calibration, 0, 0, part);
    for (size_t a = 0; a < DIM; a++) {
      for (size_t b = 0; b < DIM; b++) {
        double sum = 0;
        for (size_t i = 0; i < DIM; i++) {
          sum += (double)transform->analysis[a * DIM + i] * (double)transform->synthesis[b * DIM + i];
        }
        assert_true(fabs(sum - (a == b)) < 1e-4);
      }
    }
    for (size_t c = 1; c < DIM; c++) assert_true(transform->weights[c] <= transform->weights[c - 1]);
    assert_null(qkv_schedule_validate(transform->schedule));
    for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
      const size_t bytes = tier * DIM / 8 / QKV_BAND * QKV_BAND * QKV_GROUP_TOKENS / 8;
      assert_int_equal(qkv_schedule_group_bytes(transform->schedule, tier), bytes);
    }
  }
  unref(calibration);
}

// Mean squared score error of the rows' codes at a tier, in a frame, relative to that of coding them as 0. Ropes
// without a magnitude.
static double frame_error(const qkv_calibration *calibration, qkv_calibration_part part, const source *keys,
                          const source *queries, unsigned tier) {
  enum { TOKENS = QKV_PAGE_TOKENS };
  const qkv_transform *transform = qkv_calibration_transform(calibration, 0, 0, part);
  const qkv_rope *rope = &qkv_calibration_shape_of(calibration)->rope;
  const size_t dim = keys->dim;
  qkv_phases *phases = qkv_phases_create(rope);
  naive_random random = {99};
  double error = 0, energy = 0;
  for (size_t n = 0; n < FRESH; n++) {
    const uint64_t position = naive_below(&random, SAMPLES), distance = naive_below(&random, 1000);
    const uint64_t slot = position % TOKENS, begin = position - slot;
    float row[WIDTH_MAX], query[WIDTH_MAX], page[TOKENS * WIDTH_MAX] = {0}, *coded = page + slot * dim;
    draw(keys, &random, row);
    draw(queries, &random, query);
    qkv_rope_forward(rope, query, position + distance);
    qkv_rope_forward(rope, row, position);
    memcpy(coded, row, dim * sizeof *row);
    if (part == QKV_PART_K_ATTEND) {
      qkv_phases_to_page(phases, transform, begin, TOKENS, page);
      code(transform, tier, coded);
      qkv_phases_from_page(phases, transform, begin, TOKENS, page);
    } else {
      qkv_rope_inverse(rope, coded, position);
      code(transform, tier, coded);
      qkv_rope_forward(rope, coded, position);
    }
    double miss = 0, whole = 0;
    for (size_t i = 0; i < dim; i++) {
      miss += (double)query[i] * ((double)row[i] - (double)coded[i]);
      whole += (double)query[i] * (double)row[i];
    }
    error += miss * miss;
    energy += whole * whole;
  }
  qkv_phases_destroy(&phases);
  return error / energy;
}

// A large constant that RoPE turns, and noise of rank 4.
static void both_frames_find_the_turning_constant(void **state) {
  (void)state;
  static const qkv_rope ropes[] = {
      {.theta = 10000}, {.theta = 10000, .width = 16}, {.theta = 100000, .width = 24, .interleaved = true}};
  for (size_t i = 0; i < sizeof ropes / sizeof ropes[0]; i++) {
    source keys = falling(DIM, 1, 1, 10, 31);
    const source queries = falling(DIM, 1, 0.97, 0, 32);
    for (size_t c = 0; c < DIM; c++) {
      for (size_t j = 4; j < DIM; j++) keys.mix[c][j] = 0;
    }
    qkv_calibration *calibration = learn(&keys, &queries, &queries, ropes[i], 33);
    const double attend = frame_error(calibration, QKV_PART_K_ATTEND, &keys, &queries, 8);
    const double archive = frame_error(calibration, QKV_PART_K_ARCHIVE, &keys, &queries, 8);
    const qkv_transform *in_attend = qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ATTEND);
    const qkv_transform *in_archive = qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ARCHIVE);
    print_message(
        "rope %zu: at 1 bit, of the scores' energy: attend frame %.2g, archive frame %.2g; %u anchor pairs\n", i,
        attend, archive, in_attend->anchor_pairs);
    assert_true(attend < 1e-3);
    assert_true(archive < 1e-4);
    assert_int_equal(in_attend->anchor_pairs, ropes[i].width == 0 ? DIM / 2 : ropes[i].width / 2);
    assert_int_equal(in_archive->anchor_pairs, 0);
    // Rank 4: the rest is what regularization adds.
    assert_true(in_archive->weights[4] < 0.02f * in_archive->weights[3]);
    assert_int_equal(qkv_calibration_tokens(calibration), SAMPLES);
    unref(calibration);
  }
}

// YaRN makes rows larger, and queries; what is learnt of them is as it was.
static void yarn_changes_sizes_alone(void **state) {
  (void)state;
  source keys = falling(DIM, 1, 1, 4, 61);
  const source queries = falling(DIM, 1, 0.97, 0, 62);
  float weights[2][DIM];
  for (size_t i = 0; i < 2; i++) {
    const qkv_rope rope = {.theta = 10000,
                           .scaling = QKV_ROPE_YARN,
                           .factor = 1,
                           .original_max_position = 4096,
                           .attention_factor = i == 0 ? 1 : 8};
    qkv_calibration *calibration = learn(&keys, &queries, &queries, rope, 63);
    memcpy(weights[i], qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ATTEND)->weights, sizeof weights[i]);
    unref(calibration);
  }
  // 8^2 of the rows' variance, and 8 of the square root of the queries'.
  for (size_t c = 0; c < DIM; c++) assert_true(fabsf(weights[1][c] / weights[0][c] - 512) < 1);
}

// Half of the coordinates turn, and count 16 times in a query and in a key: so 256 times in a score's error, and the
// square root of that in the metric.
static void yarn_weighs_what_turns(void **state) {
  (void)state;
  const source keys = falling(DIM, 1, 1, 0, 64), queries = falling(DIM, 1, 1, 0, 65);
  const qkv_rope rope = {.theta = 10000,
                         .width = DIM / 2,
                         .scaling = QKV_ROPE_YARN,
                         .factor = 1,
                         .original_max_position = 4096,
                         .attention_factor = 4};
  qkv_calibration *calibration = learn(&keys, &queries, &queries, rope, 66);
  const float *weights = qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ARCHIVE)->weights;
  const float ratio = weights[DIM / 4] / weights[DIM - DIM / 4];
  if (!(ratio > 8 && ratio < 24)) fail_msg("the metric's ratio is %g", (double)ratio);
  unref(calibration);
}

static bool same_rows(const float *a, const float *b, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (fabsf(a[i] - b[i]) > 1e-3f) return false;
  }
  return true;
}

// A layer that stays exact teaches nothing: its part is the code that needs no calibration.
static void layers_without_rows_are_data_free(void **state) {
  (void)state;
  const qkv_calibration_shape one = shape_of(DIM, (qkv_rope){.theta = 10000});
  qkv_calibration_shape shape = one;
  shape.layers = 2;
  naive_random random = {71};
  const source keys = falling(DIM, 1, 0.9, 1, 72);
  qkv_moments *moments = qkv_moments_create(&shape);
  float row[WIDTH_MAX], plain[WIDTH_MAX];
  for (size_t t = 0; t < SAMPLES; t++) {
    draw(&keys, &random, row);
    qkv_moments_add(moments, 1, t, 1, row, row, true);
  }
  qkv_calibration *calibration = calibrate(moments, &QKV_CALIBRATE_DEFAULTS);
  assert_int_equal(qkv_calibration_tokens(calibration), SAMPLES);
  for (unsigned part = 0; part < QKV_CALIBRATION_PARTS; part++) {
    const qkv_transform *transform = qkv_calibration_transform(calibration, 0, 0, part);
    const qkv_schedule *uniform = qkv_transform_uniform(DIM)->schedule;
    memcpy(plain, row, sizeof plain);
    float given[WIDTH_MAX];
    memcpy(given, row, sizeof given);
    qkv_transform_forward(transform, given, 1, DIM);
    qkv_transform_forward(qkv_transform_uniform(DIM), plain, 1, DIM);
    assert_true(same_rows(given, plain, DIM));
    qkv_transform_inverse(transform, given, 1, DIM);
    assert_true(same_rows(given, row, DIM));
    assert_int_equal(transform->anchor_pairs, 0);
    for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++)
      assert_memory_equal(transform->schedule->reach[tier], uniform->reach[tier], sizeof uniform->reach[tier]);
  }
  unref(calibration);
  qkv_moments_destroy(&moments);
}

// Whatever the rows are, they come back at 8 bits.
static void expect_rows_back(const source *keys, size_t tokens, qkv_rope rope, bool attended) {
  const qkv_calibration_shape shape = shape_of(keys->dim, rope);
  naive_random random = {41};
  qkv_moments *moments = qkv_moments_create(&shape);
  float row[WIDTH_MAX];
  for (size_t t = 0; t < tokens; t++) {
    draw(keys, &random, row);
    qkv_moments_add(moments, 0, t, 1, row, row, true);
    if (attended) qkv_moments_add_queries(moments, 0, t, 1, row, true);
  }
  qkv_calibration *calibration = calibrate(moments, &QKV_CALIBRATE_DEFAULTS);
  qkv_moments_destroy(&moments);
  double energy = 0, error = 0;
  for (size_t i = 0; i < keys->dim; i++) {
    energy += keys->mean[i] * keys->mean[i];
    for (size_t j = 0; j < keys->dim; j++) energy += keys->mix[i][j] * keys->mix[i][j];
  }
  for (unsigned part = QKV_PART_K_ARCHIVE; part < QKV_CALIBRATION_PARTS; part++) {
    const qkv_transform *transform = qkv_calibration_transform(calibration, 0, 0, part);
    float back[WIDTH_MAX];
    draw(keys, &random, row);
    memcpy(back, row, sizeof back);
    code(transform, QKV_TIER_MAX, back);
    for (size_t i = 0; i < keys->dim; i++) error += pow((double)row[i] - (double)back[i], 2);
  }
  assert_true(error <= 0.02 * energy + 1e-8);
  unref(calibration);
}

static void rows_of_any_kind_are_learnt(void **state) {
  (void)state;
  for (unsigned rope = 0; rope < 2; rope++) {
    const qkv_rope turning = {.theta = rope == 0 ? 0 : 10000};
    source constant = falling(DIM, 0, 1, 3, 42);
    expect_rows_back(&constant, 100, turning, true);
    expect_rows_back(&constant, 100, turning, false);
    memset(constant.mean, 0, sizeof constant.mean);
    expect_rows_back(&constant, 100, turning, true);  // zeros
    source ordinary = falling(DIM, 1, 0.9, 1, 43);
    expect_rows_back(&ordinary, SAMPLES, turning, false);
    expect_rows_back(&ordinary, 5, turning, true);       // fewer rows than coordinates
    const source steep = falling(DIM, 1e4, 0.4, 0, 44);  // to 1e-9 of that
    expect_rows_back(&steep, SAMPLES, turning, true);
    const source small = falling(DIM, 1e-5, 0.9, 1e-5, 45);
    expect_rows_back(&small, SAMPLES, turning, true);
    const source narrow = falling(8, 1, 0.9, 1, 46);
    expect_rows_back(&narrow, SAMPLES, turning, true);
    // Two bands of 16 would not fit, so one row is all that there is.
    const qkv_calibration_shape shape = shape_of(DIM, turning);
    qkv_moments *moments = qkv_moments_create(&shape);
    const float row[DIM] = {1, -2, 3};
    qkv_moments_add(moments, 0, 5, 1, row, row, true);
    unref(calibrate(moments, &QKV_CALIBRATE_DEFAULTS));
    qkv_moments_destroy(&moments);
  }
}

static void expect_refused(const qkv_moments *moments, const qkv_calibrate_options *options, qkv_status status,
                           const char *text) {
  qkv_calibration *calibration = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_calibrate(moments, options, &calibration, &error), status);
  assert_string_equal(error.text, text);
  assert_null(calibration);
}

static void what_cannot_be_learnt_is_refused(void **state) {
  (void)state;
  qkv_calibration_shape shape = shape_of(24, (qkv_rope){.theta = 0});
  shape.layers = 2;
  qkv_calibrate_options options = QKV_CALIBRATE_DEFAULTS;
  qkv_moments *moments = qkv_moments_create(&shape);
  expect_refused(moments, &options, QKV_FAILED_PRECONDITION, "there are no rows to learn from");
  float row[24] = {1};
  qkv_moments_add(moments, 0, 0, 1, row, row, true);
  const _Atomic bool cancelled = true;
  options.cancelled = &cancelled;
  expect_refused(moments, &options, QKV_CANCELLED, "it was called off");
  options.cancelled = NULL;
  row[3] = INFINITY;
  qkv_moments_add_queries(moments, 1, 0, 1, row, true);
  row[3] = 0;
  qkv_moments_add(moments, 1, 0, 1, row, row, true);
  expect_refused(moments, &options, QKV_INVALID_ARGUMENT,
                 "the moments of queries of layer 1, KV head 0 are not finite");
  options.band_v = 16;
  expect_refused(moments, &options, QKV_INVALID_ARGUMENT,
                 "calibration.band_v is 16, allowed are 8 and 16 where they divide value_dim 24");
  options = QKV_CALIBRATE_DEFAULTS;
  options.ridge_queries = 0;
  expect_refused(moments, &options, QKV_INVALID_ARGUMENT, "ridge_queries is 0, allowed are 1e-09 to 1");
  options = QKV_CALIBRATE_DEFAULTS;
  options.metric_power = NAN;
  expect_refused(moments, &options, QKV_INVALID_ARGUMENT, "metric_power is nan, allowed are 0 to 1");
  qkv_moments_destroy(&moments);
}

// ---- Outliers among the rows that are learnt from ----

enum { PLANT_DIRECTION, PLANT_COORDINATE, PLANT_ANY, PLANT_WAYS };

// Rows of `length`, all in one direction, along one coordinate, or each in its own.
static void plant(unsigned how, double length, size_t dim, naive_random *random, float *row) {
  naive_random fixed = {77}, *from = how == PLANT_ANY ? random : &fixed;
  double squares = 0;
  for (size_t i = 0; i < dim; i++) {
    const double x = how == PLANT_COORDINATE ? i == 5 : naive_gaussian(from);
    row[i] = (float)x;
    squares += x * x;
  }
  for (size_t i = 0; i < dim; i++) row[i] *= (float)(length / sqrt(squares));
}

static double usual_length(const source *from) {
  double squares = 0;
  for (size_t i = 0; i < from->dim; i++) {
    squares += from->mean[i] * from->mean[i];
    for (size_t j = 0; j < from->dim; j++) squares += from->mix[i][j] * from->mix[i][j];
  }
  return sqrt(squares);
}

// `planted` rows of each page, keys and values alike, are outliers of `times` the usual length; 0: up to 1000.
static qkv_calibration *learn_planted(const source *rows, const source *queries, unsigned how, size_t planted,
                                      double times) {
  enum { PAGE = QKV_PAGE_TOKENS };
  const qkv_calibration_shape shape = shape_of(rows->dim, (qkv_rope){.theta = 10000});
  const size_t dim = rows->dim;
  naive_random random = {31}, plants = {32};
  qkv_moments *moments = qkv_moments_create(&shape);
  for (size_t begin = 0; begin < SAMPLES; begin += PAGE) {
    float k[PAGE * WIDTH_MAX], v[PAGE * WIDTH_MAX], q[PAGE * WIDTH_MAX];
    for (size_t t = 0; t < PAGE; t++) {
      draw(rows, &random, k + t * dim);
      draw(rows, &random, v + t * dim);
      draw(queries, &random, q + t * dim);
    }
    for (size_t i = 0; i < planted; i++) {
      const double scale = times > 0 ? times : pow(1000, naive_uniform(&plants));
      plant(how, scale * usual_length(rows), dim, &plants, k + naive_below(&plants, PAGE) * dim);
      plant(how, scale * usual_length(rows), dim, &plants, v + naive_below(&plants, PAGE) * dim);
    }
    qkv_moments_add(moments, 0, begin, PAGE, k, v, true);
    qkv_moments_add_queries(moments, 0, begin, PAGE, q, true);
  }
  qkv_calibration *calibration = calibrate(moments, &QKV_CALIBRATE_DEFAULTS);
  qkv_moments_destroy(&moments);
  return calibration;
}

static double value_error(const qkv_calibration *calibration, const source *values, unsigned tier) {
  naive_random random = {4};
  double error = 0;
  for (size_t t = 0; t < FRESH; t++) {
    float row[WIDTH_MAX], coded[WIDTH_MAX];
    draw(values, &random, row);
    memcpy(coded, row, sizeof coded);
    code(qkv_calibration_transform(calibration, 0, 0, QKV_PART_V), tier, coded);
    for (size_t c = 0; c < values->dim; c++) error += pow((double)row[c] - (double)coded[c], 2);
  }
  return error;
}

// The mean over some tiers of the logarithm of a part's error.
static double log_error(const qkv_calibration *calibration, qkv_calibration_part part, const source *rows,
                        const source *queries) {
  enum { FIRST_TIER = 12, LAST_TIER = 32, STEP = 4 };
  double sum = 0, tiers = 0;
  for (unsigned tier = FIRST_TIER; tier <= LAST_TIER; tier += STEP, tiers++) {
    sum += log(part == QKV_PART_V ? value_error(calibration, rows, tier)
                                  : frame_error(calibration, part, rows, queries, tier));
  }
  return sum / tiers;
}

// Rows that are no outliers are coded as well as by a calibration from rows without outliers. Some of the planted
// rows are as long as others: those of lengths from 1 to 1000 times are few enough.
static void outliers_bend_no_calibration(void **state) {
  (void)state;
  const source rows = falling(DIM, 3, 0.93, 1, 33), queries = falling(DIM, 1, 0.9, 1, 34);
  static const struct {
    size_t planted;
    double times;
  } plans[] = {{1, 0}, {4, 3}, {4, 1000}};
  double without[QKV_CALIBRATION_PARTS];
  qkv_calibration *plain = learn_planted(&rows, &queries, 0, 0, 1);
  for (unsigned part = 0; part < QKV_CALIBRATION_PARTS; part++) {
    without[part] = log_error(plain, part, &rows, &queries);
  }
  for (unsigned how = 0; how < PLANT_WAYS; how++) {
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
      qkv_calibration *bent = learn_planted(&rows, &queries, how, plans[i].planted, plans[i].times);
      for (unsigned part = 0; part < QKV_CALIBRATION_PARTS; part++) {
        const double worse = exp(log_error(bent, part, &rows, &queries) - without[part]);
        if (worse > 1.05) {
          fail_msg("outliers of kind %u, %zu a page, %g times as long: part %u errs %g times as much", how,
                   plans[i].planted, plans[i].times, part, worse);
        }
      }
      unref(bent);
    }
  }
  unref(plain);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(distortions_are_the_codebooks),
      cmocka_unit_test(values_are_coded_near_the_bound),
      cmocka_unit_test(keys_are_coded_for_their_queries),
      cmocka_unit_test(analysis_and_synthesis_are_duals),
      cmocka_unit_test(both_frames_find_the_turning_constant),
      cmocka_unit_test(rows_of_any_kind_are_learnt),
      cmocka_unit_test(what_cannot_be_learnt_is_refused),
      cmocka_unit_test(layers_without_rows_are_data_free),
      cmocka_unit_test(yarn_changes_sizes_alone),
      cmocka_unit_test(yarn_weighs_what_turns),
      cmocka_unit_test(outliers_bend_no_calibration),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
