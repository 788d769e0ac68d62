// Clients that let their connection rest, as long as they like: a decode stream between two steps, and a fetch whose
// rows are worked on while more of them wait.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

// Longer than a daemon that pings its clients, or lets the kernel reset what is not read, would wait.
enum { REST_S = 45, TOKENS = 20000, WIDTH = 64 };

static float rows[TOKENS * WIDTH];
static const qkv_client_tensor tensor = {
    .dtype = QKV_CLIENT_FP32, .rank = 3, .dims = {TOKENS, 1, WIDTH}, .data = rows, .bytes = sizeof rows};
static const qkv_client_item query = {
    .session = "s",
    .position = TOKENS - 1,
    .q = {.dtype = QKV_CLIENT_FP32, .rank = 3, .dims = {1, 1, WIDTH}, .data = rows, .bytes = WIDTH * sizeof *rows}};

static void step(qkv_decode *stream) {
  qkv_call_error error = {0};
  qkv_client_result result;
  ok(qkv_decode_step(stream, &query, 1, &result, &error), &error);
  assert_int_equal(result.length, TOKENS);
  qkv_client_results_free(&result, 1);
}

static bool rest_once(void *context, const qkv_client_rows *part) {
  int64_t *tokens = context;
  if (*tokens == 0) sleep(REST_S);
  *tokens += part->k.dims[0];
  return true;
}

static void test_connections_may_rest(void **state) {
  (void)state;
  fixture_daemon *daemon = fixture_start(NULL);
  qkv_client *client = NULL, *reader = NULL;
  qkv_decode *stream = NULL;
  qkv_call_error error = {0};
  int64_t tokens = 0;
  ok(qkv_client_connect(daemon->unix_address, NULL, &client, &error), &error);
  ok(qkv_client_connect(daemon->tcp_address, NULL, &reader, &error), &error);
  const qkv_client_model model = one_head_model(WIDTH);
  ok(qkv_client_register_model(client, &model, &error), &error);
  ok(qkv_client_open_session(client, &(qkv_session_options){.session = "s", .model = "m"}, &error), &error);
  const qkv_client_item item = {.session = "s", .k = tensor, .v = tensor};
  ok(qkv_client_append(client, &item, 1, NULL, &error), &error);
  ok(qkv_decode_open(client, &stream, &error), &error);
  step(stream);
  const qkv_client_fetch fetch = {.session = "s"};
  ok(qkv_client_fetch_rows(reader, &fetch, rest_once, &tokens, &error), &error);
  assert_int_equal(tokens, TOKENS);
  step(stream);
  ok(qkv_decode_close(&stream, &error), &error);
  qkv_client_close(&reader);
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_connections_may_rest)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
