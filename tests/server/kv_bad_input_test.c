// Bad input to KvCache. Each case: the documented status, a message with field, value and limit, nothing changed
// (the witness session and the bytes held are the same afterwards), and the daemon serves on.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/server/kv.h"

#include <cmocka.h>

static fixture_daemon *daemon_process;
static fixture_client *client;
static kv_reference reference;  // of the witness
static double bytes_held, bytes_reserved;

// 70 tokens in layer 0: a sealed page is not among them, 150 in layer 1: one is.
static const kv_item witness_rows[] = {{.session = "w", .tokens = 70, .seed = 1},
                                       {.session = "w", .layer = 1, .tokens = 150, .seed = 1}};

static int start(void **state) {
  (void)state;
  kv_start((const char *[]){"--limit-items", "8", "--limit-message", "262144", "--limit-models", "2",
                            "--limit-sessions", "2", NULL},
           &daemon_process, &client);
  kv_open(client, "w");
  reference = kv_reference_open("w");
  assert_int_equal(kv_append(client, witness_rows, 2, NULL), QKV_OK);
  kv_reference_append(&reference, &witness_rows[0]);
  kv_reference_append(&reference, &witness_rows[1]);
  // The first queries are kept, to watch pages with.
  for (uint32_t layer = 0; layer < 2; layer++) {
    const kv_item query = {.session = "w", .layer = layer, .position = 200, .queries = 2, .seed = 2};
    Qkv__V1__AttendResponse *response = NULL;
    assert_int_equal(kv_attend(client, &query, 1, &response, NULL), QKV_OK);
    qkv__v1__attend_response__free_unpacked(response, NULL);
  }
  bytes_held = kv_metric(client, "qkvd_kv_bytes");
  bytes_reserved = kv_metric(client, "qkvd_kv_reserved_bytes");
  return 0;
}

static int stop(void **state) {
  (void)state;
  kv_reference_close(&reference);
  kv_stop(&daemon_process, &client);
  return 0;
}

// After every test.
static int nothing_has_changed(void **state) {
  (void)state;
  const uint64_t lengths[] = {70, 150, 0};
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++)
    assert_int_equal(kv_length(client, "w", layer), lengths[layer]);
  assert_true(kv_metric(client, "qkvd_kv_bytes") == bytes_held);
  assert_true(kv_metric(client, "qkvd_kv_reserved_bytes") == bytes_reserved);
  assert_true(kv_metric(client, "qkvd_models") == 1 && kv_metric(client, "qkvd_sessions") == 1);
  for (uint32_t layer = 0; layer < 2; layer++) {
    const kv_item query = {.session = "w", .layer = layer, .position = 200, .queries = 2, .seed = 2};
    Qkv__V1__AttendResponse *response = NULL;
    assert_int_equal(kv_attend(client, &query, 1, &response, NULL), QKV_OK);
    kv_same_attend(&reference, &query, response->results[0]);
    qkv__v1__attend_response__free_unpacked(response, NULL);
  }
  return 0;
}

// ---- Expectations ----

static void expect_refused(const char *method, const ProtobufCMessage *request, qkv_status status, const char *text) {
  fixture_result result = kv_call(client, method, request);
  assert_string_equal(result.text, text);
  assert_int_equal(result.status, status);
  fixture_free(&result);
}

static void expect_append_refused(const kv_item *items, size_t count, qkv_status status, const char *text) {
  char got[FIXTURE_TEXT_MAX];
  int code = kv_append(client, items, count, got);
  assert_string_equal(got, text);
  assert_int_equal(code, status);
}

static void expect_attend_refused(const kv_item *item, qkv_status status, const char *text) {
  char got[FIXTURE_TEXT_MAX];
  Qkv__V1__AttendResponse *response = NULL;
  int code = kv_attend(client, item, 1, &response, got);
  assert_string_equal(got, text);
  assert_int_equal(code, status);
}

// One item's rows as a message of this test's own making. Sent by Append and, with the text that goes with it, by
// Attend.
typedef struct raw_item {
  Qkv__V1__Item item;
  Qkv__V1__Tensor k, v, q;
  int64_t k_dims[4], v_dims[4], q_dims[4], k_strides[4];
  float k_data[2 * KV_HEADS * KV_KEY_DIM], v_data[2 * KV_HEADS * KV_VALUE_DIM], q_data[2 * KV_Q_HEADS * KV_KEY_DIM];
} raw_item;

