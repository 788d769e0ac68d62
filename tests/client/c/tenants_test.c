// Clients of two tenants with sessions of one name: the daemon tells them apart in every kind of call.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "engine/base/status.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

enum { CLIENTS = 2, TOKENS = 256, WIDTH = 8 };

// So many tokens has the session of each client.
static const uint64_t lengths[CLIENTS] = {100, 200};
static float rows[TOKENS * WIDTH];
static uint32_t ids[TOKENS];
static fixture_daemon *qkvd;
static qkv_client *clients[CLIENTS];

static qkv_client_tensor tensor(uint64_t tokens) {
  return (qkv_client_tensor){.dtype = QKV_CLIENT_FP32,
                             .rank = 3,
                             .dims = {(int64_t)tokens, 1, WIDTH},
                             .data = rows,
                             .bytes = tokens * WIDTH * sizeof *rows};
}

static int setup(void **state) {
  (void)state;
  qkv_call_error error = {0};
  char tenant[] = "other";
  const qkv_client_model model = one_head_model(WIDTH);
  for (size_t i = 0; i < TOKENS * WIDTH; i++) rows[i] = (float)(i % 13) / 16;
  for (size_t i = 0; i < TOKENS; i++) ids[i] = (uint32_t)i;
  qkvd = fixture_start(NULL);
  ok(qkv_client_connect(qkvd->unix_address, NULL, &clients[0], &error), &error);
  ok(qkv_client_connect(qkvd->tcp_address, &(qkv_client_options){.tenant = tenant}, &clients[1], &error), &error);
  memset(tenant, '?', sizeof tenant - 1);  // the client has a copy
  for (size_t i = 0; i < CLIENTS; i++) {
    ok(qkv_client_register_model(clients[i], &model, &error), &error);
    const qkv_client_item item = {
        .session = "same", .k = tensor(lengths[i]), .v = tensor(lengths[i]), .token_ids = ids};
    ok(qkv_client_open_session(clients[i], &(qkv_session_options){.session = "same", .model = "m"}, &error), &error);
    ok(qkv_client_append(clients[i], &item, 1, NULL, &error), &error);
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  for (size_t i = 0; i < CLIENTS; i++) qkv_client_close(&clients[i]);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  return 0;
}

static uint64_t length_of(size_t i, const char *session, char tenant[129]) {
  qkv_call_error error = {0};
  qkv_client_session_info info;
  ok(qkv_client_get_session(clients[i], session, &info, &error), &error);
  const uint64_t length = info.lengths[0];
  memcpy(tenant, info.tenant, sizeof info.tenant);
  qkv_free(info.lengths);
  return length;
}

static bool count_rows(void *context, const qkv_client_rows *part) {
  *(uint64_t *)context += (uint64_t)part->k.dims[0];
  return true;
}

static void each_reads_its_own(void **state) {
  (void)state;
  static const char *const names[] = {"same", "nobody"}, *const tenants[] = {"default", "other"};
  qkv_call_error error = {0};
  for (size_t i = 0; i < CLIENTS; i++) {
    const qkv_client_item query = {.session = "same", .position = 50, .q = tensor(1)};
    const qkv_client_prompt prompt = {.model = "m", .token_ids = ids, .token_count = TOKENS};
    qkv_client_result result;
    qkv_client_match match;
    uint64_t held[2], fetched = 0;
    uint8_t presence[2];
    char tenant[129];
    assert_int_equal(length_of(i, "same", tenant), lengths[i]);
    assert_string_equal(tenant, tenants[i]);
    ok(qkv_client_attend(clients[i], &query, 1, &result, &error), &error);
    assert_int_equal(result.length, lengths[i]);
    qkv_client_results_free(&result, 1);
    ok(qkv_client_fetch_rows(clients[i], &(qkv_client_fetch){.session = "same"}, count_rows, &fetched, &error),
       &error);
    assert_int_equal(fetched, lengths[i]);
    ok(qkv_client_has_sessions(clients[i], names, 1, false, presence, held, &error), &error);
    assert_int_equal(held[0], lengths[i]);
    ok(qkv_client_match_prefix(clients[i], &prompt, &match, &error), &error);
    assert_string_equal(match.session, "same");
    assert_int_equal(match.tokens, lengths[i] / 64 * 64);
  }
}

static void each_changes_its_own(void **state) {
  (void)state;
  qkv_call_error error = {0};
  char tenant[129];
  ok(qkv_client_fork(clients[1], "same", "fork", 70, &error), &error);
  assert_int_equal(length_of(1, "fork", tenant), 70);
  assert_string_equal(tenant, "other");
  assert_int_equal(qkv_client_truncate(clients[0], "fork", 0, &error), QKV_NOT_FOUND);
  assert_string_equal(error.text, "no session fork");
  ok(qkv_client_truncate(clients[0], "same", 4, &error), &error);
  assert_int_equal(length_of(0, "same", tenant), 4);
  assert_int_equal(length_of(1, "same", tenant), lengths[1]);
  ok(qkv_client_close_session(clients[0], "same", NULL, &error), &error);
  assert_int_equal(length_of(1, "same", tenant), lengths[1]);
  ok(qkv_client_close_session(clients[1], "same", NULL, &error), &error);
  assert_int_equal(qkv_client_close_session(clients[1], "same", NULL, &error), QKV_NOT_FOUND);
  assert_string_equal(error.text, "no session same of tenant other");
}

static void models_are_shared_by_the_default_tenant(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_model model = one_head_model(WIDTH);
  model.name = "base";
  const qkv_session_options options = {.session = "of-base", .model = "base"};
  ok(qkv_client_register_model(clients[0], &model, &error), &error);
  assert_int_equal(qkv_client_open_session(clients[1], &options, &error), QKV_NOT_FOUND);
  assert_string_equal(error.text, "no model base of tenant other");
  model.shared = true;
  assert_int_equal(qkv_client_register_model(clients[1], &model, &error), QKV_INVALID_ARGUMENT);
  ok(qkv_client_register_model(clients[0], &model, &error), &error);
  ok(qkv_client_open_session(clients[1], &options, &error), &error);
  ok(qkv_client_close_session(clients[1], "of-base", NULL, &error), &error);
}

static void a_tenant_is_a_name(void **state) {
  (void)state;
  qkv_client *nobody = NULL;
  qkv_call_error error = {0};
  const qkv_client_options options = {.tenant = "no name"};
  assert_int_equal(qkv_client_connect(qkvd->unix_address, &options, &nobody, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "tenant has byte 0x20 at 2, allowed are letters, digits and ._:/@-");
  assert_null(nobody);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(each_reads_its_own),
      cmocka_unit_test(each_changes_its_own),
      cmocka_unit_test(models_are_shared_by_the_default_tenant),
      cmocka_unit_test(a_tenant_is_a_name),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
