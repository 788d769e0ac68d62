// libqkv against a server that answers what it is told to: malformed, late, or not at all.
#include <assert.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "qkv/v1/objects.pb-c.h"
#include "server/rpc/rpc.h"
#include "tests/server/fixture.h"

// ---- the server ----

enum answer { ANSWER_BYTES, ANSWER_STATUS, ANSWER_NOTHING };

// What every call is answered. Set between calls only.
static struct {
  enum answer kind;
  uint8_t bytes[4096];
  size_t length;
} script;

// The kind is read once: a client may have its answer, and the next call's script, before we return.
static void answer(qkv_rpc_call *call, void (*send)(qkv_rpc_call *call, const void *data, size_t length)) {
  switch (script.kind) {
    case ANSWER_BYTES:
      send(call, script.bytes, script.length);
      break;
    case ANSWER_STATUS:
      qkv_rpc_finish(call, QKV_DATA_LOSS, "it is gone");
      break;
    case ANSWER_NOTHING:
      break;
  }
}

static void answer_unary(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  answer(call, qkv_rpc_reply_bytes);
}

static void answer_stream(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  answer(call, qkv_rpc_send_bytes);
}

static void on_end(qkv_rpc_call *call) {
  if (script.kind != ANSWER_NOTHING) qkv_rpc_finish(call, QKV_OK, "");
}

// A call that nobody answers ends with its client.
static void on_cancelled(qkv_rpc_call *call) {
  if (script.kind == ANSWER_NOTHING) qkv_rpc_finish(call, QKV_CANCELLED, "");
}

static void on_fetch_sent(qkv_rpc_call *call) {
  qkv_rpc_finish(call, QKV_OK, "");
}

static void answer_health(qkv_rpc_call *call, qkv_bytes message) {
  (void)message;
  qkv_rpc_reply_bytes(call, "\x08\x01", 2);
}

static const qkv_rpc_method methods[] = {
    {.path = "/grpc.health.v1.Health/Check", .message = answer_health},
    {.path = "/qkv.v1.KvCache/Attend", .message = answer_unary, .cancelled = on_cancelled},
    {.path = "/qkv.v1.KvCache/GetSession", .message = answer_unary},
    {.path = "/qkv.v1.KvCache/Append", .message = answer_unary},
    {.path = "/qkv.v1.KvCache/Fetch", .message = answer_stream, .sent = on_fetch_sent, .cancelled = on_cancelled},
    {.path = "/qkv.v1.Objects/GetObjects", .message = answer_stream, .sent = on_fetch_sent},
    {.path = "/qkv.v1.KvCache/Decode",
     .message = answer_stream,
     .sent = qkv_rpc_next,
     .end = on_end,
     .cancelled = on_cancelled},
    {.path = NULL},
};

static char directory[128], address[160];
static qkv_rpc_server *server;
static qkv_client *client;

static void start_server(void) {
  const qkv_rpc_method *const tables[] = {methods, NULL};
  const char *listen[] = {address};
  qkv_rpc_config config = {
      .listen = listen,
      .listen_count = 1,
      .threads = 1,
      .message_bytes_max = 1 << 20,
      .calls_max = 16,
      .control_calls_max = 16,
      .connection_calls_max = 16,
      .connections_max = 64,
      .methods = tables,
  };
  qkv_error error = {0};
  if (qkv_rpc_server_create(&config, &server, &error) != QKV_OK) fail_msg("%s", error.text);
}

static void stop_server(void) {
  qkv_rpc_server_drain(server, 0);
  qkv_rpc_server_destroy(&server);
}

static void connect_client(int64_t timeout_ms) {
  qkv_call_error error = {0};
  qkv_client_options options = {.timeout_ms = timeout_ms, .connect_timeout_ms = 20000};
  if (qkv_client_connect(address, &options, &client, &error) != 0) fail_msg("%s", error.text);
}

static int setup(void **state) {
  (void)state;
  fixture_make_directory(directory, sizeof directory);
  snprintf(address, sizeof address, "unix:%s/socket", directory);
  start_server();
  connect_client(20000);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  stop_server();
  fixture_remove_directory(directory);
  return 0;
}