static void set_tensor(Qkv__V1__Tensor *tensor, int64_t *dims, int64_t heads, int64_t dim, float *data) {
  qkv__v1__tensor__init(tensor);
  dims[0] = 2;
  dims[1] = heads;
  dims[2] = dim;
  tensor->dtype = QKV__V1__DTYPE__DTYPE_FP32;
  tensor->n_dims = 3;
  tensor->dims = dims;
  tensor->data.data = (uint8_t *)data;
  tensor->data.len = (size_t)(2 * heads * dim) * sizeof(float);
}

// Two rows that would append to layer 2, and two queries.
static void build(raw_item *raw) {
  qkv__v1__item__init(&raw->item);
  raw->item.session = (char *)"w";
  raw->item.layer = 2;
  kv_rows(3, 2, KV_K, 0, 2, raw->k_data);
  kv_rows(3, 2, KV_V, 0, 2, raw->v_data);
  kv_rows(3, 2, KV_Q, 0, 2, raw->q_data);
  set_tensor(&raw->k, raw->k_dims, KV_HEADS, KV_KEY_DIM, raw->k_data);
  set_tensor(&raw->v, raw->v_dims, KV_HEADS, KV_VALUE_DIM, raw->v_data);
  set_tensor(&raw->q, raw->q_dims, KV_Q_HEADS, KV_KEY_DIM, raw->q_data);
  raw->item.k = &raw->k;
  raw->item.v = &raw->v;
  raw->item.q = &raw->q;
}

// `text` is the error's text behind the place.
static void expect_raw_refused(raw_item *raw, qkv_status status, const char *text) {
  Qkv__V1__Item *items[1] = {&raw->item};
  Qkv__V1__AttendRequest attend = QKV__V1__ATTEND_REQUEST__INIT;
  attend.n_items = 1;
  attend.items = items;
  char expected[FIXTURE_TEXT_MAX];
  (void)snprintf(expected, sizeof expected, "items[0]%s", text);
  expect_refused(KV_METHOD("Attend"), &attend.base, status, expected);
  if (raw->item.k == NULL) return;
  raw->item.q = NULL;
  Qkv__V1__AppendRequest append = QKV__V1__APPEND_REQUEST__INIT;
  append.n_items = 1;
  append.items = items;
  (void)snprintf(expected, sizeof expected, "message 0: items[0]%s", text);
  expect_refused(KV_METHOD("Append"), &append.base, status, expected);
}

// ---- Models ----

static Qkv__V1__Model good_model(void) {
  Qkv__V1__Model model = QKV__V1__MODEL__INIT;
  model.name = (char *)"n";
  model.layers = 2;
  model.kv_heads = 2;
  model.q_heads = 4;
  model.key_dim = 16;
  model.value_dim = 16;
  model.dtype = QKV__V1__DTYPE__DTYPE_FP16;
  return model;
}

static void expect_model_refused(Qkv__V1__Model *model, qkv_status status, const char *text) {
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  request.model = model;
  expect_refused(KV_METHOD("RegisterModel"), &request.base, status, text);
}

