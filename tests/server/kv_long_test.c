// Jobs that take seconds (by the scalar kernels, so that they do): they end with their client, and no other call
// waits for them.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "qkv/v1/admin.pb-c.h"
#include "tests/server/kv.h"

#include <cmocka.h>

static fixture_daemon *daemon_process;
static fixture_client *client;

// Size of the message that takes long: 60 MiB of rows, near limit-message, where the daemon runs at full speed.
static uint64_t long_tokens(void) {
  return fixture_is_sanitized() ? 49152 : 196608;
}

static void start(const char *const *arguments) {
  kv_start(arguments, &daemon_process, &client);
}

static void stop(void) {
  kv_stop(&daemon_process, &client);
}

// An AppendRequest whose rows are repeated by strides of 0: `count` items of `tokens` tokens each, one after the
// other, to a layer. It is quick to build and to send, and takes the daemon long.
static size_t pack_long_append(const char *session, uint32_t layer, size_t count, int64_t tokens, uint8_t **bytes) {
  static float row[KV_HEADS * KV_VALUE_DIM];
  int64_t k_dims[] = {tokens, KV_HEADS, KV_KEY_DIM}, v_dims[] = {tokens, KV_HEADS, KV_VALUE_DIM};
  int64_t k_strides[] = {0, KV_KEY_DIM * 4, 4}, v_strides[] = {0, KV_VALUE_DIM * 4, 4};
  for (size_t i = 0; i < KV_HEADS * KV_VALUE_DIM; i++) row[i] = (float)(i % 7) - 3;
  Qkv__V1__Tensor k = QKV__V1__TENSOR__INIT, v = QKV__V1__TENSOR__INIT;
  k.dtype = v.dtype = QKV__V1__DTYPE__DTYPE_FP32;
  k.n_dims = v.n_dims = k.n_strides = v.n_strides = 3;
  k.dims = k_dims;
  v.dims = v_dims;
  k.strides = k_strides;
  v.strides = v_strides;
  k.data = (ProtobufCBinaryData){KV_HEADS * KV_KEY_DIM * 4, (uint8_t *)row};
  v.data = (ProtobufCBinaryData){KV_HEADS * KV_VALUE_DIM * 4, (uint8_t *)row};
  Qkv__V1__Item *items = calloc(count, sizeof *items);
  Qkv__V1__Item **pointers = calloc(count, sizeof *pointers);
  assert_true(items != NULL && pointers != NULL);
  for (size_t i = 0; i < count; i++) {
    pointers[i] = &items[i];
    qkv__v1__item__init(&items[i]);
    items[i].session = (char *)session;
    items[i].layer = layer;
    items[i].position = i * (uint64_t)tokens;
    items[i].k = &k;
    items[i].v = &v;
  }
  Qkv__V1__AppendRequest request = QKV__V1__APPEND_REQUEST__INIT;
  request.n_items = count;
  request.items = pointers;
  *bytes = malloc(qkv__v1__append_request__get_packed_size(&request));
  assert_non_null(*bytes);
  size_t length = qkv__v1__append_request__pack(&request, *bytes);
  free(pointers);
  free(items);
  return length;
}

// Sends long_tokens() in so many items.
static fixture_stream *open_long_append(const char *session, size_t items, int64_t timeout_ms) {
  uint8_t *bytes = NULL;
  size_t length = pack_long_append(session, 0, items, (int64_t)(long_tokens() / items), &bytes);
  fixture_stream *stream = fixture_open(client, KV_METHOD("Append"), timeout_ms);
  assert_true(fixture_send(stream, bytes, length));
  fixture_half_close(stream);
  free(bytes);
  return stream;
}

static void wait_for_rows(const char *session) {
  while (kv_length(client, session, 0) == 0) fixture_sleep_ms(1);
}

