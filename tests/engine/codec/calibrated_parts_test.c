// Codecs of parts with a calibration: which channels are outliers, what codebooks of pq gain, and that a calibration
// gives the same codes wherever it is read.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibrate.h"
#include "engine/codec/codec.h"
#include "engine/codec/moments.h"
#include "tests/engine/codec/naive.h"

enum { DIM = 64, HEADS = 2, TOKENS = QKV_PAGE_TOKENS, LEARNT = 600, POSITION = 1024 };

// A quarter of the channels, others for each head and part, are ten times as large; of keys both of a pair that RoPE
// turns together.
static bool is_large(size_t head, qkv_part part, size_t c) {
  const size_t at = part == QKV_K ? c % (DIM / 2) : c;
  return (at + 3 * head + part) % 4 == 2;
}

// A token's rows [HEADS][DIM]; keys turned to the position.
static void draw(naive_random *random, const qkv_rope *rope, uint64_t position, qkv_part part, float *rows) {
  for (size_t i = 0; i < (size_t)HEADS * DIM; i++)
    rows[i] = (float)naive_gaussian(random) * (is_large(i / DIM, part, i % DIM) ? 10 : 1);
  for (size_t h = 0; part == QKV_K && rope->theta != 0 && h < HEADS; h++)
    qkv_rope_forward(rope, rows + h * DIM, position);
}

static const qkv_calibration *learn(const qkv_rope *rope) {
  const qkv_calibration_shape shape = {
      .layers = 1, .kv_heads = HEADS, .q_heads = HEADS, .key_dim = DIM, .value_dim = DIM, .rope = *rope};
  naive_random random = {1};
  qkv_moments *moments = qkv_moments_create(&shape);
  qkv_calibration *made = NULL;
  qkv_error error;
  for (uint64_t t = 0; t < LEARNT; t++) {
    float k[HEADS * DIM], v[HEADS * DIM];
    draw(&random, rope, t, QKV_K, k);
    draw(&random, rope, t, QKV_V, v);
    qkv_moments_add(moments, 0, t, 1, k, v, false);
  }
  if (qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_moments_destroy(&moments);
  return made;
}

// The relative squared errors of a page's keys and values, and its bytes.
static size_t measure(const char *name, double bits, const qkv_rope *rope, const qkv_calibration *calibration,
                      double errors[2]) {
  static float rows[2][TOKENS * HEADS * DIM], read[TOKENS * DIM];
  naive_random random = {2};
  qkv_policy policy = QKV_POLICY_UNSET;
  policy.codec = qkv_codec_by_name(name);
  policy.bits_k = policy.bits_v = bits;
  const qkv_coder_spec spec = {.layers = 1,
                               .kv_heads = HEADS,
                               .q_heads = HEADS,
                               .key_dim = DIM,
                               .value_dim = DIM,
                               .rope = rope,
                               .policies = &policy,
                               .purpose = QKV_PURPOSE_ATTEND,
                               .calibration = calibration};
  const qkv_coder *coder = NULL;
  qkv_error error;
  uint64_t used = 0;
  void *made = policy.codec->create(&spec, &coder, &used);
  void *image = aligned_alloc(64, policy.codec->page_bytes_max(coder));
  assert_non_null(image);
  for (size_t t = 0; t < TOKENS; t++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++)
      draw(&random, rope, POSITION + t, part, rows[part] + t * HEADS * DIM);
  }
  const size_t bytes = policy.codec->encode(coder, POSITION, TOKENS, QKV_FP32, rows[0], rows[1], NULL, image);
  assert_int_equal(policy.codec->validate(coder, image, bytes, &error), QKV_OK);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    double off = 0, square = 0;
    for (size_t h = 0; h < HEADS; h++) {
      policy.codec->decode(coder, image, (uint16_t)h, part, false, read);
      for (size_t i = 0; i < (size_t)TOKENS * DIM; i++) {
        const double exact = (double)rows[part][(i / DIM * HEADS + h) * DIM + i % DIM];
        off += (exact - (double)read[i]) * (exact - (double)read[i]);
        square += exact * exact;
      }
    }
    errors[part] = off / square;
  }
  policy.codec->destroy(made);
  free(image);
  return bytes;
}