static void models_out_of_their_limits(void **state) {
  (void)state;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  Qkv__V1__Model model = good_model();
  expect_model_refused(NULL, bad, "model is missing");
  model.name = (char *)"";
  expect_model_refused(&model, bad, "model.name is empty");
  model = good_model();
  model.q_heads = 3;
  expect_model_refused(&model, bad, "model.q_heads is 3, must be a multiple of kv_heads 2");
  model = good_model();
  model.layers = 0;
  expect_model_refused(&model, bad, "model.layers is 0, allowed are 1 to 1024");
  model = good_model();
  model.key_dim = 12;
  expect_model_refused(&model, bad, "model.key_dim is 12, allowed are multiples of 8 from 8 to 1024");
  model = good_model();
  model.dtype = (Qkv__V1__DType)9;
  expect_model_refused(&model, bad, "model.dtype is 9, known are 1 (fp32), 2 (fp16) and 3 (bf16)");
  model = good_model();
  model.dtype = QKV__V1__DTYPE__DTYPE_UNSPECIFIED;
  expect_model_refused(&model, bad, "model.dtype is 0, known are 1 (fp32), 2 (fp16) and 3 (bf16)");
  model = good_model();
  model.scale = -1;
  fixture_result result;
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  request.model = &model;
  result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, bad);
  assert_non_null(strstr(result.text, "model.scale is -1"));
  fixture_free(&result);
  model.scale = __builtin_nan("");
  result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, bad);
  assert_non_null(strstr(result.text, "model.scale is nan"));
  fixture_free(&result);

  Qkv__V1__Rope rope = QKV__V1__ROPE__INIT;
  model = good_model();
  model.rope = &rope;
  rope.theta = 10000;
  rope.scaling = (Qkv__V1__Rope__Scaling)7;
  expect_model_refused(&model, bad, "model.rope.scaling is 7, known are 0 to 4");
  rope.scaling = QKV__V1__ROPE__SCALING__SCALING_NONE;
  rope.pairing = (Qkv__V1__Rope__Pairing)2;
  expect_model_refused(&model, bad, "model.rope.pairing is 2, known are 0 and 1");

  Qkv__V1__CodecPolicy policy = QKV__V1__CODEC_POLICY__INIT;
  model = good_model();
  model.policy = &policy;
  policy.codec = (char *)"zip";
  expect_model_refused(
      &model, bad,
      "model.policy.codec is \"zip\", known are embedded, exact, kivi, turboquant, polarquant, running-u8, "
      "turboquant-ip, pq, int8, commvq, turboquant-outliers, turboquant-ip-outliers, "
      "turboquant-low-rank, kivi-low-rank, turboquant-delta, int8-delta, polarquant-low-rank, int8-low-rank, "
      "running-u8-low-rank, kivi-delta, polarquant-delta, turboquant-outliers-delta and ecsq");
  policy.codec = (char *)"";
  policy.bits_k = 9;
  request.model = &model;
  result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, bad);
  assert_non_null(strstr(result.text, "policy.bits_k is 9, allowed are multiples of 0.125 up to 8"));
  fixture_free(&result);
  policy.bits_k = 2.3;
  result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, bad);
  assert_non_null(strstr(result.text, "policy.bits_k is 2.3, allowed are multiples of 0.125 up to 8"));
  fixture_free(&result);

  Qkv__V1__LayerOverride override = QKV__V1__LAYER_OVERRIDE__INIT;
  Qkv__V1__LayerOverride *overrides[] = {&override};
  model = good_model();
  model.overrides = overrides;
  model.n_overrides = 1;
  override.layer = model.layers;
  char text[FIXTURE_TEXT_MAX];
  (void)snprintf(text, sizeof text, "model.overrides[0].layer is %u, the model has %u layers", model.layers,
                 model.layers);
  expect_model_refused(&model, bad, text);
  model = good_model();
  model.calibration.data = (uint8_t *)"x";
  model.calibration.len = 1;
  request.model = &model;
  result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, QKV_DATA_LOSS);
  assert_non_null(strstr(result.text, "calibration has 1 bytes, its header alone takes "));
  fixture_free(&result);
}

static void models_that_are_not_there_or_taken(void **state) {
  (void)state;
  Qkv__V1__Model model = good_model();
  model.name = (char *)"m";
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  request.model = &model;
  fixture_result result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, QKV_ALREADY_EXISTS);
  assert_non_null(strstr(result.text, "the name m is taken by a model with another "));
  fixture_free(&result);
  Qkv__V1__GetModelRequest get = QKV__V1__GET_MODEL_REQUEST__INIT;
  get.name = (char *)"nothing";
  expect_refused(KV_METHOD("GetModel"), &get.base, QKV_NOT_FOUND, "no model nothing");
  get.name = (char *)"";
  expect_refused(KV_METHOD("GetModel"), &get.base, QKV_INVALID_ARGUMENT, "name is empty");
}

// ---- Sessions ----

static void expect_open_refused(const Qkv__V1__OpenSessionRequest *request, qkv_status status, const char *text) {
  expect_refused(KV_METHOD("OpenSession"), &request->base, status, text);
}