static void will_answer(const void *bytes, size_t length) {
  assert_true(length <= sizeof script.bytes);
  memcpy(script.bytes, bytes, length);
  script.length = length;
  script.kind = ANSWER_BYTES;
}

// ---- answers to Attend ----

typedef struct answer_shape {
  size_t results;
  int dtype;
  int64_t queries, heads, dim;  // of out
  int64_t lse_queries;
  uint64_t id;
} answer_shape;

static const answer_shape right_shape = {1, 1, 2, 3, 4, 2, 0};

static float zeros[256];

static void make_tensor(Qkv__V1__Tensor *tensor, int dtype, int64_t *dims, size_t rank) {
  qkv__v1__tensor__init(tensor);
  tensor->dtype = (Qkv__V1__DType)dtype;
  tensor->dims = dims;
  tensor->n_dims = rank;
  size_t count = 1;
  for (size_t i = 0; i < rank; i++) count *= (size_t)dims[i];
  tensor->data = (ProtobufCBinaryData){.len = count * (dtype == 1 ? 4 : 2), .data = (uint8_t *)zeros};
}

static void will_attend(answer_shape shape) {
  Qkv__V1__AttendResponse response = QKV__V1__ATTEND_RESPONSE__INIT;
  Qkv__V1__AttendResult result = QKV__V1__ATTEND_RESULT__INIT;
  Qkv__V1__AttendResult *results[4] = {&result, &result, &result, &result};
  Qkv__V1__Tensor out, lse;
  int64_t out_dims[3] = {shape.queries, shape.heads, shape.dim}, lse_dims[2] = {shape.lse_queries, shape.heads};
  make_tensor(&out, shape.dtype, out_dims, 3);
  make_tensor(&lse, 1, lse_dims, 2);
  result.out = &out;
  result.lse = &lse;
  result.length = 77;
  response.results = results;
  response.n_results = shape.results;
  response.id = shape.id;
  script.length = qkv__v1__attend_response__pack(&response, script.bytes);
  script.kind = ANSWER_BYTES;
}

static float query[2 * 3 * 8];
static const qkv_client_item item = {.session = "s", .q = {QKV_CLIENT_FP32, 3, {2, 3, 8}, {0}, query, sizeof query}};

static void expect_internal(const char *text) {
  qkv_client_result result;
  qkv_call_error error = {0};
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), QKV_INTERNAL);
  static const char prefix[] = "the answer to /qkv.v1.KvCache/Attend is malformed: ";
  if (strncmp(error.text, prefix, sizeof prefix - 1) != 0 || strcmp(error.text + sizeof prefix - 1, text) != 0) {
    fail_msg("\"%s\" instead of \"%s\"", error.text, text);
  }
  assert_int_equal(result.code, QKV_INTERNAL);
  assert_null(result.out);
}

static void test_right_answer(void **state) {
  (void)state;
  will_attend(right_shape);
  qkv_client_result result;
  qkv_call_error error = {.code = 5, .text = "old"};
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), 0);
  assert_int_equal(error.code, 0);
  assert_string_equal(error.text, "");
  assert_int_equal(result.length, 77);
  assert_int_equal(result.out_count, 24);
  assert_int_equal(result.lse_count, 6);
  qkv_client_results_free(&result, 1);
  assert_null(result.out);
}

static void test_malformed_answers(void **state) {
  (void)state;
  answer_shape shape = right_shape;
  shape.results = 2;
  will_attend(shape);
  expect_internal("2 results to 1 items");
  shape.results = 0;
  will_attend(shape);
  expect_internal("0 results to 1 items");
  shape = right_shape;
  shape.queries = shape.lse_queries = 1;
  will_attend(shape);
  expect_internal("out.dims[0] is 1 and lse.dims[0] is 1, q has 2");
  shape = right_shape;
  shape.lse_queries = 3;
  will_attend(shape);
  expect_internal("out.dims[0] is 2 and lse.dims[0] is 3, q has 2");
  shape = right_shape;
  shape.heads = 2;
  will_attend(shape);
  expect_internal("out.dims[1] is 2 and lse.dims[1] is 2, q has 3");
  shape = right_shape;
  shape.dtype = 2;
  will_attend(shape);
  expect_internal("out and lse are fp16 and fp32, expected is fp32");
  shape = right_shape;
  shape.id = 9;
  will_attend(shape);
  expect_internal("it answers request 9, asked was 0");
  will_answer("\x0a\x7f", 2);
  expect_internal("truncated protobuf");
  will_answer("\x0a\x00", 2);
  expect_internal("out has 0 dims, expected are 3");
}

