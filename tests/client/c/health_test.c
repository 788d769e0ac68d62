// Of several daemons one that hangs: no call waits for it, and it is found again.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/place.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

enum { DAEMONS = 2, HUNG = 0, SESSIONS = 8, WIDTH = 8, LOOK_MS = 6000, STALL_MS = 900 };

static char directory[128], target_of[DAEMONS][160], targets[DAEMONS * 160], names[SESSIONS][32];
static fixture_daemon *daemons[DAEMONS];
static float row[WIDTH] = {1, 2, 3};

static int setup(void **state) {
  (void)state;
  fixture_make_directory(directory, sizeof directory);
  for (size_t i = 0; i < DAEMONS; i++) {
    (void)snprintf(target_of[i], sizeof target_of[i], "unix:%s/%zu.sock", directory, i);
    (void)snprintf(targets + strlen(targets), sizeof targets - strlen(targets), "%s%s", i > 0 ? "," : "",
                   target_of[i]);
    daemons[i] = fixture_start((const char *[]){"--listen", target_of[i], NULL});
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  for (size_t i = 0; i < DAEMONS; i++) assert_int_equal(fixture_stop(&daemons[i], SIGTERM, FIXTURE_PATIENCE_MS), 0);
  fixture_remove_directory(directory);
  return 0;
}

// Sessions that belong to the daemon that hangs.
static void choose_names(void) {
  const uint64_t hung = qkvi_place_hash(target_of[HUNG]), well = qkvi_place_hash(target_of[!HUNG]);
  for (size_t s = 0, number = 0; s < SESSIONS; s++) {
    uint64_t key;
    do {
      (void)snprintf(names[s], sizeof names[s], "s-%zu", number++);
      key = qkvi_place_hash(names[s]);
    } while (qkvi_place_weight(hung, key) <= qkvi_place_weight(well, key));
  }
}

static void register_model(qkv_client *client) {
  qkv_call_error error = {0};
  const qkv_client_model model = one_head_model(WIDTH);
  ok(qkv_client_register_model(client, &model, &error), &error);
}

static void append_to_all(qkv_client *client) {
  qkv_call_error error = {0};
  qkv_client_item items[SESSIONS];
  const qkv_client_tensor tensor = {
      .dtype = QKV_CLIENT_FP32, .rank = 3, .dims = {1, 1, WIDTH}, .data = row, .bytes = sizeof row};
  for (size_t s = 0; s < SESSIONS; s++) items[s] = (qkv_client_item){.session = names[s], .k = tensor, .v = tensor};
  ok(qkv_client_append(client, items, SESSIONS, NULL, &error), &error);
}

// Batches and calls to all daemons, as long as the daemon hangs; how many of them have waited for it.
static size_t stalls_of(qkv_client *client) {
  qkv_call_error error = {0};
  const uint32_t ids[64] = {0};
  size_t stalls = 0;
  for (const int64_t until = fixture_now_ms() + LOOK_MS; fixture_now_ms() < until; fixture_sleep_ms(10)) {
    qkv_client_match match;
    const int64_t began = fixture_now_ms();
    append_to_all(client);
    ok(qkv_client_match_prefix(client, &(qkv_client_prompt){"m", ids, 64, NULL, 0}, &match, &error), &error);
    stalls += fixture_now_ms() - began > STALL_MS;
  }
  return stalls;
}

static void one_that_hangs_keeps_nobody(void **state) {
  (void)state;
  qkv_client *client = NULL, *alone = NULL;
  qkv_call_error error = {0};
  choose_names();
  ok(qkv_client_connect(targets, &(qkv_client_options){.timeout_ms = 5000}, &client, &error), &error);
  register_model(client);
  assert_int_equal(kill(daemons[HUNG]->pid, SIGSTOP), 0);
  qkv_client_session_info info;
  qkv_client_set_timeout(client, 200);
  qkv_code code = QKV_NOT_FOUND;  // until all of its threads have stopped
  while (code == QKV_NOT_FOUND) code = qkv_client_get_session(client, names[0], &info, &error);
  assert_int_equal(code, QKV_DEADLINE_EXCEEDED);
  const int64_t began = fixture_now_ms();  // the health check takes no more time than the call has
  assert_int_equal(qkv_client_get_session(client, names[0], &info, &error), QKV_NOT_FOUND);
  assert_true(fixture_now_ms() - began < STALL_MS);
  qkv_client_set_timeout(client, 5000);
  for (size_t s = 0; s < SESSIONS; s++)
    ok(qkv_client_open_session(client, &(qkv_session_options){.session = names[s], .model = "m"}, &error), &error);
  assert_in_range(stalls_of(client), 0, 1);
  // It answers again, and its sessions are its own; a model that came meanwhile is there.
  assert_int_equal(kill(daemons[HUNG]->pid, SIGCONT), 0);
  code = QKV_OK;
  for (const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS; code == QKV_OK && fixture_now_ms() < until;
       fixture_sleep_ms(20)) {
    code = qkv_client_get_session(client, names[0], &info, &error);
    if (code == QKV_OK) qkv_free(info.lengths);
  }
  assert_int_equal(code, QKV_NOT_FOUND);
  ok(qkv_client_connect(target_of[HUNG], NULL, &alone, &error), &error);
  ok(qkv_client_open_session(alone, &(qkv_session_options){.session = names[0], .model = "m"}, &error), &error);
  ok(qkv_client_get_session(client, names[0], &info, &error), &error);
  qkv_free(info.lengths);
  qkv_client_close(&alone);
  qkv_client_close(&client);
}

// The client is made, and closed, while one hangs.
static void a_client_of_one_that_hangs(void **state) {
  (void)state;
  qkv_client *client = NULL;
  qkv_call_error error = {0};
  assert_int_equal(kill(daemons[HUNG]->pid, SIGSTOP), 0);
  qkv_code code = QKV_OK;  // until all of its threads have stopped
  while (code == QKV_OK) {
    code = qkv_client_connect(target_of[HUNG], &(qkv_client_options){.connect_timeout_ms = 200}, &client, &error);
    qkv_client_close(&client);
  }
  ok(qkv_client_connect(targets, &(qkv_client_options){.timeout_ms = 5000}, &client, &error), &error);
  int64_t began = fixture_now_ms();
  register_model(client);
  assert_true(fixture_now_ms() - began < STALL_MS);
  fixture_sleep_ms(150);
  began = fixture_now_ms();
  qkv_client_close(&client);
  assert_true(fixture_now_ms() - began < 3 * STALL_MS);
  assert_int_equal(kill(daemons[HUNG]->pid, SIGCONT), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(one_that_hangs_keeps_nobody),
      cmocka_unit_test(a_client_of_one_that_hangs),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