static Qkv__V1__OpenSessionRequest good_open(void) {
  Qkv__V1__OpenSessionRequest request = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  request.session = (char *)"x";
  request.model = (char *)"m";
  return request;
}

static void sessions_that_cannot_be_opened(void **state) {
  (void)state;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  Qkv__V1__OpenSessionRequest request = good_open();
  request.session = (char *)"";
  expect_open_refused(&request, bad, "session is empty");
  request.session = (char *)"a/b c";
  expect_open_refused(&request, bad, "session has byte 0x20 at 3, allowed are letters, digits and ._:/@-");
  request = good_open();
  request.model = (char *)"";
  expect_open_refused(&request, bad, "model is empty");
  request.model = (char *)"nothing";
  expect_open_refused(&request, QKV_NOT_FOUND, "no model nothing");
  request = good_open();
  request.tenant = (char *)"?";
  expect_open_refused(&request, bad, "tenant has byte 0x3f at 0, allowed are letters, digits and ._:/@-");
  request = good_open();
  request.session = (char *)"w";
  fixture_result result = kv_call(client, KV_METHOD("OpenSession"), &request.base);
  assert_int_equal(result.status, QKV_ALREADY_EXISTS);
  assert_non_null(strstr(result.text, "session w"));
  fixture_free(&result);
  request = good_open();
  request.purpose = (Qkv__V1__Purpose)3;
  expect_open_refused(&request, bad, "purpose is 3, known are 1 (attend) and 2 (fetch)");
  request = good_open();
  request.durability = (Qkv__V1__Durability)4;
  expect_open_refused(&request, bad, "durability is 4, known are 0 to 3");
  request.durability = QKV__V1__DURABILITY__DURABILITY_ASYNC;
  expect_open_refused(&request, QKV_FAILED_PRECONDITION, "durability is ASYNC, the daemon has no data-dir");
  request.durability = QKV__V1__DURABILITY__DURABILITY_SYNC;
  expect_open_refused(&request, QKV_FAILED_PRECONDITION, "durability is SYNC, the daemon has no data-dir");
  request = good_open();
  request.max_attention_error = 1.25;
  expect_open_refused(&request, bad, "max_attention_error is 1.25, allowed are 0 to 1");
  request.max_attention_error = -1;
  expect_open_refused(&request, bad, "max_attention_error is -1, allowed are 0 to 1");
}

static void limits_are_named_when_they_are_reached(void **state) {
  (void)state;
  kv_open(client, "second");
  Qkv__V1__OpenSessionRequest open = good_open();
  fixture_result result = kv_call(client, KV_METHOD("OpenSession"), &open.base);
  assert_int_equal(result.status, QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(result.text, "limit-sessions is 2"));
  fixture_free(&result);
  kv_close(client, "second");
}

static void sessions_that_are_not_there(void **state) {
  (void)state;
  Qkv__V1__GetSessionRequest get = QKV__V1__GET_SESSION_REQUEST__INIT;
  get.session = (char *)"gone";
  expect_refused(KV_METHOD("GetSession"), &get.base, QKV_NOT_FOUND, "no session gone");
  get.session = (char *)"";
  expect_refused(KV_METHOD("GetSession"), &get.base, QKV_INVALID_ARGUMENT, "session is empty");
  Qkv__V1__CloseSessionRequest close = QKV__V1__CLOSE_SESSION_REQUEST__INIT;
  close.session = (char *)"gone";
  expect_refused(KV_METHOD("CloseSession"), &close.base, QKV_NOT_FOUND, "no session gone");
  close.session = (char *)"w";
  close.keep = 1;
  expect_refused(KV_METHOD("CloseSession"), &close.base, QKV_FAILED_PRECONDITION,
                 "keep is set, the session w is in memory alone");
  Qkv__V1__TruncateRequest truncate = QKV__V1__TRUNCATE_REQUEST__INIT;
  truncate.session = (char *)"gone";
  expect_refused(KV_METHOD("Truncate"), &truncate.base, QKV_NOT_FOUND, "no session gone");
  const kv_item item = {.session = "gone", .tokens = 1, .queries = 1};
  expect_attend_refused(&item, QKV_NOT_FOUND, "items[0]: no session gone");
  const kv_item rows = {.session = "gone", .tokens = 1};
  expect_append_refused(&rows, 1, QKV_NOT_FOUND, "message 0: items[0]: no session gone");
  Qkv__V1__ListSessionsRequest list = QKV__V1__LIST_SESSIONS_REQUEST__INIT;
  list.page_size = 1001;
  expect_refused(KV_METHOD("ListSessions"), &list.base, QKV_INVALID_ARGUMENT, "page_size is 1001, at most 1000");
  list.page_size = 0;
  list.page_token = (char *)"?";
  expect_refused(KV_METHOD("ListSessions"), &list.base, QKV_INVALID_ARGUMENT,
                 "page_token has byte 0x3f at 0, allowed are letters, digits and ._:/@-");
}

