// Several daemons behind one client: who owns what, batches that go to all of them, and one that is killed and
// returns.
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/c/place.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

enum { DAEMONS = 3, SESSIONS = 60, TOKENS = 64, WIDTH = 8 };

static float rows[SESSIONS][TOKENS * WIDTH];
static uint32_t ids[TOKENS];
static char names[SESSIONS][32];
static char directory[128], targets[DAEMONS * 160], target_of[DAEMONS][160];
static fixture_daemon *daemons[DAEMONS];
static qkv_client *client, *alone[DAEMONS];

static void start(size_t i) {
  daemons[i] = fixture_start((const char *[]){"--listen", target_of[i], NULL});
}

static qkv_client_tensor tensor(size_t session, uint64_t first, uint64_t tokens) {
  return (qkv_client_tensor){.dtype = QKV_CLIENT_FP32,
                             .rank = 3,
                             .dims = {(int64_t)tokens, 1, WIDTH},
                             .data = rows[session] + first * WIDTH,
                             .bytes = tokens * WIDTH * sizeof **rows};
}

static void register_model(qkv_client *with) {
  qkv_call_error error = {0};
  const qkv_client_model model = one_head_model(WIDTH);
  ok(qkv_client_register_model(with, &model, &error), &error);
}

static size_t owner_of(const char *name) {
  size_t owner = 0;
  uint64_t most = 0;
  for (size_t d = 0; d < DAEMONS; d++) {
    const uint64_t weight = qkvi_place_weight(qkvi_place_hash(target_of[d]), qkvi_place_hash(name));
    if (weight <= most) continue;
    most = weight;
    owner = d;
  }
  return owner;
}

// Sessions whose owners take turns, whatever the daemons' names are.
static void choose_names(void) {
  for (size_t s = 0, number = 0; s < SESSIONS; s++) {
    do {
      (void)snprintf(names[s], sizeof names[s], "session/%zu", number++);
    } while (owner_of(names[s]) != s % DAEMONS);
  }
}

static int setup(void **state) {
  (void)state;
  qkv_call_error error = {0};
  fixture_make_directory(directory, sizeof directory);
  for (size_t i = 0; i < DAEMONS; i++) {
    (void)snprintf(target_of[i], sizeof target_of[i], "unix:%s/%zu.sock", directory, i);
    const size_t left = sizeof targets - strlen(targets);
    assert_in_range(snprintf(targets + strlen(targets), left, "%s%s", i > 0 ? "," : "", target_of[i]), 1, left - 1);
    start(i);
    ok(qkv_client_connect(target_of[i], NULL, &alone[i], &error), &error);
  }
  choose_names();
  for (size_t s = 0; s < SESSIONS; s++) {
    for (size_t i = 0; i < TOKENS * WIDTH; i++) rows[s][i] = (float)((i * 7 + s * 5) % 23) / 16;
  }
  for (size_t i = 0; i < TOKENS; i++) ids[i] = (uint32_t)i + 7;
  ok(qkv_client_connect(targets, NULL, &client, &error), &error);
  register_model(client);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  for (size_t i = 0; i < DAEMONS; i++) {
    qkv_client_close(&alone[i]);
    assert_int_equal(fixture_stop(&daemons[i], SIGTERM, FIXTURE_PATIENCE_MS), 0);
  }
  fixture_remove_directory(directory);
  return 0;
}

// The same values as in Python (client/python/tests/test_several.py).
static void weights_are_the_same_everywhere(void **state) {
  (void)state;
  FILE *file = fopen(QKV_SOURCE_DIR "/tests/data/places.txt", "re");
  assert_non_null(file);
  char line[512], text[256];
  uint64_t hash = 0, places[DAEMONS];
  size_t count = 0, keys = 0, owner = 0;
  while (fgets(line, sizeof line, file) != NULL) {
    if (sscanf(line, "target %255s %lx", text, &hash) == 2) {
      assert_true(count < DAEMONS);
      assert_true(qkvi_place_hash(text) == hash);
      places[count++] = hash;
    } else if (sscanf(line, "key %255s %lx %zu", text, &hash, &owner) == 3) {
      assert_true(qkvi_place_hash(text) == hash);
      for (size_t i = 0; i < count; i++)
        assert_true(qkvi_place_weight(places[i], hash) <= qkvi_place_weight(places[owner], hash));
      keys++;
    }
  }
  assert_int_equal(fclose(file), 0);
  assert_true(count == DAEMONS && keys > 10);
}

