// What the bench measures in process is what a worker gets through the daemon.
#include "client/bench/probe.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/bench/quality.h"
#include "client/worker/score.h"
#include "client/worker/text.h"
#include "tests/server/fixture.h"

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm/"

enum { PREFILL = 320, LENGTH = 448 };

static fixture_daemon *server;
static qkv_client *client;
static qkvi_lm *lm;
static qkv_model model;
static int32_t *text;

static int start(void **state) {
  (void)state;
  server = fixture_start((const char *[]){"--anchor", "none", NULL});
  qkv_error error = {0};
  qkv_call_error call = {0};
  int64_t bytes = 0;
  assert_int_equal(qkvi_lm_load(DATA, &lm, &error), QKV_OK);
  assert_int_equal(qkvi_text_tokens(lm, DATA "heldout_kjv.txt", &text, &bytes, &error), QKV_OK);
  assert_true(bytes > LENGTH);
  assert_int_equal(qkv_client_connect(server->unix_address, NULL, &client, &call), 0);
  model = (qkv_model){.name = "tinylm",
                      .layers = (uint32_t)lm->layers,
                      .kv_heads = (uint32_t)lm->kv_heads,
                      .q_heads = (uint32_t)lm->q_heads,
                      .key_dim = (uint32_t)lm->head_dim,
                      .value_dim = (uint32_t)lm->head_dim,
                      .dtype = QKV_FP32,
                      .rope = {.theta = lm->rope_theta},
                      .policy = QKV_POLICY_UNSET};
  assert_int_equal(qkv_model_resolve(&model, &error), QKV_OK);
  return 0;
}

static int stop(void **state) {
  (void)state;
  qkv_client_close(&client);
  qkvi_lm_free(&lm);
  free(text);
  assert_int_equal(fixture_stop(&server, SIGTERM, 20000), 0);
  return 0;
}

// What a session in process makes of it, with its own queries.
static void code(qkvi_probe *made, const qkvi_setting *setting, qkv_dtype dtype, qkvi_probe_sums *sums) {
  qkv_model own = model;
  own.dtype = dtype;
  qkvi_tiered *session = qkvi_tiered_create(&own, &setting->policy, qkvi_setting_purpose(setting));
  qkvi_probe_tiered(made, session, setting->tier_bits, sums);
  qkvi_tiered_destroy(&session);
}

// Measures one setting in process.
static qkvi_probe_sums probe(const char *text_of_setting, qkv_dtype dtype, qkvi_quality *exact) {
  qkvi_setting setting;
  assert_int_equal(qkvi_setting_parse(text_of_setting, false, &setting, NULL), QKV_OK);
  qkv_coding *coding = qkvi_setting_coding(&setting, &model, NULL);
  qkvi_probe *made = qkvi_probe_create(lm, PREFILL, LENGTH, dtype);
  qkvi_probe_sums alone = {0}, sums = {.layers = calloc((size_t)lm->layers, sizeof(qkvi_probe_layer))};
  assert_non_null(sums.layers);
  qkvi_probe_exact(made, text, &alone);
  if (setting.tier_bits > 0) {
    code(made, &setting, dtype, &sums);
  } else {
    qkvi_probe_coded(made, coding, &sums);
  }
  *exact = alone.quality;
  qkvi_probe_destroy(&made);
  qkv_coding_unref(&coding);
  return sums;
}

static bool near(double a, double b, double relative) {
  return fabs(a - b) <= relative * fabs(b);
}

