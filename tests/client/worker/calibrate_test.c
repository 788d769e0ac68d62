#include "client/worker/calibrate.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/worker/exact.h"
#include "client/worker/forward.h"
#include "client/worker/score.h"
#include "client/worker/text.h"
#include "engine/codec/codebook.h"
#include "tests/server/fixture.h"

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm/"

enum { WINDOW = 512, WINDOWS = 4, ROWS = 256 };

static qkvi_lm *lm;
static const qkv_calibration *learnt;
static int32_t *heldout;

static int32_t *text(const char *name, int64_t *tokens) {
  char path[512];
  snprintf(path, sizeof path, "%s%s", DATA, name);
  int32_t *data = NULL;
  qkv_error error = {0};
  if (qkvi_text_tokens(lm, path, &data, tokens, &error) != QKV_OK) fail_msg("%s", error.text);
  return data;
}

static const qkv_calibration *learn(const int32_t *from, int64_t windows) {
  qkvi_calibrator *calibrator = NULL;
  const qkv_calibration *calibration = NULL;
  qkv_verdict verdict;
  qkv_error error = {0};
  assert_int_equal(qkvi_calibrator_create(lm, WINDOW, &calibrator, &error), QKV_OK);
  for (int64_t i = 0; i < windows; i++) {
    assert_int_equal(qkvi_calibrator_add(calibrator, from + i * WINDOW, WINDOW, &error), QKV_OK);
  }
  if (qkvi_calibrator_finish(calibrator, &verdict, &calibration, &error) != QKV_OK) fail_msg("%s", error.text);
  qkvi_calibrator_destroy(&calibrator);
  if (windows == 1) return calibration;  // too little for a trial
  // Keys in two frames and values of every head, on pages that were not learnt from.
  assert_int_equal(verdict.parts, 3 * lm->layers * lm->kv_heads);
  assert_true(verdict.accepted && verdict.dropped < verdict.parts / 2 && verdict.error < 0.8 * verdict.data_free);
  return calibration;
}

static int start(void **state) {
  (void)state;
  qkv_error error = {0};
  int64_t tokens;
  assert_int_equal(qkvi_lm_load(DATA, &lm, &error), QKV_OK);
  int32_t *calibration_text = text("calibration.txt", &tokens);
  assert_true(tokens == 24 * 1024);
  learnt = learn(calibration_text, WINDOWS);
  free(calibration_text);
  heldout = text("heldout_kjv.txt", &tokens);
  return 0;
}

static int stop(void **state) {
  (void)state;
  qkv_calibration_unref(&learnt);
  free(heldout);
  qkvi_lm_free(&lm);
  return 0;
}

static void the_calibration_fits_its_model(void **state) {
  (void)state;
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(learnt);
  assert_int_equal(shape->layers, lm->layers);
  assert_int_equal(shape->kv_heads, lm->kv_heads);
  assert_int_equal(shape->q_heads, lm->q_heads);
  assert_int_equal(shape->key_dim, lm->head_dim);
  assert_true(shape->rope.theta == lm->rope_theta);
  assert_int_equal(shape->rope.width, lm->head_dim);
  const uint64_t tokens = qkv_calibration_tokens(learnt);  // but for what is held out
  assert_true(tokens < WINDOW * WINDOWS && tokens >= WINDOW * WINDOWS * 3 / 4 - QKV_PAGE_TOKENS);
}

// The trial has distributed bits: heads differ, and keys and values together have their average.
static void bits_are_distributed(void **state) {
  (void)state;
  int sum = 0, most = 0;
  for (uint32_t layer = 0; layer < (uint32_t)lm->layers; layer++) {
    for (uint32_t head = 0; head < (uint32_t)lm->kv_heads; head++) {
      const int k = qkv_calibration_tier_offset(learnt, layer, head, QKV_PART_K_ATTEND),
                v = qkv_calibration_tier_offset(learnt, layer, head, QKV_PART_V);
      sum += k + v;
      most = abs(k) > most ? abs(k) : most;
      most = abs(v) > most ? abs(v) : most;
    }
  }
  assert_in_range(most, 2, 12);
  assert_true(abs(sum) <= 2);  // each part's eighths are rounded in order
}

