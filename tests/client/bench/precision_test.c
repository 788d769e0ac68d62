// What arithmetic in integers adds to the error of attention that the codes themselves cause: on the keys, values and
// queries of tinylm, data-free and calibrated. In calibrated code space queries are as skewed as they get.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/bench/quality.h"
#include "client/worker/calibrate.h"
#include "client/worker/exact.h"
#include "client/worker/forward.h"
#include "client/worker/text.h"
#include "engine/cache/attend.h"
#include "engine/codec/codec.h"
#include "engine/codec/embedded.h"
#include "engine/kernel/integer.h"

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm/"

enum { PREFIX = 1024, QUERIES = 32, LENGTH = PREFIX + QUERIES, WINDOW = 512, WINDOWS = 24 };

// The exact cache, and notes of the queries behind the prefix.
typedef struct noting {
  qkvi_kv kv;
  qkvi_exact *exact;
  float *q;  // [layers][QUERIES][q_heads][head_dim]
} noting;

static qkvi_lm *lm;
static qkv_model model;
static noting notes;
static const qkv_calibration *calibration;
static float *right;  // [layers][QUERIES][q_heads][head_dim], of exact rows of the prefix

static size_t layer_floats(void) {
  return (size_t)(QUERIES * lm->q_heads * lm->head_dim);
}

static qkv_status note(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  noting *n = (noting *)kv;
  if (rows->position >= PREFIX) {
    const int64_t width = lm->q_heads * lm->head_dim;
    memcpy(n->q + (size_t)rows->layer * layer_floats() + (rows->position - PREFIX) * width, rows->q,
           (size_t)(rows->tokens * width) * sizeof(float));
  }
  qkvi_kv *exact = qkvi_exact_kv(n->exact);
  return exact->step(exact, rows, out, error);
}

static void *allocate(size_t bytes) {
  void *made = calloc(1, bytes);
  assert_non_null(made);
  return made;
}

static int32_t *load(const char *path, int64_t least) {
  int32_t *text = NULL;
  int64_t tokens = 0;
  assert_int_equal(qkvi_text_tokens(lm, path, &text, &tokens, NULL), QKV_OK);
  assert_true(tokens >= least);
  return text;
}

static void calibrate(void) {
  qkvi_calibrator *calibrator = NULL;
  qkv_verdict verdict;
  int32_t *text = load(DATA "calibration.txt", (int64_t)WINDOWS * WINDOW);
  assert_int_equal(qkvi_calibrator_create(lm, WINDOW, &calibrator, NULL), QKV_OK);
  for (int64_t i = 0; i < WINDOWS; i++) {
    assert_int_equal(qkvi_calibrator_add(calibrator, text + i * WINDOW, WINDOW, NULL), QKV_OK);
  }
  assert_int_equal(qkvi_calibrator_finish(calibrator, &verdict, &calibration, NULL), QKV_OK);
  qkvi_calibrator_destroy(&calibrator);
  free(text);
}

// The outputs of all queries over the prefix's exact rows.
static void attend_exactly(void) {
  float *lse = allocate((size_t)(QUERIES * lm->q_heads) * sizeof *lse);
  qkvi_exact *prefix = qkvi_exact_create(lm, LENGTH);
  // As if all stood behind the prefix's last token and had been rotated to where they stand.
  for (int64_t layer = 0; layer < lm->layers; layer++) {
    const qkvi_kv_rows rows = {.layer = layer,
                               .tokens = PREFIX,
                               .k = qkvi_exact_k(notes.exact, layer, 0),
                               .v = qkvi_exact_v(notes.exact, layer, 0)};
    qkvi_exact_append(prefix, &rows);
    for (int64_t i = 0; i < QUERIES; i++) {
      const int64_t width = lm->q_heads * lm->head_dim;
      const qkvi_kv_rows query = {.layer = layer,
                                  .position = PREFIX - 1,
                                  .tokens = 1,
                                  .q = notes.q + (size_t)layer * layer_floats() + i * width};
      qkvi_exact_attend(prefix, &query, 0, right + (size_t)layer * layer_floats() + i * width, lse);
    }
  }
  qkvi_exact_destroy(&prefix);
  free(lse);
}

static int start(void **state) {
  (void)state;
  assert_int_equal(qkvi_lm_load(DATA, &lm, NULL), QKV_OK);
  model = (qkv_model){.name = "tinylm",
                      .layers = (uint32_t)lm->layers,
                      .kv_heads = (uint32_t)lm->kv_heads,
                      .q_heads = (uint32_t)lm->q_heads,
                      .key_dim = (uint32_t)lm->head_dim,
                      .value_dim = (uint32_t)lm->head_dim,
                      .dtype = QKV_FP32,
                      .rope = {.theta = lm->rope_theta},
                      .policy = QKV_POLICY_UNSET};
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  notes = (noting){.kv.step = note,
                   .exact = qkvi_exact_create(lm, LENGTH),
                   .q = allocate((size_t)lm->layers * layer_floats() * sizeof(float))};
  right = allocate((size_t)lm->layers * layer_floats() * sizeof *right);
  int32_t *text = load(DATA "heldout_kjv.txt", LENGTH);
  qkvi_forward *forward = qkvi_forward_create(lm, QUERIES, LENGTH);
  for (int64_t at = 0; at < LENGTH; at += QUERIES) {
    assert_int_equal(qkvi_forward_run(forward, text + at, QUERIES, at, &notes.kv, 0, NULL, NULL), QKV_OK);
  }
  qkvi_forward_destroy(&forward);
  free(text);
  calibrate();
  attend_exactly();
  return 0;
}