static void truncate_of_layers_that_are_not_there(void **state) {
  (void)state;
  uint32_t layers[] = {0, 1, 2, 0};
  Qkv__V1__TruncateRequest request = QKV__V1__TRUNCATE_REQUEST__INIT;
  request.session = (char *)"w";
  request.layers = layers;
  request.n_layers = 4;
  expect_refused(KV_METHOD("Truncate"), &request.base, QKV_INVALID_ARGUMENT,
                 "layers has 4 entries, the model m has 3 layers");
  request.n_layers = 2;
  layers[1] = 3;  // behind a good one: that one is not truncated either
  fixture_result result = kv_call(client, KV_METHOD("Truncate"), &request.base);
  assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(result.text, "is 3, the model m has 3 layers"));
  fixture_free(&result);
}

// ---- Rows and queries ----

static void tensors_that_do_not_fit_the_model(void **state) {
  (void)state;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  raw_item raw;
  build(&raw);
  raw.k_dims[1] = 1;
  expect_raw_refused(&raw, bad, ".k.dims[1] is 1, the model m has 2 kv_heads");
  build(&raw);
  raw.k_dims[2] = 8;
  expect_raw_refused(&raw, bad, ".k.dims[2] is 8, the model m has key_dim 16");
  build(&raw);
  raw.v_dims[2] = 16;
  expect_raw_refused(&raw, bad, ".v.dims[2] is 16, the model m has value_dim 24");
  build(&raw);
  raw.item.k = NULL;
  raw.item.v = NULL;
  raw.q_dims[1] = 2;
  expect_raw_refused(&raw, bad, ".q.dims[1] is 2, the model m has 4 q_heads");
  build(&raw);
  raw.item.k = NULL;
  raw.item.v = NULL;
  raw.q_dims[2] = 8;
  expect_raw_refused(&raw, bad, ".q.dims[2] is 8, the model m has key_dim 16");
  build(&raw);
  raw.k.dtype = QKV__V1__DTYPE__DTYPE_UNSPECIFIED;
  expect_raw_refused(&raw, bad, ".k.dtype is 0, known are 1 (fp32), 2 (fp16) and 3 (bf16)");
  build(&raw);
  raw.k.strides = raw.k_strides;
  raw.k.n_strides = 3;
  raw.k_strides[0] = -128;
  raw.k_strides[1] = 64;
  raw.k_strides[2] = 4;
  expect_raw_refused(&raw, bad, ".k.strides[0] is -128, at least 0");
  raw.item.q = &raw.q;
  raw.k_strides[0] = 1000;
  expect_raw_refused(&raw, bad, ".k.data is 256 bytes, its dims and strides reach 1128");
  build(&raw);
  raw.k.n_dims = 0;
  expect_raw_refused(&raw, bad, ".k.dims has 0 entries, expected are 3");
  build(&raw);
  raw.k.shared_memory_region = (char *)"r";
  expect_raw_refused(&raw, QKV_UNIMPLEMENTED,
                     ".k.shared_memory_region is set, this daemon runs without --allow-client-shm");
  build(&raw);
  raw.item.layer = 3;
  expect_raw_refused(&raw, bad, ".layer is 3, the model m has 3 layers");
}