// The same text gives the same bytes.
static void learning_is_repeatable(void **state) {
  (void)state;
  const qkv_calibration *one = learn(heldout, 1), *other = learn(heldout, 1);
  size_t size, other_size;
  const void *bytes = qkv_calibration_bytes(one, &size), *others = qkv_calibration_bytes(other, &other_size);
  assert_int_equal(size, other_size);
  assert_memory_equal(bytes, others, size);
  assert_int_not_equal(qkv_calibration_version(one), qkv_calibration_version(learnt));
  qkv_calibration_unref(&one);
  qkv_calibration_unref(&other);
}

static unsigned depth_of(const qkv_schedule *schedule, unsigned tier, size_t c) {
  unsigned depth = 0;
  while (depth < QKV_DEPTH_MAX && schedule->reach[tier][depth + 1] > c) depth++;
  return depth;
}

// Relative squared error of a row coded at a tier, without a gain.
static void code(const qkv_transform *transform, unsigned tier, const float *row, double *error, double *square) {
  const size_t dim = transform->schedule->dim;
  float coded[QKV_DIM_MAX];
  memcpy(coded, row, dim * sizeof *row);
  qkv_transform_forward(transform, coded, 1, dim);
  for (size_t c = 0; c < dim; c++) {
    const unsigned depth = depth_of(transform->schedule, tier, c);
    coded[c] = depth == 0 ? 0 : qkv_codebook_value(depth, (unsigned)qkv_codebook_code(coded[c]) >> (8 - depth));
  }
  qkv_transform_inverse(transform, coded, 1, dim);
  for (size_t c = 0; c < dim; c++) {
    *error += pow((double)row[c] - (double)coded[c], 2);
    *square += (double)row[c] * (double)row[c];
  }
}

// Text that was not learnt from, in the archive frame: 2 bits a coordinate leave a relative error of about 0.01 in
// keys (the data-free code leaves 0.11), 1 bit in values about 0.08 (0.36).
static void heldout_rows_are_coded_well(void **state) {
  (void)state;
  qkvi_forward *forward = qkvi_forward_create(lm, ROWS, ROWS);
  qkvi_exact *cache = qkvi_exact_create(lm, ROWS);
  assert_int_equal(qkvi_forward_run(forward, heldout, ROWS, 0, qkvi_exact_kv(cache), 0, NULL, NULL), QKV_OK);
  const qkv_rope *rope = &qkv_calibration_shape_of(learnt)->rope;
  double k_error = 0, k_square = 0, v_error = 0, v_square = 0;
  for (int64_t layer = 0; layer < lm->layers; layer++) {
    for (int64_t t = 0; t < ROWS; t++) {
      for (int64_t head = 0; head < lm->kv_heads; head++) {
        float key[64];
        assert_int_equal(lm->head_dim, 64);
        memcpy(key, qkvi_exact_k(cache, layer, t) + head * 64, sizeof key);
        qkv_rope_inverse(rope, key, (uint64_t)t);
        code(qkv_calibration_transform(learnt, (uint32_t)layer, (uint32_t)head, QKV_PART_K_ARCHIVE), 16, key,
             &k_error, &k_square);
        code(qkv_calibration_transform(learnt, (uint32_t)layer, (uint32_t)head, QKV_PART_V), 8,
             qkvi_exact_v(cache, layer, t) + head * 64, &v_error, &v_square);
      }
    }
  }
  print_message("relative squared error: keys at 2 bits %.4f, values at 1 bit %.4f\n", k_error / k_square,
                v_error / v_square);
  assert_true(k_error < 0.02 * k_square);
  assert_true(v_error < 0.12 * v_square);
  qkvi_exact_destroy(&cache);
  qkvi_forward_destroy(&forward);
}

