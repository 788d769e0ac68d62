#include "client/worker/generate.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/worker/remote.h"
#include "client/worker/text.h"
#include "tests/server/fixture.h"

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm/"

enum { PROMPT = 512, GENERATED = 48 };

static fixture_daemon *server;
static qkv_client *client;
static qkvi_lm *lm;
static int32_t *prompt, *continuation;

static int start(void **state) {
  (void)state;
  server = fixture_start(NULL);
  qkv_error error = {0};
  int64_t bytes = 0;
  assert_int_equal(qkvi_lm_load(DATA, &lm, &error), QKV_OK);
  assert_int_equal(qkvi_text_tokens(lm, DATA "prompt.txt", &prompt, &bytes, &error), QKV_OK);
  assert_int_equal(bytes, PROMPT);
  assert_int_equal(qkvi_text_tokens(lm, DATA "greedy_continuation_160.txt", &continuation, &bytes, &error), QKV_OK);
  assert_int_equal(bytes, 160);
  qkv_call_error call = {0};
  assert_int_equal(qkv_client_connect(server->tcp_address, NULL, &client, &call), 0);
  return 0;
}

static int stop(void **state) {
  (void)state;
  free(prompt);
  free(continuation);
  qkv_client_close(&client);
  qkvi_lm_free(&lm);
  assert_int_equal(fixture_stop(&server, SIGTERM, 20000), 0);
  return 0;
}

static void generate(qkvi_generation *generation, int64_t prompt_bytes, int32_t *text, qkvi_quality *quality) {
  qkv_error error = {0};
  if (qkvi_generation_feed(generation, prompt, prompt_bytes, &error) != QKV_OK) fail_msg("%s", error.text);
  for (int i = 0; i < GENERATED; i++) {
    text[i] = qkvi_generation_next(generation, quality);
    if (qkvi_generation_feed(generation, &text[i], 1, &error) != QKV_OK) fail_msg("%s", error.text);
  }
}

static int64_t prompt_length(void) {
  return fixture_is_sanitized() ? 192 : PROMPT;
}

// The text by the exact cache alone, for `temperature` and `seed`.
static void generate_exactly(int64_t prompt_bytes, double temperature, uint64_t seed, int32_t *text) {
  qkvi_exact *exact = qkvi_exact_create(lm, prompt_bytes + GENERATED);
  const qkvi_generation_options options = {
      .positions_max = prompt_bytes + GENERATED, .temperature = temperature, .seed = seed};
  qkvi_generation *generation = qkvi_generation_create(lm, qkvi_exact_kv(exact), &options);
  qkvi_quality quality = {0};
  generate(generation, prompt_bytes, text, &quality);
  assert_int_equal(quality.positions, 0);  // nothing to compare with
  qkvi_generation_destroy(&generation);
  qkvi_exact_destroy(&exact);
}

static void test_greedy_continuation(void **state) {
  (void)state;
  int32_t text[GENERATED];
  generate_exactly(PROMPT, 0, 1, text);
  assert_memory_equal(text, continuation, sizeof text);
}

// Through the daemon. The first `same_bytes` are those of the exact cache: at 8 bits all of them, at 4 as far as no
// two bytes come close in likelihood.
static void continue_prompt(double bits, size_t same_bytes, double kl_max) {
  const int64_t prompt_bytes = prompt_length();
  int32_t expected[GENERATED];
  generate_exactly(prompt_bytes, 0, 1, expected);
  const qkvi_remote_options options = {.session = "generate", .bits_k = bits, .bits_v = bits, .recent_window = -1};
  qkvi_remote *remote = NULL;
  qkv_error error = {0};
  assert_int_equal(qkvi_remote_open(client, lm, &options, &remote, &error), QKV_OK);
  qkvi_samples attend_us = {0};
  qkvi_remote_measure(remote, &attend_us);
  qkvi_exact *exact = qkvi_exact_create(lm, PROMPT + GENERATED);
  const qkvi_generation_options generation_options = {.positions_max = PROMPT + GENERATED, .exact = exact};
  qkvi_generation *generation = qkvi_generation_create(lm, qkvi_remote_kv(remote), &generation_options);
  int32_t text[GENERATED];
  qkvi_quality quality = {0};
  generate(generation, prompt_bytes, text, &quality);
  assert_memory_equal(text, expected, same_bytes * sizeof *text);
  assert_int_equal(quality.positions, GENERATED);
  double kl = quality.kl_bits / GENERATED;
  if (!(kl > 0 && kl < kl_max)) fail_msg("KL is %g", kl);
  assert_int_equal(attend_us.count, lm->layers * ((prompt_bytes + 127) / 128 + GENERATED));
  qkv_client_session_info info;
  assert_int_equal(qkvi_remote_info(remote, &info, &error), QKV_OK);
  assert_int_equal(info.tokens_coded + info.tokens_exact, lm->layers * (prompt_bytes + GENERATED));
  assert_true(info.tokens_coded > 0);
  assert_true(info.bytes_coded + info.bytes_exact < info.bytes_fp16);
  qkvi_generation_destroy(&generation);
  qkvi_exact_destroy(&exact);
  qkvi_samples_clear(&attend_us);
  assert_int_equal(qkvi_remote_close(&remote, false, &error), QKV_OK);
  assert_null(remote);
}