static void rows_that_are_no_numbers(void **state) {
  (void)state;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  raw_item raw;
  build(&raw);
  raw.k_data[KV_HEADS * KV_KEY_DIM + KV_KEY_DIM + 5] = __builtin_nanf("");
  expect_raw_refused(&raw, bad, ".k[1, 1, 5] is nan");
  build(&raw);
  raw.v_data[3] = -__builtin_inff();
  expect_raw_refused(&raw, bad, ".v[0, 0, 3] is inf");
  build(&raw);
  raw.v_data[0] = 40000;
  expect_raw_refused(&raw, bad, ".v[0, 0, 0] is 40000, allowed are -32768 to 32768");
  // Queries are checked before the rows of their item are appended.
  build(&raw);
  raw.q_data[KV_KEY_DIM * 3 + 5] = __builtin_inff();
  Qkv__V1__Item *items[1] = {&raw.item};
  Qkv__V1__AttendRequest attend = QKV__V1__ATTEND_REQUEST__INIT;
  attend.n_items = 1;
  attend.items = items;
  expect_refused(KV_METHOD("Attend"), &attend.base, bad, "items[0].q[0, 3, 5] is inf");
}

static void positions_that_do_not_fit(void **state) {
  (void)state;
  const kv_item gap = {.session = "w", .position = 71, .tokens = 1, .seed = 1};
  expect_append_refused(&gap, 1, QKV_FAILED_PRECONDITION,
                        "message 0: items[0].position is 71, the expected position is 70");
  // Other rows at positions that are held: in the exact tail, and in a sealed page.
  const kv_item other = {.session = "w", .position = 60, .tokens = 20, .seed = 99};
  expect_append_refused(&other, 1, QKV_ALREADY_EXISTS, "message 0: items[0]: position 60 holds other rows already");
  const kv_item sealed = {.session = "w", .layer = 1, .position = 10, .tokens = 200, .seed = 99};
  expect_append_refused(&sealed, 1, QKV_ALREADY_EXISTS, "message 0: items[0]: position 10 holds other rows already");
  const kv_item end = {.session = "w", .position = UINT64_MAX, .tokens = 1, .seed = 1};
  char text[FIXTURE_TEXT_MAX];
  assert_int_equal(kv_append(client, &end, 1, text), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(text, "message 0: items[0].position is 18446744073709551615"));
}

static void options_that_do_not_fit(void **state) {
  (void)state;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  Qkv__V1__AttendOptions options = QKV__V1__ATTEND_OPTIONS__INIT;
  const kv_item item = {.session = "w", .queries = 1, .options = &options};
  options.scale = __builtin_nan("");
  expect_attend_refused(&item, bad, "items[0].options.scale is nan");
  options.scale = 0;
  options.not_causal = 1;
  options.sliding_window = 5;
  expect_attend_refused(&item, bad, "items[0].options.not_causal excludes a sliding window");
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  options = (Qkv__V1__AttendOptions)QKV__V1__ATTEND_OPTIONS__INIT;
  options.range = &range;
  range.begin = 9;
  range.end = 4;
  expect_attend_refused(&item, bad, "items[0].options.range.begin is 9, at most range.end 4");
}

// The answer, too, has a limit: a query's out is 4 bytes an element however it came.
static void results_beyond_the_message_limit(void **state) {
  (void)state;
  raw_item raw;
  build(&raw);
  raw.item.k = NULL;
  raw.item.v = NULL;
  int64_t strides[3] = {0, KV_KEY_DIM * 4, 4};
  raw.q.strides = strides;
  raw.q.n_strides = 3;
  raw.q_dims[0] = 1000;  // 256000 bytes as dense rows; 384000 of out, 16000 of lse
  expect_raw_refused(&raw, QKV_INVALID_ARGUMENT,
                     ".q.dims[0] is 1000, the results up to here take 400000 bytes, limit-message is 262144");
  raw.q_dims[0] = 1025;
  expect_raw_refused(&raw, QKV_INVALID_ARGUMENT, ".q.dims are [1025, 4, 16], 262400 bytes, limit-message is 262144");
}

// ---- Whole requests ----