// 1 / N each, and one more takes its part of each of the others.
static void keys_spread_evenly(void **state) {
  (void)state;
  enum { KEYS = 30000, MOST = 5 };
  size_t owned[MOST + 1] = {0}, moved = 0, between_old = 0;
  for (size_t k = 0; k < KEYS; k++) {
    char key[32], target[32];
    size_t best[2] = {0, 0};
    uint64_t most = 0;
    (void)snprintf(key, sizeof key, "s-%zu", k);
    for (size_t t = 0; t <= MOST; t++) {
      (void)snprintf(target, sizeof target, "10.0.0.%zu:7580", t + 1);
      const uint64_t weight = qkvi_place_weight(qkvi_place_hash(target), qkvi_place_hash(key));
      if (t == MOST) best[1] = best[0];
      if (weight <= most) continue;
      most = weight;
      best[t == MOST ? 1 : 0] = t;
    }
    owned[best[0]]++;
    moved += best[1] != best[0];
    between_old += best[1] != best[0] && best[1] != MOST;
  }
  for (size_t t = 0; t < MOST; t++) assert_in_range(owned[t], KEYS / MOST * 95 / 100, KEYS / MOST * 105 / 100);
  assert_in_range(moved, KEYS / 6 * 95 / 100, KEYS / 6 * 105 / 100);
  assert_int_equal(between_old, 0);
}

// How many of the sessions a daemon holds, and where each is.
static size_t held_by(size_t daemon, bool *held) {
  const char *list[SESSIONS];
  uint8_t presence[SESSIONS];
  size_t count = 0;
  qkv_call_error error = {0};
  for (size_t s = 0; s < SESSIONS; s++) list[s] = names[s];
  ok(qkv_client_has_sessions(alone[daemon], list, SESSIONS, false, presence, NULL, &error), &error);
  for (size_t s = 0; s < SESSIONS; s++) {
    held[s] = presence[s] != 0;
    count += held[s];
  }
  return count;
}

static void open_all(void) {
  qkv_call_error error = {0};
  qkv_client_item items[SESSIONS];
  uint64_t appended = 0;
  for (size_t s = 0; s < SESSIONS; s++) {
    ok(qkv_client_open_session(client, &(qkv_session_options){.session = names[s], .model = "m"}, &error), &error);
    items[s] = (qkv_client_item){
        .session = names[s], .k = tensor(s, 0, TOKENS), .v = tensor(s, 0, TOKENS), .token_ids = s == 5 ? ids : NULL};
  }
  ok(qkv_client_append(client, items, SESSIONS, &appended, &error), &error);
  assert_int_equal(appended, SESSIONS * TOKENS);
}

// The client's attention is that of the daemon that holds the session; as one batch and on a stream.
static void compare_attention(qkv_decode *stream) {
  qkv_call_error error = {0};
  qkv_client_item items[SESSIONS];
  qkv_client_result results[SESSIONS], expected;
  bool held[SESSIONS];
  for (size_t s = 0; s < SESSIONS; s++)
    items[s] = (qkv_client_item){.session = names[s], .position = TOKENS - 1, .q = tensor(s, 3, 1)};
  if (stream == NULL) ok(qkv_client_attend(client, items, SESSIONS, results, &error), &error);
  if (stream != NULL) ok(qkv_decode_step(stream, items, SESSIONS, results, &error), &error);
  for (size_t d = 0; d < DAEMONS; d++) {
    assert_int_equal(held_by(d, held), SESSIONS / DAEMONS);
    for (size_t s = 0; s < SESSIONS; s++) {
      assert_int_equal(held[s], s % DAEMONS == d);
      if (!held[s]) continue;
      ok(qkv_client_attend(alone[d], &items[s], 1, &expected, &error), &error);
      assert_int_equal(results[s].code, 0);
      assert_memory_equal(results[s].out, expected.out, WIDTH * sizeof(float));
      qkv_client_results_free(&expected, 1);
    }
  }
  qkv_client_results_free(results, SESSIONS);
}

