// max_attention_error through the daemon: what a session with a contract holds and reports.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/server/kv.h"

#include <cmocka.h>

enum { STEP = 32, STEPS = 14 };

static fixture_daemon *daemon_process;
static fixture_client *client;

static int start(void **state) {
  (void)state;
  kv_start(NULL, &daemon_process, &client);
  return 0;
}

static int stop(void **state) {
  (void)state;
  kv_stop(&daemon_process, &client);
  return 0;
}

static void open_with(const char *session, double max_attention_error) {
  Qkv__V1__OpenSessionRequest request = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  request.session = (char *)session;
  request.model = (char *)"m";
  request.max_attention_error = max_attention_error;
  fixture_result result = kv_call(client, KV_METHOD("OpenSession"), &request.base);
  if (result.status != QKV_OK) fail_msg("%s", result.text);
  fixture_free(&result);
}

// Rows of all layers, each step's with its queries or, where `queries` is not set, without any.
static void stream(const char *session, bool queries) {
  for (uint64_t step = 0; step < STEPS; step++) {
    for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
      const kv_item item = {.session = session,
                            .layer = layer,
                            .position = step * STEP,
                            .tokens = STEP,
                            .queries = queries ? STEP : 0,
                            .seed = 1};
      char text[FIXTURE_TEXT_MAX];
      Qkv__V1__AttendResponse *response = NULL;
      const int status = queries ? kv_attend(client, &item, 1, &response, text) : kv_append(client, &item, 1, text);
      if (status != QKV_OK) fail_msg("%s", text);
      if (response != NULL) qkv__v1__attend_response__free_unpacked(response, NULL);
    }
  }
}

static void bits_follow_the_contract(void **state) {
  (void)state;
  const double limits[] = {0, 0.002, 0.3, 0.6, 1};
  uint64_t bytes[sizeof limits / sizeof *limits];
  const uint64_t pages = (STEP * STEPS - KV_WINDOW) / 64 * KV_LAYERS;
  double judged = 0, missed = 0;
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
    open_with("c", limits[i]);
    stream("c", true);
    Qkv__V1__SessionInfo *info = kv_info(client, "c");
    assert_int_equal(info->tokens_coded, pages * 64);
    assert_true(info->max_attention_error == limits[i]);
    assert_int_equal(info->contract_pages, limits[i] > 0 ? pages : 0);
    if (limits[i] < 0.01 || limits[i] == 1) assert_int_equal(info->contract_missed, limits[i] == 0.002 ? pages : 0);
    assert_true((info->attention_error > 0) == (limits[i] > 0));
    if (limits[i] >= 0.3) assert_true(info->attention_error < 1.25 * limits[i]);
    bytes[i] = info->bytes_coded;
    judged += (double)info->contract_pages;
    missed += (double)info->contract_missed;
    qkv__v1__session_info__free_unpacked(info, NULL);
    kv_close(client, "c");
  }
  assert_int_equal(bytes[1], bytes[0]);
  for (size_t i = 2; i < sizeof limits / sizeof *limits; i++) assert_true(bytes[i] < bytes[i - 1]);
  assert_true(kv_metric(client, "qkvd_contract_pages_total") == judged);
  assert_true(kv_metric(client, "qkvd_contract_missed_total") == missed);
  assert_true(kv_metric(client, "qkvd_contract_error_millionths") > 0);
}

static void rows_without_queries_are_not_judged(void **state) {
  (void)state;
  open_with("c", 1);
  stream("c", false);
  Qkv__V1__SessionInfo *info = kv_info(client, "c");
  assert_int_equal(info->contract_pages, 0);
  assert_true(info->attention_error == 0);
  assert_true(info->max_attention_error == 1);
  qkv__v1__session_info__free_unpacked(info, NULL);
  kv_close(client, "c");
}

// Memory of queries is released.
static void memory_is_counted(void **state) {
  (void)state;
  const double before = kv_metric(client, "qkvd_kv_bytes");
  open_with("a", 0);
  stream("a", false);
  const double plain = kv_metric(client, "qkvd_kv_bytes") - before;
  open_with("b", 0.1);
  stream("b", false);
  const double with = kv_metric(client, "qkvd_kv_bytes") - before - plain;
  assert_true(with >= plain + (double)KV_LAYERS * 8 * KV_Q_HEADS * KV_KEY_DIM * sizeof(float));
  kv_close(client, "a");
  kv_close(client, "b");
  assert_true(kv_metric(client, "qkvd_kv_bytes") == before);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(bits_follow_the_contract, start, stop),
      cmocka_unit_test_setup_teardown(rows_without_queries_are_not_judged, start, stop),
      cmocka_unit_test_setup_teardown(memory_is_counted, start, stop),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