// Every prefix of a right answer, and every byte of it changed: refused or read, never a crash.
static void test_damaged_answers(void **state) {
  (void)state;
  will_attend(right_shape);
  size_t length = script.length;
  uint8_t right[sizeof script.bytes];
  memcpy(right, script.bytes, length);
  for (size_t i = 0; i < 2 * length; i++) {
    will_answer(right, i < length ? i : length);
    if (i >= length) script.bytes[i - length] ^= (uint8_t)(1 + i % 255);
    qkv_client_result result;
    qkv_call_error error = {0};
    qkv_code code = qkv_client_attend(client, &item, 1, &result, &error);
    assert_true(code == 0 || code == QKV_INTERNAL);
    assert_int_equal(code == 0, error.text[0] == '\0');
    qkv_client_results_free(&result, 1);
  }
}

static void test_malformed_other_answers(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_session_info info;
  will_answer("\xff\xff\xff", 3);
  assert_int_equal(qkv_client_get_session(client, "s", &info, &error), QKV_INTERNAL);
  assert_string_equal(
      error.text, "the answer to /qkv.v1.KvCache/GetSession is malformed: it is no qkv.v1.SessionInfo of 3 bytes");
  uint64_t appended = 5;
  assert_int_equal(qkv_client_append(client, &item, 1, &appended, &error), QKV_INTERNAL);
  assert_int_equal(appended, 0);
  void *response = NULL;
  size_t bytes = 0;
  assert_int_equal(qkv_client_call(client, "/qkv.v1.KvCache/Attend", "", 0, &response, &bytes, &error), 0);
  assert_int_equal(bytes, 3);
  assert_memory_equal(response, "\xff\xff\xff", 3);
  qkv_free(response);
  assert_int_equal(qkv_client_call(client, "/qkv.v1.KvCache/Nothing", "", 0, &response, &bytes, &error),
                   QKV_UNIMPLEMENTED);
  assert_null(response);
}

static void test_status(void **state) {
  (void)state;
  script.kind = ANSWER_STATUS;
  qkv_client_result result;
  qkv_call_error error = {0};
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "it is gone");
  assert_int_equal(result.code, QKV_DATA_LOSS);
  assert_string_equal(result.text, "it is gone");
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, NULL), QKV_DATA_LOSS);
}

// ---- fetch ----

static bool count_rows(void *context, const qkv_client_rows *rows) {
  assert_int_equal(rows->k.rank == 3 || rows->v.rank == 3, true);
  ++*(int *)context;
  return true;
}

static bool refuse_rows(void *context, const qkv_client_rows *rows) {
  (void)rows;
  ++*(int *)context;
  return false;
}

static void will_fetch(void) {
  Qkv__V1__FetchResponse response = QKV__V1__FETCH_RESPONSE__INIT;
  Qkv__V1__Tensor k;
  int64_t dims[3] = {2, 1, 8};
  make_tensor(&k, 2, dims, 3);
  response.k = &k;
  script.length = qkv__v1__fetch_response__pack(&response, script.bytes);
  script.kind = ANSWER_BYTES;
}

// Into memory, what is not what was asked for is refused.
static void fetch_into(void) {
  qkv_client_layer_memory memory = {0};
  const uint32_t layers[] = {0, 5};
  qkv_client_fetch request = {.session = "s", .layers = layers, .layer_count = 1, .part = 1};
  qkv_call_error error = {0};
  assert_int_equal(qkv_client_fetch_into(client, &request, &memory, &error), 0);
  assert_int_equal(memory.tokens, 2);
  assert_int_equal(memory.k.dim, 8);
  request.part = 0;
  assert_int_equal(qkv_client_fetch_into(client, &request, &memory, &error), QKV_INTERNAL);
  assert_string_equal(error.text, "layer 0: the daemon sent parts 1, expected 0");
  assert_int_equal(memory.tokens, 0);
  request.part = 1;
  request.layers = layers + 1;
  assert_int_equal(qkv_client_fetch_into(client, &request, &memory, &error), QKV_INTERNAL);
  assert_string_equal(error.text, "layer 5: the daemon sent layer 0, expected 5");
}