static void batches_go_to_all_of_them(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_decode *stream = NULL;
  open_all();
  compare_attention(NULL);
  ok(qkv_decode_open(client, &stream, &error), &error);
  compare_attention(stream);
  compare_attention(stream);
  ok(qkv_decode_close(&stream, &error), &error);
}

static void answers_are_merged(void **state) {
  (void)state;
  qkv_call_error error = {0};
  const char *list[SESSIONS + 1] = {"nobody"};
  uint8_t presence[SESSIONS + 1];
  uint64_t tokens[SESSIONS + 1];
  for (size_t s = 0; s < SESSIONS; s++) list[s + 1] = names[s];
  ok(qkv_client_has_sessions(client, list, SESSIONS + 1, false, presence, tokens, &error), &error);
  assert_int_equal(presence[0], 0);
  for (size_t s = 1; s <= SESSIONS; s++) assert_true(presence[s] == 1 && tokens[s] == TOKENS);
  qkv_client_match match;
  const qkv_client_prompt prompt = {.model = "m", .token_ids = ids, .token_count = TOKENS};
  ok(qkv_client_match_prefix(client, &prompt, &match, &error), &error);
  assert_string_equal(match.session, names[5]);
  const qkv_client_prompt unknown = {.model = "other", .token_ids = ids, .token_count = TOKENS};
  assert_int_equal(qkv_client_match_prefix(client, &unknown, &match, &error), QKV_NOT_FOUND);
  qkv_client_object objects[SESSIONS] = {0}, got[SESSIONS] = {0};
  char bytes[SESSIONS];
  size_t deleted = 0;
  for (size_t s = 0; s < SESSIONS; s++) {
    objects[s] =
        (qkv_client_object){.name = names[s], .data = names[s], .bytes = strlen(names[s]), .evictable = true};
    got[s] = (qkv_client_object){.name = names[s], .data = malloc(32), .capacity = 32};
    bytes[s] = 0;
  }
  ok(qkv_client_put_objects(client, &(qkv_client_objects){objects, SESSIONS}, &error), &error);
  ok(qkv_client_get_objects(client, &(qkv_client_objects){got, SESSIONS}, &error), &error);
  for (size_t s = 0; s < SESSIONS; s++) {
    assert_memory_equal(got[s].data, names[s], strlen(names[s]));
    bytes[s] = (char)got[s].bytes;
    free(got[s].data);
  }
  ok(qkv_client_has_objects(client, &(qkv_client_objects){got, SESSIONS}, false, &error), &error);
  for (size_t s = 0; s < SESSIONS; s++) assert_int_equal(got[s].bytes, (size_t)bytes[s]);
  ok(qkv_client_delete_objects(client, &(qkv_client_objects){got, SESSIONS}, &deleted, &error), &error);
  assert_int_equal(deleted, SESSIONS);
}

// An item that fails is the caller's number, whatever daemon it was for.
static void failures_keep_their_numbers(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_item items[SESSIONS];
  qkv_client_result results[SESSIONS];
  for (size_t s = 0; s < SESSIONS; s++)
    items[s] = (qkv_client_item){.session = names[s], .position = TOKENS - 1, .q = tensor(s, 0, 1)};
  items[41].session = "nobody";
  items[17].layer = 9;
  ok(qkv_client_attend(client, items, SESSIONS, results, &error), &error);
  for (size_t s = 0; s < SESSIONS; s++)
    assert_int_equal(results[s].code, s == 41 ? QKV_NOT_FOUND : s == 17 ? QKV_INVALID_ARGUMENT : 0);
  qkv_client_results_free(results, SESSIONS);
  items[23].q.data = NULL;
  (void)qkv_client_attend(client, items, SESSIONS, results, &error);
  assert_string_equal(results[23].text, "items[23].q.data is NULL");
  qkv_client_results_free(results, SESSIONS);
}