// At 2 bits, 1.5 on average: 3 bits of the channels that have 0.97 of the squares, 1 of the others.
static void channels_of_the_calibration_get_the_bits(void **state) {
  (void)state;
  qkv_rope ropes[] = {{0}, {.theta = 10000}};
  qkv_error error;
  assert_int_equal(qkv_rope_resolve(&ropes[1], DIM, &error), QKV_OK);
  for (size_t i = 0; i < sizeof ropes / sizeof *ropes; i++) {
    const qkv_calibration *calibration = learn(&ropes[i]);
    double plain[2], without[2], with[2];
    const size_t plain_bytes = measure("turboquant", 2, &ropes[i], NULL, plain);
    (void)measure("turboquant-outliers", 2, &ropes[i], NULL, without);
    assert_true(measure("turboquant-outliers", 2, &ropes[i], calibration, with) < plain_bytes);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const double expected = 0.97 * 0.0345 + 0.03 * 0.363;
      if (fabs(with[part] - expected) > 0.15 * expected || with[part] > 0.45 * plain[part] ||
          with[part] > 0.3 * without[part])
        fail_msg("rope %zu, part %d: %g, without a calibration %g, turboquant %g", i, part, with[part], without[part],
                 plain[part]);
    }
    // Keys of the inner-product quantizer: pi / 2 times what is left with a bit less, of 3 and 2 bits.
    (void)measure("turboquant-ip-outliers", 2, &ropes[i], calibration, with);
    (void)measure("turboquant-ip", 2, &ropes[i], NULL, plain);
    if (with[QKV_K] > 0.45 * plain[QKV_K]) fail_msg("rope %zu: %g, turboquant-ip %g", i, with[QKV_K], plain[QKV_K]);
    qkv_calibration_unref(&calibration);
  }
}

// Of ecsq: coordinates have steps by what the calibration says of them.
static void steps_follow_the_calibration(void **state) {
  (void)state;
  qkv_rope ropes[] = {{0}, {.theta = 10000}};
  qkv_error error;
  assert_int_equal(qkv_rope_resolve(&ropes[1], DIM, &error), QKV_OK);
  for (size_t i = 0; i < sizeof ropes / sizeof *ropes; i++) {
    const qkv_calibration *calibration = learn(&ropes[i]);
    double outliers[2], without[2], with[2];
    (void)measure("turboquant-outliers", 2, &ropes[i], calibration, outliers);
    (void)measure("ecsq", 2, &ropes[i], NULL, without);
    (void)measure("ecsq", 2, &ropes[i], calibration, with);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      if (with[part] > 0.3 * without[part] || with[part] > 0.5 * outliers[part])
        fail_msg("rope %zu, part %d: %g, without a calibration %g, turboquant-outliers %g", i, part, with[part],
                 without[part], outliers[part]);
    }
    qkv_calibration_unref(&calibration);
  }
}

// A calibration that says that the archive codec is refused is none for ecsq, and the same for others.
static void refused_calibrations_are_none_for_ecsq(void **state) {
  (void)state;
  const qkv_rope none = {0};
  const qkv_calibration *calibration = learn(&none);
  double others[2], without[2], with[2];
  const size_t other_bytes = measure("turboquant-outliers", 2, &none, calibration, others);
  qkv_calibration *refused = NULL;
  assert_int_equal(qkv_calibration_refuse_archive(&calibration, &refused, NULL), QKV_OK);
  const size_t bytes = measure("ecsq", 2, &none, NULL, without);
  assert_int_equal(measure("ecsq", 2, &none, refused, with), bytes);
  assert_memory_equal(with, without, sizeof with);
  assert_int_equal(measure("turboquant-outliers", 2, &none, refused, with), other_bytes);
  assert_memory_equal(with, others, sizeof with);
  qkv_calibration_unref((const qkv_calibration **)&refused);
}

// Each sub-vector has points of its own for what it is like.
static void codebooks_of_the_calibration_gain(void **state) {
  (void)state;
  qkv_rope rope = {.theta = 10000};
  qkv_error error;
  qkv_calibration *again = NULL;
  double without[2], with[2], read_again[2];
  size_t size;
  assert_int_equal(qkv_rope_resolve(&rope, DIM, &error), QKV_OK);
  const qkv_calibration *calibration = learn(&rope);
  const size_t bytes = measure("pq", 2, &rope, NULL, without);
  assert_int_equal(measure("pq", 2, &rope, calibration, with), bytes);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (with[part] > 0.15 * without[part])
      fail_msg("part %d: %g, without a calibration %g", part, with[part], without[part]);
  }
  // From the file's bytes codebooks are found again, the same ones.
  const void *file = qkv_calibration_bytes(calibration, &size);
  assert_int_equal(qkv_calibration_read(file, size, &again, &error), QKV_OK);
  (void)measure("pq", 2, &rope, again, read_again);
  assert_memory_equal(read_again, with, sizeof with);
  // A section has what would be found at the first use.
  const qkv_policy policy = {.codec = qkv_codec_by_name("pq"), .bits_k = 2, .bits_v = 2};
  const qkv_calibration *plain = again;
  qkv_section_wants wants = {0};
  qkv_section_want(&wants, &policy);
  assert_int_equal(qkv_calibration_add_sections(&plain, &wants, NULL, &again, &error), QKV_OK);
  assert_int_not_equal(qkv_calibration_version(again), qkv_calibration_version(calibration));
  (void)measure("pq", 2, &rope, again, read_again);
  assert_memory_equal(read_again, with, sizeof with);
  qkv_calibration_unref((const qkv_calibration **)&again);
  qkv_calibration_unref(&calibration);
}