static void test_8_bits(void **state) {
  (void)state;
  continue_prompt(8, GENERATED, 1e-5);
}

static void test_4_bits(void **state) {
  (void)state;
  continue_prompt(4, 8, 1e-3);
}

static void test_sessions_are_kept_or_closed(void **state) {
  (void)state;
  const qkvi_remote_options options = {.session = "kept", .recent_window = -1};
  qkvi_remote *remote = NULL, *second = NULL;
  qkv_error error = {0}, taken = {0};
  assert_int_equal(qkvi_remote_open(client, lm, &options, &remote, &error), QKV_OK);
  assert_int_equal(qkvi_remote_close(&remote, true, &error), QKV_OK);
  assert_int_equal(qkvi_remote_open(client, lm, &options, &second, &taken), QKV_ALREADY_EXISTS);
  assert_null(second);
  assert_non_null(strstr(taken.text, "kept"));
  qkv_call_error call = {0};
  assert_int_equal(qkv_client_close_session(client, "kept", NULL, &call), 0);
  assert_int_equal(qkvi_remote_open(client, lm, &options, &remote, &error), QKV_OK);
  assert_int_equal(qkvi_remote_close(&remote, false, &error), QKV_OK);
  qkv_client_session_info info;
  assert_int_equal(qkv_client_get_session(client, "kept", &info, &call), QKV_NOT_FOUND);
}

// Two runs whose process has the same id, as those of two containers may.
static void test_session_names(void **state) {
  (void)state;
  char one[QKVI_REMOTE_NAME_MAX], other[QKVI_REMOTE_NAME_MAX], prefix[QKVI_REMOTE_NAME_MAX];
  qkvi_remote_name("qkv-worker", one);
  qkvi_remote_name("qkv-worker", other);
  assert_string_not_equal(one, other);
  int length = snprintf(prefix, sizeof prefix, "qkv-worker-%ld-", (long)getpid());
  assert_memory_equal(one, prefix, length);
  assert_int_equal(strspn(one + length, "0123456789abcdef"), 16);
  assert_int_equal(strlen(one), length + 16);
}

static void test_refused_step(void **state) {
  (void)state;
  const qkvi_remote_options options = {.session = "gap", .recent_window = -1};
  qkvi_remote *remote = NULL;
  qkv_error error = {0}, gap = {0};
  assert_int_equal(qkvi_remote_open(client, lm, &options, &remote, &error), QKV_OK);
  static float q[512], k[128], v[128], out[512];
  const qkvi_kv_rows rows = {.layer = 0, .position = 5, .tokens = 1, .q = q, .k = k, .v = v};
  qkvi_kv *kv = qkvi_remote_kv(remote);
  assert_int_equal(kv->step(kv, &rows, out, &gap), QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(gap.text, "position"));
  assert_int_equal(qkvi_remote_close(&remote, false, &error), QKV_OK);
}

static void test_sampling(void **state) {
  (void)state;
  enum { SHORT = 64 };
  int32_t greedy[GENERATED], cold[GENERATED], one[GENERATED], same[GENERATED], other[GENERATED];
  generate_exactly(SHORT, 0, 1, greedy);
  generate_exactly(SHORT, 1e-6, 1, cold);
  assert_memory_equal(cold, greedy, sizeof cold);
  generate_exactly(SHORT, 1, 1, one);
  generate_exactly(SHORT, 1, 1, same);
  generate_exactly(SHORT, 1, 2, other);
  assert_memory_equal(one, same, sizeof one);
  assert_memory_not_equal(one, other, sizeof one);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_greedy_continuation),
                                     cmocka_unit_test(test_8_bits),
                                     cmocka_unit_test(test_4_bits),
                                     cmocka_unit_test(test_sessions_are_kept_or_closed),
                                     cmocka_unit_test(test_session_names),
                                     cmocka_unit_test(test_refused_step),
                                     cmocka_unit_test(test_sampling)};
  return cmocka_run_group_tests(tests, start, stop);
}
