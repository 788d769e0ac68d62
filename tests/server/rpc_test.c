#include "server/rpc/rpc.h"

#include <grpc/grpc.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/auth/identity.h"
#include "tests/server/fixture.h"

#include <cmocka.h>

#define BIG (3 << 20)

// What the handlers below have observed.
typedef struct counters {
  atomic_int messages, ends, sents, cancels, destroys, releases, began, ended_ok, ended_cancelled, ended_other;
  atomic_long bytes;
} counters;

typedef struct test_state {
  char directory[128];
  char address[160];
  const char *listen[2];
  qkv_rpc_server *server;
  fixture_client *client;
  counters seen;
} test_state;

static counters *seen(const qkv_rpc_call *call) {
  return &((test_state *)qkv_rpc_context(call))->seen;
}

static void wait_for(atomic_int *counter, int value) {
  int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  while (atomic_load(counter) < value && fixture_now_ms() < until) fixture_sleep_ms(2);
  assert_int_equal(atomic_load(counter), value);
}

// A handler's state: memory to free, and the counter of frees.
typedef struct call_state {
  counters *seen;
  pthread_t thread;
  bool joinable;
} call_state;

static call_state *new_state(qkv_rpc_call *call) {
  call_state *state = calloc(1, sizeof(*state));
  assert_non_null(state);
  state->seen = seen(call);
  qkv_rpc_set_state(call, state);
  return state;
}

static void on_destroy(void *context) {
  call_state *state = context;
  if (state == NULL) return;
  if (state->joinable) pthread_join(state->thread, NULL);
  atomic_fetch_add(&state->seen->destroys, 1);
  free(state);
}

// ---- Methods ----

// Answers in one message: field 1 twice, as references to one copy.
typedef struct owned_bytes {
  counters *seen;
  atomic_int references;
  uint8_t data[];
} owned_bytes;

static void release(void *owner) {
  owned_bytes *bytes = owner;
  atomic_fetch_add(&bytes->seen->releases, 1);
  if (atomic_fetch_sub(&bytes->references, 1) == 1) free(bytes);
}

static void on_twice(qkv_rpc_call *call, qkv_bytes message) {
  new_state(call);
  owned_bytes *bytes = malloc(sizeof(*bytes) + message.length);
  assert_non_null(bytes);
  bytes->seen = seen(call);
  atomic_init(&bytes->references, 2);
  qkv_bytes_copy(message, 0, message.length, bytes->data);
  qkv_wire_writer *writer = qkv_wire_writer_create();
  qkv_wire_put_varint(writer, 2, 7);
  qkv_wire_put_reference(writer, 1, bytes->data, message.length, bytes);
  qkv_wire_put_reference(writer, 1, bytes->data, message.length, bytes);
  qkv_rpc_reply(call, writer, release);
  qkv_wire_writer_destroy(&writer);
}

static void on_sum(qkv_rpc_call *call, qkv_bytes message) {
  if (qkv_rpc_state(call) == NULL) new_state(call);
  atomic_fetch_add(&seen(call)->messages, 1);
  atomic_fetch_add(&seen(call)->bytes, (long)message.length);
  qkv_rpc_next(call);
}

static void on_sum_end(qkv_rpc_call *call) {
  atomic_fetch_add(&seen(call)->ends, 1);
  qkv_rpc_reply_bytes(call, "sum", 3);
}

static void on_ping(qkv_rpc_call *call, qkv_bytes message) {
  uint8_t data[64];
  assert_true(message.length <= sizeof(data));
  qkv_bytes_copy(message, 0, message.length, data);
  qkv_rpc_send_bytes(call, data, message.length);
}

static void finish_ok(qkv_rpc_call *call) {
  qkv_rpc_finish(call, QKV_OK, "");
}

static void *reply_later(void *context) {
  qkv_rpc_call *call = context;
  fixture_sleep_ms(20);
  qkv_rpc_reply_bytes(call, "later", 5);
  return NULL;
}

static void on_later(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  call_state *state = new_state(call);
  state->joinable = true;
  assert_int_equal(pthread_create(&state->thread, NULL, reply_later, call), 0);
}

// Works until the client is gone.
static void *work_until_cancelled(void *context) {
  qkv_rpc_call *call = context;
  while (!qkv_rpc_cancelled(call)) fixture_sleep_ms(1);
  atomic_fetch_add(&seen(call)->cancels, 1);
  qkv_rpc_finish(call, QKV_CANCELLED, "given up");
  return NULL;
}