// The worker's model is fp16, so rows are rounded to that on the way; for the rest the two differ by the order of
// sums in fp32: the daemon's partial attention is merged with the worker's.
static void check_against_daemon(const char *setting, double bits_k, double bits_v, int purpose, double demote_bits) {
  qkvi_quality exact;
  qkvi_probe_sums sums = probe(setting, QKV_FP16, &exact);
  const qkvi_score_options options = {.windows = 1,
                                      .prefill = PREFILL,
                                      .length = LENGTH,
                                      .bits_k = bits_k,
                                      .bits_v = bits_v,
                                      .purpose = purpose,
                                      .demote_bits = demote_bits,
                                      .precision = QKV_PRECISION_FP32};
  qkvi_scorer *scorer = qkvi_scorer_create(client, lm, &options);
  qkvi_quality quality = {0};
  qkv_error error = {0};
  if (qkvi_score_window(scorer, text, &quality, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_int_equal(sums.quality.positions, quality.positions);
  assert_true(quality.kl_bits > 0);
  if (!near(sums.quality.kl_bits, quality.kl_bits, 1e-3)) {
    fail_msg("%s: KL is %.9g in process, %.9g through the daemon", setting, sums.quality.kl_bits, quality.kl_bits);
  }
  assert_true(near(sums.quality.bits, quality.bits, 1e-5));
  assert_true(near(exact.bits, quality.bits_exact, 1e-5));
  double bytes = 0, coordinates = 0, error_k = 0, error_v = 0;
  for (int64_t i = 0; i < lm->layers; i++) {
    bytes += (double)sums.layers[i].rows.bytes;
    coordinates += (double)sums.layers[i].rows.coordinates;
    error_k += qkvi_recoded_error(&sums.layers[i].rows, QKV_K) / (double)lm->layers;
    error_v += qkvi_recoded_error(&sums.layers[i].rows, QKV_V) / (double)lm->layers;
  }
  const qkvi_score_errors errors = qkvi_scorer_errors(scorer);
  assert_true(near(error_k, errors.rel_mse_k, 1e-5));
  assert_true(near(error_v, errors.rel_mse_v, 1e-5));
  assert_true(near(8 * bytes / coordinates, qkvi_scorer_session(scorer).bits_per_coordinate, 1e-9));
  qkvi_scorer_destroy(&scorer);
  free(sums.layers);
}

static void test_as_through_the_daemon(void **state) {
  (void)state;
  check_against_daemon("plain:4", 4, 4, 1, 0);
  check_against_daemon("plain:2/1.5", 2, 1.5, 1, 0);
  check_against_daemon("archive:3", 3, 3, 2, 0);
  check_against_daemon("plain:4@2.25", 4, 4, 1, 2.25);
}

static void test_figures(void **state) {
  (void)state;
  qkvi_quality exact;
  qkvi_probe_sums fine = probe("plain:8", QKV_FP32, &exact);
  assert_int_equal(exact.positions, LENGTH - PREFILL);
  assert_true(exact.kl_bits == 0 && exact.bits == exact.bits_exact);
  assert_true(fine.quality.bits_exact == exact.bits);
  qkvi_probe_sums coarse = probe("plain:2", QKV_FP32, &exact);
  for (int64_t i = 0; i < lm->layers; i++) {
    const qkvi_probe_layer *layer = &fine.layers[i], *rough = &coarse.layers[i];
    assert_int_equal(layer->attention_rows, (LENGTH - PREFILL) * lm->q_heads);
    assert_true(layer->attention_square == rough->attention_square);
    // 8 bits leave 3e-5 of a row's square; attention averages over rows.
    assert_true(layer->attention_error > 0 && layer->attention_error < 1e-4 * layer->attention_square);
    assert_true(rough->attention_error > 100 * layer->attention_error);
    assert_true(layer->attention_cosine > 0.9999 * (double)layer->attention_rows);
    assert_true(rough->attention_cosine < layer->attention_cosine);
  }
  assert_true(fine.quality.kl_bits < 1e-4 * (double)exact.positions);
  assert_true(coarse.quality.kl_bits > 100 * fine.quality.kl_bits);
  free(fine.layers);
  free(coarse.layers);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_figures), cmocka_unit_test(test_as_through_the_daemon)};
  return cmocka_run_group_tests(tests, start, stop);
}