static void requests_of_nothing_or_too_much(void **state) {
  (void)state;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  Qkv__V1__AttendRequest empty = QKV__V1__ATTEND_REQUEST__INIT;
  expect_refused(KV_METHOD("Attend"), &empty.base, bad, "items is empty, at least 1");
  expect_refused(KV_METHOD("Append"), &empty.base, bad, "message 0: items is empty, at least 1");
  kv_item items[9];
  for (size_t i = 0; i < 9; i++) items[i] = (kv_item){.session = "w", .layer = 2, .position = i, .tokens = 1};
  expect_append_refused(items, 9, bad, "message 0: items has 9 entries, limit-items is 8");
  const kv_item nothing = {.session = "w"};
  expect_attend_refused(&nothing, bad, "items[0].q is missing, and so are k and v: nothing to do");
  expect_append_refused(&nothing, 1, bad, "message 0: items[0].k is missing, Append takes k and v");
  const kv_item queries = {.session = "w", .layer = 2, .tokens = 1, .queries = 1};
  expect_append_refused(&queries, 1, bad, "message 0: items[0].q is set, Append takes k and v only");

  // An Append without any message.
  fixture_stream *stream = fixture_open(client, KV_METHOD("Append"), FIXTURE_PATIENCE_MS);
  fixture_half_close(stream);
  fixture_result result = fixture_finish(&stream);
  assert_int_equal(result.status, bad);
  assert_string_equal(result.text, "the call of /qkv.v1.KvCache/Append has no message, 1 is needed");

  // Larger than limit-message: gRPC itself refuses it.
  uint8_t *large = calloc(1, 300000);
  result = fixture_call(client, KV_METHOD("Attend"), large, 300000, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(result.text, "300000 vs. 262144"));
  free(large);
}

static void bytes_that_are_no_messages(void **state) {
  (void)state;
  static const char *const methods[] = {"RegisterModel", "GetModel",   "ListModels",   "OpenSession",
                                        "CloseSession",  "GetSession", "ListSessions", "Append",
                                        "Attend",        "Decode",     "Fetch",        "Truncate"};
  static const uint8_t truncated[] = {0x0a, 0x20, 'w'}, garbage[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x07, 0x00};
  for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++) {
    char path[64];
    (void)snprintf(path, sizeof path, "/qkv.v1.KvCache/%s", methods[i]);
    fixture_result result = fixture_call(client, path, truncated, sizeof truncated, FIXTURE_PATIENCE_MS);
    assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
    assert_non_null(strstr(result.text, "truncated"));
    fixture_free(&result);
    result = fixture_call(client, path, garbage, sizeof garbage, FIXTURE_PATIENCE_MS);
    assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
    assert_int_not_equal(result.text[0], 0);
    fixture_free(&result);
  }
}