static void on_work(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  call_state *state = new_state(call);
  state->joinable = true;
  assert_int_equal(pthread_create(&state->thread, NULL, work_until_cancelled, call), 0);
}

static void on_hold(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  new_state(call);
  atomic_fetch_add(&seen(call)->messages, 1);
}

static void on_hold_cancelled(qkv_rpc_call *call) {
  atomic_fetch_add(&seen(call)->cancels, 1);
  if (qkv_rpc_state(call) != NULL) qkv_rpc_finish(call, QKV_CANCELLED, "");
}

// Keeps its call after the client has gone, while other connections take descriptors.
static void *outlive_the_client(void *context) {
  enum { OTHERS = 32 };
  qkv_rpc_call *call = context;
  int others[OTHERS];
  uid_t user = 0;
  const bool known_before = qkvi_call_user(call, &user);
  assert_true(known_before && user == getuid());
  atomic_fetch_add(&seen(call)->messages, 1);
  while (!qkv_rpc_cancelled(call)) fixture_sleep_ms(1);
  fixture_sleep_ms(200);  // so that gRPC closes its descriptors
  for (int i = 0; i < OTHERS; i++) others[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool known_after = qkvi_call_user(call, &user);
  for (int i = 0; i < OTHERS; i++) close(others[i]);
  if (known_after && user == getuid()) atomic_fetch_add(&seen(call)->cancels, 1);
  qkv_rpc_finish(call, QKV_CANCELLED, "");
  return NULL;
}

static void on_outlive(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  call_state *state = new_state(call);
  state->joinable = true;
  assert_int_equal(pthread_create(&state->thread, NULL, outlive_the_client, call), 0);
}

static void send_block(qkv_rpc_call *call) {
  static const uint8_t block[65536];
  if (qkv_rpc_state(call) == NULL) new_state(call);
  atomic_fetch_add(&seen(call)->sents, 1);
  qkv_rpc_send_bytes(call, block, sizeof(block));
}

static void on_flood(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  send_block(call);
}

static void on_refuse(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  qkv_rpc_finish(call, QKV_DATA_LOSS, "page \"7\" is dämaged");
}

static const qkv_rpc_method methods[] = {
    {.path = "/t/Twice", .message = on_twice, .destroy = on_destroy},
    {.path = "/t/Sum", .message = on_sum, .end = on_sum_end, .destroy = on_destroy},
    {.path = "/t/Ping", .message = on_ping, .sent = qkv_rpc_next, .end = finish_ok},
    {.path = "/t/Later", .message = on_later, .destroy = on_destroy},
    {.path = "/t/Work", .message = on_work, .destroy = on_destroy},
    {.path = "/t/Hold", .message = on_hold, .cancelled = on_hold_cancelled, .destroy = on_destroy},
    {.path = "/t/Outlive", .message = on_outlive, .destroy = on_destroy},
    {.path = "/t/Flood", .message = on_flood, .sent = send_block, .destroy = on_destroy},
    {.path = "/t/Refuse", .message = on_refuse},
    {0},
};

// ---- Set up ----

static void count_began(void *context) {
  atomic_fetch_add(&((test_state *)context)->seen.began, 1);
}

static void count_ended(void *context, qkv_status status) {
  counters *all = &((test_state *)context)->seen;
  atomic_fetch_add(status == QKV_OK          ? &all->ended_ok
                   : status == QKV_CANCELLED ? &all->ended_cancelled
                                             : &all->ended_other,
                   1);
}

static qkv_status serve(const char *const *listen, size_t count, void *context, qkv_rpc_server **server,
                        qkv_error *error) {
  static const qkv_rpc_method *const tables[] = {methods, NULL};
  const qkv_rpc_config config = {.listen = listen,
                                 .listen_count = count,
                                 .threads = 2,
                                 .message_bytes_max = 8 << 20,
                                 .calls_max = 4,
                                 .control_calls_max = 4,
                                 .connection_calls_max = 16,
                                 .tenant_calls_max = 5,
                                 .connections_max = 64,
                                 .peer_connections_max = 64,
                                 .methods = tables,
                                 .context = context,
                                 .began = context == NULL ? NULL : count_began,
                                 .ended = context == NULL ? NULL : count_ended};
  return qkv_rpc_server_create(&config, server, error);
}

static int setup(void **out) {
  test_state *state = calloc(1, sizeof(*state));
  assert_non_null(state);
  qkv_error error = {0};
  fixture_make_directory(state->directory, sizeof(state->directory));
  snprintf(state->address, sizeof(state->address), "unix:%s/s", state->directory);
  state->listen[0] = state->address;
  state->listen[1] = "127.0.0.1:0";
  assert_int_equal(serve(state->listen, 2, state, &state->server, &error), QKV_OK);
  state->client = fixture_connect(state->address);
  *out = state;
  return 0;
}

static int teardown(void **out) {
  test_state *state = *out;
  fixture_disconnect(&state->client);
  qkv_rpc_server_drain(state->server, FIXTURE_PATIENCE_MS);
  qkv_rpc_server_destroy(&state->server);
  int ended = state->seen.ended_ok + state->seen.ended_cancelled + state->seen.ended_other;
  assert_int_equal(state->seen.began, ended);
  fixture_remove_directory(state->directory);
  free(state);
  return 0;
}

// ---- Tests ----

static void replies_with_references(void **out) {
  test_state *state = *out;
  uint8_t *data = malloc(BIG);
  assert_non_null(data);
  for (size_t i = 0; i < BIG; i++) data[i] = (uint8_t)(i * 31 >> 3);
  fixture_result result = fixture_call(state->client, "/t/Twice", data, BIG, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_OK);
  // 10 07, then twice 0a LENGTH DATA
  assert_int_equal(result.length, 2 + 2 * (1 + 4 + BIG));
  assert_memory_equal(result.data, "\x10\x07\x0a", 3);
  assert_memory_equal(result.data + 2 + 5, data, BIG);
  assert_memory_equal(result.data + 2 + 5 + BIG + 5, data, BIG);
  wait_for(&state->seen.releases, 2);
  wait_for(&state->seen.destroys, 1);
  fixture_free(&result);
  free(data);
}

static void reads_a_stream(void **out) {
  test_state *state = *out;
  uint8_t *data = calloc(1, BIG);
  fixture_stream *stream = fixture_open(state->client, "/t/Sum", FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, data, BIG));
  assert_true(fixture_send(stream, NULL, 0));
  assert_true(fixture_send(stream, data, 5));
  fixture_half_close(stream);
  uint8_t *answer;
  size_t length;
  assert_true(fixture_receive(stream, &answer, &length));
  assert_memory_equal(answer, "sum", 3);
  assert_int_equal(fixture_finish(&stream).status, GRPC_STATUS_OK);
  assert_int_equal(atomic_load(&state->seen.messages), 3);
  assert_int_equal(atomic_load(&state->seen.bytes), BIG + 5);
  wait_for(&state->seen.destroys, 1);
  free(answer);
  free(data);
}