static void test_fetch(void **state) {
  (void)state;
  will_fetch();
  qkv_client_fetch request = {.session = "s", .part = 1};
  qkv_call_error error = {0};
  int calls = 0;
  assert_int_equal(qkv_client_fetch_rows(client, &request, count_rows, &calls, &error), 0);
  assert_int_equal(calls, 1);
  assert_int_equal(qkv_client_fetch_rows(client, &request, refuse_rows, &calls, &error), QKV_CANCELLED);
  assert_int_equal(calls, 2);
  fetch_into();
  script.bytes[script.length - 1] = 0;
  script.length--;
  assert_int_equal(qkv_client_fetch_rows(client, &request, count_rows, &calls, &error), QKV_INTERNAL);
  assert_int_equal(calls, 2);
  assert_string_equal(error.text, "the answer to /qkv.v1.KvCache/Fetch is malformed: truncated protobuf");
  script.kind = ANSWER_STATUS;
  assert_int_equal(qkv_client_fetch_rows(client, &request, count_rows, &calls, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "it is gone");
  request.session = NULL;
  assert_int_equal(qkv_client_fetch_rows(client, &request, count_rows, &calls, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "session is NULL");
  assert_int_equal(calls, 2);
}

// ---- objects ----

// Bytes that do not have their checksum, and more bytes than were announced.
static void test_objects(void **state) {
  (void)state;
  char held[8] = "";
  qkv_client_object object = {.name = "o", .data = held, .capacity = sizeof held};
  const qkv_client_objects objects = {&object, 1};
  qkv_call_error error = {0};
  Qkv__V1__GetObjectsResponse response = QKV__V1__GET_OBJECTS_RESPONSE__INIT;
  Qkv__V1__GetPiece piece = QKV__V1__GET_PIECE__INIT, *pieces[] = {&piece};
  Qkv__V1__ObjectInfo info = QKV__V1__OBJECT_INFO__INIT;
  info.object = (char *)"o";
  info.bytes = 4;
  info.checksum = 1;
  piece.info = &info;
  piece.data = (ProtobufCBinaryData){.len = 4, .data = (uint8_t *)"four"};
  response.pieces = pieces;
  response.n_pieces = 1;
  script.length = qkv__v1__get_objects_response__pack(&response, script.bytes);
  script.kind = ANSWER_BYTES;
  assert_int_equal(qkv_client_get_objects(client, &objects, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "object o does not have its checksum");
  info.bytes = 3;
  script.length = qkv__v1__get_objects_response__pack(&response, script.bytes);
  assert_int_equal(qkv_client_get_objects(client, &objects, &error), QKV_INTERNAL);
  assert_string_equal(error.text,
                      "the answer to /qkv.v1.Objects/GetObjects is malformed: object o has more than its 3 bytes");
}

// ---- decode ----

static void test_decode(void **state) {
  (void)state;
  qkv_decode *stream = NULL;
  qkv_client_result result;
  qkv_call_error error = {0};
  assert_int_equal(qkv_decode_open(client, &stream, &error), 0);
  answer_shape shape = right_shape;
  for (shape.id = 1; shape.id <= 3; shape.id++) {
    will_attend(shape);
    assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), 0);
    assert_int_equal(result.out_count, 24);
    qkv_client_results_free(&result, 1);
  }
  // A malformed answer spoils its step, not the stream.
  assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), QKV_INTERNAL);
  assert_string_equal(error.text,
                      "the answer to /qkv.v1.KvCache/Decode is malformed: it answers request 3, asked was 4");
  shape.id = 5;
  will_attend(shape);
  assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), 0);
  qkv_client_results_free(&result, 1);
  assert_int_equal(qkv_decode_close(&stream, &error), 0);
  assert_null(stream);
}

