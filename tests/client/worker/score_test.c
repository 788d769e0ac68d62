#include "client/worker/score.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/worker/calibrate.h"
#include "client/worker/text.h"
#include "tests/server/fixture.h"

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm/"

static fixture_daemon *server;
static qkv_client *client;
static qkvi_lm *lm;

static int start(void **state) {
  (void)state;
  // The bounds are those of the data-free code alone.
  server = fixture_start((const char *[]){"--anchor", "none", "--calibrate-tokens", "0", NULL});
  qkv_error error = {0};
  assert_int_equal(qkvi_lm_load(DATA, &lm, &error), QKV_OK);
  qkv_call_error call = {0};
  assert_int_equal(qkv_client_connect(server->unix_address, NULL, &client, &call), 0);
  return 0;
}

static int stop(void **state) {
  (void)state;
  qkv_client_close(&client);
  qkvi_lm_free(&lm);
  assert_int_equal(fixture_stop(&server, SIGTERM, 20000), 0);
  return 0;
}

// Mean figures over the windows of a text.
static qkvi_quality score(const char *name, const qkvi_score_options *options, qkv_client_session_info *session) {
  char path[512];
  snprintf(path, sizeof path, "%s%s", DATA, name);
  int32_t *text = NULL;
  int64_t tokens = 0;
  qkv_error error = {0};
  assert_int_equal(qkvi_text_tokens(lm, path, &text, &tokens, &error), QKV_OK);
  qkvi_scorer *scorer = qkvi_scorer_create(client, lm, options);
  qkvi_quality quality = {0};
  for (int64_t i = 0; i < options->windows; i++) {
    int64_t begin = qkvi_text_window(tokens, options->length, options->windows, i);
    if (qkvi_score_window(scorer, text + begin, &quality, &error) != QKV_OK) fail_msg("%s", error.text);
  }
  assert_int_equal(quality.positions,
                   options->windows * (options->length - options->prefill - options->demote_after));
  assert_int_equal(qkvi_scorer_attend_us(scorer)->count, options->windows * lm->layers);
  *session = qkvi_scorer_session(scorer);
  qkvi_scorer_destroy(&scorer);
  free(text);
  double positions = (double)quality.positions;
  return (qkvi_quality){.positions = quality.positions,
                        .bits = quality.bits / positions,
                        .bits_exact = quality.bits_exact / positions,
                        .kl_bits = quality.kl_bits / positions};
}

// The first four tokens, which are kept as outliers (64 numbers of a byte, of two bytes where codes have 8 bits, a
// slot and a scale), are a larger share of the 320 tokens that sanitizers run than of 768.
static double sinks_bits(double bits) {
  const double row = 8.0 * (bits < 8 ? 64 + 5 : 2 * 64 + 5) / 64;
  return fixture_is_sanitized() ? 4 * row * (1.0 / 320 - 1.0 / 768) : 0;
}

// The bounds are those of the whole protocol, over 32 windows. Under a sanitizer, where the daemon is slow, one short
// window of each text stands for it, and the bound allows for its noise.
static void check_bits(double bits, int64_t windows, double kl_min, double kl_max, double bits_all_in_max) {
  qkvi_score_options options = {.windows = windows, .prefill = 768, .length = 1024, .bits_k = bits, .bits_v = bits};
  if (fixture_is_sanitized()) {
    options.windows = 1;
    options.prefill = 320;
    options.length = 384;
    kl_max *= 1.5;
  }
  static const char *const texts[] = {"heldout_kjv.txt", "heldout_jargon.txt"};
  double kl = 0;
  for (int i = 0; i < 2; i++) {
    qkv_client_session_info session;
    qkvi_quality quality = score(texts[i], &options, &session);
    kl += quality.kl_bits / 2;
    assert_true(fabs(quality.bits - quality.bits_exact) < 0.03);
    assert_int_equal(session.tokens_exact, 0);
    assert_int_equal(session.tokens_coded, lm->layers * options.prefill);
    assert_int_equal(session.bytes_fp16, lm->layers * options.prefill * 2 * 2 * 64 * 2);
    assert_int_equal(session.bytes_exact, 0);
    assert_true(session.bits_per_coordinate > bits);
    if (!(session.bits_per_coordinate <= bits_all_in_max + sinks_bits(bits)))
      fail_msg("%g bits all in", session.bits_per_coordinate);
  }
  // The lower bound is there because a cache that is not coded at all would pass the upper one.
  if (!(kl >= kl_min && kl <= kl_max)) fail_msg("%g bits: KL is %g, expected %g to %g", bits, kl, kl_min, kl_max);
}

static void test_8_bits(void **state) {
  (void)state;
  check_bits(8, 1, 1e-9, 1e-5, 8.3);
}

static void test_4_bits(void **state) {
  (void)state;
  check_bits(4, 2, 1e-4, 6e-4, 4.26);
}

static void test_2_bits(void **state) {
  (void)state;
  check_bits(2, 1, 1e-3, 9e-3, 2.26);
}