static void stream_without_messages_ends(void **out) {
  test_state *state = *out;
  fixture_stream *stream = fixture_open(state->client, "/t/Sum", FIXTURE_PATIENCE_MS);
  fixture_half_close(stream);
  uint8_t *answer;
  size_t length;
  assert_true(fixture_receive(stream, &answer, &length));
  free(answer);
  assert_int_equal(fixture_finish(&stream).status, GRPC_STATUS_OK);
  assert_int_equal(atomic_load(&state->seen.ends), 1);
}

static void unary_without_message_is_refused(void **out) {
  test_state *state = *out;
  fixture_stream *stream = fixture_open(state->client, "/t/Twice", FIXTURE_PATIENCE_MS);
  fixture_half_close(stream);
  fixture_result result = fixture_finish(&stream);
  assert_int_equal(result.status, GRPC_STATUS_INVALID_ARGUMENT);
  assert_string_equal(result.text, "the call of /t/Twice has no message, 1 is needed");
}

static void ping_pong(void **out) {
  test_state *state = *out;
  fixture_stream *stream = fixture_open(state->client, "/t/Ping", FIXTURE_PATIENCE_MS);
  for (int i = 0; i < 50; i++) {
    uint8_t *answer;
    size_t length;
    assert_true(fixture_send(stream, &i, sizeof(i)));
    assert_true(fixture_receive(stream, &answer, &length));
    assert_int_equal(length, sizeof(i));
    assert_memory_equal(answer, &i, sizeof(i));
    free(answer);
  }
  fixture_half_close(stream);
  assert_int_equal(fixture_finish(&stream).status, GRPC_STATUS_OK);
}

