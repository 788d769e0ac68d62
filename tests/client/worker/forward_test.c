#include "client/worker/forward.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "client/worker/exact.h"
#include "client/worker/figures.h"

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm/"

enum { REFERENCE_TOKENS = 64, VOCABULARY = 256 };

static qkvi_lm *lm;

static int load(void **state) {
  (void)state;
  qkv_error error = {0};
  if (qkvi_lm_load(DATA, &lm, &error) != QKV_OK) print_error("%s\n", error.text);
  return lm == NULL ? -1 : 0;
}

static int unload(void **state) {
  (void)state;
  qkvi_lm_free(&lm);
  return 0;
}

static size_t read_file(const char *name, void *data, size_t bytes) {
  char path[512];
  snprintf(path, sizeof path, "%s%s", DATA, name);
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  size_t got = fread(data, 1, bytes, file);
  fclose(file);
  return got;
}

static void read_tokens(const char *name, int32_t *tokens, size_t count) {
  uint8_t bytes[512];
  assert_true(count <= sizeof bytes);
  assert_int_equal(read_file(name, bytes, count), count);
  for (size_t i = 0; i < count; i++) tokens[i] = bytes[i];
}

static double largest_difference(const float *a, const float *b, size_t count) {
  double largest = 0;
  for (size_t i = 0; i < count; i++) {
    double difference = fabs((double)a[i] - b[i]);
    if (!(difference <= largest)) largest = difference;  // a NaN stays
  }
  return largest;
}

static void test_model(void **state) {
  (void)state;
  assert_string_equal(lm->name, "tinylm");
  assert_int_equal(lm->layers, 6);
  assert_int_equal(lm->q_heads, 8);
  assert_int_equal(lm->kv_heads, 2);
  assert_int_equal(lm->head_dim, 64);
  assert_int_equal(lm->context, 1024);
}

// Logits of the reference bytes, run in batches of `step`.
static double difference_in_steps(int64_t step) {
  static float reference[REFERENCE_TOKENS * VOCABULARY], logits[REFERENCE_TOKENS * VOCABULARY];
  int32_t tokens[REFERENCE_TOKENS];
  read_tokens("heldout_kjv.txt", tokens, REFERENCE_TOKENS);
  assert_int_equal(read_file("reference_logits_f32.bin", reference, sizeof reference), sizeof reference);
  qkvi_forward *forward = qkvi_forward_create(lm, step, REFERENCE_TOKENS);
  qkvi_exact *exact = qkvi_exact_create(lm, REFERENCE_TOKENS);
  qkv_error error = {0};
  for (int64_t i = 0; i < REFERENCE_TOKENS; i += step) {
    int64_t count = REFERENCE_TOKENS - i < step ? REFERENCE_TOKENS - i : step;
    float *out = logits + i * VOCABULARY;
    assert_int_equal(qkvi_forward_run(forward, tokens + i, count, i, qkvi_exact_kv(exact), count, out, &error),
                     QKV_OK);
  }
  qkvi_exact_destroy(&exact);
  qkvi_forward_destroy(&forward);
  return largest_difference(logits, reference, REFERENCE_TOKENS * VOCABULARY);
}

static void test_reference_logits(void **state) {
  (void)state;
  const int64_t steps[] = {1, 7, 48, 64};
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
    double difference = difference_in_steps(steps[i]);
    if (!(difference <= 2e-3)) fail_msg("batches of %d: the logits differ by %g", (int)steps[i], difference);
  }
}

static void test_greedy_continuation(void **state) {
  (void)state;
  enum { PROMPT = 512, GENERATED = 160, COMPARED = 64 };
  static float logits[VOCABULARY];
  int32_t prompt[PROMPT], expected[GENERATED], generated[COMPARED];
  read_tokens("prompt.txt", prompt, PROMPT);
  read_tokens("greedy_continuation_160.txt", expected, GENERATED);
  qkvi_forward *forward = qkvi_forward_create(lm, PROMPT, PROMPT + COMPARED);
  qkvi_exact *exact = qkvi_exact_create(lm, PROMPT + COMPARED);
  qkvi_kv *kv = qkvi_exact_kv(exact);
  assert_int_equal(qkvi_forward_run(forward, prompt, PROMPT, 0, kv, 1, logits, NULL), QKV_OK);
  for (int i = 0; i < COMPARED; i++) {
    generated[i] = qkvi_likeliest(logits, VOCABULARY);
    assert_int_equal(qkvi_forward_run(forward, &generated[i], 1, PROMPT + i, kv, 1, logits, NULL), QKV_OK);
  }
  assert_memory_equal(generated, expected, sizeof generated);
  qkvi_exact_destroy(&exact);
  qkvi_forward_destroy(&forward);
}

// A cache that fails in the third layer.
typedef struct failing_kv {
  qkvi_kv kv;
  int64_t layers;
} failing_kv;

static qkv_status fail_step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  failing_kv *failing = (failing_kv *)kv;
  assert_int_equal(rows->layer, failing->layers);
  failing->layers++;
  memset(out, 0, (size_t)(rows->tokens * lm->q_heads * lm->head_dim) * sizeof(float));
  return failing->layers == 3 ? qkv_fail(error, QKV_UNAVAILABLE, "gone") : QKV_OK;
}

static void test_failure_of_the_cache(void **state) {
  (void)state;
  failing_kv failing = {.kv.step = fail_step};
  qkvi_forward *forward = qkvi_forward_create(lm, 1, 1);
  float logits[VOCABULARY];
  qkv_error error = {0};
  const int32_t byte = 'a';
  assert_int_equal(qkvi_forward_run(forward, &byte, 1, 0, &failing.kv, 1, logits, &error), QKV_UNAVAILABLE);
  assert_string_equal(error.text, "gone");
  assert_int_equal(failing.layers, 3);
  qkvi_forward_destroy(&forward);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_model), cmocka_unit_test(test_reference_logits),
                                     cmocka_unit_test(test_greedy_continuation),
                                     cmocka_unit_test(test_failure_of_the_cache)};
  return cmocka_run_group_tests(tests, load, unload);
}