static void test_failure_leaves_no_session(void **state) {
  (void)state;
  // 4.9 bits are refused when the session is opened.
  const qkvi_score_options options = {.windows = 1, .prefill = 64, .length = 128, .bits_k = 4.9, .bits_v = 4.9};
  qkvi_scorer *scorer = qkvi_scorer_create(client, lm, &options);
  int32_t window[129] = {0};
  qkvi_quality quality = {0};
  qkv_error error = {0};
  assert_int_equal(qkvi_score_window(scorer, window, &quality, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "bits_k"));
  assert_int_equal(quality.positions, 0);
  qkvi_scorer_destroy(&scorer);
  // The same name can be opened again.
  const qkvi_score_options good = {.windows = 1, .prefill = 64, .length = 128, .bits_k = 8, .bits_v = 8};
  qkv_client_session_info session;
  (void)score("heldout_kjv.txt", &good, &session);
}

// ---- Tiers ----

static uint8_t *calibration;
static int64_t calibration_bytes;

static int calibrate(void **state) {
  (void)state;
  qkv_error error = {0};
  int32_t *learnt_from = NULL;
  int64_t tokens = 0;
  size_t size = 0;
  qkvi_calibrator *calibrator = NULL;
  const qkv_calibration *made = NULL;
  qkv_verdict verdict;
  assert_int_equal(qkvi_text_tokens(lm, DATA "calibration.txt", &learnt_from, &tokens, &error), QKV_OK);
  assert_int_equal(qkvi_calibrator_create(lm, 1024, &calibrator, &error), QKV_OK);
  for (int64_t at = 0; at < 4; at++) {
    assert_int_equal(qkvi_calibrator_add(calibrator, learnt_from + at * 1024, 1024, &error), QKV_OK);
  }
  assert_int_equal(qkvi_calibrator_finish(calibrator, &verdict, &made, &error), QKV_OK);
  const void *file = qkv_calibration_bytes(made, &size);
  calibration = malloc(size);
  assert_non_null(calibration);
  memcpy(calibration, file, size);
  calibration_bytes = (int64_t)size;
  qkv_calibration_unref(&made);
  qkvi_calibrator_destroy(&calibrator);
  free(learnt_from);
  return 0;
}

static int forget_calibration(void **state) {
  (void)state;
  free(calibration);
  return 0;
}

// One window of each text in the attend frame; its KL, and its bits all in.
static double demoted(qkvi_score_options options, double *bits) {
  qkv_client_session_info session;
  options.windows = 1;
  options.prefill = fixture_is_sanitized() ? 320 : 768;
  options.length = options.prefill + (fixture_is_sanitized() ? 64 : 256);
  options.purpose = 1;
  options.calibration = calibration;
  options.calibration_bytes = (size_t)calibration_bytes;
  const double first = score("heldout_kjv.txt", &options, &session).kl_bits;
  *bits = session.bits_per_coordinate / 2;
  const double second = score("heldout_jargon.txt", &options, &session).kl_bits;
  *bits += session.bits_per_coordinate / 2;
  return (first + second) / 2;
}

// docs/tiers.md has the figures of 32 windows; here two tell the direction.
static void test_tiers_by_attention(void **state) {
  (void)state;
  double bits, even_bits, coded_bits, full_bits;
  const double kl = demoted((qkvi_score_options){.bits_k = 4, .bits_v = 4, .demote_bits = 1.5}, &bits);
  const double even =
      demoted((qkvi_score_options){.bits_k = 4, .bits_v = 4, .demote_bits = 1.5, .demote_even = true}, &even_bits);
  const double coded = demoted((qkvi_score_options){.bits_k = 2, .bits_v = 1}, &coded_bits);
  const double full = demoted((qkvi_score_options){.bits_k = 4, .bits_v = 4}, &full_bits);
  if (!(bits < even_bits + 0.05 && full_bits > 4)) fail_msg("%g bits, even %g, all %g", bits, even_bits, full_bits);
  // 64 positions of a short context, as sanitizers run it, tell no direction.
  if (!fixture_is_sanitized() && !(full < kl && kl < 0.95 * even && kl < 0.95 * coded)) {
    fail_msg("KL by attention %g, even %g, coded so %g, in full %g", kl, even, coded, full);
  }
}

// Memory runs short in the middle: half of the codes' bytes go, and what is left is no worse than what would have
// been coded so from the start.
static void test_half_of_the_memory(void **state) {
  (void)state;
  double bits, coded_bits;
  const int64_t after = fixture_is_sanitized() ? 32 : 128;
  const double kl =
      demoted((qkvi_score_options){.bits_k = 4, .bits_v = 4, .demote_bits = 1.75, .demote_after = after}, &bits);
  const double coded =
      demoted((qkvi_score_options){.bits_k = 2.25, .bits_v = 1.5, .demote_after = after}, &coded_bits);
  if (!(bits < 4.24 / 2 + 0.1 + sinks_bits(2))) fail_msg("%g bits", bits);
  if (!fixture_is_sanitized() && !(kl < 1.5 * coded)) fail_msg("KL %g, coded so %g", kl, coded);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_8_bits),
      cmocka_unit_test(test_4_bits),
      cmocka_unit_test(test_2_bits),
      cmocka_unit_test(test_failure_leaves_no_session),
      cmocka_unit_test_setup_teardown(test_tiers_by_attention, calibrate, forget_calibration),
      cmocka_unit_test_setup_teardown(test_half_of_the_memory, calibrate, forget_calibration)};
  return cmocka_run_group_tests(tests, start, stop);
}