static double score(qkv_client *client, bool calibrated, int purpose) {
  qkvi_score_options options = {.windows = 1, .prefill = 320, .length = 384, .bits_k = 2, .bits_v = 2};
  options.purpose = purpose;
  if (calibrated) options.calibration = qkv_calibration_bytes(learnt, &options.calibration_bytes);
  qkvi_scorer *scorer = qkvi_scorer_create(client, lm, &options);
  qkvi_quality quality = {0};
  qkv_error error = {0};
  for (int64_t i = 0; i < 3; i++) {
    if (qkvi_score_window(scorer, heldout + 4000 * i, &quality, &error) != QKV_OK) fail_msg("%s", error.text);
  }
  qkvi_scorer_destroy(&scorer);
  return quality.kl_bits / (double)quality.positions;
}

typedef struct comparison {
  const uint8_t *expected;
  size_t size, at, most;  // bytes; `most` are taken
} comparison;

static bool compare(void *context, const void *data, size_t bytes) {
  comparison *with = context;
  assert_in_range(bytes, 1, with->size - with->at);
  assert_memory_equal(data, with->expected + with->at, bytes);
  with->at += bytes;
  return with->at < with->most;
}

static void expect_calibration(qkv_client *client) {
  qkv_call_error call = {0};
  comparison with = {.most = SIZE_MAX};
  with.expected = qkv_calibration_bytes(learnt, &with.size);
  assert_int_equal(qkv_client_get_calibration(client, lm->name, compare, &with, &call), 0);
  assert_int_equal(with.at, with.size);
  with.at = 0;
  with.most = 1;
  assert_int_equal(qkv_client_get_calibration(client, lm->name, compare, &with, &call), QKV_CANCELLED);
  with.size = 0;
  assert_int_equal(qkv_client_get_calibration(client, "nobody", compare, &with, &call), QKV_NOT_FOUND);
  assert_string_equal(call.text, "no model nobody");
}

// Through the daemon: the model is registered with the calibration, and its sessions are coded better from then on.
static void the_daemon_takes_it(void **state) {
  (void)state;
  enum { ATTEND = 1, FETCH = 2 };
  fixture_daemon *server = fixture_start((const char *[]){"--calibrate-tokens", "0", NULL});
  qkv_client *client = NULL;
  qkv_call_error call = {0};
  assert_int_equal(qkv_client_connect(server->unix_address, NULL, &client, &call), 0);
  const double data_free = score(client, false, ATTEND);
  const double attend = score(client, true, ATTEND), archive = score(client, true, FETCH);
  print_message("KL at 2 bits: data-free %.5f, attend frame %.5f, archive frame %.5f\n", data_free, attend, archive);
  assert_true(attend < 0.6 * data_free);
  assert_true(archive < 0.4 * data_free);
  expect_calibration(client);
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&server, SIGTERM, 20000), 0);
}

static void models_that_no_calibration_takes(void **state) {
  (void)state;
  qkvi_lm odd = *lm;
  odd.head_dim = 20;
  qkvi_calibrator *calibrator = (qkvi_calibrator *)&odd;
  qkv_error error = {0};
  assert_int_equal(qkvi_calibrator_create(&odd, WINDOW, &calibrator, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "calibration.key_dim is 20, allowed are multiples of 8 from 8 to 1024");
  assert_null(calibrator);
  error = (qkv_error){0};
  const qkv_calibration *calibration = NULL;
  qkv_verdict verdict;
  assert_int_equal(qkvi_calibrator_create(lm, WINDOW, &calibrator, &error), QKV_OK);
  assert_int_equal(qkvi_calibrator_finish(calibrator, &verdict, &calibration, &error), QKV_FAILED_PRECONDITION);
  assert_string_equal(error.text, "there are no rows to learn from");
  qkvi_calibrator_destroy(&calibrator);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_calibration_fits_its_model),
      cmocka_unit_test(bits_are_distributed),
      cmocka_unit_test(learning_is_repeatable),
      cmocka_unit_test(heldout_rows_are_coded_well),
      cmocka_unit_test(the_daemon_takes_it),
      cmocka_unit_test(models_that_no_calibration_takes),
  };
  return cmocka_run_group_tests(tests, start, stop);
}