static void what_is_for_one_daemon_is_refused(void **state) {
  (void)state;
  qkv_call_error error = {0};
  void *answer = NULL;
  size_t bytes = 0;
  assert_int_equal(qkv_client_call(client, "/qkv.v1.Admin/GetStatus", "", 0, &answer, &bytes, &error),
                   QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(error.text, "the client has 3"));
  size_t refused = 0;
  for (size_t i = 0; i < 20; i++) {
    char fork[32];
    (void)snprintf(fork, sizeof fork, "fork-%zu", i);
    const qkv_code code = qkv_client_fork(client, names[0], fork, 0, &error);
    if (code == 0) ok(qkv_client_close_session(client, fork, NULL, &error), &error);
    if (code == 0) continue;
    assert_int_equal(code, QKV_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "placement"));
    refused++;
  }
  assert_in_range(refused, 5, 19);
}

static void a_label_keeps_sessions_together(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *placed = NULL;
  void *answer = NULL;
  size_t bytes = 0;
  ok(qkv_client_connect(targets, &(qkv_client_options){.placement = "worker-7"}, &placed, &error), &error);
  ok(qkv_client_open_session(placed, &(qkv_session_options){.session = "a", .model = "m"}, &error), &error);
  for (size_t i = 0; i < 8; i++) {
    char fork[32];
    (void)snprintf(fork, sizeof fork, "a-%zu", i);
    ok(qkv_client_fork(placed, "a", fork, 0, &error), &error);
    ok(qkv_client_close_session(placed, fork, NULL, &error), &error);
  }
  ok(qkv_client_close_session(placed, "a", NULL, &error), &error);
  ok(qkv_client_call(placed, "/qkv.v1.Admin/GetStatus", "", 0, &answer, &bytes, &error), &error);
  qkv_free(answer);
  qkv_client_close(&placed);
  assert_int_equal(qkv_client_connect(targets, &(qkv_client_options){.placement = "no label"}, &placed, &error),
                   QKV_INVALID_ARGUMENT);
  assert_null(placed);
}

static void bad_lists(void **state) {
  (void)state;
  static const char *const lists[] = {"127.0.0.1:1,", ",", "127.0.0.1:1,127.0.0.1:1", "127.0.0.1:1,b"};
  qkv_call_error error = {0};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
    qkv_client *none = NULL;
    assert_int_equal(qkv_client_connect(lists[i], NULL, &none, &error), QKV_INVALID_ARGUMENT);
    assert_null(none);
  }
  qkv_client *none = NULL;
  assert_int_equal(qkv_client_connect("unix:/nobody/1,unix:/nobody/2",
                                      &(qkv_client_options){.connect_timeout_ms = 300}, &none, &error),
                   QKV_UNAVAILABLE);
  assert_non_null(strstr(error.text, "none of the 2 daemons"));
}

// Targets that take connections and say nothing: all are asked at the same time.
static void silent_targets_take_the_time_of_one(void **state) {
  (void)state;
  enum { SILENT = 6, CHECK_MS = 1000 };
  char list[SILENT * 32 + sizeof *target_of] = "";
  int listeners[SILENT];
  for (size_t i = 0; i < SILENT; i++) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    listeners[i] = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(listeners[i], (const struct sockaddr *)&address, size), 0);
    assert_int_equal(listen(listeners[i], SILENT), 0);
    assert_int_equal(getsockname(listeners[i], (struct sockaddr *)&address, &size), 0);
    (void)snprintf(list + strlen(list), sizeof list - strlen(list), "127.0.0.1:%d,", ntohs(address.sin_port));
  }
  qkv_client *some = NULL;
  qkv_call_error error = {0};
  int64_t began = fixture_now_ms();
  (void)snprintf(list + strlen(list), sizeof list - strlen(list), "%s", target_of[0]);
  ok(qkv_client_connect(list, NULL, &some, &error), &error);
  assert_true(fixture_now_ms() - began < SILENT * CHECK_MS / 2);
  register_model(some);
  qkv_client_close(&some);
  // None answers: not longer than was asked for.
  *strrchr(list, ',') = '\0';
  began = fixture_now_ms();
  const qkv_client_options options = {.connect_timeout_ms = 200};
  assert_int_equal(qkv_client_connect(list, &options, &some, &error), QKV_UNAVAILABLE);
  assert_true(fixture_now_ms() - began < SILENT * CHECK_MS / 2);
  assert_non_null(strstr(error.text, "no answer to /grpc.health.v1.Health/Check within"));
  for (size_t i = 0; i < SILENT; i++) close(listeners[i]);
}