static void test_decode_ended_by_the_server(void **state) {
  (void)state;
  qkv_decode *stream = NULL;
  qkv_client_result result;
  qkv_call_error error = {0};
  assert_int_equal(qkv_decode_open(client, &stream, &error), 0);
  script.kind = ANSWER_STATUS;
  for (int i = 0; i < 2; i++) {
    assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), QKV_DATA_LOSS);
    assert_string_equal(error.text, "it is gone");
    assert_int_equal(result.code, QKV_DATA_LOSS);
  }
  assert_int_equal(qkv_decode_close(&stream, &error), QKV_DATA_LOSS);
  // A stream that was never used is closed without a message.
  assert_int_equal(qkv_decode_open(client, &stream, &error), 0);
  assert_int_equal(qkv_decode_close(&stream, &error), 0);
}

// ---- late, and not at all ----

static void test_no_answer(void **state) {
  (void)state;
  qkv_client_close(&client);
  connect_client(200);
  script.kind = ANSWER_NOTHING;
  qkv_client_result result;
  qkv_call_error error = {0};
  int64_t begin = fixture_now_ms();
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), QKV_DEADLINE_EXCEEDED);
  assert_string_equal(error.text, "no answer to /qkv.v1.KvCache/Attend within 200 ms");
  qkv_decode *stream = NULL;
  assert_int_equal(qkv_decode_open(client, &stream, &error), 0);
  assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), QKV_DEADLINE_EXCEEDED);
  assert_string_equal(error.text, "no answer to /qkv.v1.KvCache/Decode within 200 ms");
  assert_int_equal(qkv_decode_close(&stream, &error), QKV_DEADLINE_EXCEEDED);
  assert_true(fixture_now_ms() - begin >= 400);
  // The client can be used as before.
  fixture_sleep_ms(50);
  will_attend(right_shape);
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), 0);
  qkv_client_results_free(&result, 1);
  qkv_client_close(&client);
  connect_client(20000);
}

static bool linger(void *context, const qkv_client_rows *rows) {
  fixture_sleep_ms(300);
  return count_rows(context, rows);
}

// The timeout is that of each response, not of what the caller does with it.
static void test_slow_fetch(void **state) {
  (void)state;
  qkv_client_close(&client);
  connect_client(200);
  will_fetch();
  qkv_client_fetch request = {.session = "s", .part = 1};
  qkv_call_error error = {0};
  int calls = 0;
  assert_int_equal(qkv_client_fetch_rows(client, &request, linger, &calls, &error), 0);
  assert_int_equal(calls, 1);
  script.kind = ANSWER_NOTHING;
  assert_int_equal(qkv_client_fetch_rows(client, &request, linger, &calls, &error), QKV_DEADLINE_EXCEEDED);
  assert_string_equal(error.text, "no answer to /qkv.v1.KvCache/Fetch within 200 ms");
  assert_int_equal(calls, 1);
  qkv_client_close(&client);
  connect_client(20000);
}

static void test_server_comes_back(void **state) {
  (void)state;
  qkv_client_result result;
  qkv_call_error error = {0};
  qkv_decode *stream = NULL;
  answer_shape shape = right_shape;
  shape.id = 1;
  will_attend(shape);
  assert_int_equal(qkv_decode_open(client, &stream, &error), 0);
  assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), 0);
  qkv_client_results_free(&result, 1);
  stop_server();
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), QKV_UNAVAILABLE);
  char text[256];
  snprintf(text, sizeof text, "nobody answers at %s: No such file or directory; is qkvd running there?", address);
  assert_string_equal(error.text, text);
  assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), QKV_UNAVAILABLE);
  start_server();
  will_attend(right_shape);
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), 0);
  qkv_client_results_free(&result, 1);
  // The stream went with its connection.
  assert_int_equal(qkv_decode_step(stream, &item, 1, &result, &error), QKV_UNAVAILABLE);
  assert_int_equal(qkv_decode_close(&stream, &error), QKV_UNAVAILABLE);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_right_answer),
      cmocka_unit_test(test_malformed_answers),
      cmocka_unit_test(test_damaged_answers),
      cmocka_unit_test(test_malformed_other_answers),
      cmocka_unit_test(test_status),
      cmocka_unit_test(test_fetch),
      cmocka_unit_test(test_objects),
      cmocka_unit_test(test_decode),
      cmocka_unit_test(test_decode_ended_by_the_server),
      cmocka_unit_test(test_no_answer),
      cmocka_unit_test(test_slow_fetch),
      cmocka_unit_test(test_server_comes_back),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