// A trial that leaves keys or values of a head data-free takes their codebooks away, too.
static void codebooks_go_with_parts(void **state) {
  (void)state;
  const char *codecs[] = {"pq", "commvq"};
  qkv_rope rope = {.theta = 10000};
  qkv_error error;
  assert_int_equal(qkv_rope_resolve(&rope, DIM, &error), QKV_OK);
  for (size_t i = 0; i < 2; i++) {
    double without[2], with[2], dropped[2];
    const qkv_policy policy = {.codec = qkv_codec_by_name(codecs[i]), .bits_k = 2, .bits_v = 2};
    const qkv_calibration *plain = learn(&rope);
    qkv_calibration *made = NULL;
    qkv_section_wants wants = {0};
    qkv_section_want(&wants, &policy);
    assert_int_equal(qkv_calibration_add_sections(&plain, &wants, NULL, &made, &error), QKV_OK);
    (void)measure(codecs[i], 2, &rope, NULL, without);
    (void)measure(codecs[i], 2, &rope, made, with);
    bool drop[HEADS * QKV_CALIBRATION_PARTS];
    memset(drop, true, sizeof drop);
    const qkv_calibration *tried = made;
    assert_int_equal(qkv_calibration_adjust(&tried, drop, NULL, NULL, &made, &error), QKV_OK);
    (void)measure(codecs[i], 2, &rope, made, dropped);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      if (fabs(dropped[part] / without[part] - 1) > 0.02)
        fail_msg("%s, part %d: %g, without a calibration %g, with one %g", codecs[i], part, dropped[part],
                 without[part], with[part]);
    }
    qkv_calibration_unref((const qkv_calibration **)&made);
  }
}

// Each more of a head's channels in the first set costs two bits for 64 tokens, of keys and of values.
static void as_many_channels_as_are_said(void **state) {
  (void)state;
  static const uint32_t counts[] = {8, 16, 24, 56, 64, 1016}, taken[] = {8, 16, 24, 56, 56, 56};
  const qkv_rope none = {0};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    qkv_policy policy = QKV_POLICY_UNSET;
    policy.codec = qkv_codec_by_name("turboquant-outliers");
    policy.bits_k = policy.bits_v = 2;
    policy.parameters[QKV_K][0] = policy.parameters[QKV_V][0] = counts[i];
    const qkv_coder_spec spec = {.layers = 1,
                                 .kv_heads = HEADS,
                                 .q_heads = HEADS,
                                 .key_dim = DIM,
                                 .value_dim = DIM,
                                 .rope = &none,
                                 .policies = &policy,
                                 .purpose = QKV_PURPOSE_ATTEND};
    const qkv_coder *coder = NULL;
    uint64_t used = 0;
    void *made = policy.codec->create(&spec, &coder, &used);
    const size_t block = 2 * 2 * TOKENS + TOKENS * (3 * taken[i] + 1 * (DIM - taken[i])) / 8;
    assert_int_equal(policy.codec->page_bytes_max(coder), 128 + 2 * HEADS * block);
    policy.codec->destroy(made);
  }
  assert_false(qkv_codec_by_name("turboquant-outliers")->parameters[0].valid(12));
  assert_false(qkv_codec_by_name("turboquant-outliers")->parameters[0].valid(1024));
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(channels_of_the_calibration_get_the_bits),
                                     cmocka_unit_test(as_many_channels_as_are_said),
                                     cmocka_unit_test(steps_follow_the_calibration),
                                     cmocka_unit_test(refused_calibrations_are_none_for_ecsq),
                                     cmocka_unit_test(codebooks_of_the_calibration_gain),
                                     cmocka_unit_test(codebooks_go_with_parts)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