static void answers_from_another_thread(void **out) {
  test_state *state = *out;
  for (int i = 0; i < 10; i++) {
    fixture_result result = fixture_call(state->client, "/t/Later", "x", 1, FIXTURE_PATIENCE_MS);
    assert_int_equal(result.status, GRPC_STATUS_OK);
    assert_memory_equal(result.data, "later", 5);
    fixture_free(&result);
  }
  wait_for(&state->seen.destroys, 10);
}

static void status_text_arrives(void **out) {
  test_state *state = *out;
  fixture_result result = fixture_call(state->client, "/t/Refuse", "x", 1, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_DATA_LOSS);
  assert_string_equal(result.text, "page \"7\" is dämaged");
}

static void deadline_reaches_the_worker(void **out) {
  test_state *state = *out;
  // Not much shorter: a call whose deadline passes before it is sent never arrives.
  fixture_result result = fixture_call(state->client, "/t/Work", "x", 1, 3000);
  assert_int_equal(result.status, GRPC_STATUS_DEADLINE_EXCEEDED);
  wait_for(&state->seen.cancels, 1);
  wait_for(&state->seen.destroys, 1);
  wait_for(&state->seen.ended_cancelled, 1);
}

static void cancellation_reaches_a_held_call(void **out) {
  test_state *state = *out;
  fixture_stream *stream = fixture_open(state->client, "/t/Hold", FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, "x", 1));
  wait_for(&state->seen.messages, 1);
  fixture_cancel(stream);
  assert_int_equal(fixture_finish(&stream).status, GRPC_STATUS_CANCELLED);
  wait_for(&state->seen.cancels, 1);
  wait_for(&state->seen.destroys, 1);
}

static void client_that_dies_in_a_stream_is_forgotten(void **out) {
  test_state *state = *out;
  fixture_client *client = fixture_connect(state->address);
  fixture_stream *stream = fixture_open(client, "/t/Sum", 0);
  assert_true(fixture_send(stream, "x", 1));
  wait_for(&state->seen.messages, 1);
  fixture_cancel(stream);
  (void)fixture_finish(&stream);
  fixture_disconnect(&client);
  wait_for(&state->seen.destroys, 1);
  assert_int_equal(atomic_load(&state->seen.ended_ok), atomic_load(&state->seen.ends));
}

// identity.c relies on the descriptor: it must not be another connection's while there is a call.
static void descriptor_stays_the_calls_own(void **out) {
  test_state *state = *out;
  fixture_client *client = fixture_connect(state->address);
  fixture_stream *stream = fixture_open(client, "/t/Outlive", 0);
  assert_true(fixture_send(stream, "x", 1));
  wait_for(&state->seen.messages, 1);
  fixture_cancel(stream);
  (void)fixture_finish(&stream);
  fixture_disconnect(&client);
  wait_for(&state->seen.destroys, 1);
  assert_int_equal(atomic_load(&state->seen.cancels), 1);
}

// The client reads nothing: what is sent is bounded by flow control, and cancelling ends it.
static void client_that_never_reads_holds_little(void **out) {
  test_state *state = *out;
  fixture_stream *stream = fixture_open(state->client, "/t/Flood", 0);
  assert_true(fixture_send(stream, "x", 1));
  int before = 0;
  while (before == 0 || before != atomic_load(&state->seen.sents)) {  // until nothing more is sent
    before = atomic_load(&state->seen.sents);
    fixture_sleep_ms(500);
  }
  assert_in_range(before, 1, 256);  // 16 MiB
  fixture_cancel(stream);
  assert_int_equal(fixture_finish(&stream).status, GRPC_STATUS_CANCELLED);
  wait_for(&state->seen.destroys, 1);
}