// The job sees its deadline between two items, and a drain gets its thread.
static void a_long_append_ends_with_its_client(void **state) {
  (void)state;
  start((const char *[]){"--drain-grace", "50ms", "--threads", "1", "--cpu-mask", "none", NULL});
  kv_open(client, "a");
  kv_open(client, "b");
  fixture_stream *stream = NULL;
  uint64_t length = 0;
  for (int64_t ms = 50; length == 0; ms += 50) {  // on a busy machine the first ones may not get there in time
    stream = open_long_append("a", 192, ms);
    assert_int_equal(fixture_finish(&stream).status, QKV_DEADLINE_EXCEEDED);
    kv_wait_idle(client);
    length = kv_length(client, "a", 0);
  }
  assert_true(length < long_tokens());
  fixture_sleep_ms(50);
  assert_int_equal(kv_length(client, "a", 0), length);

  stream = open_long_append("b", 192, 0);
  wait_for_rows("b");
  assert_int_equal(fixture_stop(&daemon_process, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  assert_int_not_equal(fixture_finish(&stream).status, QKV_OK);
  fixture_disconnect(&client);
}

// An attend of minutes (32 times 1024 queries over 8192 tokens) stops at its deadline, and a drain gets its thread:
// it exits with 0 in time.
static void a_long_attend_ends_with_its_client(void **state) {
  (void)state;
  enum { ITEMS = 32, TOKENS = 8192, QUERIES = 1024 };
  start((const char *[]){"--drain-grace", "200ms", "--threads", "1", "--cpu-mask", "none", NULL});
  kv_open(client, "a");
  const kv_item rows = {.session = "a", .tokens = TOKENS, .seed = 3};
  assert_int_equal(kv_append(client, &rows, 1, NULL), QKV_OK);
  kv_item items[ITEMS];
  for (size_t i = 0; i < ITEMS; i++) {
    items[i] = (kv_item){.session = "a", .position = TOKENS, .queries = QUERIES, .seed = 4};
  }
  uint8_t *bytes = NULL;
  size_t length = kv_pack(items, ITEMS, 0, &bytes);
  fixture_stream *stream = fixture_open(client, KV_METHOD("Attend"), 500);
  assert_true(fixture_send(stream, bytes, length));
  fixture_half_close(stream);
  int64_t begin = fixture_now_ms();
  assert_int_equal(fixture_finish(&stream).status, QKV_DEADLINE_EXCEEDED);
  kv_wait_idle(client);
  assert_true(fixture_now_ms() - begin < 60000);

  stream = fixture_open(client, KV_METHOD("Attend"), FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, bytes, length));
  fixture_half_close(stream);
  free(bytes);
  fixture_sleep_ms(100);
  assert_int_equal(fixture_stop(&daemon_process, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  assert_int_not_equal(fixture_finish(&stream).status, QKV_OK);
  fixture_disconnect(&client);
}

static void expect_answer(const char *method, const ProtobufCMessage *request) {
  fixture_result result = kv_call(client, method, request);
  assert_int_equal(result.status, QKV_OK);
  fixture_free(&result);
}

// While one layer is appended to, all other calls are answered, even about this session: no call waits on the
// completion-queue thread.
static void a_long_append_holds_up_nobody(void **state) {
  (void)state;
  start((const char *[]){"--threads", "8", "--cpu-mask", "none", NULL});
  kv_open(client, "a");
  kv_open(client, "other");
  fixture_stream *stream = open_long_append("a", 2, 0);
  wait_for_rows("a");
  fixture_client *second = fixture_connect(daemon_process->unix_address);
  Qkv__V1__GetStatusRequest status = QKV__V1__GET_STATUS_REQUEST__INIT;
  Qkv__V1__GetSessionRequest get = QKV__V1__GET_SESSION_REQUEST__INIT;
  Qkv__V1__ListSessionsRequest list = QKV__V1__LIST_SESSIONS_REQUEST__INIT;
  get.session = (char *)"a";
  for (size_t i = 0; i < 3; i++) {
    // A step on the busy layer, whose answer waits; its request must not hold up the calls that follow.
    const kv_item step = {.session = "a", .queries = 1, .seed = 2};
    uint8_t *bytes = NULL;
    size_t length = kv_pack(&step, 1, 0, &bytes);
    fixture_stream *decode = fixture_open(second, KV_METHOD("Decode"), FIXTURE_PATIENCE_MS);
    assert_true(fixture_send(decode, bytes, length));
    free(bytes);
    expect_answer("/qkv.v1.Admin/GetStatus", &status.base);
    expect_answer(KV_METHOD("GetSession"), &get.base);
    expect_answer(KV_METHOD("ListSessions"), &list.base);
    fixture_cancel(decode);
    (void)fixture_finish(&decode);
  }
  assert_int_equal(kv_length(client, "a", 0), long_tokens() / 2);  // the second item was running all the time
  fixture_cancel(stream);
  (void)fixture_finish(&stream);
  fixture_disconnect(&second);
  kv_wait_idle(client);
  stop();
}

// Megabytes of unknown fields are walked by a job.
static void a_message_of_unknown_fields_holds_up_nobody(void **state) {
  (void)state;
  start(NULL);
  enum { FIELD_BYTES = 24, FIELDS = 1400000 };  // more bytes a field than the 16 that a message must have
  const size_t length = (size_t)FIELD_BYTES * FIELDS;
  uint8_t *bytes = calloc(FIELDS, FIELD_BYTES);
  assert_non_null(bytes);
  for (size_t i = 0; i < length; i += FIELD_BYTES) memcpy(bytes + i, "\x7a\x16", 2);  // 15: 22 bytes
  fixture_stream *stream = fixture_open(client, KV_METHOD("Append"), FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, bytes, length));
  fixture_half_close(stream);
  while (kv_metric(client, "qkvd_calls_bad_request_total") == 0) fixture_sleep_ms(1);
  fixture_result result = fixture_finish(&stream);
  assert_string_equal(result.text, "message 0: items is empty, at least 1");
  free(bytes);
  stop();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_long_append_ends_with_its_client),
      cmocka_unit_test(a_long_attend_ends_with_its_client),
      cmocka_unit_test(a_long_append_holds_up_nobody),
      cmocka_unit_test(a_message_of_unknown_fields_holds_up_nobody),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