static qkv_code code_of(size_t session) {
  qkv_call_error error = {0};
  qkv_client_session_info info;
  const qkv_code code = qkv_client_get_session(client, names[session], &info, &error);
  qkv_free(info.lengths);
  return code;
}

// kill -9: its sessions move, and no others; the model is there where they are opened anew, and when it is back.
static void one_is_killed(void **state) {
  (void)state;
  enum { KILLED = 1 };
  bool held[SESSIONS];
  qkv_call_error error = {0};
  qkv_decode *stream = NULL;
  ok(qkv_decode_open(client, &stream, &error), &error);
  compare_attention(stream);
  const size_t lost = held_by(KILLED, held);
  (void)fixture_stop(&daemons[KILLED], SIGKILL, FIXTURE_PATIENCE_MS);
  size_t unavailable = 0;
  for (size_t s = 0; s < SESSIONS; s++) {
    const qkv_code code = code_of(s);
    unavailable += code == QKV_UNAVAILABLE;
    if (code != QKV_UNAVAILABLE) assert_int_equal(code, held[s] ? QKV_NOT_FOUND : 0);
  }
  assert_in_range(unavailable, 0, 1);
  qkv_client_item items[SESSIONS];
  qkv_client_result results[SESSIONS];
  for (size_t s = 0; s < SESSIONS; s++)
    items[s] = (qkv_client_item){.session = names[s], .position = TOKENS - 1, .q = tensor(s, 3, 1)};
  ok(qkv_decode_step(stream, items, SESSIONS, results, &error), &error);
  for (size_t s = 0; s < SESSIONS; s++) assert_int_equal(results[s].code, held[s] ? QKV_NOT_FOUND : 0);
  qkv_client_results_free(results, SESSIONS);
  for (size_t s = 0; s < SESSIONS; s++) {
    if (!held[s]) continue;
    ok(qkv_client_open_session(client, &(qkv_session_options){.session = names[s], .model = "m"}, &error), &error);
  }
  // It is back, and empty: its sessions are its own again.
  start(KILLED);
  const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  size_t s = 0;
  while (!held[s]) s++;
  while (code_of(s) == QKV_OK && fixture_now_ms() < until) fixture_sleep_ms(20);
  assert_int_equal(code_of(s), QKV_NOT_FOUND);
  for (s = 0; s < SESSIONS; s++) {
    if (!held[s]) continue;
    ok(qkv_client_open_session(client, &(qkv_session_options){.session = names[s], .model = "m"}, &error), &error);
  }
  qkv_client_close(&alone[KILLED]);
  ok(qkv_client_connect(target_of[KILLED], NULL, &alone[KILLED], &error), &error);
  assert_int_equal(held_by(KILLED, held), lost);
  ok(qkv_decode_step(stream, items, SESSIONS, results, &error), &error);
  qkv_client_results_free(results, SESSIONS);
  (void)qkv_decode_close(&stream, &error);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(weights_are_the_same_everywhere),     cmocka_unit_test(keys_spread_evenly),
      cmocka_unit_test(batches_go_to_all_of_them),           cmocka_unit_test(answers_are_merged),
      cmocka_unit_test(failures_keep_their_numbers),         cmocka_unit_test(what_is_for_one_daemon_is_refused),
      cmocka_unit_test(a_label_keeps_sessions_together),     cmocka_unit_test(bad_lists),
      cmocka_unit_test(silent_targets_take_the_time_of_one), cmocka_unit_test(one_is_killed),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