// Calls of every kind that end at any moment: cancelled, out of time, or well.
static void *disturb(void *context) {
  static const char *const paths[] = {"/t/Later", "/t/Sum", "/t/Ping", "/t/Flood", "/t/Work", "/t/Hold", "/t/Twice"};
  test_state *state = context;
  fixture_client *client = fixture_connect(state->address);
  static atomic_uint seeds = 1;
  unsigned random = atomic_fetch_add(&seeds, 1);
  for (int i = 0; i < 140; i++) {
    random = random * 1664525 + 1013904223;
    int64_t timeout_ms = 1 + (random >> 16) % 6;
    fixture_stream *stream = fixture_open(client, paths[i % 7], timeout_ms);
    bool sent = fixture_send(stream, "x", 1);
    if (sent && (random >> 24) % 3 == 0) {
      uint8_t *data;
      size_t length;
      if (fixture_receive(stream, &data, &length)) free(data);
    }
    if ((random >> 28) % 2 == 0) fixture_cancel(stream);
    (void)fixture_finish(&stream);
  }
  fixture_disconnect(&client);
  return NULL;
}

static void survives_calls_that_end_at_any_moment(void **out) {
  test_state *state = *out;
  pthread_t threads[3];
  for (int i = 0; i < 3; i++) assert_int_equal(pthread_create(&threads[i], NULL, disturb, state), 0);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  counters *all = &state->seen;
  while (all->began != all->ended_ok + all->ended_cancelled + all->ended_other && fixture_now_ms() < until) {
    fixture_sleep_ms(5);
  }
  assert_in_range(all->began, 1, 3 * 140);  // a call may be over before it is sent
  fixture_result result = fixture_call(state->client, "/t/Refuse", "x", 1, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_DATA_LOSS);
}

static void too_many_calls_are_refused(void **out) {
  test_state *state = *out;
  fixture_stream *streams[4];
  for (int i = 0; i < 4; i++) {
    streams[i] = fixture_open(state->client, "/t/Hold", 0);
    assert_true(fixture_send(streams[i], "x", 1));
  }
  wait_for(&state->seen.messages, 4);
  fixture_result result = fixture_call(state->client, "/t/Refuse", "x", 1, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_RESOURCE_EXHAUSTED);
  assert_string_equal(result.text, "limit-calls is 4 and so many calls are running");
  for (int i = 0; i < 4; i++) {
    fixture_cancel(streams[i]);
    (void)fixture_finish(&streams[i]);
  }
  wait_for(&state->seen.destroys, 4);
  result = fixture_call(state->client, "/t/Refuse", "x", 1, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_DATA_LOSS);
}

static void unknown_method_is_named(void **out) {
  test_state *state = *out;
  fixture_result result = fixture_call(state->client, "/t/Nothing", "x", 1, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_UNIMPLEMENTED);
  assert_string_equal(result.text, "no method /t/Nothing");
  result = fixture_call(state->client, "/t/Sums", "x", 1, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_UNIMPLEMENTED);
}

static void compressed_message_is_refused(void **out) {
  test_state *state = *out;
  uint8_t *zeros = calloc(1, 64 << 20);
  fixture_result result = fixture_call_gzip(state->client, "/t/Twice", zeros, 64 << 20, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_UNIMPLEMENTED);
  assert_non_null(strstr(result.text, "gzip"));
  free(zeros);
}

static void *drain(void *context) {
  qkv_rpc_server_drain(context, FIXTURE_PATIENCE_MS);
  return NULL;
}

static void draining_refuses_and_waits(void **out) {
  test_state *state = *out;
  fixture_stream *running = fixture_open(state->client, "/t/Ping", 0);
  uint8_t *answer;
  size_t length;
  assert_true(fixture_send(running, "a", 1));
  assert_true(fixture_receive(running, &answer, &length));
  free(answer);
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, drain, state->server), 0);
  fixture_result result;
  do {
    result = fixture_call(state->client, "/t/Refuse", "x", 1, FIXTURE_PATIENCE_MS);
  } while (result.status == GRPC_STATUS_DATA_LOSS);
  assert_int_equal(result.status, GRPC_STATUS_UNAVAILABLE);
  assert_non_null(strstr(result.text, "draining"));
  assert_true(fixture_send(running, "b", 1));  // goes on
  assert_true(fixture_receive(running, &answer, &length));
  assert_memory_equal(answer, "b", 1);
  free(answer);
  fixture_half_close(running);
  assert_int_equal(fixture_finish(&running).status, GRPC_STATUS_OK);
  pthread_join(thread, NULL);
  qkv_rpc_server_destroy(&state->server);
  assert_int_equal(access(state->address + strlen("unix:"), F_OK), -1);
  qkv_error error = {0};  // for teardown; the path is free again
  assert_int_equal(serve(state->listen, 1, NULL, &state->server, &error), QKV_OK);
}