static int stop(void **state) {
  (void)state;
  qkv_calibration_unref(&calibration);
  qkvi_exact_destroy(&notes.exact);
  qkvi_lm_free(&lm);
  free(notes.q);
  free(right);
  return 0;
}

static void append(qkv_layer *layer, int64_t index) {
  const int64_t dims[] = {PREFIX, lm->kv_heads, lm->head_dim};
  const size_t bytes = (size_t)(PREFIX * lm->kv_heads * lm->head_dim) * sizeof(float);
  const qkv_segment k = {.data = (const uint8_t *)qkvi_exact_k(notes.exact, index, 0), .length = bytes};
  const qkv_segment v = {.data = (const uint8_t *)qkvi_exact_v(notes.exact, index, 0), .length = bytes};
  const qkv_tensor kt = qkv_tensor_dense(QKV_FP32, 3, dims, &k), vt = qkv_tensor_dense(QKV_FP32, 3, dims, &v);
  uint64_t appended;
  assert_int_equal(qkv_layer_append(layer, 0, &kt, &vt, false, &appended, NULL), QKV_OK);
}

static void attend(const qkv_layer *layer, int64_t index, qkv_precision precision, float *out) {
  const qkv_segment q = {.data = (const uint8_t *)(notes.q + (size_t)index * layer_floats()),
                         .length = layer_floats() * sizeof(float)};
  float *lse = allocate((size_t)(QUERIES * lm->q_heads) * sizeof *lse);
  const qkv_attend request = {.layer = layer,
                              .position = PREFIX - 1,
                              .q = qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){QUERIES, lm->q_heads, lm->head_dim}, &q),
                              .options = {.precision = precision},
                              .out = out,
                              .lse = lse};
  qkv_attend_run(NULL, &request, 1);
  free(lse);
}

static double distance(const float *a, const float *b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
  return sqrt(sum);
}

// The largest share of the codes' error that a precision adds, over all layers.
static double share_of(const char *text, qkv_precision precision) {
  qkvi_setting setting;
  assert_int_equal(qkvi_setting_parse(text, true, &setting, NULL), QKV_OK);
  qkv_coding *coding = qkvi_setting_coding(&setting, &model, calibration);
  float *exactly = allocate(layer_floats() * sizeof *exactly), *out = allocate(layer_floats() * sizeof *out);
  double worst = 0;
  for (int64_t i = 0; i < lm->layers; i++) {
    qkv_arena *arena = qkv_arena_create("memory", (uint64_t)1 << 30);
    const qkv_layer_config config = {.model = &model, .policy = setting.policy, .layer = (uint32_t)i, .arena = arena};
    qkv_layer layer;
    qkv_layer_init(&layer, &config, qkv_coding_layer(coding, (uint32_t)i));
    append(&layer, i);
    attend(&layer, i, QKV_PRECISION_FP32, exactly);
    attend(&layer, i, precision, out);
    const double code = distance(exactly, right + (size_t)i * layer_floats(), layer_floats());
    worst = fmax(worst, distance(exactly, out, layer_floats()) / code);
    qkv_layer_deinit(&layer);
    qkv_arena_destroy(&arena);
  }
  qkv_coding_unref(&coding);
  free(exactly);
  free(out);
  return worst;
}

static void test_the_default_adds_a_tenth_at_most(void **state) {
  (void)state;
  static const char *const settings[] = {
      "plain:1",  "plain:2",  "plain:3",  "plain:4",  "plain:6",      "plain:8",   "attend:1",  "attend:2",
      "attend:3", "attend:4", "attend:6", "attend:8", "plain:4:auto", "archive:2", "archive:4", "attend:2:auto"};
  for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
    const double fast = share_of(settings[i], QKV_PRECISION_DEFAULT),
                 fine = share_of(settings[i], QKV_PRECISION_INT16);
    print_message("%-14s the default adds %.3f of the codes' error, INT16 %.3f\n", settings[i], fast, fine);
    assert_true(fast <= 0.1 && fine <= 0.08 && fast > 0);
  }
}

// Both precisions are needed: where codes are coarse one byte is enough, where they are fine it is not.
static void test_bytes_follow_the_codes(void **state) {
  (void)state;
  const qkv_transform *uniform = qkv_transform_uniform(128);
  assert_true(qkvi_query_limit(uniform, 4 * QKV_TIER_BIT) == QKVI_LIMIT_1);
  assert_int_equal(qkvi_weight_bytes(uniform, 4 * QKV_TIER_BIT), 1);
  assert_true(qkvi_query_limit(uniform, 6 * QKV_TIER_BIT) > QKVI_LIMIT_1);
  assert_int_equal(qkvi_weight_bytes(uniform, 6 * QKV_TIER_BIT), 2);
  assert_true(share_of("plain:6", QKV_PRECISION_INT8) > 0.1);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_default_adds_a_tenth_at_most),
                                     cmocka_unit_test(test_bytes_follow_the_codes)};
  return cmocka_run_group_tests_name("precision", tests, start, stop);
}