// A name must not be cut at a NUL: it would name another session.
static void strings_with_a_nul_byte(void **state) {
  (void)state;
  static const uint8_t close[] = {0x0a, 5, 'w', 0, 'x', 'y', 'z'}, registered[] = {0x0a, 5, 0x0a, 3, 'm', 0, '2'};
  fixture_result result = fixture_call(client, KV_METHOD("CloseSession"), close, sizeof close, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
  assert_string_equal(result.text, "session holds a NUL byte");
  fixture_free(&result);
  result = fixture_call(client, KV_METHOD("RegisterModel"), registered, sizeof registered, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
  assert_string_equal(result.text, "name holds a NUL byte");
  fixture_free(&result);
}

// ---- Streams ----

static bool send_items(fixture_stream *stream, const kv_item *items, size_t count) {
  uint8_t *bytes = NULL;
  size_t length = kv_pack(items, count, 0, &bytes);
  bool sent = fixture_send(stream, bytes, length);
  free(bytes);
  return sent;
}

// The first item that fails ends the call and the error names it; earlier items stay.
static void append_ends_at_the_first_bad_item(void **state) {
  (void)state;
  kv_open(client, "s");
  fixture_stream *stream = fixture_open(client, KV_METHOD("Append"), FIXTURE_PATIENCE_MS);
  const kv_item first = {.session = "s", .tokens = 3, .seed = 4};
  const kv_item second[] = {{.session = "s", .position = 3, .tokens = 2, .seed = 4},
                            {.session = "s", .layer = 1, .position = 8, .tokens = 1, .seed = 4},
                            {.session = "s", .layer = 2, .tokens = 1, .seed = 4}};
  assert_true(send_items(stream, &first, 1));
  assert_true(send_items(stream, second, 3));
  fixture_result result = fixture_finish(&stream);
  assert_int_equal(result.status, QKV_FAILED_PRECONDITION);
  assert_string_equal(result.text, "message 1: items[1].position is 8, the expected position is 0");
  assert_int_equal(kv_length(client, "s", 0), 5);
  assert_int_equal(kv_length(client, "s", 1), 0);
  assert_int_equal(kv_length(client, "s", 2), 0);
  kv_close(client, "s");
}

static void a_malformed_request_ends_a_decode_stream(void **state) {
  (void)state;
  fixture_stream *stream = fixture_open(client, KV_METHOD("Decode"), FIXTURE_PATIENCE_MS);
  const kv_item query = {.session = "w", .position = 70, .queries = 1};
  uint8_t *answer = NULL;
  size_t length = 0;
  assert_true(send_items(stream, &query, 1));
  assert_true(fixture_receive(stream, &answer, &length));
  free(answer);
  assert_true(fixture_send(stream, "\x0a\x50", 2));
  assert_false(fixture_receive(stream, &answer, &length));
  fixture_result result = fixture_finish(&stream);
  assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
  assert_string_equal(result.text, "truncated protobuf");
}

// ---- Fetch ----

static void fetches_that_do_not_fit(void **state) {
  (void)state;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  const Qkv__V1__FetchRequest init = QKV__V1__FETCH_REQUEST__INIT;
  Qkv__V1__FetchRequest request = init;
  request.session = (char *)"";
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "session is empty");
  request.session = (char *)"gone";
  expect_refused(KV_METHOD("Fetch"), &request.base, QKV_NOT_FOUND, "no session gone");
  request.session = (char *)"w";
  request.dtype = (Qkv__V1__DType)4;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "dtype is 4, known are 0 to 3");
  request.dtype = QKV__V1__DTYPE__DTYPE_UNSPECIFIED;
  request.layout = (Qkv__V1__RowLayout)3;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "layout is 3, known are 0 to 2");
  request.layout = QKV__V1__ROW_LAYOUT__ROW_LAYOUT_UNSPECIFIED;
  request.part = (Qkv__V1__FetchRequest__Part)-1;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "part is -1, known are 0 to 2");
  request.part = QKV__V1__FETCH_REQUEST__PART__PART_BOTH;
  request.rope = (Qkv__V1__RopeForm)3;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "rope is 3, known are 0 to 2");
  request.rope = QKV__V1__ROPE_FORM__ROPE_FORM_UNSPECIFIED;
  request.coded = 1;
  request.part = QKV__V1__FETCH_REQUEST__PART__PART_K;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "part is 1, pages have both (coded is set)");
  request.part = QKV__V1__FETCH_REQUEST__PART__PART_BOTH;
  request.coded = 0;
  uint32_t layers[] = {0, 3, 1, 1};
  request.layers = layers;
  request.n_layers = 2;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "layers[1] is 3, the model m has 3 layers");
  request.n_layers = 4;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "layers has 4 entries, the model m has 3 layers");
  request.n_layers = 0;
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  range.begin = 8;
  range.end = 7;
  request.range = &range;
  expect_refused(KV_METHOD("Fetch"), &request.base, bad, "range.begin is 8, at most range.end 7");
}

int main(void) {
#define BAD(test) cmocka_unit_test_teardown(test, nothing_has_changed)
  const struct CMUnitTest tests[] = {
      BAD(models_out_of_their_limits),        BAD(models_that_are_not_there_or_taken),
      BAD(sessions_that_cannot_be_opened),    BAD(limits_are_named_when_they_are_reached),
      BAD(sessions_that_are_not_there),       BAD(truncate_of_layers_that_are_not_there),
      BAD(tensors_that_do_not_fit_the_model), BAD(rows_that_are_no_numbers),
      BAD(positions_that_do_not_fit),         BAD(options_that_do_not_fit),
      BAD(results_beyond_the_message_limit),  BAD(requests_of_nothing_or_too_much),
      BAD(bytes_that_are_no_messages),        BAD(strings_with_a_nul_byte),
      BAD(append_ends_at_the_first_bad_item), BAD(a_malformed_request_ends_a_decode_stream),
      BAD(fetches_that_do_not_fit),
  };
#undef BAD
  return cmocka_run_group_tests(tests, start, stop);
}