// ---- Addresses ----

static void expect_refusal(const char *address, qkv_status status, const char *text) {
  qkv_rpc_server *server = NULL;
  qkv_error error = {0};
  assert_int_equal(serve(&address, 1, NULL, &server, &error), status);
  if (strstr(error.text, text) == NULL) fail_msg("\"%s\" is not in \"%s\"", text, error.text);
  assert_null(server);
}

static void malformed_addresses_are_refused(void **out) {
  (void)out;
  static const char *const bad[] = {"",         "7580",  "host",   "host:", ":7580", "h:70000", "h:-1",       "h:1 ",
                                    "::1:7580", "[::1]", "[::1:2", "unix:", "h:x",   "unix://", "unix:a%20b", "[]:1"};
  for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) expect_refusal(bad[i], QKV_INVALID_ARGUMENT, "listen is");
  char path[200] = "unix:";
  memset(path + 5, 'a', 120);
  expect_refusal(path, QKV_INVALID_ARGUMENT, "a path of 120 bytes; at most 107 are allowed");
}

static void addresses_in_use_are_refused(void **out) {
  test_state *state = *out;
  const char *tcp = qkv_rpc_server_address(state->server, 1);
  assert_string_equal(qkv_rpc_server_address(state->server, 0), state->address);
  assert_string_not_equal(tcp, "127.0.0.1:0");
  expect_refusal(tcp, QKV_UNAVAILABLE, "in use; is another qkvd running?");
  expect_refusal(state->address, QKV_UNAVAILABLE, "another qkvd listens on this socket");
  expect_refusal("unix:missing-directory/s", QKV_UNAVAILABLE, "No such file or directory");
  expect_refusal("203.0.113.1:7580", QKV_UNAVAILABLE, "cannot listen on 203.0.113.1:7580");
  fixture_result result = fixture_call(state->client, "/t/Refuse", "x", 1, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_DATA_LOSS);  // still there
}

// One address that cannot be bound: none is.
static void binds_all_or_none(void **out) {
  test_state *state = *out;
  char other[160];
  snprintf(other, sizeof(other), "unix:%s/other", state->directory);
  const char *both[] = {other, qkv_rpc_server_address(state->server, 1)};
  qkv_rpc_server *server = NULL;
  qkv_error error = {0};
  assert_int_equal(serve(both, 2, NULL, &server, &error), QKV_UNAVAILABLE);
  assert_int_equal(access(other + strlen("unix:"), F_OK), -1);
}

static void socket_files(void **out) {
  test_state *state = *out;
  struct stat info;
  assert_int_equal(stat(state->address + strlen("unix:"), &info), 0);
  assert_true(S_ISSOCK(info.st_mode));
  assert_int_equal(info.st_mode & 0777, 0660);
  char path[160], address[170];
  snprintf(path, sizeof(path), "%s/file", state->directory);
  FILE *file = fopen(path, "we");
  assert_non_null(file);
  fclose(file);
  snprintf(address, sizeof(address), "unix:%s", path);
  expect_refusal(address, QKV_UNAVAILABLE, "there is a file that is no socket");
  assert_int_equal(access(path, F_OK), 0);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
  const struct CMUnitTest tests[] = {
      TEST(replies_with_references),
      TEST(reads_a_stream),
      TEST(stream_without_messages_ends),
      TEST(unary_without_message_is_refused),
      TEST(ping_pong),
      TEST(answers_from_another_thread),
      TEST(status_text_arrives),
      TEST(deadline_reaches_the_worker),
      TEST(cancellation_reaches_a_held_call),
      TEST(client_that_dies_in_a_stream_is_forgotten),
      TEST(descriptor_stays_the_calls_own),
      TEST(client_that_never_reads_holds_little),
      TEST(survives_calls_that_end_at_any_moment),
      TEST(too_many_calls_are_refused),
      TEST(unknown_method_is_named),
      TEST(compressed_message_is_refused),
      TEST(draining_refuses_and_waits),
      cmocka_unit_test(malformed_addresses_are_refused),
      TEST(addresses_in_use_are_refused),
      TEST(binds_all_or_none),
      TEST(socket_files),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
